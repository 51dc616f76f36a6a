"""SpecReason: a small model drafts the steps of a chain of thought, the base model judges them.

::

    small model   drafts a step, to the next blank line
    base model    reads it and scores it from 0 to 9, in one token behind a prefilled prompt
                  score >= threshold: the step is kept
                  score <  threshold: the base model writes the step instead

A step need not be what the base model would have written, only as good: unlike speculative decoding
of tokens, this changes the output. Behind the thought the base model writes the answer.

With ``pipelined`` the small model drafts the next step while the base model scores the last one::

    small model   | draft 1 | draft 2 | draft 3 | ...
    base model              | score 1 | score 2 | ...

A draft behind a step that is not kept is cancelled; the output is the same.

**Scores.** The paper asks the base model for a digit, which takes one that follows instructions.
``scorer="likelihood"`` is ours: the score is the base model's own probability of the step's tokens,
of the least probable one (``aggregation="min"``) or as a geometric mean (``"mean"``), from 0 to 1.
The step is put behind the base model's live sequence, which computes its tokens in one forward; if
the step is kept, they are computed already, and if not, the sequence is forked before them.

It stacks with speculative decoding of tokens in each engine. On an engine a rejected step is also
the first draft of the step that replaces it: where the base model writes the same, its tokens are
verified and not generated one by one.

Paper: Pan et al., "SpecReason: Fast and Accurate Inference-Time Compute via Speculative Reasoning",
2025. arXiv 2504.07891. The scale, the threshold of 7, steps that end at a blank line and the first
steps by the base model are the paper's; the text of the score prompt is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from forethought.errors import BudgetExceeded, ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import Controller, refuse_arguments, side_by_side
from forethought.scaffolding.parallel import AsCompleted, Process
from forethought.scaffolding.result import Delta, ScaffoldingOutput, Stage
from forethought.scaffolding.settings import (
    BOOL,
    NON_NEGATIVE_INT,
    OPTIONAL_TEXT,
    POSITIVE_INT,
    TEXT,
    validated,
)
from forethought.scaffolding.task import GenerationTask

SCORE_PROMPT = (
    "\n\nHow good is the last step, from 0 (wrong) to 9 (certainly right)? Only its facts and its "
    "logic count, not its style.\nScore: "
)
Scorer = Literal["prompt", "likelihood"]
Aggregation = Literal["min", "mean"]
_SCORER: TypeAdapter[Scorer] = TypeAdapter(Scorer)
_AGGREGATION: TypeAdapter[Aggregation] = TypeAdapter(Aggregation)
_THRESHOLDS: dict[Scorer, TypeAdapter[float | None]] = {
    "prompt": TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=10)] | None),
    "likelihood": TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=1)] | None),
}
_DEFAULT_THRESHOLDS: dict[Scorer, float] = {"prompt": 7, "likelihood": 0.1}


@dataclass
class _Chain:
    """The output of one task so far."""

    text: str = ""
    num_tokens: int = 0
    is_thinking: bool = True
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: list[float | None] = field(default_factory=list)
    """The score of each step; None: the base model wrote it without a judgement."""
    num_accepted: int = 0
    ahead: GenerationTask | None = None
    """The draft of the next step, if there is one already."""
    base: GenerationTask | None = None
    """Of the base model: its sequence ends where the chain does, if steps are scored on it."""
    written: list[GenerationTask] = field(default_factory=list)
    """Drafts and steps, in the order in which they were asked for."""


class SpecReasonController(Controller):
    """Steps of a small model, scored by the base model and kept or rewritten.

    The worker tags ``SMALL`` and ``BASE`` are those of the two models, which may have different
    tokenizers, so the prompt is text. ``customized_result_fields["specreason"]`` holds the
    ``scores`` of the steps in their order (None: the base model wrote it unasked), how many were
    ``accepted`` and ``rejected``, and whether the budget ended the output (``budget_ended``).

    Args:
        score_threshold: the least score of a step that is kept; 0 keeps all. None: 7 of 9, or a
            probability of 0.1.
        first_n_base_steps: steps at the beginning that the base model writes, as they plan the
            rest.
        step_tokens: length of a step at most.
        max_steps: after so many the base model writes the rest.
        step_end: text that ends a step.
        think_end: marker behind which the base model writes the answer; None: all is steps.
        score_prompt: text behind a step; the base model's next token is the score. What is no digit
            counts as 0.
        scorer: ``"prompt"``: the base model is asked for a score from 0 to 9; or ``"likelihood"``:
            its own probability of the step, on workers that hold its sequence (``EngineWorker``).
        aggregation: of the probabilities of a step's tokens: ``"min"`` or the geometric ``"mean"``.
        pipelined: draft the next step while one is scored; costs the tokens of drafts behind steps
            that are not kept.

    Raises:
        ParameterError: a setting of the wrong kind.
    """

    class WorkerTag(Enum):
        """The workers of the two models."""

        SMALL = "small_model"
        BASE = "base_model"

    def __init__(
        self,
        score_threshold: float | None = None,
        first_n_base_steps: int = 0,
        step_tokens: int = 512,
        max_steps: int = 256,
        *,
        step_end: str = "\n\n",
        think_end: str | None = "</think>",
        score_prompt: str = SCORE_PROMPT,
        scorer: Scorer = "prompt",
        aggregation: Aggregation = "min",
        pipelined: bool = False,
    ) -> None:
        super().__init__()
        self.scorer = validated("scorer", scorer, _SCORER)
        self.aggregation = validated("aggregation", aggregation, _AGGREGATION)
        threshold = validated("score_threshold", score_threshold, _THRESHOLDS[self.scorer])
        self.score_threshold = _DEFAULT_THRESHOLDS[self.scorer] if threshold is None else threshold
        self.first_n_base_steps = validated(
            "first_n_base_steps", first_n_base_steps, NON_NEGATIVE_INT
        )
        self.step_tokens = validated("step_tokens", step_tokens, POSITIVE_INT)
        self.max_steps = validated("max_steps", max_steps, POSITIVE_INT)
        self.step_end = validated("step_end", step_end, TEXT)
        self.think_end = validated("think_end", think_end, OPTIONAL_TEXT)
        self.score_prompt = validated("score_prompt", score_prompt, TEXT)
        self.pipelined = validated("pipelined", pipelined, BOOL)

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Solve the tasks concurrently.

        Raises:
            ParameterError: keyword arguments; there are none. Or a prompt of token ids, or fields
                that an output of several parts cannot honour.
            BudgetExceeded: the budget is spent before there is a step; else the output so far is
                returned.
        """
        refuse_arguments(self, kwargs)
        for task in tasks:
            sampling.refuse(task, _REFUSED, "specreason", "Leave it out")
            if task.input_str is None or task.skip_detokenizer:
                raise ParameterError(
                    "specreason works in text",
                    "the prompt is token ids, or no text is wanted; the two models need not have "
                    "the same tokens",
                    "Give the prompt as text (forethought generate: --raw, in the models' own "
                    "format), and do not skip the detokenizer",
                )
        yield from side_by_side(self, tasks, self._solve)

    def _solve(self, task: GenerationTask) -> Process:
        chain, ended = _Chain(), False
        try:
            while chain.finish_reason is None:
                in_steps = chain.is_thinking and len(chain.scores) < self.max_steps
                if in_steps:
                    part = yield from self._step(task, chain)
                else:
                    part = yield from self._written(task, chain, in_steps=False)
                text = self._add(task, chain, part, in_steps)
                if task.streaming_output_flag and text:
                    yield Delta(text, source="specreason")
        except BudgetExceeded:
            chain.text = chain.text or self._first_step(chain)
            if not chain.text:
                raise
            ended, chain.finish_reason = True, "length"
        task.result = ScaffoldingOutput(chain.text)
        task.finish_reason, task.stop_reason = chain.finish_reason, chain.stop_reason
        num_scored = sum(score is not None for score in chain.scores)
        task.customized_result_fields["specreason"] = {
            "scores": chain.scores,
            "accepted": chain.num_accepted,
            "rejected": num_scored - chain.num_accepted,
            "budget_ended": ended,
        }

    def _step(self, task: GenerationTask, chain: _Chain) -> Process:
        """The next step: the small model's if its score is high enough, else the base model's."""
        score: float | None = None
        draft: GenerationTask | None = None
        if len(chain.scores) >= self.first_n_base_steps:
            draft, chain.ahead = chain.ahead, None
            if draft is None:
                draft = self._part(task, chain, self.WorkerTag.SMALL)
                chain.written.append(draft)
                yield [draft]
            score, ahead = yield from self._score(task, chain, draft)
            is_kept = score >= self.score_threshold
            fields = {"step": len(chain.scores), "score": score, "accepted": is_kept}
            yield Stage("scored", fields=fields)
            if is_kept:
                chain.ahead = ahead
                chain.scores.append(score)
                chain.num_accepted += 1
                return draft
        prediction = None if draft is None else self._text_of(draft) or None
        step = yield from self._written(task, chain, prediction)
        chain.scores.append(score)
        return step

    def _written(
        self,
        task: GenerationTask,
        chain: _Chain,
        prediction: str | None = None,
        in_steps: bool = True,
    ) -> Process:
        """Have the base model write the next step, or the whole rest; returns the task."""
        part = self._part(task, chain, self.WorkerTag.BASE, in_steps)
        part.prediction = prediction
        if self.scorer == "likelihood":
            part.include_stop_str_in_output = True  # the sequence is to end where the step does
            if chain.base is not None:
                behind: GenerationTask = chain.base.fork()
                part.input_str, part.fork_point = behind.input_str, behind.fork_point
            chain.base = part
        chain.written.append(part)
        yield [part]
        return part

    def _first_step(self, chain: _Chain) -> str:
        """What there is of a first step that was not accepted: the last text written of it."""
        texts = [self._text_of(part) for part in chain.written if part.output_str]
        return texts[-1] if texts else ""

    def _score(self, task: GenerationTask, chain: _Chain, draft: GenerationTask) -> Process:
        """Have the base model score a step.

        Returns:
            The score, and the draft of the step behind it, if there is one.
        """
        if self.scorer == "likelihood" and not self._text_of(draft):
            return 0.0, None
        judged = yield from self._judgement(task, chain, draft)
        ahead = self._next_draft(task, chain, draft) if self.pipelined else None
        score: float | None = None
        with AsCompleted([judged] if ahead is None else [judged, ahead]) as running:
            while running and (score is None or score >= self.score_threshold):
                try:
                    done = yield running
                except BudgetExceeded:
                    if score is None:
                        raise
                    return score, None  # the step is kept; it was the last
                if done is judged:
                    score = self._score_of(judged)
        assert score is not None, "the judgement was among those that have ended"
        if self.scorer == "likelihood" and score >= self.score_threshold:
            chain.base = _without_output(judged)
        has_next = ahead is not None and ahead.finish_reason is not None and ahead.error is None
        return score, ahead if has_next else None

    def _judgement(self, task: GenerationTask, chain: _Chain, draft: GenerationTask) -> Process:
        """The base model's task whose result is the score of a draft."""
        text = self._text_of(draft)
        if self.scorer == "prompt":
            prompt = f"{task.input_str}{chain.text}{draft.output_str}{self.score_prompt}"
            judged = GenerationTask(input_str=prompt)
            sampling.choose(judged, {"max_tokens": 1, "temperature": 0.0})
        else:
            if chain.base is None:
                opened = GenerationTask(input_str=f"{task.input_str}{chain.text}")
                sampling.choose(opened, {"max_tokens": 1, "temperature": 0.0})
                opened.worker_tag, opened.priority = self.WorkerTag.BASE, task.priority
                yield [opened]
                chain.base = _without_output(opened)
            judged = chain.base.fork(
                text, inherit=False, max_tokens=1, temperature=0.0, score_suffix=True
            )
        judged.worker_tag, judged.priority = self.WorkerTag.BASE, task.priority
        return judged

    def _score_of(self, judged: GenerationTask) -> float:
        if self.scorer == "prompt":
            digit = (judged.output_str or "").strip()
            return int(digit) if digit in _DIGITS else 0
        found = judged.suffix_logprobs
        if found is None:
            raise ParameterError(
                "the base model's worker cannot score by likelihood",
                "it does not hold the sequence, and has no log-probabilities of a prompt",
                "Use an EngineWorker for the base model, or scorer='prompt'",
            )
        if not found:
            return 0.0
        return math.exp(min(found) if self.aggregation == "min" else sum(found) / len(found))

    def _next_draft(
        self, task: GenerationTask, chain: _Chain, draft: GenerationTask
    ) -> GenerationTask | None:
        """The task of the draft behind another one; None if no step comes behind it."""
        later = replace(chain, scores=[*chain.scores, None])
        self._add(task, later, draft)
        goes_on = later.finish_reason is None and later.is_thinking
        if not goes_on or len(later.scores) >= self.max_steps:
            return None
        ahead = self._part(task, later, self.WorkerTag.SMALL)
        ahead.on_failure = "drop"  # it is drafted again, if the step before it is kept
        return ahead

    def _part(
        self, task: GenerationTask, chain: _Chain, tag: WorkerTag, in_steps: bool = True
    ) -> GenerationTask:
        """The task that generates what comes next: a step, or the whole rest."""
        part = task.copy()
        part.worker_tag, part.streaming_output_flag = tag, False
        part.input_str = f"{task.input_str}{chain.text}"
        left = None if task.max_tokens is None else task.max_tokens - chain.num_tokens
        part.max_tokens = left
        if in_steps:
            part.stop = [*self._ends(), *sampling.stop_strings(task)]
            part.max_tokens = min(self.step_tokens, self.step_tokens if left is None else left)
        return part

    def _ends(self) -> list[str]:
        return [self.step_end] if self.think_end is None else [self.step_end, self.think_end]

    def _text_of(self, part: GenerationTask, in_steps: bool = True) -> str:
        """What a part has written, with the text that ended its step."""
        text, stop = part.output_str or "", part.stop_reason
        at_end = in_steps and stop in self._ends()
        if not isinstance(stop, str) or at_end == part.include_stop_str_in_output:
            return text
        return text + stop if at_end else text.removesuffix(stop)

    def _add(
        self, task: GenerationTask, chain: _Chain, part: GenerationTask, in_steps: bool = True
    ) -> str:
        """Put a part behind the chain; returns its text."""
        at_end = in_steps and part.stop_reason in self._ends()
        text = self._text_of(part, in_steps)
        chain.text += text
        chain.num_tokens += part.num_generated
        if at_end:
            chain.is_thinking = part.stop_reason != self.think_end
        is_full = task.max_tokens is not None and chain.num_tokens >= task.max_tokens
        is_cut = part.finish_reason == "length" and chain.is_thinking and not is_full
        if is_full:
            chain.finish_reason = "length"
        elif not at_end and not (is_cut and part.max_tokens == self.step_tokens):
            chain.finish_reason, chain.stop_reason = part.finish_reason, part.stop_reason
        return text


def _without_output(task: GenerationTask) -> GenerationTask:
    """The task, such that its forks go on behind its prompt."""
    task.output_str, task.output_tokens = "", []
    return task


_DIGITS = frozenset("0123456789")
_REFUSED = (*sampling.OF_ONE_PART, "num_logprobs", "confidence")
