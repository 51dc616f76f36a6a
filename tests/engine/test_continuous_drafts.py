"""Several steps with drafts in one call give what single steps give, and are counted as these."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from clocked_policy import Clocked
from eagle_heads import random_head
from engines import change_advance, drain, engine, engine_over, expect_empty, load_poisoned, outputs
from forethought.assets import reasoner_dir
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    NGramDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import continuous
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence, Status
from forethought.errors import LogitsError
from forethought.llm.tokenizer import Tokenizer
from forethought.model import loader
from forethought.model.causal_lm import CausalLM
from forethought.outputs import FinishReason
from forethought.speculative.drafter import ResourceManager
from forethought.speculative.length.gate import AcceptanceGate
from forethought.speculative.length.policy import (
    FixedLength,
    LengthRequest,
    StepRecord,
)
from forethought.speculative.step_runner import Advance, DecodeRow, SingleSteps
from generations import expect_same
from models import greedy, prompts, tiny
from shipped import QUESTIONS, shipped
from turns import by_turns

NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = prompts((3, 17, 9, 30, 1))
EXPECTED = greedy(tiny("llama"), PROMPTS, NUM_TOKENS)
LIMITS = {"page_size": 4, "pages": 128, "max_num_tokens": 200}


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="near-models-")


@functools.cache
def near(architecture: str, noise: float = 0.04) -> Path:
    """A model that is often right about the tiny one: the same with noise on its weights."""
    path = Path(_directory().name) / f"{architecture}-{noise}"
    module = AutoModelForCausalLM.from_pretrained(tiny(architecture))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for weight in module.parameters():
            weight.data += noise * weight.abs().mean() * torch.randn_like(weight)
    module.save_pretrained(path)
    return path


def drafting(draft_len: int = 4, architecture: str = "llama", **fields: Any) -> DecodingBaseConfig:
    settings = {"max_draft_len": draft_len, "speculative_model": near(architecture), **fields}
    return DraftTargetDecodingConfig(**settings)


def made(
    num_steps: int,
    config: DecodingBaseConfig | None = None,
    architecture: str = "llama",
    **settings: Any,
) -> Engine:
    """An engine with a drafter that makes up to so many steps at once."""
    configs = [config or drafting(architecture=architecture)]
    machine = engine(architecture, speculative=configs, **{**LIMITS, **settings})
    machine.num_decode_steps = num_steps
    return machine


def varied() -> list[SamplingParams]:
    """Ends at different times, in the middle of drafts and behind them."""
    return [
        GREEDY.replace(stop_token_ids=[EXPECTED[0][7]]),
        GREEDY.replace(max_tokens=3),
        GREEDY.replace(ignore_eos=False),
        GREEDY.replace(max_tokens=23),
        GREEDY,
    ]


def run(machine: Engine, each: List[SamplingParams]) -> list[Sequence]:
    """One kept sequence for each of the first prompts."""
    made = [
        machine.add(prompt, params, keep=True)[0]
        for prompt, params in zip(PROMPTS, each, strict=False)
    ]
    drain(machine)
    return made


@pytest.mark.parametrize("draft_len", [1, 4, 9])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("num_steps", [2, 8])
def test_tokens_ends_keys_and_counts_are_those_of_single_steps(
    num_steps: int, number: int, draft_len: int
) -> None:
    machines = [made(size, drafting(draft_len)) for size in (1, num_steps)]
    kept = [run(machine, varied()[:number]) for machine in machines]
    expect_same(machines, kept)
    assert 0 < machines[1].stats.accepted < machines[1].stats.drafted
    for sequence, expected in zip(kept[1], EXPECTED, strict=False):
        assert sequence.output == expected[: len(sequence.output)]


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "gemma2", "gpt2", "granite"])
def test_so_do_models_with_windows_and_those_that_run_in_torch(architecture: str) -> None:
    machines = [made(size, architecture=architecture) for size in (1, 8)]
    expect_same(machines, [run(machine, [GREEDY] * 3) for machine in machines])
    assert machines[1].stats.accepted > 0


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.3, "seed": 1},
    "cuts": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "seed": 2},
    "penalties": {"temperature": 0.3, "seed": 3, "presence_penalty": 0.2, "min_tokens": 7},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.1},
    "cuts of llama.cpp": {
        "temperature": 0.6,
        "seed": 4,
        "top_n_sigma": 3.5,
        "xtc_probability": 0.2,
        "xtc_threshold": 0.02,
    },
    "dry": {
        "temperature": 0.3,
        "seed": 5,
        "dry_multiplier": 0.5,
        "dry_sequence_breakers": (),
    },
}


@pytest.mark.parametrize(  # in C++, and by single steps of torch
    ("name", "architecture"), by_turns([*SAMPLED], ["llama", "gpt2"])
)
def test_sampled_tokens_with_drafts_are_those_without_in_any_number_of_steps(
    name: str, architecture: str
) -> None:
    params = GREEDY.replace(logprobs=1, **SAMPLED[name])
    each = [params, GREEDY, params.replace(max_tokens=21)]
    machines = [made(size, architecture=architecture) for size in (1, 8)]
    kept = [run(machine, each) for machine in machines]
    expect_same(machines, kept)
    assert machines[1].stats.accepted > 0
    plain = engine(architecture, **LIMITS)
    for sequence, expected in zip(kept[1], run(plain, each), strict=True):
        assert sequence.output == expected.output


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize(
    "config",
    [
        NGramDecodingConfig(max_draft_len=5, max_matching_ngram_size=2),
        NGramDecodingConfig(max_draft_len=3, is_keep_all=False, is_use_oldest=False),
        SuffixDecodingConfig(max_draft_len=6, max_spec_factor=4.0),
    ],
)
def test_drafts_from_the_text_are_those_of_single_steps(
    config: DecodingBaseConfig, number: int
) -> None:
    """Also where a step has no draft, and where what ends is drafted from; the second time all
    outputs are known."""
    machines = [made(size, config) for size in (1, 8)]
    for _ in range(2):
        kept = [run(machine, varied()[-number:]) for machine in machines]
        expect_same(machines, kept)
    assert machines[1].stats.accepted > 3
    machines[1].add(PROMPTS[4], GREEDY)
    assert max(len(event.tokens) for event in drain(machines[1])) > 6


def test_several_steps_are_one_call() -> None:
    machine = made(8)
    machine.add(PROMPTS[0], GREEDY)
    events = drain(machine)
    num_tokens = [len(event.tokens) for event in events]
    assert sum(num_tokens) == NUM_TOKENS
    assert len(events) < 1 + machine.stats.steps / 4
    assert max(num_tokens) > 8
    expect_empty(machine)


def test_what_takes_the_places_of_others_is_drafted_for_from_its_second_token_on() -> None:
    """Samples of one prompt, whose first step is a decode that no drafter was offered."""
    machine = made(8, max_batch_size=2)
    samples = machine.add(PROMPTS[0], GREEDY.replace(n=6, max_tokens=8))
    drain(machine)
    drafted = [sample.metrics.drafted for sample in samples]
    assert drafted[2] > 4
    assert drafted[2:] == [drafted[2]] * 4
    expect_empty(machine)


@functools.cache
def reasoner(dtype: str) -> CausalLM:
    return loader.load(reasoner_dir(), dtype=dtype, forward="native")


@functools.cache
def asked() -> list[list[int]]:
    tokenizer = Tokenizer.load(reasoner_dir())
    return [tokenizer.encode_more(question) for question in QUESTIONS[:4]]


@pytest.mark.parametrize(
    ("name", "number", "dtype"),
    by_turns(["draft model", "eagle 3", "mtp, replayed"], [1, 4], ["float32", "bfloat16"]),
)
def test_trained_drafters_are_as_good_as_in_single_steps(
    name: str, dtype: str, number: int
) -> None:
    machines, kept = [], []
    for num_steps in (1, 8):
        settings = {"max_length": 256, "pages": 80, "page_size": 16, "max_num_tokens": 256}
        machine = engine_over(reasoner(dtype), speculative=[shipped(name)[0]], **settings)
        machine.num_decode_steps = num_steps
        params = SamplingParams(temperature=0.0, max_tokens=60)
        kept.append([machine.add(each, params, keep=True)[0] for each in asked()[:number]])
        drain(machine)
        machines.append(machine)
    expect_same(machines, kept)
    assert machines[1].stats.accepted > machines[1].stats.steps


def test_what_was_generated_can_be_forked_rewound_extended_and_resumed() -> None:
    machines, kept = [made(1), made(8)], []
    for machine in machines:
        first, second = run(machine, [GREEDY, GREEDY.replace(max_tokens=17)])
        child = machine.fork(first, len(first.tokens) - 5)
        machine.rewind(second, len(second.tokens) - 2)
        machine.extend(second, [7, 8, 9])
        machine.check_integrity()
        for sequence in (first, second, child):
            machine.resume(sequence, GREEDY)
        drain(machine)
        kept.append([first, second, child])
    expect_same(machines, kept)
    for machine, sequences in zip(machines, kept, strict=True):
        for sequence in sequences:
            machine.close(sequence)
        expect_empty(machine)


def test_a_sequence_is_forked_while_it_runs() -> None:
    machine = made(3)
    (sequence,) = machine.add(PROMPTS[0], GREEDY)
    machine.step()
    machine.step()
    size = len(sequence.output)
    assert 4 < size < NUM_TOKENS
    child = machine.fork(sequence)
    machine.resume(child, GREEDY.replace(max_tokens=NUM_TOKENS - size))
    drain(machine)
    assert sequence.output == EXPECTED[0]
    assert child.output == EXPECTED[0][size:]
    machine.close(child)
    expect_empty(machine)


@pytest.mark.parametrize("pages", [40, 48, 56, 64])
def test_a_small_pool_makes_fewer_steps_and_preempts_no_more(pages: int) -> None:
    counts = []
    for num_steps in (1, 8):
        machine = made(num_steps, pages=pages, max_batch_size=4)
        sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:4]]
        drain(machine)
        assert outputs(sequences) == EXPECTED[:4]
        counts.append(machine.stats.preemptions)
        expect_empty(machine)
    assert counts[1] <= counts[0]


def test_prefixes_in_the_cache_are_drafted_behind_at_once() -> None:
    machines, kept = [made(1), made(8)], []
    for machine in machines:
        run(machine, [GREEDY, GREEDY])
        kept.append(run(machine, [GREEDY, GREEDY]))
        assert machine.stats.cached > 0
    expect_same(machines, kept)


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
    machine.add(PROMPTS[1], GREEDY.replace(**fields))
    machine.add(PROMPTS[0], GREEDY)
    assert max(len(event.tokens) for event in drain(machine)) <= 5
    expect_empty(machine)


class Units(ResourceManager):
    """As many as are asked for."""

    def get_max_resource_count(self) -> int:
        return 100

    def get_needed_resource_to_completion(self, request: Any) -> int:
        return 1


class PerStep(FixedLength):
    """Chooses anew in each step."""

    def lengths(self, requests: List[LengthRequest], batch_size: int) -> list[int]:
        return [request.max_draft_len for request in requests]

    def hold(self) -> float:
        return 1


class Told(FixedLength):
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("number", [1, 5])
def test_the_record_of_a_call_has_the_drafts_of_all_its_steps(number: int) -> None:
    machines, policies = [made(1), made(8)], [Told(), Told()]
    for machine, policy in zip(machines, policies, strict=True):
        machine.speculation.drafters[0].policy = policy
    expect_same(machines, [run(machine, varied()[-number:]) for machine in machines])
    single, calls = (policy.records for policy in policies)
    assert {record.num_steps for record in single} == {1}
    assert max(record.num_steps for record in calls) > 4
    assert sum(record.num_steps for record in calls) == sum(record.num_steps for record in single)
    drafts = [
        sorted(d for each in records for d in each.requests if d[1]) for records in (single, calls)
    ]
    assert drafts[0] == drafts[1]
    for name in ("batch_size", "tokens", "context"):
        sums = [sum(getattr(r, name) * r.num_steps for r in records) for records in (single, calls)]
        assert sums[0] == pytest.approx(sums[1]), name
    drafting = [record for record in calls if record.requests]
    assert all(each.forward_seconds > 0.0 < each.draft_seconds for each in drafting)


@pytest.mark.parametrize(
    "control",
    [
        {"acceptance_rate_window_size": 20, "acceptance_rate_threshold": 0.1},
        {"length_control": "goodput"},
    ],
)
def test_under_measured_lengths_steps_with_drafts_are_continuous(control: dict[str, Any]) -> None:
    """Told that a step takes as long however large it is, goodput control finds that drafts pay."""
    machine = made(8, drafting(**control), pages=512, max_batch_size=2)
    entry = machine.speculation.drafters[0]
    calls = list[int]()
    entry.policy = Clocked(entry.policy, calls)
    for _ in range(6):
        sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2]]
        drain(machine)
        assert outputs(sequences) == EXPECTED[:2]
    assert max(calls) > 4
    assert machine.stats.accepted > 0
    expect_empty(machine)


def test_a_gate_closes_behind_a_call_of_which_little_is_accepted() -> None:
    gate = {"acceptance_rate_window_size": 10, "acceptance_rate_threshold": 1.0}
    machine = made(8, drafting(**gate))
    policy = machine.speculation.drafters[0].policy
    assert isinstance(policy, AcceptanceGate)
    (sequence,) = machine.add(PROMPTS[0], GREEDY)
    drain(machine)
    assert sequence.output == EXPECTED[0]
    assert not policy.open
    expect_empty(machine)


def test_what_is_decided_or_told_in_each_step_keeps_steps_single() -> None:
    def largest(machine: Engine) -> int:
        machine.add(PROMPTS[0], GREEDY)
        return max(len(event.tokens) for event in drain(machine))

    assert largest(made(8)) > 5
    machine = made(8)
    machine.speculation.drafters[0].policy = PerStep()
    assert largest(machine) <= 5
    machine = made(8)
    machine.speculation.drafters[0].resource_manager = Units()
    assert largest(machine) <= 5
    configs = [drafting(), NGramDecodingConfig(max_draft_len=4)]
    machine = engine(speculative=configs, **LIMITS)
    machine.num_decode_steps = 8
    assert largest(machine) <= 5
    machine = made(8, drafting(draft_len=4, synthetic_acceptance=0.5))
    assert largest(machine) <= 5


@pytest.mark.parametrize("beside", ["suffix", "eagle"])
def test_of_several_drafters_the_one_that_all_requests_have_chosen_drafts_for_several_steps(
    beside: str,
) -> None:
    """But where another one reads hidden states, which are stored for it in single steps."""
    other: DecodingBaseConfig = SuffixDecodingConfig(max_draft_len=4)
    if beside == "eagle":
        other = EagleDecodingConfig(max_draft_len=2, speculative_model=random_head("eagle3"))
    machines = [engine(speculative=[other, drafting()], **LIMITS) for _ in range(2)]
    chosen = SpeculationParams(drafter=machines[1].speculation.drafters[1].name)
    machines[1].num_decode_steps = 8
    each = [params.replace(speculation=chosen) for params in varied()]
    expect_same(machines, [run(machine, each) for machine in machines])
    assert machines[1].stats.accepted > 0
    machines[1].add(PROMPTS[0], each[-1])
    largest = max(len(event.tokens) for event in drain(machines[1]))
    assert largest > 8 if beside == "suffix" else largest <= 5


def test_requests_draft_as_far_as_each_asks_for() -> None:
    wishes = [SpeculationParams(max_draft_len=2), SpeculationParams(enabled=False), None]
    each = [GREEDY.replace(speculation=wish) for wish in wishes]
    machines = [made(1), made(8)]
    kept = [run(machine, each) for machine in machines]
    expect_same(machines, kept)
    short, plain, _ = kept[1]
    assert plain.metrics.drafted == 0
    assert 0 < short.metrics.drafted <= 2 * short.metrics.steps


def test_steps_stay_single_while_the_draft_length_depends_on_the_batch() -> None:
    config = drafting(draft_len_schedule={1: 4, 2: 2}, draft_len_schedule_bounds="upper")
    each = [GREEDY, GREEDY.replace(max_tokens=12)]
    machines = [made(1, config), made(8, config)]
    expect_same(machines, [run(machine, each) for machine in machines])


def test_a_draft_model_with_few_positions_drafts_as_far_as_in_single_steps() -> None:
    machines = [made(1), made(8)]
    for machine in machines:
        machine.speculation.drafters[0].drafter._model.runner.lm.max_positions = 30
    try:
        expect_same(machines, [run(machine, [GREEDY]) for machine in machines])
    finally:
        for machine in machines:
            machine.speculation.drafters[0].drafter._model.runner.lm.max_positions = 256


def test_behind_a_full_batch_sequences_wait_for_one_that_ends() -> None:
    machine = made(8, max_batch_size=1)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2]]
    events = drain(machine)
    assert outputs(sequences) == EXPECTED[:2]
    assert len(events) < machine.stats.steps
    expect_empty(machine)


def test_a_streamed_sequence_gets_each_step_by_itself() -> None:
    machine = made(8)
    streamed, other = (machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2])
    streamed.is_streamed = True
    assert max(len(event.tokens) for event in drain(machine)) <= 5
    assert outputs([streamed, other]) == EXPECTED[:2]


def test_where_the_call_fails_the_step_is_made_alone_with_its_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> Advance:
        raise RuntimeError("out of memory")

    change_advance(monkeypatch, fail)
    machine = made(8)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2]]
    events = drain(machine)
    assert outputs(sequences) == EXPECTED[:2]
    assert max(len(event.tokens) for event in events) <= 5
    assert machine.stats.accepted > 0
    assert machine.stats.failed_forwards > 0
    assert machine.stats.draft_failures == 0
    expect_empty(machine)


def test_a_call_that_fails_half_way_leaves_nothing_wrong_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots behind the last known token hold other tokens than the next step computes."""
    made_steps = [made(1), made(8)]

    def fail(advance: Any, rows: List[DecodeRow], num_steps: int) -> Advance:
        advance(rows, num_steps)
        raise RuntimeError("too late")

    single = run(made_steps[0], [GREEDY, GREEDY])
    monkeypatch.setattr(continuous, "step_runners", lambda has_graphs: (SingleSteps,))
    change_advance(monkeypatch, fail)
    expect_same(made_steps, [single, run(made_steps[1], [GREEDY, GREEDY])])


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


@pytest.mark.parametrize("first", [0, 2])
def test_logits_that_are_not_finite_are_computed_again(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the sequence goes on from what was decoded before them."""
    spoilt = list[int]()

    def spoiling(advance: Any, rows: List[DecodeRow], num_steps: int) -> Advance:
        made: Advance = advance(rows, num_steps)
        if not spoilt:
            spoilt.append(first)
            del made.results[0][first:]
        return made

    change_advance(monkeypatch, spoiling)
    machine = made(8)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2]]
    drain(machine)
    assert spoilt
    assert outputs(sequences) == EXPECTED[:2]
    assert [each.had_nonfinite_logits for each in sequences].count(True) == (first == 0)
    assert machine.stats.failures == 0
    expect_empty(machine)


@pytest.mark.parametrize("forward", ["native", "torch"])
def test_logits_that_stay_not_finite_fail_their_request_alone(
    tmp_path: Path, forward: loader.Forward
) -> None:
    """Those of a token which the first one decodes as its sixth."""
    poison = EXPECTED[0][5]
    assert poison not in EXPECTED[0][:5] + EXPECTED[1][:16] + PROMPTS[0] + PROMPTS[1]
    lm = load_poisoned(poison, tmp_path, forward)
    machine = engine_over(lm, speculative=[drafting()], **LIMITS)
    machine.num_decode_steps = 8
    params = GREEDY.replace(max_tokens=16)
    sequences = [machine.add(prompt, params)[0] for prompt in PROMPTS[:2]]
    events = drain(machine)
    errors = [event for event in events if event.error is not None]
    assert [event.sequence for event in errors] == sequences[:1]
    assert isinstance(errors[0].error, LogitsError)
    assert sequences[0].output == EXPECTED[0][:6]
    assert sequences[1].output == EXPECTED[1][:16]
    expect_empty(machine)


def test_a_row_ends_in_the_middle_of_its_draft() -> None:
    free = made(8)
    (sequence,) = run(free, [GREEDY])
    step = next(each for each in sequence.drafted_steps if each.num_accepted >= 2)
    end = EXPECTED[0][step.start]  # accepted, and others behind it
    size = EXPECTED[0].index(end) + 1
    machines = [made(1), made(8)]
    kept = [run(m, [GREEDY.replace(stop_token_ids=[end])]) for m in machines]
    expect_same(machines, kept)
    assert kept[1][0].output == EXPECTED[0][:size]
    assert kept[1][0].finish_reason is FinishReason.STOP
    assert kept[1][0].status is Status.PARKED
