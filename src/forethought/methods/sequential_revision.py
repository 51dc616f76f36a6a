"""Sequential revisions: each answer is written with all earlier ones in the context; one is chosen.

In place of N independent samples, a chain of N answers: the model sees its attempts and corrects
them. The last is not always the best, as a right answer may be revised to a wrong one, so the
answer is chosen among all of the chain: by a reward model, or by a vote.

The paper's model is trained to revise and sees at most the last four answers; here any model is
asked for a revision and sees all. The number of revisions and the text are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

from forethought.answers import answer_spaces
from forethought.answers.answer_extraction import AnswerRule
from forethought.answers.answers import AnswerPool
from forethought.errors import ParameterError
from forethought.methods.parts.revision import RevisingController, RevisionEnd, answers_alone
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.reward_controller import scores_of
from forethought.scaffolding.settings import NonNegativeInt, Text, setting, with_settings
from forethought.scaffolding.task import GenerationTask

REVISE_PROMPT = (
    "\n\nThe answer above may be wrong. Look for a mistake in it and answer the question again."
    "\n\nAnswer: "
)
Selection = Literal["vote", "last", "reward"]


@with_settings
class SequentialRevisionController(RevisingController):
    """A chain of answers, each revising the ones before it, of which one is chosen.

    ``customized_result_fields["sequential_revision"]`` holds the number of ``answers``, the
    ``index`` of the one that is returned, the ``scores`` of a reward controller or the ``vote``,
    with the fields of a ``majority_vote``, and why the chain ended (``end``, a ``RevisionEnd``).

    Raises:
        ParameterError: a setting of the wrong kind, or a ``selection`` that does not go with
            ``reward_controller``.
    """

    paper = (
        'Snell et al., "Scaling LLM Test-Time Compute Optimally can be More Effective than '
        'Scaling Model Parameters", 2024. arXiv 2408.03314'
    )

    name = "sequential_revision"

    num_revisions: NonNegativeInt = setting(3, "Further answers at most.")
    selection: Selection = setting(
        "vote",
        'The `"vote"` over the boxed answers, as of a majority vote, in which a tie goes to the '
        'group and the answer that came last; the `"last"` one; or that with the highest '
        '`"reward"`, of equals the last one.',
    )
    reward_controller: Controller | None = setting(
        None, 'Scores the answers, if `selection` is `"reward"`.'
    )
    _: KW_ONLY
    revise_prompt: Text = setting(REVISE_PROMPT, "Text after an answer, which asks for another.")
    answer: AnswerRule = setting(
        "auto", "The rule that finds answers, see `answers.answer_extraction`."
    )
    extract_answer: Callable[[str], str | None] | None = setting(
        None, "In its place: finds the answer to vote with in a text; None: there is none."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.selection == "reward") != (self.reward_controller is not None):
            raise ParameterError(
                "selection and reward_controller do not go together",
                f"got selection={self.selection!r} and "
                f"reward_controller={self.reward_controller!r}",
                'Give a reward_controller with selection="reward", and only then',
            )
        self.space = answer_spaces.answer_space("math", self.answer, self.extract_answer)

    def fan_out(self) -> int:
        """The answers."""
        return 1 + self.num_revisions

    def _revise(
        self, answers: list[GenerationTask], info: dict[str, Any], options: Mapping[str, Any]
    ) -> Process:
        for _ in range(self.num_revisions):
            end = yield from self._answer_again(answers, answers[-1], self.revise_prompt, options)
            if end is not None:
                return end
        return RevisionEnd.LIMIT

    def _choose(self, answers: Sequence[GenerationTask], info: dict[str, Any]) -> Process:
        latest = len(answers) - 1
        if self.selection == "last" or not latest:
            return latest
        if self.selection == "vote":
            return (yield from self._vote(answers, info))
        reward: Any = self.reward_controller
        yield from reward.process(answers_alone(answers))
        scores = info["scores"] = scores_of(reward, len(answers))
        ranked = [(score, number) for number, score in enumerate(scores) if score is not None]
        return max(ranked, default=(0.0, latest))[1]

    def _vote(self, answers: Sequence[GenerationTask], info: dict[str, Any]) -> Process:
        latest = len(answers) - 1
        final_answers = [self.space.answer_of(answer) for answer in answers]
        pool = AnswerPool(self.space.equivalence)
        finding = pool.classes.finding([answer for answer in final_answers if answer is not None])
        if finding:
            yield finding
        for age, answer in enumerate(
            reversed(final_answers)
        ):  # numbered from the last: it wins a tie
            if answer is not None:
                pool.add(age, answer)
        index = latest if pool.winner is None else latest - pool.winner.first
        info["vote"] = pool.info(answer_spaces.rule_of(self.space, answers[index]))
        yield Stage("voted", fields={"answer": info["vote"]["answer"], "tally": pool.tally})
        return index
