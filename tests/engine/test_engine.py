"""The engine equals plain decoding, whatever else happens, and accounts for every page."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from benchmarks.step_overhead import files_entered

from drafters import PerRequest, bush, oracle
from engines import GREEDY, drain, engine, expect_empty, outputs
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.engine import step
from forethought.engine.sequence import Status
from forethought.errors import CapacityError, ContextLengthError, ParameterError, UsageError
from forethought.interrupts import deferred_interrupts
from forethought.outputs import FinishReason
from models import ARCHITECTURES, greedy, prompts, tiny
from turns import by_turns

PROMPTS = prompts((3, 17, 9, 30, 1))


@pytest.mark.parametrize(
    ("architecture", "limits"), by_turns([*ARCHITECTURES], [(64, 16, True), (7, 3, False)])
)
def test_tokens_equal_those_of_transformers(
    architecture: str, limits: tuple[int, int, bool]
) -> None:
    budget, page_size, reuse = limits
    machine = engine(
        architecture, page_size=page_size, max_num_tokens=budget, max_batch_size=5, reuse=reuse
    )
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(machine)
    assert outputs(sequences) == greedy(tiny(architecture), PROMPTS, 16)
    expect_empty(machine)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("reuse", [True, False])
def test_paging_chunking_and_prefix_hits_do_not_change_a_token(
    page_size: int, chunked: bool, reuse: bool
) -> None:
    machine = engine(
        page_size=page_size, pages=200, chunked_prefill=chunked, reuse=reuse, max_num_tokens=40
    )
    expected = greedy(tiny("llama"), PROMPTS, 16)
    for _ in range(2):  # the second time every full page is found, if reuse is on
        sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
        drain(machine)
        assert outputs(sequences) == expected
    assert (machine.stats.cached > 0) == reuse
    expect_empty(machine)


@pytest.mark.parametrize("drafter", ["none", "chains", "trees"])
def test_taking_the_argmax_gives_the_events_of_verification(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified, answers = list[int](), greedy(tiny("llama"), PROMPTS, 16)
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    is_wrong = {tuple(PROMPTS[1]): [0] * 16}
    own = {"chains": oracle(known | is_wrong), "trees": bush(known)}.get(drafter)
    nodes = {"max_draft_len": 3, "max_total_draft_tokens": 6}
    drafting = [] if own is None else [UserProvidedDecodingConfig(drafter=own, **nodes)]

    def counted(logits: Any, requests: Any) -> Any:
        verified.append(len(requests))
        return verify(logits, requests)

    def run() -> list[Any]:
        """Events of siblings alone, then of requests with scores, preemptions, ends and limits."""
        limits = {"max_num_tokens": 24, "max_batch_size": 4}
        machine = engine(pages=20, page_size=4, speculative=drafting, **limits)
        machine.add(PROMPTS[1], GREEDY.replace(n=2))
        events, ends = drain(machine), GREEDY.replace(stop_token_ids=answers[0][5:6])
        varied = [ends, GREEDY, GREEDY.replace(max_tokens=3), GREEDY.replace(logprobs=1), GREEDY]
        for prompt, params in zip(PROMPTS, varied, strict=True):
            machine.add(prompt, params)
        machine.add(PROMPTS[0], ends.replace(prompt_logprobs=0))
        events += drain(machine)
        assert machine.stats.preemptions
        expect_empty(machine)
        assert bool(machine.stats.accepted) == bool(drafting)
        stats = machine.stats
        counts = stats.prefilled, stats.decoded, stats.drafted, stats.accepted
        return [*counts, *((e.sequence.id, e.tokens, e.logprobs, e.finish_reason) for e in events)]

    verify = step.verify
    monkeypatch.setattr(step, "verify", counted)
    found, num_verified = run(), sum(verified)
    verified.clear()
    monkeypatch.setattr(SamplingParams, "takes_argmax", False)
    assert run() == found
    assert num_verified < sum(verified)


def test_nothing_is_sampled_while_a_prompt_is_scored_token_by_token() -> None:
    machine = engine(max_num_tokens=1, max_batch_size=1)
    (sequence,) = machine.add(PROMPTS[2], GREEDY.replace(prompt_logprobs=0))
    drain(machine)
    assert outputs([sequence]) == greedy(tiny("llama"), PROMPTS[2:3], 16)
    expect_empty(machine)


@pytest.mark.parametrize("drafter", [None, "chains"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_is_scored_without_a_token_behind_it(n: int, drafter: str | None) -> None:
    known = {tuple(PROMPTS[0]): greedy(tiny("llama"), PROMPTS[:1], 16)[0]}
    drafting = (
        []
        if drafter is None
        else [UserProvidedDecodingConfig(drafter=oracle(known), max_draft_len=3)]
    )
    machine = engine(pages=64, page_size=4, speculative=drafting, max_length=32)
    whole = [5 + number % 40 for number in range(32)]
    scored = [PROMPTS[3], [7], whole, [7]]
    params = GREEDY.replace(prompt_logprobs=1, max_tokens=0, n=n)
    samples = [machine.add(prompt, params) for prompt in scored]
    (beside,) = machine.add(PROMPTS[0], GREEDY)
    ended = [event for event in drain(machine) if event.sequence is not beside]
    assert all((event.tokens, event.finish_reason) == ([], FinishReason.LENGTH) for event in ended)
    assert len(ended) == n * len(scored)
    assert outputs([beside]) == [known[tuple(PROMPTS[0])]]
    for prompt, sequences in zip(scored, samples, strict=True):
        for sequence in sequences:
            assert (sequence.tokens, sequence.usage.decoded) == (prompt, 0)
            assert len(sequence.prompt_logprobs) == len(prompt)
    expect_empty(machine)


def test_a_prompt_that_is_not_scored_leaves_capacity_for_a_token() -> None:
    machine = engine(max_length=8)
    machine.check_prompt([5] * 8, GREEDY.replace(prompt_logprobs=0, max_tokens=0))
    for params in (GREEDY, GREEDY.replace(prompt_logprobs=0)):
        with pytest.raises(ContextLengthError):
            machine.check_prompt([5] * 8, params)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"dry_multiplier": 0.1},
        {"min_tokens": 2},
        {"logprobs": 0},
        {"confidence": 2},
    ],
)
def test_what_edits_logits_or_asks_for_scores_takes_no_argmax(fields: dict[str, Any]) -> None:
    assert GREEDY.takes_argmax
    assert not GREEDY.replace(**fields).takes_argmax


def test_a_long_prompt_does_not_stall_running_answers() -> None:
    machine = engine(max_num_tokens=8, pages=100)
    (running,) = machine.add(PROMPTS[0], GREEDY)
    machine.step()
    machine.add(PROMPTS[3], GREEDY)
    for _ in range(3):  # the prompt of 30 tokens takes several steps
        before = len(running.tokens)
        machine.step()
        assert len(running.tokens) == before + 1
    drain(machine)
    expect_empty(machine)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_sequence_holds_no_page_that_its_tokens_do_not_need(page_size: int) -> None:
    machine = engine(page_size=page_size, pages=200, reuse=False)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    while machine.has_work:
        machine.step()
        stored = sum(-(-sequence.num_computed // page_size) for sequence in sequences)
        assert machine.pool.in_use == stored
        assert all(sequence.num_uncomputed <= 1 for sequence in machine.scheduler.running)
    expect_empty(machine)


def test_samples_of_one_prompt_share_its_prefill() -> None:
    machine = engine(max_batch_size=16, pages=128)
    params = GREEDY.replace(n=16, temperature=1.0, seed=3)
    samples = machine.add(PROMPTS[1], params)
    drain(machine)
    assert machine.stats.prefilled == len(PROMPTS[1])
    assert machine.stats.decoded == 16 * 16
    assert len({tuple(tokens) for tokens in outputs(samples)}) > 8
    expect_empty(machine)


def test_samples_that_wait_for_their_prompt_block_no_other_request() -> None:
    machine = engine()
    machine.add(PROMPTS[3], GREEDY.replace(n=3))
    (other,) = machine.add(PROMPTS[1], GREEDY)
    machine.step()
    assert len(other.output) == 1
    drain(machine)
    expect_empty(machine)


def test_samples_that_do_not_fit_into_the_batch_come_later() -> None:
    machine = engine(max_batch_size=3)
    samples = machine.add(PROMPTS[1], GREEDY.replace(n=8))
    drain(machine)
    assert outputs(samples) == greedy(tiny("llama"), [PROMPTS[1]], 16) * 8
    assert machine.stats.prefilled == len(PROMPTS[1])
    expect_empty(machine)


def test_a_seeded_sample_is_the_same_in_any_batch() -> None:
    params = GREEDY.replace(temperature=1.0, seed=11, n=2)
    alone = engine()
    samples = alone.add(PROMPTS[2], params)
    drain(alone)
    busy = engine(page_size=3, max_num_tokens=9, pages=40)
    for prompt in PROMPTS:
        busy.add(prompt, GREEDY.replace(temperature=0.7))
    same = busy.add(PROMPTS[2], params)
    drain(busy)
    assert outputs(same) == outputs(samples)
    assert outputs(samples)[0] != outputs(samples)[1]
    expect_empty(busy)


def test_preempted_sequences_compute_again_and_lose_no_token() -> None:
    machine = engine(pages=16, page_size=4, reuse=False, max_length=60)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(machine)
    assert machine.stats.preemptions > 0
    assert outputs(sequences) == greedy(tiny("llama"), PROMPTS, 16)
    expect_empty(machine)


def test_what_is_computed_again_after_a_preemption_counts_as_prefilled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, computed = engine(pages=16, page_size=4, reuse=False, max_length=60), [0]
    forward = machine.runner.forward

    def counted(rows: Any) -> Any:
        computed[0] += sum(len(row.tokens) for row in rows)
        return forward(rows)

    monkeypatch.setattr(machine.runner, "forward", counted)
    for prompt in PROMPTS:
        machine.add(prompt, GREEDY)
    drain(machine)
    assert machine.stats.preemptions > 0
    assert machine.stats.prefilled > sum(map(len, PROMPTS))
    # The last token of each is drawn and never computed.
    assert machine.stats.prefilled + machine.stats.decoded - len(PROMPTS) == computed[0]


def test_the_first_comer_finishes_first_when_pages_are_short() -> None:
    machine = engine(pages=12, page_size=4, max_length=48)
    sequences = [machine.add(prompts((20,), seed)[0], GREEDY)[0] for seed in range(4)]
    finished = [event.sequence for event in drain(machine) if event.finish_reason]
    assert finished == sequences
    expect_empty(machine)


def test_a_lower_priority_number_is_served_first() -> None:
    machine = engine(max_batch_size=1)
    late, early = GREEDY.replace(priority=5), GREEDY.replace(priority=-1)
    sequences = [machine.add(PROMPTS[i], late)[0] for i in range(3)]
    urgent = machine.add(PROMPTS[4], early)[0]
    finished = [event.sequence for event in drain(machine) if event.finish_reason]
    assert finished == [urgent, *sequences]
    expect_empty(machine)


def test_prefixes_are_not_shared_between_tenants() -> None:
    machine = engine()
    for salt in ("red", "blue"):
        machine.add(PROMPTS[3], GREEDY.replace(cache_salt=salt))
        drain(machine)
    assert machine.stats.cached == 0
    machine.add(PROMPTS[3], GREEDY.replace(cache_salt="red"))
    drain(machine)
    assert machine.stats.cached == 28  # seven full pages; the last tokens are computed
    expect_empty(machine)


@pytest.mark.parametrize("forked", [False, True])
def test_a_sequence_resumed_under_another_salt_tells_the_first_tenant_nothing(forked: bool) -> None:
    machine = engine()
    session = machine.open(PROMPTS[3])
    machine.resume(session, GREEDY.replace(cache_salt="red"))
    drain(machine)
    red = list(session.tokens)
    if forked:
        session = machine.fork(session)
    machine.resume(session, GREEDY.replace(cache_salt="blue"))
    drain(machine)
    blue = list(session.tokens)
    page = machine.pool.page_size
    for salt, most in (("red", (len(red) - 1) // page * page), ("blue", 0), ("", 0)):
        cached = machine.stats.cached
        machine.add(blue, GREEDY.replace(cache_salt=salt, max_tokens=1))
        drain(machine)
        assert machine.stats.cached - cached == most


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_forking_a_running_sequence_disturbs_nothing_and_costs_only_its_own_tokens(
    page_size: int,
) -> None:
    machine = engine(page_size=page_size, pages=200, reuse=False)
    (main,) = machine.add(PROMPTS[1], GREEDY.replace(max_tokens=24), keep=True)
    suffix, probes = [5, 6, 7], []
    while machine.has_work:
        machine.step()
        if main.active and len(main.output) in (4, 9, 15):
            probe = machine.fork(main)
            machine.extend(probe, suffix)
            machine.resume(probe, GREEDY.replace(max_tokens=5))
            probes.append(probe)
        machine.check_integrity()
    assert [main.output] == greedy(tiny("llama"), [PROMPTS[1]], 24)
    for probe in probes:
        assert [probe.output] == greedy(tiny("llama"), [probe.tokens[: probe.prompt_length]], 5)
        assert probe.usage.prefilled == 1 + len(suffix)  # the last token of main is computed twice
    assert machine.stats.prefilled == len(PROMPTS[1]) + len(probes) * (1 + len(suffix))
    assert machine.stats.decoded == 24 + 5 * len(probes)
    for sequence in (main, *probes):
        machine.close(sequence)
    expect_empty(machine)


def test_a_fork_copies_no_full_page() -> None:
    machine = engine(page_size=4)
    (main,) = machine.add(PROMPTS[1], GREEDY, keep=True)
    drain(machine)
    before = machine.pool.in_use
    children = [machine.fork(main) for _ in range(10)]
    assert machine.pool.in_use == before
    for sequence in (main, *children):
        machine.close(sequence)
    expect_empty(machine)


def test_generating_in_pieces_equals_generating_at_once() -> None:
    params = GREEDY.replace(temperature=1.0, seed=5)
    machine = engine()
    (whole,) = machine.add(PROMPTS[2], params)
    drain(machine)
    piece = machine.open(PROMPTS[2])
    for _ in range(4):
        machine.resume(piece, params.replace(max_tokens=4))
        drain(machine)
    assert piece.tokens == whole.tokens
    machine.close(piece)
    expect_empty(machine)


def test_a_rewound_sequence_continues_as_if_nothing_had_followed() -> None:
    machine = engine(page_size=3)
    (sequence,) = machine.add(PROMPTS[2], GREEDY, keep=True)
    drain(machine)
    first = list(sequence.tokens)
    machine.rewind(sequence, 14)
    assert sequence.tokens == first[:14]
    assert sequence.usage.discarded == len(first) - 14
    machine.extend(sequence, [8, 9])
    machine.resume(sequence, GREEDY)
    drain(machine)
    assert [sequence.output] == greedy(tiny("llama"), [[*first[:14], 8, 9]], 16)
    assert sequence.usage.prefilled == 9 + 2  # what is drawn again is decoded again
    machine.close(sequence)
    expect_empty(machine)


def test_a_sequence_whose_every_token_is_computed_is_resumed_all_the_same() -> None:
    machine = engine(page_size=3)
    (sequence,) = machine.add(PROMPTS[2], GREEDY, keep=True)
    drain(machine)
    for length in (14, 12):  # within a page, and at its end
        machine.rewind(sequence, length)
        assert sequence.num_uncomputed == 0
        child = machine.fork(sequence)
        for each in (sequence, child):
            machine.resume(each, GREEDY)
        drain(machine, most=100)
        start = sequence.tokens[:length]
        assert outputs((sequence, child)) == greedy(tiny("llama"), [start, start], 16)
        machine.close(child)
    machine.close(sequence)
    expect_empty(machine)


def test_what_follows_a_rewind_is_found_behind_its_own_prefix_and_no_other() -> None:
    machine = engine(page_size=4, pages=128)
    (sequence,) = machine.add(PROMPTS[2], GREEDY.replace(max_tokens=24), keep=True)
    drain(machine)
    old = list(sequence.tokens)
    assert len(old) // 4 == 8  # full pages
    machine.rewind(sequence, 4)
    machine.extend(sequence, [8, 9, 10, 11, 12])
    machine.resume(sequence, GREEDY.replace(max_tokens=32))
    drain(machine)
    new = list(sequence.tokens)
    for prompt in ([*new[:40], 5], [*old[:32], *new[32:36], 5], [*old[:8], *new[8:12], 5]):
        (other,) = machine.add(prompt, GREEDY)
        drain(machine)
        assert [other.output] == greedy(tiny("llama"), [prompt], 16)
        shared = 40 if prompt[:40] == new[:40] else 32 if prompt[:32] == old[:32] else 8
        assert other.usage.cached == shared
    machine.close(sequence)
    expect_empty(machine)


def test_rewinding_the_parent_does_not_change_its_forks() -> None:
    machine = engine(page_size=3)
    (parent,) = machine.add(PROMPTS[2], GREEDY, keep=True)
    for _ in range(4):
        machine.step()
    child = machine.fork(parent)
    machine.abort(parent)
    machine.rewind(parent, 6)
    machine.extend(parent, [9, 9, 9])
    machine.resume(parent, GREEDY)
    machine.resume(child, GREEDY)
    drain(machine)
    starts = [sequence.tokens[: sequence.prompt_length] for sequence in (parent, child)]
    assert outputs((parent, child)) == greedy(tiny("llama"), starts, 16)
    for sequence in (parent, child):
        machine.close(sequence)
    expect_empty(machine)


def test_a_fork_resumed_right_after_its_last_token_is_computed_goes_on() -> None:
    machine = engine()
    (main,) = machine.add(PROMPTS[1], GREEDY, keep=True)
    machine.step()
    child = machine.fork(main)  # its last token is not computed yet
    machine.step()  # now it is
    machine.resume(child, GREEDY)
    drain(machine, most=40)
    starts = [sequence.tokens[: sequence.prompt_length] for sequence in (main, child)]
    assert outputs((main, child)) == greedy(tiny("llama"), starts, 16)
    for sequence in (main, child):
        machine.close(sequence)
    expect_empty(machine)


def test_a_fork_that_waits_draws_behind_its_own_tokens_and_not_behind_its_parents() -> None:
    """Both have as many tokens, and the parent is still computing those that they share."""
    machine = engine(max_num_tokens=8, pages=200)
    (parent,) = machine.add(PROMPTS[3], GREEDY)
    child = machine.fork(parent, 27)
    machine.extend(child, [token + 1 if token < 100 else 3 for token in PROMPTS[3][27:]])
    machine.resume(child, GREEDY)
    for _ in range(3):
        machine.step()
    assert child.parent is parent
    assert len(child.tokens) == len(parent.tokens) == 30
    assert parent.num_computed == 24
    drain(machine)
    starts = [sequence.tokens[: sequence.prompt_length] for sequence in (parent, child)]
    assert outputs((parent, child)) == greedy(tiny("llama"), starts, 16)
    machine.close(child)
    expect_empty(machine)


def test_a_fork_that_is_closed_before_it_has_got_its_pages_never_gets_them() -> None:
    machine = engine(max_num_tokens=8)
    (parent,) = machine.add(PROMPTS[3], GREEDY)
    machine.step()
    child = machine.fork(parent)
    assert child.parent is parent
    machine.close(child)
    drain(machine)
    assert child.table.pages == []
    expect_empty(machine)


def test_a_fork_rewound_before_it_has_got_its_pages_shares_only_what_it_kept() -> None:
    machine = engine()
    (main,) = machine.add(PROMPTS[1], GREEDY, keep=True)
    child = machine.fork(main, 9)
    machine.rewind(child, 5)
    machine.extend(child, [7, 8, 9, 10, 11, 12])
    machine.step()
    machine.check_integrity()
    machine.resume(child, GREEDY)
    drain(machine)
    assert child.usage.discarded == 0
    assert [child.output] == greedy(tiny("llama"), [child.tokens[: child.prompt_length]], 16)
    for sequence in (main, child):
        machine.close(sequence)
    expect_empty(machine)


def test_a_parked_sequence_gives_its_pages_to_running_ones_and_computes_them_again() -> None:
    machine = engine(pages=12, page_size=4, reuse=False, max_length=48)
    (parked,) = machine.add(PROMPTS[3], GREEDY.replace(max_tokens=8), keep=True)
    drain(machine)
    machine.add(prompts((30,), 9)[0], GREEDY)
    drain(machine)
    assert machine.stats.dropped == 1
    assert machine.stats.preemptions == 0
    machine.resume(parked, GREEDY.replace(max_tokens=8))
    drain(machine)
    assert [parked.tokens[30:]] == greedy(tiny("llama"), [PROMPTS[3]], 16)
    machine.close(parked)
    expect_empty(machine)


def test_an_aborted_sequence_frees_its_pages_at_once() -> None:
    machine = engine(reuse=False)
    gone, stays = (machine.add(PROMPTS[i], GREEDY)[0] for i in (1, 2))
    machine.step()
    held = machine.pool.in_use
    machine.abort(gone)
    assert gone.finish_reason is FinishReason.ABORT
    assert gone.status is Status.CLOSED
    assert machine.pool.in_use < held
    drain(machine)
    assert outputs([stays]) == greedy(tiny("llama"), [PROMPTS[2]], 16)
    expect_empty(machine)


def test_aborting_the_first_sample_before_its_prefill_leaves_the_others_whole() -> None:
    machine = engine(max_num_tokens=5)
    first, *others = machine.add(PROMPTS[1], GREEDY.replace(n=3))
    machine.step()
    machine.abort(first)
    drain(machine)
    assert outputs(others) == greedy(tiny("llama"), [PROMPTS[1]], 16) * 2
    expect_empty(machine)


@pytest.mark.parametrize(
    ("changes", "reason", "length"),
    [
        ({"max_tokens": 5}, FinishReason.LENGTH, 5),
        ({"stop": 3}, FinishReason.STOP, 4),
        ({"stop": 3, "min_tokens": 10}, FinishReason.LENGTH, 16),
    ],
)
def test_a_generation_ends_where_its_params_say(
    changes: dict[str, Any], reason: FinishReason, length: int
) -> None:
    (plain,) = greedy(tiny("llama"), [PROMPTS[1]], 16)
    if "stop" in changes:
        stop = changes.pop("stop")
        assert plain[stop] not in plain[:stop]
        changes["stop_token_ids"] = (plain[stop],)
        if "min_tokens" in changes:
            changes.update(max_tokens=16, logit_bias={plain[stop]: -100.0})
    machine = engine()
    (sequence,) = machine.add(PROMPTS[1], GREEDY.replace(**changes))
    drain(machine)
    assert (sequence.finish_reason, len(sequence.output)) == (reason, length)
    expect_empty(machine)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_stop_token_ends_the_generation_once_min_tokens_are_reached(
    temperature: float, drafts: bool
) -> None:
    params = GREEDY.replace(temperature=temperature, seed=4)
    plain = engine()
    (whole,) = plain.add(PROMPTS[1], params)
    drain(plain)
    last = next(n for n in range(3, 16) if whole.output[n] not in whole.output[:n])
    drafter = PerRequest(lambda _: [4, 9])
    config = UserProvidedDecodingConfig(max_draft_len=2, drafter=drafter)
    machine = engine(speculative=[config] if drafts else [])
    stop = params.replace(stop_token_ids=(whole.output[last],), min_tokens=last)
    (sequence,) = machine.add(PROMPTS[1], stop)
    drain(machine)
    assert sequence.output == whole.output[: last + 1]
    assert sequence.finish_reason is FinishReason.STOP
    expect_empty(machine)


def test_a_generation_ends_where_the_context_ends() -> None:
    machine = engine(max_length=20)
    (sequence,) = machine.add(PROMPTS[1], GREEDY.replace(max_tokens=None))
    drain(machine)
    assert len(sequence.tokens) == 20
    assert sequence.finish_reason is FinishReason.LENGTH
    expect_empty(machine)


def test_prompt_logprobs_are_the_same_in_chunks_after_preemption_and_for_every_sample() -> None:
    params = GREEDY.replace(prompt_logprobs=2, n=2, max_tokens=3)
    found = []
    for budget, pages in ((64, 64), (7, 64), (7, 10)):
        machine = engine(max_num_tokens=budget, pages=pages, page_size=4)
        machine.add(PROMPTS[1], GREEDY)
        samples = machine.add(PROMPTS[3], params)
        drain(machine)
        for sample in samples:
            assert len(sample.prompt_logprobs) == 30
            assert sample.prompt_logprobs[0] is None
            found.append([min(entry) for entry in sample.prompt_logprobs[1:] if entry])
            assert PROMPTS[3][1] in (sample.prompt_logprobs[1] or {})
        expect_empty(machine)
    assert all(other == found[0] for other in found)


def scored(machine: Any, sequence: Any, extension: list[int], **params: Any) -> list[float]:
    """The log-probabilities of an extension behind a live sequence."""
    machine.extend(sequence, extension)
    machine.resume(sequence, GREEDY.replace(prompt_logprobs=0, max_tokens=1, **params))
    drain(machine)
    entries = sequence.prompt_logprobs[-len(extension) :]
    return [entry[token].logprob for entry, token in zip(entries, extension, strict=True) if entry]


@pytest.mark.parametrize(("budget", "pages"), [(64, 64), (7, 64), (7, 12)])
def test_an_extension_has_the_logprobs_that_it_has_within_a_prompt(budget: int, pages: int) -> None:
    whole = PROMPTS[3]
    plain = engine(max_num_tokens=64, page_size=4)
    (prompt,) = plain.add(whole, GREEDY.replace(prompt_logprobs=0, max_tokens=1))
    drain(plain)
    expected = [
        entry[token].logprob
        for entry, token in zip(prompt.prompt_logprobs[1:], whole[1:], strict=True)
        if entry
    ]
    machine = engine(max_num_tokens=budget, pages=pages, page_size=4)
    (start,) = machine.add(whole[:9], GREEDY.replace(max_tokens=1), keep=True)
    drain(machine)
    other = machine.add(PROMPTS[1], GREEDY)
    fork = machine.fork(start, 9)
    found = scored(machine, fork, whole[9:20])
    machine.rewind(fork, 20)
    found += scored(machine, fork, whole[20:])
    assert found == pytest.approx(expected[8:], abs=1e-4)
    assert len(fork.prompt_logprobs) == len(whole)
    assert outputs(other) == greedy(tiny("llama"), [PROMPTS[1]], 16)
    for sequence in (start, fork):
        machine.close(sequence)
    expect_empty(machine)


def test_scoring_an_extension_computes_it_and_the_token_before_it() -> None:
    machine = engine(max_num_tokens=64, page_size=4, reuse=False)
    (start,) = machine.add(PROMPTS[3][:20], GREEDY.replace(max_tokens=1), keep=True)
    drain(machine)
    before = machine.stats.prefilled
    fork = machine.fork(start, 20)
    scored(machine, fork, PROMPTS[3][20:])
    assert machine.stats.prefilled - before == 1 + 10
    for sequence in (start, fork):
        machine.close(sequence)
    expect_empty(machine)


def test_an_extension_of_a_fork_is_scored_while_the_original_runs_on() -> None:
    machine = engine(max_num_tokens=64, page_size=4)
    (running,) = machine.add(PROMPTS[3], GREEDY)
    fork = machine.fork(running, 9)
    found = scored(machine, fork, PROMPTS[3][9:])
    (prompt,) = machine.add(PROMPTS[3], GREEDY.replace(prompt_logprobs=0))
    drain(machine)
    assert found == pytest.approx(
        [
            entry[token].logprob
            for entry, token in zip(prompt.prompt_logprobs[9:], PROMPTS[3][9:], strict=True)
            if entry
        ],
        abs=1e-4,
    )
    machine.close(fork)
    expect_empty(machine)


def test_without_an_extension_a_live_sequence_has_nothing_to_score() -> None:
    machine = engine()
    (start,) = machine.add(PROMPTS[0], GREEDY.replace(max_tokens=2), keep=True)
    drain(machine)
    machine.extend(start, [5, 6])
    machine.rewind(start, 4)
    with pytest.raises(ParameterError, match="nothing was added"):
        machine.resume(start, GREEDY.replace(prompt_logprobs=0))
    machine.close(start)
    expect_empty(machine)


def test_a_step_that_fails_ends_its_sequences_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = engine(max_batch_size=2)
    first = [machine.add(PROMPTS[i], GREEDY)[0] for i in (0, 1)]
    later = machine.add(PROMPTS[2], GREEDY)[0]
    with monkeypatch.context() as patch:
        patch.setattr(machine.runner, "forward", lambda rows: 1 / 0)
        events = machine.step()
    assert [event.sequence for event in events] == first
    assert all(isinstance(event.error, ZeroDivisionError) for event in events)
    drain(machine)
    assert outputs([later]) == greedy(tiny("llama"), [PROMPTS[2]], 16)
    assert machine.stats.failures == 2
    expect_empty(machine)


def test_an_interrupted_step_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(rows: object) -> None:
        raise KeyboardInterrupt

    machine = engine(page_size=3)
    (main,) = machine.add(PROMPTS[1], GREEDY, keep=True)
    for _ in range(3):
        machine.step()
    child = machine.fork(main)
    machine.resume(child, GREEDY)
    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(machine.runner, "forward", interrupt)
            patch.setattr(machine.runner.storage, "copy_pages", interrupt)
            with pytest.raises(KeyboardInterrupt):
                machine.step()
        machine.check_integrity()
        machine.step()
    drain(machine)
    starts = [sequence.tokens[: sequence.prompt_length] for sequence in (main, child)]
    assert outputs((main, child)) == greedy(tiny("llama"), starts, 16)
    machine.close(main)
    machine.close(child)
    expect_empty(machine)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("pool", "take"),
        ("pool", "release"),
        ("index", "publish"),
        ("scheduler", "on_end"),
        ("scheduler", "_plan_row"),
    ],
)
def test_ctrl_c_takes_effect_when_what_it_interrupts_is_complete(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    """While rows are planned, pages published and sequences ended; each time in the middle."""
    machine, is_due = engine(page_size=3), False
    part = getattr(machine, owner)
    whole = getattr(part, name)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal is_due
        result = whole(*arguments, **named)
        if is_due:
            is_due = False
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(part, name, interrupted)
    live, num_interrupts = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:3]], 0
    for number in range(60):
        is_due |= number % 3 == 1
        try:
            machine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
        machine.check_integrity()
    assert num_interrupts > 0
    assert outputs(live) == greedy(tiny("llama"), PROMPTS[:3], 16)
    expect_empty(machine)


def test_a_second_ctrl_c_takes_effect_at_once() -> None:
    done = []

    def interrupt_twice() -> None:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_can_never_run_is_refused_by_name() -> None:
    small = engine(pages=4, page_size=4, max_length=128)
    with pytest.raises(CapacityError, match="KV cache"):
        small.add(PROMPTS[1], GREEDY)
    full = engine(pages=4, page_size=4, max_length=16)
    with pytest.raises(ContextLengthError, match="16"):  # a larger cache would not help
        full.add(PROMPTS[1], GREEDY)
    short = engine(max_length=16)
    with pytest.raises(ContextLengthError, match="16"):
        short.add(PROMPTS[1], GREEDY)
    with pytest.raises(ContextLengthError, match="17"):  # the prompt alone would fit
        short.add([5] * 16, GREEDY)
    with pytest.raises(ParameterError, match="empty prompt"):
        short.add([], GREEDY)
    with pytest.raises(ParameterError, match="token id 101"):
        short.add([101], GREEDY)
    with pytest.raises(ParameterError, match="logit_bias"):
        short.add([5], GREEDY.replace(logit_bias={500: 1.0}))
    whole = engine(max_num_tokens=8, chunked_prefill=False)
    with pytest.raises(CapacityError, match="max_num_tokens"):
        whole.add(PROMPTS[1], GREEDY)
    (running,) = short.add([5], GREEDY)
    for refused in (
        lambda: short.resume(running, GREEDY),
        lambda: short.extend(running, [4]),
        lambda: short.rewind(running, 1),
        lambda: short.fork(running, 7),
    ):
        with pytest.raises(UsageError):
            refused()
    drain(short)
    with pytest.raises(UsageError, match="closed"):
        short.fork(running)
    (held,) = short.add(PROMPTS[1][:12], GREEDY, keep=True)
    drain(short)
    assert len(held.tokens) == 16
    with pytest.raises(ContextLengthError, match="17"):
        short.resume(held, GREEDY)
    short.close(held)
    for machine in (small, short, whole):
        expect_empty(machine)


def test_a_plain_decode_step_enters_few_files() -> None:
    machine = engine("qwen2")
    machine.add(PROMPTS[0], GREEDY)
    machine.step()
    machine.step()
    assert len(files_entered(machine)) <= 20
    drain(machine)
    expect_empty(machine)
