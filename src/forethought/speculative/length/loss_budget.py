"""``LossBudget``: what drafting may lose against plain decoding, in plain steps.

A plain step is the time that one step of the same rows takes without drafts. Over any stretch of
steps the loss is at most ``ALLOWANCE`` of the time, plus ``SAVINGS``, plus the loss of the call
that overdrew the budget.
"""

from __future__ import annotations

ALLOWANCE = 0.01
"""Plain steps granted per step."""
CREDIT = 4.0
"""Plain steps that may be lost before anything was gained, and up to which allowances add up."""
SAVINGS = 64.0
"""Most plain steps saved up, gains included: a call of long drafts that other prompts reject, or a
run of bad luck, need not stop what pays."""
DEBT = 32.0
"""Most plain steps owed: a dear probe is paid for before the next one, a pause of the whole machine
is not."""


class LossBudget:
    """Plain steps that may be lost."""

    def __init__(self) -> None:
        self.balance = CREDIT
        self._closed = False

    @property
    def open(self) -> bool:
        """Whether anything may be spent: not after an overdraft, until half has been saved up."""
        return not self._closed

    def book(self, gained: float, steps: int = 1) -> None:
        """Book ``gained`` plain steps, negative for a loss, of ``steps`` steps."""
        granted = max(min(ALLOWANCE * steps, CREDIT - self.balance), 0.0)
        self.balance = min(max(self.balance + granted + gained, -DEBT), SAVINGS)
        if self.balance <= 0.0:
            self._closed = True
        elif self.balance >= CREDIT / 2:
            self._closed = False
