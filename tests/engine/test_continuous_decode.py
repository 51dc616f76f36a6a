"""Several decode steps in one call of the runner give what single steps give."""

from __future__ import annotations

from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import pytest

from eagle_heads import random_head
from engines import (
    GREEDY,
    change_advance,
    drain,
    engine,
    engine_over,
    expect_empty,
    load_poisoned,
    outputs,
)
from forethought.config.drafters import (
    EagleDecodingConfig,
    NGramDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.engine.engine import Engine
from forethought.engine.scheduler import Plan
from forethought.engine.sequence import Sequence, Status
from forethought.errors import LogitsError
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.outputs import FinishReason
from forethought.speculative.length.policy import FixedLength, LengthRequest, SkippedSteps
from forethought.speculative.step_runner import Advance, DecodeRow
from medusa_heads import random_heads
from models import ARCHITECTURES, greedy, prompts, tiny
from turns import by_turns

PROMPTS = prompts((3, 17, 9, 30, 1))
EXPECTED = greedy(tiny("llama"), PROMPTS, 16)
LIMITS = {"page_size": 4, "max_num_tokens": 200}
WAYS = ["llama", "qwen3_5", "gpt2"]
"""In C++, the second with recurrent layers; and by single steps of torch."""


def made(num_steps: int, architecture: str = "llama", **settings: Any) -> Engine:
    """An engine that makes up to so many decode steps at once."""
    machine = engine(architecture, **{**LIMITS, **settings})
    machine.num_decode_steps = num_steps
    return machine


def digests(machine: Engine) -> set[bytes]:
    """Of the pages that the prefix index knows."""
    return set(machine.index._page_of)


def facts(machine: Engine, sequence: Sequence) -> dict[str, Any]:
    """What holds of a generation, however many steps were made at once."""
    stored = sequence.table.slots(0, sequence.num_computed)
    keys = [layer[stored].tolist() for layer in machine.runner.storage.keys]
    return {
        "tokens": sequence.tokens,
        "computed": (sequence.num_computed, sequence.num_ever_computed),
        "digests": sequence.table.digests,
        "keys": keys,
        "end": (sequence.finish_reason, sequence.stop_reason),
        "sampled": sequence.sampled_positions,
        "usage": sequence.usage,
        "metrics": sequence.metrics,
        "status": sequence.status,
    }


def varied() -> list[SamplingParams]:
    """Ends at different times: by a stop token, by limits, and not at all before the last."""
    return [
        GREEDY.replace(stop_token_ids=[EXPECTED[0][4]]),
        GREEDY.replace(max_tokens=3),
        GREEDY.replace(ignore_eos=False),
        GREEDY.replace(max_tokens=11),
        GREEDY.replace(max_tokens=40),
    ]


def run(machine: Engine, each: List[SamplingParams]) -> list[Sequence]:
    """One kept sequence for each of the first prompts."""
    made = [
        machine.add(prompt, params, keep=True)[0]
        for prompt, params in zip(PROMPTS, each, strict=False)
    ]
    drain(machine)
    return made


@pytest.mark.parametrize("architecture", by_turns([*ARCHITECTURES], every=2))
def test_all_architectures_generate_what_single_steps_do(architecture: str) -> None:
    machine = made(8, architecture)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    num_events = len(drain(machine))
    assert outputs(sequences) == greedy(tiny(architecture), PROMPTS, 16)
    assert num_events == len(PROMPTS) * 3  # the prefill's token, 8 and 7
    assert machine.stats.steps == 16
    expect_empty(machine)


@pytest.mark.parametrize("num_steps", [2, 3, 8, 50])
@pytest.mark.parametrize("number", [1, 5])
def test_ends_keys_counts_and_published_pages_are_those_of_single_steps(
    num_steps: int, number: int
) -> None:
    single, continuous = made(1), made(num_steps)
    for kept in zip(*(run(m, varied()[:number]) for m in (single, continuous)), strict=True):
        expected, found = (
            facts(machine, each) for machine, each in zip((single, continuous), kept, strict=True)
        )
        assert found == expected
        assert found["status"] is Status.PARKED
    assert digests(continuous) == digests(single)
    for name in ("decoded", "prefilled", "cached", "discarded", "drafted", "failures"):
        assert getattr(continuous.stats, name) == getattr(single.stats, name), name
    assert continuous.stats.steps == single.stats.steps


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "seed": 1},
    "cuts": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2**64 - 1},
    "penalties": {
        "temperature": 0.9,
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 2.0},
    },
    "cuts of llama.cpp": {
        "temperature": 1.3,
        "seed": 6,
        "top_n_sigma": 2.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.01,
    },
    "dry": {
        "temperature": 0.6,
        "seed": 7,
        "dry_multiplier": 2.0,
        "dry_allowed_length": 1,
        "dry_sequence_breakers": (),
        "logprobs": 1,
    },
    "greedy dry": {"temperature": 0.0, "dry_multiplier": 3.0, "dry_sequence_breakers": ()},
    "scores": {"temperature": 0.8, "seed": 4, "logprobs": 3, "confidence": 5},
    "held ends": {"temperature": 1.0, "seed": 5, "min_tokens": 5, "ignore_eos": False},
    "greedy penalties": {"temperature": 0.0, "presence_penalty": 1.0, "min_tokens": 4},
    "greedy scores": {"temperature": 0.0, "logprobs": 0},
}


def run_sampled(machine: Engine, each: List[SamplingParams]) -> list[dict[str, Any]]:
    """The facts of one kept sequence for each of the first prompts, and its scores."""
    sequences = [
        machine.add(prompt, params, keep=True)[0]
        for prompt, params in zip(PROMPTS, each, strict=False)
    ]
    scores: dict[int, list[Any]] = {sequence.id: [] for sequence in sequences}
    for event in drain(machine):
        scores[event.sequence.id] += zip(
            event.logprobs or [None] * len(event.tokens),
            event.confidences or [None] * len(event.tokens),
            strict=True,
        )
    return [facts(machine, each) | {"scores": scores[each.id]} for each in sequences]


@pytest.mark.parametrize(("name", "architecture"), by_turns([*SAMPLED], [*WAYS]))
def test_sampled_tokens_and_scores_are_those_of_single_steps_and_of_any_batch(
    name: str, architecture: str
) -> None:
    params = GREEDY.replace(max_tokens=24, **SAMPLED[name])
    mixed = [params, GREEDY.replace(max_tokens=9), params, params.replace(max_tokens=5), params]
    single, continuous, alone = (made(size, architecture) for size in (1, 8, 8))
    expected = run_sampled(single, mixed)
    assert run_sampled(continuous, mixed) == expected
    assert continuous.stats.steps == single.stats.steps
    assert run_sampled(alone, mixed[:1])[0]["tokens"] == expected[0]["tokens"]
    assert len(expected[0]["scores"]) == len(expected[0]["tokens"]) - len(PROMPTS[0])


def test_sampled_rows_and_samples_of_one_prompt_make_several_steps() -> None:
    machine = made(8)
    sampled = {"temperature": 0.8, "seed": 1, "ignore_eos": True}
    assert decode_sizes(machine, max_tokens=17, **sampled) == [1, 8, 8]
    assert decode_sizes(machine, max_tokens=17, n=2, **sampled) == [1, 1, 8, 8, 8, 8]
    many = {"logprobs": 20, "confidence": 20} | sampled
    assert decode_sizes(machine, max_tokens=9, **many) == [1, 8]
    expect_empty(machine)


def test_nothing_is_computed_behind_the_last_end() -> None:
    machine = made(8)
    stop = EXPECTED[0].index(EXPECTED[0][4]) + 1  # tokens up to it
    (sequence,) = machine.add(PROMPTS[0], GREEDY.replace(stop_token_ids=[EXPECTED[0][4]]))
    drain(machine)
    assert len(sequence.output) == stop
    assert sequence.finish_reason is FinishReason.STOP
    assert machine.stats.steps == stop
    expect_empty(machine)


def test_what_was_generated_can_be_forked_rewound_extended_and_resumed() -> None:
    results = []
    for num_steps in (1, 8):
        machine = made(num_steps)
        first, second = run(machine, [GREEDY, GREEDY.replace(max_tokens=7)])
        child = machine.fork(first, len(first.tokens) - 5)
        machine.rewind(second, len(second.tokens) - 2)
        machine.extend(second, [7, 8, 9])
        machine.check_integrity()
        for sequence in (first, second, child):
            machine.resume(sequence, GREEDY)
        drain(machine)
        results.append([facts(machine, each) for each in (first, second, child)])
        for sequence in (first, second, child):
            machine.close(sequence)
        expect_empty(machine)
    assert results[0] == results[1]


def test_a_sequence_is_forked_while_it_runs() -> None:
    machine = made(4)
    (sequence,) = machine.add(PROMPTS[0], GREEDY)
    machine.step()
    machine.step()
    child = machine.fork(sequence)
    machine.resume(child, GREEDY.replace(max_tokens=16 - len(sequence.output)))
    size = len(sequence.output)
    drain(machine)
    assert sequence.output == EXPECTED[0]
    assert child.output == EXPECTED[0][size:]
    machine.close(child)
    expect_empty(machine)


@pytest.mark.parametrize("params", [GREEDY, GREEDY.replace(temperature=0.9, seed=7)])
def test_a_prefill_beside_decodes_is_the_first_step_of_their_call(params: SamplingParams) -> None:
    """As that of a probe, which forks a running sequence and has a few tokens of its own."""

    def run_beside(num_steps: int) -> tuple[list[dict[str, Any]], list[int], tuple[int, int]]:
        machine = made(num_steps)
        chain = machine.add(PROMPTS[1], params.replace(max_tokens=40), keep=True)[0]
        machine.step(1)
        machine.step(1)
        probe = machine.fork(chain, len(PROMPTS[1]) + 1)
        machine.extend(probe, PROMPTS[2])
        machine.resume(probe, params.replace(max_tokens=5))
        sizes = [len(event.tokens) for event in machine.step()]
        drain(machine)
        kept = [facts(machine, sequence) for sequence in (chain, probe)]
        machine.close(chain)
        machine.close(probe)
        expect_empty(machine)
        return kept, sizes, (machine.stats.decoded, machine.stats.prefilled)

    (expected, single, num_tokens), several = run_beside(1), run_beside(8)
    assert single == [1, 1]
    assert several == (expected, [5, 5], num_tokens)


@pytest.mark.parametrize("pages", [24, 30, 36, 44])
def test_a_small_pool_makes_fewer_steps_and_preempts_no_more(pages: int) -> None:
    counts = []
    for num_steps in (1, 8):
        machine = made(num_steps, pages=pages, max_batch_size=4)
        sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:4]]
        drain(machine)
        assert outputs(sequences) == EXPECTED[:4]
        stats = machine.stats
        counts.append((stats.preemptions, stats.dropped, stats.prefilled, stats.decoded))
        expect_empty(machine)
    assert counts[0] == counts[1]


def test_pages_of_earlier_prompts_are_not_evicted_for_further_steps() -> None:
    machine = made(8, pages=12, page_size=4)
    machine.add(prompts((40,))[0], GREEDY.replace(max_tokens=1))
    drain(machine)
    known = digests(machine)
    assert (machine.pool.num_free, len(known)) == (2, 10)
    (sequence,) = machine.add([5, 6, 7], GREEDY)
    machine.step()  # the prompt takes a page
    machine.step()  # the fourth token fills it, and four more have a page that is free
    assert digests(machine) >= known
    assert len(sequence.output) == 1 + 1 + 4
    drain(machine)
    assert sequence.output == greedy(tiny("llama"), [[5, 6, 7]], 16)[0]
    expect_empty(machine)


@pytest.mark.parametrize("free", [0, 1, 2, 7, 30])
def test_free_pages_bound_the_steps_however_many_are_asked_for(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number is found in a few looks at the tables, not in one for each step."""
    machine = made(1, pages=64)
    lengths = (100, 60)  # of which the prefill has decoded one
    for prompt, length in zip(PROMPTS, lengths, strict=False):
        machine.add(prompt, GREEDY.replace(max_tokens=length))
    machine.step()
    plan = Plan()
    machine.scheduler.plan_decodes(plan)
    holder = PageTable(machine.pool)
    holder.append(4 * (machine.pool.num_free - free))
    rows = [
        (row.sequence.table, length - 1) for row, length in zip(plan.rows, lengths, strict=True)
    ]
    pages_needed, num_looks = PageTable.pages_needed, 0
    most = 1
    while sum(table.pages_needed(min(most + 1, left) - 1) for table, left in rows) <= free:
        most += 1

    def counted(table: PageTable, count: int) -> int:
        nonlocal num_looks
        num_looks += 1
        return pages_needed(table, count)

    monkeypatch.setattr(PageTable, "pages_needed", counted)
    machine.scheduler.reserve_decode_slots(plan, 1000)
    assert [row.num_further for row in plan.rows] == [min(most, left) - 1 for _, left in rows]
    assert num_looks <= len(rows) * 9
    plan.undo()
    holder.release()
    machine.check_integrity()


def decode_sizes(machine: Engine, **fields: Any) -> list[int]:
    """Tokens of each event of a request."""
    machine.add(PROMPTS[0], GREEDY.replace(**fields))
    return [len(event.tokens) for event in drain(machine)]


def test_a_limit_cuts_the_steps_short() -> None:
    machine = made(8)
    assert decode_sizes(machine, max_tokens=12) == [1, 8, 3]
    assert machine.stats.steps == 12


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"]},
        {"speculation": SpeculationParams(prediction=[1, 2, 3])},
    ],
)
def test_what_has_to_be_looked_at_token_by_token_runs_in_single_steps(
    fields: dict[str, Any],
) -> None:
    machine = made(8)
    assert max(decode_sizes(machine, **fields)) < 8
    with_other = made(8)
    with_other.add(PROMPTS[1], GREEDY.replace(**fields))
    assert max(decode_sizes(with_other)) < 8


def test_a_prompt_is_scored_and_then_decoded_in_continuous_steps() -> None:
    machine = made(8)
    (sequence,) = machine.add([5, 6, 7], GREEDY.replace(prompt_logprobs=0, max_tokens=9))
    assert [len(event.tokens) for event in drain(machine)] == [1, 8]
    assert len(sequence.prompt_logprobs) == 3


def test_only_requests_without_drafts_run_in_continuous_steps_beside_trees() -> None:
    trees = SuffixDecodingConfig(max_draft_len=2, max_total_draft_tokens=4)
    machine = engine(speculative=[trees], **LIMITS)
    machine.num_decode_steps = 8
    assert max(decode_sizes(machine)) < 4
    plain = SpeculationParams(enabled=False)
    assert decode_sizes(machine, speculation=plain) == [1, 8, 7]
    machine.add(PROMPTS[1], GREEDY)
    assert max(decode_sizes(machine, speculation=plain)) < 4
    assert machine.stats.draft_failures == 0
    expect_empty(machine)


@pytest.mark.parametrize("architecture", WAYS)
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 1}])
def test_several_steps_store_the_hidden_states_that_a_drafter_will_read(
    architecture: str, fields: dict[str, Any]
) -> None:
    head = EagleDecodingConfig(max_draft_len=2, speculative_model=random_head("eagle3"))
    params = GREEDY.replace(speculation=SpeculationParams(enabled=False), **fields)
    stored = list[tuple[list[int], Any]]()
    for num_steps in (1, 8):
        machine = engine(architecture, speculative=[head], **LIMITS)
        machine.num_decode_steps = num_steps
        kept = [machine.add(prompt, params, keep=True)[0] for prompt in PROMPTS]
        sizes = [len(event.tokens) for event in drain(machine)]
        assert max(sizes) == num_steps
        (cache,) = machine.speculation.hidden_state_caches
        for sequence in kept:
            length = len(sequence.tokens) - 1
            assert cache.covers(sequence.table, length)
            stored.append((sequence.tokens, cache.read(sequence.table, 0, length).tolist()))
            machine.close(sequence)
        expect_empty(machine)
    assert stored[: len(PROMPTS)] == stored[len(PROMPTS) :]


def test_steps_without_drafts_are_reported_to_the_length_policy() -> None:
    machine = engine(speculative=[NGramDecodingConfig(max_draft_len=2)], **LIMITS)
    machine.num_decode_steps = 8
    policy = Skipping()
    machine.speculation.drafters[0].policy = policy
    assert decode_sizes(machine, max_tokens=20) == [1, 1, 5, 1, 5, 1, 5, 1]
    assert policy.num_skipped == [5, 5, 5]


@pytest.mark.parametrize(("num_held", "sizes"), [(1, [1, 5, 1, 5, 1]), (4, [4, 5, 4])])
def test_a_policy_that_chooses_no_drafts_begins_a_call_of_the_steps_it_holds_for(
    num_held: int, sizes: list[int]
) -> None:
    machine = engine(speculative=[NGramDecodingConfig(max_draft_len=2)], **LIMITS)
    machine.num_decode_steps = 8
    machine.speculation.drafters[0].policy = Skipping(num_held)
    assert decode_sizes(machine, max_tokens=14) == [1, *sizes]
    assert machine.stats.draft_failures == 0
    expect_empty(machine)


def test_prompts_store_no_states_for_roots_while_the_drafter_is_skipped(tmp_path: Path) -> None:
    heads = MedusaDecodingConfig(speculative_model=random_heads(tmp_path), medusa_choices=[[0]])
    machine = engine(speculative=[heads], **LIMITS)
    (cache,), (drafter,) = machine.speculation.hidden_state_caches, machine.speculation.drafters
    drafter.policy = Skipping()
    params = GREEDY.replace(max_tokens=3)
    for is_skipped in (False, True):  # the first request's second step is the first skipped one
        sequence = machine.add(PROMPTS[is_skipped], params, keep=True)[0]
        drain(machine)
        length = len(sequence.tokens) - 1
        assert cache.covers(sequence.table, length) != is_skipped
        assert cache.is_readable(sequence.table, length)
        assert not is_skipped or cache.ready_length(sequence.table, length) == 0
        machine.close(sequence)
    expect_empty(machine)


def test_a_drafter_that_no_running_request_has_chosen_does_not_end_skipping() -> None:
    drafters = [NGramDecodingConfig(max_draft_len=2), SuffixDecodingConfig(max_draft_len=2)]
    machine = engine(speculative=drafters, **LIMITS)
    machine.num_decode_steps = 8
    second = machine.speculation.drafters[1]
    second.policy = policy = Skipping()
    chosen = SpeculationParams(drafter=second.name)
    assert decode_sizes(machine, max_tokens=14, speculation=chosen) == [1, 1, 5, 1, 5, 1]
    assert policy.num_skipped == [5, 5]
    expect_empty(machine)


def test_a_request_with_another_drafter_ends_skipping() -> None:
    """Of four sequences that skip one ends, and what begins in its place has chosen a drafter that
    does not skip: the size of the batch, 4, 3 and 4, would not end it."""
    drafters = [NGramDecodingConfig(max_draft_len=2), SuffixDecodingConfig(max_draft_len=2)]
    machine = engine(speculative=drafters, **{**LIMITS, "max_batch_size": 4})
    asked, second = machine.speculation.drafters
    asked.policy, second.policy = Asked(), Skipping()
    for num_tokens in (4, 8, 8, 8):
        chosen = SpeculationParams(drafter=second.name)
        machine.add(PROMPTS[0], GREEDY.replace(max_tokens=num_tokens, speculation=chosen))
    chosen = SpeculationParams(drafter=asked.name)
    last = machine.add(PROMPTS[0], GREEDY.replace(max_tokens=3, speculation=chosen))[0]
    drain(machine)
    assert asked.policy.num_calls == len(last.output) - 2, "but not where one token is left"
    expect_empty(machine)


class Asked(FixedLength):
    """Counts how often it is asked for lengths."""

    num_calls = 0

    def lengths(self, requests: List[LengthRequest], batch_size: int) -> list[int]:
        self.num_calls += 1
        return [0] * len(requests)


class Skipping(FixedLength):
    """Allows no drafts, and is not asked in five steps after those that it holds for."""

    def __init__(self, num_held: int = 1) -> None:
        self.num_skipped: list[int] = []
        self.num_held = num_held

    def lengths(self, requests: List[LengthRequest], batch_size: int) -> list[int]:
        return [0] * len(requests)

    def hold(self) -> float:
        return self.num_held

    def skip(self) -> int:
        return 5

    def skipped(self, steps: SkippedSteps) -> None:
        self.num_skipped.append(steps.num_steps)


def test_what_could_be_admitted_soon_does_not_wait_for_further_steps() -> None:
    """Where pages are short, and where the KV of a running sequence is waited for."""
    machine = made(8, pages=14, page_size=4, max_batch_size=2)
    first = machine.add(PROMPTS[3], GREEDY.replace(max_tokens=4))[0]
    machine.add(prompts((29,))[0], GREEDY.replace(max_tokens=4))
    for size in (1, 2, 3, 4):
        machine.step()
        assert len(first.output) == size
    assert [len(event.tokens) for event in drain(machine)] == [1, 3]
    machine = made(8)
    running = machine.add(PROMPTS[3], GREEDY)[0]
    machine.step()
    machine.fork(running)  # of which the last token is not computed yet
    for has_dependents, size in ((True, 2), (False, 10)):
        machine.step()
        assert bool(running.dependents) == has_dependents
        assert len(running.output) == size


def test_behind_a_full_batch_sequences_wait_for_one_that_ends() -> None:
    machine = made(8, max_batch_size=1)
    first = machine.add(PROMPTS[0], GREEDY.replace(max_tokens=4))[0]
    second = machine.add(PROMPTS[1], GREEDY)[0]
    assert [len(event.tokens) for event in drain(machine)] == [1, 3, 1, 8, 7]
    assert outputs([first, second]) == [EXPECTED[0][:4], EXPECTED[1]]
    machine = made(8, max_batch_size=1)
    machine.add(PROMPTS[0], GREEDY.replace(priority=1))
    machine.step()
    machine.add(PROMPTS[1], GREEDY)  # takes its place
    machine.step()
    assert len(machine.scheduler.waiting) == 1
    assert [len(event.tokens) for event in drain(machine)] == [8, 7, 8, 7]


def test_a_streamed_sequence_gets_each_token_by_itself_and_so_do_others() -> None:
    machine = made(8)
    streamed, other = (machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2])
    streamed.is_streamed = True
    assert {len(event.tokens) for event in drain(machine)} == {1}
    machine.num_streamed_decode_steps = 3
    again = machine.add(PROMPTS[0], GREEDY.replace(max_tokens=7))[0]
    again.is_streamed = True
    assert [len(event.tokens) for event in drain(machine)] == [1, 3, 3]
    assert outputs([streamed, other]) == EXPECTED[:2]
    assert not again.is_streamed or again.status is Status.CLOSED


def test_where_the_call_fails_the_step_is_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = made(8)
    calls: list[List[DecodeRow]] = []

    def fail(advance: Any, rows: List[DecodeRow], num_steps: int) -> Advance:
        calls.append(rows)
        raise RuntimeError("out of memory")

    change_advance(monkeypatch, fail)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2]]
    events = drain(machine)
    assert outputs(sequences) == EXPECTED[:2]
    assert {len(event.tokens) for event in events} == {1}
    assert machine.stats.failed_forwards == len(calls) == 14  # not the first and the last step
    expect_empty(machine)


def test_an_interrupted_call_leaves_the_sequences_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = made(8)
    (sequence,) = machine.add(PROMPTS[0], GREEDY)
    machine.step()
    before = list(sequence.tokens), sequence.num_computed

    def interrupt(*args: Any) -> Advance:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        change_advance(patch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            machine.step()
    assert (sequence.tokens, sequence.num_computed) == before
    drain(machine)
    assert sequence.output == EXPECTED[0]
    expect_empty(machine)


@pytest.mark.parametrize("first", [0, 3])
def test_logits_that_are_not_finite_are_computed_again(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the sequence goes on from what was decoded before them."""
    machine = made(8)
    spoilt = list[int]()

    def spoiling(advance: Any, rows: List[DecodeRow], num_steps: int) -> Advance:
        made: Advance = advance(rows, num_steps)
        if not spoilt:
            spoilt.append(first)
            del made.results[0][first:]
        return made

    change_advance(monkeypatch, spoiling)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2]]
    drain(machine)
    assert spoilt
    assert outputs(sequences) == EXPECTED[:2]
    assert sequences[0].had_nonfinite_logits == (first == 0)
    assert machine.stats.failures == 0
    expect_empty(machine)


@pytest.mark.parametrize("forward", ["native", "torch"])
def test_logits_that_stay_not_finite_fail_their_request_alone(
    tmp_path: Path, forward: loader.Forward
) -> None:
    """That of a token which the first one decodes as its sixth."""
    poison = EXPECTED[0][5]
    assert poison not in EXPECTED[0][:5] + EXPECTED[1] + PROMPTS[0] + PROMPTS[1]
    lm = load_poisoned(poison, tmp_path, forward)
    machine = engine_over(lm, **LIMITS)
    machine.num_decode_steps = 8
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2]]
    events = drain(machine)
    errors = [event for event in events if event.error is not None]
    assert [event.sequence for event in errors] == sequences[:1]
    assert isinstance(errors[0].error, LogitsError)
    assert sequences[0].output == EXPECTED[0][:6]
    assert sequences[1].output == EXPECTED[1]
    expect_empty(machine)
