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

Paper: Madaan et al., "Self-Refine: Iterative Refinement with Self-Feedback", 2023. arXiv
2303.17651. At most four rounds are the paper's; the texts, which the paper writes with examples for
each kind of question, are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forethought.methods.parts.revision import RevisingController, RevisionEnd
from forethought.scaffolding.controller import Controller, NativeGenerationController
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    NON_NEGATIVE_INT,
    OPTIONAL_POSITIVE_INT,
    TEXT,
    validated,
)
from forethought.scaffolding.task import GenerationTask

FEEDBACK_PROMPT = (
    "\n\nCheck this answer step by step. Say what is wrong with it and how to improve it. "
    'If nothing is wrong, write "It is correct."\n\nFeedback: '
)
REFINE_PROMPT = "\n\nWrite a better answer that follows the feedback.\n\nAnswer: "


class SelfRefineController(RevisingController):
    """Feedback on the answer and a better answer in turn, until the model accepts it.

    ``customized_result_fields["self_refine"]`` holds the number of ``answers``, the ``index`` of
    the one that is returned (the last), the texts of the ``feedback``, and why it ended (``end``, a
    ``RevisionEnd``).

    Args:
        generation_controller: cloned for each answer.
        num_refinements: further answers at most.
        feedback_prompt: text behind an answer, which asks for feedback.
        refine_prompt: text behind feedback, which asks for a better answer.
        stop_phrase: feedback that has this phrase, in upper or lower case, accepts the answer.
        feedback_tokens: length of the feedback at most; None: as of an answer.

    Raises:
        ParameterError: a setting of the wrong kind.
    """

    def __init__(
        self,
        generation_controller: Controller,
        num_refinements: int = 4,
        *,
        feedback_prompt: str = FEEDBACK_PROMPT,
        refine_prompt: str = REFINE_PROMPT,
        stop_phrase: str = "It is correct",
        feedback_tokens: int | None = None,
    ) -> None:
        super().__init__("self_refine", generation_controller)
        self.num_refinements = validated("num_refinements", num_refinements, NON_NEGATIVE_INT)
        self.feedback_prompt = validated("feedback_prompt", feedback_prompt, TEXT)
        self.refine_prompt = validated("refine_prompt", refine_prompt, TEXT)
        self.stop_phrase = validated("stop_phrase", stop_phrase, TEXT)
        self.feedback_tokens = validated("feedback_tokens", feedback_tokens, OPTIONAL_POSITIVE_INT)
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
