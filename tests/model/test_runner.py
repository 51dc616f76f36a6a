"""Logits of rows: chains, trees, rows that ask for no logits."""

from __future__ import annotations

import pytest
import torch

import models
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.batch import Row
from forethought.model.loader import load
from forethought.model.runner import ModelRunner

PREFIX = [11, 12, 13, 14, 15, 16, 17, 18, 19]
#        0
#      1   2
#     3 4  5
TREE, PARENTS = [31, 32, 33, 34, 35, 36], (-1, 0, 0, 1, 1, 2)
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]
ARCHITECTURES = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]


def new_runner(architecture: str, attention: str = "sdpa") -> tuple[ModelRunner, PagePool]:
    lm = load(models.tiny(architecture), attention=attention)
    pool = PagePool(64, 3)
    return ModelRunner(lm, KvStorage(lm.layer_shapes, pool.num_pages, 3, lm.dtype)), pool


def chain(runner: ModelRunner, pool: PagePool, tokens: list[int], wanted: int = 1) -> torch.Tensor:
    """Logits after the last ``wanted`` tokens of one row that computes everything."""
    table = PageTable(pool)
    table.append(len(tokens))
    logits = runner.forward([Row(tokens, 0, table, logits_from=len(tokens) - wanted)])
    table.release()
    return logits


def stored_prefix(runner: ModelRunner, pool: PagePool) -> PageTable:
    table = PageTable(pool)
    table.append(len(PREFIX))
    assert runner.forward([Row(PREFIX, 0, table, logits_from=len(PREFIX))]).shape[0] == 0
    return table


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_node_of_a_tree_has_the_logits_of_its_path(architecture: str, attention: str) -> None:
    runner, pool = new_runner(architecture, attention)
    table = stored_prefix(runner, pool)
    table.append(len(TREE))
    other = PageTable(pool)
    other.append(4)
    rows = [Row([5, 6, 7, 8], 0, other), Row(TREE, len(PREFIX), table, PARENTS)]
    logits = runner.forward(rows)[4:]
    for node, path in enumerate(PATHS):
        expected = chain(runner, pool, PREFIX + [TREE[node] for node in path])
        torch.testing.assert_close(logits[node], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decoding_goes_on_from_the_accepted_path_of_a_tree(architecture: str) -> None:
    runner, pool = new_runner(architecture)
    table = stored_prefix(runner, pool)
    table.append(len(TREE))
    runner.forward([Row(TREE, len(PREFIX), table, PARENTS)])
    runner.storage.move_slots(table.keep_path(len(PREFIX), PATHS[5]))
    table.append(1)
    logits = runner.forward([Row([50], table.length - 1, table)])
    expected = chain(runner, pool, [*PREFIX, *(TREE[node] for node in PATHS[5]), 50])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_logits_are_float32_whatever_the_model_computes_in() -> None:
    lm = load(models.tiny("llama"), dtype="bfloat16")
    pool = PagePool(8, 4)
    runner = ModelRunner(lm, KvStorage(lm.layer_shapes, 8, 4, lm.dtype))
    assert chain(runner, pool, PREFIX, wanted=2).dtype == torch.float32


def test_only_wanted_logits_are_returned_in_the_order_of_the_rows() -> None:
    runner, pool = new_runner("qwen3")
    every = [chain(runner, pool, tokens, wanted=3) for tokens in ([3, 4, 5], [6, 7, 8])]
    tables = [PageTable(pool) for _ in every]
    for table in tables:
        table.append(3)
    rows = [Row([3, 4, 5], 0, tables[0], logits_from=2), Row([6, 7, 8], 0, tables[1])]
    logits = runner.forward(rows)
    torch.testing.assert_close(logits, torch.cat([every[0][2:], every[1]]), rtol=1e-4, atol=1e-4)
