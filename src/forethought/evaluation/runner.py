"""Solves problems with a method, many at once, and counts what it cost.

Each method gets an engine of its own: with one for all, the prompts that the first has paid for
would be in the prefix index for the others, and their tokens would be too few.
"""

from __future__ import annotations

import asyncio
import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from forethought.errors import ParameterError
from forethought.evaluation import IN_FLIGHT
from forethought.evaluation.grader import Grader
from forethought.evaluation.lockstep import Lockstep
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import Recipe
from forethought.evaluation.report import Row
from forethought.evaluation.statistics import Proportion
from forethought.methods import worker_tags
from forethought.params import SamplingParams
from forethought.scaffolding.result import ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.workers.local import EngineWorker
from forethought.text.async_llm import AsyncLLM

Prompt = str | list[int]


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
        open_llm: builds the model with an empty KV cache; called once for each method.
        seed: from which every problem's seed is drawn; the same for every method.
        in_flight: chains of thought under way at once, over all problems. An engine with room for
            twice as many sequences in a step (``max_batch_size``) runs their forks beside them.
        instruction: put behind every question, such as a wish for boxed answers.
        grader: tells right from wrong.
    """

    def __init__(
        self,
        open_llm: Callable[[], AsyncLLM],
        *,
        seed: int = 0,
        in_flight: int = IN_FLIGHT,
        instruction: str = "",
        grader: Grader | None = None,
    ) -> None:
        if in_flight < 1:
            raise ParameterError("invalid in_flight", f"got {in_flight}", "Allow at least 1")
        self._open_llm, self._seed, self._in_flight = open_llm, seed, in_flight
        self._instruction, self._grader = instruction, grader or Grader()

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
        llm = self._open_llm()
        try:
            prompts = [self._prompt(llm, problem) for problem in problems]
            _warm_up(llm)
            before, began = llm.stats, time.perf_counter()
            right = 0
            for number, text in self._answers(recipe, prompts, llm):
                problem = problems[number]
                correct = self._grader.grade(text, problem.answer)
                right += correct
                on_attempt(Attempt(recipe.name, problem, text, correct))
            seconds, after = time.perf_counter() - began, llm.stats
        finally:
            llm.shutdown()
        return Row(
            recipe.name,
            Proportion(right, len(problems)),
            after.decoded - before.decoded,
            after.prefilled - before.prefilled,
            seconds,
        )

    def _answers(
        self, recipe: Recipe, prompts: Sequence[Prompt], llm: AsyncLLM
    ) -> Iterator[tuple[int, str]]:
        """Number and text of each answer, as they come."""
        worker = EngineWorker(llm)
        workers = dict.fromkeys(worker_tags(recipe.controller), worker)
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
            Lockstep(llm) as lockstep,
            lockstep.call(
                lambda: ScaffoldingLlm(recipe.controller, workers, at_once)
            ) as scaffolding,
        ):
            results = lockstep.call(submit)
            for _ in results:
                number = ended.get()
                output = results[number].result().output
                yield number, (output.text if output else None) or ""
        worker.shutdown()

    def _prompt(self, llm: AsyncLLM, problem: Problem) -> Prompt:
        question = problem.question
        if self._instruction:
            question = f"{question}\n\n{self._instruction}"
        if not llm.tokenizer.chat_template:
            return question
        return llm.chat_prompt([{"role": "user", "content": question}])

    def _seed_of(self, number: int) -> int:
        return random.Random(f"{self._seed}/{number}").getrandbits(48)


def _warm_up(llm: AsyncLLM) -> None:
    """Let first-time work happen before the clock starts; one token fills no page."""
    asyncio.run(llm.generate([0], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
