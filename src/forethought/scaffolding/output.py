"""What a task gives back, and the pieces that it streams on the way. Plain values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from forethought.outputs import TokenLogprobs, Usage


@dataclass(slots=True)
class ScaffoldingOutput:
    """One finished text: what a method answers with, or one sample of a generation task.

    ``text`` and ``token_ids`` also have the names that code written for
    ``tensorrt_llm.scaffolding`` uses: ``output_str``, ``tokens`` and ``output_tokens``; and
    ``async for`` over an output yields it once, as over an engine's result that streams.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    """Generated ids; None where the worker cannot know them (most HTTP servers)."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What a method has to say about how it came to this answer."""
    finish_reason: str | None = None
    """``"stop"``, ``"length"`` or ``"abort"``."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per generated token, if asked for (nats)."""
    cumulative_logprob: float | None = None
    usage: Usage = field(default_factory=Usage)
    """What its task cost; what the whole request cost is told by ``ScaffoldingResult.usage``."""

    @property
    def output_str(self) -> str | None:
        """The text."""
        return self.text

    @output_str.setter
    def output_str(self, text: str | None) -> None:
        self.text = text

    @property
    def output_tokens(self) -> list[int] | None:
        """The generated ids."""
        return self.token_ids

    @output_tokens.setter
    def output_tokens(self, token_ids: list[int] | None) -> None:
        self.token_ids = token_ids

    @property
    def tokens(self) -> list[int] | None:
        """The generated ids."""
        return self.token_ids

    @property
    def outputs(self) -> list[ScaffoldingOutput]:
        """Itself, in the shape of an engine's result."""
        return [self]

    async def __aiter__(self) -> AsyncIterator[ScaffoldingOutput]:
        yield self


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a stream. A controller that yields one streams it to the caller itself."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    source: str = ""
    """Tells streams of one branch apart: all deltas of one source join to one text."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """Something streamed, and where in the request it comes from."""

    branch: str
    """Path of the parallel branch: ``""`` for the request itself, ``"2"``, ``"2.0"``, ..."""
    output: Any
    """A ``Delta``; or whatever a user's worker appended to ``streaming_output_list``."""


class StreamedOutputs(list[Any]):
    """A ``streaming_output_list`` that hands each item on as soon as it is appended."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self._forward = forward

    def append(self, item: Any) -> None:
        """Hand ``item`` on; the list itself stays empty, so that a long stream costs nothing."""
        self._forward(item)

    def extend(self, items: Any) -> None:
        """Hand all ``items`` on, in order."""
        for item in items:
            self._forward(item)
