"""How far a drafter gets: the engine decodes held-out prompts with it, and counts.

Knows nothing about training.
"""

from __future__ import annotations

from collections.abc import Sequence

from forethought.decoding import DecodingBaseConfig
from forethought.params import SamplingParams
from forethought.training.teacher import Teacher


class AcceptanceTrial:
    """Greedy answers to some prompts.

    Args:
        teacher: answers them.
        prompts: token ids; none of them trained on.
        max_tokens: of each answer.
    """

    def __init__(self, teacher: Teacher, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self._teacher, self._prompts = teacher, prompts
        self._params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def __call__(self, drafter: DecodingBaseConfig) -> dict[str, float]:
        """``acceptance_length``: tokens per step; ``accepted_1`` and so on: share of the steps
        that accepted so many drafted tokens at least.

        Raises:
            UsageError: the drafter cannot be loaded.
        """
        params = [self._params] * len(self._prompts)
        metrics = self._teacher.generate(self._prompts, params, drafter).metrics
        found = {"acceptance_length": metrics.mean_acceptance_length or 1.0}
        for place, count in enumerate(metrics.accepted_by_position, start=1):
            found[f"accepted_{place}"] = count / metrics.steps
        return found
