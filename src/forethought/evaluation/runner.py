"""Solves problems with a method, many at once, and counts what it cost.

Each method gets an engine of its own: with one for all, the prompts that the first has paid for
would be in the prefix index for the others, and their tokens would be too few. A server is another
one's: its tokens are those that it reports.
"""

from __future__ import annotations

import asyncio
import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from forethought.errors import ParameterError
from forethought.evaluation import IN_FLIGHT
from forethought.evaluation.grader import Grader
from forethought.evaluation.lockstep import Lockstep
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import Recipe
from forethought.evaluation.report import Row
from forethought.evaluation.statistics import Proportion
from forethought.methods import worker_tags
from forethought.outputs import Usage
from forethought.params import SamplingParams
from forethought.scaffolding.result import ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.worker import Worker

if TYPE_CHECKING:
    from forethought.text.async_llm import AsyncLLM

Prompt = str | list[int]
QUESTION = "{question}"
"""Where a prompt format has the question."""


Call = Callable[[Callable[[], Any]], Any]
"""Calls a function, and returns what it does."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One problem, solved by one method."""

    method: str
    problem: Problem
    text: str
    correct: bool


class Runner:
    """Runs methods over problems.

    Args:
        open_llm: builds the model with an empty KV cache, or a worker for a server; called once for
            each method.
        seed: from which every problem's seed is drawn; the same for every method.
        in_flight: chains of thought under way at once, over all problems. An engine with room for
            twice as many sequences in a step (``max_batch_size``) runs their forks beside them.
        instruction: put behind every question, such as a wish for boxed answers.
        prompt_format: the prompt in the model's own format, with ``{question}`` where the question
            goes; None: the chat template where there is one, and the question alone elsewhere.
        grader: tells right from wrong.
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
    ) -> Row:
        """Solve all problems and grade them as they finish.

        Args:
            recipe: the method.
            problems: at least one.
            on_attempt: called for each, in the order in which they finish.

        Raises:
            UsageError: a prompt does not fit, or no problems.
            Exception: what the first failing problem failed with; the others are ended.
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
        return Row(recipe.name, Proportion(right, len(problems)), decoded, prefilled, seconds)

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
    """What answers: an engine, or a server."""

    @property
    def worker(self) -> Worker:
        """Executes the tasks."""

    def ask(self, question: str) -> Prompt:
        """The prompt of a user's question."""

    def begin(self) -> None:
        """From now on tokens are counted."""

    def calling(self) -> AbstractContextManager[Call]:
        """Calls functions where the event loop of the methods is to run."""

    def spent(self, usage: Usage) -> tuple[int, int]:
        """Tokens decoded and prefilled since; ``usage`` is what the requests report themselves."""

    def close(self) -> None:
        """Give back everything."""


class _Engine:
    """An engine of its own, whose counters say what was spent."""

    def __init__(self, llm: AsyncLLM) -> None:
        from forethought.scaffolding.workers.local import EngineWorker

        self._llm, self.worker = llm, EngineWorker(llm)

    def ask(self, question: str) -> Prompt:
        """Through the chat template, where there is one."""
        if not self._llm.tokenizer.chat_template:
            return question
        return self._llm.chat_prompt([{"role": "user", "content": question}])

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
    """A server, which says itself what was spent, and knows its model's chat template."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def ask(self, question: str) -> Prompt:
        return question

    def begin(self) -> None:
        """Nothing to do."""

    @contextmanager
    def calling(self) -> Iterator[Call]:
        """Calls run where they are made: a server is not waited for."""
        yield lambda function: function()

    def spent(self, usage: Usage) -> tuple[int, int]:
        return usage.decoded, usage.prefilled

    def close(self) -> None:
        self.worker.shutdown()


def _warm_up(llm: AsyncLLM) -> None:
    """Let first-time work happen before the clock starts; one token fills no page."""
    asyncio.run(llm.generate([0], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
