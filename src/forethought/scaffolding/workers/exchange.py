"""One streamed answer of an OpenAI-compatible server, as far as it has come.

Knows the shape of completion and chat chunks, and nothing about tasks or requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from forethought.outputs import Logprob, TokenLogprobs, Usage
from forethought.scaffolding.messages import ToolCall

_ID_PREFIX = "token_id:"


@dataclass
class Choice:
    """One of the ``n`` answers."""

    text: str = ""
    count: int = 0
    """Tokens: exact with log-probabilities, else one per piece of text."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Ids are negative (-1 the chosen token) where the server does not tell them."""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """After each token, the length of the text that has come."""
    num_dropped: int = 0
    """Tokens that were cut off between two requests, to be generated again."""

    def begin_of(self, count: int) -> Choice:
        """The answer as it was when it had ``count`` tokens."""
        end = self.ends[min(count, self.count) - 1] if count and self.ends else 0
        return Choice(self.text[:end], min(count, self.count), logprobs=self.logprobs[:count])

    def end_request(self, count: int, least: int) -> int:
        """A request that made it ``count`` tokens long is over; another one is to continue it.

        The end of a text may be tokenised in another way than the model has generated it. So it is
        cut where the last word ends, at ``least`` tokens or behind them if there is such a place,
        and the next request generates the rest again. Tokens that came in one piece with others
        are counted now.

        Returns:
            How many tokens were cut off.
        """
        missing = max(0, count - self.count)
        places = range(self.count - 1, max(0, least - missing - 1), -1)
        kept = next(filter(self._ends_word, places), self.count)
        dropped = self.count - kept
        end = self.ends[kept - 1] if kept else 0
        self.text = self.text[:end].rstrip("\N{REPLACEMENT CHARACTER}")  # half a character
        self.ends = [min(end, len(self.text)) for end in self.ends[:kept]]
        self.ends += [len(self.text)] * missing
        self.logprobs = self.logprobs[:kept]
        self.count, self.finish_reason = kept + missing, None
        self.num_dropped += dropped
        return dropped

    def _ends_word(self, count: int) -> bool:
        """Whether a blank begins behind ``count`` tokens."""
        end = self.ends[count - 1]
        around = self.text[end - 1 : end + 1] if end else ""
        return len(around) == 2 and around[1].isspace() and not around[0].isspace()

    def add(self, text: str, scores: Sequence[TokenLogprobs], thought: bool) -> int:
        """Take in a piece of text, or of thought; returns its number of tokens.

        Tokens whose texts are not told share theirs: it comes with the last of them.
        """
        number = len(scores) or int(bool(text or thought))
        pieces = [next(iter(entries.values())).token or "" for entries in scores]
        if "".join(pieces) != text:
            pieces = [*[""] * (number - 1), text] if number else []
        for piece in pieces:
            self.ends.append((self.ends[-1] if self.ends else 0) + len(piece))
        self.text += text
        self.logprobs += scores
        self.count += number
        return number


class Requests(Protocol):
    """The requests that one answer takes.

    Attributes:
        certain: tokens of the first choice that no end of the request under way cuts off.
    """

    certain: float

    def chunks(self, choice: Choice) -> AsyncGenerator[Any, None]:
        """The chunks of the request that goes on from ``choice``; leaving them ends it."""

    def goes_on(self, choice: Choice) -> bool:
        """A request is over: whether another one is to go on from ``choice``."""

    def hear(self, number: int, text: str, tokens: int) -> None:
        """A new piece has come: number of the choice, text, tokens."""

    def counted(self, usage: Usage, heard: int) -> None:
        """The server's count of a request that is over, of which ``heard`` tokens were heard."""


class Exchange:
    """Reads the chunks of one answer, which may take several requests.

    Args:
        requests: makes the requests, and is told what comes of them.
        stops: the stop strings asked for.

    Attributes:
        choices: by number.
        usage: the server's own count of the last request, once it has sent it.
        counted: that of all requests that are over; None if it counts none.
        paused: a request is over, and the next one waits for somebody to want more tokens.
        ended: the answer is complete, has failed or was cancelled.
        shown: tokens of the first choice that who follows it step by step has seen.
    """

    def __init__(self, requests: Requests, stops: Sequence[str]) -> None:
        self._requests, self._stops = requests, stops
        self.choices: dict[int, Choice] = {0: Choice()}
        self.usage: Any = None
        self.counted: Usage | None = None
        self.request_id: str | None = None
        self.paused, self.ended, self.shown = False, False, 0
        self._heard = self._wanted = 0
        self._news, self._demand = asyncio.Event(), asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    @property
    def available(self) -> int:
        """Tokens of the first choice that are there to stay."""
        count = self.choices[0].count
        return count if self.paused or self.ended else int(min(count, self._requests.certain))

    async def read(self) -> None:
        """Read to the end.

        Raises:
            ConnectionError: the answer broke off.
        """
        try:
            await self._read_request()
            while self._requests.goes_on(self.choices[0]):
                await self._pause()
                await self._read_request()
        finally:
            self.paused, self.ended = False, True
            self._news.set()

    async def _read_request(self) -> None:
        self._heard, self.usage = 0, None
        async with aclosing(self._requests.chunks(self.choices[0])) as chunks:
            async for chunk in chunks:
                self._take(chunk)
                self._news.set()
        if any(choice.finish_reason is None for choice in self.choices.values()):
            raise ConnectionError("the answer broke off: the server sent no finish_reason")
        if self.usage is not None:
            counted = _usage(self.usage)
            self.counted = counted if self.counted is None else self.counted + counted
            self._requests.counted(counted, self._heard)

    async def _pause(self) -> None:
        """Until more tokens are wanted than there are."""
        self.paused = True
        self._news.set()
        while self._wanted <= self.available:
            self._demand.clear()
            await self._demand.wait()
        self.paused = False

    def begin(self) -> None:
        """Read to the end in the background."""
        self._reading = asyncio.create_task(self.read())

    def want(self, count: int) -> None:
        """Let another request begin if it takes one to make the first choice ``count`` tokens."""
        self._wanted = max(self._wanted, count)
        self._demand.set()

    async def reach(self, count: int) -> None:
        """Wait until the first choice has ``count`` tokens, or for the end.

        Raises what went wrong.
        """
        self.want(count)
        while not self.ended and self.available < count:
            self._news.clear()
            await self._news.wait()
        await self._raise_failure()

    async def settle(self, count: int) -> None:
        """Wait until it is known what follows ``count`` tokens: more, another request or the end.

        Raises what went wrong.
        """
        while not (self.ended or self.paused) and self.choices[0].count <= count:
            self._news.clear()
            await self._news.wait()
        await self._raise_failure()

    async def _raise_failure(self) -> None:
        if self.ended and self._reading is not None and not self._reading.cancelled():
            await self._reading

    async def cancel(self) -> None:
        """End the answer here and close the connection."""
        if self._reading is not None and not self._reading.done():
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self.ended = True
        for choice in self.choices.values():
            choice.finish_reason = choice.finish_reason or "abort"

    def _take(self, chunk: Any) -> None:
        self.request_id = getattr(chunk, "id", None) or self.request_id
        self.usage = getattr(chunk, "usage", None) or self.usage
        for piece in chunk.choices:
            choice = self.choices.setdefault(piece.index, Choice())
            delta = getattr(piece, "delta", None) or getattr(piece, "message", None)
            if delta is None:
                text, scores = piece.text or "", _completion_logprobs(piece.logprobs)
            else:
                text, scores = delta.content or "", _chat_logprobs(piece.logprobs)
                thought = _thought(delta)
                choice.reasoning += thought
                _add_tool_calls(choice.tool_calls, getattr(delta, "tool_calls", None) or ())
            new = choice.add(text, scores, delta is not None and bool(thought))
            if piece.finish_reason is not None:
                choice.finish_reason = piece.finish_reason
                choice.stop_reason = self._stop_reason(piece)
            self._heard += new
            self._requests.hear(piece.index, text, new)

    def _stop_reason(self, piece: Any) -> int | str | None:
        """What the server says; else the one stop string there is, as most servers do not tell."""
        told = getattr(piece, "model_extra", None) or {}
        if "stop_reason" in told:
            reason: int | str | None = told["stop_reason"]
            return reason
        return self._stops[0] if piece.finish_reason == "stop" and len(self._stops) == 1 else None


def _usage(counted: Any) -> Usage:
    """The server's count of one request."""
    details = getattr(counted, "prompt_tokens_details", None)
    cached = getattr(details, "cached_tokens", None) or 0
    return Usage(
        prompt_tokens=counted.prompt_tokens,
        completion_tokens=counted.completion_tokens,
        prefilled=counted.prompt_tokens - cached,
        cached=cached,
        decoded=counted.completion_tokens,
    )


def _thought(delta: Any) -> str:
    """What a reasoning model thinks, under the names that servers have for it."""
    for name in ("reasoning_content", "reasoning"):
        thought = getattr(delta, name, None)
        if thought:
            return str(thought)
    return ""


def _add_tool_calls(calls: list[ToolCall], pieces: Sequence[Any]) -> None:
    for piece in pieces:
        place = getattr(piece, "index", len(calls))
        while len(calls) <= place:
            calls.append(ToolCall())
        call = calls[place]
        call.id = piece.id or call.id
        if piece.function is not None:
            call.function.name += piece.function.name or ""
            call.function.arguments += piece.function.arguments or ""


def _completion_logprobs(logprobs: Any) -> list[TokenLogprobs]:
    if logprobs is None or not logprobs.tokens:
        return []
    found = []
    for place, (token, value) in enumerate(
        zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    ):
        others = (logprobs.top_logprobs or [])[place : place + 1]
        found.append(_entries(token, value, (others[0] or {}).items() if others else ()))
    return found


def _chat_logprobs(logprobs: Any) -> list[TokenLogprobs]:
    entries = (logprobs and logprobs.content) or ()
    return [
        _entries(entry.token, entry.logprob, [(o.token, o.logprob) for o in entry.top_logprobs])
        for entry in entries
    ]


def _entries(chosen: str, value: float, others: Any) -> TokenLogprobs:
    """The chosen token first, then the others by rank."""
    ranked = sorted(others, key=lambda other: -other[1])
    rank = next((n for n, (token, _) in enumerate(ranked, 1) if token == chosen), None)
    entries = {_token_id(chosen, -1): Logprob(value, rank, chosen)}
    for number, (token, logprob) in enumerate(ranked, start=1):
        if token != chosen:
            entries[_token_id(token, -1 - number)] = Logprob(logprob, number, token)
    return entries


def _token_id(token: str, unknown: int) -> int:
    digits = token.removeprefix(_ID_PREFIX)
    return int(digits) if token.startswith(_ID_PREFIX) and digits.isdigit() else unknown
