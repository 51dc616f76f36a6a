"""Hogwild! Inference: workers that read each other while they write.

Several workers answer one question together. ``hogwild`` is the paper's: each worker attends to the
keys and values of the others token by token, in the pages where those have computed them, at
positions that are rotated for each reader; nothing is computed twice. It needs sequences of the
built-in engine::

    Alice sees: question | Bob: b1 b2 b3 ...   | Alice: a1 a2 a3 ...
    Bob sees:   question | Alice: a1 a2 a3 ... | Bob: b1 b2 b3 ...

``hogwild_turns`` approximates it with text, on any server: the workers write a turn each at the
same time; then each reads the others' turns, appended to its own, and goes on::

    Alice's sequence: question | Alice: a1 | Bob: b1 | Alice: a2 | Bob: b2 | ... | Final answer:
    Bob's sequence:   question | Bob: b1 | Alice: a1 | Bob: b2 | Alice: a2 | ...

There a text is prefilled by each of its readers; ``exchanged_tokens`` is the number of these
tokens.

Named workers, the contiguous layout of what a worker sees, the shared history in steps and the
regular question whether work is redundant are the paper's; the texts are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any

from forethought.answers.answer_extraction import extract_answer_from_boxed
from forethought.errors import BudgetExceeded, ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.attention_group import AttentionGroup
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    refuse_arguments,
    side_by_side,
)
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import ScaffoldingOutput, Stage
from forethought.scaffolding.settings import (
    NonNegativeInt,
    PositiveInt,
    Words,
    setting,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask

OPENING = (
    "\n\nSeveral workers solve this together. They write at the same time and read each other's "
    "text. They divide the work, and do not repeat what another one does.\n"
)
CHECK = "(Am I doing what another worker does already? If so, I do something else.) "
FINAL = "\n\nTogether they have found the final answer:"
MAX_WORKERS = 64
"""Each attends to the tokens of all others."""


@dataclass
class _Worker:
    """The state of one worker."""

    name: str
    part: GenerationTask
    """Its newest turn."""
    turns: list[str] = field(default_factory=list)
    unread: str = ""
    """The suffix of its newest turn when it goes on."""
    has_ended: bool = False


@with_settings
class HogwildController(Controller):
    """Named workers that read each other's tokens while they write (Hogwild! Inference).

    They write ``turn_tokens`` tokens at a time, between which it is seen whether they have an
    answer. The output is the final answer, which the first worker writes, reading the others, when
    they are done: because a worker's text has an answer, all have ended, or there have been
    ``max_turns``. Its length is the request's ``max_tokens``.
    ``customized_result_fields["hogwild"]`` holds the number of ``turns``, what each worker has
    written (``texts``, by name) and whether the budget ended it (``budget_ended``): the output is
    then the text of the first worker.
    """

    paper = (
        'Rodionov et al., "Hogwild! Inference: Parallel LLM Generation via Concurrent '
        'Attention", 2025. arXiv 2504.06261'
    )

    conversation = ConversationForm.TEXT
    joins_texts = True

    class WorkerTag(Enum):
        """The worker that generates; it holds sequences of the built-in engine."""

        GENERATION = "generation_with_hogwild"

    _name = "hogwild"
    step_end = ""

    workers: Words = setting(("Alice", "Bob"), "Their names, at least two.")
    turn_tokens: PositiveInt = setting(
        32, "Tokens that a worker writes before its text is looked at."
    )
    max_turns: PositiveInt = setting(32, "Turns of each worker at most.")
    check_every: NonNegativeInt = setting(
        4,
        "Turns of a worker from one question whether its work is redundant to the next; 0: it "
        "is never asked.",
    )
    streaming: bool = setting(
        False, "Stream the final answer as it comes, and to observers what each worker writes."
    )
    _: KW_ONLY
    opening: str = setting(OPENING, "Text after the question, which tells the workers how to work.")
    check: str = setting(CHECK, "The text of that question.")
    final: str = setting(FINAL, "Text in front of the final answer.")
    extract_answer: Callable[[str], str | None] = setting(
        extract_answer_from_boxed, "Finds an answer in a worker's text, which ends the turns."
    )

    def __post_init__(self) -> None:
        if len(set(self.workers)) < max(2, len(self.workers)):
            raise ParameterError(
                "invalid workers", f"got {self.workers!r:.200}", "Give two or more different names"
            )
        if len(self.workers) > MAX_WORKERS:
            raise ParameterError(
                "too many workers",
                f"got {len(self.workers)}, and each reads all others",
                f"Give at most {MAX_WORKERS}",
                param="workers",
            )

    def fan_out(self) -> int:
        """A turn of each worker at a time, and the answer."""
        return 1 + len(self.workers) * self.max_turns

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Answer the questions side by side.

        A budget that ends an answer leaves the text of the first worker that has one.
        """
        refuse_arguments(self, kwargs)
        for task in tasks:
            sampling.refuse(task, _REFUSED, self._name, "Leave it out")
            if task.input_str is None or task.skip_detokenizer:
                raise ParameterError(
                    f"{self._name} puts texts together",
                    "the prompt is token ids, or no text is wanted",
                    "Give the prompt as text (forethought generate: --raw)",
                )
        yield from side_by_side(self, tasks, self._solve)

    def _solve(self, task: GenerationTask) -> Process:
        workers = [self._worker(task, number) for number in range(len(self.workers))]
        details: dict[str, Any] = {"turns": 0, "budget_ended": False}
        try:
            while True:
                yield from self._turn(task, workers, details)
                if self._is_over(workers, details["turns"]):
                    break
                self._go_on(task, workers, details["turns"])
            first = workers[0]
            final = self._continuation(task, first.part, first.unread + self.final, task)
            final.stop, final.max_tokens = list(sampling.stop_strings(task)), task.max_tokens
            self._stream(task, final)
            self._join(task, [final, *(worker.part for worker in workers[1:])])
            yield [final]
            self._count(details, [final])
            task.result, task.request_handle = final.result, final.request_handle
        except BudgetExceeded:
            texts = ("".join(worker.turns) or worker.part.output_str for worker in workers)
            text = next((text for text in texts if text), None)
            if text is None:
                raise
            details["budget_ended"] = True
            task.result = ScaffoldingOutput(text, finish_reason="length")
        details["texts"] = {worker.name: "".join(worker.turns) for worker in workers}
        task.customized_result_fields[self._name] = details

    def _worker(self, task: GenerationTask, number: int) -> _Worker:
        name = self.workers[number]
        part = GenerationTask(input_str=f"{task.input_str}{self.opening}\n{name}: ")
        self._prepare(task, part)
        sampling.vary(part, number)
        self._stream(task, part, {"worker": number, "name": name})
        return _Worker(name, part)

    def _stream(
        self, task: GenerationTask, part: GenerationTask, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Stream a part if the task is to be: of a worker for observers alone, with ``fields``."""
        part.streaming_output_flag = task.streaming_output_flag or self.streaming
        part.stream_fields, part.streams_beside = fields, fields is not None

    def _turn(
        self, task: GenerationTask, workers: Sequence[_Worker], details: dict[str, Any]
    ) -> Process:
        """Let all workers write that have not ended, at the same time."""
        writing = [worker for worker in workers if not worker.has_ended]
        self._join(task, [worker.part for worker in workers])
        yield [worker.part for worker in writing]
        details["turns"] += 1
        self._count(details, [worker.part for worker in writing])
        for worker in writing:
            part = worker.part
            stopped = bool(self.step_end) and part.stop_reason == self.step_end
            worker.unread = self.step_end if stopped else ""
            worker.turns.append(f"{part.output_str or ''}{worker.unread}")
            worker.has_ended = not stopped and part.finish_reason != "length"
        self._exchange(workers, writing)
        yield Stage("exchanged", "a turn is over", fields={"turn": details["turns"]})

    def _join(self, task: GenerationTask, parts: Sequence[GenerationTask]) -> None:
        """Called before any of the parts is generated, with the parts of all workers."""
        AttentionGroup(parts, f"{task.input_str}{self.opening}")

    def _exchange(self, workers: Sequence[_Worker], writing: Sequence[_Worker]) -> None:
        """Called when those that were writing have ended their turn."""

    def _count(self, details: dict[str, Any], parts: Sequence[GenerationTask]) -> None:
        """Called with parts that were generated."""

    def _is_over(self, workers: Sequence[_Worker], num_turns: int) -> bool:
        answers = [self.extract_answer("".join(worker.turns)) for worker in workers]
        all_ended = all(worker.has_ended for worker in workers)
        return (
            num_turns == self.max_turns
            or all_ended
            or any(answer is not None for answer in answers)
        )

    def _go_on(self, task: GenerationTask, workers: Sequence[_Worker], num_turns: int) -> None:
        asks = bool(self.check_every) and (num_turns + 1) % self.check_every == 0
        for worker in workers:
            if not worker.has_ended:
                suffix = self._turn_suffix(worker, asks)
                fields = worker.part.stream_fields
                worker.part = self._continuation(task, worker.part, suffix, worker.part)
                self._stream(task, worker.part, fields)

    def _turn_suffix(self, worker: _Worker, asks: bool) -> str:
        return f"\n{self.check}" if asks else ""

    def _continuation(
        self, task: GenerationTask, source: GenerationTask, text: str, like: GenerationTask
    ) -> GenerationTask:
        """The task that goes on after ``source`` and a text, sampled as ``like`` is."""
        part: GenerationTask = source.fork(text, inherit=False)
        self._prepare(like, part)
        part.priority = task.priority
        return part

    def _prepare(self, source: GenerationTask, part: GenerationTask) -> None:
        sampling.carry(source, part)
        part.worker_tag, part.priority = self.WorkerTag.GENERATION, source.priority
        part.stop = [self.step_end] if self.step_end else []
        part.max_tokens = self.turn_tokens


@with_settings
class HogwildTurnsController(HogwildController):
    """Named workers that write side by side and read each other's text in turns (as Hogwild!).

    As ``HogwildController``, on any worker: the others' texts are appended to a worker's own when a
    turn is over. ``customized_result_fields["hogwild_turns"]`` also holds the number of inserted
    tokens (``exchanged_tokens``; None on a server, which does not tell).
    """

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation_with_hogwild_turns"

    _name = "hogwild_turns"

    turn_tokens: PositiveInt = setting(
        64, "Tokens that a worker writes before it reads the others."
    )
    max_turns: PositiveInt = setting(16, "Turns of each worker at most.")
    _: KW_ONLY
    step_end: str = setting("\n\n", "Text that ends a turn earlier.")

    def _join(self, task: GenerationTask, parts: Sequence[GenerationTask]) -> None:
        """Nothing to do: they do not attend to each other."""

    def _exchange(self, workers: Sequence[_Worker], writing: Sequence[_Worker]) -> None:
        for worker in writing:
            for other in workers:
                if other is not worker:
                    other.unread += f"\n{worker.name}: {worker.turns[-1].strip()}"

    def _turn_suffix(self, worker: _Worker, asks: bool) -> str:
        return f"{worker.unread}\n{worker.name}: {self.check if asks else ''}"

    def _count(self, details: dict[str, Any], parts: Sequence[GenerationTask]) -> None:
        """Add the tokens that were read from others, if the worker counts them."""
        details.setdefault("exchanged_tokens", 0)
        for part in parts:
            if part.fork_point is not None and details["exchanged_tokens"] is not None:
                inserted = part.inserted_tokens
                details["exchanged_tokens"] = (
                    None if inserted is None else details["exchanged_tokens"] + len(inserted)
                )


_REFUSED = (
    "n",
    "echo",
    "include_stop_str_in_output",
    "guided_decoding",
    "min_tokens",
    "thinking_budget",
    "thinking_soft",
    "thinking_end",
)
