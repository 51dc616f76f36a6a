"""SpecReason: a small model drafts the steps of a chain of thought, the base model judges them.

::

    small model   drafts a step, to the next blank line
    base model    reads it and scores it from 0 to 9, in one token after a prefilled prompt
                  score >= threshold: the step is kept
                  score <  threshold: the base model writes the step instead

A step need not be what the base model would have written, only as good: unlike speculative decoding
of tokens, this changes the output. Behind the thought the base model writes the answer.

With ``pipelined`` the small model drafts the next step while the base model scores the last one::

    small model   | draft 1 | draft 2 | draft 3 | ...
    base model              | score 1 | score 2 | ...

A draft after a step that is not kept is cancelled; the output is the same.

**Scores.** The paper asks the base model for a digit, which takes one that follows instructions.
``scorer="likelihood"`` is ours: the score is the base model's own probability of the step's tokens,
of the least probable one (``aggregation="min"``) or as a geometric mean (``"mean"``), from 0 to 1.
The step is appended to the base model's live sequence, which computes its tokens in one forward; if
the step is kept, they are computed already, and if not, the sequence is forked before them.

It stacks with speculative decoding of tokens in each engine. On an engine a rejected step is also
the first draft of the step that replaces it: where the base model writes the same, its tokens are
verified and not generated one by one.

The scale, the threshold of 7, steps that end at a blank line and the first steps by the base model
are the paper's; the text of the score prompt is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from forethought.errors import BudgetExceeded, ParameterError
from forethought.methods.parts.steps import (
    SCORE_PROMPT,
    Aggregation,
    LikelihoodScorer,
    PromptScorer,
    StepChain,
    StepScorer,
)
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    refuse_arguments,
    side_by_side,
)
from forethought.scaffolding.parallel import AsCompleted, Process
from forethought.scaffolding.result import Delta, ScaffoldingOutput, Stage
from forethought.scaffolding.settings import (
    NonNegativeInt,
    PositiveInt,
    Text,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask
from forethought.scaffolding.thinking import thinking_of

Scorer = Literal["prompt", "likelihood"]
_THRESHOLDS: dict[Scorer, TypeAdapter[float | None]] = {
    "prompt": TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=10)] | None),
    "likelihood": TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=1)] | None),
}
_DEFAULT_THRESHOLDS: dict[Scorer, float] = {"prompt": 7, "likelihood": 0.1}


_REFUSED = (*sampling.OF_ONE_PART, "num_logprobs", "confidence")


@dataclass
class _Chain(StepChain):
    """The output of one task so far, and how its steps were scored."""

    scorer: StepScorer = field(kw_only=True)
    scores: list[float | None] = field(default_factory=list)
    """The score of each step; None: the base model wrote it without a judgement."""
    ahead: GenerationTask | None = None
    """The draft of the next step, if there is one already."""
    written: list[GenerationTask] = field(default_factory=list)
    """Drafts and steps, in the order in which they were asked for."""


@with_settings
class SpecReasonController(Controller):
    """Steps of a small model, scored by the base model and kept or rewritten.

    The worker tags ``SMALL`` and ``BASE`` are those of the two models, which may have different
    tokenizers, so the prompt is text. ``customized_result_fields["specreason"]`` holds the
    ``scores`` of the steps in their order (None: the base model wrote it unasked), how many were
    ``accepted`` and ``rejected``, and whether the budget ended the output (``budget_ended``).
    """

    paper = (
        'Pan et al., "SpecReason: Fast and Accurate Inference-Time Compute via Speculative '
        'Reasoning", 2025. arXiv 2504.07891'
    )

    conversation = ConversationForm.NONE
    joins_texts = True
    uses_thinking = "adapts"

    class WorkerTag(Enum):
        """The workers of the two models."""

        SMALL = "small_model"
        BASE = "base_model"

    score_threshold: float | None = setting(
        None,
        "The least score of a step that is kept; 0 keeps all. None: 7 of 9, or a probability of "
        "0.1.",
    )
    first_n_base_steps: NonNegativeInt = setting(
        0, "Steps at the beginning that the base model writes, as they plan the rest."
    )
    step_tokens: PositiveInt = setting(512, "Length of a step at most.")
    max_steps: PositiveInt = setting(256, "After this many the base model writes the rest.")
    _: KW_ONLY
    step_end: Text = setting("\n\n", "Text that ends a step.")
    think_end: Text | None = setting(
        "auto",
        'Marker after which the base model writes the answer; None: all is steps. `"auto"`: '
        "the base model's, `</think>` where it is not known, and None where the base model does "
        "not think.",
    )
    score_prompt: Text = setting(
        SCORE_PROMPT,
        "Text after a step; the base model's next token is the score. What is no digit counts "
        "as 0.",
    )
    scorer: Scorer = setting(
        "prompt",
        '`"prompt"`: the base model is asked for a score from 0 to 9; or `"likelihood"`: its '
        "own probability of the step, on workers that hold its sequence (`EngineWorker`).",
    )
    aggregation: Aggregation = setting(
        "min", 'Of the probabilities of a step\'s tokens: `"min"` or the geometric `"mean"`.'
    )
    pipelined: bool = setting(
        False,
        "Draft the next step while one is scored; costs the tokens of drafts after steps that "
        "are not kept.",
    )

    def __post_init__(self) -> None:
        kind = _THRESHOLDS[self.scorer]
        threshold = validated("score_threshold", self.score_threshold, kind)
        self.threshold = _DEFAULT_THRESHOLDS[self.scorer] if threshold is None else threshold

    def fan_out(self) -> int:
        """The steps, each drafted, scored and perhaps written again."""
        return 3 * self.max_steps

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Solve the tasks concurrently."""
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
        chain, ended = self._chain(task), False
        try:
            while chain.finish_reason is None:
                in_steps = chain.is_thinking and len(chain.scores) < self.max_steps
                next_part = self._step(chain) if in_steps else self._written(chain, in_steps=False)
                part = yield from next_part
                text = chain.add(part, in_steps)
                if task.streaming_output_flag and text:
                    yield Delta(text, source="specreason")
        except BudgetExceeded:
            written = [chain.text_of(part) for part in chain.written if part.output_str]
            chain.text = chain.text or "".join(written[-1:])  # a first step, not accepted yet
            if not chain.text:
                raise
            ended, chain.finish_reason = True, "length"
        task.result = ScaffoldingOutput(chain.text)
        task.finish_reason, task.stop_reason = chain.finish_reason, chain.stop_reason
        scored = [score for score in chain.scores if score is not None]
        num_accepted = sum(score >= self.threshold for score in scored)
        task.customized_result_fields["specreason"] = {
            "scores": chain.scores,
            "accepted": num_accepted,
            "rejected": len(scored) - num_accepted,
            "budget_ended": ended,
        }

    def _chain(self, task: GenerationTask) -> _Chain:
        scorer: StepScorer = PromptScorer(self.WorkerTag.BASE, self.score_prompt)
        if self.scorer == "likelihood":
            scorer = LikelihoodScorer(self.WorkerTag.BASE, self.aggregation)
        think_end = self.think_end
        if think_end == "auto":
            profile = thinking_of(task, self.WorkerTag.BASE)
            think_end = None if profile.has_no_thoughts else profile.think_end
        return _Chain(task, self.step_end, think_end, self.step_tokens, scorer=scorer)

    def _step(self, chain: _Chain) -> Process:
        """The next step: the small model's if its score is high enough, else the base model's."""
        if len(chain.scores) < self.first_n_base_steps:
            step = yield from self._written(chain)
            chain.scores.append(None)
            return step
        draft, chain.ahead = chain.ahead, None
        if draft is None:
            draft = chain.part(self.WorkerTag.SMALL)
            chain.written.append(draft)
            yield [draft]
        score, ahead = yield from self._score(chain, draft)
        is_kept = score >= self.threshold
        fields = {"step": len(chain.scores), "score": score, "accepted": is_kept}
        yield Stage("scored", fields=fields)
        if is_kept:
            chain.ahead = ahead
            step = draft
        else:
            step = yield from self._written(chain, chain.text_of(draft))
        chain.scores.append(score)
        return step

    def _written(self, chain: _Chain, prediction: str = "", in_steps: bool = True) -> Process:
        """Have the base model write the next step, or the whole rest; returns the task."""
        part = chain.part(self.WorkerTag.BASE, in_steps)
        part.prediction = prediction or None
        chain.scorer.follow(part)
        chain.written.append(part)
        yield [part]
        return part

    def _score(self, chain: _Chain, draft: GenerationTask) -> Process:
        """Have the base model score a step; returns the score, and the draft of the next step or
        None.
        """
        judged = yield from chain.scorer.judgement(chain, draft)
        if judged is None:
            return 0.0, None
        ahead = self._next_draft(chain, draft) if self.pipelined else None
        score: float | None = None
        with AsCompleted([judged] if ahead is None else [judged, ahead]) as running:
            while running and (score is None or score >= self.threshold):
                try:
                    done = yield running
                except BudgetExceeded:
                    if score is None:
                        raise
                    return score, None  # the step is kept; it was the last
                if done is judged:
                    score = chain.scorer.score(judged)
        assert score is not None, "the judgement was among those that have ended"
        if score >= self.threshold:
            chain.scorer.keep(judged)
        has_next = ahead is not None and ahead.finish_reason is not None and ahead.error is None
        return score, ahead if has_next else None

    def _next_draft(self, chain: _Chain, draft: GenerationTask) -> GenerationTask | None:
        """The task that drafts the step after ``draft``; None if it is the last one."""
        later = copy.copy(chain)
        later.add(draft)
        goes_on = later.finish_reason is None and later.is_thinking
        if not goes_on or len(chain.scores) + 1 >= self.max_steps:
            return None
        ahead = later.part(self.WorkerTag.SMALL)
        ahead.on_failure = "drop"  # it is drafted again, if the step before it is kept
        return ahead
