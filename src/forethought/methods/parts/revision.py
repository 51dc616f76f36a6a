"""The base of methods that improve an answer step by step.

The first answer is that of any controller. Every further text, such as feedback or a better answer,
continues the sequence before it after an instruction, so nothing is prefilled twice::

    question | answer 0 | instruction | feedback | instruction | answer 1 | ...

An instruction is plain text. For a chat model it holds the markers of its turns, such as
``"<|im_end|>\\n<|im_start|>user\\nTry again.<|im_end|>\\n<|im_start|>assistant\\n"``. In a chat
(``ChatTask``) answers and instructions are messages of the assistant and the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from forethought.errors import BudgetExceeded
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    expect_text,
    side_by_side,
)
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Delta, Stage
from forethought.scaffolding.settings import required, with_settings
from forethought.scaffolding.task import ChatTask, GenerationTask


class RevisionEnd(StrEnum):
    """Why no further answer was generated."""

    ACCEPTED = "accepted"
    """The method's stop criterion holds."""
    LIMIT = "limit"
    """There are as many answers as the method allows."""
    LENGTH = "length"
    """The next answer was cut at ``max_tokens``; it is left out."""
    BUDGET = "budget"
    """The budget of the request was spent; an answer that it cut is left out."""
    TOOL_CALLS = "tool_calls"
    """The answer calls tools; it is revised once their results are there."""
    FAILED = "failed"
    """The next answer failed, and its failure was only noted."""


@with_settings
class RevisingController(Controller):
    """Base of methods that revise an answer. Override ``_revise``, and perhaps ``_choose``."""

    name = ""
    """Of the method, under which ``customized_result_fields`` has what it did."""

    generation_controller: Controller = required("Cloned for each answer.")

    def process(
        self,
        tasks: Sequence[GenerationTask],
        generation_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Process:
        """Answer and revise, the tasks concurrently, and leave the chosen answer on each.

        ``generation_kwargs`` or ``kwargs`` are keyword arguments of each answer's ``process``.
        """
        options = {**kwargs, **(generation_kwargs or {})}
        for task in tasks:
            self._check(task)
        yield from side_by_side(self, tasks, lambda task: self._solve(task, options), options)

    def _check(self, task: GenerationTask) -> None:
        sampling.refuse(task, ["n"], self.name, "Put the method into one that samples")
        expect_text(self.name, task, "it reads the texts of the answers")

    def _solve(self, task: GenerationTask, options: Mapping[str, Any]) -> Process:
        first = task.copy()
        first.streaming_output_flag = False
        yield from self.generation_controller.clone().process([first], **options)
        if first.error is not None:
            task.status, task.error = first.status, first.error
            return
        answers, info = [first], dict[str, Any]()
        try:
            info["end"] = RevisionEnd.TOOL_CALLS
            if not _calls_tools(first):
                info["end"] = yield from self._revise(answers, info, options)
        except BudgetExceeded:
            info["end"] = RevisionEnd.BUDGET
        index = len(answers) - 1
        try:
            index = yield from self._choose(answers, info)
        except BudgetExceeded:
            info["end"] = RevisionEnd.BUDGET
        yield from self._finish(task, answers, index, info)

    def _revise(
        self, answers: list[GenerationTask], info: dict[str, Any], options: Mapping[str, Any]
    ) -> Process:
        """Append better answers, and return the ``RevisionEnd``.

        Args:
            answers: the first one.
            info: details for ``customized_result_fields``.
            options: keyword arguments of each answer's ``process``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override _revise")

    def _choose(self, answers: Sequence[GenerationTask], info: dict[str, Any]) -> Process:
        """The index of the answer that is returned: here the last."""
        yield from ()
        return len(answers) - 1

    def _answer_again(
        self,
        answers: list[GenerationTask],
        source: GenerationTask,
        instruction: str,
        options: Mapping[str, Any],
    ) -> Process:
        """Append an answer that continues ``source`` after ``instruction``; or return why none
        follows.
        """
        first, fields = answers[0], dict[str, Any]()
        if isinstance(first, ChatTask):
            fields["tool_choice"] = first.tool_choice  # what it continues may be an aside
        answer = source.follow_up(
            instruction,
            max_tokens=first.max_tokens,
            guided_decoding=first.guided_decoding,
            **fields,
        )
        yield from self.generation_controller.clone().process([answer], **options)
        if answer.error is not None:
            return RevisionEnd.FAILED
        if answer.finish_reason == "length":
            scope = current_scope()
            spent = scope is not None and scope.account.tokens_left == 0
            return RevisionEnd.BUDGET if spent else RevisionEnd.LENGTH
        answers.append(answer)
        return RevisionEnd.TOOL_CALLS if _calls_tools(answer) else None

    def _finish(
        self, task: GenerationTask, answers: list[GenerationTask], index: int, info: dict[str, Any]
    ) -> Process:
        task.take_answer(answers[index])
        task.keep_candidates(answers)
        task.customized_result_fields[self.name] = {
            **info,
            "answers": len(answers),
            "index": index,
        }
        yield Stage("selected", fields={"answer": index, "end": str(info["end"])})
        if task.streaming_output_flag and task.output_str:
            yield Delta(task.output_str, tuple(task.output_tokens or ()), self.name)


def answers_alone(answers: Sequence[GenerationTask]) -> list[GenerationTask]:
    """The answers as tasks of the question alone, for a reward controller."""
    alone = [answers[0].unanswered() for _ in answers]
    for task, answer in zip(alone, answers, strict=True):
        task.take_answer(answer)
    return alone


def _calls_tools(answer: GenerationTask) -> bool:
    return bool(answer.customized_result_fields.get("tool_calls"))
