"""The tasks of the tables of methods: their models, limits and held-out problems.

==============  =========================  =========================================================
task            model                      problems
==============  =========================  =========================================================
``countdown``   ``forethought/countdown``  expressions of three and four numbers
``arithmetic``  ``forethought/reasoner``   word problems
``instruct``    ``forethought/instruct``   those of countdown, for methods that instruct a model
``facts``       ``forethought/instruct``   who has how many of what, in documents
``context``     ``forethought/instruct``   ten questions about each of several contexts
==============  =========================  =========================================================
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from forethought.bench.countdown_progress import progress
from forethought.errors import ParameterError, UnknownNameError
from forethought.evaluation import tasks
from forethought.evaluation.generated.facts import (
    FactQuestion,
    World,
    example_questions,
    sample_context,
)
from forethought.evaluation.problems import Grader, Problem

MOST_REPEATED = 20_000
"""Problems in a row that were made before: there are no others."""
CONTEXT_END = "\n\nQuestion: "
"""Stands between a context and a question about it."""


@dataclass(frozen=True, slots=True)
class MethodTask:
    """What a table has to know about a task."""

    sample_tokens: int
    """Tokens of a sample on average: a budget of N tokens is N / ``sample_tokens`` samples."""
    max_tokens: int
    """Most tokens of a sample."""
    group_of: Callable[[Problem], str]
    """The name of the group of problems that one is in."""
    evaluated: str = "countdown"
    """The task of the evaluation whose grader it has."""
    model: str = "forethought/countdown"
    """The embedded model that it is for."""
    verifier: str | None = None
    """The exact checker, if there is one."""
    reward_model: str | None = None
    """The embedded reward model, if there is one."""
    checker: Callable[[str, str], float] | None = None
    """Scores answers before they are complete, where there is no reward model."""
    chunk_size: int = 32
    """Tokens between two probes of Dynasor-CoT."""

    def grader(self) -> Grader:
        """Decides which answers are right."""
        return tasks.task(self.evaluated).grader()


def _num_numbers(problem: Problem) -> str:
    return f"{problem.question.count(',') + 2} numbers"


def _all(problem: Problem) -> str:
    return "all"


def _num_facts(problem: Problem) -> str:
    if "neighbour" in problem.question:
        return "a neighbour"
    return "two facts" if "together" in problem.question else "one fact"


_INSTRUCT = "forethought/instruct"
TASKS: Mapping[str, MethodTask] = {
    "countdown": MethodTask(205, 450, _num_numbers, verifier="countdown", checker=progress),
    "arithmetic": MethodTask(
        190,
        440,
        _all,
        evaluated="arithmetic",
        model="forethought/reasoner",
        reward_model="forethought/prm",
        chunk_size=16,
    ),
    "instruct": MethodTask(
        126, 450, _num_numbers, model=_INSTRUCT, verifier="countdown", checker=progress
    ),
    "facts": MethodTask(12, 64, _num_facts, evaluated="arithmetic", model=_INSTRUCT),
    "context": MethodTask(12, 64, _all, evaluated="arithmetic", model=_INSTRUCT),
}


def held_out_problems(name: str, count: int, seed: int = 0) -> list[Problem]:
    """``count`` problems of a task that its embedded model was not trained on.

    The shipped ones first, where there are any; if they are too few, further ones of the same
    generators and the same side of the split, of four numbers where these are counted.

    Raises ParameterError if there are fewer different ones.
    """
    task = method_task(name)
    problems = [] if name in ("facts", "context") else tasks.task(task.evaluated).problems()
    questions = {problem.question for problem in problems}
    generator, num_repeats = _MAKERS[name](random.Random(f"{seed}:{name}")), 0
    while len(problems) < count:
        problem = next(generator)
        if problem.question not in questions:
            questions.add(problem.question)
            problems.append(replace(problem, name=str(len(problems))))
            num_repeats = 0
        elif (num_repeats := num_repeats + 1) > MOST_REPEATED:
            raise ParameterError(
                f"there are no {count} problems of {name}",
                f"{len(problems)} are different, and {num_repeats} further ones were among them",
                f"Ask for at most {len(problems)}",
            )
    return (
        problems[:count] if count >= len(problems) else random.Random(seed).sample(problems, count)
    )


def calibration_problems(name: str, count: int, seed: int = 0) -> list[Problem]:
    """``count`` problems of the same generators and the same side of the split, which are not among
    those of ``held_out_problems``; where numbers are counted, half of them have three.
    """
    questions = {problem.question for problem in held_out_problems(name, 1000)}
    rng, problems = random.Random(f"{seed}:calibration:{name}"), list[Problem]()
    while len(problems) < count:
        problem = (
            _arithmetic(rng) if name == "arithmetic" else _countdown(rng, 3 + len(problems) % 2)
        )
        if problem.question not in questions:
            questions.add(problem.question)
            problems.append(replace(problem, name=str(len(problems))))
    return problems


def _countdown(rng: random.Random, size: int = 4) -> Problem:
    from forethought.evaluation.generated.countdown import expression, sample_problem, solve

    problem = sample_problem(rng, size, held_out=True)
    return Problem("", problem.question, expression(solve(problem) or ()))


def _arithmetic(rng: random.Random) -> Problem:
    from forethought.evaluation.generated.arithmetic_questions import sample_mixed

    problem = sample_mixed(rng, held_out=True)
    return Problem("", problem.question, problem.answer)


def measured_world() -> World:
    """The facts that questions are asked about: more of them than any world of the training has."""
    return World(12, 5, 2026)


def measured_examples() -> list[FactQuestion]:
    """Questions about that world that are shown with their answers, and never asked."""
    return example_questions(measured_world(), 3)


def _endless(make: Callable[[random.Random], Problem]) -> Callable[..., Iterator[Problem]]:
    def problems(rng: random.Random) -> Iterator[Problem]:
        while True:
            yield make(rng)

    return problems


def _facts(rng: random.Random) -> Iterator[Problem]:
    world, shown = measured_world(), {example.text for example in measured_examples()}
    while True:
        question = world.question(rng)
        if question.text not in shown:
            yield Problem("", question.text, question.answer)


def _contexts(rng: random.Random) -> Iterator[Problem]:
    while True:
        context = sample_context(rng)
        for question, _, answer in context.questions:
            yield Problem("", f"{context.text}{CONTEXT_END}{question}", answer)


_MAKERS: Mapping[str, Callable[[random.Random], Iterator[Problem]]] = {
    "countdown": _endless(_countdown),
    "arithmetic": _endless(_arithmetic),
    "instruct": _endless(_countdown),
    "facts": _facts,
    "context": _contexts,
}
"""Task -> problems without end."""


def method_task(name: str) -> MethodTask:
    """The task of this name; raises UnknownNameError if there is no table for it."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    return TASKS[name]
