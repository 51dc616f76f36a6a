"""One run over the clock: some prompts, so many at once, decoded in one way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forethought.bench.variant import Variant
from forethought.outputs import SpeculationMetrics
from forethought.params import SamplingParams
from forethought.text.llm import LLM

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Trial:
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


def run_trial(
    llm: LLM,
    variant: Variant,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    max_tokens: int,
    salt: str,
) -> Trial:
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
    return Trial(
        outputs,
        metrics,
        seconds,
        after.draft_seconds - before.draft_seconds,
        after.forward_seconds - before.forward_seconds,
    )
