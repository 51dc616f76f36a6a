"""The answer of an OpenAI-compatible server, read chunk by chunk.

``StreamedChoice`` is one of the ``n`` answers so far, ``Requests`` the contract of what makes the
requests (``openai_requests``), and ``ChunkReader`` takes their chunks (``openai_chunk``) as needed:
text, tokens, log-probabilities, tool calls, usage.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from forethought.outputs import ThinkingOutput, TokenConfidence, TokenLogprobs, Usage
from forethought.rewards.confidence import confidence_of
from forethought.scaffolding.messages import ToolCall
from forethought.scaffolding.result import CallDelta
from forethought.workers.openai_chunk import CallPiece, ChoicePiece, read_chunk


@dataclass
class StreamedChoice:
    """One of the ``n`` answers."""

    text: str = ""
    count: int = 0
    """Tokens: exact with log-probabilities, else one per piece of text."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Ids are negative (-1 the chosen token) where the server does not send them."""
    confidences: list[TokenConfidence | None] = field(default_factory=list)
    reasoning: str = ""
    refusal: str = ""
    """Why the server does not answer, in its words, in the place of a text."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """After each token, the length of the text that has come."""
    thought_ends: list[int] = field(default_factory=list)
    """The same of ``reasoning``."""
    num_dropped: int = 0
    """Tokens that were cut off between two requests, to be generated again."""
    num_beyond: int = 0
    """Its last tokens that are beyond the budget of the request."""
    thinking: ThinkingOutput | None = None
    """Its thought, where the worker has closed it at a budget."""

    def begin_of(self, count: int) -> StreamedChoice:
        """The answer as it was when it had ``count`` tokens."""
        last = min(count, self.count) - 1
        end = self.ends[last] if count and self.ends else 0
        thought_end = self.thought_ends[last] if count and self.thought_ends else 0
        return StreamedChoice(
            self.text[:end],
            min(count, self.count),
            logprobs=self.logprobs[:count],
            confidences=self.confidences[:count],
            reasoning=self.reasoning[:thought_end],
            refusal=self.refusal,
            tool_calls=self.tool_calls,
        )

    def within_budget(self) -> StreamedChoice:
        """The answer without the tokens that are beyond the budget, which has ended it."""
        choice = self.begin_of(max(0, self.count - self.num_beyond))
        if not self.num_beyond:
            choice.text, choice.reasoning = self.text, self.reasoning
            choice.finish_reason = self.finish_reason
        choice.finish_reason = choice.finish_reason or "length"
        return choice

    def end_request(self, count: int, min_tokens: int) -> int:
        """Called when a request that made it ``count`` tokens long is over, and another one
        continues it.

        The end of a text may be tokenised in another way than the model has generated it. So it is
        cut where the last word ends, at ``min_tokens`` tokens or after them if a word ends there,
        and the next request generates the rest again. Tokens that came in one piece with others
        are counted now.

        Returns:
            The number of tokens that were cut off.
        """
        missing = max(0, count - self.count)
        ends = range(self.count - 1, max(0, min_tokens - missing - 1), -1)
        num_kept = next(filter(self._ends_word, ends), self.count)
        dropped = self.count - num_kept
        end = self.ends[num_kept - 1] if num_kept else 0
        self.text = self.text[:end].rstrip("\N{REPLACEMENT CHARACTER}")  # half a character
        self.ends = [min(end, len(self.text)) for end in self.ends[:num_kept]]
        self.ends += [len(self.text)] * missing
        self.thought_ends = self.thought_ends[:num_kept] + [len(self.reasoning)] * missing
        self.logprobs, self.confidences = self.logprobs[:num_kept], self.confidences[:num_kept]
        self.count, self.finish_reason = num_kept + missing, None
        self.num_dropped += dropped
        return dropped

    def _ends_word(self, count: int) -> bool:
        """Whether a blank follows the first ``count`` tokens."""
        end = self.ends[count - 1]
        around = self.text[end - 1 : end + 1] if end else ""
        return len(around) == 2 and around[1].isspace() and not around[0].isspace()

    def add(
        self,
        text: str,
        scores: Sequence[TokenLogprobs] = (),
        thought: str = "",
        *,
        has_more: bool = False,
    ) -> int:
        """Append a piece of text, or of reasoning; returns its number of tokens.

        Tokens whose own texts are not sent share one text, which counts for the last of them.

        Args:
            text: new.
            scores: of its tokens.
            thought: new reasoning.
            has_more: whether the piece is of a call or a refusal, too.
        """
        number = len(scores) or int(bool(text or thought or has_more))
        pieces = [next(iter(entries.values())).token or "" for entries in scores]
        if "".join(pieces) != text or len(pieces) != number:
            pieces = [*[""] * (number - 1), text] if number else []
        for piece in pieces:
            self.ends.append((self.ends[-1] if self.ends else 0) + len(piece))
        self.text += text
        self.reasoning += thought
        self.thought_ends += [len(self.reasoning)] * number
        self.logprobs += scores
        self.count += number
        return number


class Requests(Protocol):
    """The requests for one answer.

    Attributes:
        num_certain: tokens of the first choice that no end of the running request cuts off.
        waits: whether the next request is sent only once more tokens are wanted.
    """

    num_certain: float
    waits: bool

    def chunks(self, choice: StreamedChoice) -> AsyncGenerator[Any, None]:
        """The chunks of the request that continues ``choice``; closing the iterator ends it."""

    async def repeats(self, number: int, error: Exception) -> bool:
        """Called when an answer has broken off, the ``number``-th time: whether another request for
        all of it is to be made, which may begin now.
        """

    def continues(self, choice: StreamedChoice) -> bool:
        """Called when a request is over: whether another one is to continue ``choice``."""

    def on_tokens(
        self,
        index: int,
        text: str,
        num_tokens: int,
        thought: str = "",
        calls: Sequence[CallDelta] = (),
    ) -> int:
        """Called with a new piece: index of the choice, text, number of tokens, reasoning, calls.

        Returns:
            The number of its tokens that are beyond the budget.
        """

    def on_usage(self, usage: Usage | None, num_received: int) -> None:
        """Called when a request, of which ``num_received`` tokens came, is over or cut.

        Args:
            usage: as the server has last sent it; None: it has sent none.
            num_received: counted here.
        """


class ChunkReader:
    """Reads the chunks of one answer, which may take several requests.

    Args:
        requests: makes the requests, and gets their tokens and usage.
        stops: the requested stop strings.
        confidence: top k of the requested confidences; None: none.
        num_logprobs: top log-probabilities that are kept, once the confidences are computed.

    Attributes:
        choices: by number.
        usage: the server's own count of the last request, once it has sent it.
        server_usage: its count of all requests that are over; None if it sends none.
        paused: a request is over, and the next one is sent when more tokens are wanted.
        ended: the answer is complete, has failed or was cancelled.
        shown: tokens of the first choice that its task has received so far.
    """

    def __init__(
        self,
        requests: Requests,
        stops: Sequence[str],
        confidence: int | None = None,
        num_logprobs: int | None = None,
    ) -> None:
        self._requests, self._stops = requests, stops
        self._confidence, self._num_logprobs = confidence, num_logprobs or 0
        self.choices: dict[int, StreamedChoice] = {0: StreamedChoice()}
        self._calls: dict[int, _CallAssembly] = {}  # by number of the choice
        self.usage: Usage | None = None
        self.num_reasoning = 0
        self.server_usage: Usage | None = None
        self.request_id: str | None = None
        self.paused, self.ended, self.shown = False, False, 0
        self._num_received = self._wanted = 0
        self._received, self._demand = asyncio.Event(), asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    @property
    def available(self) -> int:
        """Tokens of the first choice that are final."""
        count = self.choices[0].count
        return count if self.paused or self.ended else int(min(count, self._requests.num_certain))

    async def read(self) -> None:
        """Read to the end; ``ConnectionError`` if the answer breaks off."""
        try:
            await self._read_request()
            while self._requests.continues(self.choices[0]):
                await self._pause()
                await self._read_request()
        finally:
            self.paused, self.ended = False, True
            self._received.set()

    async def _read_request(self) -> None:
        before = self.server_usage
        for number in itertools.count(1):
            try:
                await self._read_once()
            except ConnectionError as error:
                if not await self._requests.repeats(number, error):
                    raise
                self.choices, self._calls, self.server_usage = {0: StreamedChoice()}, {}, before
            else:
                return

    async def _read_once(self) -> None:
        self._num_received, self.usage, self.num_reasoning = 0, None, 0
        try:
            async with aclosing(self._requests.chunks(self.choices[0])) as chunks:
                async for chunk in chunks:
                    self._take(chunk)
                    self._received.set()
        finally:
            self._count_usage()
        if any(choice.finish_reason is None for choice in self.choices.values()):
            raise ConnectionError("the answer broke off: the server sent no finish_reason")

    def _count_usage(self) -> None:
        """Count the usage of a request that is over, or cut."""
        usage = self.usage
        if usage is not None:
            if not usage.completion_tokens:
                received = self._num_received
                usage = dataclasses.replace(usage, completion_tokens=received, decoded=received)
            self.server_usage = usage + (self.server_usage or Usage())
        self._requests.on_usage(usage, self._num_received)

    async def _pause(self) -> None:
        """Wait until more tokens are wanted than have arrived."""
        self.paused = True
        self._received.set()
        while self._requests.waits and self._wanted <= self.available:
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
        """Wait until the first choice has ``count`` tokens, or for the end; raises a failure."""
        self.want(count)
        while not self.ended and self.available < count:
            self._received.clear()
            await self._received.wait()
        await self._raise_failure()

    async def settle(self, count: int) -> None:
        """Wait until the reader knows what follows ``count`` tokens: more, a request or the end."""
        while not (self.ended or self.paused) and self.choices[0].count <= count:
            self._received.clear()
            await self._received.wait()
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
        read = read_chunk(chunk)
        self.request_id = read.request_id or self.request_id
        self.usage = read.usage or self.usage
        self.num_reasoning = read.num_reasoning or self.num_reasoning
        for piece in read.pieces:
            choice = self.choices.setdefault(piece.index, StreamedChoice())
            choice.refusal += piece.refusal
            calls = self._calls.setdefault(piece.index, _CallAssembly(choice.tool_calls))
            called = [calls.add(part) for part in piece.calls]
            scores = piece.scores
            if self._confidence is not None:
                k, num_logprobs = self._confidence, self._num_logprobs
                choice.confidences += [confidence_of(entries, k) for entries in scores]
                scores = [_first_of(entries, num_logprobs) for entries in scores]
            has_more = bool(piece.calls or piece.refusal)
            new = choice.add(piece.text, scores, piece.thought, has_more=has_more)
            if piece.finish_reason is not None:
                choice.finish_reason = piece.finish_reason
                choice.stop_reason = self._stop_reason(piece)
            self._num_received += new
            beyond = self._requests.on_tokens(piece.index, piece.text, new, piece.thought, called)
            choice.num_beyond += beyond

    def _stop_reason(self, piece: ChoicePiece) -> int | str | None:
        """The server's stop reason; most send none: then the only stop string, if there is one."""
        if piece.tells_stop_reason:
            return piece.stop_reason
        return self._stops[0] if piece.finish_reason == "stop" and len(self._stops) == 1 else None


class _CallAssembly:
    """Puts the calls of one choice together from the pieces of a stream.

    A piece belongs to the call of its ``index``. Servers differ: some send no index, or the same
    one for all calls, and some repeat the id or the name of a call in each piece, or make up a new
    id for each. A piece begins another call if it has a name, and an id that the call before does
    not have; without ids, if the arguments of that call are complete.

    Args:
        calls: where the calls are put, in the order in which they begin.
    """

    def __init__(self, calls: list[ToolCall]) -> None:
        self._calls = calls
        self._by_index: dict[int, ToolCall] = {}

    def add(self, piece: CallPiece) -> CallDelta:
        """Append a piece to its call; returns the new part."""
        call = self._call_of(piece)
        if call is None:
            call = ToolCall()
            self._calls.append(call)
        if piece.index is not None:
            self._by_index[piece.index] = call
        call.id = call.id or piece.id
        call.function.name += piece.name if piece.name != call.function.name else ""
        call.function.arguments += piece.arguments
        number = next(n for n, other in enumerate(self._calls) if other is call)
        return CallDelta(number, call.id, call.function.name, piece.arguments)

    def _call_of(self, piece: CallPiece) -> ToolCall | None:
        """The call that a piece belongs to; None: it begins another one."""
        for call in self._calls:
            if piece.id and call.id == piece.id:
                return call
        last = self._calls[-1] if self._calls else None
        if piece.index is not None:
            last = self._by_index.get(piece.index)
        if last is None or not piece.name:
            return last
        if piece.id and last.id:
            return None
        is_repeated = piece.name == last.function.name and not piece.arguments
        return None if not is_repeated and _is_complete(last.function.arguments) else last


def _is_complete(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _first_of(entries: TokenLogprobs, count: int) -> TokenLogprobs:
    chosen = next(iter(entries))
    return {
        token: entry
        for token, entry in entries.items()
        if token == chosen or (entry.rank is not None and entry.rank <= count)
    }
