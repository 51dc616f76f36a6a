"""The requests with which ``OpenaiWorker`` gets the answer to a task.

``OneAnswer`` sends one request, or several for a stream in parts; ``ThoughtThenAnswer`` sends two
for a thinking budget that the server has no field for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from typing import Any, Protocol

from forethought.errors import ParameterError, UpstreamError, UsageError
from forethought.outputs import ThinkingOutput, ThoughtEnd, Usage
from forethought.scaffolding import sampling
from forethought.scaffolding.execution_scope import ExecutionScope, current_scope
from forethought.scaffolding.result import CallDelta
from forethought.scaffolding.settings import POSITIVE_INT, validated
from forethought.scaffolding.task import ChatTask, GenerationTask, StreamGenerationTask
from forethought.workers.clients import CONNECTION_ERRORS, is_stream_error
from forethought.workers.concurrency import NUM_TRIES, AdaptiveConcurrency
from forethought.workers.openai_answer import StreamedChoice
from forethought.workers.openai_chunk import malformed

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
_UNCLOSABLE = (*_WHOLE, "n", "num_logprobs")
"""Those that mean something else where the thought and the answer are two requests."""

_UNREADABLE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What the client library fails with where a server sends what is no answer, or no JSON."""


class Server(Protocol):
    """The worker that sends the requests."""

    concurrency: AdaptiveConcurrency | None
    thinking_markers: tuple[str, str]
    prompt_lengths: PromptLengths

    def open_request(self) -> AbstractContextManager[None]:
        """Counts a request as being in flight."""

    def connection_error(self, error: Exception, has_begun: bool) -> Exception:
        """The error for a connection that failed."""


class PromptLengths:
    """Lengths of prompts for whose requests the server has sent no usage, as after a cut answer.

    They are those of another request with the same prompt inside the same request of a
    ``ScaffoldingLlm``, or else ``count`` of the prompt's text.

    Attributes:
        count: counts the tokens of a text; the default takes four characters for one.
    """

    def __init__(self) -> None:
        self.count: Callable[[str], int] = lambda text: -(-len(text) // 4)
        self._known: dict[str, dict[str, int]] = {}  # by request and by text

    def learn(self, scope: ExecutionScope | None, fields: Mapping[str, Any], length: int) -> None:
        """Record the length of the prompt in the fields of a request, as the server has sent it."""
        if scope is not None and length:
            self._known.setdefault(scope.request_id, {})[prompt_text(fields)] = length

    def find(self, scope: ExecutionScope | None, fields: Mapping[str, Any]) -> int:
        """The length of the prompt in the fields of a request, as exactly as it is known."""
        text, ids = prompt_text(fields), fields.get("prompt")
        if ids is not None and not isinstance(ids, str):
            return len(ids)
        lengths = {} if scope is None else self._known.setdefault(scope.request_id, {})
        if text not in lengths:
            lengths[text] = self.count(text)
        return lengths[text]

    def forget(self, scope_id: str) -> None:
        """Remove the prompts of a request whose scope is over."""
        self._known.pop(scope_id, None)


class OneAnswer:
    """The requests for the answer to a task: one, or several for a stream in parts.

    The parts end at multiples of ``tokens_per_request``, or a few tokens later, where a word ends.

    Args:
        worker: that executes the task.
        task: the prompt of a stream in parts is text.
        create: the method of the client that sends a request.
        fields: of a request for the whole answer.

    Raises:
        ParameterError: ``tokens_per_request`` is no number of tokens.
    """

    def __init__(
        self, worker: Server, task: GenerationTask, create: Any, fields: dict[str, Any]
    ) -> None:
        self._worker, self._task, self._create, self._fields = worker, task, create, fields
        self._began, self._scope, self._usage = time.perf_counter(), current_scope(), task.usage
        self._size, self._number = _part_size(task), 0
        self.num_certain, self.waits = math.inf, True
        self._asked, self._is_last, self._end, self._num_new = 0, True, 0, 0
        stream = isinstance(task, StreamGenerationTask) and not isinstance(task, ChatTask)
        self._has_begun, self._sent, self._num_before = False, fields, 0
        self._is_followed = stream  # its tokens are emitted step by step

    async def chunks(self, choice: StreamedChoice) -> AsyncGenerator[Any, None]:
        """The chunks of the request that goes on from ``choice``."""
        fields = self._next_fields(choice)
        self._task.llm_request_params = self._sent = fields
        self._num_before = self._usage.completion_tokens
        with self._worker.open_request():
            self._has_begun = False
            try:
                async with aclosing(self._answer(fields)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except Exception as error:
                if is_stream_error(error):
                    raise UpstreamError.of(getattr(error, "body", None) or str(error)) from error
                if type(error).__name__ not in CONNECTION_ERRORS:
                    if isinstance(error, _UNREADABLE) and not isinstance(error, UsageError):
                        raise malformed() from error
                    raise
                raise self._worker.connection_error(error, self._has_begun) from error

    async def _answer(self, fields: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The chunks of one request, which waits for capacity if the worker has a limit."""
        limit = self._worker.concurrency
        async with nullcontext() if limit is None else limit.request() as request:
            create = partial(self._create, **fields)
            answer = await (create() if request is None else request.send(create))
            self._has_begun = True
            if not fields["stream"]:
                yield answer
                return
            async with answer:
                async for chunk in answer:
                    if request is not None:
                        request.on_token()
                    yield chunk

    async def repeats(self, number: int, error: Exception) -> bool:
        """Whether an answer that broke off ``number`` times is asked for again, after a pause:
        where the worker repeats refused requests, nobody has seen a part of the answer, and no
        budget counts its tokens. What came of it counts as discarded.
        """
        concurrency, is_shown = self._worker.concurrency, self._task.streaming_output_flag
        is_counted = self._scope is not None and self._scope.account.budget.tokens is not None
        if concurrency is None or is_shown or self._is_followed or is_counted:
            return False
        if not self._has_begun or number >= NUM_TRIES:
            return False
        lost = self._usage.completion_tokens - self._num_before
        self._record(Usage(completion_tokens=-lost, discarded=lost))
        await asyncio.sleep(concurrency.pause_before(number, error))
        return True

    def _next_fields(self, choice: StreamedChoice) -> dict[str, Any]:
        return self._fields if self._size is None else self._part(self._size, choice)

    def _part(self, size: int, choice: StreamedChoice) -> dict[str, Any]:
        """The fields of the request for the next part, of at most ``size`` tokens."""
        task, number = self._task, self._number
        self.num_certain = choice.count // size * size + size
        self._asked = int(self.num_certain) - choice.count + min(_MARGIN, size // 4)
        tokens_left = None if task.max_tokens is None else task.max_tokens - choice.count
        tokens_left = self._scope.account.limit(tokens_left) if self._scope else tokens_left
        self._is_last = tokens_left is not None and tokens_left <= self._asked
        if tokens_left is not None and self._is_last:
            self._asked, self.num_certain = max(1, tokens_left), math.inf
        self._end, self._number, self._num_new = choice.count + self._asked, number + 1, 0
        prompt = self._fields["prompt"] + choice.text
        fields = {**self._fields, "prompt": prompt, "max_tokens": self._asked}
        if task.seed is not None and number:  # the same one would draw the same samples again
            fields["seed"] = sampling.derived_seed(task.seed, number)
        return fields

    def continues(self, choice: StreamedChoice) -> bool:
        """Whether the server has ended a part only because of its length.

        A part without any text is the last, as a server that sends no usage would get endless
        requests.
        """
        if self._is_last or not self._num_new or choice.finish_reason != "length":
            return False
        self._record(Usage(discarded=choice.end_request(self._end, int(self.num_certain))))
        return True

    def on_tokens(
        self,
        index: int,
        text: str,
        num_tokens: int,
        thought: str = "",
        calls: Sequence[CallDelta] = (),
    ) -> int:
        """Record and stream a new piece; returns the number of tokens beyond the budget."""
        task = self._task
        self._num_new += num_tokens
        task.latency_s = time.perf_counter() - self._began
        task.ttft_s = task.latency_s if task.ttft_s is None else task.ttft_s
        beyond = self._record(Usage(completion_tokens=num_tokens, decoded=num_tokens))
        if not self._is_followed and not beyond:
            task.emit(text, (), f"{id(self):x}.{index}", reasoning=thought, calls=calls)
        return beyond

    def on_usage(self, usage: Usage | None, num_received: int) -> None:
        """Record the server's count in place of the number of tokens received.

        Without one, the tokens received count, and the prompt of a request that has begun as
        exactly as it is known.
        """
        lengths = self._worker.prompt_lengths
        if usage is None:
            length = lengths.find(self._scope, self._sent) if self._has_begun else 0
            self._record(Usage(prompt_tokens=length, prefilled=length))
            return
        lengths.learn(self._scope, self._sent, usage.prompt_tokens)
        if 0 < usage.completion_tokens < self._asked:  # the context is full
            self._is_last = True
        self._record(usage + Usage(completion_tokens=-num_received, decoded=-num_received))

    def _record(self, usage: Usage) -> int:
        for count in dataclasses.fields(Usage):
            before = getattr(self._usage, count.name)
            setattr(self._usage, count.name, before + getattr(usage, count.name))
        return 0 if self._scope is None else self._scope.account.record(self._usage)


class ThoughtThenAnswer(OneAnswer):
    """The two requests of a completion with a thinking budget: the thought, then the answer.

    The first one ends at ``thinking_budget`` tokens or at the closing marker. The second one
    continues the text after the marker or the closing text. The tokens of the closing text are
    not generated; those of a thought in the prompt are not known, and do not count.
    """

    def __init__(
        self, worker: Server, task: GenerationTask, create: Any, fields: dict[str, Any]
    ) -> None:
        super().__init__(worker, task, create, fields)
        assert task.thinking_budget is not None, "else there is one request"
        self._budget, self._marker = task.thinking_budget, worker.thinking_markers[1]
        self._closing = str(task.thinking_end or self._marker)
        self.waits, self._is_thinking, self._num_thought = False, self._budget > 0, 0

    async def repeats(self, number: int, error: Exception) -> bool:
        """Never: its thought may have ended."""
        return False

    def _next_fields(self, choice: StreamedChoice) -> dict[str, Any]:
        limit, fields = self._fields.get("max_tokens"), dict(self._fields)
        if self._is_thinking:
            most = self._budget if limit is None else min(limit, self._budget)
            return fields | {"max_tokens": most, "stop": [self._marker]}
        if not choice.text:  # there is no thought
            self._insert(choice, self._closing, ThoughtEnd.BUDGET)
        fields["prompt"] += choice.text
        if limit is not None:
            fields["max_tokens"] = limit - self._num_thought
        if self._task.seed is not None:  # the same one would draw the same samples again
            fields["seed"] = sampling.derived_seed(self._task.seed, 1)
        return fields

    def continues(self, choice: StreamedChoice) -> bool:
        """Whether the thought is over and the answer is to follow."""
        if not self._is_thinking:
            if choice.stop_reason == self._marker:  # that was the first request's
                choice.stop_reason = None
            return False
        self._num_thought = self._num_thought or choice.count  # if the server sends no usage
        limit = self._fields.get("max_tokens")
        is_closed = choice.finish_reason == "stop" and choice.stop_reason == self._marker
        is_cut = choice.finish_reason == "length" and self._num_thought >= self._budget
        if not (is_closed or is_cut) or (limit is not None and limit <= self._num_thought):
            end = ThoughtEnd.NATURAL if is_closed else None
            choice.thinking = ThinkingOutput(self._num_thought, end)
            return False
        self._is_thinking = False
        if is_closed:
            self._insert(choice, self._marker, ThoughtEnd.NATURAL)
        else:
            self._insert(choice, self._closing, ThoughtEnd.BUDGET)
        return True

    def on_usage(self, usage: Usage | None, num_received: int) -> None:
        """Record the server's count; of the first request, it is the thought's."""
        super().on_usage(usage, num_received)
        if self._is_thinking and usage is not None:
            self._num_thought = usage.completion_tokens

    def _insert(self, choice: StreamedChoice, text: str, end: ThoughtEnd) -> None:
        """Close the thought of ``choice`` with a text that is not generated."""
        choice.add(text)
        choice.finish_reason = choice.stop_reason = None
        choice.thinking = ThinkingOutput(self._num_thought, end)
        if not self._is_followed:
            self._task.emit(text, (), f"{id(self):x}.0")


def has_open_thought(task: GenerationTask, prompt: Any, start: str, end: str) -> bool:
    """Whether the prompt opens a thought, which ``ThoughtThenAnswer`` can close."""
    why = "Name the server's own field (--thinking-field NAME)"
    if not isinstance(prompt, str) or start not in prompt:
        raise ParameterError(
            "OpenaiWorker cannot honour thinking_budget here",
            f"the second request closes a thought, and the prompt has no {start} that opens one",
            f"End the prompt with {start}. {why}",
        )
    if end in prompt.rpartition(start)[2]:
        return False
    sampling.refuse(task, _UNCLOSABLE, "OpenaiWorker, with a thinking budget in two requests,", why)
    if task.thinking_end is not None and end not in str(task.thinking_end):
        raise ParameterError(
            "thinking_end does not end the thought",
            f"it is {task.thinking_end!r}, without the model's marker {end}",
            f"Append {end}, as text",
        )
    return True


def _part_size(task: GenerationTask) -> int | None:
    """Tokens of each request for an answer; None: one request is for all of it."""
    size = getattr(task, "tokens_per_request", None)
    if size is None or isinstance(task, ChatTask) or task.thinking_budget is not None:
        return None
    size = validated("tokens_per_request", size, POSITIVE_INT)
    if task.input_tokens is not None or any(sampling.is_set(task, name) for name in _WHOLE):
        return None
    return size


def prompt_text(fields: Mapping[str, Any]) -> str:
    """The prompt of a request as text; ids as the characters of these numbers."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Collection):
        return "".join(map(chr, prompt))
    parts = [fields.get("tools") or [], *fields.get("messages", ())]
    return "\n".join(json.dumps(part, sort_keys=True, default=str) for part in parts)
