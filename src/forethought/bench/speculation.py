"""Each drafter against plain decoding, interleaved in one engine.

A *run* decodes some prompts, ``batch`` of them at a time, with one variant. Every round runs all
variants once, beginning with another one each time, so that a disturbance of the machine falls on
all alike. A ratio is taken within its round; rows hold medians over the rounds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

from forethought.bench.report import BenchRow
from forethought.bench.variant import PLAIN, Variant
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.llm.llm import LLM
from forethought.outputs import SpeculationMetrics

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Outputs and costs of one run."""

    outputs: list[list[int]]
    """Generated ids of each prompt."""
    metrics: SpeculationMetrics
    """Counters of all prompts together."""
    seconds: float
    """Wall time, prefill included."""
    draft_seconds: float
    """Part of these spent drafting."""
    verify_seconds: float
    """Part of these in forward passes of the target."""

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(map(len, self.outputs))

    @property
    def speed(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds


def run_once(
    llm: LLM,
    variant: Variant,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    max_tokens: int,
    salt: str,
) -> BenchRun:
    """Generate greedily from all prompts, ``batch`` of them at a time: the next ones start when all
    of these have ended.

    Args:
        llm: has the variant's drafter.
        prompts: each as text or token ids.
        max_tokens: of each answer.
        salt: unique to the run, so that it shares neither prefixes nor pools of drafts with others.

    Raises:
        UsageError: a prompt does not fit, or the variant's drafter does not exist.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        cache_salt=salt,
        speculation=variant.speculation,
    )
    outputs, metrics = [], SpeculationMetrics()
    before, began = llm.stats, time.perf_counter()
    for first in range(0, len(prompts), batch):
        group: Any = list(prompts[first : first + batch])
        for result in llm.generate(group, params):
            (output,) = result.outputs
            outputs.append(output.token_ids)
            metrics += output.metrics or SpeculationMetrics()
    seconds, after = time.perf_counter() - began, llm.stats
    return BenchRun(
        outputs,
        metrics,
        seconds,
        after.draft_seconds - before.draft_seconds,
        after.forward_seconds - before.forward_seconds,
    )


MIN_PROMPTS = 8
"""Prompts of a run with a smaller batch, which then runs several times in a row."""
_WARM_UP_TOKENS = 8


class SpeculationBench:
    """Measures the drafters of an engine.

    Args:
        llm: with the drafters, and a ``max_batch_size`` of at least the largest batch.
        prompts: each as text or token ids; as many as the largest batch.
        max_tokens: of each answer.
        rounds: runs of each variant at each batch size.

    Raises:
        ParameterError: no rounds.
    """

    def __init__(
        self, llm: LLM, prompts: Sequence[Prompt], *, max_tokens: int, rounds: int = 3
    ) -> None:
        if rounds < 1:
            raise ParameterError("invalid rounds", f"got {rounds}", "Run at least 1")
        self._llm, self._prompts = llm, prompts
        self._max_tokens, self._rounds = max_tokens, rounds
        self._name, self._num_runs = secrets.token_hex(8), 0

    def num_runs(self, variants: Sequence[Variant], batches: Sequence[int]) -> int:
        """How many runs ``run`` will time."""
        return self._rounds * len(batches) * (1 + len(variants))

    def run(
        self,
        variants: Sequence[Variant],
        batches: Sequence[int],
        on_run: Callable[[Variant, int], None] = lambda variant, batch: None,
    ) -> list[BenchRow]:
        """Measure all variants, and plain decoding, at all batch sizes.

        ``on_run`` is called after each run with its variant and batch size. Raises as ``run_once``,
        and ParameterError for a batch size for which there are too few prompts.
        """
        check_batches(batches, len(self._prompts))
        rows = []
        for batch in batches:
            runs = self._rounds_of([PLAIN, *variants], batch, on_run)
            rows += [_row(variant, batch, runs) for variant in runs]
        return rows

    def _rounds_of(
        self, variants: list[Variant], batch: int, on_run: Callable[[Variant, int], None]
    ) -> dict[Variant, list[BenchRun]]:
        for variant in variants:
            self._run(variant, batch, _WARM_UP_TOKENS)
        runs: dict[Variant, list[BenchRun]] = {variant: [] for variant in variants}
        for number in range(self._rounds):
            start = number % len(variants)
            for variant in chain(variants[start:], variants[:start]):
                runs[variant].append(self._run(variant, batch, self._max_tokens))
                on_run(variant, batch)
        return runs

    def _run(self, variant: Variant, batch: int, max_tokens: int) -> BenchRun:
        self._num_runs += 1
        return run_once(
            self._llm,
            variant,
            self._prompts[: max(batch, MIN_PROMPTS)],
            batch=batch,
            max_tokens=max_tokens,
            salt=f"bench {self._name} {self._num_runs}",
        )


def check_batches(batches: Sequence[int], prompts: int) -> None:
    """Raises ParameterError for a batch size below 1, or for which there are too few prompts."""
    for batch in batches:
        if not 1 <= batch <= prompts:
            raise ParameterError(
                f"invalid batch size {batch}",
                f"there are {prompts} different prompts",
                f"Use 1 to {prompts}, or give more prompts",
            )


def _row(variant: Variant, batch: int, runs_by_variant: dict[Variant, list[BenchRun]]) -> BenchRow:
    runs, plain = runs_by_variant[variant], runs_by_variant[PLAIN]
    ratios = [mine.speed / other.speed for mine, other in zip(runs, plain, strict=True)]
    reference = plain[0].outputs
    equal = [
        mine == other for run in runs for mine, other in zip(run.outputs, reference, strict=True)
    ]
    metrics = sum((run.metrics for run in runs), SpeculationMetrics())
    return BenchRow(
        variant=variant,
        batch=batch,
        tokens_per_second=median(run.speed for run in runs),
        ratio=median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        metrics=metrics,
        draft_share=median(run.draft_seconds / run.seconds for run in runs),
        verify_share=median(run.verify_seconds / run.seconds for run in runs),
        identical_share=sum(equal) / len(equal),
        tokens=runs[0].tokens,
    )
