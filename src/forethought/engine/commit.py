"""The end of a step: what was computed is recorded, what was drawn joins its sequence.

The only place where a sequence gets a token or learns that its generation is over by itself. Of a
draft, the accepted path is kept and moved into place; the rest is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from forethought.engine import kinship
from forethought.engine.ledger import Ledger
from forethought.engine.passing import Outcome
from forethought.engine.scheduler import Plan, PlannedRow, Scheduler
from forethought.engine.sequence import Sequence, Status
from forethought.kv.table import SlotMove
from forethought.outputs import GRAMMAR_COMPLETE, FinishReason, TokenLogprobs
from forethought.speculative.verify import Verdict


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


@dataclass(frozen=True, slots=True)
class _End:
    """A generation has come to an end of its own."""

    stop_reason: int | str | None


class Commit:
    """Commits steps.

    Args:
        scheduler: where sequences are placed.
        ledger: where computed rows are recorded.
        eos_ids: the model's end-of-sequence ids.
        fail: closes a sequence whose row cannot be committed, and says so.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        eos_ids: frozenset[int],
        fail: Callable[[Sequence, Exception], Event],
    ) -> None:
        self._scheduler, self._ledger, self._eos_ids = scheduler, ledger, eos_ids
        self._fail = fail

    def __call__(
        self, plan: Plan, logits: Tensor, outcomes: list[Outcome]
    ) -> tuple[list[Event], list[SlotMove]]:
        """Record the rows of ``plan`` and append what was drawn after each.

        Args:
            plan: the rows, all computed.
            logits: [R, V] float32, what ``passing.forward`` returned.
            outcomes: for each row, what ``passing.judge`` returned.

        Returns:
            What happened, and the moves to make in the storages before the next step.
        """
        events: list[Event] = []
        moves: list[SlotMove] = []
        begin = 0
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            of_known = logits[begin : begin + row.logits]
            begin += row.logits + len(row.draft)
            try:
                events += self._row(row, of_known, outcome, moves)
            except Exception as error:  # is this row's, and no other one's
                events.append(self._fail(row.sequence, error))
        return events, moves

    def _row(
        self, row: PlannedRow, logits: Tensor, outcome: Outcome, moves: list[SlotMove]
    ) -> list[Event]:
        """Keep of the row what counts, then let its sequence and the twins of it go on."""
        sequence = row.sequence
        path: list[int] = []
        if outcome:
            own = outcome[0][1]
            self._cut(sequence, own)
            path = own.path
            if row.decodes:
                self._ledger.count_draft(row, len(path))
        moves += sequence.table.keep_path(row.stop, path)
        drawn_at = len(sequence.tokens)
        sequence.tokens += [row.draft.tokens[node] for node in path]
        self._ledger.record(row, logits)
        del sequence.tokens[drawn_at:]
        for twin, verdict in outcome[1:]:
            self._cut(twin, verdict)
            kinship.attach(twin, has_logits=True)
            full = self._scheduler.is_full
            self._scheduler.place(twin, Status.WAITING if full else Status.RUNNING)
        return [self._append(*drawn) for drawn in outcome]

    def _cut(self, sequence: Sequence, verdict: Verdict) -> None:
        """Leave out what follows the token that ends the generation."""
        tokens = verdict.tokens
        assert len(tokens) <= sequence.limit - len(sequence.tokens), "drafts are shorter than this"
        sizes = range(1, len(tokens) + 1)
        size = next((n for n in sizes if self._end(sequence, tokens[:n])), len(tokens))
        del verdict.tokens[size:], verdict.path[size - 1 :]

    def _end(self, sequence: Sequence, tokens: list[int]) -> _End | None:
        """How the last one of these new tokens ends the generation, if it does.

        Raises:
            ParameterError: it breaks the grammar, with which nothing could go on.
        """
        params, constraint, token = sequence.params, sequence.constraint, tokens[-1]
        complete = constraint is not None and constraint.is_complete([*sequence.output, *tokens])
        if token in params.stop_token_ids:
            return _End(token)
        if token in self._eos_ids and not params.ignore_eos:
            return _End(None)
        return _End(GRAMMAR_COMPLETE) if complete else None

    def _append(self, sequence: Sequence, verdict: Verdict) -> Event:
        """Drawn tokens join their sequence, and the last one may be its last."""
        begin, tokens, reason = len(sequence.tokens), verdict.tokens, None
        end = self._end(sequence, tokens)
        sequence.drawn += range(begin, begin + len(tokens))
        sequence.tokens += tokens
        self._ledger.count(sequence, decoded=len(tokens))
        if end is not None:
            sequence.stop_reason, reason = end.stop_reason, FinishReason.STOP
        elif len(sequence.tokens) >= sequence.limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._scheduler.finish(sequence, reason)
        logprobs = verdict.logprobs and verdict.logprobs[: len(tokens)]
        return Event(sequence, tokens, logprobs, reason)
