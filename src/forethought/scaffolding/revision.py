"""Methods that improve an answer step by step: what they share.

The first answer is that of any controller. Every further text, such as feedback or a better answer,
continues the sequence before it behind an instruction, so nothing is prefilled twice::

    question | answer 0 | instruction | feedback | instruction | answer 1 | ...

An instruction is plain text. For a chat model it holds the markers of its turns, such as
``"<|im_end|>\\n<|im_start|>user\\nTry again.<|im_end|>\\n<|im_start|>assistant\\n"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from forethought.errors import BudgetExceeded
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    expect_generation,
    expect_text,
    side_by_side,
)
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Delta, Stage
from forethought.scaffolding.task import GenerationTask


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
    FAILED = "failed"
    """The next answer failed, and its failure was only noted."""


class RevisingController(Controller):
    """Base of methods that revise an answer. Override ``_revise``, and perhaps ``_choose``.

    Args:
        name: of the method, under which ``customized_result_fields`` has what it did.
        generation_controller: cloned for each answer.

    Raises:
        ParameterError: ``generation_controller`` is no controller.
    """

    def __init__(self, name: str, generation_controller: Controller) -> None:
        super().__init__()
        self._name = name
        self.generation_controller = expect_generation(generation_controller)

    def process(
        self,
        tasks: Sequence[GenerationTask],
        generation_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Process:
        """Answer and revise, the tasks concurrently, and leave the chosen answer on each.

        Args:
            tasks: the questions.
            generation_kwargs: keyword arguments of each answer's ``process``.
            **kwargs: as ``generation_kwargs``.

        Raises:
            ParameterError: a task with ``n`` samples, or without text.
            BudgetExceeded: the budget is spent before there is an answer; else the best one so far
                is returned.
        """
        options = {**kwargs, **(generation_kwargs or {})}
        for task in tasks:
            self._check(task)
        yield from side_by_side(self, tasks, lambda task: self._solve(task, options), options)

    def _check(self, task: GenerationTask) -> None:
        sampling.refuse(task, ["n"], self._name, "Put the method into one that samples")
        expect_text(self._name, task, "it reads the texts of the answers")

    def _solve(self, task: GenerationTask, options: Mapping[str, Any]) -> Process:
        first = task.copy()
        first.streaming_output_flag = False
        yield from self.generation_controller.clone().process([first], **options)
        if first.error is not None:
            task.status, task.error = first.status, first.error
            return
        answers, info = [first], dict[str, Any]()
        try:
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
        """Append better answers.

        Args:
            answers: the first one.
            info: what the method did, for ``customized_result_fields``.
            options: keyword arguments of each answer's ``process``.

        Returns:
            The ``RevisionEnd``.
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
        """Append an answer that continues ``source`` behind ``instruction``.

        Returns:
            None; or why it is left out.
        """
        answer: GenerationTask = source.fork(instruction, max_tokens=answers[0].max_tokens)
        yield from self.generation_controller.clone().process([answer], **options)
        if answer.error is not None:
            return RevisionEnd.FAILED
        if answer.finish_reason == "length":
            scope = current_scope()
            spent = scope is not None and scope.account.tokens_left == 0
            return RevisionEnd.BUDGET if spent else RevisionEnd.LENGTH
        answers.append(answer)
        return None

    def _finish(
        self, task: GenerationTask, answers: list[GenerationTask], index: int, info: dict[str, Any]
    ) -> Process:
        """Leave the chosen answer on the task."""
        _store(task, answers[index])
        task.candidates = [answer.output_str for answer in answers]
        task.customized_result_fields[self._name] = {
            **info,
            "answers": len(answers),
            "index": index,
        }
        yield Stage("selected", fields={"answer": index, "end": str(info["end"])})
        if task.streaming_output_flag and task.output_str:
            yield Delta(task.output_str, tuple(task.output_tokens or ()), self._name)


def answers_alone(answers: Sequence[GenerationTask]) -> list[GenerationTask]:
    """The answers as tasks of the question alone, for a reward controller."""
    alone = [answers[0].copy() for _ in answers]
    for task, answer in zip(alone, answers, strict=True):
        _store(task, answer)
    return alone


def _store(task: GenerationTask, answer: GenerationTask) -> None:
    """Leave the results of an answer on a task that has the question alone as its prompt."""
    task.result = answer.result
    # A fork of it continues question and answer; only ids alone have to go on behind the chain.
    by_handle = task.input_str is None or answer.input_str == task.input_str
    task.request_handle = answer.request_handle if by_handle else None
