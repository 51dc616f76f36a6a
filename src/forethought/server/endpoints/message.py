"""An answer as a message: its thought, its content and its calls, at once or as it streams."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forethought.llm.reasoning import ReasoningSplitter, Split, opens_thought, split
from forethought.outputs import GRAMMAR_COMPLETE
from forethought.scaffolding.result import CallDelta, ScaffoldingOutput
from forethought.scaffolding.task import ChatTask, GenerationTask
from forethought.server.backends.backend import Prompted
from forethought.server.job import Ask, Job, Piece
from forethought.server.protocol.logprobs import AnswerLogprobs, AnswerSpans, Span
from forethought.server.protocol.tool_calls import Call, CallPiece, Tools
from forethought.server.service import Service

DEFAULT_MARKERS = ("<think>", "</think>")
_REASONS = {reason: reason for reason in ("stop", "length", "tool_calls", "content_filter")}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer."""

    content: str
    reasoning: str
    calls: Sequence[Call]
    finish_reason: str
    num_reasoning_tokens: int
    refusal: str | None = None
    """Why another server does not answer, in its words."""


def answer_of(
    output: ScaffoldingOutput, service: Service, prompted: Prompted, tools: Tools
) -> Answer:
    """An output as a message."""
    text, thought = output.text or "", _thought_of(output)
    if prompted.keeps_thought:
        text, thought = _KeptThought(service.backend.markers).push(thought, text), ""
    is_cut = output.finish_reason == "length"
    reasoning, content, calls = _read(text, service, prompted, tools, is_cut)
    calls = [*calls, *map(_parsed_call, output.meta.get("tool_calls", ()))]
    reasoning = thought + reasoning
    reason = _REASONS.get(output.finish_reason or "stop", "stop")
    if calls and reason == "stop" and all(call.is_whole for call in calls):
        reason = "tool_calls"
    refusal = output.meta.get("refusal")
    return Answer(content, reasoning, calls, reason, _count(reasoning, output, service), refusal)


def told_stop_reason(output: ScaffoldingOutput) -> int | str | None:
    """vLLM's ``stop_reason`` of a choice: the stop string or stop token that ended it; None: an
    end-of-sequence token or its grammar did, or it was cut.
    """
    return None if output.stop_reason == GRAMMAR_COMPLETE else output.stop_reason


def num_thought_tokens(service: Service, job: Job, answers: Sequence[Answer]) -> int:
    """Tokens of thought in all that a job generated, where their texts are known.

    Generations that a method has cancelled are not counted. Where only texts are known, they are
    tokenised, and the count is capped at the number that was generated.
    """
    count = sum(answer.num_reasoning_tokens for answer in answers)
    is_whole = len(job.generations) <= len(answers) or job.ask.prompted.keeps_thought
    if not is_whole:
        count = sum(_num_thought_in(task, service, job.ask.prompted) for task in job.generations)
    return min(count, job.usage.completion_tokens)


def _num_thought_in(task: GenerationTask, service: Service, prompted: Prompted) -> int:
    """Tokens of thought among those that a task generated."""
    markers, message = service.backend.markers, None
    if isinstance(task, ChatTask) and task.messages:
        message = getattr(task.messages[-1], "reasoning", None)
    is_open = _begins_in_thought(task, service, prompted)
    thought = (message or "") + split(task.output_str or "", markers, is_open).reasoning
    return service.backend.count_thought(thought, task.output_tokens)


def _begins_in_thought(task: GenerationTask, service: Service, prompted: Prompted) -> bool:
    """Whether the text before a task's output ends within a thought."""
    markers, point = service.backend.markers, task.fork_point
    if point is not None and point.output is not None:
        before = ReasoningSplitter(markers, prompted.is_open)
        before.push((point.output.text or "") + point.suffix)
        return before.is_open
    if task.input_tokens is not None:
        return prompted.is_open
    return opens_thought(task.input_str or "", markers)


def _read(
    text: str, service: Service, prompted: Prompted, tools: Tools, is_cut: bool
) -> tuple[str, str, Sequence[Call]]:
    if prompted.reader is not None:
        reader = prompted.reader(prompted.keeps_thought)
        pieces = [reader.push(text), reader.finish()]
        reasoning, content = ("".join(parts) for parts in zip(*pieces, strict=True))
        calls = [Call.create(name, arguments) for name, arguments in reader.calls]
        if is_cut and not calls:
            _, content, calls = tools.parse(content, is_cut)
            return reasoning, content, calls
        return reasoning, content, calls if tools.several else calls[:1]
    if prompted.keeps_thought or not prompted.is_chat:
        reasoning, content = "", text
    else:
        reasoning, content = split(text, service.backend.markers, prompted.is_open)
    thought, content, calls = tools.parse(content, is_cut, prompted.begun or "")
    if prompted.keeps_thought:
        return "", _KeptThought(None).push(thought, content), calls
    return reasoning + thought, content, calls


def _parsed_call(call: dict[str, Any]) -> Call:
    """A call that another server has parsed."""
    function = call["function"]
    parsed = Call.create(function["name"], function["arguments"])
    return parsed._replace(id=call["id"]) if call.get("id") else parsed


def _count(reasoning: str, output: ScaffoldingOutput, service: Service) -> int:
    """Tokens of a thought: as counted under a budget, or else those of its text."""
    if output.thinking is not None:
        return output.thinking.num_tokens
    return service.backend.count_thought(reasoning, output.token_ids)


def answer_spans(text: str, answer: Answer, service: Service, prompted: Prompted) -> AnswerSpans:
    """The ranges of an answer's thought and content in the text that was generated."""
    end = len(text) if service.backend.llm is not None else sys.maxsize
    if prompted.keeps_thought or not prompted.is_chat:
        return AnswerSpans((0, 0), (0, end))
    if prompted.reader is not None or prompted.begun is not None:
        content = text.rfind(answer.content)
        thought = text.rfind(answer.reasoning, 0, content + 1)
        return AnswerSpans(
            (thought, thought + len(answer.reasoning)), (content, content + len(answer.content))
        )
    splitter = ReasoningSplitter(service.backend.markers, prompted.is_open)
    splitter.push(text)
    splitter.finish()
    start = len(text) if splitter.answer_start is None else splitter.answer_start
    if answer.calls:
        start = max(start, text.find(answer.content, start))
        end = start + len(answer.content)
    return AnswerSpans(splitter.thought, (start, end))


class AnswerStream:
    """The pieces of one answer, sorted into thought, content and calls.

    Text that may begin a call is held back. The arguments of a call are returned as they are
    generated; where a response template reads the answer, calls are returned at the end.
    """

    def __init__(self, service: Service, prompted: Prompted, tools: Tools) -> None:
        keeps = prompted.keeps_thought
        has_markers = not keeps and prompted.is_chat
        markers = service.backend.markers if has_markers else None
        self._splitter = ReasoningSplitter(markers, prompted.is_open)
        self._reader = None if prompted.reader is None else prompted.reader(keeps)
        reads_calls = self._reader is None and tools.are_read
        self._calls = tools.reader(prompted.begun or "") if reads_calls else None
        self._is_message = prompted.begun is not None
        self._pieces: list[CallPiece] = []
        self._passed: dict[int, str] = {}  # arguments of another server's calls, by number
        self._whole: set[int] = set()  # numbers of those that are given at the end
        self._num_sent = 0  # characters of content before a call
        self._kept = _KeptThought(service.backend.markers) if keeps else None
        self._has_thought = False

    def push(self, text: str, thought: str = "") -> Split:
        """The new thought and content that are certain; ``thought`` comes apart from an upstream
        server.
        """
        if self._reader is not None:
            return Split(*self._reader.push(text))
        self._has_thought = self._has_thought or bool(thought)
        if self._kept is not None:
            text, thought = self._kept.push(thought, text), ""
        reasoning, content = self._splitter.push(text)
        message = self._sorted(content)
        return Split(thought + reasoning + message.reasoning, message.content)

    def push_rest(self, text: str, output: ScaffoldingOutput) -> Split:
        """The same for what has not been streamed at the end of ``output``."""
        return self.push(text, "" if self._has_thought else _thought_of(output))

    @property
    def spans(self) -> AnswerSpans:
        """The ranges of the thought and the content that are certain."""
        splitter = self._splitter
        start = splitter.position if splitter.answer_start is None else splitter.answer_start
        return AnswerSpans(splitter.thought, (start, self.position))

    @property
    def position(self) -> int:
        """Characters of the text that are certain to be of a thought, of content, or of neither."""
        if self._reader is not None or self._is_message:
            return 0
        if self._calls is not None and self._splitter.answer_start is not None:
            return self._splitter.answer_start + self._num_sent
        return self._splitter.position

    def finish(self, answer: Answer) -> Split:
        """What is missing at the end of ``answer``."""
        if self._reader is not None:
            self._finish_calls(answer.calls)
            reasoning, content = self._reader.finish()
            return Split(reasoning, "" if answer.calls and not self._reader.calls else content)
        reasoning, content = self._splitter.finish()
        message = self._sorted(content, is_cut=answer.finish_reason == "length")
        num_read = 0 if self._calls is None else len(self._calls.whole_calls)
        self._finish_calls(answer.calls[num_read:])
        is_call_alone = bool(answer.calls) and not answer.content  # perhaps cut before its name
        return Split(reasoning + message.reasoning, "" if is_call_alone else message.content)

    def take_calls(self) -> list[CallPiece]:
        """What is new of calls since they were taken last."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def push_calls(self, deltas: Sequence[CallDelta]) -> None:
        """New arguments of calls of another server, which has parsed them."""
        for delta in deltas:
            if delta.arguments:
                self._push_delta(delta)

    def _push_delta(self, delta: CallDelta) -> None:
        earlier, number = self._passed.get(delta.number), delta.number
        is_next = number == len(self._passed) and delta.arguments.startswith("{")  # no null
        if number in self._whole or (earlier is None and not is_next):
            self._whole.add(number)
            return
        opening = None
        if earlier is None:
            call = Call.create(delta.name, None)
            opening = call._replace(id=delta.id or call.id)
        self._pieces.append(CallPiece(number, opening, delta.arguments))
        self._passed[number] = (earlier or "") + delta.arguments

    def _finish_calls(self, calls: Sequence[Call]) -> None:
        """Return the calls that have not been returned."""
        first = self._num_calls
        for number, call in enumerate(calls):
            if number in self._passed:
                if rest := call.arguments.removeprefix(self._passed[number]):
                    self._pieces.append(CallPiece(number, None, rest))
            else:
                self._pieces.append(CallPiece(first + number, call, call.arguments))

    @property
    def _num_calls(self) -> int:
        """Calls of the text that have begun."""
        return 0 if self._calls is None else len(self._calls.calls)

    def _sorted(self, content: str, is_cut: bool | None = None) -> Split:
        """The thought and content that are certain of new text after the model's thought; with
        ``is_cut`` at its end. What is new of calls is kept for ``take_calls``.
        """
        if self._calls is None:
            return Split("", content)
        reasoning, certain = self._calls.push(content)
        if is_cut is not None:
            last = self._calls.finish(is_cut)
            reasoning, certain = reasoning + last[0], certain + last[1]
        if not self._calls.calls:
            self._num_sent += len(certain)
        for delta in self._calls.take_deltas():
            opening = None if delta.name is None else Call.create(delta.name, None)
            self._pieces.append(CallPiece(delta.number, opening, delta.arguments))
        if self._kept is not None and self._is_message:
            return Split("", self._kept.push(reasoning, certain))
        return Split(reasoning, certain)


class AnswerTokens:
    """The log-probabilities of one answer's tokens, sorted as its text is."""

    def __init__(self, service: Service, ask: Ask) -> None:
        self._service, self._prompted = service, ask.prompted
        skips = ask.sampling.skip_special_tokens
        text_of = service.backend.token_texts(ask.prompted.prompt, skips)
        self._tokens, self._has_streamed = AnswerLogprobs(text_of), False

    def push(self, piece: Piece, stream: AnswerStream) -> tuple[list[Span], list[Span]]:
        """Those of the thought and of the content that are certain after ``piece``, which
        ``stream`` has got.
        """
        self._has_streamed = True
        self._tokens.add(piece.logprobs, piece.token_ids)
        return self._tokens.take(stream.spans, stream.position)

    def rest(self, answer: Answer, output: ScaffoldingOutput) -> tuple[list[Span], list[Span]]:
        """What is missing at the end of ``answer``, which ``output`` has become."""
        if not self._has_streamed:
            self._tokens.add(output.logprobs or (), output.token_ids or ())
        if self._service.backend.llm is None:
            self._tokens.leave_out_ending(output.text or "")
        spans = answer_spans(output.text or "", answer, self._service, self._prompted)
        return self._tokens.take(spans)


class _KeptThought:
    """Puts the thought that another server returns apart back into the text, between markers."""

    def __init__(self, markers: tuple[str, str] | None) -> None:
        self._start, self._end = markers or DEFAULT_MARKERS
        self._is_open = False

    def push(self, thought: str, text: str) -> str:
        opening = self._start if thought and not self._is_open else ""
        self._is_open = self._is_open or bool(thought)
        closing = self._end if text and self._is_open else ""
        self._is_open = self._is_open and not closing
        return opening + thought + closing + text


def _thought_of(output: ScaffoldingOutput) -> str:
    """The thought that an upstream server has returned apart."""
    return str(output.meta.get("reasoning") or "")
