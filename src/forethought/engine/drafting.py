"""Drafting in the engine: how many nodes to reserve, which drafter to ask, and what it answered.

Per step and decode row::

    requested_nodes   depth: least of the schedule, the request's own max_draft_len, what remains
                      of its length, and what the length policy chooses; nodes: those of such a tree
    draft             drafters in the configured order, until one of them has a draft
    observe           drafters and length policies get the number of accepted tokens

Steps of which all length policies know beforehand that they are plain skip all three. What a
drafter raises ends in ``guarded_drafter``; a call for several requests that fails is repeated for
each of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from forethought.config.sampling import SamplingParams
from forethought.engine.guarded_drafter import DrafterEntry, GuardedDrafter
from forethought.engine.scheduler import Plan, PlannedRow
from forethought.engine.sequence import Sequence
from forethought.kv.storage import DraftKvCache
from forethought.kv.table import TableView
from forethought.model.device import ForwardTimer
from forethought.model.hidden_states import HiddenStateCache
from forethought.outputs import EngineStats
from forethought.speculative import prediction
from forethought.speculative.drafter import NO_DRAFT, Draft, DraftRequest, TokenView
from forethought.speculative.length.policy import (
    FixedLength,
    Schedule,
    SkippedSteps,
    StepRecord,
)


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
    limits: dict[GuardedDrafter, _Limits] = field(default_factory=dict)
    """By drafter to ask, in order."""
    tried: list[GuardedDrafter] = field(default_factory=list)
    """Drafters tried so far; the draft, if there is one, is from the last."""
    draft: Draft = NO_DRAFT
    """The proposal, checked. The drafter may still change the one of the request."""

    def set_limits(self, drafter: GuardedDrafter) -> None:
        self.request.max_draft_len, max_nodes = self.limits[drafter]
        self.request.max_nodes = min(max_nodes, self.row.num_nodes)


class Drafting:
    """Drafts for the sequences of an engine.

    Predictions of the requests themselves are drafted by a drafter of their own, the first to be
    tried; it does nothing while no request has any.

    Args:
        drafters: tried in this order, the next one for requests that have no draft yet.
        vocab_size: ids are below this.
        device: where drafters compute.

    Attributes:
        names: of the drafters that requests can choose.
        num_offered: rows of this step for which the drafters were asked how long to draft.
    """

    def __init__(
        self,
        drafters: List[DrafterEntry],
        stats: EngineStats,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._stats, self._timer, self.num_offered = stats, ForwardTimer(device), 0
        self.names = [entry.name for entry in drafters]
        stats.draft_paths = {
            entry.name: path for entry in drafters if (path := entry.drafter.forward_path)
        }
        prediction_entry = DrafterEntry(
            prediction.NAME,
            prediction.PredictionDrafter(),
            FixedLength(),
            Schedule({1: prediction.MAX_DRAFT_LEN}, "lower"),
            prediction.MAX_DRAFT_LEN,
        )
        self._prediction, *self._configured = (
            GuardedDrafter(entry, stats, vocab_size, device)
            for entry in (prediction_entry, *drafters)
        )
        self._predicted: set[int] = set()
        """Ids of the sequences with a prediction that generate."""
        self.draft_caches: list[DraftKvCache] = [
            draft_cache for entry in drafters for draft_cache in entry.drafter.draft_caches
        ]
        self.hidden_state_caches = [
            cache for cache in self.draft_caches if isinstance(cache, HiddenStateCache)
        ]
        self._requests: dict[int, DraftRequest] = {}
        self._drafts: dict[int, _RequestDraft] = {}
        self._prefills: dict[GuardedDrafter, list[DraftRequest]] = {}
        """The context requests that each drafter of this step was shown."""
        self._num_to_skip = self._num_running = 0
        """Coming steps of about the same batch in which no drafter and no policy is asked;
        sequences that ran when one was."""
        self._skipped = SkippedSteps()
        """Those that have gone by since then."""
        self._skipping = self._configured
        """Those whose policies are not asked in these steps: all that may draft for a request."""

    @property
    def drafters(self) -> list[GuardedDrafter]:
        """The drafters of this step, in the order in which they are tried."""
        return [self._prediction, *self._configured] if self._predicted else self._configured

    @property
    def num_to_skip(self) -> int:
        """Coming steps of about the same batch in which no drafter and no policy is asked."""
        return self._num_to_skip

    def takes_part(self, running: List[Sequence]) -> bool:
        """Whether drafters are asked in the step that begins; called once per step."""
        num_running = len(running) or self._num_running  # none runs: all of this step prefill
        is_other_batch = abs(num_running - self._num_running) > self._num_running // 4
        if self._predicted or is_other_batch or not self._skips_all(running):
            self._num_to_skip = 0
        if self._num_to_skip:
            self._num_to_skip -= 1
            self._skipped.num_steps += 1
            return False
        if self._skipped.num_steps:
            steps, self._skipped = self._skipped, SkippedSteps()
            for drafter in self._skipping:
                drafter.observe_skipped(steps)
        self._num_running = num_running
        return bool(self._configured or self._predicted)

    def chosen_by(self, rows: List[PlannedRow]) -> list[GuardedDrafter]:
        """The drafters that may draft for one of these rows."""
        params = [row.sequence.params.speculation for row in rows]
        return [drafter for drafter in self.drafters if any(map(drafter.may_draft, params))]

    def _skips_all(self, running: List[Sequence]) -> bool:
        """Whether no other drafter than those that are skipped may draft for these."""
        others = [drafter for drafter in self._configured if drafter not in self._skipping]
        return not any(
            drafter.may_draft(sequence.params.speculation)
            for drafter in others
            for sequence in running
        )

    def skip(self, num_steps: int) -> None:
        """Further steps have been made with this one."""
        num_steps = min(num_steps, self._num_to_skip)
        self._num_to_skip -= num_steps
        self._skipped.num_steps += num_steps

    def observe_skipped(self, plan: Plan, seconds: float, num_steps: int) -> None:
        """A call of ``num_steps`` steps in which no drafter was asked is over."""
        if self._skipped.num_steps and all(row.num_tokens == 1 for row in plan.rows):
            counts = [(row.stop, row.num_gained) for row in plan.rows if row.results]
            context = sum(length * size + size * (size - 1) // 2 for length, size in counts)
            num_tokens = sum(size for _, size in counts)
            self._skipped.measure(num_steps, num_tokens, context, seconds)

    def add_draft_seconds(self, drafter: GuardedDrafter, seconds: float) -> None:
        """Count the time in which a drafter drafted in the steps of one call."""
        self._stats.draft_seconds += seconds
        drafter.choosing_seconds += seconds

    def begin(self, sequence: Sequence) -> None:
        """A sequence begins to generate."""
        params = sequence.params.speculation
        if params is not None and params.prediction is not None:
            self._predicted.add(sequence.id)

    # ---- before the forward -----------------------------------------------------------------

    def requested_nodes(self, rows: List[PlannedRow], num_running: int) -> list[int]:
        """How many draft nodes to reserve after each of these rows, all decodes.

        ``num_running`` counts all sequences of the running batch, those that prefill, too.
        """
        self._drafts, self._prefills, self.num_offered = {}, {}, len(rows)
        for drafter in self.drafters:
            drafter.choosing_seconds = 0.0
            self._request_nodes(drafter, rows, drafter.schedule.length(num_running))
        return list(map(self.num_requested, rows))

    def num_requested(self, row: PlannedRow) -> int:
        """Draft nodes that were last requested after a row."""
        draft = self._drafts.get(row.sequence.id)
        return max(limits.max_nodes for limits in draft.limits.values()) if draft else 0

    def _request_nodes(
        self, drafter: GuardedDrafter, rows: List[PlannedRow], max_draft_len: int
    ) -> None:
        if max_draft_len <= 0:
            return
        asking = [
            (row, request)
            for row in rows
            if (request := self._request(drafter, row.sequence, max_draft_len)) is not None
        ]
        if not asking:
            return
        lengths = drafter.lengths([request for _, request in asking], len(rows))
        max_nodes: dict[int, int] = {}  # by draft length
        for (row, request), length in zip(asking, lengths, strict=True):
            length = min(length, request.max_draft_len)
            if length > 0 and not max_nodes.get(length):
                max_nodes[length] = drafter.max_nodes(request, length)
            if length > 0 and max_nodes[length] > 0:
                draft = self._drafts.setdefault(request.request_id, _RequestDraft(row, request))
                draft.limits[drafter] = _Limits(length, max_nodes[length])

    def _request(
        self, drafter: GuardedDrafter, sequence: Sequence, max_draft_len: int
    ) -> DraftRequest | None:
        """The request that the drafter may be shown; None if it is not to draft for it."""
        length = self._max_draft_len(drafter, sequence, max_draft_len)
        if length <= 0:
            return None
        request = self.request_of(sequence)
        request.draft, request.max_draft_len = NO_DRAFT, length
        return request if drafter.take_resources(request) else None

    def _max_draft_len(
        self, drafter: GuardedDrafter, sequence: Sequence, max_draft_len: int
    ) -> int:
        """``max_draft_len`` of the schedule, limited by the sequence and its params. A sequence
        that attends to others gets no draft: they write while a draft is verified.
        """
        params = sequence.params.speculation
        if (
            sequence.others
            or sequence.had_nonfinite_logits
            or sequence.id in drafter.disabled
            or (drafter is self._prediction and sequence.id not in self._predicted)
            or not drafter.may_draft(params)
        ):
            return 0
        # The last token is sampled, not drafted.
        length = min(sequence.num_wanted - 1, max_draft_len)
        if params is None or params.max_draft_len is None:
            return length
        return min(length, params.max_draft_len)

    def request_of(self, sequence: Sequence) -> DraftRequest:
        """The one object that drafters are shown in every step of a generation."""
        if sequence.id not in self._requests:
            prompt = tuple(sequence.tokens[: sequence.prompt_length])
            params = _pooled_apart(sequence)
            self._requests[sequence.id] = DraftRequest(
                request_id=sequence.id,
                tokens=TokenView(sequence.tokens),
                prompt_length=sequence.prompt_length,
                params=params,
                group=hash((params.cache_salt, prompt)),
                index=sequence.index,
                seed=sequence.seed,
                breakers=sequence.breakers,
            )
        return self._requests[sequence.id]

    def draft(self, plan: Plan) -> None:
        """Fill the rows' drafts; each row keeps only as many draft slots as its draft has nodes."""
        with self._timer:
            self._draft(plan)

    def _draft(self, plan: Plan) -> None:
        drafts = [self._drafts[row.sequence.id] for row in plan.rows if row.num_nodes]
        prefilling = [row.sequence for row in plan.rows if not row.is_decode]
        for drafter in self.drafters:
            self._ask(drafter, drafts, prefilling)
        for draft in drafts:
            row, size = draft.row, len(draft.draft)
            row.draft, row.drafter = draft.draft, ""
            if size:
                drafter = draft.tried[-1]
                row.drafter = drafter.name
                if drafter.rule is not None and drafter.rule.applies_to(row.sequence.params):
                    row.rule = drafter.rule
            if size != row.num_nodes:
                plan.trim(row, size)

    def _ask(
        self, drafter: GuardedDrafter, drafts: List[_RequestDraft], prefilling: List[Sequence]
    ) -> None:
        """Let one drafter propose for the requests that may use it and have no draft yet."""
        asking = [draft for draft in drafts if drafter in draft.limits and not len(draft.draft)]
        if not asking:
            return
        for draft in asking:
            draft.request.table = TableView(draft.row.sequence.table)
            draft.tried.append(drafter)
        shown = self._prefills[drafter] = self._prefilling(drafter, prefilling)
        with drafter.timer:
            is_ready = drafter.prepare([draft.request for draft in asking], shown)
            if is_ready and not self._propose(drafter, asking, shown):
                for draft in asking:  # one by one, if there are several
                    if len(asking) == 1 or not self._propose(drafter, [draft], []):
                        drafter.disable([draft.request])

    def _prefilling(self, drafter: GuardedDrafter, sequences: List[Sequence]) -> list[DraftRequest]:
        """The context requests: those of the sequences that the drafter may later draft for."""
        requests = []
        for sequence in sequences:
            if self._max_draft_len(drafter, sequence, drafter.schedule.max_length) > 0:
                request = self.request_of(sequence)
                request.draft, request.table = NO_DRAFT, TableView(sequence.table)
                request.max_draft_len = request.max_nodes = 0
                requests.append(request)
        return requests

    def _propose(
        self,
        drafter: GuardedDrafter,
        drafts: List[_RequestDraft],
        prefilling: list[DraftRequest],
    ) -> bool:
        """Whether the drafter returned without an error; if not, it proposes nothing."""
        for draft in drafts:
            draft.request.draft = NO_DRAFT
            draft.set_limits(drafter)
        if not drafter.propose([draft.request for draft in drafts], prefilling):
            return False
        for draft in drafts:
            draft.set_limits(drafter)  # a drafter may have changed them
            draft.draft = drafter.check(draft.request)
        return True

    # ---- after the commit -------------------------------------------------------------------

    def observe(self, plan: Plan, seconds: float, num_steps: int = 1) -> None:
        """Report a committed call of ``num_steps`` steps to drafters and length policies;
        ``seconds`` are of the whole call.
        """
        self._stats.draft_seconds += self._timer.take()
        for drafter in self._prefills:
            drafter.choosing_seconds += drafter.timer.take()
        batch_size, num_tokens, context = _mean_sizes(plan, num_steps)
        asking_seconds = sum(drafter.choosing_seconds for drafter in self.drafters)
        for drafter in self.drafters:
            began = time.perf_counter()
            self._update(drafter)
            draft_seconds = drafter.choosing_seconds + drafter.learning_seconds
            drafter.observe(
                StepRecord(
                    requests=self._verified(drafter, plan),
                    batch_size=batch_size,
                    tokens=num_tokens,
                    context=context,
                    forward_seconds=(seconds - asking_seconds) / num_steps,
                    draft_seconds=draft_seconds / num_steps,
                    num_steps=num_steps,
                )
            )
            drafter.learning_seconds = time.perf_counter() - began
        chosen = self.chosen_by(plan.rows)
        configured = self._configured
        self._skipping = [drafter for drafter in configured if drafter in chosen] or configured
        self._drafts, self._prefills = {}, {}
        skippable = (drafter.num_skippable() for drafter in self._skipping)
        self._num_to_skip = min(skippable, default=0)

    def _update(self, drafter: GuardedDrafter) -> None:
        """Call a drafter after the step, for the requests that go on."""

        def goes_on(request: DraftRequest) -> bool:
            number = request.request_id
            return number in self._requests and number not in drafter.disabled

        tried = (draft.request for draft in self._drafts.values() if drafter in draft.tried)
        prefilling = self._prefills.get(drafter, [])
        drafter.update(list(filter(goes_on, tried)), list(filter(goes_on, prefilling)))

    def _verified(self, drafter: GuardedDrafter, plan: Plan) -> list[tuple[int, int, int]]:
        """The verified drafts of a drafter, as in ``StepRecord.requests``."""
        return [
            (row.sequence.id, result.draft.depth, len(result.path))
            for row in plan.rows
            if row.drafter == drafter.name
            for result in row.results
            if len(result.draft)
        ]

    def drop(self, sequence: Sequence, error: Exception) -> None:
        """The target failed on the sequence's draft: no more drafts of that drafter for it."""
        draft = self._drafts[sequence.id]
        draft.tried[-1].drop(draft.request, error)
        draft.draft = NO_DRAFT

    def release(self, sequence: Sequence) -> None:
        """The generation is over, finished or failed."""
        self._release(sequence.id)
        self._predicted.discard(sequence.id)

    def _release(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is not None:
            for drafter in self.drafters:
                drafter.release(request)

    def shutdown(self) -> None:
        """Release every request; the engine is going away."""
        for number in list(self._requests):
            self._release(number)
        for drafter in self.drafters:
            drafter.shutdown()


def _pooled_apart(sequence: Sequence) -> SamplingParams:
    """The params as drafters see them, whose pools of texts are by salt: those of an adapter are
    apart.
    """
    params = sequence.params
    if sequence.adapter is None:
        return params
    return params.replace(cache_salt=f"{sequence.adapter_digest.hex()}/{params.cache_salt}")


def _mean_sizes(plan: Plan, num_steps: int) -> tuple[float, float, float]:
    """Sequences, tokens of the forward, and tokens of the sequences, of a step."""
    if plan.num_steps == 1:
        return len(plan.rows), plan.num_tokens, sum(row.stop for row in plan.rows)
    num_rows, num_tokens, context = 0, 0, 0
    for row in plan.rows:
        length = row.stop
        for result in row.results:
            num_rows, num_tokens = num_rows + 1, num_tokens + 1 + len(result.draft)
            context += length
            length += len(result.tokens)
    return num_rows / num_steps, num_tokens / num_steps, context / num_steps
