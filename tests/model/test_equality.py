"""Greedy decoding over pages equals transformers' ``generate``, token for token, in float32."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

import models
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.batch import Row
from forethought.model.loader import load
from forethought.model.runner import Runner

NEW_TOKENS = 16
NUM_TOKENS = 480


@dataclass
class Sequence:
    """The least that decodes: tokens, a page table, and how many tokens have been computed."""

    prompt: list[int]
    table: PageTable
    output: list[int] = field(default_factory=list)

    def row(self, limit: int) -> Row:
        tokens, start = self.prompt + self.output, self.table.length
        chunk = tokens[start : start + limit]
        assert not self.table.append(len(chunk))
        wanted = len(chunk) - 1 if start + len(chunk) == len(tokens) else len(chunk)
        return Row(chunk, start, self.table, logits_from=wanted)


def decode(runner: Runner, sequences: list[Sequence], new_tokens: int, chunk: int) -> None:
    """Greedy decoding of all sequences together; prompts enter in pieces of ``chunk`` tokens."""
    while unfinished := [s for s in sequences if len(s.output) < new_tokens]:
        rows = [s.row(chunk) for s in unfinished]
        chosen = iter(runner.forward(rows).argmax(-1).tolist())
        for sequence, row in zip(unfinished, rows, strict=True):
            if row.logits_from < len(row.tokens):
                sequence.output.append(next(chosen))


def new_runner(architecture: str, page_size: int, attention: str = "sdpa", fuse: bool = True):
    lm = load(models.tiny(architecture), attention=attention, fuse=fuse)
    pool = PagePool(NUM_TOKENS // page_size, page_size)
    return Runner(lm, KvStorage(lm.layer_shapes, pool.num_pages, page_size, lm.dtype)), pool


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_greedy_equals_generate(architecture: str, chunk: int, page_size: int) -> None:
    runner, pool = new_runner(architecture, page_size)
    prompts = models.prompts()
    sequences = [Sequence(prompt, PageTable(pool)) for prompt in prompts]
    decode(runner, sequences, NEW_TOKENS, chunk)
    expected = models.greedy(models.tiny(architecture), prompts, NEW_TOKENS)
    assert [s.output for s in sequences] == expected
