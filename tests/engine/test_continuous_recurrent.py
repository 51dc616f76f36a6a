"""Several decode steps of models with recurrent layers in one call leave what single steps leave:
tokens, scores, keys, and the states of the layers, to the last bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import adapters
from engines import GREEDY, drain, engine_over, expect_empty, load_poisoned, outputs
from forethought.config.sampling import SamplingParams
from forethought.engine.engine import Engine
from forethought.errors import LogitsError
from forethought.kv.pool import PagePool
from forethought.kv.recurrent import NUM_DECODED, RecurrentStorage
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.adapter import read_adapter
from forethought.model.causal_lm import CausalLM, TransformersNetwork
from models import ALL_RECURRENT, greedy, tiny
from recurrent_generations import PROMPTS, count_calls, facts, mixed, run, states_of
from turns import by_turns

FEW = ["qwen3_5", "bamba", "lfm2"]
SAMPLED = GREEDY.replace(temperature=0.9, seed=5)


@functools.cache
def loaded(architecture: str, dtype: str, quantization: loader.Quantization | None) -> CausalLM:
    return loader.load(tiny(architecture), dtype=dtype, quantization=quantization, forward="auto")


def made(
    num_steps: int,
    architecture: str,
    dtype: str = "float32",
    quantization: loader.Quantization | None = None,
    **settings: Any,
) -> Engine:
    """An engine that makes up to so many decode steps at once."""
    lm = loaded(architecture, dtype, quantization)
    machine = engine_over(lm, **{"pages": 400, "max_num_tokens": 60, **settings})
    machine.num_decode_steps = num_steps
    return machine


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The forwards of each call of several steps in C++."""
    return count_calls(monkeypatch, drafting=False)


KINDS = by_turns(ALL_RECURRENT, ["float32", "bfloat16"], [None, "w8a8", "int8"], every=2)


@pytest.mark.parametrize(
    "num_steps",
    [7, pytest.param(2, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("architecture", "dtype", "quantization"), KINDS)
def test_tokens_scores_keys_and_states_are_those_of_single_steps(
    architecture: str,
    dtype: str,
    quantization: loader.Quantization | None,
    num_steps: int,
    calls: list[int],
) -> None:
    kind = architecture, dtype, quantization
    expected = run(made(1, *kind), PROMPTS, mixed(tiny(architecture), SAMPLED, 60))
    assert not calls
    assert run(made(num_steps, *kind), PROMPTS, mixed(tiny(architecture), SAMPLED, 60)) == expected
    assert max(calls) <= num_steps
    assert sum(calls) > 80
    assert any(len(each["states"]) > NUM_DECODED for each in expected)  # with those of pages


def test_steps_that_are_made_one_by_one_in_a_call_leave_the_same(calls: list[int]) -> None:
    """Of a module that is not one call."""
    lm = loaded("zamba2", "float32", None)
    assert isinstance(lm.network, TransformersNetwork)
    parts = CausalLM(replace(lm.network, whole=None), lm.backend, lm.traits)
    results = []
    for num_steps in (1, 8):
        machine = engine_over(parts, pages=400, max_num_tokens=60)
        machine.num_decode_steps = num_steps
        results.append(run(machine, PROMPTS, mixed(tiny("zamba2"), SAMPLED, 60)))
    assert results[0] == results[1]
    assert not calls


@pytest.mark.parametrize("max_states", [4, 100])
@pytest.mark.parametrize("architecture", FEW)
def test_states_are_used_and_dropped_in_the_order_of_single_steps(
    architecture: str, max_states: int, calls: list[int]
) -> None:
    """The second sequence ends with the step in which a page of the first one is full."""
    orders = []
    for num_steps in (1, 16, 200):
        machine = made(num_steps, architecture, pages=60, page_size=8, max_length=300)
        states_of(machine).max_states = max_states
        limits = {3: 201, 1: 35}
        first, second = (
            machine.add(PROMPTS[number], GREEDY.replace(max_tokens=limit), keep=True)[0]
            for number, limit in limits.items()
        )
        drain(machine)
        lengths = {
            each.table.slot(length - 1): (name, length)
            for name, each in (("first", first), ("second", second))
            for length in range(1, each.num_computed + 1)
        }
        orders.append([lengths[slot] for slot in states_of(machine)._by_slot])
        machine.close(first)
        machine.close(second)
        expect_empty(machine)
    assert orders[0] == orders[1] == orders[2]
    names = [("second", 51), ("first", 64)] if max_states == 100 else [("first", 192)]
    assert set(names) < set(orders[0])
    assert calls == [16] * 12 + [8, 200]


@pytest.mark.parametrize("architecture", FEW)
@pytest.mark.parametrize("pages", [40, 50, 60])
def test_a_small_pool_preempts_no_more_than_in_single_steps(
    architecture: str, pages: int, calls: list[int]
) -> None:
    counts, expected = [], greedy(tiny(architecture), PROMPTS, 40)
    for num_steps in (1, 8):
        machine = made(num_steps, architecture, pages=pages, max_batch_size=4)
        each = [machine.add(prompt, GREEDY.replace(max_tokens=40))[0] for prompt in PROMPTS]
        drain(machine)
        assert outputs(each) == expected
        stats = machine.stats
        counts.append((stats.preemptions, stats.dropped, stats.decoded, stats.failures))
        expect_empty(machine)
    assert counts[0] == counts[1]
    assert (counts[0][0] > 0) == (pages < 60)
    assert calls


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("architecture", FEW)
def test_what_was_generated_is_forked_rewound_extended_and_resumed_alike(
    architecture: str, params: SamplingParams, calls: list[int]
) -> None:
    results = []
    for num_steps in (1, 8):
        machine = made(num_steps, architecture)
        kept = [machine.add(prompt, params, keep=True)[0] for prompt in PROMPTS[:3]]
        machine.step()
        machine.step()
        machine.close(kept.pop())  # beside the others
        drain(machine)
        first, second = kept
        kept += [machine.fork(first, len(first.tokens) - back) for back in (0, 1, 2, 9)]
        machine.rewind(second, len(second.tokens) - 2)
        machine.extend(second, [7, 8, 9])
        machine.check_integrity()
        for sequence in kept:
            machine.resume(sequence, params.replace(max_tokens=70))
        drain(machine)
        results.append([facts(machine, sequence) for sequence in kept])
        for sequence in kept:
            machine.close(sequence)
        expect_empty(machine)
    assert results[0] == results[1]
    assert calls


@pytest.mark.parametrize("architecture", FEW)
def test_samples_of_one_prompt_are_those_of_single_steps(
    architecture: str, calls: list[int]
) -> None:
    texts = []
    for num_steps in (1, 8):
        machine = made(num_steps, architecture)
        samples = machine.add(PROMPTS[1], SAMPLED.replace(n=3, max_tokens=30))
        drain(machine)
        texts.append(outputs(samples))
        expect_empty(machine)
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == 3
    assert calls


@pytest.mark.parametrize("num_new", [5, 60])  # fewer than the others have left, and more
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("architecture", FEW)
def test_a_prefill_beside_decodes_is_the_first_step_of_their_call(
    architecture: str, params: SamplingParams, num_new: int, calls: list[int]
) -> None:
    """As that of a probe, whose tokens go over the boundary of a run of the layers."""
    results = []
    for num_steps in (1, 8):
        machine = made(num_steps, architecture, max_num_tokens=120)
        [chain] = machine.add(PROMPTS[3], params.replace(max_tokens=40), keep=True)
        machine.step(1)
        machine.step(1)
        probes = [machine.fork(chain, len(PROMPTS[3]) + 1) for _ in range(2)]
        for probe, suffix in zip(probes, (PROMPTS[4], PROMPTS[1]), strict=True):
            machine.extend(probe, suffix)
            machine.resume(probe, params.replace(max_tokens=num_new))
        drain(machine)
        results.append([facts(machine, sequence) for sequence in (chain, *probes)])
        for sequence in (chain, *probes):
            machine.close(sequence)
        expect_empty(machine)
    assert results[0] == results[1]
    assert calls[0] == min(num_new, 8)


def test_rows_with_an_adapter_are_decoded_step_by_step(tmp_path: Path, calls: list[int]) -> None:
    matrices = adapters.random_tensors(tiny("qwen3_5"), ("q_proj", "in_proj_qkv"))
    adapters.save(tmp_path / "one", matrices)
    adapters.merged(tiny("qwen3_5"), matrices).save_pretrained(tmp_path / "merged")
    machine = made(8, "qwen3_5")
    machine.adapters.add(machine.runner.lm.place(read_adapter("one", tmp_path / "one")))
    adapted = [machine.add(prompt, GREEDY.replace(adapter="one"))[0] for prompt in PROMPTS[:2]]
    [plain] = machine.add(PROMPTS[2], GREEDY.replace(max_tokens=60))
    drain(machine)
    assert outputs(adapted) == greedy(tmp_path / "merged", PROMPTS[:2], 16)
    assert plain.output == greedy(tiny("qwen3_5"), PROMPTS[2:3], 60)[0]
    assert sum(calls) == 60 - 17  # once it is alone
    expect_empty(machine)


def test_logits_that_stay_not_finite_fail_their_request_alone(
    tmp_path: Path, calls: list[int]
) -> None:
    """Those of a token which the first one decodes in the midst of a call."""
    expected = greedy(tiny("qwen3_5"), PROMPTS[:3], 16)
    others = [*range(4), *expected[1], *expected[2], *PROMPTS[0], *PROMPTS[1], *PROMPTS[2]]
    first = next(n for n in range(4, 16) if expected[0][n] not in expected[0][:n] + others)
    poison = expected[0][first]
    lm = load_poisoned(poison, tmp_path, architecture="qwen3_5")
    machine = engine_over(lm, max_num_tokens=60)
    machine.num_decode_steps = 8
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:3]]
    errors = [event for event in drain(machine) if event.error is not None]
    assert [event.sequence for event in errors] == sequences[:1]
    assert isinstance(errors[0].error, LogitsError)
    assert outputs(sequences) == [expected[0][: first + 1], *expected[1:]]
    assert calls
    expect_empty(machine)


def storage_and_table(length: int) -> tuple[RecurrentStorage, PageTable, Callable[[], Any]]:
    lm = loaded("qwen3_5", "float32", None)
    storage = lm.storage(100, 4)
    assert isinstance(storage, RecurrentStorage)
    table = PageTable(PagePool(100, 4))
    table.append(length)
    return storage, table, lm.network.recurrent.native.new_state  # type: ignore[attr-defined]


def test_states_that_are_left_share_no_memory_with_one_that_is_not_kept() -> None:
    """The logits of one more step may be not finite: it has written a state, and gives no token."""
    storage, table, new_state = storage_and_table(200)
    decoded = storage.new_decoded(table, range(40, 200), new_state, 0)
    for stop in range(1, 160):
        left = decoded.states[max(0, stop - NUM_DECODED) : stop]
        memory = {id(state) for state in (*left, decoded.states[stop])}
        assert len(memory) == len(left) + 1
    assert len({id(state) for state in decoded.states}) == NUM_DECODED + 1 + 3  # 64, 128, 192


def test_states_of_tokens_that_were_at_the_slots_before_are_dropped() -> None:
    storage, table, new_state = storage_and_table(60)
    storage.states.max_states = 1000
    for slot in table.slots(10, 60):
        storage.states.put(slot, new_state())
    decoded = storage.new_decoded(table, range(20, 50), new_state, 0)
    storage.keep_decoded([decoded], [[0, *[1] * 30]])
    left = [length for length in range(1, 61) if table.slot(length - 1) in storage.states]
    assert left == [48, 49, 50, *range(51, 61)]
    assert storage.states.get(table.slot(49)) is decoded.states[29]
