"""Drafters that tests need: one that knows, one that errs, and several that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forethought.speculative.drafter import (
    Draft,
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from models import VOCAB


class PerRequest(Drafter):
    """Answers each request by a function of it."""

    def __init__(self, answer: Callable[[DraftRequest], Sequence[int] | Draft | Any]) -> None:
        self.answer = answer
        self.released: list[int] = []
        self.closed = False

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        for request in scheduled_requests.generation_requests:
            answer = self.answer(request)
            if isinstance(answer, Draft):
                request.draft = answer
            else:
                request.py_draft_tokens = answer

    def release(self, request: DraftRequest) -> None:
        self.released.append(request.request_id)

    def shutdown(self) -> None:
        self.closed = True


def truth(answers: Mapping[tuple[int, ...], Sequence[int]], request: DraftRequest) -> list[int]:
    """What plain decoding says next: ``answers`` maps prompts to whole outputs."""
    prompt = tuple(request.tokens[: request.prompt_length])
    done = len(request.tokens) - request.prompt_length
    return list(answers[prompt][done : done + request.max_draft_len])


def oracle(answers: Mapping[tuple[int, ...], Sequence[int]]) -> Drafter:
    """Always right."""
    return PerRequest(lambda request: truth(answers, request))


def adversary(answers: Mapping[tuple[int, ...], Sequence[int]]) -> Drafter:
    """Always wrong."""
    return PerRequest(
        lambda request: (
            [(token + 1) % VOCAB for token in truth(answers, request)]
            or [3] * request.max_draft_len
        )
    )


def bush(answers: Mapping[tuple[int, ...], Sequence[int]], width: int = 2) -> Drafter:
    """A static tree in which the truth hides in varying columns, among wrong siblings."""

    def grow(request: DraftRequest) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for depth, token in enumerate(truth(answers, request)):
            if len(tokens) + width > request.max_nodes:
                break
            column = (depth + len(request.tokens)) % width
            level = [(token + 1 + sibling) % VOCAB for sibling in range(width)]
            level[column] = token
            begin = len(tokens)
            tokens += level
            parents += [parent] * width
            parent = begin + column
        return Draft(tokens, tuple(parents))

    drafter = PerRequest(grow)
    drafter.nodes = lambda depth: depth * width  # type: ignore[method-assign]
    return drafter
