"""One request never hurts another: whatever fails beside them, healthy ones say the same as alone.

The network, planning, copying, sampling and constraints are made to fail for some requests, which
get the error. After each run every page is accounted for, and the engine serves the same prompts
again, now with what has been left in the prefix cache.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import drafters
from engines import drain, engine, expect_empty, load, load_poisoned, outputs
from forethought.backends.cpu import sampler
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine, Event
from forethought.engine.sequence import Sequence as Generated
from forethought.errors import LogitsError
from forethought.model.batch import Batch
from forethought.model.causal_lm import CausalLM
from forethought.model.runner import ModelRunner
from forethought.model.sampling import TokenContext, distribution
from forethought.speculative.drafter import DraftRequest
from medusa_heads import random_heads
from models import VOCAB, prompts, tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=0.9, seed=11)
SAMPLING = {"greedy": GREEDY, "sampled": SAMPLED}
HEALTHY = prompts((4, 9, 17))


@functools.cache
def undisturbed(name: str, drafter: str = "none") -> tuple[tuple[int, ...], ...]:
    machine = engine(speculative=drafting(drafter, name))
    sequences = [machine.add(prompt, SAMPLING[name])[0] for prompt in HEALTHY]
    drain(machine)
    return tuple(map(tuple, outputs(sequences)))


@functools.cache
def poison() -> int:
    """A token that no healthy request has to do with."""
    texts = [*HEALTHY, *undisturbed("greedy"), *undisturbed("sampled")]
    known = {token for text in texts for token in text}
    return next(token for token in range(3, VOCAB) if token not in known)


def bad_prompts() -> list[list[int]]:
    return [[5, 6, 7, poison()], [*[8] * 20, poison()]]


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="heads-")


@functools.cache
def medusa() -> Path:
    """Heads that read the hidden states of the target, which the forward hands out."""
    return random_heads(Path(_directory().name))


def drafting(name: str, params: str) -> list[DecodingBaseConfig]:
    def truth(request: DraftRequest) -> list[int]:
        said = zip(HEALTHY, undisturbed(params), strict=True)
        answers = {tuple(prompt): list(tokens) for prompt, tokens in said}
        known = tuple(request.tokens[: request.prompt_length]) in answers
        return drafters.truth(answers, request) if known else [9] * request.max_draft_len

    def poisonous(request: DraftRequest) -> list[int]:
        return [*truth(request)[:1], poison()]

    def provided(drafter: Any, nodes: int) -> DecodingBaseConfig:
        return UserProvidedDecodingConfig(
            max_draft_len=3, max_total_draft_tokens=nodes, drafter=drafter
        )

    def model(sampling: str) -> DecodingBaseConfig:
        return DraftTargetDecodingConfig(
            max_draft_len=3, speculative_model=tiny("llama", seed=7), draft_sampling=sampling
        )

    configs: dict[str, Callable[[], DecodingBaseConfig]] = {
        "oracle": lambda: provided(drafters.PerRequest(truth), 3),
        "poisonous": lambda: provided(drafters.PerRequest(poisonous), 3),
        "ngram": lambda: NGramDecodingConfig(max_draft_len=3, max_matching_ngram_size=1),
        "draft model": lambda: model("greedy"),
        "sampled drafts": lambda: model("sampled"),
        "medusa": lambda: MedusaDecodingConfig(speculative_model=medusa()),
    }
    return [configs[name]()] if name in configs else []


class Network:
    """A network that calls ``before`` with each batch and hands its logits to ``after``."""

    def __init__(self, inner: Any, before: Any = None, after: Any = None) -> None:
        self.inner, self.before, self.after = inner, before, after

    def __call__(self, batch: Batch, forward_pass: Any) -> Tensor:
        if self.before is not None:
            self.before(batch)
        logits: Tensor = self.inner(batch, forward_pass)
        return logits if self.after is None else self.after(batch, logits)

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.inner.embed(token_ids)
        return embedded

    def unembed(self, states: Tensor) -> Tensor:
        logits: Tensor = self.inner.unembed(states)
        return logits


def rig(runner: ModelRunner, before: Any = None, after: Any = None) -> None:
    lm = runner.lm
    runner.lm = CausalLM(Network(lm.network, before, after), lm.backend, lm.traits)


def failing(error: Exception) -> Callable[[Batch], None]:
    def before(batch: Batch) -> None:
        if (batch.token_ids == poison()).any():
            raise error

    return before


def mixed(
    machine: Engine, params: SamplingParams, bad: Sequence[Sequence[int]]
) -> tuple[list[Generated], list[Generated], list[Event]]:
    """Run healthy prompts, bad ones among them; some of each begin later."""
    healthy, culprits, events = list[Generated](), list[Generated](), list[Event]()
    for place, prompt in enumerate(HEALTHY):
        healthy += machine.add(prompt, params)
        if place < len(bad):
            culprits += machine.add(bad[place], params)
        events += machine.step()
        machine.check_integrity()
    return healthy, culprits, events + drain(machine)


def expect_healthy(
    machine: Engine, healthy: Sequence[Generated], name: str, drafter: str = "none"
) -> None:
    """They say what they say alone, and so do later ones.

    Sampled drafts draw other tokens from the same seed: there the drafter has to be the same.
    """
    drafter = drafter if drafter == "sampled drafts" else "none"
    assert tuple(map(tuple, outputs(healthy))) == undisturbed(name, drafter)
    expect_empty(machine)
    again = [machine.add(prompt, SAMPLING[name])[0] for prompt in HEALTHY]
    assert not any(event.error for event in drain(machine))
    assert tuple(map(tuple, outputs(again))) == undisturbed(name, drafter)
    expect_empty(machine)


def errors_of(events: Sequence[Event]) -> dict[int, Exception]:
    return {event.sequence.id: event.error for event in events if event.error is not None}


def expect_failed(
    machine: Engine, culprits: Sequence[Generated], events: Sequence[Event], kind: type
) -> None:
    """These have failed, with errors of this kind, and no other sequence."""
    found = errors_of(events)
    assert set(found) == {culprit.id for culprit in culprits}
    assert {type(error) for error in found.values()} <= {kind}
    assert machine.stats.failures == len(culprits)


# ---- the network -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError(), IndexError()])
@pytest.mark.parametrize("drafter", ["none", "oracle", "ngram", "draft model"])
@pytest.mark.parametrize("name", SAMPLING)
def test_a_row_on_which_the_network_fails_takes_no_other_with_it(
    name: str, drafter: str, error: Exception
) -> None:
    machine = engine(speculative=drafting(drafter, name), max_num_tokens=24)
    rig(machine.runner, before=failing(error))
    healthy, culprits, events = mixed(machine, SAMPLING[name], bad_prompts())
    expect_failed(machine, culprits, events, type(error))
    expect_healthy(machine, healthy, name, drafter)


def test_drafts_that_are_in_a_failed_forward_are_verified_as_they_were_drawn() -> None:
    def before(batch: Batch) -> None:
        prefills = [batch.token_ids[s.start : s.stop] for s in batch.spans if s.length > 4]
        if any((tokens == poison()).any() for tokens in prefills):
            raise RuntimeError("out of memory")

    machine = engine(speculative=drafting("sampled drafts", "sampled"))
    rig(machine.runner, before=before)
    bad = [[*[8] * 20, poison()], [5, 6, 7, 8, 9, poison()]]
    healthy, culprits, events = mixed(machine, SAMPLED, bad)
    expect_failed(machine, culprits, events, RuntimeError)
    assert machine.stats.accepted > 0
    expect_healthy(machine, healthy, "sampled", "sampled drafts")


@pytest.mark.parametrize("name", SAMPLING)
def test_a_request_keeps_its_output_when_the_network_fails_on_the_next_token(
    name: str,
) -> None:
    machine = engine()
    rig(machine.runner, before=failing(RuntimeError()))
    params = SAMPLING[name].replace(logit_bias={poison(): 100.0}, repetition_penalty=1.1)
    [culprit] = machine.add([5, 6, 7], params)
    healthy = [machine.add(prompt, SAMPLING[name])[0] for prompt in HEALTHY]
    events = drain(machine)
    expect_failed(machine, [culprit], events, RuntimeError)
    assert culprit.output == [poison()]
    expect_healthy(machine, healthy, name)


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("drafter", ["none", "draft model", "medusa"])
@pytest.mark.parametrize("name", SAMPLING)
def test_no_request_fails_where_a_forward_of_fewer_rows_succeeds(
    name: str, drafter: str, most: int
) -> None:
    def before(batch: Batch) -> None:
        if len(batch.spans) > most:
            raise RuntimeError("out of memory")

    machine = engine(speculative=drafting(drafter, name))
    rig(machine.runner, before=before)
    healthy, _, events = mixed(machine, SAMPLING[name], [])
    assert not errors_of(events)
    assert machine.stats.failed_forwards > 0
    expect_healthy(machine, healthy, name)


@pytest.mark.parametrize("name", SAMPLING)
def test_drafts_are_dropped_before_a_request_fails_for_lack_of_memory(
    name: str,
) -> None:
    def before(batch: Batch) -> None:
        if any(span.length in (2, 3, 4) for span in batch.spans):  # no prompt is so short
            raise RuntimeError("out of memory")

    machine = engine(speculative=drafting("oracle", name), max_num_tokens=40)
    rig(machine.runner, before=before)
    healthy = [machine.add(prompt, SAMPLING[name])[0] for prompt in HEALTHY[1:]]
    assert not errors_of(drain(machine))
    assert tuple(map(tuple, outputs(healthy))) == undisturbed(name)[1:]
    assert machine.stats.accepted == 0
    assert machine.stats.draft_failures == len(healthy)  # each is dropped for good
    expect_empty(machine)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_draft_on_which_the_network_fails_costs_the_drafts_alone(name: str) -> None:
    machine = engine(speculative=drafting("poisonous", name))
    rig(machine.runner, before=failing(RuntimeError()))
    healthy, _, events = mixed(machine, SAMPLING[name], [])
    assert not errors_of(events)
    assert machine.stats.draft_failures == len(HEALTHY)
    expect_healthy(machine, healthy, name)


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_forward_of_one_row_is_tried_twice_before_its_request_fails(num_failures: int) -> None:
    failures = iter([False, False, *[True] * num_failures])

    def before(batch: Batch) -> None:
        if next(failures, False):
            raise RuntimeError("out of memory")

    machine = engine()
    rig(machine.runner, before=before)
    [sequence] = machine.start(HEALTHY[0], GREEDY)
    errors = errors_of(drain(machine))
    assert machine.stats.failed_forwards == num_failures
    if num_failures == 1:
        assert not errors
        assert tuple(sequence.output) == undisturbed("greedy")[0]
    else:
        assert set(errors) == {sequence.id}
    expect_empty(machine)


def test_a_failed_prefill_does_not_fail_its_forks() -> None:
    machine = engine()
    [main] = machine.add(HEALTHY[2], GREEDY, keep=True)
    drain(machine)
    rig(machine.runner, before=failing(RuntimeError()))
    machine.extend(main, [poison()])
    machine.resume(main, GREEDY)
    child = machine.fork(main, len(HEALTHY[2]))  # does not hold the bad token
    machine.resume(child, GREEDY)
    samples = machine.add([5, 6, poison()], GREEDY.replace(n=3, temperature=1.0, seed=2))
    events = drain(machine)
    expect_failed(machine, [main, *samples], events, RuntimeError)
    assert tuple(child.output) == undisturbed("greedy")[2]
    machine.close(child)
    expect_empty(machine)


# ---- planning --------------------------------------------------------------------------------


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_salt_that_no_prefix_can_be_looked_up_with_fails_its_request_alone(
    waits_first: bool,
) -> None:
    machine = engine()
    params = GREEDY.replace(cache_salt="x", priority=-int(waits_first))
    object.__setattr__(params, "cache_salt", "\ud800")  # as if no one had checked it
    healthy = [machine.add(prompt, GREEDY)[0] for prompt in HEALTHY]
    events = machine.step()
    [culprit] = machine.add([5, 6, 7, 8, 9], params)
    events += machine.step()
    assert set(errors_of(events)) == {culprit.id}
    events += drain(machine)
    expect_failed(machine, [culprit], events, UnicodeEncodeError)
    expect_healthy(machine, healthy, "greedy")


@pytest.mark.parametrize("drafter", ["none", "oracle"])
@pytest.mark.parametrize("method", ["pages_needed", "append"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_sequence_that_cannot_be_planned_fails_alone(
    step: int, method: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = engine(speculative=drafting(drafter, "greedy"))
    [culprit] = machine.add([5, 6, 7, 8, 9], GREEDY)
    healthy = [machine.add(prompt, GREEDY)[0] for prompt in HEALTHY]
    events = [event for _ in range(step) for event in machine.step()]
    original = getattr(type(culprit.table), method)

    def broken(table: Any, count: int) -> Any:
        if table is culprit.table:
            raise ValueError("no plan")
        return original(table, count)

    monkeypatch.setattr(type(culprit.table), method, broken)
    events += machine.step()
    machine.check_integrity()
    assert set(errors_of(events)) == {culprit.id}
    expect_failed(machine, [culprit], events + drain(machine), ValueError)
    expect_healthy(machine, healthy, "greedy")


def test_pages_that_cannot_be_copied_are_computed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = engine(page_size=8)
    [main] = machine.add(HEALTHY[2], GREEDY, keep=True)
    drain(machine)
    forks = [machine.fork(main, len(HEALTHY[2])) for _ in range(2)]
    for fork in forks:
        machine.resume(fork, GREEDY)

    def broken(copies: Sequence[Any]) -> None:
        if copies:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(machine.runner.storage, "copy_pages", broken)
    assert not errors_of(drain(machine))
    assert {tuple(fork.output) for fork in forks} == {undisturbed("greedy")[2]}
    for each in (main, *forks):
        machine.close(each)
    expect_empty(machine)


# ---- sampling and constraints ----------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "oracle", "sampled drafts"])
@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampler_that_fails_for_one_request_fails_it_alone(
    name: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_bias, packed_sampling = distribution._add_bias, sampler.packed_sampling

    def expect_unpoisoned(*contexts: TokenContext) -> None:
        if any(poison() in (context.params.logit_bias or {}) for context in contexts):
            raise FloatingPointError("no distribution")

    def broken(logits: Tensor, contexts: Sequence[TokenContext]) -> None:
        expect_unpoisoned(*contexts)
        add_bias(logits, contexts)

    def broken_natively(context: TokenContext, keep: list[object]) -> Any:
        expect_unpoisoned(context)
        return packed_sampling(context, keep)

    monkeypatch.setattr(distribution, "_add_bias", broken)
    monkeypatch.setattr(sampler, "packed_sampling", broken_natively)
    machine = engine(speculative=drafting(drafter, name))
    healthy = [machine.add(prompt, SAMPLING[name])[0] for prompt in HEALTHY]
    culprits = machine.add([5, 6, 7], SAMPLING[name].replace(logit_bias={poison(): 1.0}, n=2))
    expect_failed(machine, culprits, drain(machine), FloatingPointError)
    expect_healthy(machine, healthy, name, drafter)


class Anything:
    """A constraint that allows every token, and may fail after some of them."""

    def __init__(self, mask_fails: int | None = None, end_fails: int | None = None) -> None:
        self._mask_fails, self._end_fails = mask_fails, end_fails

    def mask(self, output: Sequence[int]) -> Any:
        if len(output) == self._mask_fails:
            raise RuntimeError("no mask")
        return np.full(-(-VOCAB // 8), 0xFF, np.uint8)

    def is_complete(self, output: Sequence[int]) -> bool:
        if len(output) == self._end_fails:
            raise RuntimeError("no answer")
        return False


@pytest.mark.parametrize("drafter", ["none", "oracle"])
@pytest.mark.parametrize(
    "fault", [{"mask_fails": 0}, {"mask_fails": 3}, {"end_fails": 1}, {"end_fails": 4}]
)
@pytest.mark.parametrize("name", SAMPLING)
def test_a_constraint_that_fails_fails_its_own_sample_alone(
    name: str, fault: dict[str, int], drafter: str
) -> None:
    machine = engine(speculative=drafting(drafter, name))
    shaped = SAMPLING[name].replace(guided_decoding={"choice": ["any"]})
    for broken in range(3):
        made = [Anything(**(fault if each == broken else {})) for each in range(3)]
        before = machine.stats.failures
        healthy = [machine.add(prompt, SAMPLING[name])[0] for prompt in HEALTHY]
        samples = machine.add(
            HEALTHY[1], shaped.replace(n=3), constraints=lambda _, n, made=made: made
        )
        found = errors_of(drain(machine))
        assert set(found) == {samples[broken].id}
        assert str(found[samples[broken].id]).startswith("no ")
        assert machine.stats.failures == before + 1
        others = [each.output for each in samples if each is not samples[broken]]
        if name == "greedy":
            assert {tuple(each) for each in others} == {undisturbed(name)[1]}
        elif samples[broken].index:
            assert tuple(samples[0].output) == undisturbed(name)[1]
        expect_healthy(machine, healthy, name)


def test_a_constraint_that_cannot_be_made_leaves_nothing_behind() -> None:
    machine = engine()
    shaped = GREEDY.replace(guided_decoding={"choice": ["any"]}, n=3)
    with pytest.raises(ZeroDivisionError):
        machine.add(HEALTHY[0], shaped, constraints=lambda _, n: [Anything(), Anything(), 1 / 0])
    assert not machine.has_work
    expect_empty(machine)


# ---- logits that are not finite --------------------------------------------------------------


def spoiling(value: float) -> Callable[[Batch, Tensor], Tensor]:
    """Logits behind the bad token are ``value``; -inf for all tokens, others for one."""

    def after(batch: Batch, logits: Tensor) -> Tensor:
        logits = logits.clone()
        bad = batch.token_ids[batch.logit_index] == poison()
        logits[bad, slice(None) if value == -math.inf else 7] = value
        return logits

    return after


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("drafter", ["none", "oracle", "poisonous", "sampled drafts"])
@pytest.mark.parametrize("name", SAMPLING)
def test_logits_that_are_not_finite_are_the_error_of_their_request(
    name: str, drafter: str, value: float
) -> None:
    machine = engine(speculative=drafting(drafter, name), max_num_tokens=24)
    rig(machine.runner, after=spoiling(value))
    healthy, culprits, events = mixed(machine, SAMPLING[name], bad_prompts())
    expect_failed(machine, culprits, events, LogitsError)
    for error in errors_of(events).values():
        assert "not finite" in str(error)
        assert "float32" in str(error)
    expect_healthy(machine, healthy, name, drafter)


@pytest.mark.parametrize(
    "requested_nodes",
    [
        {"logprobs": 3},
        {"logit_bias": {4: 1.0}},
        {"min_tokens": 5},
        {"n": 3},
        {"prompt_logprobs": 1, "n": 2},
        {"top_p": 0.9},
    ],
)
@pytest.mark.parametrize("name", SAMPLING)
def test_whatever_is_asked_of_a_request_without_finite_logits_it_fails(
    name: str, requested_nodes: dict[str, Any]
) -> None:
    machine = engine(max_num_tokens=12)
    rig(machine.runner, after=spoiling(math.nan))
    healthy = [machine.add(prompt, SAMPLING[name])[0] for prompt in HEALTHY]
    culprits = machine.add(bad_prompts()[1], SAMPLING[name].replace(**requested_nodes))
    expect_failed(machine, culprits, drain(machine), LogitsError)
    expect_healthy(machine, healthy, name)


def test_prompt_logprobs_that_are_not_finite_are_an_error_as_well() -> None:
    machine = engine(max_num_tokens=6)
    rig(machine.runner, after=spoiling(math.nan))
    prompt = [*[8] * 9, poison(), *[8] * 5]
    culprits = machine.add(prompt, GREEDY.replace(prompt_logprobs=0))
    expect_failed(machine, culprits, drain(machine), LogitsError)
    expect_empty(machine)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_vocabulary_that_is_masked_but_for_one_token_is_no_error(name: str) -> None:
    def after(batch: Batch, logits: Tensor) -> Tensor:
        masked = torch.full_like(logits, -math.inf)
        masked[:, 42] = -3.0e38
        return masked

    machine = engine()
    rig(machine.runner, after=after)
    [sequence] = machine.add([5, 6], SAMPLING[name])
    assert not errors_of(drain(machine))
    assert sequence.output == [42] * 12


@pytest.mark.parametrize("drafter", ["none", "oracle"])
@pytest.mark.parametrize("name", SAMPLING)
def test_logits_that_are_not_finite_once_cost_no_token(name: str, drafter: str) -> None:
    calls = iter(range(10**6))

    def after(batch: Batch, logits: Tensor) -> Tensor:
        return logits * math.nan if next(calls) == 3 else logits

    machine = engine(speculative=drafting(drafter, name))
    rig(machine.runner, after=after)
    healthy, _, events = mixed(machine, SAMPLING[name], [])
    assert not errors_of(events)
    expect_healthy(machine, healthy, name)


def test_prompt_logprobs_are_those_of_the_second_time_where_the_first_was_not_finite() -> None:
    found = []
    for broken in (None, 0, 1, 2):
        calls = iter(range(10**6))

        def after(batch: Batch, logits: Tensor) -> Tensor:
            return logits * math.nan if next(calls) == broken else logits  # noqa: B023

        machine = engine(max_num_tokens=8)
        rig(machine.runner, after=after)
        samples = machine.add(HEALTHY[2], GREEDY.replace(prompt_logprobs=0, n=2))
        assert not errors_of(drain(machine))
        assert {tuple(sample.output) for sample in samples} == {undisturbed("greedy")[2]}
        found += [sample.prompt_logprobs for sample in samples]
        expect_empty(machine)
    assert len(found[0]) == len(HEALTHY[2])
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_draft_model_without_finite_logits_costs_the_drafts_alone(name: str) -> None:
    machine = engine(speculative=drafting("draft model", name))
    model: Any = machine.speculation.drafters[0].drafter
    rig(model._model.runner, after=lambda batch, logits: logits * math.nan)
    healthy, _, events = mixed(machine, SAMPLING[name], [])
    assert not errors_of(events)
    expect_healthy(machine, healthy, name)


# ---- keys and values that are not finite -----------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """The tiny model, whose embedding of the bad token is NaN."""
    return load_poisoned(poison(), tmp_path_factory.mktemp("poisoned"))


def poisoned_engine(lm: CausalLM, **settings: Any) -> Engine:
    machine = engine(**settings)
    assert load("llama").traits.vocab_size == lm.traits.vocab_size
    machine.runner.lm = lm
    return machine


@pytest.mark.parametrize("drafter", ["none", "oracle", "poisonous", "draft model"])
@pytest.mark.parametrize(("pages", "page_size"), [(64, 4), (6, 16), (7, 16)])
@pytest.mark.parametrize("name", SAMPLING)
def test_what_a_poisoned_request_leaves_in_the_cache_harms_no_other(
    name: str, pages: int, page_size: int, drafter: str, poisoned: CausalLM
) -> None:
    machine = poisoned_engine(
        poisoned,
        pages=pages,
        page_size=page_size,
        max_num_tokens=24,
        max_length=64,
        speculative=drafting(drafter, name),
    )
    bad = [[poison(), *[8] * 30], [7, poison()]]
    for _ in range(2):
        before = machine.stats.failures
        healthy, culprits, events = mixed(machine, SAMPLING[name], bad)
        assert set(errors_of(events)) == {culprit.id for culprit in culprits}
        assert all(isinstance(error, LogitsError) for error in errors_of(events).values())
        assert machine.stats.failures == before + len(bad)
        expect_healthy(machine, healthy, name)


def test_no_prefix_of_a_poisoned_request_is_found_again(poisoned: CausalLM) -> None:
    machine = poisoned_engine(poisoned, max_num_tokens=8)
    prompt = [poison(), *[8] * 30]
    machine.add(prompt, GREEDY)
    assert [type(event.error) for event in drain(machine)] == [LogitsError]
    assert machine.index.find(machine.index.digests(prompt)) == []
    expect_empty(machine)


@pytest.mark.parametrize("name", SAMPLING)
def test_the_pages_of_a_poisoned_request_that_was_aborted_harm_no_other(
    name: str, poisoned: CausalLM
) -> None:
    machine = poisoned_engine(poisoned, pages=6, page_size=16, max_num_tokens=30, max_length=96)
    [aborted] = machine.add([poison()] * 90, SAMPLING[name])
    machine.step()
    machine.step()
    machine.abort(aborted)
    healthy = [machine.add(prompt, SAMPLING[name])[0] for prompt in HEALTHY]
    assert not errors_of(drain(machine))
    expect_healthy(machine, healthy, name)


def test_a_chain_forked_behind_poisonous_drafts_goes_on(poisoned: CausalLM) -> None:
    drafts = drafting("poisonous", "greedy")
    machine = poisoned_engine(poisoned, page_size=16, max_num_tokens=4, speculative=drafts)
    [main] = machine.add(HEALTHY[1], GREEDY, keep=True)
    while len(main.output) < 3:
        machine.step()
    child = machine.fork(main)
    machine.extend(child, [8] * 9)
    machine.resume(child, GREEDY)
    assert not errors_of(drain(machine))
    assert tuple(main.output) == undisturbed("greedy")[1]
    plain = engine()
    [alone] = plain.add(child.tokens[: child.prompt_length], GREEDY)
    drain(plain)
    assert child.output == alone.output
    for each in (main, child):
        machine.close(each)
    expect_empty(machine)
