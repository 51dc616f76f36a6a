"""Archon: layers of inference-time techniques, each of which reads the output of the one before.

::

    question -> [generator x 5] -> [critic] -> [ranker, top 3] -> [fuser] -> answer
                 5 candidates      critiques   3 candidates       1 candidate

Components of a layer, and the calls of each component, run side by side; only a layer waits for the
one before. Each call has a seed made of the request's seed and its place. The layers are a mapping
or a file, see ``archon_config``; ``forethought.evaluation.pipeline_search`` looks for good ones.

If several candidates are left at the end, the first is the answer: of a ranker or an evaluator the
best, else the one with the lowest number. (The paper's code draws one.)

The components are the paper's; the texts of their prompts are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from forethought.answers.answer_extraction import without_thought
from forethought.errors import BudgetExceeded
from forethought.methods.parts import archon_config
from forethought.methods.parts.archon_config import DEFAULT, Component, Pipeline
from forethought.methods.parts.archon_prompts import (
    PROMPTS,
    is_correct,
    num_passed,
    ranking_in,
    unit_tests_in,
)
from forethought.rewards.judge import filled, question_of
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import Controller, expect_one_text, refuse_arguments
from forethought.scaffolding.parallel import ParallelProcess, Process
from forethought.scaffolding.result import ScaffoldingOutput, Stage
from forethought.scaffolding.settings import setting, with_settings
from forethought.scaffolding.task import ChatTask, GenerationTask

_FUSER_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer."""

    output: ScaffoldingOutput
    critique: str = ""

    @property
    def text(self) -> str:
        """Its text after the thought."""
        return without_thought(self.output.text)


@dataclass(frozen=True)
class _State:
    """The output of one layer, which the next one reads."""

    candidates: tuple[Candidate, ...] = ()
    tests: tuple[str, ...] = ()


@with_settings
class ArchonController(Controller):
    """Runs the layers of a pipeline, one after the other, and returns the first candidate left.

    ``customized_result_fields["archon"]`` holds for each layer that has ended the types of its
    components and the number of ``candidates`` after it, and whether the ``budget`` ended it.

    Raises:
        ParameterError: it cannot be read, or a layer cannot be run.
        UnknownNameError: a component's type does not exist.
    """

    paper = (
        'Saad-Falcon et al., "Archon: An Architecture Search Framework for Inference-Time '
        'Techniques", 2024. arXiv 2409.15254'
    )

    class WorkerTag(Enum):
        """The worker of components that name no model."""

        GENERATION = "generation"

    pipeline: Pipeline | Mapping[str, Any] | str | Path = setting(
        DEFAULT,
        "The layers, as a mapping or the path of a JSON or YAML file; by default five samples, "
        "critiques, the best three and their fusion.",
    )

    def __post_init__(self) -> None:
        self._is_default = self.pipeline == DEFAULT
        self._pipeline = self.pipeline = archon_config.load(self.pipeline)
        self.worker_tags = self._pipeline.models

    def fan_out(self) -> int:
        """The calls of all components; a fuser counts each candidate that it reads."""
        return self._pipeline.num_calls

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Run the layers on the only task; the answer is the first candidate of the last that has
        ended.
        """
        refuse_arguments(self, kwargs)
        task = expect_one_text("archon", tasks)
        sampling.refuse(task, ["n"], "archon", "Give a generator samples")
        question_of(task)
        state, info, over_budget = _State(), list[dict[str, Any]](), False
        first_candidates: list[ScaffoldingOutput] = []
        for number, layer in enumerate(self._layers(task)):
            try:
                state = yield from self._run(task, state, layer, number)
            except BudgetExceeded:
                if not state.candidates:
                    raise
                over_budget = True
                break
            first_candidates = first_candidates or [one.output for one in state.candidates]
            fields = {"types": [e.type for e in layer], "candidates": len(state.candidates)}
            info.append(fields)
            yield Stage("layer", fields={"number": number, **fields})
        task.result = state.candidates[0].output
        task.keep_candidates(first_candidates)
        meta = {"layers": info, "budget": over_budget}
        task.customized_result_fields["archon"] = meta

    def _layers(self, task: GenerationTask) -> Sequence[Sequence[Component]]:
        """The layers; generators of the default ones have the temperature of the request."""
        is_chosen = "temperature" in task.chosen or sampling.is_set(task, "temperature")
        if not (self._is_default and is_chosen):
            return self._pipeline.layers
        as_requested = {"temperature": None}
        return [
            [
                component.model_copy(update=as_requested if component.type == "generator" else {})
                for component in layer
            ]
            for layer in self._pipeline.layers
        ]

    def _run(
        self, task: GenerationTask, state: _State, layer: Sequence[Component], number: int
    ) -> Process:
        runs = [_Run(task, state, component, (number, n)) for n, component in enumerate(layer)]
        process = ParallelProcess(runs, [[] for _ in runs])
        yield process
        states: list[_State] = [branch.result for branch in process.branches]
        if len(states) == 1:
            return states[0]
        if {component.type for component in layer} <= {"generator", "fuser"}:
            every = tuple(candidate for result in states for candidate in result.candidates)
            return replace(state, candidates=every)
        changed = (
            result.candidates for result in states if result.candidates is not state.candidates
        )
        tests = (result.tests for result in states if result.tests is not state.tests)
        return _State(next(changed, state.candidates), next(tests, state.tests))


class _Run:
    """One component of a layer.

    Args:
        task: of the request.
        state: before the layer.
        component: what is run.
        place: of the component: layer, and number within it.
    """

    def __init__(
        self, task: GenerationTask, state: _State, component: Component, place: tuple[int, int]
    ) -> None:
        self._task, self._state, self._component, self._place = task, state, component, place

    def process(self, tasks: Sequence[Any], **kwargs: Any) -> Process:
        """Run it; returns the state after it."""
        run: Callable[[Any], Process] = getattr(self, f"_{self._component.type}")
        return (yield from run(self._component))

    def _generator(self, config: archon_config.Generator) -> Process:
        drawn = [self._prepared(self._task.copy(), n) for n in range(config.samples)]
        yield drawn
        return replace(self._state, candidates=_candidates(drawn))

    def _critic(self, config: archon_config.Critic) -> Process:
        critiques = yield from self._each("critic")
        pairs = zip(self._state.candidates, critiques, strict=True)
        criticised = tuple(replace(candidate, critique=text) for candidate, text in pairs)
        return replace(self._state, candidates=criticised)

    def _ranker(self, config: archon_config.Ranker) -> Process:
        candidates = self._state.candidates
        if len(candidates) == 1:
            return self._state
        chat = self._chat("ranker", 0, self._listed())
        yield [chat]
        order = ranking_in(chat.output_str or "", len(candidates))
        return replace(self._state, candidates=tuple(candidates[n] for n in order[: config.top_k]))

    def _fuser(self, config: archon_config.Fuser) -> Process:
        chats = [self._chat("fuser", n, self._listed()) for n in range(config.samples)]
        yield chats
        return replace(self._state, candidates=_candidates(chats))

    def _verifier(self, config: archon_config.Verifier) -> Process:
        verdicts = yield from self._each("verifier")
        pairs = zip(self._state.candidates, verdicts, strict=True)
        correct = tuple(candidate for candidate, text in pairs if is_correct(text))[: config.top_k]
        return replace(self._state, candidates=correct) if correct else self._state

    def _unit_test_generator(self, config: archon_config.UnitTestGenerator) -> Process:
        chat = self._chat("unit_test_generator", 0, {"{count}": str(config.num_tests)})
        yield [chat]
        return replace(
            self._state, tests=unit_tests_in(without_thought(chat.output_str))[: config.num_tests]
        )

    def _unit_test_evaluator(self, config: archon_config.UnitTestEvaluator) -> Process:
        tests = [f"Test {n}: {text}" for n, text in enumerate(self._state.tests, start=1)]
        if not tests:
            return self._state
        reports = yield from self._each("unit_test_evaluator", {"{tests}": "\n".join(tests)})
        passed = [num_passed(text, len(tests)) for text in reports]
        order = sorted(range(len(passed)), key=lambda n: -passed[n])
        best = tuple(self._state.candidates[n] for n in order[: config.top_k])
        return replace(self._state, candidates=best)

    # ---- calls --------------------------------------------------------------------------------

    def _each(self, prompt: str, values: Mapping[str, str] | None = None) -> Process:
        chats = [
            self._chat(prompt, n, {"{answer}": candidate.text, **(values or {})})
            for n, candidate in enumerate(self._state.candidates)
        ]
        yield chats
        return [without_thought(chat.output_str) for chat in chats]

    def _listed(self) -> dict[str, str]:
        """The values of a prompt about all candidates: each with its number and its critique."""
        texts = [
            f"[{n}] {candidate.text}"
            + (f"\n\nCritique of [{n}]: {candidate.critique}" * bool(candidate.critique))
            for n, candidate in enumerate(self._state.candidates, start=1)
        ]
        return {"{count}": str(len(texts)), "{answers}": "\n\n".join(texts)}

    def _chat(self, prompt: str, number: int, values: Mapping[str, str]) -> ChatTask:
        question = {"{question}": question_of(self._task)}
        chat = self._task.asking(filled(PROMPTS[prompt], {**question, **values}))
        sampling.carry(self._task, chat, ["seed", "max_tokens"])
        warm = self._component.type == "fuser"
        sampling.choose(chat, {"temperature": _FUSER_TEMPERATURE if warm else 0.0})
        prepared: ChatTask = self._prepared(chat, number)
        return prepared

    def _prepared(self, call: Any, number: int) -> Any:
        """A call with the settings of its component, and a seed of its own."""
        config = self._component
        call.worker_tag = config.model or ArchonController.WorkerTag.GENERATION
        call.streaming_output_flag, call.priority = False, self._task.priority
        limits = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        sampling.choose(call, {name: limit for name, limit in limits.items() if limit is not None})
        for place in (*self._place, number):
            sampling.vary(call, place)
        return call


def _candidates(calls: Sequence[GenerationTask]) -> tuple[Candidate, ...]:
    return tuple(Candidate(call.result or ScaffoldingOutput("")) for call in calls)
