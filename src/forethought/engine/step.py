"""One engine step: schedule, draft, forward, verify, commit.

Plain and speculative decoding are the same step: every decode verifies a tree of draft tokens,
which without a drafter is its root, the last known token, alone::

    schedule   rows of known tokens: decodes, draft slots after them, then prefill chunks
    draft      each decode row gets a draft of N >= 0 nodes
    forward    all rows in one batch                      -> logits [R, V] float32
    verify     per decode, the accepted path of its draft and one more sampled token
    commit     keep the KV of the path, publish full pages, append the tokens, finish sequences

An exception fails the request that causes it. A forward or a verification that raises is repeated
with half of its rows, down to single rows, and a single row once more, without its draft, before
its request fails; the other requests go on in the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from forethought.engine.continuous import ContinuousDecode
from forethought.engine.drafting import Drafting
from forethought.engine.packing import (
    PendingSample,
    add_prompt_logprobs,
    keep_logits,
    pack,
    pending_samples,
    take_argmax,
    takes_argmax,
)
from forethought.engine.scheduler import Plan, PlannedRow, Scheduler
from forethought.engine.sequence import (
    Sequence,
    Status,
    attach_ready_dependents,
    attach_to_parent,
)
from forethought.errors import EngineStopped, LogitsError, RequestError
from forethought.interrupts import deferred_interrupts
from forethought.kv.pool import PrefixIndex
from forethought.kv.storage import DraftKvCache, KvStorage
from forethought.kv.table import SlotMove
from forethought.model.device import ForwardTimer
from forethought.model.hidden_states import HiddenStateCache
from forethought.model.runner import ModelRunner
from forethought.outputs import (
    GRAMMAR_COMPLETE,
    DraftedStep,
    EngineStats,
    FinishReason,
    TokenConfidence,
    TokenLogprobs,
)
from forethought.speculative.drafter import Draft
from forethought.speculative.step_runner import Interrupt
from forethought.speculative.verify.accept import (
    VerificationResult,
    join_scores,
    num_until_end,
    tokens_of,
    truncate,
)
from forethought.speculative.verify.verify import verify

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

End = tuple[FinishReason | None, int | str | None]
"""The finish reason of a generation, None while it goes on, and its stop reason."""


@dataclass(slots=True, eq=False)
class Event:
    """What one step did to one sequence."""

    sequence: Sequence
    tokens: list[int]
    """Sampled in this step."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if asked for."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """The step failed for this sequence, which is closed."""
    confidences: list[TokenConfidence] | None = None
    """One entry per token, if asked for."""


class Step:
    """Runs engine steps. Full pages are published in ``index``. At most ``num_decode_steps`` are
    made in one call of the runner; see ``LlmArgs``.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        drafting: Drafting,
        index: PrefixIndex,
        stats: EngineStats,
    ) -> None:
        self._runner, self._scheduler, self._drafting = runner, scheduler, drafting
        self._index, self._stats = index, stats
        self._storages: list[KvStorage | DraftKvCache] = [runner.storage, *drafting.draft_caches]
        self._eos_ids = runner.lm.eos_token_ids
        self._timer = ForwardTimer(runner.lm.device)
        self._continuous = ContinuousDecode(runner, scheduler, drafting, stats)
        self.num_decode_steps: float = 1
        self.interrupt = Interrupt()
        self._events: list[Event] = []
        """What was committed and not returned yet."""
        self._asks_drafters = False
        """Whether drafters take part in this step."""

    def run(self) -> list[Event]:
        """One forward for all sequences that the plan has a row for, or several decode steps.

        A sequence that cannot go on is closed, its pages are released, and its event has the error.
        A step that is interrupted can be repeated: before it commits it leaves all sequences as
        they were, and the events of what it has committed are returned by the next one.
        """
        began, num_forwards = time.perf_counter(), 1
        plan = Plan()
        self._asks_drafters = self._drafting.takes_part(self._scheduler.running)
        try:
            with deferred_interrupts():
                self._schedule(plan)
                self._prepare_pages(plan)
            num_forwards = self._advance(plan)
        except Exception as error:  # a defect of the engine itself
            plan.fail_all(error)
        except BaseException:
            with deferred_interrupts():
                plan.undo()
            raise
        with deferred_interrupts():
            self._commit(plan)
        if plan.rows:
            if self._asks_drafters and not any(row.results for row in plan.rows):
                self._timer.wait()  # nothing was read back, and length policies learn from times
            self._observe(plan, time.perf_counter() - began, num_forwards)
            self._stats.steps += num_forwards
            self._stats.forward_seconds += self._timer.take()
            self._stats.step_seconds += time.perf_counter() - began
        events, self._events = self._events, []
        return events

    # ---- schedule ---------------------------------------------------------------------------

    def _schedule(self, plan: Plan) -> None:
        """Fill the plan. An error that is not one sequence's fails all that run or wait."""
        try:
            tables = [sequence.table for sequence in self._scheduler.running]
            for storage in self._storages:
                storage.limit_states(tables)
            for sequence in list(self._scheduler):
                if sequence.dependents:
                    attach_ready_dependents(sequence)
            self._scheduler.plan_decodes(plan)
            if self._asks_drafters:
                self._reserve_draft_slots(plan)
            self._scheduler.plan_prefills(plan)
            self._asks_drafters = self._continuous.reserve(
                plan, self.num_decode_steps, self._asks_drafters
            )
        except Exception as error:
            log.exception("no step could be planned")
            plan.undo()
            plan.rows.clear()
            plan.failures = [
                (sequence, _unplanned(error))
                for sequence in (*self._scheduler.running, *self._scheduler.waiting)
            ]

    def _reserve_draft_slots(self, plan: Plan) -> None:
        """Reserve slots for drafts after the decodes; if that fails, this step has no drafts."""
        rows = plan.decodes
        try:
            requested = self._drafting.requested_nodes(rows, len(self._scheduler.running))
            self._scheduler.reserve_draft_slots(plan, rows, requested)
        except Exception:
            log.exception("no slots for drafts could be reserved in this step")
            plan.drop_drafts()

    def _prepare_pages(self, plan: Plan) -> None:
        """Make the copy-on-write copies; invalidate in the draft caches what is computed again."""
        try:
            for storage in self._storages:
                storage.copy_pages(plan.copies)
        except Exception:  # these rows compute their tokens in the next step, without a copy
            log.exception("pages could not be copied")
            for row in [row for row in plan.rows if row.copies]:
                plan.remove(row.sequence)
        for row in plan.rows:
            table = row.sequence.table
            for draft_cache in self._drafting.draft_caches:
                draft_cache.invalidate(table, row.start, row.num_stored)
            if row.sequence.had_nonfinite_logits:  # masked slots count if they are not finite
                end = len(table.pages) * table.page_size
                self._runner.storage.clear_slots(table.slots(row.start, end))

    # ---- advance ----------------------------------------------------------------------------

    def _advance(self, plan: Plan) -> int:
        """Make the steps of the plan, and fill ``results`` of its rows; returns the number of
        forwards.
        """
        if plan.num_steps > 1:
            with self._timer:
                advance = self._continuous.advance(plan, self.interrupt)
            if advance is not None:
                for row in [row for row in plan.rows if not row.results]:
                    self._recompute(plan, row.sequence)
                self._drafting.skip(advance.num_forwards - 1)
                return advance.num_forwards
        if self._asks_drafters:
            self._draft(plan)
        with self._timer:
            computed = self._forward(plan)
        self._verify(plan, computed)
        return 1

    def _draft(self, plan: Plan) -> None:
        """Run the drafters; an error here costs the drafts alone."""
        try:
            self._drafting.draft(plan)
        except Exception:
            log.exception("this step has no drafts")
            plan.drop_drafts()

    def _observe(self, plan: Plan, seconds: float, num_steps: int) -> None:
        try:
            if self._asks_drafters:
                self._drafting.observe(plan, seconds, num_steps)
            else:
                self._drafting.observe_skipped(plan, seconds, num_steps)
        except Exception:
            log.exception("the result of a step could not be reported to the drafters")

    # ---- forward ----------------------------------------------------------------------------

    def _forward(self, plan: Plan) -> list[tuple[List[PlannedRow], Tensor]]:
        """The rows that were computed together, with their logits [R, V] float32, row after row:
        the last ``num_logits`` known tokens, then the draft nodes. The drafters' hidden-state
        caches are filled on the way.
        """
        caches, has_failed = self._caches_to_fill(plan), False
        starts = {row.sequence.id: row.start for row in plan.rows}

        def compute(rows: List[PlannedRow]) -> Tensor:
            nonlocal has_failed
            try:
                packed = [pack(row, starts) for row in rows]
                forward = self._runner.forward
                logits = forward(packed, caches) if caches else forward(packed)
                return logits.clone() if has_failed else logits  # a graph overwrites its own
            except Exception as error:
                has_failed = True
                log.warning("a forward of %d rows failed: %r", len(rows), error)
                self._stats.failed_forwards += 1
                raise

        retried = set[int]()

        def failed(row: PlannedRow, error: Exception) -> PlannedRow | None:
            if not row.num_nodes:
                if row.sequence.id not in retried:  # the failure may pass, as of memory
                    retried.add(row.sequence.id)
                    return row
                plan.fail(row.sequence, error)
                return None
            self._drafting.drop(row.sequence, error)
            plan.drop_draft(row)
            return row

        return by_halves(list(plan.rows), compute, failed)

    def _caches_to_fill(self, plan: Plan) -> List[HiddenStateCache]:
        """Those of all drafters; without the states of prompts that only roots are drafted from,
        while no drafter is asked: the next steps store the states of roots to come.
        """
        caches = self._drafting.hidden_state_caches
        if self._asks_drafters or all(row.is_decode for row in plan.rows):
            return caches
        return [cache for cache in caches if not cache.roots_only]

    # ---- verify -----------------------------------------------------------------------------

    def _verify(self, plan: Plan, computed: List[tuple[List[PlannedRow], Tensor]]) -> None:
        """Fill ``results`` and ``known_logits`` of the rows from their logits [R, V]."""
        nonfinite = dict.fromkeys(
            sequence
            for rows, logits in computed
            for sequence in (*keep_logits(rows, logits), *self._sample(plan, rows, logits))
        )
        for sequence in nonfinite:
            self._recompute(plan, sequence)

    def _sample(self, plan: Plan, rows: List[PlannedRow], logits: Tensor) -> list[Sequence]:
        """Verify the drafts of rows computed together, and sample after what is accepted. Returns
        the sequences whose logits after the root are not finite.
        """
        if all(map(takes_argmax, rows)):
            return take_argmax(rows, logits)

        def compute(pending: List[PendingSample]) -> list[VerificationResult]:
            return verify(logits, [sample.request for sample in pending])

        def failed(pending: PendingSample, error: Exception) -> PendingSample | None:
            if not pending.request.draft.tokens:
                plan.fail(pending.sequence, error)
                return None
            self._drafting.drop(pending.sequence, error)
            return pending.without_draft()

        nonfinite: list[Sequence] = []
        for group, results in by_halves(pending_samples(rows, self._eos_ids), compute, failed):
            for pending, result in zip(group, results, strict=True):
                if result.tokens:
                    pending.take(result)
                elif pending.sequence is pending.row.sequence:  # its siblings wait for it
                    nonfinite.append(pending.sequence)
        return nonfinite

    def _recompute(self, plan: Plan, sequence: Sequence) -> None:
        """Compute a sequence with non-finite logits once more; the second time, fail it. The NaN
        may come from another sequence: attention adds up whole pages, in which a masked slot has
        weight 0, and 0 * NaN is NaN.
        """
        if plan.has_failed(sequence):
            return
        plan.remove(sequence)
        self._index.withdraw(sequence.table.pages)
        if sequence.had_nonfinite_logits:
            plan.fail(sequence, _not_finite(sequence))
        sequence.had_nonfinite_logits = True
        self._scheduler.restart(sequence)

    # ---- commit -----------------------------------------------------------------------------

    def _commit(self, plan: Plan) -> None:
        """Commit the rows one by one; an interrupt undoes those that are left."""
        moves: list[SlotMove] = []
        rows = list(plan.rows)
        try:
            while rows:
                self._events += self._commit_row(rows[0], moves)
                del rows[0]
        finally:
            for row in rows:
                row.undo()
            for storage in self._storages:
                storage.move_slots(moves)
        self._events += [self._fail(*failure) for failure in plan.failures]

    def _commit_row(self, row: PlannedRow, moves: list[SlotMove]) -> list[Event]:
        """Keep what was computed and accepted; append the sampled tokens, as the last thing."""
        sequence, results = row.sequence, row.results
        try:
            end = self._truncate(sequence, results) if results else (None, None)
            self._count_steps(row, end[0] is not None)
            tokens = tokens_of(results)
            path = _kept_path(results, len(tokens))
            moves += sequence.table.keep_path(row.stop, path)
            self._record(row, tokens[: len(path)])
        except Exception as error:  # its siblings go on without it
            return [self._fail(sequence, error)]
        if not results:
            return []
        siblings = [self._start_sibling(*sibling) for sibling in row.sibling_results]
        return [self._append(sequence, tokens, end, results), *siblings]

    def _start_sibling(self, sibling: Sequence, result: VerificationResult) -> Event:
        """Let a sibling of a row's sequence go on with a token of its own."""
        try:
            end = self._truncate(sibling, [result])
            attach_to_parent(sibling, has_logits=True)
            is_full = self._scheduler.is_full
            self._scheduler.place(sibling, Status.WAITING if is_full else Status.RUNNING)
            return self._append(sibling, result.tokens, end, [result])
        except Exception as error:
            return self._fail(sibling, error)

    @staticmethod
    def _truncate(sequence: Sequence, results: list[VerificationResult]) -> End:
        """Cut the results of a row after the token that ends the generation. Raises ParameterError
        if a token breaks the grammar, with which nothing could go on.
        """
        tokens, num_remaining = tokens_of(results), sequence.limit - len(sequence.tokens)
        if not num_remaining:  # only the prompt was to be scored
            truncate(results, 0)
            return FinishReason.LENGTH, None
        assert len(tokens) <= num_remaining, "drafts are shorter than this"
        size = num_until_end(tokens, sequence.end_ids, num_remaining)
        num_complete = _num_until_complete(sequence, tokens[:size])
        if size is None and num_complete is None:
            return None, None
        num_tokens = num_complete or size or 0
        truncate(results, num_tokens)
        last = tokens[num_tokens - 1]
        if last in sequence.end_ids:
            return FinishReason.STOP, last if last in sequence.params.stop_token_ids else None
        if num_complete is not None:
            return FinishReason.STOP, GRAMMAR_COMPLETE
        return FinishReason.LENGTH, None

    def _count_steps(self, row: PlannedRow, has_ended: bool) -> None:
        """Count the steps of a row, whose tokens the sequence has yet to get, and note for the
        output what was drafted and rejected. What follows the last token of a generation was
        cut, not rejected.
        """
        sequence, metrics, is_decode = row.sequence, row.sequence.metrics, row.is_decode
        start = len(sequence.tokens) - sequence.prompt_length
        for number, result in enumerate(row.results, 1):
            num_drafted, num_accepted = len(result.draft.tokens), len(result.path)
            if num_drafted:
                metrics.record(num_drafted, num_accepted)
                self._stats.drafted += num_drafted
                self._stats.accepted += num_accepted
                is_cut = has_ended and number == len(row.results)
                rejected = () if is_cut else _rejected(result.draft, result.path)
                step = DraftedStep(start, num_accepted, row.drafter, rejected)
                sequence.drafted_steps.append(step)
            else:
                metrics.steps += is_decode or number > 1
            start += len(result.tokens)
        if row.rule is not None and row.results:
            metrics.lossy = True
            metrics.synthetic |= row.rule.synthetic

    def _record(self, row: PlannedRow, accepted: list[int]) -> None:
        """Count and publish the tokens of a computed row, and score those of the prompt.

        Tokens that the sequence did not sample in this generation, or that were computed before,
        are prefilled; the others are counted as decoded when they are appended. The sequence has
        yet to get the ``accepted`` tokens, which the row's table holds.
        """
        sequence = row.sequence
        num_known = max(sequence.prompt_length, sequence.num_ever_computed)
        if row.start < num_known:
            prefilled = min(num_known, row.stop) - row.start
            sequence.usage.prefilled += prefilled
            self._stats.prefilled += prefilled
        sequence.num_ever_computed = max(sequence.num_ever_computed, sequence.table.length)
        if self._index.enabled:
            publish(self._index, sequence, accepted)
        if sequence.wants_prompt_logprobs:
            assert row.known_logits is not None, "a computed row has its logits"
            add_prompt_logprobs(sequence, row.known_logits, row.start)

    def _append(
        self, sequence: Sequence, tokens: list[int], end: End, results: List[VerificationResult]
    ) -> Event:
        """Append the tokens of one step, or of several; ``end`` says whether and how the last one
        finishes the generation.
        """
        begin = len(sequence.tokens)
        sequence.sampled_positions += range(begin, begin + len(tokens))
        sequence.tokens += tokens
        sequence.usage.decoded += len(tokens)
        self._stats.decoded += len(tokens)
        reason, sequence.stop_reason = end
        if reason is not None:
            self._scheduler.finish(sequence, reason)
        return Event(
            sequence,
            tokens,
            join_scores([result.logprobs for result in results]),
            reason,
            confidences=join_scores([result.confidences for result in results]),
        )

    def _fail(self, sequence: Sequence, error: Exception) -> Event:
        self._stats.failures += 1
        self._scheduler.close(sequence)
        return Event(sequence, [], error=error)


def by_halves(
    items: List[Item],
    compute: Callable[[List[Item]], Result],
    on_failure: Callable[[Item, Exception], Item | None],
) -> list[tuple[List[Item], Result]]:
    """Compute all items together; where that fails, each half of them apart, and so on. Returns, in
    order, the items that were computed together and the result.

    ``compute`` must not change the items. ``on_failure`` is called with an item for which it fails
    alone and may return another item to compute in its place.
    """
    done: list[tuple[List[Item], Result]] = []
    groups = [items] if items else []
    while groups:
        group = groups.pop()
        failure: Exception | None = None
        try:
            done.append((group, compute(group)))
        except EngineStopped:  # no half of them would fare better
            raise
        except Exception as error:
            failure = error
        # Outside of the handler, whose traceback keeps the tensors of the failed call alive.
        if failure is None:
            continue
        if len(group) > 1:
            failure = None
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
        elif (other := on_failure(group[0], failure)) is not None:
            groups.append([other])
    return done


def _kept_path(results: List[VerificationResult], num_tokens: int) -> list[int]:
    """The accepted nodes of a row, by their slots; the drafts of several steps are chains."""
    path = results[0].path if results else []
    return [*path, *range(len(path), num_tokens - 1)]


def _num_until_complete(sequence: Sequence, tokens: List[int]) -> int | None:
    """How many of the next tokens complete what the constraint asks for; None: it may go on."""
    constraint = sequence.constraint
    if constraint is None:
        return None
    output, sizes = sequence.output, range(1, len(tokens) + 1)
    return next((n for n in sizes if constraint.is_complete([*output, *tokens[:n]])), None)


def _rejected(draft: Draft, path: List[int]) -> tuple[int, ...]:
    """The drafted tokens that might have followed the accepted path."""
    if draft.parents is None:
        return tuple(draft.tokens[len(path) :])
    last = path[-1] if path else -1
    return tuple(t for t, parent in zip(draft.tokens, draft.parents, strict=True) if parent == last)


def publish(index: PrefixIndex, sequence: Sequence, accepted: List[int] = ()) -> None:
    """Publish the full pages of computed tokens under the sequence's cache salt.

    A sequence that is resumed under another salt begins another chain of digests, and its pages
    stay published under the first salt alone. Pages whose KV depends on other sequences are not
    published.
    """
    table, size = sequence.table, sequence.table.page_size
    length = table.length if table.private_from is None else min(table.length, table.private_from)
    if len(table.digests) >= length // size:
        return
    root = index.root(sequence.params.cache_salt, sequence.adapter_digest)
    if table.root != root:
        table.root = root
        table.digests.clear()
    first = len(table.digests)
    tokens = [*sequence.tokens[first * size :], *accepted]
    for begin in range(0, length - first * size - size + 1, size):
        parent = table.digests[-1] if table.digests else root
        page = table.pages[len(table.digests)]
        digest = index.publish(
            parent,
            tokens[begin : begin + size],
            page,
            is_first=not table.digests,
            lora="" if sequence.adapter is None else sequence.adapter.name,
        )
        table.digests.append(digest)


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
        f"after {len(sequence.tokens)} tokens they are NaN, +inf or all -inf, and were so again "
        "when all of it was computed a second time",
        "Check the model's weights; in float16, try bfloat16 or float32",
    )
