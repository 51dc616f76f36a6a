"""Each implementation of ``advance`` gives what as many calls of the reference for one step give.

Here without drafts; with drafts in ``test_chain_steps.py`` and ``test_chain_rounds.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import adapters
import models
from forethought.backends.cpu import library
from forethought.backends.cpu.native_steps import NativeSteps
from forethought.config.sampling import SamplingParams
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.adapter import read_adapter
from forethought.model.batch import Row
from forethought.model.hidden_states import HiddenStateReader
from forethought.model.loader import load
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.step_runner import (
    Advance,
    DecodeRow,
    QueuedSteps,
    SingleSteps,
    StepRunner,
)
from turns import by_turns

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)

NATIVE = ["llama", "llama_tied_biased", "mistral", "qwen2", "qwen3_moe", "gemma3", "phi3"]
GREEDY = SamplingParams(temperature=0.0)


def reference(runner: ModelRunner) -> StepRunner:
    return SingleSteps(runner, None)


def native(runner: ModelRunner) -> StepRunner:
    steps = NativeSteps.of(runner, None, [])
    assert steps is not None
    return steps


class HostRunner(ModelRunner):
    """On a CPU, where a batch does not take tokens from the device."""

    def forward(
        self, rows: Sequence[Row], readers: Sequence[HiddenStateReader] = ()
    ) -> torch.Tensor:
        rows = [
            row if row.drafted is None else replace(row, tokens=row.drafted.tolist(), drafted=None)
            for row in rows
        ]
        return super().forward(rows, readers)


def queued(runner: ModelRunner) -> StepRunner:
    return QueuedSteps(HostRunner(runner.lm, runner.storage))


IMPLEMENTATIONS: list[Callable[[ModelRunner], StepRunner]] = [reference, native, queued]


def new_runner(
    architecture: str, dtype: str = "float32", path: Path | None = None
) -> tuple[ModelRunner, PagePool]:
    lm = load(path or models.tiny(architecture), dtype=dtype, forward="native")
    pool = PagePool(64, 3)
    return ModelRunner(lm, KvStorage(lm.layer_shapes, pool.num_pages, 3, lm.dtype)), pool


def decode_row(
    tokens: Sequence[int],
    table: PageTable,
    num_left: int,
    ends: Collection[int],
    num_known: int = 1,
) -> DecodeRow:
    request = DraftRequest(0, tokens, 0, GREEDY, group=0, index=0, seed=0)
    return DecodeRow(request, table, 0, num_left, ends, num_known=num_known)


def stored_rows(
    runner: ModelRunner,
    pool: PagePool,
    sizes: Sequence[int],
    ends: Collection[int] = (),
    num_known: Sequence[int] = (1, 1, 1, 1),
) -> list[DecodeRow]:
    """After prompts of several lengths, stored up to the last ``num_known`` tokens, whose pages lie
    apart and in turns.
    """
    stored = models.prompts((1, 7, 20, 5))[: len(sizes)]
    tables = [PageTable(pool) for _ in stored]
    for length in range(1, 30):
        for table, prompt, size in zip(tables, stored, sizes, strict=True):
            table.append(length <= len(prompt) + size - 1)
    rows = []
    for table, prompt, size, count in zip(tables, stored, sizes, num_known, strict=False):
        known = prompt[:-count]
        if known:
            runner.forward([Row(known, 0, table.prefix(len(known)), logits_from=len(known))])
        rows.append(decode_row(prompt, table, size, ends, count))
    return rows


def single_calls(runner: ModelRunner, rows: Sequence[DecodeRow], num_steps: int) -> Advance:
    """What calls of the reference for one step each give."""
    going, results = dict(enumerate(rows)), [[] for _ in rows]
    num_forwards = 0
    while going and num_forwards < num_steps:
        advance = SingleSteps(runner, None).advance(list(going.values()), 1)
        num_forwards += advance.num_forwards
        for (number, row), steps in zip(list(going.items()), advance.results, strict=True):
            results[number] += steps
            tokens = [token for step in steps for token in step.tokens]
            del going[number]
            if tokens and row.num_left > 1 and tokens[-1] not in row.ends:
                known = [*row.request.tokens, *tokens]
                going[number] = decode_row(known, row.table, row.num_left - 1, row.ends)
    return Advance(results, num_forwards)


def stored_values(runner: ModelRunner, rows: Sequence[DecodeRow]) -> list[torch.Tensor]:
    slots = [slot for row in rows for slot in row.table.slots(0, row.table.length)]
    return [layer[slots] for layer in (*runner.storage.keys, *runner.storage.values)]


def tokens_of(advance: Advance) -> list[list[int]]:
    return [[token for step in steps for token in step.tokens] for steps in advance.results]


@pytest.mark.parametrize(
    ("architecture", "sizes", "dtype"),
    by_turns(NATIVE, [(9,), (9, 9, 9), (10, 8, 3, 1)], ["float32", "bfloat16"]),
)
def test_several_steps_are_those_of_single_calls_to_the_last_bit(
    architecture: str, sizes: Sequence[int], dtype: str
) -> None:
    runner, pool = new_runner(architecture, dtype)
    rows = stored_rows(runner, pool, sizes)
    expected = single_calls(runner, rows, 20)
    assert [len(results) for results in expected.results] == list(sizes)
    values = stored_values(runner, rows)
    for implementation in IMPLEMENTATIONS:
        runner, pool = new_runner(architecture, dtype)
        rows = stored_rows(runner, pool, sizes)
        assert implementation(runner).advance(rows, 20) == expected
        for value, other in zip(values, stored_values(runner, rows), strict=True):
            assert torch.equal(value, other)


def test_several_steps_of_rows_with_adapters_are_those_of_single_steps() -> None:
    advances = list[Advance]()
    file = adapters.adapter(adapters.new_directory(), models.tiny("llama"))
    for implementation in (reference, native, queued):
        runner, pool = new_runner("llama")
        placed = runner.lm.place(read_adapter("a", file))
        rows = stored_rows(runner, pool, (9, 9, 3))
        rows = [replace(row, adapter=placed if row is rows[1] else None) for row in rows]
        advances.append(implementation(runner).advance(rows, 20))
    assert advances[0] == advances[1] == advances[2]
    runner, pool = new_runner("llama")
    plain = native(runner).advance(stored_rows(runner, pool, (9, 9, 3)), 20)
    assert plain.results[1] != advances[0].results[1]
    assert plain.results[::2] == advances[0].results[::2]


@pytest.mark.parametrize("architecture", NATIVE)
def test_the_first_step_computes_all_known_tokens_that_are_not_stored(architecture: str) -> None:
    sizes = 9, 9, 3, 1
    runner, pool = new_runner(architecture)
    rows = stored_rows(runner, pool, sizes)
    expected, values = single_calls(runner, rows, 20), stored_values(runner, rows)
    for implementation in (reference, native):
        runner, pool = new_runner(architecture)
        rows = stored_rows(runner, pool, sizes, num_known=(1, 4, 20, 2))
        assert implementation(runner).advance(rows, 20) == expected
        for value, other in zip(values, stored_values(runner, rows), strict=True):
            assert torch.equal(value, other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_more_steps_are_made_than_asked_for(
    implementation: Callable[[ModelRunner], StepRunner],
) -> None:
    runner, pool = new_runner("llama")
    rows = stored_rows(runner, pool, (9, 9, 2))
    advance = implementation(runner).advance(rows, 4)
    assert advance == single_calls(runner, rows, 4)
    assert [len(results) for results in advance.results] == [4, 4, 2]
    assert advance.num_forwards == 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_row_ends_with_a_token_that_ends_it(
    architecture: str, implementation: Callable[[ModelRunner], StepRunner]
) -> None:
    sizes = 12, 12, 6
    runner, pool = new_runner(architecture)
    tokens = tokens_of(implementation(runner).advance(stored_rows(runner, pool, sizes), 12))
    for ends in ({tokens[0][2]}, {tokens[0][4], tokens[1][3], tokens[2][1]}, {tokens[2][5]}):
        runner, pool = new_runner(architecture)
        rows = stored_rows(runner, pool, sizes, ends)
        advance, expected = implementation(runner).advance(rows, 12), single_calls(runner, rows, 12)
        assert advance.results == expected.results
        assert implementation is queued or advance.num_forwards == expected.num_forwards
        for free, decoded in zip(tokens, tokens_of(advance), strict=True):
            size = next((n for n, token in enumerate(free, 1) if token in ends), len(free))
            assert decoded == free[:size]


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

        path, advances = with_head(tmp_path / str(number), change), []
        for implementation in IMPLEMENTATIONS:
            with mock.patch(
                "forethought.model.checkpoint_tensors.check_values"
            ):  # it would be refused
                runner, pool = new_runner("llama", path=path)
            advances.append(implementation(runner).advance(stored_rows(runner, pool, (5, 4)), 5))
        assert advances[0] == advances[1]
        assert advances[0].results == advances[2].results
        firsts.append([steps[:1] for steps in advances[0].results])
    assert firsts[0] == [[], []]
    for first in zip(*firsts[1:], strict=True):
        assert sorted(map(len, first)) == [0, 1]


@pytest.mark.parametrize("others", [(3, 90), (99, 100), (0, 100)])
def test_of_tokens_with_equal_logits_the_first_is_decoded(
    others: tuple[int, int], tmp_path: Path
) -> None:
    runner, pool = new_runner("llama")
    rows = stored_rows(runner, pool, (1,))
    ((best,),) = tokens_of(reference(runner).advance(rows, 1))

    def change(head: torch.Tensor) -> None:
        for other in others:
            head[other] = head[best]

    runner, pool = new_runner("llama", path=with_head(tmp_path, change))
    rows = stored_rows(runner, pool, (1,))
    for implementation in IMPLEMENTATIONS:
        assert tokens_of(implementation(runner).advance(rows, 1)) == [[min(best, *others)]]
