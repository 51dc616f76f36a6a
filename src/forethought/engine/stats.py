"""What the engine has done so far, in counts. Written by the engine, read by everyone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was built. Token counts are forward passes really made.

    ``prefilled + decoded`` is not the number of tokens that went through the network: the last
    token drawn in a generation is counted in ``decoded`` and never computed.
    """

    steps: int = 0
    """Forwards."""
    prefilled: int = 0
    """Prompt tokens computed, those computed again after a preemption included."""
    cached: int = 0
    """Prompt tokens found in the prefix index instead."""
    decoded: int = 0
    """Tokens drawn."""
    discarded: int = 0
    """Drawn tokens thrown away by a rewind, or drawn after the caller had lost interest."""
    preemptions: int = 0
    """Times that a running sequence lost its pages to an earlier one."""
    dropped: int = 0
    """Times that a parked sequence lost its pages to a running one."""
    drafted: int = 0
    """Tokens proposed by drafters and verified."""
    accepted: int = 0
    """Proposed tokens that the target took; they are in ``decoded`` too."""
    draft_failures: int = 0
    """Times that a drafter, its manager or its length policy raised or answered nonsense."""
    failed_forwards: int = 0
    """Forwards that raised; they were made again with fewer rows, or without a draft."""
    failures: int = 0
    """Sequences that ended with an error."""
    forward_seconds: float = 0.0
    """Wall time inside the target's network."""
    draft_seconds: float = 0.0
    """Wall time of drafting, a draft model's network included."""
    step_seconds: float = 0.0
    """Wall time of steps: drafting, the network, and all the rest."""

    def to_dict(self) -> dict[str, Any]:
        """All counts by name."""
        return asdict(self)
