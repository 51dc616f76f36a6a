"""A length policy that measures nothing, so that a test does not depend on the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forethought.speculative.length.policy import LengthPolicy, SkippedSteps, StepRecord


class Clocked:
    """A policy that is told of the same times in each run: 1 ms per call and 1 ms per forward."""

    def __init__(self, policy: LengthPolicy, calls: list[int]) -> None:
        self._policy, self._calls = policy, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def observe(self, record: StepRecord) -> None:
        if record.requests:
            self._calls.append(record.num_steps)
        seconds = 0.001 + 0.001 / record.num_steps
        self._policy.observe(replace(record, forward_seconds=seconds, draft_seconds=1e-5))

    def skipped(self, steps: SkippedSteps) -> None:
        seconds = 0.001 * (steps.num_decodes + steps.num_calls)
        self._policy.skipped(replace(steps, seconds=seconds))
