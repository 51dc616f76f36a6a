"""One run over the clock: some prompts, so many at once, decoded in one way.

[speculation] Does guessing ahead pay here? Each variant against plain decoding, interleaved in
one engine.

Every round runs all variants once, beginning with another one each time, so that what disturbs the
machine disturbs all alike. A ratio is taken within its round; rows hold medians over the rounds.
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
    """What one run gave and took."""

    outputs: list[list[int]]
    """Generated ids of each prompt."""
    metrics: SpeculationMetrics
    """Of all prompts together."""
    seconds: float
    """Wall time, prefill included."""
    draft_seconds: float
    """Of these, making drafts."""
    verify_seconds: float
    """Of these, inside the target's network."""

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
    """Generate greedily from all prompts, ``batch`` of them at a time.

    Args:
        llm: has the variant's drafter.
        variant: how to decode.
        prompts: each as text or token ids.
        batch: prompts under way at once; the next ones start when all of these have ended.
        max_tokens: most tokens of each.
        salt: what no other run was called: neither prefixes nor pools of drafts are shared with it.

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


FEWEST_PROMPTS = 8
"""With smaller batches, several follow each other: one prompt alone says little."""
_WARM_UP_TOKENS = 8


class SpeculationBench:
    """Measures the drafters of an engine.

    Args:
        llm: with the drafters, and room for the largest batch in one step.
        prompts: each as text or token ids; as many as the largest batch.
        max_tokens: most tokens of each answer.
        rounds: how often everything is run.

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
        self._name, self._trials = secrets.token_hex(8), 0

    def trials(self, variants: Sequence[Variant], batches: Sequence[int]) -> int:
        """How many runs ``run`` will time."""
        return self._rounds * len(batches) * (1 + len(variants))

    def run(
        self,
        variants: Sequence[Variant],
        batches: Sequence[int],
        on_trial: Callable[[Variant, int], None] = lambda variant, batch: None,
    ) -> list[BenchRow]:
        """Measure all variants, and plain decoding, at all batch sizes.

        Args:
            variants: plain decoding not among them.
            batches: prompts under way at once.
            on_trial: called after each run with its variant and batch size.

        Raises:
            ParameterError: a batch size for which there are too few prompts.
            UsageError: as ``run_trial``.
        """
        check_batches(batches, len(self._prompts))
        rows = []
        for batch in batches:
            found = self._rounds_of([PLAIN, *variants], batch, on_trial)
            rows += [_row(variant, batch, found) for variant in found]
        return rows

    def _rounds_of(
        self, variants: list[Variant], batch: int, on_trial: Callable[[Variant, int], None]
    ) -> dict[Variant, list[BenchRun]]:
        """The trials of each variant, one per round."""
        for variant in variants:
            self._trial(variant, batch, _WARM_UP_TOKENS)
        found: dict[Variant, list[BenchRun]] = {variant: [] for variant in variants}
        for number in range(self._rounds):
            start = number % len(variants)
            for variant in chain(variants[start:], variants[:start]):
                found[variant].append(self._trial(variant, batch, self._max_tokens))
                on_trial(variant, batch)
        return found

    def _trial(self, variant: Variant, batch: int, max_tokens: int) -> BenchRun:
        self._trials += 1
        return run_once(
            self._llm,
            variant,
            self._prompts[: max(batch, FEWEST_PROMPTS)],
            batch=batch,
            max_tokens=max_tokens,
            salt=f"bench {self._name} {self._trials}",
        )


def check_batches(batches: Sequence[int], prompts: int) -> None:
    """Whether there are enough prompts.

    Raises:
        ParameterError: a batch size below 1, or for which there are too few.
    """
    for batch in batches:
        if not 1 <= batch <= prompts:
            raise ParameterError(
                f"invalid batch size {batch}",
                f"there are {prompts} different prompts",
                f"Use 1 to {prompts}, or give more prompts",
            )


def _row(variant: Variant, batch: int, found: dict[Variant, list[BenchRun]]) -> BenchRow:
    trials, plain = found[variant], found[PLAIN]
    ratios = [mine.speed / other.speed for mine, other in zip(trials, plain, strict=True)]
    reference = plain[0].outputs
    equal = [
        mine == other
        for trial in trials
        for mine, other in zip(trial.outputs, reference, strict=True)
    ]
    metrics = sum((trial.metrics for trial in trials), SpeculationMetrics())
    return BenchRow(
        variant=variant,
        batch=batch,
        tokens_per_second=median(trial.speed for trial in trials),
        ratio=median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        metrics=metrics,
        draft_share=median(trial.draft_seconds / trial.seconds for trial in trials),
        verify_share=median(trial.verify_seconds / trial.seconds for trial in trials),
        identical_share=sum(equal) / len(equal),
        tokens=trials[0].tokens,
    )
