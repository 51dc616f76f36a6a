"""The end of a step: what was computed is recorded, what was drawn joins its sequence.

The only place where a sequence gets a token or learns that its generation is over by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forethought.engine import kinship
from forethought.engine.ledger import Ledger
from forethought.engine.passing import Draw
from forethought.engine.scheduler import Plan, Scheduler
from forethought.engine.sequence import Sequence, Status
from forethought.outputs import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Event:
    """What one step did to one sequence."""

    sequence: Sequence
    tokens: list[int]
    """Drawn in this step."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if asked for."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """The step failed for this sequence, which is closed."""


class Commit:
    """Commits steps.

    Args:
        scheduler: where sequences are placed.
        ledger: where computed rows are recorded.
        eos_ids: the model's end-of-sequence ids.
    """

    def __init__(self, scheduler: Scheduler, ledger: Ledger, eos_ids: frozenset[int]) -> None:
        self._scheduler, self._ledger, self._eos_ids = scheduler, ledger, eos_ids

    def __call__(self, plan: Plan, logits: Tensor, drawn: list[list[Draw]]) -> list[Event]:
        """Record the rows of ``plan`` and append what was drawn after each.

        Args:
            plan: the rows, all computed.
            logits: [R, V] float32, what ``passing.forward`` returned.
            drawn: for each row, what ``passing.draw`` returned.
        """
        events, begin = [], 0
        for row, draws in zip(plan.rows, drawn, strict=True):
            self._ledger.record(row, logits[begin : begin + row.logits])
            begin += row.logits
            for twin in (draw.sequence for draw in draws[1:]):
                kinship.attach(twin, has_logits=True)
                full = self._scheduler.is_full
                self._scheduler.place(twin, Status.WAITING if full else Status.RUNNING)
            events += [self._append(draw) for draw in draws]
        return events

    def _append(self, draw: Draw) -> Event:
        """A drawn token joins its sequence, and may be its last."""
        sequence, token, reason = draw.sequence, draw.token, None
        sequence.drawn.append(len(sequence.tokens))
        sequence.tokens.append(token)
        self._ledger.count(sequence, decoded=1)
        if token in sequence.params.stop_token_ids:
            sequence.stop_reason, reason = token, FinishReason.STOP
        elif token in self._eos_ids and not sequence.params.ignore_eos:
            reason = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._scheduler.finish(sequence, reason)
        logprobs = None if draw.logprobs is None else [draw.logprobs]
        return Event(sequence, [token], logprobs, reason)
