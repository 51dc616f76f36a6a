"""A user's drafter that breaks its word costs its requests the drafts, and nobody anything else."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import drafters
from engines import drain, engine, expect_empty, outputs
from forethought.decoding import UserProvidedDecodingConfig
from forethought.params import SamplingParams
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
    machine = engine(speculative=[config], **settings)
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


def says_how_large(answer: Any) -> Drafter:
    drafter = drafters.oracle(PLAIN)
    drafter.nodes = lambda depth: answer() if callable(answer) else answer  # type: ignore[method-assign]
    return drafter


@pytest.mark.parametrize("answer", [None, "3", 1.5, -1, 0, lambda: 1 // 0])
def test_one_that_cannot_say_how_large_its_drafts_are_has_none(answer: Any) -> None:
    assert accepted_with(says_how_large(answer)) == 0


def test_one_that_wants_more_room_than_there_is_gets_what_there_is() -> None:
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
