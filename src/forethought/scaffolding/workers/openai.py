"""``OpenaiWorker``: executes tasks as requests to an OpenAI-compatible server.

Continuations and forks are sent as text; only the server's prefix cache makes them cheap. Time
limits and retries are those of the client.

::

    task --> _Requests (one request, or one per part of a stream) --> chunks
    task <-- ChunkReader (text, tokens, log-probabilities, usage) <-- chunks
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from forethought.config.guided import GuidedDecodingParams
from forethought.errors import ParameterError, UsageError
from forethought.outputs import Logprob, TokenLogprobs, Usage
from forethought.scaffolding import sampling
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.settings import POSITIVE_INT, validated
from forethought.scaffolding.task import (
    AssistantMessage,
    ChatTask,
    GenerationTask,
    StreamGenerationTask,
    TaskStatus,
    ToolCall,
)
from forethought.scaffolding.worker import Worker

_ID_PREFIX = "token_id:"


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
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """After each token, the length of the text that has come."""
    num_dropped: int = 0
    """Tokens that were cut off between two requests, to be generated again."""

    def begin_of(self, count: int) -> StreamedChoice:
        """The answer as it was when it had ``count`` tokens."""
        end = self.ends[min(count, self.count) - 1] if count and self.ends else 0
        return StreamedChoice(
            self.text[:end], min(count, self.count), logprobs=self.logprobs[:count]
        )

    def end_request(self, count: int, min_tokens: int) -> int:
        """A request that made it ``count`` tokens long is over; another one is to continue it.

        The end of a text may be tokenised in another way than the model has generated it. So it is
        cut where the last word ends, at ``min_tokens`` tokens or behind them if a word ends there,
        and the next request generates the rest again. Tokens that came in one piece with others
        are counted now.

        Returns:
            How many tokens were cut off.
        """
        missing = max(0, count - self.count)
        ends = range(self.count - 1, max(0, min_tokens - missing - 1), -1)
        kept = next(filter(self._ends_word, ends), self.count)
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
        """Append a piece of text, or of reasoning; returns its number of tokens.

        Tokens whose own texts are not sent share one text, which counts for the last of them.
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
        num_certain: tokens of the first choice that no end of the request under way cuts off.
    """

    num_certain: float

    def chunks(self, choice: StreamedChoice) -> AsyncGenerator[Any, None]:
        """The chunks of the request that continues ``choice``; closing the iterator ends it."""

    def continues(self, choice: StreamedChoice) -> bool:
        """A request is over: whether another one is to continue ``choice``."""

    def on_tokens(self, index: int, text: str, num_tokens: int) -> None:
        """A new piece has arrived: index of the choice, text, number of tokens."""

    def on_usage(self, usage: Usage, num_received: int) -> None:
        """The server's usage of a finished request, of which ``num_received`` tokens came."""


class ChunkReader:
    """Reads the chunks of one answer, which may take several requests.

    Args:
        requests: makes the requests, and gets their tokens and usage.
        stops: the stop strings asked for.

    Attributes:
        choices: by number.
        usage: the server's own count of the last request, once it has sent it.
        server_usage: its count of all finished requests; None if it sends none.
        paused: a request is over, and the next one is sent when more tokens are wanted.
        ended: the answer is complete, has failed or was cancelled.
        shown: tokens of the first choice that its task has been given so far.
    """

    def __init__(self, requests: Requests, stops: Sequence[str]) -> None:
        self._requests, self._stops = requests, stops
        self.choices: dict[int, StreamedChoice] = {0: StreamedChoice()}
        self.usage: Any = None
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
        """Read to the end.

        Raises:
            ConnectionError: the answer broke off.
        """
        try:
            await self._read_request()
            while self._requests.continues(self.choices[0]):
                await self._pause()
                await self._read_request()
        finally:
            self.paused, self.ended = False, True
            self._received.set()

    async def _read_request(self) -> None:
        self._num_received, self.usage = 0, None
        async with aclosing(self._requests.chunks(self.choices[0])) as chunks:
            async for chunk in chunks:
                self._take(chunk)
                self._received.set()
        if any(choice.finish_reason is None for choice in self.choices.values()):
            raise ConnectionError("the answer broke off: the server sent no finish_reason")
        if self.usage is not None:
            usage = _usage(self.usage)
            if not usage.completion_tokens:
                received = self._num_received
                usage = dataclasses.replace(usage, completion_tokens=received, decoded=received)
            self.server_usage = usage + (self.server_usage or Usage())
            self._requests.on_usage(usage, self._num_received)

    async def _pause(self) -> None:
        """Until more tokens are wanted than there are."""
        self.paused = True
        self._received.set()
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
            self._received.clear()
            await self._received.wait()
        await self._raise_failure()

    async def settle(self, count: int) -> None:
        """Wait until it is known what follows ``count`` tokens: more, another request or the end.

        Raises what went wrong.
        """
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
        self.request_id = getattr(chunk, "id", None) or self.request_id
        self.usage = getattr(chunk, "usage", None) or self.usage
        for piece in getattr(chunk, "choices", None) or ():
            choice = self.choices.setdefault(piece.index, StreamedChoice())
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
            self._num_received += new
            self._requests.on_tokens(piece.index, text, new)

    def _stop_reason(self, piece: Any) -> int | str | None:
        """The server's stop reason; most send none: then the only stop string, if there is one."""
        extra = getattr(piece, "model_extra", None) or {}
        if "stop_reason" in extra:
            reason: int | str | None = extra["stop_reason"]
            return reason
        return self._stops[0] if piece.finish_reason == "stop" and len(self._stops) == 1 else None


def _usage(reported: Any) -> Usage:
    """The usage that a server reports for one request; what is missing or negative counts as 0."""

    def count(source: Any, name: str) -> int:
        return max(0, getattr(source, name, None) or 0)

    prompt, completion = (count(reported, name) for name in ("prompt_tokens", "completion_tokens"))
    details = getattr(reported, "prompt_tokens_details", None)
    cached = min(prompt, count(details, "cached_tokens"))
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        prefilled=prompt - cached,
        cached=cached,
        decoded=completion,
    )


def _thought(delta: Any) -> str:
    """The reasoning text of a chunk, under any of the names that servers use."""
    for name in ("reasoning_content", "reasoning"):
        thought = getattr(delta, name, None)
        if thought:
            return str(thought)
    return ""


def _add_tool_calls(calls: list[ToolCall], pieces: Sequence[Any]) -> None:
    for piece in pieces:
        index = getattr(piece, "index", len(calls))
        while len(calls) <= index:
            calls.append(ToolCall())
        call = calls[index]
        call.id = piece.id or call.id
        if piece.function is not None:
            call.function.name += piece.function.name or ""
            call.function.arguments += piece.function.arguments or ""


def _completion_logprobs(logprobs: Any) -> list[TokenLogprobs]:
    if logprobs is None or not logprobs.tokens:
        return []
    found = []
    for index, (token, value) in enumerate(
        zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    ):
        others = (logprobs.top_logprobs or [])[index : index + 1]
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


_BODY = (
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
EXTENSIONS = (*_BODY, "guided_decoding")
"""Fields that OpenAI's API does not have and some servers take in the body all the same. Chats take
``guided_decoding`` in any case, as ``response_format``; the completions of some servers do too."""

_CHAT = (
    "frequency_penalty",
    "logit_bias",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "user",
)
_COMPLETION = (*_CHAT, "best_of", "echo", "suffix")


class _Clients:
    """A client per event loop, since the connections of a client belong to one loop.

    Args:
        given: an ``openai.AsyncOpenAI``, of which every loop gets a copy; a double without
            connections, which serves all loops; or a function that makes a client.
    """

    def __init__(self, given: Any) -> None:
        self._given, self._is_taken = given, False
        self._by_loop: dict[asyncio.AbstractEventLoop, Any] = {}
        self._lock = threading.Lock()

    def of_this_loop(self) -> Any:
        """The client of the running loop.

        Raises:
            UsageError: a client that cannot be copied is wanted on a second loop.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._by_loop:
                open_loops = [known for known in self._by_loop if not known.is_closed()]
                self._by_loop = {known: self._by_loop[known] for known in open_loops}
                self._by_loop[loop] = self._new()
            return self._by_loop[loop]

    async def close(self) -> None:
        """Close the client of the running loop, unless it is the one that was given."""
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._by_loop.get(loop, self._given)
            if client is self._given:
                return
            del self._by_loop[loop]
        await client.close()

    def _new(self) -> Any:
        given = self._given
        if not hasattr(given, "completions") and callable(given):
            return given()
        http = getattr(given, "_client", None)
        if http is None or not hasattr(given, "copy"):
            return given
        base = importlib.import_module("openai._base_client")
        default = getattr(base, "AsyncHttpxClientWrapper", None)
        if type(http) is default:
            return given.copy(http_client=default(base_url=given.base_url, timeout=given.timeout))
        if self._is_taken:
            raise UsageError(
                "this client cannot serve a second event loop",
                "its connections belong to the first, and its http_client was set up by hand",
                "Give OpenaiWorker a function that makes it: OpenaiWorker(lambda: ..., model)",
            )
        self._is_taken = True
        return given


class OpenaiWorker(Worker):
    """Executes generation, stream and chat tasks on a server.

    Token ids are not known: ``output_tokens`` stays None, and the server counts the tokens.
    If the server sends no stop reason and the task has a single stop string, an answer with the
    finish reason ``stop`` is taken to have ended at that string.

    Args:
        async_client: an ``openai.AsyncOpenAI`` (or a compatible object), or a function that makes
            one. The worker uses a copy of it on each event loop, and closes the copies; a client
            with an ``http_client`` of its own serves one event loop only.
        model: name of the model on the server.
        kv_cache_hint_enabled: must be False: no task asks for hints about the server's KV cache.
        extra_body: further fields of every request.
        extensions: those of ``EXTENSIONS`` that the server takes; tasks that set one of the others
            are refused.

    Raises:
        ParameterError: an extension that does not exist, or hints.
    """

    default_extensions: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        async_client: Any,
        model: str,
        kv_cache_hint_enabled: bool = False,
        extra_body: Mapping[str, Any] | None = None,
        *,
        extensions: Collection[str] | None = None,
    ) -> None:
        if kv_cache_hint_enabled is not False:
            raise ParameterError(
                "invalid kv_cache_hint_enabled",
                f"got {kv_cache_hint_enabled!r}, but no task gives hints about the KV cache",
                "Leave it out",
            )
        self.async_client, self.model = async_client, model
        self._clients = _Clients(async_client)
        self._num_open: Counter[asyncio.AbstractEventLoop] = Counter()
        self.extra_body = dict(extra_body or {})
        self.extensions = set(self.default_extensions if extensions is None else extensions)
        unknown = self.extensions - set(EXTENSIONS)
        if unknown:
            raise ParameterError.unknown("OpenaiWorker(extensions=...)", unknown, EXTENSIONS)
        self._readers: dict[str, list[ChunkReader]] = {}

    # ---- tasks --------------------------------------------------------------------------------

    async def generation_handler(self, task: GenerationTask) -> TaskStatus:
        """Generate all samples."""
        reader = self._completion(task)
        await reader.read()
        _fill(task, reader)
        return TaskStatus.SUCCESS

    async def stream_handler(self, task: StreamGenerationTask) -> TaskStatus:
        """Bring back ``streaming_step`` tokens more than the last time, once they are there.

        A server reports the end only behind the last token, so the step waits for what follows.
        """
        step = task.checked_step
        reader = task.request_handle if task.under_way else None
        if not isinstance(reader, ChunkReader):
            sampling.refuse(task, ["n"], "a stream", "Use a GenerationTask, or copies")
            reader = task.request_handle = self._completion(task)
            self._keep(reader)
            reader.begin()
        first, goal = reader.choices[0], reader.shown + step
        try:
            if task.cancel_flag:
                await reader.cancel()
            elif step == 0:
                reader.want(reader.available + 1)
                await reader.reach(0)
                _show(task, reader, first.count)
            else:
                await self._follow(task, reader, goal)
        except BaseException:
            await reader.cancel()
            raise
        task.end_flag = task.cancel_flag or (reader.ended and reader.shown == first.count)
        if not task.end_flag or task.cancel_flag:
            first = first.begin_of(reader.shown)
            first.finish_reason = "abort" if task.cancel_flag else None
        _fill(task, reader, {0: first})
        return TaskStatus.SUCCESS

    async def chat_handler(self, task: ChatTask) -> TaskStatus:
        """Generate the assistant's next message."""
        sampling.refuse(task, ["n"], "a chat", "Use copies of the task")
        reader = self._chat(task)
        await reader.read()
        _fill(task, reader)
        task.end_flag = True
        choice = reader.choices[0]
        task.add_message(
            AssistantMessage(
                choice.text or None if choice.tool_calls else choice.text,
                reasoning=choice.reasoning or None,
                tool_calls=choice.tool_calls or None,
                finish_reason=choice.finish_reason,
            )
        )
        if task.enable_token_counting:
            task.prompt_tokens_num += task.usage_prompt_tokens or 0
            task.completion_tokens_num += task.usage_completion_tokens or 0
            details = getattr(reader.usage, "completion_tokens_details", None)
            task.reasoning_tokens_num += getattr(details, "reasoning_tokens", None) or 0
        return TaskStatus.SUCCESS

    task_handlers = {  # noqa: RUF012
        GenerationTask: generation_handler,
        StreamGenerationTask: stream_handler,
        ChatTask: chat_handler,
    }

    async def _follow(self, task: StreamGenerationTask, reader: ChunkReader, count: int) -> None:
        """Show the task ``count`` tokens, once it is known whether more follow."""
        while not reader.ended and reader.available < count:
            await reader.reach(reader.shown + 1 if task.streaming_output_flag else count)
            _show(task, reader, count)
        await reader.settle(count)
        _show(task, reader, count)

    # ---- requests -----------------------------------------------------------------------------

    def _completion(self, task: GenerationTask) -> ChunkReader:
        if task.skip_detokenizer or (task.skip_tokenizer and task.input_tokens is None):
            raise ParameterError(
                "OpenaiWorker cannot leave out the tokenizer",
                "skip_detokenizer is set, or skip_tokenizer without input_tokens",
                "The server turns tokens into text; give text, or input_tokens",
            )
        prompt = task.input_str if task.input_tokens is None else task.input_tokens
        if not prompt:
            raise ParameterError(
                "the task has no prompt",
                "input_str and input_tokens are empty",
                "Set one of them; a fork needs a parent with a text prompt",
            )
        fields = self._fields(task, _COMPLETION)
        if task.num_logprobs is not None:
            if task.echo:
                raise ParameterError(
                    "echo and num_logprobs exclude each other",
                    "the first token of a prompt has no log-probability",
                    "Leave one of them out",
                )
            fields["logprobs"] = task.num_logprobs
        if "guided_decoding" in self.extensions:
            fields["extra_body"] |= _response_format(task)
        else:
            why = "Use a ChatTask; or, if the server takes response_format, name it an extension"
            sampling.refuse(task, ["guided_decoding"], "OpenaiWorker, in completions,", why)
        create = self._clients.of_this_loop().completions.create
        return self._reader(task, create, {"prompt": prompt, **fields})

    def _chat(self, task: ChatTask) -> ChunkReader:
        sampling.refuse(
            task, ["best_of", "echo", "suffix"], "a chat", "Leave it out, or use a GenerationTask"
        )
        fields = self._fields(task, _CHAT) | _response_format(task)
        if task.num_logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": task.num_logprobs}
        if task.tools:
            fields["tools"] = [
                tool if isinstance(tool, Mapping) else tool.to_dict() for tool in task.tools
            ]
        create = self._clients.of_this_loop().chat.completions.create
        return self._reader(task, create, {"messages": task.messages_to_dict_content(), **fields})

    def _fields(self, task: GenerationTask, names: Collection[str]) -> dict[str, Any]:
        """The sampling fields that the task sets, by their names in the API."""
        refused = [name for name in _BODY if name not in self.extensions]
        why = "If the server takes it, name it in OpenaiWorker(extensions=...)"
        sampling.refuse(task, refused, "OpenaiWorker", why)
        unknown = ["return_context_logits", "speculation"]
        sampling.refuse(task, unknown, "OpenaiWorker", "Leave it out, or use another worker")
        fields = {name: getattr(task, name) for name in names if sampling.is_set(task, name)}
        scope = current_scope()
        max_tokens = scope.account.limit(task.max_tokens) if scope else task.max_tokens
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        if task.logit_bias is not None:
            fields["logit_bias"] = {str(token): bias for token, bias in task.logit_bias.items()}
        taken = self.extensions.intersection(_BODY)
        extensions = {name: getattr(task, name) for name in taken if sampling.is_set(task, name)}
        fields["extra_body"] = {**self.extra_body, **extensions}
        return fields

    def _reader(self, task: GenerationTask, create: Any, fields: dict[str, Any]) -> ChunkReader:
        fields |= {"model": self.model, "stream": task.best_of is None}
        if fields["stream"]:
            fields["stream_options"] = {"include_usage": True}
        task.ttft_s = task.latency_s = None
        return ChunkReader(_Requests(self, task, create, fields), sampling.stop_strings(task))

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request as open on the running loop."""
        loop = asyncio.get_running_loop()
        self._num_open[loop] += 1
        try:
            yield
        finally:
            self._num_open[loop] -= 1
            if not self._num_open[loop]:
                del self._num_open[loop]

    def connection_error(self, error: Exception, begun: bool) -> ConnectionError:
        """A connection error of the client, with the address and the system's reason.

        Args:
            error: as the client raises it.
            begun: whether the answer had begun.
        """
        url = getattr(self._clients.of_this_loop(), "base_url", "an unknown address")
        what = f"the connection to {url} was lost" if begun else f"no server answers at {url}"
        return ConnectionError(f"{what} ({error.__cause__ or error})")

    def _keep(self, reader: ChunkReader) -> None:
        scope = current_scope()
        if scope is not None:
            self._readers.setdefault(scope.scope_id, []).append(reader)

    async def on_scope_end(self, scope_id: str) -> None:
        """End the streams of the scope that are still under way."""
        for reader in self._readers.pop(scope_id, []):
            await reader.cancel()

    async def on_loop_end(self) -> None:
        """Close this loop's connections, unless requests are under way on them."""
        if not self._num_open[asyncio.get_running_loop()]:
            await self._clients.close()

    async def async_shutdown(self) -> None:
        """End all streams that are still under way, and close this loop's connections."""
        for scope_id in list(self._readers):
            await self.on_scope_end(scope_id)
        await self._clients.close()


class TRTOpenaiWorker(OpenaiWorker):
    """For servers that take ``top_k`` as well, such as TensorRT-LLM's."""

    default_extensions = ("top_k",)


class _Requests:
    """The requests for the answer to a task: one, or several for a stream in parts.

    The parts end at multiples of ``tokens_per_request``, or a few tokens behind them, where a word
    ends.

    Args:
        worker: that executes the task.
        task: the prompt of a stream in parts is text.
        create: the method of the client that sends a request.
        fields: of a request for the whole answer.

    Raises:
        ParameterError: ``tokens_per_request`` is no number of tokens.
    """

    def __init__(
        self, worker: OpenaiWorker, task: GenerationTask, create: Any, fields: dict[str, Any]
    ) -> None:
        self._worker, self._task, self._create, self._fields = worker, task, create, fields
        self._began, self._scope, self._usage = time.perf_counter(), current_scope(), task.usage
        self._size, self._number = _part_size(task), 0
        self.num_certain = math.inf
        self._asked, self._is_last, self._end, self._num_new = 0, True, 0, 0
        stream = isinstance(task, StreamGenerationTask) and not isinstance(task, ChatTask)
        self._is_followed = stream  # its tokens are emitted step by step

    async def chunks(self, choice: StreamedChoice) -> AsyncGenerator[Any, None]:
        """The chunks of the request that goes on from ``choice``."""
        fields = self._fields if self._size is None else self._part(self._size, choice)
        self._task.llm_request_params = fields
        with self._worker.open_request():
            begun = False
            try:
                answer = await self._create(**fields)
                begun = True
                if not fields["stream"]:
                    yield answer
                    return
                async with answer:
                    async for chunk in answer:
                        yield chunk
            except Exception as error:
                if type(error).__name__ not in _CONNECTION_ERRORS:
                    raise
                raise self._worker.connection_error(error, begun) from error

    def _part(self, size: int, choice: StreamedChoice) -> dict[str, Any]:
        """The fields of the request for the next part, of at most ``size`` tokens."""
        task, number = self._task, self._number
        self.num_certain = choice.count // size * size + size
        self._asked = int(self.num_certain) - choice.count + min(_MARGIN, size // 4)
        left = None if task.max_tokens is None else task.max_tokens - choice.count
        left = self._scope.account.limit(left) if self._scope else left
        self._is_last = left is not None and left <= self._asked
        if left is not None and self._is_last:
            self._asked, self.num_certain = max(1, left), math.inf
        self._end, self._number, self._num_new = choice.count + self._asked, number + 1, 0
        prompt = self._fields["prompt"] + choice.text
        fields = {**self._fields, "prompt": prompt, "max_tokens": self._asked}
        if task.seed is not None and number:  # the same one would draw the same samples again
            fields["seed"] = sampling.derived_seed(task.seed, number)
        return fields

    def continues(self, choice: StreamedChoice) -> bool:
        """Whether the server has ended a part only because of its length.

        A part without any text is the last: a server that sends no usage would get one request
        after the other for nothing.
        """
        if self._is_last or not self._num_new or choice.finish_reason != "length":
            return False
        self._record(Usage(discarded=choice.end_request(self._end, int(self.num_certain))))
        return True

    def on_tokens(self, index: int, text: str, num_tokens: int) -> None:
        """Record and stream a new piece."""
        task = self._task
        self._num_new += num_tokens
        task.latency_s = time.perf_counter() - self._began
        task.ttft_s = task.latency_s if task.ttft_s is None else task.ttft_s
        self._record(Usage(completion_tokens=num_tokens, decoded=num_tokens))
        if not self._is_followed:
            task.emit(text, (), f"{id(self):x}.{index}")

    def on_usage(self, usage: Usage, num_received: int) -> None:
        """Record the server's count in place of the number of tokens received."""
        if 0 < usage.completion_tokens < self._asked:  # the context is full
            self._is_last = True
        self._record(usage + Usage(completion_tokens=-num_received, decoded=-num_received))

    def _record(self, usage: Usage) -> None:
        for count in dataclasses.fields(Usage):
            before = getattr(self._usage, count.name)
            setattr(self._usage, count.name, before + getattr(usage, count.name))
        if self._scope is not None:
            self._scope.account.record(self._usage)


_CONNECTION_ERRORS = ("APIConnectionError", "ReadError", "RemoteProtocolError")
"""Of the ``openai`` package and of ``httpx``, which need not be installed."""

_MARGIN = 8
"""Tokens in which a word is likely to end."""

_WHOLE = (
    "best_of",
    "echo",
    "frequency_penalty",
    "guided_decoding",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "suffix",
)
"""Sampling fields that mean something else for an answer generated in parts."""


def _part_size(task: GenerationTask) -> int | None:
    """Tokens of each request for an answer; None: one request is for all of it."""
    size = getattr(task, "tokens_per_request", None)
    if size is None or isinstance(task, ChatTask):
        return None
    size = validated("tokens_per_request", size, POSITIVE_INT)
    if task.input_tokens is not None or any(sampling.is_set(task, name) for name in _WHOLE):
        return None
    return size


def _response_format(task: GenerationTask) -> dict[str, Any]:
    """The shape that the task asks for, as OpenAI's API has it; it knows JSON only.

    Raises:
        ParameterError: it is another one.
    """
    shape = task.guided_decoding
    if isinstance(shape, Mapping):
        shape = GuidedDecodingParams.from_dict(shape)
    if shape is None:
        return {}
    if shape.json_object:
        return {"response_format": {"type": "json_object"}}
    if shape.json is None:
        raise ParameterError(
            f"OpenaiWorker cannot honour guided_decoding with {shape.kind}",
            "there is no field for it that servers agree on",
            "Use json or json_object, or the field of your server in extra_body",
        )
    schema = {"name": "output", "schema": json.loads(str(shape.json)), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _show(task: StreamGenerationTask, reader: ChunkReader, count: int) -> None:
    """Emit the stream up to ``count`` tokens, as far as they have arrived."""
    choice = reader.choices[0]
    before, now = choice.begin_of(reader.shown), choice.begin_of(min(count, reader.available))
    reader.shown = now.count
    task.emit(now.text[len(before.text) :], (), f"{id(reader):x}.0")


def _fill(
    task: GenerationTask, reader: ChunkReader, choices: Mapping[int, StreamedChoice] | None = None
) -> None:
    """Store the answer so far on the task, or ``choices``, a part of it."""
    choices = reader.choices if choices is None else choices
    server_usage, usage = reader.server_usage, task.usage
    samples = [_output(choice) for _, choice in sorted(choices.items())]
    for output in samples:
        output.usage = usage
    task.result = samples[0]
    task.samples = samples
    whole = len(samples) == 1 and choices[0] is reader.choices[0]
    task.usage_completion_tokens = choices[0].count
    if server_usage is not None:
        task.usage_prompt_tokens = server_usage.prompt_tokens
        if whole:
            task.usage_completion_tokens = server_usage.completion_tokens - choices[0].num_dropped
    task.request_id = reader.request_id


def _output(choice: StreamedChoice) -> ScaffoldingOutput:
    scores = choice.logprobs or None
    total = None
    if scores is not None:
        total = sum(next(iter(entries.values())).logprob for entries in scores)
    return ScaffoldingOutput(
        text=choice.text,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=scores,
        cumulative_logprob=total,
    )
