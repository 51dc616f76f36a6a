"""What a task gives back, and the pieces that it streams on the way. Plain values."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

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

    @classmethod
    def inserted(cls, text: str, token_ids: list[int] | None = None) -> Self:
        """Text that a method puts between generated parts, to be joined with them.

        Args:
            text: as it stands between them.
            token_ids: its ids, where they are known.
        """
        known = token_ids if token_ids is not None or text else []
        return cls(text, known, logprobs=[{} for _ in known or ()], cumulative_logprob=0.0)

    @classmethod
    def join(cls, parts: Iterable[ScaffoldingOutput | str]) -> Self:
        """One output of several parts, in their order; a string is inserted text without ids.

        Text, ids, log-probabilities and their sum are joined where all parts have them, and else
        None. The log-probabilities of an inserted token are an empty dictionary. How it ended is
        that of the last part; ``usage`` is the sum, of ``meta`` the later one wins. Ids are taken
        as they are: a token that ended a part and is not in its text is in between.
        """
        outputs = [cls.inserted(part) if isinstance(part, str) else part for part in parts]
        whole = cls("", [], logprobs=[], cumulative_logprob=0.0)
        for part in outputs:
            whole.text = _sum(whole.text, part.text)
            whole.token_ids = _sum(whole.token_ids, part.token_ids)
            whole.logprobs = _sum(whole.logprobs, part.logprobs)
            whole.cumulative_logprob = _sum(whole.cumulative_logprob, part.cumulative_logprob)
            whole.meta |= part.meta
            whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
        for usage in {id(part.usage): part.usage for part in outputs}.values():
            whole.usage += usage
        return whole

    def without_last(self, num_tokens: int) -> ScaffoldingOutput:
        """The same text without its last ``num_tokens`` ids, which make none of it."""
        if not num_tokens or self.token_ids is None:
            return self
        cut = dataclasses.replace(self, token_ids=self.token_ids[:-num_tokens])
        if self.logprobs is not None:
            cut.logprobs = self.logprobs[:-num_tokens]
            dropped = zip(self.token_ids, self.logprobs, strict=True)
            lost = [entries[token].logprob for token, entries in [*dropped][-num_tokens:]]
            if self.cumulative_logprob is not None:
                cut.cumulative_logprob = self.cumulative_logprob - sum(lost)
        return cut

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


def _sum(one: Any, other: Any) -> Any:
    """Both together, in a new object; None if one of them is unknown."""
    return None if one is None or other is None else one + other


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

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()  # a copy streams to nobody

    def append(self, item: Any) -> None:
        """Hand ``item`` on; the list itself stays empty, so that a long stream costs nothing."""
        self._forward(item)

    def extend(self, items: Any) -> None:
        """Hand all ``items`` on, in order."""
        for item in items:
            self._forward(item)


class StreamedText:
    """The text that a request has streamed so far: the parts in the order in which they started.

    A part is a task of the request itself, or a ``Delta`` of its controller; parallel branches are
    samples or steps of a method, and none. Text of a part beside an earlier one is held back until
    that one is over, so the text only grows. Of the ``n`` samples of a task, that counts which
    speaks first.
    """

    def __init__(self) -> None:
        self._parts: deque[StreamedPart] = deque()

    def begin(self) -> StreamedPart:
        """A new part. Streams that nobody waits for any more have been left: they are over."""
        for part in self._parts:
            part.is_open = part.is_open and part.is_awaited
        self._parts.append(StreamedPart())
        return self._parts[-1]

    def take(self) -> list[Delta]:
        """What the text has grown by since it was asked last."""
        grown: list[Delta] = []
        while self._parts:
            first = self._parts[0]
            grown += first.deltas
            first.deltas.clear()
            if first.is_open:
                break
            self._parts.popleft()
        return grown


class StreamedPart:
    """What one task has streamed, as far as it has not been taken.

    Attributes:
        is_open: whether more may come.
        is_awaited: whether its task is being executed; a stream is not, between its steps.
        deltas: in order.
    """

    def __init__(self) -> None:
        self.is_open = self.is_awaited = True
        self.deltas: list[Delta] = []
        self._source: str | None = None

    def add(self, delta: Delta) -> None:
        """More of it, unless it is of another sample."""
        self._source = delta.source if self._source is None else self._source
        if delta.source == self._source:
            self.deltas.append(delta)
