"""``ScriptedWorker``: a worker with scripted answers, for tests of methods without a model.

One character is one token, and its id is the code point, so that text and tokens are easy to check.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forethought.errors import UsageError
from forethought.outputs import ThinkingOutput, ThoughtEnd, TokenLogprobs
from forethought.rewards.confidence import confidence_of
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import RewardTask, TaskStatus
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.messages import AssistantMessage
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.session_task import RestoreSessionTask, SaveSessionTask
from forethought.scaffolding.task import (
    ChatTask,
    GenerationTask,
    StreamGenerationTask,
)
from forethought.scaffolding.thinking import ThinkingProfile
from forethought.scaffolding.worker import Worker


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, and how it is delivered."""

    text: str
    finish_reason: str = "stop"
    """If it is given to its end."""
    delay: float = 0.0
    """Seconds before the first token."""
    seconds_per_token: float = 0.0
    error: Exception | None = None
    """Raised after the delay, instead of answering."""
    logprobs: Sequence[TokenLogprobs] | None = None
    """One entry per character; confidences are computed from them, as from a server's."""
    suffix_logprobs: list[float] | None = None
    """Of the suffix of a fork with ``score_suffix``."""


Answer = str | Reply
Script = Callable[[str, int], Answer] | Mapping[str, Answer | Sequence[Answer]] | Sequence[Answer]
"""The answers: a function of the prompt and of how often it was asked before; a table of
answers (or lists of answers, one per time it is asked) by prompt; or a list, in order of asking."""


@dataclass(eq=False)
class Call:
    """One generation that was requested."""

    prompt: str
    index: int
    """How often this prompt had been asked before."""
    task: GenerationTask
    steps: int = 0
    """How often it came to the worker: more than once only for streams."""
    ended: str | None = None
    """None while it goes on; then ``"done"``, ``"failed"`` or ``"cancelled"``."""


@dataclass
class _Generation:
    call: Call
    reply: Reply
    text: str
    """The whole output, after stop strings and ``max_tokens``."""
    finish_reason: str
    stop_reason: str | None
    thinking: ThinkingOutput | None
    num_generated: int = 0
    has_started: bool = field(default=False)


class ScriptedWorker(Worker):
    """Answers from a script. Streams, forks (by their text), ``n``, stop strings, ``max_tokens``,
    ``thinking_budget``, ``echo``, delays and failures work as with a model; other sampling fields
    change nothing, and can be read from ``calls``. A thought that is closed at its cap is followed
    by the script's text after its ``</think>``.

    A stream advances only while a step is awaited, by its ``streaming_step`` (0 counts as 1).

    Args:
        script: see ``Script``.
        score: the score of a reward task, as a function of question and answer.
        markers: what opens and closes a thought; False: a model that does not think; None: unknown
            to methods.

    Attributes:
        calls: every requested generation, in order.
        snapshots: the texts of saved sessions, by name.
    """

    def __init__(
        self,
        script: Script = (),
        *,
        score: Callable[[str, str], float] | None = None,
        markers: tuple[str, str] | Literal[False] | None = None,
    ) -> None:
        self._script, self._score, self._markers = script, score, markers
        self._asked: Counter[str] = Counter()
        self._answered = 0
        self.calls: list[Call] = []
        self.snapshots: dict[str, str] = {}

    @property
    def prompts(self) -> list[str]:
        """The prompts of all calls."""
        return [call.prompt for call in self.calls]

    def thinking(self, task: GenerationTask) -> ThinkingProfile | None:
        """By ``markers`` and the prompt."""
        if self._markers is None:
            return None
        return ThinkingProfile.of_text(task.input_str or "", self._markers or None)

    async def generation_handler(self, task: GenerationTask) -> TaskStatus:
        """Generate ``n`` answers."""
        task.samples = []
        for _ in range(task.n):
            generation = self._begin(task, _prompt(task))
            await self._generate(task, generation, None)
            _fill(task, generation)
            task.samples.append(task.result or ScaffoldingOutput(""))
        task.result = (samples := task.samples)[0]
        task.samples = samples
        return TaskStatus.SUCCESS

    async def stream_handler(self, task: StreamGenerationTask) -> TaskStatus:
        """Generate the next ``streaming_step`` tokens."""
        step = max(1, task.checked_step)
        generation = task.request_handle if task.under_way else None
        if generation is None:
            generation = self._begin(task, _prompt(task))
            task.request_handle = generation
        if task.cancel_flag:
            generation.call.ended = "cancelled"
            generation.text = generation.text[: generation.num_generated]
            generation.finish_reason = "abort"
        await self._generate(task, generation, step)
        _fill(task, generation)
        task.end_flag = generation.num_generated == len(generation.text)
        if not task.end_flag:
            task.finish_reason = task.stop_reason = None
        return TaskStatus.SUCCESS

    async def chat_handler(self, task: ChatTask) -> TaskStatus:
        """Answer the last message."""
        generation = self._begin(task, task.messages[-1].content or "")
        await self._generate(task, generation, None)
        _fill(task, generation)
        task.end_flag = True
        task.add_message(AssistantMessage(task.output_str, finish_reason=generation.finish_reason))
        return TaskStatus.SUCCESS

    async def reward_handler(self, task: RewardTask) -> TaskStatus:
        """Score with the ``score`` function."""
        if self._score is None:
            return TaskStatus.WORKER_NOT_SUPPORTED
        task.score = self._score(task.input_str or "", task.output_str or "")
        return TaskStatus.SUCCESS

    async def save_handler(self, task: SaveSessionTask) -> TaskStatus:
        """Save the text of a generation under a name."""
        source = task.source or GenerationTask()
        self.snapshots[task.name] = f"{_prompt(source)}{source.output_str or ''}{task.suffix}"
        return TaskStatus.SUCCESS

    async def restore_handler(self, task: RestoreSessionTask) -> TaskStatus:
        """Restore the text of a name."""
        task.text = self.snapshots.get(task.name)
        task.found = task.text is not None
        return TaskStatus.SUCCESS

    task_handlers = {  # noqa: RUF012
        GenerationTask: generation_handler,
        StreamGenerationTask: stream_handler,
        ChatTask: chat_handler,
        RewardTask: reward_handler,
        SaveSessionTask: save_handler,
        RestoreSessionTask: restore_handler,
    }

    # ---- the script ---------------------------------------------------------------------------

    def _begin(self, task: GenerationTask, prompt: str) -> _Generation:
        call = Call(prompt, self._asked[prompt], task)
        self._asked[prompt] += 1
        self.calls.append(call)
        answer = self._answer(call)
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        text, thinking = _close_thought(prompt, reply.text, task)
        text, stop = _cut_at_stop(text, task)
        reason = "stop" if stop else reply.finish_reason
        scope = current_scope()
        max_tokens = scope.account.limit(task.max_tokens) if scope else task.max_tokens
        if max_tokens is not None and len(text) > max_tokens:
            text, reason, stop = text[:max_tokens], "length", None
        task.usage.prompt_tokens += len(prompt)
        point = task.fork_point
        if point is not None and point.input_str == task.input_str:
            task.num_kept_tokens, task.inserted_tokens = point.num_kept, [*map(ord, point.suffix)]
        return _Generation(call, reply, text, reason, stop, thinking)

    def _answer(self, call: Call) -> Answer:
        script: Any = self._script
        if callable(script):
            answer: Answer = script(call.prompt, call.index)
            return answer
        position = call.index
        if isinstance(script, Mapping):
            if call.prompt not in script:
                raise UsageError("the script has no answer", f"for the prompt {call.prompt!r}")
            script = script[call.prompt]
        else:
            position, self._answered = self._answered, self._answered + 1
        if isinstance(script, str | Reply):
            return script
        if position >= len(script):
            raise UsageError("the script has no more answers", f"{call.prompt!r} is one too many")
        chosen: Answer = script[position]
        return chosen

    async def _generate(
        self, task: GenerationTask, generation: _Generation, step: int | None
    ) -> None:
        """Generate the next ``step`` tokens (None: all), streaming and counting each."""
        call, reply, scope = generation.call, generation.reply, current_scope()
        call.steps += 1
        end = len(generation.text)
        try:
            if not generation.has_started:
                generation.has_started = True
                await asyncio.sleep(reply.delay)
                if reply.error is not None:
                    raise reply.error
            first = generation.num_generated
            until = end if step is None else min(end, first + step)
            for token in generation.text[first:until]:
                await asyncio.sleep(reply.seconds_per_token)
                task.usage.completion_tokens += 1
                task.usage.decoded += 1
                if scope is not None and scope.account.record(task.usage):
                    break  # it is beyond the budget; the driver ends what is in flight
                generation.num_generated += 1
                task.emit(token, [ord(token)], f"{id(generation):x}")
        except BaseException as error:
            call.ended = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
            if scope is not None and scope.account.exhausted is not None:
                _cut(task, generation)
            raise
        if scope is not None and scope.account.exhausted is not None and call.ended is None:
            call.ended = "cancelled"
            _cut(task, generation)
            raise scope.account.exhausted
        if generation.num_generated == end and call.ended is None:
            call.ended = "done"


def _prompt(task: GenerationTask) -> str:
    prompt, point = task.prompt, task.fork_point
    if prompt is None and point is not None and point.prompt_tokens is not None:
        output = (point.output.text if point.output is not None else None) or ""
        return "".join(map(chr, point.prompt_tokens)) + output + point.suffix
    return prompt if isinstance(prompt, str) else "".join(map(chr, prompt or ()))


def _close_thought(
    prompt: str, text: str, task: GenerationTask
) -> tuple[str, ThinkingOutput | None]:
    """The text with its thought closed at ``thinking_budget`` tokens, and the thought's length.

    The prompt or the text opens the thought; a blank after the marker is part of the marker.
    """
    budget = task.thinking_budget
    if budget is None:
        return text, None
    opened, begun = "", prompt.rpartition("<think>")[2]
    if "<think>" not in prompt:
        before, marker, _ = text.partition("<think>")
        opened, begun = before + marker, ""
    if "<think>" not in prompt + text or "</think>" in begun:
        return text, ThinkingOutput(0, None)
    thought, end, answer = text[len(opened) :].partition("</think>")
    blank = int((begun + thought)[:1].isspace())
    count = len(begun) + len(thought) - blank
    if count < budget:
        return text, ThinkingOutput(count, ThoughtEnd.NATURAL if end else None)
    thought_kept = thought[: max(0, budget + blank - len(begun))]
    closing = task.thinking_end if isinstance(task.thinking_end, str) else "</think>"
    count = len(begun) + len(thought_kept) - blank
    return opened + thought_kept + closing + answer, ThinkingOutput(count, ThoughtEnd.BUDGET)


def _cut_at_stop(text: str, task: GenerationTask) -> tuple[str, str | None]:
    """The text up to its first stop string, and that string."""
    stops = [(text.find(stop), stop) for stop in sampling.stop_strings(task) if stop in text]
    if not stops:
        return text, None
    position, stop = min(stops)
    return text[: position + (len(stop) if task.include_stop_str_in_output else 0)], stop


def _cut(task: GenerationTask, generation: _Generation) -> None:
    """Leave the output of a generation on its task, as the budget is spent."""
    if not generation.num_generated:
        return
    if generation.num_generated < len(generation.text):
        generation.text = generation.text[: generation.num_generated]
        generation.finish_reason, generation.stop_reason = "length", None
    _fill(task, generation)


def _fill(task: GenerationTask, generation: _Generation) -> None:
    output = generation.text[: generation.num_generated]
    task.output_str = generation.call.prompt + output if task.echo else output
    task.output_tokens = [ord(token) for token in output]
    task.finish_reason, task.stop_reason = generation.finish_reason, generation.stop_reason
    task.thinking = generation.thinking
    if generation.reply.logprobs is not None:
        task.logprobs = list(generation.reply.logprobs)[: generation.num_generated]
        if task.confidence is not None:
            task.confidences = [confidence_of(entry, task.confidence) for entry in task.logprobs]
    if task.score_suffix:
        task.suffix_logprobs = generation.reply.suffix_logprobs
    task.usage_prompt_tokens = len(generation.call.prompt)
    task.usage_completion_tokens = len(output)
