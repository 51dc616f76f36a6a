"""What a length policy is told of a step that is over. Knows nothing about policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class LengthRequest(Protocol):
    """What a length policy sees of a request that is about to decode; a ``DraftRequest`` is one."""

    @property
    def request_id(self) -> int:
        """Tells it from all others."""

    @property
    def max_draft_len(self) -> int:
        """Most depth of its draft in this step, from its own settings and the room that it has."""


class CappedRequest(NamedTuple):
    """A request whose draft may be no longer than an earlier policy allows."""

    request_id: int
    max_draft_len: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as one drafter's policy is told of it.

    Args:
        requests: ``(request_id, depth, accepted)`` of every draft of this drafter that was
            verified: its levels, at least 1, and the tokens taken from it. A request that was
            asked for and is not here got no draft.
        batch_size: rows of the step.
        tokens: tokens in the forward: roots, draft nodes and prompts.
        context: sum of the rows' lengths in the KV cache.
        forward_seconds: what the step took without any drafting.
        draft_seconds: what this drafter took.
    """

    requests: Sequence[tuple[int, int, int]]
    batch_size: int
    tokens: int
    context: int
    forward_seconds: float
    draft_seconds: float


class LengthPolicy(Protocol):
    """Decides how deep the drafts of one drafter are, step by step."""

    @property
    def reason(self) -> str:
        """Why the last lengths were chosen, in a line, for statistics and logs."""

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """The depth of each request's draft in the coming step; 0 is plain decoding.

        Args:
            requests: those that may have a draft.
            batch_size: all rows about to decode, ``requests`` among them.

        Returns:
            One depth per request, between 0 and its ``max_draft_len``.
        """

    def observe(self, record: StepRecord) -> None:
        """The step is over."""
