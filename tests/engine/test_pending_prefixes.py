"""Prompts that begin alike compute what they share once, also when they come at the same time."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from engines import GREEDY, drain, engine, expect_empty, outputs
from forethought import LLM, SamplingParams
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence, Status

PREFIX = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
"""Three pages of four tokens."""


def prompt(*suffix: int, prefix: Iterable[int] = PREFIX) -> list[int]:
    return [*prefix, *suffix]


def add(machine: Engine, ids: list[int], **params: object) -> Sequence:
    return machine.add(ids, GREEDY.replace(**params))[0]


def alone(ids: list[int]) -> list[int]:
    machine = engine()
    sequence = add(machine, ids)
    drain(machine)
    return sequence.output


@pytest.mark.parametrize("budget", [5, 64])
def test_prompts_that_come_together_compute_their_common_prefix_once(budget: int) -> None:
    machine = engine(max_num_tokens=budget)
    prompts = [prompt(20 + n, 21, 22) for n in range(5)]
    sequences = [add(machine, ids) for ids in prompts]
    drain(machine)
    assert machine.stats.prefilled == len(PREFIX) + 5 * 3
    assert outputs(sequences) == [alone(ids) for ids in prompts]
    expect_empty(machine)


def test_tenants_do_not_wait_for_each_other() -> None:
    machine = engine(max_num_tokens=5)
    first, second = add(machine, prompt(20)), add(machine, prompt(20), cache_salt="b")
    machine.step()
    machine.step()
    machine.step()
    assert second.num_computed > 0
    drain(machine)
    assert first.output == second.output


def test_a_prompt_goes_on_alone_when_the_one_that_it_waits_for_is_aborted() -> None:
    machine = engine(max_num_tokens=5)
    first, second = add(machine, prompt(20)), add(machine, prompt(21))
    machine.step()
    assert second.status is Status.WAITING
    machine.abort(first)
    drain(machine)
    assert second.output == alone(prompt(21))
    assert second.usage.prefilled == len(prompt(21)) - 4  # a page was there already
    expect_empty(machine)


def test_a_prompt_does_not_wait_for_one_that_is_served_after_it() -> None:
    machine = engine(max_num_tokens=10)
    add(machine, prompt(20), priority=1)
    machine.step()
    urgent = add(machine, prompt(21))
    machine.step()
    assert urgent.status is Status.RUNNING
    drain(machine)


def test_a_prompt_does_not_wait_for_one_whose_tokens_are_scored() -> None:
    machine = engine(max_num_tokens=5)
    add(machine, prompt(20), prompt_logprobs=1)
    second = add(machine, prompt(21))
    for _ in range(3):
        machine.step()
    assert second.num_computed > 0
    drain(machine)


def test_a_later_request_does_not_take_the_place_of_one_that_waits() -> None:
    machine = engine(max_num_tokens=64, max_batch_size=2)
    first, second = add(machine, prompt(20)), add(machine, prompt(21))
    third = add(machine, [3] * 6)
    machine.step()
    assert [s.status for s in (first, second, third)] == [
        Status.RUNNING,
        Status.WAITING,
        Status.WAITING,
    ]
    machine.step()
    assert second.status is Status.RUNNING
    drain(machine)


def test_a_later_request_does_not_take_the_pages_of_one_that_waits() -> None:
    long = [*range(20, 36)]  # four pages behind three that are shared
    machine = engine(pages=11, max_num_tokens=20)
    first, second = add(machine, prompt(20), max_tokens=2), add(machine, prompt(*long))
    third = add(machine, [3] * 16)
    machine.step()
    assert first.status is Status.RUNNING
    assert third.status is Status.WAITING  # seven pages are free, four of them for the second
    drain(machine)
    assert second.output == alone(prompt(*long))
    assert machine.stats.preemptions == 0


def test_prompts_wait_through_a_chain_of_prefixes() -> None:
    machine = engine(max_num_tokens=8)
    prompts = [PREFIX[:9], [*PREFIX, 20], [*PREFIX, *range(30, 40)], [*PREFIX, *range(30, 41)]]
    sequences = [add(machine, ids) for ids in prompts]
    drain(machine)
    assert outputs(sequences) == [alone(ids) for ids in prompts]
    least = 9 + (13 - 8) + (22 - 12) + (23 - 20)
    assert machine.stats.prefilled <= least + 4 * len(prompts)


@pytest.mark.parametrize("seed", range(6))
def test_random_prompts_with_aborts_give_the_tokens_of_each_alone(seed: int) -> None:
    rng = random.Random(seed)
    machine = engine(pages=24, max_num_tokens=rng.choice([5, 9, 32]), max_batch_size=4)
    stems = [[rng.randrange(3, 60) for _ in range(rng.choice([4, 9, 14]))] for _ in range(3)]
    sequences: list[Sequence] = []
    for _ in range(14):
        ids = [*rng.choice(stems), *(rng.randrange(3, 60) for _ in range(rng.randrange(1, 8)))]
        sequences.append(add(machine, ids, max_tokens=5, priority=rng.choice([0, 0, 0, 1])))
        if rng.random() < 0.2:
            machine.abort(rng.choice(sequences))
        for _ in range(rng.randrange(3)):
            machine.step()
            machine.check_integrity()
    drain(machine)
    for sequence in sequences:
        ids = sequence.tokens[: sequence.prompt_length]
        assert sequence.output == alone(ids)[: len(sequence.output)]
    expect_empty(machine)


def test_a_batch_is_served_by_its_prefixes_and_unrelated_prompts_keep_their_order() -> None:
    machine = engine()
    ids = [[50] * 8, prompt(20), [40] * 8, prompt(19), [30] * 8]
    requests = [machine.add(each, GREEDY) for each in ids]
    machine.order_by_prefix(requests)
    served = sorted(requests, key=lambda samples: samples[0].rank)
    assert [samples[0].tokens for samples in served] == [ids[0], ids[3], ids[1], ids[2], ids[4]]
    drain(machine)


def test_the_order_of_service_changes_no_token_of_a_batch() -> None:
    rng = random.Random(0)
    stems = [[rng.randrange(20, 500) for _ in range(40)] for _ in range(3)]
    prompts = [[*stems[n % 3], rng.randrange(20, 500)] for n in range(9)]
    params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    with LLM(dtype="float32", seed=3, max_batch_size=2) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(dtype="float32", seed=3) as llm:
        apart = [llm.generate(ids, params).outputs[0].token_ids for ids in prompts]
    assert together == apart
