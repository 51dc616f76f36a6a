"""Several methods on the same problems: run with a journal, compared with the first, reported.

The first method solves every problem. With ``stop_level`` another one ends as soon as the
sequential test has decided between the two (``statistics.SequentialTest``); its row and the paired
comparison then cover the problems up to there in their order, whichever others were finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forethought.errors import ParameterError, UnknownNameError
from forethought.evaluation.journal import Attempt, Journal
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import Recipe
from forethought.evaluation.report import ReportRow, outcomes_of, row_of
from forethought.evaluation.runner import EvaluationProgress, EvaluationRunner
from forethought.evaluation.statistics import SequentialTest, compare_pairs
from forethought.evaluation.thoughts import (
    INTERVAL,
    Chain,
    count_behaviours,
    force_answers,
    regrets,
)

COLUMNS = ("regret", "behaviours")


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """Options of a comparison besides its methods.

    Raises:
        UnknownNameError: a column does not exist.
        ParameterError: a level outside 0..1.
    """

    columns: tuple[str, ...] = ()
    """Further columns, of ``COLUMNS``."""
    interval: int = INTERVAL
    """Tokens between the answers forced for the regret."""
    stop_level: float | None = None
    """Level of the sequential test that ends a method early; None: none is ended."""

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in COLUMNS:
                raise UnknownNameError("column", name, COLUMNS)
        if self.stop_level is not None:
            SequentialTest(self.stop_level)


class Comparison:
    """Runs methods on the same problems.

    Args:
        runner: solves the problems.
        problems: at least one.
        journal: of this evaluation; attempts in it are not made again.
        options: further columns and the early stop.
        bar: shows the progress; None: nothing does.
    """

    def __init__(
        self,
        runner: EvaluationRunner,
        problems: Sequence[Problem],
        journal: Journal,
        options: ComparisonOptions | None = None,
        bar: EvaluationProgress | None = None,
    ) -> None:
        self._runner, self._problems, self._journal = runner, problems, journal
        self._options, self._bar = options or ComparisonOptions(), bar
        self._shown: set[tuple[str, tuple[int, int]]] = set()

    def rows(self, recipes: Sequence[Recipe]) -> list[ReportRow]:
        """One row for each method; each but the first is compared with the first.

        Raises:
            ParameterError: methods are to be stopped early, and attempt problems several times; or
                answers are to be forced in chats.
            Exception: of the first attempt that fails; those that are finished are in the journal.
        """
        self._check(recipes)
        first = recipes[0]
        baseline = self.attempts(first)
        attempts_of = {first.name: baseline}
        rows = [row_of(first.name, baseline)]
        for recipe in recipes[1:]:
            test = self._test()
            attempts_of[recipe.name] = self.attempts(recipe, baseline, test)
            rows.append(
                _compared(
                    row_of(recipe.name, attempts_of[recipe.name]), attempts_of, first.name, test
                )
            )
        further = self._columns(recipes, attempts_of)
        return [replace(row, columns=further[row.method]) for row in rows]

    def attempts(
        self,
        recipe: Recipe,
        baseline: Sequence[Attempt] = (),
        test: SequentialTest | None = None,
        numbers: range | None = None,
    ) -> list[Attempt]:
        """The attempts of one method.

        Args:
            recipe: the method.
            baseline: attempts of the method that it is compared with.
            test: ends the method when it is decided; None: all problems are solved.
            numbers: of the problems to solve; None: all.
        """
        numbers = range(len(self._problems)) if numbers is None else numbers
        problems = {number: self._problems[number] for number in numbers}
        finished = self._journal.attempts(recipe.name, self._problems)
        finished = [attempt for attempt in finished if attempt.number in numbers]
        watch = _Watch(baseline, test) if test is not None else None
        if self._bar is not None:
            self._bar.begin(recipe.name)
        for attempt in finished:
            self._see(attempt, watch)

        def on_attempt(attempt: Attempt) -> None:
            self._journal.append("attempt", attempt.to_dict())
            self._see(attempt, watch)

        def enough() -> bool:
            return watch is not None and watch.is_decided

        attempts = self._runner.attempts(recipe, problems, on_attempt, finished, enough)
        if self._bar is not None:
            self._bar.leave_out(len(problems) * recipe.repeats - len(attempts))
        return (
            attempts
            if watch is None
            else attempts[: watch.num_compared if watch.is_decided else None]
        )

    def _see(self, attempt: Attempt, watch: _Watch | None) -> None:
        shown = (attempt.method, attempt.key)
        if self._bar is not None and shown not in self._shown:
            self._shown.add(shown)
            self._bar(attempt)
        if watch is not None:
            watch.see(attempt)

    def _check(self, recipes: Sequence[Recipe]) -> None:
        repeated = any(recipe.repeats > 1 for recipe in recipes)
        if self._options.stop_level is not None and repeated:
            raise ParameterError(
                "methods cannot be stopped early that attempt problems several times",
                "the sequential test compares one attempt with one",
                "Leave out the repeats, or the early stop",
            )
        if self._options.stop_level is not None and "regret" in self._options.columns:
            raise ParameterError(
                "the regret needs all problems of every method",
                "methods may be stopped early",
                "Leave out the regret, or the early stop",
            )

    def _test(self) -> SequentialTest | None:
        level = self._options.stop_level
        return None if level is None else SequentialTest(level)

    # ---- further columns ----------------------------------------------------------------------

    def _columns(
        self, recipes: Sequence[Recipe], attempts_of: Mapping[str, Sequence[Attempt]]
    ) -> dict[str, dict[str, float]]:
        """Further figures by name, for each method."""
        columns: dict[str, dict[str, float]] = {recipe.name: {} for recipe in recipes}
        if "regret" in self._options.columns:
            chains = {one.name: self._chains(one, attempts_of[one.name]) for one in recipes}
            for name, value in regrets(chains).items():
                columns[name]["regret"] = value
        if "behaviours" in self._options.columns:
            for name, attempts in attempts_of.items():
                columns[name] |= count_behaviours([attempt.text for attempt in attempts])
        return columns

    def _chains(self, recipe: Recipe, attempts: Sequence[Attempt]) -> list[Chain]:
        """The chains of the attempts with their forced answers, those of the journal included."""
        interval, chains = self._options.interval, dict[tuple[int, int], Chain]()
        for record in self._journal.records("forced"):
            if (record["method"], record["interval"]) == (recipe.name, interval):
                key = (record["number"], record["sample"])
                chains[key] = Chain(tuple(record["outcomes"]), record["correct"])

        def on_chain(attempt: Attempt, chain: Chain) -> None:
            chains[attempt.key] = chain
            record = {"method": recipe.name, "number": attempt.number, "sample": attempt.sample}
            outcomes = {"outcomes": list(chain.forced), "correct": chain.correct}
            self._journal.append("forced", {**record, "interval": interval, **outcomes})

        missing = [attempt for attempt in attempts if attempt.key not in chains]
        if missing:
            if self._bar is not None:
                self._bar.begin(f"{recipe.name}, answers forced for the regret")
            force_answers(self._runner, recipe, missing, on_chain, interval)
        return [chains[attempt.key] for attempt in attempts]


def _compared(
    row: ReportRow,
    attempts_of: Mapping[str, Sequence[Attempt]],
    first: str,
    test: SequentialTest | None,
) -> ReportRow:
    """The row with its comparison with the first method, on the problems that it has solved."""
    numbers = {attempt.number for attempt in attempts_of[row.method]}
    pairs = [
        outcomes_of(a for a in attempts_of[name] if a.number in numbers)
        for name in (first, row.method)
    ]
    paired = compare_pairs(first, *pairs)
    if test is not None:
        paired = replace(paired, p=test.p, test="sequential")
    return replace(row, paired=paired)


class _Watch:
    """Feeds a sequential test with the outcomes of two methods, in the order of the problems.

    Args:
        baseline: attempts of the first method, one at each problem.
        test: receives the outcomes.

    Attributes:
        num_compared: problems whose outcomes the test has received.
    """

    def __init__(self, baseline: Sequence[Attempt], test: SequentialTest) -> None:
        self._first = {attempt.number: attempt.correct for attempt in baseline}
        self._second: dict[int, bool] = {}
        self._test, self.num_compared = test, 0

    @property
    def is_decided(self) -> bool:
        return self._test.is_decided

    def see(self, attempt: Attempt) -> None:
        """Record an attempt of the second method, in any order."""
        self._second[attempt.number] = attempt.correct
        while self.num_compared in self._second and not self.is_decided:
            number = self.num_compared
            self._test.add(self._first[number], self._second[number])
            self.num_compared += 1
