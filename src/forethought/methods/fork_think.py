"""Fork-think: one path is drawn, and forked where the model was least confident in it.

::

    seed     ==== ==== ==== ==== ==== ==== \\boxed{7}     groups of ``window`` tokens
    conf.    9.1  8.8  3.2  9.0  4.1  8.7
                       |         |
                       |         +---- ==== ==== \\boxed{7}
                       +---- ==== ==== ==== ==== \\boxed{5}        the answers are voted on

Where the model was sure, all paths would go on alike; drawing whole paths from the prompt pays for
these tokens each time. A fork at the start of a group of low confidence pays for the tokens after
it alone. The forks are spread over the ``num_points`` least confident groups, the least confident
first, and draw with seeds of their own. On the engine a fork takes the seed path's keys and values
up to its point; the confidences come from the decode step.

Groups, their confidence as DeepConf defines it, and the defaults are ours.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from forethought.answers import answer_spaces
from forethought.answers.answer_extraction import AnswerRule
from forethought.answers.answer_spaces import AnswerSpace
from forethought.answers.answers import AnswerPool
from forethought.errors import BudgetExceeded
from forethought.rewards.confidence import TOP_K, ConfidenceRewardController, TopK, mean
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    expect_prompt,
    expect_streams,
    refuse_arguments,
)
from forethought.scaffolding.parallel import Branch, Process, run_until
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    POSITIVE_INT,
    OnFailure,
    PositiveInt,
    required,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask, StreamGenerationTask

_REFUSED = ("n", "echo", *sampling.OF_THOUGHTS)


@dataclass(frozen=True, slots=True)
class ForkingPoint:
    """The start of a group of tokens."""

    num_tokens: int
    """Tokens of the seed path before it."""
    num_characters: int
    """Characters of its text before it."""
    confidence: float
    """Mean over the group that it starts."""


@with_settings
class ForkThinkController(Controller):
    """Draws one path, forks it where it was least confident, and votes.

    The output is the winning answer's lowest numbered path; the seed path is number 0.
    ``customized_result_fields["fork_think"]`` holds the ``answer``, the ``points`` (tokens of the
    seed path before each, and its confidence) and how many paths ``finished``.

    Raises:
        ParameterError: a setting of the wrong kind, or another method inside.
    """

    paper = 'Al-Khalili et al., "Fork-Think with Confidence", 2026. arXiv 2606.31484'

    conversation = ConversationForm.TEXT

    generation_controller: Controller = required(
        "Generates the paths; a plain generation, whose tasks can be streams."
    )
    default_sample_num: PositiveInt = setting(
        8, "Paths, the seed path included, unless `process` gets `sample_num`."
    )
    _: KW_ONLY
    num_points: PositiveInt = setting(4, "Groups at which the seed path is forked.")
    window: PositiveInt = setting(16, "Tokens of a group.")
    top_k: TopK = setting(
        TOP_K, "Most probable tokens that the confidence of a token is taken over."
    )
    answer_space: AnswerSpace | str = setting(
        "math",
        "How the answer is extracted and which answers mean the same, as in `majority_vote`.",
    )
    answer: AnswerRule = setting(
        "auto", "The rule that finds answers, see `answers.answer_extraction`."
    )
    on_failure: OnFailure = setting("raise", '`"drop"` votes without forks that failed.')

    def __post_init__(self) -> None:
        expect_streams("fork_think", self.generation_controller)
        self.confidence = ConfidenceRewardController("mean", top_k=self.top_k)
        self.space = self.answer_space = answer_spaces.answer_space(self.answer_space, self.answer)

    def fan_out(self) -> int:
        """The samples, and the first answer."""
        return 1 + self.default_sample_num

    def process(
        self, tasks: Sequence[GenerationTask], sample_num: int | None = None, **kwargs: Any
    ) -> Process:
        """Draw the seed path, fork it ``sample_num`` - 1 times, vote, and leave the winner on the
        task.
        """
        refuse_arguments(self, kwargs)
        task = expect_prompt("fork_think", tasks)
        sampling.refuse(task, _REFUSED, "fork_think", "Leave it out")
        count = self.default_sample_num if sample_num is None else sample_num
        validated("sample_num", count, POSITIVE_INT)
        seed = self._seed_path(task)
        points = yield from self._draw(seed)
        for point in points:
            fields = {"at": point.num_tokens, "confidence": point.confidence}
            yield Stage("forked", "the model was not confident here", fields=fields)
        forked_at = [points[n % len(points)] for n in range(count - 1)] if points else []
        forks = [self._fork(seed, point, n) for n, point in enumerate(forked_at, start=1)]
        paths = {0: seed} | (yield from self._continue(task, forks))
        yield from self._vote(task, paths, points, count)

    def _seed_path(self, task: GenerationTask) -> StreamGenerationTask:
        seed = StreamGenerationTask.create_from_generation_task(task, self.window)
        seed.streaming_output_flag = False
        sampling.vary(seed, 0)
        sampling.fill(seed, self.confidence.sample_params)
        return seed

    def _draw(self, seed: StreamGenerationTask) -> Process:
        """Draw the seed path; returns the least confident points, the least confident first."""
        points, num_values = list[ForkingPoint](), 0
        while not seed.end_flag:
            before = seed.num_generated, len(seed.output_str or "")
            yield from self.generation_controller.process([seed])
            values = self.confidence.values(seed)
            if values[num_values:]:
                points.append(ForkingPoint(*before, mean(values[num_values:])))
            num_values = len(values)
        points.sort(key=lambda point: point.confidence)
        return points[: self.num_points]

    def _fork(self, seed: StreamGenerationTask, point: ForkingPoint, number: int) -> GenerationTask:
        """A task that continues the seed path from a point."""
        start = copy.copy(seed)  # the same sequence, as it was at the point
        start.output_str = (seed.output_str or "")[: point.num_characters]
        if seed.output_tokens is not None:
            start.output_tokens = seed.output_tokens[: point.num_tokens]
        start.logprobs = seed.logprobs and seed.logprobs[: point.num_tokens]
        start.confidences = seed.confidences and seed.confidences[: point.num_tokens]
        pairs = zip(start.output_tokens or (), start.logprobs or (), strict=False)
        logprobs = [entry[token].logprob for token, entry in pairs if token in entry]
        is_known = start.logprobs is not None and len(logprobs) == len(start.logprobs)
        start.cumulative_logprob = sum(logprobs) if is_known else None
        fork: GenerationTask = start.fork(on_failure=self.on_failure)
        if seed.max_tokens is not None:
            sampling.choose(fork, {"max_tokens": seed.max_tokens - point.num_tokens})
        sampling.vary(fork, number)
        return fork

    def _continue(self, task: GenerationTask, forks: Sequence[GenerationTask]) -> Process:
        """Generate the forks; returns the whole paths of those that have ended, by number."""
        branches = [
            Branch(self.generation_controller.clone(), [fork], on_failure=self.on_failure)
            for fork in forks
        ]
        ended: Sequence[Branch] = []
        with contextlib.suppress(BudgetExceeded):  # the seed path is there
            ended = yield from run_until(branches)
        return {
            number: self._whole(task, fork)
            for number, (fork, branch) in enumerate(zip(forks, branches, strict=True), start=1)
            if branch in ended and branch.error is None and fork.error is None
        }

    def _whole(self, task: GenerationTask, fork: GenerationTask) -> GenerationTask:
        path = task.copy()
        path.result, path.request_handle = fork.joined, fork.request_handle
        return path

    def _vote(
        self,
        task: GenerationTask,
        paths: dict[int, GenerationTask],
        points: Sequence[ForkingPoint],
        count: int,
    ) -> Process:
        pool = AnswerPool(self.space.equivalence)
        answers = {number: self.space.answer_of(path) for number, path in paths.items()}
        with contextlib.suppress(BudgetExceeded):  # then the seed path is returned
            yield from pool.adding(answers)
        winner = pool.winner
        answer = None if winner is None else winner.answer
        yield Stage("voted", fields={"answer": answer, "tally": pool.tally})
        chosen = paths[0 if winner is None else winner.first]
        task.result, task.request_handle = chosen.result, chosen.request_handle
        task.keep_candidates(paths.get(number) for number in range(count))
        task.customized_result_fields["fork_think"] = {
            **pool.info(answer_spaces.rule_of(self.space, chosen)),
            "points": [{"at": p.num_tokens, "confidence": p.confidence} for p in points],
            "finished": len(paths),
        }
