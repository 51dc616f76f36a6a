"""Drafting in the engine: how many nodes to reserve, which drafter to ask, and what it answered.

Per step and decode row::

    requested_nodes   depth: least of the schedule, the request's own max_draft_len, what is left
                      of its length, and what the length policy chooses; nodes: those of such a tree
    draft             drafters in the configured order, until one of them has a draft
    observe           drafters and length policies get the number of accepted tokens

Steps of which all length policies know beforehand that they are plain skip all three.

An error of a drafter for one request ends that drafter's drafts for that request alone: a call for
several requests that fails is repeated for each of them. Hooks that are called once for several
requests (``update`` and those of a resource manager) cannot be repeated, so if one raises, none of
these requests gets another draft. A length policy that raises costs the drafts of the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from operator import index
from typing import NamedTuple

import torch

from forethought.engine.drafter_entry import DrafterEntry, ManagedResources, is_interrupt
from forethought.engine.scheduler import Plan, PlannedRow
from forethought.engine.sequence import Sequence
from forethought.kv.storage import DraftKvCache, HiddenStateCache
from forethought.kv.table import TableView
from forethought.model.device import ForwardTimer
from forethought.outputs import EngineStats
from forethought.speculative import prediction
from forethought.speculative.drafter import (
    NO_DRAFT,
    Draft,
    DraftRequest,
    ScheduledRequests,
    TokenView,
    check_draft,
)
from forethought.speculative.length.policy import (
    FixedLength,
    Schedule,
    SkippedSteps,
    StepRecord,
)

log = logging.getLogger(__name__)


class _Limits(NamedTuple):
    """Limits of a draft for one request by one drafter."""

    max_draft_len: int
    """Levels."""
    max_nodes: int


@dataclass(eq=False, slots=True)
class _RequestDraft:
    """The drafting for one request in the current step."""

    row: PlannedRow
    request: DraftRequest
    limits: dict[DrafterEntry, _Limits] = field(default_factory=dict)
    """By drafter to ask, in order."""
    tried: list[DrafterEntry] = field(default_factory=list)
    """Drafters tried so far; the draft, if there is one, is from the last."""
    draft: Draft = NO_DRAFT
    """The proposal, checked. The drafter may still change the one of the request."""

    def set_limits(self, entry: DrafterEntry) -> None:
        """Write the limits of a drafter's draft into the request that it is shown."""
        self.request.max_draft_len, max_nodes = self.limits[entry]
        self.request.max_nodes = min(max_nodes, self.row.num_nodes)


class Drafting:
    """Drafts for the sequences of an engine.

    Predictions of the requests themselves are drafted by a drafter of their own, the first to be
    tried; it is in no one's way while no request has any.

    Args:
        drafters: tried in this order, the next one for requests that have no draft yet.
        stats: the engine's totals.
        vocab_size: ids are below this.
        device: where drafters compute.

    Attributes:
        names: of the drafters that requests can choose.
    """

    def __init__(
        self,
        drafters: List[DrafterEntry],
        stats: EngineStats,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._given, self._stats, self._vocab_size = list(drafters), stats, vocab_size
        self._timer = ForwardTimer(device)
        self.names = [entry.name for entry in drafters]
        stats.draft_paths = {
            entry.name: path for entry in drafters if (path := entry.drafter.forward_path)
        }
        self._prediction = DrafterEntry(
            prediction.NAME,
            prediction.PredictionDrafter(),
            FixedLength(),
            Schedule({1: prediction.MAX_DRAFT_LEN}, "lower"),
            prediction.MAX_DRAFT_LEN,
        )
        self._predicted: set[int] = set()
        """Ids of the sequences with a prediction that generate."""
        self.draft_caches: list[DraftKvCache] = [
            draft_cache for entry in drafters for draft_cache in entry.drafter.draft_caches
        ]
        self.hidden_state_caches = [
            cache for cache in self.draft_caches if isinstance(cache, HiddenStateCache)
        ]
        every = (self._prediction, *drafters)
        self._resources = {each: ManagedResources(each.resource_manager) for each in every}
        self._timers = {each: ForwardTimer(device) for each in every}
        self._requests: dict[int, DraftRequest] = {}
        self._disabled: set[tuple[DrafterEntry, int]] = set()
        """Drafters, and the ids of the requests for which they have failed."""
        self._warned_of_ids: set[DrafterEntry] = set()
        self._drafts: dict[int, _RequestDraft] = {}
        self._prefills: dict[DrafterEntry, list[DraftRequest]] = {}
        """The context requests that each drafter of this step was shown."""
        self._num_to_skip = self._num_running = 0
        """Coming steps of about the same batch in which no drafter and no policy is asked;
        sequences that ran when one was."""
        self._skipped = SkippedSteps()
        """Those that have gone by since then."""
        self._skipping = self._given
        """Those whose policies are not asked in these steps: all that may draft for a request."""
        self._choosing_seconds: dict[DrafterEntry, float] = {}
        """Of the length policies in this step, and of drafters where it is one of several in a
        call."""
        self._learning_seconds: dict[DrafterEntry, float] = {}
        """Of drafters and length policies after the step before."""

    @property
    def drafters(self) -> list[DrafterEntry]:
        """The drafters of this step, in the order in which they are tried."""
        return [self._prediction, *self._given] if self._predicted else self._given

    @property
    def num_to_skip(self) -> int:
        """Coming steps of about the same batch in which no drafter and no policy is asked."""
        return self._num_to_skip

    def takes_part(self, running: List[Sequence]) -> bool:
        """Whether drafters are asked in the step that begins; called once per step.

        Args:
            running: the running batch.
        """
        num_running = len(running) or self._num_running  # none runs: all of this step prefill
        is_other_batch = abs(num_running - self._num_running) > self._num_running // 4
        if self._predicted or is_other_batch or not self._skips_all(running):
            self._num_to_skip = 0
        if self._num_to_skip:
            self._num_to_skip -= 1
            self._skipped.num_steps += 1
            return False
        if self._skipped.num_steps:
            self._tell_skipped()
        self._num_running = num_running
        return bool(self._given or self._predicted)

    def _tell_skipped(self) -> None:
        """Tell length policies of the steps that have gone by without them."""
        steps, self._skipped = self._skipped, SkippedSteps()
        for entry in self._skipping:
            try:
                entry.policy.skipped(steps)
            except BaseException as error:
                self._count_failure(
                    entry, error, "its length policy did not take in the steps it has skipped"
                )

    def chosen_by(self, rows: List[PlannedRow]) -> list[DrafterEntry]:
        """The drafters that may draft for one of these rows."""
        params = [row.sequence.params.speculation for row in rows]
        return [each for each in self.drafters if any(each.may_draft(own) for own in params)]

    def _skips_all(self, running: List[Sequence]) -> bool:
        """Whether no other drafter than those that are skipped may draft for these."""
        others = [each for each in self._given if each not in self._skipping]
        return not any(
            each.may_draft(sequence.params.speculation) for each in others for sequence in running
        )

    def skip(self, num_steps: int) -> None:
        """So many further steps have been made with this one."""
        num_steps = min(num_steps, self._num_to_skip)
        self._num_to_skip -= num_steps
        self._skipped.num_steps += num_steps

    def observe_skipped(self, plan: Plan, seconds: float, num_steps: int) -> None:
        """A call in which none was asked is over.

        Args:
            plan: its rows, with their results.
            seconds: of the whole call.
            num_steps: that it made.
        """
        if self._skipped.num_steps and all(row.num_tokens == 1 for row in plan.rows):
            counts = [(row.stop, len(row.results[0][1].tokens)) for row in plan.rows if row.results]
            context = sum(length * size + size * (size - 1) // 2 for length, size in counts)
            num_tokens = sum(size for _, size in counts)
            self._skipped.measure(num_steps, num_tokens, context, seconds)

    def add_draft_seconds(self, entry: DrafterEntry, seconds: float) -> None:
        """A drafter has drafted for so long in the steps of one call."""
        self._stats.draft_seconds += seconds
        self._choosing_seconds[entry] += seconds

    def begin(self, sequence: Sequence) -> None:
        """A sequence begins to generate."""
        own = sequence.params.speculation
        if own is not None and own.prediction is not None:
            self._predicted.add(sequence.id)

    # ---- before the forward -----------------------------------------------------------------

    def requested_nodes(self, rows: List[PlannedRow], num_running: int) -> list[int]:
        """How many draft nodes to reserve behind each of these rows, all decodes.

        Args:
            rows: the decodes of this step.
            num_running: sequences in the running batch, these and those that prefill.
        """
        self._drafts, self._prefills, self._choosing_seconds = {}, {}, {}
        for entry in self.drafters:
            self._request_nodes(entry, rows, entry.schedule.length(num_running))
        return list(map(self.num_requested, rows))

    def num_requested(self, row: PlannedRow) -> int:
        """Draft nodes that were last requested behind a row."""
        draft = self._drafts.get(row.sequence.id)
        return max(each.max_nodes for each in draft.limits.values()) if draft else 0

    def _request_nodes(
        self, entry: DrafterEntry, rows: List[PlannedRow], max_draft_len: int
    ) -> None:
        """Set the limits of one drafter's drafts behind the rows."""
        if max_draft_len <= 0:
            return
        asking = [
            (row, request)
            for row in rows
            if (request := self._request(entry, row.sequence, max_draft_len)) is not None
        ]
        if not asking:
            return
        lengths = self._lengths(entry, [request for _, request in asking], len(rows))
        max_nodes: dict[int, int] = {}  # by draft length
        for (row, request), length in zip(asking, lengths, strict=True):
            length = min(length, request.max_draft_len)
            if length > 0 and not max_nodes.get(length):
                max_nodes[length] = self._max_nodes(entry, request, length)
            if length > 0 and max_nodes[length] > 0:
                draft = self._drafts.setdefault(request.request_id, _RequestDraft(row, request))
                draft.limits[entry] = _Limits(length, max_nodes[length])

    def draft(self, plan: Plan) -> None:
        """Fill the rows' drafts; each row keeps only as many draft slots as its draft has nodes."""
        with self._timer:
            self._ask_all(plan)

    def _ask_all(self, plan: Plan) -> None:
        drafts = [self._drafts[row.sequence.id] for row in plan.rows if row.num_nodes]
        prefilling = [row.sequence for row in plan.rows if not row.is_decode]
        for entry in self.drafters:
            self._ask(entry, drafts, prefilling)
        for each in drafts:
            row = each.row
            row.draft = each.draft
            row.drafter = each.tried[-1].name if len(row.draft) else ""
            rule = each.tried[-1].rule if len(row.draft) else None
            if rule is not None and rule.applies_to(row.sequence.params):
                row.rule = rule
            if len(row.draft) != row.num_nodes:
                plan.trim(row, len(row.draft))

    def _request(
        self, entry: DrafterEntry, sequence: Sequence, max_draft_len: int
    ) -> DraftRequest | None:
        """The request that the drafter may be shown; None if it is not to draft for it."""
        length = self._max_draft_len(entry, sequence, max_draft_len)
        if length <= 0:
            return None
        request = self.request_of(sequence)
        request.draft, request.max_draft_len = NO_DRAFT, length
        try:
            return request if self._resources[entry].take(request) else None
        except BaseException as error:
            self._count_failure(
                entry, error, "its resource manager cannot say what a request needs"
            )
            self._disable(entry, [request])
            return None

    def _max_draft_len(self, entry: DrafterEntry, sequence: Sequence, max_draft_len: int) -> int:
        """``max_draft_len`` of the schedule, limited by the sequence and its params.

        A sequence that attends to others gets no draft: they write while a draft is verified.
        """
        if (
            sequence.others
            or sequence.had_nonfinite_logits
            or (entry, sequence.id) in self._disabled
        ):
            return 0
        left = sequence.limit - len(sequence.tokens) - 1  # the last token is sampled, not drafted
        if entry is self._prediction and sequence.id not in self._predicted:
            return 0
        length, own = min(left, max_draft_len), sequence.params.speculation
        if not entry.may_draft(own):
            return 0
        if own is None or own.max_draft_len is None:
            return length
        return min(length, own.max_draft_len)

    def request_of(self, sequence: Sequence) -> DraftRequest:
        """The one object that drafters are shown in every step of a generation."""
        if sequence.id not in self._requests:
            prompt = tuple(sequence.tokens[: sequence.prompt_length])
            self._requests[sequence.id] = DraftRequest(
                request_id=sequence.id,
                tokens=TokenView(sequence.tokens),
                prompt_length=sequence.prompt_length,
                params=sequence.params,
                group=hash((sequence.params.cache_salt, prompt)),
                index=sequence.index,
                seed=sequence.seed,
            )
        return self._requests[sequence.id]

    def _lengths(
        self, entry: DrafterEntry, requests: list[DraftRequest], batch_size: int
    ) -> list[int]:
        """The lengths that the policy chooses; zeros if it raises."""
        began = time.perf_counter()
        try:
            lengths = [index(n) for n in entry.policy.lengths(requests, batch_size)]
            if len(lengths) != len(requests):
                raise ValueError(f"{len(lengths)} lengths for {len(requests)} requests")
        except BaseException as error:
            self._count_failure(entry, error, "its length policy failed: no drafts in this step")
            return [0] * len(requests)
        finally:
            self._choosing_seconds[entry] = time.perf_counter() - began
        return lengths

    def _max_nodes(self, entry: DrafterEntry, request: DraftRequest, length: int) -> int:
        """Max tokens of a draft of ``length`` levels; 0 if the drafter cannot say."""
        try:
            return min(index(entry.drafter.nodes(length)), entry.max_nodes)
        except BaseException as error:
            self._count_failure(entry, error, "it does not say how large its drafts are")
            self._disable(entry, [request])
            return 0

    def _ask(
        self, entry: DrafterEntry, drafts: List[_RequestDraft], prefilling: List[Sequence]
    ) -> None:
        """Let one drafter propose for the requests that may use it and have no draft yet."""
        asking = [each for each in drafts if entry in each.limits and not len(each.draft)]
        if not asking:
            return
        for each in asking:
            each.request.table = TableView(each.row.sequence.table)
            each.tried.append(entry)
        shown = self._prefills[entry] = self._prefilling(entry, prefilling)
        with self._timers[entry]:
            if self._prepare(entry, asking, shown) and not self._propose(entry, asking, shown):
                for each in asking:  # one by one, if there are several
                    if len(asking) == 1 or not self._propose(entry, [each], []):
                        self._disable(entry, [each.request])

    def _prefilling(self, entry: DrafterEntry, sequences: List[Sequence]) -> list[DraftRequest]:
        """The context requests: those of the sequences that the drafter may later draft for."""
        shown = []
        for sequence in sequences:
            if self._max_draft_len(entry, sequence, entry.schedule.max_length) > 0:
                request = self.request_of(sequence)
                request.draft, request.table = NO_DRAFT, TableView(sequence.table)
                request.max_draft_len = request.max_nodes = 0
                shown.append(request)
        return shown

    def _prepare(
        self, entry: DrafterEntry, drafts: List[_RequestDraft], prefilling: list[DraftRequest]
    ) -> bool:
        """Whether the resource manager, if there is one, is ready for the requests."""
        if self._resources[entry].manager is None:
            return True
        try:
            self._resources[entry].prepare(_batch(drafts, prefilling))
        except BaseException as error:
            self._count_failure(entry, error, "prepare_resources failed")
            self._disable(entry, [each.request for each in drafts])
            return False
        return True

    def _propose(
        self, entry: DrafterEntry, drafts: List[_RequestDraft], prefilling: list[DraftRequest]
    ) -> bool:
        """Whether the drafter returned without an error; if not, it proposes nothing."""
        for each in drafts:
            each.request.draft = NO_DRAFT
            each.set_limits(entry)
        try:
            entry.drafter.prepare_draft_tokens(
                _batch(drafts, prefilling), self._resources[entry].manager
            )
        except BaseException as error:
            self._count_failure(entry, error, "it raised")
            return False
        for each in drafts:
            self._check(entry, each)
        return True

    def _check(self, entry: DrafterEntry, draft: _RequestDraft) -> None:
        """Take what was proposed for one request, if it is a draft."""
        request = draft.request
        draft.set_limits(entry)  # a drafter may have changed them
        try:
            proposed = request.draft
            draft.draft = request.draft = check_draft(request, self._vocab_size)
            if len(draft.draft) < len(proposed.tokens):
                self._warn_of_ids(entry, proposed)
        except BaseException as error:
            draft.draft = request.draft = NO_DRAFT
            self._count_failure(entry, error, "what it proposed is no draft")
            self._disable(entry, [request])

    def _warn_of_ids(self, entry: DrafterEntry, drafted: Draft) -> None:
        """Warn once per drafter of ids outside the target's vocabulary."""
        size = self._vocab_size
        outside = [token for token in map(index, drafted.tokens) if not 0 <= token < size]
        if outside and entry not in self._warned_of_ids:
            self._warned_of_ids.add(entry)
            log.warning(
                "drafter %r proposed the id %d, and the target's are 0 to %d: such tokens and what "
                "follows them are left out of its drafts (logged once)",
                *(entry.name, outside[0], size - 1),
            )

    # ---- after the commit -------------------------------------------------------------------

    def observe(self, plan: Plan, seconds: float, num_steps: int = 1) -> None:
        """Report a committed step, or several that were one call, to drafters and length policies.

        Args:
            plan: the rows, with their results.
            seconds: of the whole call.
            num_steps: that it made.
        """
        self._stats.draft_seconds += self._timer.take()
        spent = dict(self._choosing_seconds)
        for entry in self._prefills:
            spent[entry] += self._timers[entry].take()
        batch_size, num_tokens, context = _mean_sizes(plan, num_steps)
        forward_seconds = (seconds - sum(spent.values())) / num_steps
        for entry in self.drafters:
            began = time.perf_counter()
            drafting = [each.request for each in self._drafts.values() if entry in each.tried]
            self._update(entry, drafting, self._prefills.get(entry, []))
            draft_seconds = spent.get(entry, 0.0) + self._learning_seconds.get(entry, 0.0)
            record = StepRecord(
                requests=self._verified(entry, plan),
                batch_size=batch_size,
                tokens=num_tokens,
                context=context,
                forward_seconds=forward_seconds,
                draft_seconds=draft_seconds / num_steps,
                num_steps=num_steps,
            )
            self._learn(entry, record)
            self._learning_seconds[entry] = time.perf_counter() - began
        chosen = self.chosen_by(plan.rows)
        self._skipping = [each for each in self._given if each in chosen] or self._given
        self._drafts, self._prefills = {}, {}
        self._num_to_skip = min(map(self._num_skippable, self._skipping), default=0)

    def _verified(self, entry: DrafterEntry, plan: Plan) -> list[tuple[int, int, int]]:
        """What became of a drafter's drafts, as in ``StepRecord.requests``."""
        if plan.num_chain_steps:
            return [
                (row.sequence.id, len(drafted), len(tokens) - 1)
                for row in plan.rows
                if row.draft_len and row.drafter == entry.name
                for drafted, tokens in row.steps
            ]
        results = {row.sequence.id: row.results[0][1] for row in plan.rows if row.results}
        return [
            (number, each.draft.depth, len(results[number].path))
            for number, each in self._drafts.items()
            if len(each.draft) and each.tried[-1] is entry and number in results
        ]

    def _learn(self, entry: DrafterEntry, record: StepRecord) -> None:
        """Tell a drafter's length policy of a step."""
        try:
            entry.policy.observe(record)
        except BaseException as error:
            self._count_failure(
                entry, error, "its length policy did not take in what became of a step"
            )

    def _num_skippable(self, entry: DrafterEntry) -> int:
        """Steps that a length policy would skip; none if it raises."""
        try:
            return index(entry.policy.skip())
        except BaseException as error:
            self._count_failure(entry, error, "its length policy does not say what it would skip")
            return 0

    def _update(
        self, entry: DrafterEntry, drafting: list[DraftRequest], prefilling: list[DraftRequest]
    ) -> None:
        """Call drafter and manager after the step, for the requests that go on."""
        batch = [each for each in drafting if self._goes_on(entry, each)]
        if not batch:
            return
        shown = [each for each in prefilling if self._goes_on(entry, each)]
        try:
            entry.drafter.update(ScheduledRequests(list(batch), list(shown)))
            if self._resources[entry].manager is not None:
                self._resources[entry].update(ScheduledRequests(list(batch), list(shown)))
        except BaseException as error:
            self._count_failure(entry, error, "it or its resource manager failed after a step")
            self._disable(entry, batch)

    def _goes_on(self, entry: DrafterEntry, request: DraftRequest) -> bool:
        """Whether a drafter may be asked for the request again."""
        number = request.request_id
        return number in self._requests and (entry, number) not in self._disabled

    def _count_failure(self, entry: DrafterEntry, error: BaseException, why: str) -> None:
        """Log and count what a drafter, its policy or its manager has raised, even ``SystemExit``.

        Raises:
            BaseException: the error, if it is not the drafter's own; see ``is_interrupt``.
        """
        if is_interrupt(error):
            raise error
        log.warning("drafter %r: %s", entry.name, why, exc_info=error)
        self._stats.draft_failures += 1

    def _disable(self, entry: DrafterEntry, requests: list[DraftRequest]) -> None:
        """No more drafts of this drafter for these requests; their units are freed."""
        for request in requests:
            self._disabled.add((entry, request.request_id))
            self._call_last(entry, self._resources[entry].free, request)

    def drop(self, sequence: Sequence, error: Exception) -> None:
        """The target failed on the sequence's draft: no more drafts of that drafter for it."""
        draft = self._drafts[sequence.id]
        self._count_failure(draft.tried[-1], error, "the target failed on its draft")
        self._disable(draft.tried[-1], [draft.request])
        draft.draft = NO_DRAFT

    def release(self, sequence: Sequence) -> None:
        """The generation is over, finished or failed."""
        self._release(sequence.id)
        self._predicted.discard(sequence.id)

    def _release(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is None:
            return
        for entry in self.drafters:
            self._disabled.discard((entry, number))
            self._call_last(entry, entry.drafter.release, request)
            self._call_last(entry, self._resources[entry].free, request)

    def shutdown(self) -> None:
        """Release every request; the engine is going away."""
        for number in list(self._requests):
            self._release(number)
        for entry in self.drafters:
            self._call_last(entry, entry.drafter.shutdown)
            self._call_last(entry, self._resources[entry].shutdown)

    def _call_last(self, entry: DrafterEntry, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except BaseException as error:
            self._count_failure(entry, error, "it or its resource manager failed at the end")


def _mean_sizes(plan: Plan, num_steps: int) -> tuple[float, float, float]:
    """Sequences, tokens of the forward, and tokens of the sequences, of a step."""
    if not plan.num_chain_steps:
        return len(plan.rows), plan.num_tokens, sum(row.stop for row in plan.rows)
    num_rows, num_tokens, context = 0, 0, 0
    for row in plan.rows:
        length = row.stop
        for drafted, tokens in row.steps:
            num_rows, num_tokens = num_rows + 1, num_tokens + 1 + len(drafted)
            context += length
            length += len(tokens)
    return num_rows / num_steps, num_tokens / num_steps, context / num_steps


def _batch(drafts: List[_RequestDraft], prefilling: list[DraftRequest]) -> ScheduledRequests:
    """New lists for each call, which the drafter may change."""
    return ScheduledRequests([each.request for each in drafts], list(prefilling))
