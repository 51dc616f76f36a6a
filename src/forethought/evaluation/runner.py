"""Solves problems with a method, many at once, and counts what it cost; compares several methods.

Each method gets an engine of its own: in a shared one, later methods would find the prompts of the
first in the prefix index, and their counts of prefilled tokens would be too low. The tokens of a
server are those that it reports.

``compare`` shows a progress bar on standard error and prints its report: tables, the path of a
plot, one JSON line. The rest of this folder prints nothing.
"""

from __future__ import annotations

import asyncio
import queue
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.evaluation import IN_FLIGHT
from forethought.evaluation.lockstep import Lockstep
from forethought.evaluation.problems import Grader, Problem, user_prompt
from forethought.evaluation.recipe import Recipe
from forethought.evaluation.report import (
    ProgressBar,
    Proportion,
    ReportRow,
    check_installed,
    count_of,
    json_line,
    make_folder,
    race_row,
    race_table,
    save_plot,
    table,
)
from forethought.methods import worker_tags
from forethought.outputs import Usage
from forethought.scaffolding.result import ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.worker import Worker

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM


Prompt = str | list[int]
QUESTION = "{question}"
"""The placeholder of a prompt format."""


Call = Callable[[Callable[[], Any]], Any]
"""Calls a function and returns its result."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One problem, solved by one method."""

    method: str
    problem: Problem
    text: str
    correct: bool


class EvaluationRunner:
    """Runs methods over problems.

    Args:
        open_llm: builds the model with an empty KV cache, or a worker for a server; called once for
            each method.
        seed: from which every problem's seed is drawn; the same for every method.
        in_flight: chains of thought under way at once, over all problems. With a
            ``max_batch_size`` of twice as many, an engine runs their forks in the same steps.
        instruction: appended to every question, such as to box the answer.
        prompt_format: the prompt in the model's own format, with ``{question}`` where the question
            goes; None: the chat template where there is one, and the question alone elsewhere.
        grader: compares answers with the reference.
    """

    def __init__(
        self,
        open_llm: Callable[[], AsyncLLM | Worker],
        *,
        seed: int = 0,
        in_flight: int = IN_FLIGHT,
        instruction: str = "",
        prompt_format: str | None = None,
        grader: Grader | None = None,
    ) -> None:
        if in_flight < 1:
            raise ParameterError("invalid in_flight", f"got {in_flight}", "Allow at least 1")
        self._open_llm, self._seed, self._in_flight = open_llm, seed, in_flight
        if prompt_format is not None and QUESTION not in prompt_format:
            raise ParameterError(
                "invalid prompt format",
                f"{prompt_format!r} has no {QUESTION}",
                f"Write {QUESTION} where the question goes",
            )
        self._instruction, self._grader = instruction, grader or Grader()
        self._format = prompt_format

    def run(
        self,
        recipe: Recipe,
        problems: Sequence[Problem],
        on_attempt: Callable[[Attempt], None] = lambda attempt: None,
    ) -> ReportRow:
        """Solve all problems and grade them as they finish.

        Args:
            recipe: the method.
            problems: at least one.
            on_attempt: called for each, in the order in which they finish.

        Raises:
            UsageError: a prompt does not fit, or no problems.
            Exception: of the first problem that fails; the others are ended.
        """
        opened = self._open_llm()
        source = _Server(opened) if isinstance(opened, Worker) else _Engine(opened)
        try:
            prompts = [self._prompt(source, problem, recipe.is_chat) for problem in problems]
            source.begin()
            began, right, usage = time.perf_counter(), 0, Usage()
            for number, text, used in self._answers(recipe, prompts, source):
                problem, usage = problems[number], usage + used
                correct = self._grader.grade(text, problem.answer)
                right += correct
                on_attempt(Attempt(recipe.name, problem, text, correct))
            seconds = time.perf_counter() - began
            decoded, prefilled = source.spent(usage)
        finally:
            source.close()
        return ReportRow(recipe.name, Proportion(right, len(problems)), decoded, prefilled, seconds)

    def _answers(
        self, recipe: Recipe, prompts: Sequence[Prompt], source: _Source
    ) -> Iterator[tuple[int, str, Usage]]:
        """Number, text and tokens of each answer, as they come."""
        workers = dict.fromkeys(worker_tags(recipe.controller), source.worker) | dict(
            recipe.workers
        )
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        at_once = max(1, self._in_flight // recipe.chains)

        def submit() -> list[ScaffoldingResult]:
            results = []
            for number, prompt in enumerate(prompts):
                params = {**recipe.sampling_params, "seed": self._seed_of(number)}
                results.append(scaffolding.generate_async(prompt, sampling_params=params))
                results[-1].on_finish(partial(ended.put, number))
            return results

        with (
            source.calling() as call,
            call(lambda: ScaffoldingLlm(recipe.controller, workers, at_once)) as scaffolding,
        ):
            results = call(submit)
            for _ in results:
                number = ended.get()
                output = results[number].result().output
                yield number, (output.text if output else None) or "", results[number].usage

    def _prompt(self, source: _Source, problem: Problem, is_chat: bool) -> Prompt:
        question = problem.question
        if self._instruction:
            question = f"{question}\n\n{self._instruction}"
        if self._format is not None:
            return self._format.replace(QUESTION, question)
        return question if is_chat else source.ask(question)

    def _seed_of(self, number: int) -> int:
        return random.Random(f"{self._seed}/{number}").getrandbits(48)


class _Source(Protocol):
    """An engine or a server."""

    @property
    def worker(self) -> Worker:
        """Executes the tasks."""

    def ask(self, question: str) -> Prompt:
        """The prompt of a user's question."""

    def begin(self) -> None:
        """Begin to count tokens."""

    def calling(self) -> AbstractContextManager[Call]:
        """Yields what calls functions on the event loop of the methods."""

    def spent(self, usage: Usage) -> tuple[int, int]:
        """Tokens decoded and prefilled since ``begin``; ``usage`` is the sum over the requests."""

    def close(self) -> None:
        """Shut it down."""


class _Engine:
    """An engine of its own; its counters give the tokens."""

    def __init__(self, llm: AsyncLLM) -> None:
        from forethought.scaffolding.workers.local import EngineWorker

        self._llm, self.worker = llm, EngineWorker(llm)

    def ask(self, question: str) -> Prompt:
        """Through the chat template, where there is one."""
        return user_prompt(self._llm, question)

    def begin(self) -> None:
        _warm_up(self._llm)
        self._before = self._llm.stats

    @contextmanager
    def calling(self) -> Iterator[Call]:
        """Calls run on an event loop that the engine waits for between its steps."""
        with Lockstep(self._llm) as lockstep:
            yield lockstep.call

    def spent(self, usage: Usage) -> tuple[int, int]:
        before, after = self._before, self._llm.stats
        return after.decoded - before.decoded, after.prefilled - before.prefilled

    def close(self) -> None:
        self.worker.shutdown()
        self._llm.shutdown()


class _Server:
    """A server: it reports its tokens, and applies its model's chat template."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def ask(self, question: str) -> Prompt:
        return question

    def begin(self) -> None:
        """Nothing to do."""

    @contextmanager
    def calling(self) -> Iterator[Call]:
        """Calls run on the calling thread: there is no engine to hold back."""
        yield lambda function: function()

    def spent(self, usage: Usage) -> tuple[int, int]:
        return usage.decoded, usage.prefilled

    def close(self) -> None:
        self.worker.shutdown()


def _warm_up(llm: AsyncLLM) -> None:
    """Do first-time work before the clock starts; one token fills no page of the prefix index."""
    asyncio.run(llm.generate([0], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))


class EvaluationProgress(ProgressBar):
    """One bar over all methods; called with each ``Attempt``.

    Args:
        total: attempts there will be.

    Raises:
        DependencyError: tqdm is not installed.
    """

    def __init__(self, total: int) -> None:
        super().__init__(total, "problem")
        self._label, self._num_right, self._num_seen = "", 0, 0

    def begin(self, label: str) -> None:
        """The next method is about to be loaded."""
        self._label, self._num_right, self._num_seen = label, 0, 0
        self._bar.set_postfix_str("", refresh=False)
        self._bar.set_description(f"{label}, warming up")

    def __call__(self, attempt: Attempt) -> None:
        """Advance by one attempt."""
        if not self._num_seen:
            self._bar.set_description(self._label, refresh=False)
        self._num_right, self._num_seen = self._num_right + attempt.correct, self._num_seen + 1
        self._bar.set_postfix_str(f"{self._num_right}/{self._num_seen} right", refresh=False)
        self._bar.update()


RACE_PROBLEMS = 10
"""Problems of a race: enough for a figure, few enough for a demo."""


@dataclass(frozen=True, slots=True)
class Race:
    """A method that solves problems one at a time, with drafts or without."""

    recipe: Recipe
    drafts: str
    """Name of the drafter; empty: plain decoding."""
    runner: EvaluationRunner
    """With one chain in flight."""


def compare(
    recipes: Sequence[Recipe],
    problems: Sequence[Problem],
    runner: EvaluationRunner,
    folder: Path,
    out: TextIO | None = None,
    races: Sequence[Race] = (),
) -> list[ReportRow]:
    """Run every recipe on all problems and report.

    Args:
        recipes: the first is what the others' tokens are compared with.
        problems: solved by each.
        runner: runs them.
        folder: for ``comparison.png`` and ``comparison.json``; made if missing.
        out: the report is written to it; None: standard output.
        races: run and reported first, one problem at a time: the latency of a single user.

    Raises:
        DependencyError: matplotlib or tqdm is not installed.
        UsageError: the folder cannot be made.
        Exception: as ``EvaluationRunner.run``.
    """
    out = out or sys.stdout
    check_installed()
    make_folder(folder)
    single = list(problems)[:RACE_PROBLEMS]
    with EvaluationProgress(len(recipes) * len(problems) + len(races) * len(single)) as bar:
        raced = [_run(race, single, bar) for race in races]
        rows = [_solve(runner, recipe, problems, bar)[0] for recipe in recipes]
    plot = save_plot(rows, folder / "comparison.png", f"{count_of(len(problems), 'problem')}")
    line = json_line(rows, [race_row(one.drafts, one.row, len(single)) for one in raced])
    (folder / "comparison.json").write_text(line + "\n", encoding="utf-8")
    if raced:
        table_of = [(one.drafts, one.row) for one in raced]
        out.write(f"{count_of(len(single), 'problem')}, one at a time:\n\n")
        out.write(f"{race_table(table_of, len(single))}\n\n")
        out.writelines(f"{note}\n" for note in _notes(raced))
        out.write("\n")
    out.write(f"{count_of(len(problems), 'problem')}, many at once:\n\n{table(rows)}\n\n")
    out.write(f"plot: {plot}\n{line}\n")
    return rows


@dataclass(frozen=True, slots=True)
class _Raced:
    """A race that has been run."""

    drafts: str
    row: ReportRow
    texts: dict[str, str]
    """Answer by problem."""


def _run(race: Race, problems: Sequence[Problem], bar: EvaluationProgress) -> _Raced:
    return _Raced(race.drafts, *_solve(race.runner, race.recipe, problems, bar, race.drafts))


def _solve(
    runner: EvaluationRunner,
    recipe: Recipe,
    problems: Sequence[Problem],
    bar: EvaluationProgress,
    drafts: str = "",
) -> tuple[ReportRow, dict[str, str]]:
    """The row and the answers of one method."""
    texts: dict[str, str] = {}

    def on_attempt(attempt: Attempt) -> None:
        texts[attempt.problem.name] = attempt.text
        bar(attempt)

    bar.begin(f"{recipe.name}, {drafts} drafts" if drafts else recipe.name)
    return runner.run(recipe, problems, on_attempt), texts


def _notes(raced: Sequence[_Raced]) -> list[str]:
    """What drafts have changed beside the time, for each method that ran with and without."""
    without = {one.row.method: one for one in raced if not one.drafts}
    notes = []
    for one in raced:
        plain = without.get(one.row.method)
        if one.drafts and plain is not None:
            notes += _changes(one, plain)
    return notes


def _changes(drafted: _Raced, plain: _Raced) -> list[str]:
    """What drafts have changed in the answers of one method and their tokens."""
    method, count = drafted.row.method, len(plain.texts)
    changed = sum(drafted.texts[name] != text for name, text in plain.texts.items())
    if changed:
        return [
            f"{method}: {drafted.drafts} drafts changed {changed} of {count} answers: between "
            "tokens that are nearly as likely rounding decides; in float32 none would change"
        ]
    notes = [f"{method}: the same answers with {drafted.drafts} drafts, character for character"]
    if drafted.row.tokens_generated != plain.row.tokens_generated:
        notes[0] += (
            f"; {drafted.row.tokens_generated:,} tokens generated for them instead of "
            f"{plain.row.tokens_generated:,}: a chain that draws several tokens a step is further "
            "ahead by the time that a probe ends it"
        )
    return notes
