"""A user's drafter that fails costs its own requests the drafts, and other requests nothing."""

from __future__ import annotations

import functools
import itertools
import math
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import drafters
from engines import drain, engine, expect_empty, outputs
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.speculative.chain_source import TextChains
from forethought.speculative.drafter import Drafter, DraftRequest
from models import VOCAB, greedy, prompts, tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = prompts((4, 9, 5))
PLAIN = {
    tuple(prompt): said
    for prompt, said in zip(PROMPTS, greedy(tiny("llama"), PROMPTS, 20), strict=True)
}


def accepted_with(drafter: Drafter, **settings: Any) -> int:
    """Accepted tokens of requests that must say what they say without drafts."""
    config = UserProvidedDecodingConfig(max_draft_len=3, drafter=drafter)
    num_steps = settings.pop("num_steps", 1)
    machine = engine(speculative=[config], **settings)
    machine.num_decode_steps = num_steps
    samples = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert all(event.error is None for event in drain(machine))
    assert outputs(samples) == list(PLAIN.values())
    expect_empty(machine)
    return machine.stats.accepted


def test_ids_outside_the_vocabulary_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    drafter = drafters.PerRequest(lambda request: [*drafters.truth(PLAIN, request)[:1], VOCAB, -3])
    assert accepted_with(drafter) > 3
    [record] = [each for each in caplog.records if "proposed the id" in each.getMessage()]
    assert "the id 101, and the target's are 0 to 100" in record.getMessage()


@pytest.mark.parametrize("name", ["chain_source", "can_follow", "draft"])
def test_one_that_raises_about_several_steps_at_once_has_its_drafts_in_single_ones(
    name: str,
) -> None:
    class Chains(drafters.PerRequest):
        """Its drafts follow each other, but for what raises."""

        @property
        def chain_source(self) -> Any:
            if name == "chain_source":
                raise RuntimeError("unknown")
            chains = TextChains(self)
            return SimpleNamespace(
                drafter=self,
                learns_from_ends=False,
                max_positions=math.inf,
                draft_caches=(),
                can_follow=chains.can_follow if name != "can_follow" else None,
                draft=chains.draft if name != "draft" else None,
            )

    assert accepted_with(Chains(lambda request: drafters.truth(PLAIN, request)), num_steps=8) > 3


def says_how_large(answer: Any) -> Drafter:
    drafter = drafters.oracle(PLAIN)
    drafter.nodes = lambda depth: answer() if callable(answer) else answer  # type: ignore[method-assign]
    return drafter


@pytest.mark.parametrize("answer", [None, "3", 1.5, -1, 0, lambda: 1 // 0])
def test_one_that_cannot_say_how_large_its_drafts_are_has_none(answer: Any) -> None:
    assert accepted_with(says_how_large(answer)) == 0


def test_a_drafter_that_wants_more_nodes_than_there_are_gets_what_there_is() -> None:
    assert accepted_with(says_how_large(10**9)) > 0


@pytest.mark.parametrize("pages", [64, 12])
def test_limits_that_a_drafter_rewrites_hold_all_the_same(pages: int) -> None:
    def grow(request: DraftRequest) -> list[int]:
        said = drafters.truth(PLAIN, request)
        request.max_draft_len = request.max_nodes = 10**6
        return said + [3] * 100

    assert accepted_with(drafters.PerRequest(grow), pages=pages) > 0


def test_what_a_drafter_does_to_a_draft_after_the_step_changes_nothing() -> None:
    drafter = drafters.oracle(PLAIN)

    def forget(scheduled_requests: Any) -> None:
        for request in scheduled_requests.generation_requests:
            request.draft = None

    drafter.update = forget  # type: ignore[method-assign]
    assert accepted_with(drafter) > 0


def test_the_list_of_requests_is_the_drafters_own() -> None:
    class Odd(Drafter):
        def prepare_draft_tokens(
            self, scheduled_requests: Any, resource_manager: Any = None
        ) -> None:
            requests = scheduled_requests.generation_requests
            for request in requests:
                request.py_draft_tokens = drafters.truth(PLAIN, request)
            requests.append(None)
            requests.reverse()

    assert accepted_with(Odd()) > 0


@pytest.mark.parametrize("kind", [tuple, iter, numpy.array, torch.tensor])
def test_tokens_may_come_as_any_kind_of_sequence(kind: Any) -> None:
    drafter = drafters.PerRequest(lambda request: kind(drafters.truth(PLAIN, request)))
    assert accepted_with(drafter) > 0


# ---- what is no Exception ----------------------------------------------------------------------

HOOKS = ["prepare_draft_tokens", "nodes", "update", "release"]
LEAVES: list[Callable[[], Any]] = [sys.exit, lambda: throw(GeneratorExit), lambda: throw(Stop)]


class Stop(BaseException):
    pass


def throw(kind: type[BaseException]) -> None:
    raise kind


def leaving(hook: str, leave: Callable[[], Any]) -> Drafter:
    """Knows the truth, and leaves in one of its methods when it is about the second prompt."""
    drafter = drafters.oracle(PLAIN)
    original, calls = getattr(drafter, hook), itertools.count()

    def broken(*args: Any) -> Any:
        shown, call = args[0], next(calls)
        requests = [shown] if isinstance(shown, DraftRequest) else []
        requests += getattr(shown, "generation_requests", [])
        asked = hook == "nodes" and call > 0  # the first one comes from the configuration
        if asked or any(one.tokens[:9] == PROMPTS[1] for one in requests):
            leave()
        return original(*args)

    setattr(drafter, hook, broken)
    return drafter


@pytest.mark.parametrize("leave", LEAVES, ids=["SystemExit", "GeneratorExit", "BaseException"])
@pytest.mark.parametrize("hook", HOOKS)
def test_one_that_leaves_costs_its_request_the_drafts_and_nothing_else(
    hook: str, leave: Callable[[], Any]
) -> None:
    accepted = accepted_with(leaving(hook, leave))
    assert (accepted > 0) == (hook != "nodes")


@pytest.mark.parametrize("hook", HOOKS)
def test_an_interrupt_in_another_thread_is_the_drafters_own(hook: str) -> None:
    drafter = leaving(hook, lambda: throw(KeyboardInterrupt))
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accepted_with, drafter).result()
    assert (accepted > 0) == (hook != "nodes")


def leave(status: int, *_: Any) -> None:
    sys.exit(status)


class Leave:
    def __call__(self, *_: Any) -> None:
        sys.exit(3)

    def method(self, *_: Any) -> None:
        sys.exit(3)


@pytest.mark.parametrize("hook", ["prepare_draft_tokens", "nodes", "update"])
@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, lambda *_: sys.exit(3)),
        (signal.SIGTERM, functools.partial(leave, 3)),
        (signal.SIGTERM, functools.partial(functools.partial(Leave()), 3)),
        (signal.SIGTERM, Leave()),
        (signal.SIGTERM, Leave().method),
    ],
    ids=["Ctrl-C", "function", "partial", "partial object", "object", "method"],
)
def test_a_signal_that_comes_while_drafting_ends_the_call_and_the_engine_goes_on(
    hook: str, number: signal.Signals, handler: Any
) -> None:
    sent: list[int] = []

    def send() -> None:
        if not sent:
            sent.append(number)
            signal.raise_signal(number)

    config = UserProvidedDecodingConfig(max_draft_len=3, drafter=leaving(hook, send))
    machine = engine(speculative=[config])
    samples = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    before = signal.signal(number, handler)  # Ctrl-C is ignored where tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            drain(machine)
    finally:
        signal.signal(number, before)
    machine.check_integrity()
    streamed = {sample.id: len(sample.output) for sample in samples}
    events = drain(machine)
    assert outputs(samples) == list(PLAIN.values())
    assert machine.stats.draft_failures == 0
    for sample in samples:  # also of the step whose end was interrupted
        later = sum(len(event.tokens) for event in events if event.sequence is sample)
        assert later >= len(sample.output) - streamed[sample.id]
    expect_empty(machine)


def test_events_of_an_interrupted_step_are_returned_by_the_next() -> None:
    drafter = leaving("update", lambda: throw(KeyboardInterrupt))
    config = UserProvidedDecodingConfig(max_draft_len=3, drafter=drafter)
    machine = engine(speculative=[config])
    [sample] = machine.add(PROMPTS[1], GREEDY)
    tokens: list[int] = []
    interrupts = 0
    while machine.has_work:
        try:
            tokens += [token for event in machine.step() for token in event.tokens]
        except KeyboardInterrupt:
            interrupts += 1
    tokens += [token for event in machine.step() for token in event.tokens]
    assert interrupts > 1
    assert tokens == sample.output == PLAIN[tuple(PROMPTS[1])]
    expect_empty(machine)


# ---- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "meddle",
    [
        lambda request: request.table.release(),
        lambda request: request.table.rewind(1),
        lambda request: request.table.append(40),
        lambda request: request.table.prefix(2).release(),
        lambda request: request.table.fork().release(),
        lambda request: setattr(request.table, "length", 0),
        lambda request: setattr(request.table, "pages", []),
        lambda request: request.table.pages.clear(),
        lambda request: setattr(request, "table", None),
    ],
)
@pytest.mark.parametrize("hook", ["prepare_draft_tokens", "update", "release"])
def test_one_that_meddles_with_the_page_table_changes_nothing_of_it(
    hook: str, meddle: Callable[[DraftRequest], Any]
) -> None:
    drafter = drafters.oracle(PLAIN)
    original = getattr(drafter, hook)

    def meddling(*args: Any) -> Any:
        shown = args[0]
        requests = getattr(shown, "generation_requests", [shown])
        for request in requests:
            if request.tokens[:9] == PROMPTS[1]:
                meddle(request)
        return original(*args)

    setattr(drafter, hook, meddling)
    assert accepted_with(drafter, pages=12) > 0
