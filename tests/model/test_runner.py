"""Logits of rows: chains, trees, rows that ask for no logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

import models
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.batch import Row
from forethought.model.loader import load
from forethought.model.runner import DecodedTokens, DecodeRow, ModelRunner
from forethought.model.sampling import NO_TOKEN

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


# ---- several decode steps in one call --------------------------------------------------------

NATIVE = ["llama", "llama_tied_biased", "mistral", "qwen2", "qwen3_moe", "gemma3", "phi3"]


def decode_runner(
    architecture: str, dtype: str = "float32", path: Path | None = None
) -> tuple[ModelRunner, PagePool]:
    lm = load(path or models.tiny(architecture), dtype=dtype, forward="native")
    pool = PagePool(64, 3)
    return ModelRunner(lm, KvStorage(lm.layer_shapes, pool.num_pages, 3, lm.dtype)), pool


def decode_rows(
    runner: ModelRunner, pool: PagePool, sizes: Sequence[int], ends: Collection[int] = ()
) -> list[DecodeRow]:
    """Behind prompts of several lengths, stored, whose pages lie apart and in turns."""
    stored = models.prompts((1, 7, 20, 5))[: len(sizes)]
    tables = [PageTable(pool) for _ in stored]
    for length in range(1, 30):
        for table, prompt, size in zip(tables, stored, sizes, strict=True):
            table.append(length <= len(prompt) + size - 1)
    rows = []
    for table, prompt, size in zip(tables, stored, sizes, strict=True):
        known = prompt[:-1]
        if known:
            runner.forward([Row(known, 0, table.prefix(len(known)), logits_from=len(known))])
        rows.append(DecodeRow(prompt[-1], len(known), table, size, ends))
    return rows


def stored_values(runner: ModelRunner, rows: Sequence[DecodeRow]) -> list[torch.Tensor]:
    slots = [slot for row in rows for slot in row.table.slots(0, row.table.length)]
    return [layer[slots] for layer in (*runner.storage.keys, *runner.storage.values)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(9,), (9, 9, 9), (10, 8, 3, 1)])
@pytest.mark.parametrize("architecture", NATIVE)
def test_native_decode_steps_are_those_of_single_forwards_to_the_last_bit(
    architecture: str, sizes: Sequence[int], dtype: str
) -> None:
    found = []
    for single in (True, False):
        runner, pool = decode_runner(architecture, dtype)
        rows = decode_rows(runner, pool, sizes)
        decoded = runner.decode_by_forwards(rows) if single else runner.decode(rows)
        assert [len(tokens) for tokens in decoded.tokens] == list(sizes)
        assert decoded.num_forwards == sizes[0]
        found.append((decoded, stored_values(runner, rows)))
    assert found[0][0] == found[1][0]
    for one, other in zip(*(values for _, values in found), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rows_end_behind_their_ends_and_the_call_with_the_last_of_them(architecture: str) -> None:
    sizes = 12, 12, 6
    free = decode_runner(architecture)
    tokens = free[0].decode(decode_rows(*free, sizes)).tokens
    for ends in ({tokens[0][2]}, {tokens[0][4], tokens[1][3], tokens[2][1]}, {tokens[2][5]}):
        expected = []
        for own in tokens:
            size = next((n for n, token in enumerate(own, 1) if token in ends), len(own))
            expected.append(own[:size])
        for name in ("decode", "decode_by_forwards"):
            runner, pool = decode_runner(architecture)
            decoded = getattr(runner, name)(decode_rows(runner, pool, sizes, ends))
            assert decoded == DecodedTokens(expected, max(map(len, expected))), name


def with_head(path: Path, change: Callable[[torch.Tensor], None]) -> Path:
    """The tiny model, whose output projection ``[vocab, hidden]`` is changed in place."""
    module = type(models.transformers_model(models.tiny("llama"))).from_pretrained(
        models.tiny("llama")
    )
    change(module.lm_head.weight.data)
    module.save_pretrained(path)
    return path


@pytest.mark.parametrize("token", [0, 7, 63, 99, 100])
def test_no_token_is_decoded_where_the_largest_logit_is_not_finite(
    token: int, tmp_path: Path
) -> None:
    """Infinity of either sign: -inf is a logit like others, of a token that is never decoded."""
    firsts = []
    for number, value in enumerate((math.nan, math.inf, -math.inf)):

        def change(head: torch.Tensor) -> None:
            head[token] = 0.0
            head[token, 0] = value  # noqa: B023

        path, results = with_head(tmp_path / str(number), change), []
        for name in ("decode", "decode_by_forwards"):
            with mock.patch("forethought.model.loader.check_values"):  # it would be refused
                runner, pool = decode_runner("llama", path=path)
            results.append(getattr(runner, name)(decode_rows(runner, pool, (5, 4))))
        assert results[0] == results[1]
        assert results[0].num_forwards == max(map(len, results[0].tokens))
        firsts.append([tokens[0] for tokens in results[0].tokens])
    assert firsts[0] == [NO_TOKEN, NO_TOKEN]
    for first in zip(*firsts[1:], strict=True):
        assert sorted(first)[0] == NO_TOKEN < sorted(first)[1]


@pytest.mark.parametrize("others", [(3, 90), (99, 100), (0, 100)])
def test_of_tokens_with_equal_logits_the_first_is_decoded(
    others: tuple[int, int], tmp_path: Path
) -> None:
    free = decode_runner("llama")
    (best,) = free[0].decode(decode_rows(*free, (1,))).tokens[0]

    def change(head: torch.Tensor) -> None:
        for other in others:
            head[other] = head[best]

    runner, pool = decode_runner("llama", path=with_head(tmp_path, change))
    rows = decode_rows(runner, pool, (1,))
    assert runner.decode(rows).tokens == [[min(best, *others)]]
    assert runner.decode_by_forwards(rows).tokens == [[min(best, *others)]]
