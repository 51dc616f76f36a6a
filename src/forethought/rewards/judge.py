"""Rewards by a judge: a chat model that scores answers, or compares them.

``JudgeRewardController`` scores each answer alone (pointwise). ``CompareRewardController`` compares
groups of answers, and the best of each group again, until one is left (groupwise)::

    group_size 2      0  1   2  3   4        five answers
                       1      3     4        2 judgements; one that is alone passes
                           3        4        1 judgement
                               3             1 judgement: sample 3 has won all three rounds

Both are reward controllers: ``BestOfNController(generation, JudgeRewardController())``. Their tasks
are chats, for the worker of the tag ``"reward"``; they cost tokens of the same budget. A judge is
shown the text after an answer's thought (``</think>`` or another marker), and all of an answer
that was cut before its thought was closed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from forethought.answers.answer_extraction import without_thought
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import RewardTask
from forethought.scaffolding.controller import refuse_arguments
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.reward_controller import NativeRewardController, has_failed
from forethought.scaffolding.settings import TEXT, Text, setting, validated, with_settings
from forethought.scaffolding.task import ChatTask, GenerationTask

SCORE_PROMPT = """\
Grade the answer to the question. Check each of its steps, then its result.

Question:
{question}

Answer:
{answer}

End with one line of the form "Score: N", where N goes from 0 (wrong) to {highest} (right)."""

COMPARE_PROMPT = """\
Here are {count} answers to a question. Check each of them, then say which one is the best.

Question:
{question}

{answers}

End with one line of the form "Best: N", where N is the number of that answer."""

JUDGE_PARAMS: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 1024}
_SCORE = re.compile(r"score\W*?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_BEST = re.compile(r"best\W*?(\d+)", re.IGNORECASE)


@with_settings
class JudgeRewardController(NativeRewardController):
    """Has a chat model score each answer alone.

    ``scores`` holds one per task, from 0 to 1; 0 where the judge names no score within its range,
    and None for one that failed.

    Raises:
        ParameterError: a setting of the wrong kind, or a prompt without ``{answer}``.
    """

    prompt: Text = setting(
        SCORE_PROMPT,
        "What the judge is asked; `{question}`, `{answer}` and `{highest}` are replaced. The "
        'last "Score: N" of what it says counts.',
    )
    highest: Annotated[float, Field(gt=0)] = setting(
        10.0, "The best score that the judge may give; 10 by default, from 0 on."
    )
    sampling_params: Mapping[str, Any] | SamplingParams | None = setting(
        None, "Of the judge; by default greedy, with at most 1024 tokens."
    )

    def __post_init__(self) -> None:
        checked_prompt(self.prompt, "{answer}")
        self.sampling_params = _judge_params(self)

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Score all tasks at once; the questions have to be text."""
        refuse_arguments(self, kwargs)
        chats = [None if has_failed(task) else self._chat(task) for task in tasks]
        yield [chat for chat in chats if chat is not None]
        self.scores = [None if chat is None else self._score_in(chat.output_str) for chat in chats]

    def _chat(self, task: GenerationTask | RewardTask) -> ChatTask:
        values = {"{question}": question_of(task), "{answer}": without_thought(task.output_str)}
        values["{highest}"] = f"{self.highest:g}"
        return judging(self, task, filled(self.prompt, values))

    def _score_in(self, reply: str | None) -> float:
        scores = _SCORE.findall(reply or "")
        score = float(scores[-1]) if scores else math.nan
        return score / self.highest if 0 <= score <= self.highest else 0.0


@with_settings
class CompareRewardController(NativeRewardController):
    """Has a chat model compare answers in groups, and the winners again, until one is left.

    ``scores`` holds the number of rounds that each has come through, one per task; None for one
    that failed. Equal answers are compared once. Where the judge names none of a group, its first
    goes on.

    Raises:
        ParameterError: a setting of the wrong kind, or a prompt without ``{answers}``.
    """

    group_size: Annotated[int, Field(ge=2)] = setting(
        4, "Answers that are compared at once; 2 compares pairs."
    )
    prompt: Text = setting(
        COMPARE_PROMPT,
        "What the judge is asked; `{question}`, `{count}` and `{answers}` are replaced. The "
        'last "Best: N" of what it says counts.',
    )
    sampling_params: Mapping[str, Any] | SamplingParams | None = setting(
        None, "Of the judge; by default greedy, with at most 1024 tokens."
    )

    def __post_init__(self) -> None:
        checked_prompt(self.prompt, "{answers}")
        self.sampling_params = _judge_params(self)

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Compare all tasks, which answer the same question, which has to be text."""
        refuse_arguments(self, kwargs)
        alive = {n: task for n, task in enumerate(tasks) if not has_failed(task)}
        texts = {n: without_thought(task.output_str) for n, task in alive.items()}
        rounds = dict.fromkeys(texts.values(), 0)
        first = {text: number for number, text in reversed(texts.items())}
        finalists = sorted(first.values())  # equal answers as one
        while len(finalists) > 1:
            size = self.group_size
            groups = [finalists[begin : begin + size] for begin in range(0, len(finalists), size)]
            finalists = yield from self._winners(alive, groups)
            for number in finalists:
                rounds[texts[number]] += 1
        self.scores = [
            float(rounds[texts[number]]) if number in alive else None
            for number in range(len(tasks))
        ]

    def _winners(
        self, tasks: Mapping[int, GenerationTask | RewardTask], groups: Sequence[Sequence[int]]
    ) -> Process:
        """The best of each group; a group of one is not judged."""
        chats = [self._chat([tasks[n] for n in g]) if len(g) > 1 else None for g in groups]
        yield [chat for chat in chats if chat is not None]
        winners = [
            group[0] if chat is None else group[_best(chat.output_str, len(group))]
            for chat, group in zip(chats, groups, strict=True)
        ]
        for winner, group in zip(winners, groups, strict=True):
            for number in group:
                if number != winner:
                    fields = {"answer": number, "winner": winner}
                    yield Stage("pruned", "the judge prefers another", fields=fields)
        return winners

    def _chat(self, group: Sequence[GenerationTask | RewardTask]) -> ChatTask:
        values = {"{question}": question_of(group[0]), "{count}": str(len(group))}
        texts = numbered_answers(group)
        return judging(self, group[0], filled(self.prompt, {**values, "{answers}": texts}))


def _best(reply: str | None, count: int) -> int:
    """The index of the answer that the judge names; 0 if it names none."""
    numbers = _BEST.findall(reply or "")
    number = int(numbers[-1]) if numbers else 1
    return number - 1 if 1 <= number <= count else 0


def numbered_answers(tasks: Sequence[GenerationTask | RewardTask]) -> str:
    """The answers, numbered from 1."""
    answers = [
        f"Answer {n}:\n{without_thought(task.output_str)}" for n, task in enumerate(tasks, start=1)
    ]
    return "\n\n".join(answers)


def filled(prompt: str, values: Mapping[str, str]) -> str:
    """The prompt with its fields replaced, in one pass: braces in an answer are text."""
    pattern = "|".join(map(re.escape, values))
    return re.sub(pattern, lambda field: values[field[0]], prompt)


def judging(controller: Any, judged: GenerationTask | RewardTask, prompt: str) -> ChatTask:
    """A chat of a reward controller with its ``sampling_params``, for its worker.

    Its seed is that of the judged task, unless ``sampling_params`` have one, so a request with a
    seed is judged alike each time.

    Args:
        controller: that judges.
        judged: the judged task; the prompt replaces its question, in its conversation.
        prompt: of the judge.
    """
    if isinstance(judged, GenerationTask):
        chat = judged.asking(prompt)
    else:
        chat = ChatTask.create_from_prompt(prompt)
    chat.worker_tag, chat.is_aside = controller.WorkerTag.REWARD, True
    sampling.fill(chat, controller.sampling_params)
    sampling.fill(chat, {"seed": getattr(judged, "seed", None)})
    return chat


def _judge_params(judge: JudgeRewardController | CompareRewardController) -> dict[str, Any]:
    return {**JUDGE_PARAMS, **sampling.checked(type(judge).__name__, judge.sampling_params)}


def question_of(task: GenerationTask | RewardTask) -> str:
    """The question that a task answers; ``ParameterError`` if it is not text."""
    text = task.question_text if isinstance(task, GenerationTask) else task.input_str
    if text is None:
        raise ParameterError(
            "a judge needs the question as text",
            "the prompt is token ids",
            "Give the text as well: generate(prompt, question=...)",
        )
    return text


def checked_prompt(prompt: str, field: str) -> str:
    """A judge's prompt; ``ParameterError`` if it has no such field."""
    if field not in validated("prompt", prompt, TEXT):
        raise ParameterError("invalid prompt of a judge", f"it has no {field}", f"Put {field} in")
    return prompt
