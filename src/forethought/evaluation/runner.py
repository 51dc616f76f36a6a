"""Solves problems with a method, many at once, and counts the cost.

Each method gets an engine of its own: in a shared one, later methods would match the prompts of the
first in the prefix index, and their counts of prefilled tokens would be too low. The tokens of an
attempt are those of its request, with all inner work: on the engine every token that went through
the network for it, on a server what it reports.
"""

from __future__ import annotations

import asyncio
import queue
import random
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forethought.config.sampling import SamplingParams
from forethought.errors import BudgetExceeded, ParameterError
from forethought.evaluation import IN_FLIGHT
from forethought.evaluation.graders import MathGrader
from forethought.evaluation.journal import Attempt
from forethought.evaluation.lockstep import Lockstep
from forethought.evaluation.problems import AnswerFinder, Grader, Problem, solves, user_prompt
from forethought.evaluation.recipe import Recipe
from forethought.evaluation.report import (
    ProgressBar,
    ReportRow,
    row_of,
)
from forethought.methods import worker_tags
from forethought.outputs import Usage
from forethought.scaffolding.budget import Budget
from forethought.scaffolding.result import ScaffoldingOutput, ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.task import ChatTask
from forethought.scaffolding.worker import Worker

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM


Prompt = str | list[int]
QUESTION = "{question}"
"""The placeholder of a prompt format."""


OnAttempt = Callable[[Attempt], object]
Problems = Sequence[Problem] | Mapping[int, Problem]
Call = Callable[[Callable[[], Any]], Any]
"""Calls a function and returns its result."""


class EvaluationRunner:
    """Runs methods over problems.

    Args:
        open_llm: builds the model with an empty KV cache, or a worker for a server; called once for
            each method.
        seed: from which every problem's seed is drawn; the same for every method.
        in_flight: chains of thought that run at once, over all problems. With a ``max_batch_size``
            of twice as many, an engine runs their forks in the same steps.
        instruction: appended to every question, such as to box the answer.
        prompt_format: the prompt in the model's own format, with ``{question}`` where the question
            goes; None: the chat template where there is one, and the question alone elsewhere.
        grader: decides which answers are right; by default a ``MathGrader``.
        adapter: the LoRA adapter of the model that answers, by its name; None: the model alone.

    Attributes:
        trace_dir: folder where the trace of each attempt is written; None: there are no traces.
    """

    trace_dir: Path | None = None

    def __init__(
        self,
        open_llm: Callable[[], AsyncLLM | Worker],
        *,
        seed: int = 0,
        in_flight: int = IN_FLIGHT,
        instruction: str = "",
        prompt_format: str | None = None,
        grader: Grader | None = None,
        adapter: str | None = None,
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
        self._instruction, self._grader = instruction, grader or MathGrader()
        self._format, self._adapter = prompt_format, adapter

    def run(
        self,
        recipe: Recipe,
        problems: Sequence[Problem],
        on_attempt: OnAttempt = lambda attempt: None,
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
        return row_of(recipe.name, self.attempts(recipe, problems, on_attempt))

    def attempts(
        self,
        recipe: Recipe,
        problems: Problems,
        on_attempt: OnAttempt = lambda attempt: None,
        finished: Sequence[Attempt] = (),
        enough: Callable[[], bool] = lambda: False,
    ) -> list[Attempt]:
        """Attempt all problems, each as often as the recipe says.

        Args:
            recipe: the method.
            problems: at least one; in their order, or by number, from which their seeds are made.
            on_attempt: called for each new attempt, in the order in which they finish.
            finished: attempts of an earlier run, which are not made again.
            enough: called after each attempt, and before the first; True ends the rest.

        Returns:
            All attempts, the earlier ones included, by problem and sample.
        """
        if not isinstance(problems, Mapping):
            problems = dict(enumerate(problems))
        attempts = {attempt.key: attempt for attempt in finished}
        keys = [(number, sample) for number in problems for sample in range(recipe.repeats)]
        missing = [key for key in keys if key not in attempts]
        if missing and not enough():
            began = max((attempt.elapsed for attempt in finished), default=0.0)
            with closing(self._new_attempts(recipe, problems, missing, began)) as new:
                for attempt in new:
                    attempts[attempt.key] = attempt
                    on_attempt(attempt)
                    if enough():
                        break
        return [attempts[key] for key in keys if key in attempts]

    def _new_attempts(
        self,
        recipe: Recipe,
        problems: Mapping[int, Problem],
        keys: Sequence[tuple[int, int]],
        began: float,
    ) -> Generator[Attempt]:
        """The attempts with these keys as they finish; the clock begins at ``began`` seconds."""
        with self.open_source() as source:
            requests = [
                Request(
                    key,
                    self.prompt(source, problems[key[0]], recipe),
                    {**recipe.sampling_params, "seed": self._seed_of(*key)},
                    problems[key[0]].question,
                    recipe.budget,
                )
                for key in keys
            ]
            source.begin()
            zero = time.perf_counter() - began
            with closing(self.results(recipe, requests, source)) as results:
                for request, result in results:
                    self._save_trace(recipe, request, result)
                    attempt = self._graded(recipe, problems[request.key[0]], request, result)
                    yield replace(attempt, elapsed=round(time.perf_counter() - zero, 3))

    @contextmanager
    def open_source(self) -> Iterator[Source]:
        """The model, with an empty KV cache, or the server."""
        opened = self._open_llm()
        source = _Server(opened) if isinstance(opened, Worker) else _Engine(opened, self._adapter)
        try:
            yield source
        finally:
            source.close()

    def results(
        self, recipe: Recipe, requests: Sequence[Request], source: Source
    ) -> Generator[tuple[Request, ScaffoldingResult]]:
        """Run requests, many at once; each with its result as soon as it is over."""
        workers = dict.fromkeys(worker_tags(recipe.controller), source.worker) | dict(
            recipe.workers
        )
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        at_once = max(1, self._in_flight // recipe.chains)

        def submit() -> list[ScaffoldingResult]:
            results = []
            for index, request in enumerate(requests):
                result = scaffolding.generate_async(
                    request.prompt,
                    sampling_params=request.params,
                    budget=request.budget,
                    question=request.question,
                )
                result.on_finish(partial(ended.put, index))
                results.append(result)
            return results

        with (
            source.calling() as call,
            call(
                lambda: ScaffoldingLlm(
                    recipe.controller, workers, at_once, trace=self.trace_dir is not None
                )
            ) as scaffolding,
        ):
            results = call(submit)
            for _ in results:
                index = ended.get()
                yield requests[index], results[index]

    def _save_trace(self, recipe: Recipe, request: Request, result: ScaffoldingResult) -> None:
        if self.trace_dir is not None and result.trace is not None:
            result.trace.save(self.trace_dir / trace_name(recipe.name, *request.key))

    def _graded(
        self, recipe: Recipe, problem: Problem, request: Request, result: ScaffoldingResult
    ) -> Attempt:
        """The attempt of a finished request. A spent budget is an attempt without an answer."""
        error = ""
        try:
            output = result.result().output
        except BudgetExceeded as exceeded:
            output, error = None, exceeded.what
        text = (output and output.text) or ""
        is_cut = output is not None and output.finish_reason == "length"
        rule = self._answer_rule(text, is_cut)
        number, sample = request.key
        return Attempt(
            recipe.name,
            problem,
            text,
            rule != "" and self.grade(text, problem, is_cut=is_cut),
            number,
            sample,
            usage=result.usage + Usage(),  # a copy: it may still change
            num_answer_tokens=_num_tokens(output),
            candidates=self._graded_candidates(output, problem),
            error=error,
            answer_rule=rule,
            is_cut=is_cut,
        )

    def _answer_rule(self, text: str, is_cut: bool) -> str | None:
        """The rule that extracts the answer of a text; empty if none does, None if unknown."""
        if not isinstance(self._grader, AnswerFinder):
            return None
        extracted = self._grader.answer_of(text, is_cut=is_cut)
        return "" if extracted is None else extracted.rule

    def grade(self, text: str, problem: Problem, *, is_cut: bool = False) -> bool:
        """Whether a text, which ``is_cut`` if a limit of tokens ended it, solves a problem."""
        return solves(self._grader, text, problem, is_cut=is_cut)

    def _graded_candidates(
        self, output: ScaffoldingOutput | None, problem: Problem
    ) -> tuple[bool | None, ...]:
        """Whether each sample of a method is right.

        Where some were ended early, the others are a biased selection, and none is graded.
        """
        if output is None or None in output.candidates:
            return (None,) * len(output.candidates if output else ())
        texts = [
            (text or "", number in output.cut_candidates)
            for number, text in enumerate(output.candidates)
        ]
        grades = {one: self.grade(one[0], problem, is_cut=one[1]) for one in set(texts)}
        return tuple(grades[one] for one in texts)

    def prompt(self, source: Source, problem: Problem, recipe: Recipe) -> Prompt | ChatTask:
        """The prompt of a problem for a method."""
        question = problem.question
        if self._instruction:
            question = f"{question}\n\n{self._instruction}"
        form = recipe.prompt_format or self._format
        if form is not None:
            return form.replace(QUESTION, question)
        return ChatTask.create_from_prompt(question) if recipe.is_chat else source.ask(question)

    def _seed_of(self, number: int, sample: int) -> int:
        """The seed of an attempt, which does not depend on the other attempts."""
        path = f"{self._seed}/{number}" + (f"/{sample}" if sample else "")
        return random.Random(path).getrandbits(48)


def trace_name(method: str, number: int, sample: int = 0) -> str:
    """The name of the trace file of an attempt: method, problem and sample."""
    name = re.sub(r"[^\w@+.-]+", "_", method)
    return f"{name},{number},{sample}.json" if sample else f"{name},{number}.json"


def _num_tokens(output: ScaffoldingOutput | None) -> int:
    if output is None:
        return 0
    return output.usage.completion_tokens if output.token_ids is None else len(output.token_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """A request of one attempt."""

    key: tuple[int, int]
    """Number of the problem, and which attempt at it."""
    prompt: Prompt | ChatTask
    params: Mapping[str, Any]
    """Sampling fields by name."""
    question: str | None = None
    """The problem's own text, for verifiers and reward models; None: the prompt."""
    budget: Budget = field(default_factory=Budget)


class Source(Protocol):
    """An engine or a server."""

    @property
    def worker(self) -> Worker:
        """Executes the tasks."""

    def ask(self, question: str) -> Prompt:
        """The prompt of a user's question."""

    def begin(self) -> None:
        """Prepare the source, before the clock starts."""

    def extended(self, prompt: Prompt, text: str, share: float, suffix: str) -> Prompt:
        """A prompt with the first ``share`` of the tokens of ``text`` appended, and a suffix.

        Raises:
            ParameterError: the prompt is a chat's, which takes no text.
        """

    def calling(self) -> AbstractContextManager[Call]:
        """Yields a function that calls functions on the event loop of the methods."""

    def close(self) -> None:
        """Shut it down."""


class _Engine:
    """An engine of its own."""

    def __init__(self, llm: AsyncLLM, adapter: str | None) -> None:
        from forethought.workers.local import EngineWorker

        self._llm, self.worker = llm, EngineWorker(llm, adapter=adapter)

    def ask(self, question: str) -> Prompt:
        return user_prompt(self._llm, question)

    def begin(self) -> None:
        _warm_up(self._llm)

    def extended(self, prompt: Prompt, text: str, share: float, suffix: str) -> Prompt:
        """In tokens; the text is tokenized again."""
        encode = self._llm.tokenizer.encode
        start = encode(prompt) if isinstance(prompt, str) else prompt
        ids = encode(text, add_special_tokens=False)
        prefix = ids[: round(share * len(ids))]
        return [*start, *prefix, *encode(suffix, add_special_tokens=False)]

    @contextmanager
    def calling(self) -> Iterator[Call]:
        """Calls run on an event loop that the engine waits for between its steps."""
        with Lockstep(self._llm) as lockstep:
            yield lockstep.call

    def close(self) -> None:
        self.worker.shutdown()
        self._llm.shutdown()


class _Server:
    """A server: it applies its model's chat template, unless the prompt is in its format."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def extended(self, prompt: Prompt, text: str, share: float, suffix: str) -> Prompt:
        """In characters: the tokens are not known here."""
        if not isinstance(prompt, str):
            raise ParameterError("invalid prompt", "token ids for a server", "Give text")
        return prompt + text[: round(share * len(text))] + suffix

    def ask(self, question: str) -> Prompt:
        return question

    def begin(self) -> None:
        """Nothing is to be done."""

    @contextmanager
    def calling(self) -> Iterator[Call]:
        """Calls run on the calling thread: there is no engine to hold back."""
        yield lambda function: function()

    def close(self) -> None:
        self.worker.shutdown()


def _warm_up(llm: AsyncLLM) -> None:
    """Do first-time work before the clock starts; one token fills no page of the prefix index."""
    asyncio.run(llm.generate([0], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))


class EvaluationProgress(ProgressBar):
    """One bar over all methods; called with each ``Attempt``.

    Args:
        total: number of attempts.
    """

    def __init__(self, total: int) -> None:
        super().__init__(total, "problem")
        self._label, self._num_right, self._num_seen = "", 0, 0

    def begin(self, label: str) -> None:
        """Called when the next method is about to be loaded."""
        self._label, self._num_right, self._num_seen = label, 0, 0
        self._bar.set_postfix_str("", refresh=False)
        self._bar.set_description(f"{label}, warming up")

    def __call__(self, attempt: Attempt) -> None:
        """Advance by one attempt."""
        if not self._num_seen:
            self._bar.set_description(self._label, refresh=False)
        self._num_right, self._num_seen = self._num_right + attempt.correct, self._num_seen + 1
        share = self._num_right / self._num_seen
        shown = f"{self._num_right}/{self._num_seen} right, {share:.0%}"
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def leave_out(self, count: int) -> None:
        """Subtract attempts that will not be made."""
        self._bar.total -= count
        self._bar.refresh()
