"""A length policy of its own for each range of batch sizes.

What drafts cost and what they gain at one batch size says little of another one: a drafter that
loses among 64 sequences may double the speed of one. A policy that has learned so from a burst
would draft for none of the single requests after it, but for rare trials. What a policy knows ages
while batches of other sizes run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forethought.speculative.length.policy import (
    LengthPolicy,
    LengthRequest,
    SkippedSteps,
    StepRecord,
)


def size_class(batch_size: int) -> int:
    """0 for one sequence, 1 for 2 to 7, 2 for 8 to 31, 3 for 32 to 127, and so on."""
    return batch_size.bit_length() // 2


class ByBatchSize:
    """Asks the policy of the batch's size.

    Args:
        new_policy: makes one.
    """

    def __init__(self, new_policy: Callable[[], LengthPolicy]) -> None:
        self._new_policy = new_policy
        self._policies: dict[int, LengthPolicy] = {}
        self._num_steps = 0  # of batches of all sizes
        self._left_at: dict[LengthPolicy, int] = {}  # steps when each policy was last asked
        self.policy = self.of(1)
        """That of the last step."""

    def of(self, batch_size: int) -> LengthPolicy:
        """The policy of a batch size."""
        number = size_class(batch_size)
        if number not in self._policies:
            self._policies[number] = self._new_policy()
        return self._policies[number]

    @property
    def reason(self) -> str:
        """As of the policy."""
        return self.policy.reason

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """As of the policy."""
        policy = self.of(batch_size)
        if policy is not self.policy:
            self._left_at[self.policy] = self._num_steps
            if num_steps := self._num_steps - self._left_at.get(policy, self._num_steps):
                policy.age(num_steps)
            self.policy = policy
        return policy.lengths(requests, batch_size)

    def observe(self, record: StepRecord) -> None:
        """Passed on to the policy whose lengths these were."""
        self._num_steps += record.num_steps
        self.policy.observe(record)

    def skip(self) -> int:
        """As of the policy."""
        return self.policy.skip()

    def hold(self) -> float:
        """As of the policy."""
        return self.policy.hold()

    def skipped(self, steps: SkippedSteps) -> None:
        """Passed on to the policy that has said that it skips them."""
        self._num_steps += steps.num_steps
        self.policy.skipped(steps)

    def age(self, num_steps: int) -> None:
        """Passed on to all policies."""
        for policy in self._policies.values():
            policy.age(num_steps)
