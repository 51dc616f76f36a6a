"""What drafting may cost against plain decoding: an allowance, and nothing beyond it.

Losses and gains are booked in plain steps, the time that one step of the same rows takes without
drafts. Whatever the estimates that led to a draft were worth, over any stretch of steps the loss is
at most ``ALLOWANCE`` of the time, plus ``CEILING``, plus what the step that overdrew it lost: for
this it trusts nothing but the time of a plain step. Knows nothing about how it is spent.
"""

from __future__ import annotations

ALLOWANCE = 0.01
"""Plain steps granted per step."""
CREDIT = 4.0
"""Plain steps that may be lost before anything was gained, and up to which allowances add up."""
SAVINGS = 16.0
"""Most plain steps saved up, gains included: a run of bad luck need not stop what pays."""


class Account:
    """Plain steps that may be lost."""

    def __init__(self) -> None:
        self.balance = CREDIT
        self._closed = False

    @property
    def open(self) -> bool:
        """Whether anything may be spent: not after an overdraft, until half has been saved up."""
        return not self._closed

    def book(self, gained: float) -> None:
        """A step is over.

        Args:
            gained: plain steps that it saved, negative if it lost.
        """
        granted = max(min(ALLOWANCE, CREDIT - self.balance), 0.0)
        self.balance = min(max(self.balance + granted + gained, -CREDIT), SAVINGS)
        if self.balance <= 0.0:
            self._closed = True
        elif self.balance >= CREDIT / 2:
            self._closed = False
