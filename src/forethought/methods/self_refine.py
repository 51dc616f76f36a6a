"""Self-refine: the model criticises its own answer and writes a better one, until it is content.

::

    y0 = model(x)
    for t = 0, 1, ...:
        fb = model(x, y0, fb0, ..., yt, feedback prompt)
        stop if fb says that the answer is correct
        y(t+1) = model(x, y0, fb0, ..., yt, fb, refine prompt)

These are the steps of the paper's algorithm. Its refinement reads all earlier answers and
feedback, as here; its feedback reads the question and the last answer alone. Here it reads what the
refinement reads, so that the sequence only grows and nothing is prefilled twice.

At most four rounds are the paper's; the texts, which the paper writes with examples for each kind
of question, are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any

from forethought.methods.parts.revision import RevisingController, RevisionEnd
from forethought.scaffolding.controller import NativeGenerationController
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    NonNegativeInt,
    PositiveInt,
    Text,
    setting,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask

FEEDBACK_PROMPT = (
    "\n\nCheck this answer step by step. Say what is wrong with it and how to improve it. "
    'If nothing is wrong, write "It is correct."\n\nFeedback: '
)
REFINE_PROMPT = "\n\nWrite a better answer that follows the feedback.\n\nAnswer: "


@with_settings
class SelfRefineController(RevisingController):
    """Feedback on the answer and a better answer in turn, until the model accepts it.

    ``customized_result_fields["self_refine"]`` holds the number of ``answers``, the ``index`` of
    the one that is returned (the last), the texts of the ``feedback``, and why it ended (``end``, a
    ``RevisionEnd``).
    """

    paper = (
        'Madaan et al., "Self-Refine: Iterative Refinement with Self-Feedback", 2023. arXiv '
        "2303.17651"
    )

    name = "self_refine"

    num_refinements: NonNegativeInt = setting(4, "Further answers at most.")
    _: KW_ONLY
    feedback_prompt: Text = setting(
        FEEDBACK_PROMPT, "Text after an answer, which asks for feedback."
    )
    refine_prompt: Text = setting(
        REFINE_PROMPT, "Text after feedback, which asks for a better answer."
    )
    stop_phrase: Text = setting(
        "It is correct",
        "Feedback that has this phrase, in upper or lower case, accepts the answer.",
    )
    feedback_tokens: PositiveInt | None = setting(
        None, "Length of the feedback at most; None: as of an answer."
    )

    def __post_init__(self) -> None:
        self._critic = NativeGenerationController()

    def fan_out(self) -> int:
        """The answers; each but the last is criticised."""
        return 1 + self.num_refinements

    def _revise(
        self, answers: list[GenerationTask], info: dict[str, Any], options: Mapping[str, Any]
    ) -> Process:
        info["feedback"] = []
        for _ in range(self.num_refinements):
            limit = self.feedback_tokens or answers[0].max_tokens
            aside: dict[str, Any] = {
                "guided_decoding": None,
                "is_aside": True,
            }  # of no shape of the answer
            feedback = answers[-1].follow_up(self.feedback_prompt, max_tokens=limit, **aside)
            yield from self._critic.process([feedback])
            text: str = feedback.output_str or ""
            info["feedback"].append(text)
            accepted = self.stop_phrase.lower() in text.lower()
            yield Stage("scored", fields={"answer": len(answers) - 1, "accepted": accepted})
            if accepted:
                return RevisionEnd.ACCEPTED
            end = yield from self._answer_again(answers, feedback, self.refine_prompt, options)
            if end is not None:
                return end
        return RevisionEnd.LIMIT
