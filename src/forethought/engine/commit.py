"""The end of a step: what was computed is recorded, what was drawn joins its sequence.

The only place where a sequence gets a token or learns that its generation is over by itself. Of a
draft, the accepted path is kept and moved into place; the rest is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forethought.engine import kinship
from forethought.engine.ledger import Ledger
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

    def __call__(self, plan: Plan, events: list[Event], moves: list[SlotMove]) -> None:
        """Record the rows of ``plan``, all computed, and append what was drawn after each.

        Args:
            plan: the rows; where this is interrupted, those that are left are undone.
            events: what happened is added.
            moves: those to make in the storages before the next step are added.
        """
        left = list(plan.rows)
        try:
            while left:
                events += self._events(left[0], moves)
                del left[0]
        finally:
            for row in left:
                row.undo()

    def _events(self, row: PlannedRow, moves: list[SlotMove]) -> list[Event]:
        try:
            drawn = self._row(row, moves)
        except Exception as error:  # is this row's; its twins go on alone
            return [self._fail(row.sequence, error)]
        twins = [self._twin(*each) for each in row.outcome[1:]]
        return [self._append(row.sequence, *drawn), *twins] if drawn else []

    def _row(self, row: PlannedRow, moves: list[SlotMove]) -> tuple[Verdict, _End | None] | None:
        """Keep of the row what counts; returns what its sequence has drawn, if anything."""
        sequence, drawn, path = row.sequence, None, list[int]()
        if row.outcome:
            verdict = row.outcome[0][1]
            drawn = verdict, self._cut(sequence, verdict)
            path = verdict.path
            if row.decodes:
                self._ledger.count_draft(row, len(path))
        moves += sequence.table.keep_path(row.stop, path)
        drawn_at = len(sequence.tokens)
        sequence.tokens += [row.draft.tokens[node] for node in path]
        try:
            self._ledger.record(row)
        finally:
            del sequence.tokens[drawn_at:]
        return drawn

    def _twin(self, twin: Sequence, verdict: Verdict) -> Event:
        """Let a twin of a row's sequence go on with a token of its own."""
        try:
            end = self._cut(twin, verdict)
            kinship.attach(twin, has_logits=True)
            full = self._scheduler.is_full
            self._scheduler.place(twin, Status.WAITING if full else Status.RUNNING)
            return self._append(twin, verdict, end)
        except Exception as error:  # is the twin's
            return self._fail(twin, error)

    def _cut(self, sequence: Sequence, verdict: Verdict) -> _End | None:
        """Leave out what follows the token that ends the generation; how it ends, if it does."""
        tokens, size, end = verdict.tokens, 0, None
        assert len(tokens) <= sequence.limit - len(sequence.tokens), "drafts are shorter than this"
        while end is None and size < len(tokens):
            size += 1
            end = self._end(sequence, tokens[:size])
        del verdict.tokens[size:], verdict.path[size - 1 :]
        return end

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

    def _append(self, sequence: Sequence, verdict: Verdict, end: _End | None) -> Event:
        """Drawn tokens join their sequence, and the last one may be its last."""
        begin, tokens, reason = len(sequence.tokens), verdict.tokens, None
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
