"""The base of searches over the steps of an answer: generate steps, score, merge, rank.

A step is text up to a separator. A ``Beam`` is a partial answer, a path of steps::

    prompt --+-- step 1 --+-- step 2 --+-- step 3 (ended)
             |            +-- step 2'
             +-- step 1'

A beam is continued by a fork of the task that generated its last step. The engine keeps the KV of
the steps that beams have in common, so each of them is prefilled or decoded once; a server gets the
text. Beams are scored by a reward controller: a process reward model (``PRMController``), any other
that leaves ``scores``, or, where there is none, the model's own confidence. A text is scored once;
of a longer one a ``RewardWorker`` runs the new tokens alone.

``SearchController`` is the base of the methods. Their results do not depend on what else runs: the
seed of a step is a hash of the request's seed and the numbers of the samples on its path.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

from forethought.errors import BudgetExceeded, ParameterError
from forethought.rewards.confidence import ConfidenceRewardController
from forethought.rewards.prm_controller import AGGREGATIONS, StepAggregation
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    expect_one,
    expect_text,
    refuse_arguments,
)
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import ScaffoldingOutput, Stage
from forethought.scaffolding.reward_controller import scores_of, step_scores_of
from forethought.scaffolding.settings import (
    POSITIVE_INT,
    NonNegativeInt,
    OnFailure,
    PositiveInt,
    Text,
    required,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask

_REFUSED = ("n", "echo", "include_stop_str_in_output")
_COMPLETION = 2**31
"""Number of the sample that completes a beam; no other has it."""


@dataclass(eq=False)
class Beam:
    """A partial or finished answer: a path of steps."""

    parent: Beam | None = None
    """One step before; None for the empty answer."""
    numbers: tuple[int, ...] = ()
    """Indices of the samples on its path, one per step; they identify and order beams."""
    task: GenerationTask | None = field(default=None, repr=False)
    """Generated its last step, or one before that which has been inserted."""
    inserted: str = ""
    """Text after the task's: the separator, which stopped it, or a step that the method wrote."""
    num_tokens: int = 0
    """Generated on the whole path."""
    finished: bool = False
    """There is no further step."""
    step_scores: list[float] = field(default_factory=list)
    score: float | None = None
    """None: not scored yet."""

    @property
    def path(self) -> list[Beam]:
        """The beams from the first step to this one."""
        path: list[Beam] = []
        beam: Beam | None = self
        while beam is not None and beam.parent is not None:
            path.append(beam)
            beam = beam.parent
        return path[::-1]

    @cached_property
    def output(self) -> ScaffoldingOutput:
        """The answer so far; with the finish reason of a limit, if it ends at a separator."""
        output = None if self.task is None else self.task.joined
        if output is None:
            return ScaffoldingOutput.inserted(self.inserted)
        if self.inserted:
            output = ScaffoldingOutput.join([output, self.inserted])
            output.finish_reason = "length"
        return output

    @property
    def text(self) -> str:
        """The text of the answer so far."""
        return self.output.text or ""

    @property
    def has_ended(self) -> bool:
        """Whether the model ended it, rather than a limit of tokens."""
        return self.finished and self.output.finish_reason == "stop"


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How steps are generated and scored."""

    step_token: str
    max_steps: int
    on_failure: OnFailure
    aggregation: StepAggregation = "last"
    lookahead: int = 0


class Search:
    """One search: the beams of one request.

    Args:
        task: of the request.
        generation_controller: generates the steps; it gets the tasks of all beams at once.
        reward_controller: scores beams.
        settings: of steps and scores.

    Attributes:
        template: the task with all sampling fields, which steps are made of.
        root: the empty answer.
        random: numbers for resampling, seeded as the request is.
        finished: the beams that are answers, in the order in which they were scored.
    """

    def __init__(
        self,
        task: GenerationTask,
        generation_controller: Controller,
        reward_controller: Controller,
        settings: StepSettings,
    ) -> None:
        self._generation, self._reward = generation_controller, reward_controller
        self.settings = settings
        self.template = task.copy()
        defaults: Mapping[str, Any] = getattr(generation_controller, "sampling_params", {})
        sampling.fill(self.template, defaults)
        sampling.fill(self.template, getattr(reward_controller, "sample_params", {}))
        self._stops = sampling.stop_strings(self.template)
        self.root = Beam()
        self.random = random.Random(self.template.seed)
        self.finished: list[Beam] = []
        self._unfinished: list[Beam] = []
        self._scores: dict[str, tuple[float, list[float]]] = {}

    # ---- generating ---------------------------------------------------------------------------

    def step(
        self,
        continuations: Iterable[tuple[Beam, int]],
        *,
        whole: bool = False,
        aside: str = "",
        **fields: Any,
    ) -> Process:
        """Continue beams by one step each, all at once.

        The last of ``max_steps`` goes on to the end of the answer.

        Args:
            continuations: beams that are not finished, each with the number of the sample: a beam
                continued several times needs as many different ones.
            whole: go on to the end of the answer.
            aside: what the steps are called, of beams that are not kept.
            **fields: sampling fields of the steps.

        Returns:
            The continued beams, in this order, without dropped failures.

        Raises:
            Exception: the failure, if they are not dropped, or if all failed.
        """
        pairs = list(continuations)
        stops = [] if whole else [self.settings.step_token]
        tasks = [self._continued(beam, number, stops, fields) for beam, number in pairs]
        for (beam, number), task in zip(pairs, tasks, strict=True):
            step = {"beam": [*beam.numbers, number]}
            task.stream_fields = _aside_fields(beam, aside) if aside else step
        try:
            yield from self.ask(tasks)
        except BudgetExceeded:
            self.note(self._grown(pairs, tasks))
            raise
        return self._grown(pairs, tasks)

    def ask(self, tasks: Sequence[GenerationTask]) -> Process:
        """Run tasks made with ``fork`` that are no steps.

        Raises:
            Exception: the failure, if they are not dropped, or if all failed.
        """
        if tasks:
            yield from self._generation.process(list(tasks))
            if all(task.error is not None for task in tasks):
                raise next(task.error for task in tasks if task.error is not None)

    def complete_best(self) -> Process:
        """Complete the best beam, if no answer is finished; returns the completed beams, to be
        scored.
        """
        best = self.best
        if best is None or best.finished:
            return []
        return (yield from self.step([(best, _COMPLETION)], whole=True))

    def insert(self, beam: Beam, text: str, number: int) -> Beam:
        """A beam continued by a step that the method writes."""
        numbers = (*beam.numbers, number)
        return Beam(beam, numbers, beam.task, beam.inserted + text, beam.num_tokens)

    def fork(self, beam: Beam, suffix: str, number: int, **fields: Any) -> GenerationTask:
        """A task that continues a beam with ``suffix`` appended."""
        text = beam.inserted + suffix
        if beam.task is None and text and self.template.input_str is None:
            raise ParameterError(
                "text cannot be appended to a prompt of token ids",
                "the method asks about the prompt, or writes the first step itself",
                "Give the prompt as text",
            )
        task: GenerationTask = (beam.task or self.template).fork(text, **fields)
        if beam.task is None and not text:
            task.input_tokens = self.template.input_tokens
            task.skip_tokenizer = self.template.skip_tokenizer
        task.on_failure = self.settings.on_failure
        sampling.vary(task, number)
        return task

    def aside(
        self, name: str, beam: Beam, suffix: str, number: int, **fields: Any
    ) -> GenerationTask:
        """A fork that is no step, such as a judgement of the beam; observers know its ``name``."""
        stream_fields = _aside_fields(beam, name)
        return self.fork(beam, suffix, number, is_aside=True, stream_fields=stream_fields, **fields)

    def is_last(self, beam: Beam) -> bool:
        """Whether the next step of a beam is the last one, which goes on to the answer's end."""
        return len(beam.numbers) + 1 >= self.settings.max_steps

    def _continued(
        self, beam: Beam, number: int, stops: list[str], fields: Mapping[str, Any]
    ) -> GenerationTask:
        stops = [*([] if self.is_last(beam) else stops), *self._stops]
        task = self.fork(beam, "", number, stop=stops, **fields)
        limit = self.template.max_tokens
        if limit is not None:
            task.max_tokens = limit - beam.num_tokens
        return task

    def _grown(
        self, pairs: Sequence[tuple[Beam, int]], tasks: Sequence[GenerationTask]
    ) -> list[Beam]:
        return [
            self._child(beam, number, task)
            for (beam, number), task in zip(pairs, tasks, strict=True)
            if task.error is None and task.finish_reason is not None
        ]

    def _child(self, beam: Beam, number: int, task: GenerationTask) -> Beam:
        child = Beam(beam, (*beam.numbers, number), task)
        child.num_tokens = beam.num_tokens + task.num_generated
        limit = self.template.max_tokens
        is_step = task.finish_reason == "stop" and task.stop_reason == self.settings.step_token
        is_cut = limit is not None and child.num_tokens >= limit
        if is_step and is_cut:
            task.finish_reason = "length"
        child.finished = not is_step or is_cut
        if is_step:
            child.inserted = self.settings.step_token
        return child

    # ---- scoring ------------------------------------------------------------------------------

    def score(self, beams: Sequence[Beam]) -> Process:
        """Score the beams that have no score, all at once; equal texts count as one.

        With ``lookahead``, a beam has the score of its greedy continuation by that many steps,
        which are not kept.
        """
        new = [beam for beam in beams if beam.score is None]
        try:
            yield from self._score_ahead(new)
        finally:
            self.note(new)
        yield from beam_stages("scored", "", new)

    def _score_ahead(self, beams: Sequence[Beam]) -> Process:
        ahead = beams
        for _ in range(self.settings.lookahead):
            ahead = yield from self._one_ahead(ahead)
        yield from self._rate(ahead)
        for beam, last in zip(beams, ahead, strict=True):
            if last is not beam:
                assert last.score is not None, "it was rated"
                beam.score = last.score
                beam.step_scores = [*(beam.parent.step_scores if beam.parent else ()), last.score]

    def _one_ahead(self, beams: Sequence[Beam]) -> Process:
        """The beams, each continued by one greedy step where it is not finished."""
        going = [beam for beam in dict.fromkeys(beams) if not beam.finished]
        if not going:
            return beams
        ahead = [(beam, 0) for beam in going]
        further = yield from self.step(ahead, aside="look-ahead", temperature=0.0)
        of = {id(beam.parent): beam for beam in further}
        return [of.get(id(beam), beam) for beam in beams]

    def _rate(self, beams: Sequence[Beam]) -> Process:
        texts = dict.fromkeys(beam.text for beam in beams if beam.text not in self._scores)
        unrated = [next(beam for beam in beams if beam.text == text) for text in texts]
        if unrated:
            reward = self._reward.clone()
            yield from reward.process([self._view(beam) for beam in unrated])
            scores = scores_of(reward, len(unrated))
            by_step = step_scores_of(reward, len(unrated))
            for beam, score, steps in zip(unrated, scores, by_step, strict=True):
                self._scores[beam.text] = self._aggregated(beam, score, steps)
        for beam in beams:
            beam.score, beam.step_scores = self._scores[beam.text]

    def _aggregated(
        self, beam: Beam, score: float | None, steps: Sequence[float] | None
    ) -> tuple[float, list[float]]:
        """The score of a beam, and those of its steps.

        Without a model that scores steps, the score of a step is that of the answer up to there.
        """
        if not steps:
            before = beam.parent.step_scores if beam.parent else []
            steps = [*before, -math.inf if score is None else score]
        return AGGREGATIONS[self.settings.aggregation](steps), list(steps)

    def _view(self, beam: Beam) -> GenerationTask:
        """The beam as a finished task, for a reward controller."""
        view = self.template.copy()
        view.question, view.result = self.template.question_text, beam.output
        return view

    # ---- choosing -----------------------------------------------------------------------------

    def merge(self, beams: Sequence[Beam]) -> Process:
        """Returns the first beam of each text; the others are pruned."""
        first = merged(beams)
        others = [beam for beam in beams if beam not in first]
        yield from beam_stages("pruned", "another beam has the same text", others)
        return first

    def note(self, beams: Iterable[Beam]) -> None:
        """Record beams that may become the answer."""
        for beam in beams:
            (self.finished if beam.finished else self._unfinished).append(beam)

    @property
    def answers(self) -> list[Beam]:
        """The finished beams without repeated texts, in the order of their numbers."""
        return merged(sorted(self.finished, key=lambda beam: beam.numbers))

    @property
    def best(self) -> Beam | None:
        """The best finished beam, preferably one that the model ended; else the best other one, or
        None.
        """
        beams = self.answers or sorted(self._unfinished, key=lambda beam: beam.numbers)
        ranked = best_of(beams, len(beams))
        return next((beam for beam in ranked if beam.has_ended), ranked[0]) if ranked else None

    def store(self, beam: Beam, task: GenerationTask) -> None:
        """Leave a beam as the result on the request's task."""
        task.result = beam.output
        task.request_handle = None if beam.task is None else beam.task.request_handle
        task.keep_candidates(answer.output for answer in self.answers)


@with_settings
class SearchController(Controller):
    """Base of searches over the steps of an answer: override ``search``.

    The output is the best answer; ``candidates`` are all that were finished.
    ``customized_result_fields`` holds, by ``name``: the ``score`` and the ``step_scores`` of the
    output, the ``scores`` of the candidates, the ``index`` of the output among them, and whether a
    ``budget`` ended the search.
    """

    conversation = ConversationForm.TEXT
    name = "search"

    generation_controller: Controller = required(
        "Generates the steps; it is given the tasks of all beams at once."
    )
    reward_controller: Controller | None = setting(
        None,
        "Scores beams, best as a process reward model; None: the mean log-probability of their "
        "tokens.",
    )
    default_sample_num: PositiveInt = setting(16, "Beams, unless `process` gets `sample_num`.")
    _: KW_ONLY
    step_token: Text = setting("\n\n", "Text that ends a step.")
    max_steps: PositiveInt = setting(40, "Steps of an answer; the last one goes on to its end.")
    on_failure: OnFailure = setting(
        "raise", '`"drop"` goes on without beams whose generation failed.'
    )

    def __post_init__(self) -> None:
        self.scorer: Controller = (
            ConfidenceRewardController("mean", "logprob")
            if self.reward_controller is None
            else self.reward_controller
        )
        self.steps = StepSettings(self.step_token, self.max_steps, self.on_failure)

    def fan_out(self) -> int:
        """The beams at each step, with those that look ahead."""
        return self.default_sample_num * self.max_steps * (1 + self.steps.lookahead)

    def process(
        self, tasks: Sequence[GenerationTask], sample_num: int | None = None, **kwargs: Any
    ) -> Process:
        """Search with ``sample_num`` samples, and leave the best answer on the only task."""
        refuse_arguments(self, kwargs)
        task: GenerationTask = expect_one(self.name, tasks)
        expect_text(self.name, task, "it finds the steps in the text")
        count = self.default_sample_num if sample_num is None else sample_num
        self.check_count(validated("sample_num", count, POSITIVE_INT))
        search = Search(task, self.generation_controller, self.scorer, self.steps)
        sampling.refuse(search.template, _REFUSED, self.name, "Leave it out")
        over_budget, chosen = False, None
        try:
            chosen = yield from self.search(search, count)
        except BudgetExceeded:
            if search.best is None:
                raise
            over_budget = True
        best = chosen or search.best
        assert best is not None, "a search that comes to its end has finished an answer"
        search.store(best, task)
        texts = [answer.text for answer in search.answers]
        task.customized_result_fields[self.name] = {
            "score": best.score,
            "step_scores": list(best.step_scores),
            "scores": [answer.score for answer in search.answers],
            "index": texts.index(best.text) if best.text in texts else None,
            "budget": over_budget,
        }
        why = "the budget is spent" if over_budget else ""
        yield from beam_stages("selected", why, [best])

    def check_count(self, count: int) -> None:
        """Raise ``ParameterError`` if there cannot be ``count`` samples."""

    def search(self, search: Search, count: int) -> Process:
        """Find answers with ``count`` samples; returns the chosen beam (None: the best one)."""
        raise NotImplementedError(f"{type(self).__name__} does not override search")


@with_settings
class ScoredSearchController(SearchController):
    """Base of searches that rank beams by the scores of their steps."""

    _: KW_ONLY
    aggregation: StepAggregation = setting(
        "last", "What makes one score of those of the steps of a beam."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps = replace(self.steps, aggregation=self.aggregation)


@with_settings
class LookaheadSearchController(ScoredSearchController):
    """Base of searches that may score a beam by greedy steps beyond it."""

    _: KW_ONLY
    lookahead: NonNegativeInt = setting(
        0, "Greedy steps beyond a beam, from which its score is taken."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps = replace(self.steps, lookahead=self.lookahead)


def merged(beams: Iterable[Beam]) -> list[Beam]:
    """The first beam of each text."""
    first: dict[tuple[str, bool], Beam] = {}
    for beam in beams:
        first.setdefault((beam.text, beam.finished), beam)
    return list(first.values())


def _aside_fields(beam: Beam, name: str) -> dict[str, Any]:
    """``Task.stream_fields`` of a text about a beam that is no step of it."""
    return {"beam": list(beam.numbers), "aside": name}


def beam_stages(name: str, why: str, beams: Iterable[Beam]) -> Process:
    """Yield a ``Stage`` for each beam.

    Its fields are the numbers of the ``beam`` (those of the beam before it without the last one),
    its ``score``, the ``text`` of its last step and whether it is ``finished``.

    Args:
        name: of the stage: ``scored``, ``pruned`` or ``selected``.
        why: the reason.
        beams: that it is about.
    """
    for beam in beams:
        scored = beam.score is not None and math.isfinite(beam.score)
        before = "" if beam.parent is None else beam.parent.text
        fields = {
            "beam": list(beam.numbers),
            "score": beam.score if scored else None,
            "text": beam.text.removeprefix(before),
            "finished": beam.finished,
        }
        yield Stage(name, why, fields=fields)


def best_of(beams: Sequence[Beam], count: int) -> list[Beam]:
    """The ``count`` beams with the highest scores, the first of equals first."""
    return sorted(beams, key=_rank, reverse=True)[:count]


def _rank(beam: Beam) -> float:
    return -math.inf if beam.score is None else beam.score


def expect_multiple(count: int, width: int, name: str) -> None:
    """Raise ``ParameterError`` unless ``count`` beams are whole groups of ``width``."""
    if count % width:
        raise ParameterError(
            f"{name} cannot divide its samples",
            f"{count} is no multiple of width={width}",
            f"Give a multiple of {width}, or another width",
        )
