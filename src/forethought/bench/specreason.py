"""SpecReason beside its two models alone: accuracy and time of whole problems, at batch 1.

Each problem is solved by the base model, by the small one and by SpecReason in turn, so that what
else the machine does hits all three alike. The speedup is the ratio of the summed times; its
interval comes from resampling the problems (bootstrap).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from forethought.evaluation.problems import Grader, Problem, solves
from forethought.evaluation.report import aligned
from forethought.evaluation.statistics import PairedComparison, Proportion, compare_pairs
from forethought.methods.specreason import SpecReasonController
from forethought.scaffolding.controller import Controller, NativeGenerationController
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.workers.local import EngineWorker

BASE, SMALL, SPECREASON = "base model", "small model", "specreason"
NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Solved:
    """One problem, solved once."""

    correct: bool
    seconds: float
    base_tokens: int
    """That the base model decoded, one for each score among them."""
    small_tokens: int
    num_accepted: int = 0
    num_rejected: int = 0


@dataclass(frozen=True, slots=True)
class TwoModels:
    """Solves problems with the base model, the small one, and both. Each problem's seed is its
    own.
    """

    base: EngineWorker
    small: EngineWorker
    controller: SpecReasonController
    grader: Grader
    params: Mapping[str, Any]

    def solve(
        self, problems: Sequence[Problem], on_problem: Callable[[], None] = lambda: None
    ) -> dict[str, list[Solved]]:
        """Method -> its attempts, one for each problem in their order."""
        tags, tag = SpecReasonController.WorkerTag, NativeGenerationController.WorkerTag.GENERATION
        runs: dict[str, tuple[Controller, dict[Any, EngineWorker]]] = {
            BASE: (NativeGenerationController(), {tag: self.base}),
            SMALL: (NativeGenerationController(), {tag: self.small}),
            SPECREASON: (self.controller, {tags.BASE: self.base, tags.SMALL: self.small}),
        }
        attempts: dict[str, list[Solved]] = {name: [] for name in runs}
        with ExitStack() as stack:
            llms = {name: stack.enter_context(ScaffoldingLlm(*run)) for name, run in runs.items()}
            for llm in llms.values():
                self._solve(llm, problems[0], 0)  # what is compiled on first use is not timed
            for number, problem in enumerate(problems):
                for name, llm in llms.items():
                    attempts[name].append(self._solve(llm, problem, number))
                on_problem()
        return attempts

    def _solve(self, llm: ScaffoldingLlm, problem: Problem, number: int) -> Solved:
        prompt = self._prompt(problem.question)
        before = [worker.llm.stats.decoded for worker in (self.base, self.small)]
        began = time.perf_counter()
        result = llm.generate(prompt, sampling_params={**self.params, "seed": number})
        seconds = time.perf_counter() - began
        after = [worker.llm.stats.decoded for worker in (self.base, self.small)]
        output = result.output
        assert output is not None, "generate raises where there is none"
        text, is_cut = output.text or "", output.finish_reason == "length"
        counts = output.meta.get("specreason", {})
        return Solved(
            solves(self.grader, text, problem, is_cut=is_cut),
            seconds,
            after[0] - before[0],
            after[1] - before[1],
            counts.get("accepted", 0),
            counts.get("rejected", 0),
        )

    def _prompt(self, question: str) -> str:
        tokenizer = self.base.tokenizer
        if not tokenizer.chat_template:
            return question
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(text)


@dataclass(frozen=True, slots=True)
class TwoModelsRow:
    """One of the three, over all problems."""

    method: str
    correct: Proportion
    seconds: float
    """Per problem."""
    speedup: float
    """Over the base model alone."""
    speedup_interval: tuple[float, float]
    base_tokens: float
    small_tokens: float
    share_accepted: float | None
    """Of the steps that were scored."""
    paired: PairedComparison | None
    """With the base model; None of itself."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        low, high = self.correct.interval()
        fields = {
            "method": self.method,
            "accuracy": round(self.correct.value, 4),
            "accuracy_ci": [round(low, 4), round(high, 4)],
            "seconds_per_problem": round(self.seconds, 5),
            "speedup": round(self.speedup, 3),
            "speedup_ci": [round(bound, 3) for bound in self.speedup_interval],
            "base_tokens": round(self.base_tokens, 1),
            "small_tokens": round(self.small_tokens, 1),
            "share_accepted": None
            if self.share_accepted is None
            else round(self.share_accepted, 4),
        }
        return fields | ({} if self.paired is None else self.paired.to_dict())


def rows(attempts_by_method: Mapping[str, Sequence[Solved]], seed: int = 0) -> list[TwoModelsRow]:
    """The rows of the table, from ``TwoModels.solve``; the base model's first."""
    return [
        _row(name, attempts_by_method[BASE], attempts, seed)
        for name, attempts in attempts_by_method.items()
    ]


def _row(name: str, base: Sequence[Solved], attempts: Sequence[Solved], seed: int) -> TwoModelsRow:
    count = len(attempts)
    scored = sum(attempt.num_accepted + attempt.num_rejected for attempt in attempts)
    outcomes = [[attempt.correct] for attempt in attempts]
    paired = compare_pairs(BASE, [[attempt.correct] for attempt in base], outcomes)
    pairs = [(one.seconds, other.seconds) for one, other in zip(base, attempts, strict=True)]
    return TwoModelsRow(
        name,
        Proportion(sum(attempt.correct for attempt in attempts), count),
        sum(attempt.seconds for attempt in attempts) / count,
        _ratio(pairs),
        ratio_interval(pairs, seed),
        sum(attempt.base_tokens for attempt in attempts) / count,
        sum(attempt.small_tokens for attempt in attempts) / count,
        sum(attempt.num_accepted for attempt in attempts) / scored if scored else None,
        None if name == BASE else paired,
    )


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs)


def ratio_interval(pairs: Sequence[tuple[float, float]], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the ratio of two sums, by resampling the pairs with replacement."""
    rng = random.Random(seed)
    ratios = sorted(_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLES))
    return ratios[round(0.025 * NUM_RESAMPLES)], ratios[round(0.975 * NUM_RESAMPLES) - 1]


def cells(table: Sequence[TwoModelsRow]) -> list[tuple[str, ...]]:
    """The table: head, then a tuple for each row."""
    head = (
        *("method", "accuracy", "95 % interval", "s per problem", "speedup", "95 % interval"),
        *("base tokens", "small tokens", "steps kept", "difference, p"),
    )
    lines: list[tuple[str, ...]] = [head]
    for row in table:
        low, high = row.correct.interval()
        slow, fast = row.speedup_interval
        paired = row.paired
        lines.append(
            (
                row.method,
                f"{row.correct.value:.1%}",
                f"{low:.1%} to {high:.1%}",
                f"{row.seconds:.3f}",
                f"{row.speedup:.2f}",
                f"{slow:.2f} to {fast:.2f}",
                f"{row.base_tokens:,.0f}",
                f"{row.small_tokens:,.0f}",
                "" if row.share_accepted is None else f"{row.share_accepted:.1%}",
                "" if paired is None else f"{100 * paired.difference:+.1f}, {paired.p:.2g}",
            )
        )
    return lines


def text(table: Sequence[TwoModelsRow]) -> str:
    """The table for a terminal."""
    return aligned(cells(table)) + "\n"


def json_line(table: Sequence[TwoModelsRow], **settings: Any) -> str:
    """The JSON object on one line, with its end."""
    report = {"benchmark": "specreason", **settings, "rows": [row.to_dict() for row in table]}
    return json.dumps(report) + "\n"
