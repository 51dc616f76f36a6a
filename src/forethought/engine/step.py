"""A plan's way through the network: from planned rows to logits, from logits to verdicts.

What fails for several at once is tried again with half of them, down to single ones, so that an
error is that of the request that causes it. Changes nothing about the sequences.

[commit] The end of a step: what was computed is recorded, what was drawn joins its sequence.

The only place where a sequence gets a token or learns that its generation is over by itself. Of a
draft, the accepted path is kept and moved into place; the rest is forgotten.

[loop] The loop: schedule, draft, forward, verify, commit.

There is only this one. Every decode verifies a tree of drafted tokens, which without a drafter is
its root alone. What is raised on the way is the error of the request that causes it: a forward or a
verification that fails is made again with fewer rows, and once without the draft, before a request
fails. Knows nothing about handles, and of each part only that it does its part.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    pass

import logging
import time

from forethought.engine.accounting import Accounting
from forethought.engine.drafting import Drafting
from forethought.engine.scheduler import Plan, PlannedRow, Scheduler
from forethought.engine.sequence import (
    Sequence,
    Status,
    attach_ready_dependents,
    attach_to_parent,
    siblings_to_sample,
)
from forethought.errors import LogitsError, RequestError
from forethought.kv.draft_cache import DraftKvCache
from forethought.kv.storage import KvStorage
from forethought.kv.table import SlotMove
from forethought.model.batch import Row
from forethought.model.causal_lm import HiddenStateReader
from forethought.model.runner import ModelRunner
from forethought.model.sampling import TokenContext
from forethought.outputs import GRAMMAR_COMPLETE, EngineStats, FinishReason, TokenLogprobs
from forethought.speculative.draft import NO_DRAFT, Draft
from forethought.speculative.verify.verify import VerificationRequest, VerificationResult, verify

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A sequence that wants the token that follows a row: the row's own, or a twin of it."""

    row: PlannedRow
    sequence: Sequence
    candidate: VerificationRequest


def by_halves(
    items: List[Item],
    compute: Callable[[List[Item]], Result],
    on_failure: Callable[[Item, Exception], Item | None],
) -> list[tuple[List[Item], Result]]:
    """Compute all items together; where that fails, each half of them apart, and so on.

    Args:
        items: in order.
        compute: what does not change the items, so that it can be called again.
        on_failure: told of an item for which ``compute`` fails alone. It may return another item to
            try in its place; else nothing is computed for it.

    Returns:
        In order, the items that were computed together, with what came of it.
    """
    done: list[tuple[List[Item], Result]] = []
    left = [items] if items else []
    while left:
        some = left.pop()
        failure: Exception | None = None
        try:
            done.append((some, compute(some)))
        except Exception as error:
            failure = error
        # Outside of the handler, whose traceback keeps the tensors of the failed call alive.
        if failure is None:
            continue
        if len(some) > 1:
            failure = None
            middle = len(some) // 2
            left += [some[middle:], some[:middle]]
        elif (other := on_failure(some[0], failure)) is not None:
            left.append([other])
    return done


def forward(
    runner: ModelRunner, rows: List[PlannedRow], readers: List[HiddenStateReader] = ()
) -> Tensor:
    """Compute the rows' tokens, and hand their hidden states to those who keep them.

    Returns:
        [R, V] float32 in the order of the rows: of each row its ``logits`` last known tokens, then
        the nodes of its draft.
    """
    packed = [_row(row) for row in rows]
    return runner.forward(packed, readers) if readers else runner.forward(packed)


def drawings(rows: List[PlannedRow], eos_ids: frozenset[int]) -> list[Drawing]:
    """Who wants a token behind rows that were computed together.

    Args:
        rows: in the order of their logits; only those that are their sequence's last one count.
        eos_ids: the model's end-of-sequence ids.
    """
    found: list[Drawing] = []
    begin = 0
    for row in rows:
        root = begin + row.logits - 1
        for sequence in siblings_to_sample(row.sequence) if row.is_last else []:
            draft = row.draft if sequence is row.sequence else NO_DRAFT
            candidate = VerificationRequest(
                draft=draft,
                rows=range(root, root + 1 + len(draft)),
                contexts=_contexts(sequence, draft, eos_ids),
                seed=sequence.seed,
                stream=sequence.index,
                position=len(sequence.tokens),
                past=sequence.tokens,
                rule=row.rule if sequence is row.sequence else None,
            )
            found.append(Drawing(row, sequence, candidate))
        begin = root + 1 + len(row.draft)
    return found


def verify_plan(logits: Tensor, wanted: List[Drawing]) -> list[VerificationResult]:
    """What each of them gains; ``logits`` [R, V] float32 are those of ``forward``."""
    return verify(logits, [each.candidate for each in wanted])


def without_draft(drawing: Drawing) -> Drawing:
    """The same, where the token behind the row alone is drawn."""
    candidate = drawing.candidate
    plain = replace(
        candidate,
        draft=NO_DRAFT,
        rows=candidate.rows[:1],
        contexts=candidate.contexts[:1],
        rule=None,
    )
    return replace(drawing, candidate=plain)


def _row(row: PlannedRow) -> Row:
    draft, parents = row.draft, None
    if draft.parents is not None:
        nodes = (row.count + parent if parent >= 0 else row.count - 1 for parent in draft.parents)
        parents = (*range(-1, row.count - 1), *nodes)
    return Row(
        tokens=[*row.sequence.tokens[row.start : row.stop], *draft.tokens],
        start=row.start,
        table=row.sequence.table,
        parents=parents,
        logits_from=row.count - row.logits,
    )


def _contexts(sequence: Sequence, draft: Draft, eos_ids: frozenset[int]) -> list[TokenContext]:
    """Of the root and of each node, with the path to it where the law looks at it."""
    params, start = sequence.params, sequence.prompt_length
    if not sequence.has_stateful_distribution:
        return [TokenContext(params, (), (), eos_ids)] * (1 + len(draft))
    prompt, output, constraint = sequence.tokens[:start], sequence.output, sequence.constraint
    contexts = [TokenContext(params, prompt, output, eos_ids, constraint)]
    for node, token in enumerate(draft.tokens):
        before = contexts[1 + draft.parent(node)].output
        contexts.append(TokenContext(params, prompt, [*before, token], eos_ids, constraint))
    return contexts


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
        ledger: Accounting,
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
        siblings = [self._twin(*each) for each in row.outcome[1:]]
        return [self._append(row.sequence, *drawn), *siblings] if drawn else []

    def _row(
        self, row: PlannedRow, moves: list[SlotMove]
    ) -> tuple[VerificationResult, _End | None] | None:
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

    def _twin(self, sibling: Sequence, verdict: VerificationResult) -> Event:
        """Let a twin of a row's sequence go on with a token of its own."""
        try:
            end = self._cut(sibling, verdict)
            attach_to_parent(sibling, has_logits=True)
            full = self._scheduler.is_full
            self._scheduler.place(sibling, Status.WAITING if full else Status.RUNNING)
            return self._append(sibling, verdict, end)
        except Exception as error:  # is the twin's
            return self._fail(sibling, error)

    def _cut(self, sequence: Sequence, verdict: VerificationResult) -> _End | None:
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

    def _append(self, sequence: Sequence, verdict: VerificationResult, end: _End | None) -> Event:
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


log = logging.getLogger(__name__)


class Step:
    """Carries sequences through the network, step by step.

    Args:
        runner: the network and the tensors of its KV cache.
        scheduler: who runs.
        speculation: who guesses.
        ledger: who counts.
        stats: the engine's totals.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        speculation: Drafting,
        ledger: Accounting,
        stats: EngineStats,
    ) -> None:
        self._runner, self._scheduler, self._stats = runner, scheduler, stats
        self._speculation, self._ledger = speculation, ledger
        self._storages: list[KvStorage | DraftKvCache] = [runner.storage, *speculation.draft_caches]
        self._eos_ids = runner.lm.eos_token_ids
        self._commit = Commit(scheduler, ledger, self._eos_ids, self._fail)
        self._events: list[Event] = []
        """What has happened and was not told yet."""

    def step(self) -> list[Event]:
        """One pass through the network for everyone.

        A sequence that cannot go on is closed, its pages are given back, and its event has the
        error. A step that is interrupted can be repeated: until it commits, it leaves all sequences
        as they were, and the events of what it has committed are told by the next one.
        """
        began = time.perf_counter()
        plan, forward_seconds = Plan(), 0.0
        try:
            self._plan(plan)
            self._prepare(plan)
            self._draft(plan)
            drafted = time.perf_counter()
            parts = self._forward(plan)
            forward_seconds = time.perf_counter() - drafted
            suspects = dict.fromkeys(s for part in parts for s in self._judge(plan, *part))
        except Exception as error:  # a mistake of our own
            plan.fail_all(error)
            suspects = {}
        except BaseException:
            plan.undo()
            raise
        for sequence in suspects:
            self._suspect(plan, sequence)
        moves: list[SlotMove] = []
        try:
            self._commit(plan, self._events, moves)
        finally:
            self._move_slots(moves)
        self._events += [self._fail(*failure) for failure in plan.failures]
        if plan.rows:
            self._observe(plan, time.perf_counter() - began)
            self._stats.steps += 1
            self._stats.forward_seconds += forward_seconds
            self._stats.step_seconds += time.perf_counter() - began
        events, self._events = self._events, []
        return events

    def _plan(self, plan: Plan) -> None:
        """Choose the rows. What cannot be told to be one sequence's error is everybody's."""
        try:
            for sequence in list(self._scheduler):
                attach_ready_dependents(sequence)
            self._scheduler.plan(plan, self._speculation.requested_nodes)
        except Exception as error:
            log.exception("no step could be planned")
            plan.undo()
            plan.rows.clear()
            plan.failures = [
                (sequence, _unplanned(error))
                for sequence in (*self._scheduler.running, *self._scheduler.waiting)
            ]

    def _prepare(self, plan: Plan) -> None:
        """Copy what is copied on write; say what will be written anew."""
        try:
            for storage in self._storages:
                storage.copy_pages(plan.copies)
        except Exception:  # they compute those tokens in the next step instead, without a copy
            log.exception("pages could not be copied")
            for row in [row for row in plan.rows if row.copies]:
                plan.remove(row.sequence)
        for row in plan.rows:
            table = row.sequence.table
            for draft_cache in self._speculation.draft_caches:
                draft_cache.invalidate(table, row.start, row.stop + row.nodes)
            if row.sequence.suspect:  # masked slots count if they are not finite
                end = len(table.pages) * table.page_size
                self._runner.storage.clear_slots(table.slots(row.start, end))

    def _draft(self, plan: Plan) -> None:
        """Have the drafters asked; what fails there costs drafts alone."""
        try:
            self._speculation.draft(plan)
        except Exception:
            log.exception("this step has no drafts")
            for row in plan.rows:
                row.draft, row.rule = NO_DRAFT, None
                plan.reserve(row, 0)

    def _forward(self, plan: Plan) -> list[tuple[List[PlannedRow], Tensor]]:
        """Compute the rows: those that were computed together, with their logits [R, V]."""
        readers = self._speculation.features

        def failed(row: PlannedRow, error: Exception) -> PlannedRow | None:
            if not len(row.draft):
                plan.fail(row.sequence, error)
                return None
            self._speculation.drop(row.sequence, error)
            row.draft, row.rule = NO_DRAFT, None
            plan.reserve(row, 0)
            return row

        def compute(rows: List[PlannedRow]) -> Tensor:
            try:
                return forward(self._runner, rows, readers)
            except Exception as error:
                log.warning("a forward of %d rows failed: %r", len(rows), error)
                self._stats.failed_forwards += 1
                raise

        return by_halves(list(plan.rows), compute, failed)

    def _judge(self, plan: Plan, rows: List[PlannedRow], logits: Tensor) -> list[Sequence]:
        """Fill what the rows, which were computed together, have of their logits [R, V].

        Returns:
            The sequences that want logits which are not finite.
        """

        def failed(drawing: Drawing, error: Exception) -> Drawing | None:
            if not len(drawing.candidate.draft):
                plan.fail(drawing.sequence, error)
                return None
            self._speculation.drop(drawing.sequence, error)
            return without_draft(drawing)

        suspects = _known(rows, logits)
        wanted = drawings(rows, self._eos_ids)
        judged = by_halves(wanted, lambda some: verify_plan(logits, some), failed)
        for some, verdicts in judged:
            for drawing, verdict in zip(some, verdicts, strict=True):
                if verdict.tokens:
                    drawing.row.outcome.append((drawing.sequence, verdict))
                elif drawing.sequence is drawing.row.sequence:  # its twins wait for it
                    suspects.append(drawing.sequence)
        return suspects

    def _suspect(self, plan: Plan, sequence: Sequence) -> None:
        """Its logits are not finite: have it computed again, or give up if that has been done.

        What is not finite in the cache may be another's: attention adds up whole pages, in which
        the weight of what is masked is 0, and 0 times NaN is NaN.
        """
        if plan.has_failed(sequence):
            return
        plan.remove(sequence)
        self._ledger.withdraw(sequence)
        if sequence.suspect:
            plan.fail(sequence, _not_finite(sequence))
        sequence.suspect = True
        self._scheduler.restart(sequence)

    def _observe(self, plan: Plan, seconds: float) -> None:
        try:
            self._speculation.observe(plan, seconds)
        except Exception:
            log.exception("drafters were not told what became of a step")

    def _move_slots(self, moves: list[SlotMove]) -> None:
        for storage in self._storages:
            storage.move_slots(moves)

    def _fail(self, sequence: Sequence, error: Exception) -> Event:
        self._stats.failures += 1
        self._scheduler.close(sequence)
        return Event(sequence, [], error=error)


def _known(rows: List[PlannedRow], logits: Tensor) -> list[Sequence]:
    """Give the rows their logits [R, V]; returns whose prompt has some that are not finite."""
    begin, suspects = 0, []
    for row in rows:
        known = row.known_logits = logits[begin : begin + row.logits]
        begin += row.logits + len(row.draft)
        if row.sequence.wants_prompt_logprobs and not known.amax(-1).isfinite().all():
            suspects.append(row.sequence)
    return suspects


def _unplanned(error: Exception) -> RequestError:
    failure = RequestError(
        "no step of the engine could be planned",
        f"{type(error).__name__}: {error}",
        "All requests of that moment have failed with it; later ones are served",
    )
    failure.__cause__ = error
    return failure


def _not_finite(sequence: Sequence) -> LogitsError:
    return LogitsError(
        "the model's logits are not finite",
        f"behind {len(sequence.tokens)} tokens they are NaN, +inf or all -inf, and were so again "
        "when all of it was computed a second time",
        "Check the model's weights; in float16, try bfloat16 or float32",
    )
