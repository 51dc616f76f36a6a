"""What requests hold of a user's resource manager, and in which order it is told of them.

For each request it is asked once how much it may need, as soon as there is room for it, and told
once that the request is over. What the manager raises is raised here. Knows nothing about drafts.

[speculation] Who guesses for which sequence, and how far: the engine's side of drafting.

Asks the length policies how many nodes to reserve, the drafters in their given order for drafts,
and checks what they answer. What a drafter does wrong for one request costs that request the
speculation and nothing else: a call for several that fails is made again for each alone. Hooks that
are told of several requests once (``update`` and a resource manager's) cannot be asked again, so
where one of them fails, all those requests lose it; a length policy that fails costs the drafts of
the step. Knows nothing about how drafts are made or verified.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial
from operator import index
from types import CodeType

from forethought.engine.scheduler import Plan, PlannedRow
from forethought.engine.sequence import Sequence
from forethought.kv.draft_cache import DraftKvCache, HiddenStateCache
from forethought.kv.table import TableView
from forethought.outputs import EngineStats
from forethought.speculative.draft import NO_DRAFT, Draft
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
    TokenView,
    check_draft,
)
from forethought.speculative.length.base import Schedule
from forethought.speculative.length.policy import LengthPolicy, StepRecord
from forethought.speculative.verify.verify import AcceptanceRule


class ManagedResources:
    """The units of one manager.

    Args:
        manager: the user's; None: there is nothing to hold, and everybody holds it.
    """

    def __init__(self, manager: ResourceManager | None) -> None:
        self.manager = manager
        self._held: dict[int, int] = {}

    def take(self, request: DraftRequest) -> bool:
        """Whether the request has what it may come to need; if not, it may ask again later."""
        if self.manager is None or request.request_id in self._held:
            return True
        needed = index(self.manager.get_needed_resource_to_completion(request))
        if needed < 0:
            raise ValueError(f"a request cannot need {needed} units")
        if sum(self._held.values()) + needed > self.manager.get_max_resource_count():
            return False
        self._held[request.request_id] = needed
        return True

    def prepare(self, batch: ScheduledRequests) -> None:
        """The drafter is about to be asked."""
        if self.manager is not None:
            self.manager.prepare_resources(batch)

    def update(self, batch: ScheduledRequests) -> None:
        """The step is over."""
        if self.manager is not None:
            self.manager.update_resources(batch)

    def free(self, request: DraftRequest) -> None:
        """The request has no more to do with the manager, which is told so if it held anything."""
        if self._held.pop(request.request_id, None) is not None:
            assert self.manager is not None
            self.manager.free_resources(request)

    def shutdown(self) -> None:
        """The engine is going away."""
        if self.manager is not None:
            self.manager.shutdown()


log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class DrafterEntry:
    """A drafter with what belongs to it."""

    name: str
    """As requests name it."""
    drafter: Drafter
    policy: LengthPolicy
    schedule: Schedule
    """Most depth of its drafts, by how many sequences run."""
    max_nodes: int
    """Most tokens of a draft, whatever it says itself."""
    resource_manager: ResourceManager | None = None
    rule: AcceptanceRule | None = None
    """What decides about its drafts where it applies; None: their law, exactly."""


@dataclass(eq=False, slots=True)
class _RequestDraft:
    """The part of one sequence in the current step."""

    request: DraftRequest
    depths: dict[DrafterEntry, int] = field(default_factory=dict)
    """Whom to ask, in order, and the most depth of the answer."""
    nodes: dict[DrafterEntry, int] = field(default_factory=dict)
    """And the most tokens of it."""
    asked: list[DrafterEntry] = field(default_factory=list)
    """Who was asked; the draft, if there is one, is the last one's."""
    draft: Draft = NO_DRAFT
    """What was proposed, checked. The request's own is in the drafter's hands."""


@dataclass(eq=False, slots=True)
class _DrafterStep:
    """What one drafter did in the current step."""

    prefilling: list[DraftRequest] = field(default_factory=list)
    """Whom it was shown beside those that it was asked for."""
    seconds: float = 0.0


class Drafting:
    """Drafts for the sequences of an engine.

    Args:
        drafters: asked in this order, the next one for whom the one before had nothing.
        stats: the engine's totals.
        vocab_size: ids are below this.
    """

    def __init__(self, drafters: List[DrafterEntry], stats: EngineStats, vocab_size: int) -> None:
        self._drafters, self._stats, self._vocab_size = list(drafters), stats, vocab_size
        self.names = [entry.name for entry in drafters]
        self.draft_caches: list[DraftKvCache] = [
            draft_cache for entry in drafters for draft_cache in entry.drafter.draft_caches
        ]
        self.features = [each for each in self.draft_caches if isinstance(each, HiddenStateCache)]
        self._resources = {each: ManagedResources(each.resource_manager) for each in drafters}
        self._requests: dict[int, DraftRequest] = {}
        self._lost: set[tuple[DrafterEntry, int]] = set()
        """Which drafters have failed which requests."""
        self._warned_of_ids: set[DrafterEntry] = set()
        self._parts: dict[int, _RequestDraft] = {}
        self._turns: dict[DrafterEntry, _DrafterStep] = {}

    @property
    def drafters(self) -> List[DrafterEntry]:
        """Who is asked, in this order."""
        return self._drafters

    # ---- before the forward -----------------------------------------------------------------

    def requested_nodes(self, sequences: List[Sequence], running: int) -> list[int]:
        """How many draft nodes each of the sequences, all about to decode, would like.

        Args:
            sequences: those that decode in this step.
            running: how many have a place in the running batch, these and those that prefill.
        """
        self._parts, self._turns = {}, {}
        for entry in self._drafters:
            most = entry.schedule.length(running)
            requests = [r for s in sequences if (r := self._request(entry, s, most)) is not None]
            lengths = self._lengths(entry, requests, len(sequences)) if requests else []
            sizes: dict[int, int] = {}  # by depth
            for request, length in zip(requests, lengths, strict=True):
                depth = min(length, request.max_draft_len)
                if depth > 0 and not sizes.get(depth):
                    sizes[depth] = self._nodes(entry, request, depth)
                if depth > 0 and sizes[depth] > 0:
                    part = self._parts.setdefault(request.request_id, _RequestDraft(request))
                    part.depths[entry], part.nodes[entry] = depth, sizes[depth]
        parts = [self._parts.get(sequence.id) for sequence in sequences]
        return [max(part.nodes.values()) if part else 0 for part in parts]

    def draft(self, plan: Plan) -> None:
        """Fill the rows' drafts; each row keeps no more room than its draft needs."""
        began = time.perf_counter()
        rows = {row.sequence.id: row for row in plan.rows if row.nodes}
        prefilling = [row.sequence for row in plan.rows if not row.decodes]
        for entry in self._drafters:
            self._ask(entry, rows, prefilling)
        for number, row in rows.items():
            part = self._parts[number]
            row.draft = part.draft
            rule = part.asked[-1].rule if len(row.draft) else None
            if rule is not None and rule.applies_to(row.sequence.params):
                row.rule = rule
            if len(row.draft) != row.nodes:
                plan.reserve(row, len(row.draft))
        self._stats.draft_seconds += time.perf_counter() - began

    def _request(self, entry: DrafterEntry, sequence: Sequence, most: int) -> DraftRequest | None:
        """What the drafter is to see of the sequence; None if it is not to be asked."""
        depth = self._depth(entry, sequence, most)
        if depth <= 0:
            return None
        request = self._introduced(sequence)
        request.draft, request.max_draft_len = NO_DRAFT, depth
        try:
            return request if self._resources[entry].take(request) else None
        except BaseException as error:
            self._fail(entry, error, "its resource manager cannot say what a request needs")
            self._lose(entry, [request])
            return None

    def _depth(self, entry: DrafterEntry, sequence: Sequence, most: int) -> int:
        """Most depth of a draft for the sequence: by the schedule, its room and its own wish."""
        room = sequence.limit - len(sequence.tokens) - 1  # the last token is drawn, not drafted
        depth, wish = min(room, most), sequence.params.speculation
        if wish is not None:
            if not wish.enabled or wish.drafter not in (None, entry.name):
                return 0
            depth = depth if wish.max_draft_len is None else min(depth, wish.max_draft_len)
        lost = sequence.suspect or (entry, sequence.id) in self._lost
        return 0 if lost else depth

    def _introduced(self, sequence: Sequence) -> DraftRequest:
        """The one object that drafters are shown of a generation."""
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
        """What the policy says; zeros if it cannot."""
        try:
            lengths = [index(n) for n in entry.policy.lengths(requests, batch_size)]
            if len(lengths) != len(requests):
                raise ValueError(f"{len(lengths)} lengths for {len(requests)} requests")
        except BaseException as error:
            self._fail(entry, error, "its length policy failed: no drafts in this step")
            return [0] * len(requests)
        return lengths

    def _nodes(self, entry: DrafterEntry, request: DraftRequest, depth: int) -> int:
        """Most tokens of a draft of ``depth`` levels; 0 if the drafter cannot say."""
        try:
            return min(index(entry.drafter.nodes(depth)), entry.max_nodes)
        except BaseException as error:
            self._fail(entry, error, "it does not say how large its drafts are")
            self._lose(entry, [request])
            return 0

    def _ask(
        self, entry: DrafterEntry, rows: dict[int, PlannedRow], prefilling: list[Sequence]
    ) -> None:
        """Let one drafter propose for those who may ask it and have nothing yet."""
        began = time.perf_counter()
        asking: list[_RequestDraft] = []
        for number, row in rows.items():
            part = self._parts[number]
            if entry not in part.depths or len(part.draft):
                continue
            part.request.table = TableView(row.sequence.table)
            part.nodes[entry] = min(row.nodes, part.nodes[entry])
            part.asked.append(entry)
            asking.append(part)
        if not asking:
            return
        turn = self._turns[entry] = _DrafterStep(self._prefilling(entry, prefilling))
        if self._prepare(entry, asking, turn.prefilling) and not self._propose(
            entry, asking, turn.prefilling
        ):
            for part in asking:  # one by one, if there are several: who fails alone loses it
                if len(asking) == 1 or not self._propose(entry, [part], []):
                    self._lose(entry, [part.request])
        turn.seconds = time.perf_counter() - began

    def _prefilling(self, entry: DrafterEntry, sequences: list[Sequence]) -> list[DraftRequest]:
        """Those of the sequences that the drafter may come to draft for, to look at."""
        shown = []
        for sequence in sequences:
            if self._depth(entry, sequence, entry.schedule.max_length) > 0:
                request = self._introduced(sequence)
                request.draft, request.table = NO_DRAFT, TableView(sequence.table)
                request.max_draft_len = request.max_nodes = 0
                shown.append(request)
        return shown

    def _prepare(
        self, entry: DrafterEntry, parts: list[_RequestDraft], prefilling: list[DraftRequest]
    ) -> bool:
        """Whether the resource manager, if there is one, is ready for them."""
        try:
            self._resources[entry].prepare(_batch(parts, prefilling))
        except BaseException as error:
            self._fail(entry, error, "prepare_resources failed")
            self._lose(entry, [part.request for part in parts])
            return False
        return True

    def _propose(
        self, entry: DrafterEntry, parts: list[_RequestDraft], prefilling: list[DraftRequest]
    ) -> bool:
        """Whether the drafter came through; if not, nothing is proposed."""
        for part in parts:
            part.request.draft = NO_DRAFT
            _limit(part, entry)
        try:
            entry.drafter.prepare_draft_tokens(
                _batch(parts, prefilling), self._resources[entry].manager
            )
        except BaseException as error:
            self._fail(entry, error, "it raised")
            return False
        for part in parts:
            self._check(entry, part)
        return True

    def _check(self, entry: DrafterEntry, part: _RequestDraft) -> None:
        """Take over what was proposed for one request, if it is a draft."""
        _limit(part, entry)  # whatever the drafter has made of it
        try:
            drafted = part.request.draft
            part.draft = part.request.draft = check_draft(part.request, self._vocab_size)
            if len(part.draft) < len(drafted.tokens):
                self._warn_of_ids(entry, drafted)
        except BaseException as error:
            part.draft = part.request.draft = NO_DRAFT
            self._fail(entry, error, "what it proposed is no draft")
            self._lose(entry, [part.request])

    def _warn_of_ids(self, entry: DrafterEntry, drafted: Draft) -> None:
        """Say once of a drafter that its ids are not all the target's."""
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

    def observe(self, plan: Plan, seconds: float) -> None:
        """Tell drafters and policies what became of the drafts.

        Args:
            plan: the step's rows, with their outcomes.
            seconds: of the whole step.
        """
        accepted = {
            row.sequence.id: len(row.outcome[0][1].path) for row in plan.rows if row.outcome
        }
        forward_seconds = seconds - sum(turn.seconds for turn in self._turns.values())
        for entry in self._drafters:
            turn = self._turns.get(entry, _DrafterStep())
            parts = [part for part in self._parts.values() if entry in part.asked]
            self._update(entry, [part.request for part in parts], turn.prefilling)
            record = StepRecord(
                requests=[
                    (part.request.request_id, part.draft.depth, accepted[number])
                    for part in parts
                    if part.asked[-1] is entry
                    and len(part.draft)
                    and (number := part.request.request_id) in accepted
                ],
                batch_size=len(plan.rows),
                tokens=plan.tokens,
                context=sum(row.stop for row in plan.rows),
                forward_seconds=forward_seconds,
                draft_seconds=turn.seconds,
            )
            try:
                entry.policy.observe(record)
            except BaseException as error:
                self._fail(entry, error, "its length policy did not take in what became of a step")
        self._parts, self._turns = {}, {}

    def _update(
        self, entry: DrafterEntry, asked: list[DraftRequest], prefilling: list[DraftRequest]
    ) -> None:
        """Tell drafter and manager of the step, as far as its requests go on with them."""
        batch, shown = (
            [
                request
                for request in requests
                if request.request_id in self._requests
                and (entry, request.request_id) not in self._lost
            ]
            for requests in (asked, prefilling)
        )
        if not batch:
            return
        try:
            entry.drafter.update(ScheduledRequests(list(batch), list(shown)))
            self._resources[entry].update(ScheduledRequests(list(batch), list(shown)))
        except BaseException as error:
            self._fail(entry, error, "it or its resource manager failed after a step")
            self._lose(entry, batch)

    def _fail(self, entry: DrafterEntry, error: BaseException, why: str) -> None:
        """Log and count what a drafter, or what belongs to it, has raised: ``sys.exit()`` as well.

        Raises:
            BaseException: the error, if it is not the drafter's own; see ``_is_interrupt``.
        """
        if _is_interrupt(error):
            raise error
        log.warning("drafter %r: %s", entry.name, why, exc_info=error)
        self._stats.draft_failures += 1

    def _lose(self, entry: DrafterEntry, requests: list[DraftRequest]) -> None:
        """No more drafts of this drafter for these; what they hold is free for others."""
        for request in requests:
            self._lost.add((entry, request.request_id))
            self._quietly(entry, self._resources[entry].free, request)

    def drop(self, sequence: Sequence, error: Exception) -> None:
        """The target failed on a draft of the sequence, which gets no more of this drafter."""
        part = self._parts[sequence.id]
        self._fail(part.asked[-1], error, "the target failed on its draft")
        self._lose(part.asked[-1], [part.request])
        part.draft = NO_DRAFT

    def release(self, sequence: Sequence) -> None:
        """The generation is over, for better or worse."""
        self._release(sequence.id)

    def _release(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is None:
            return
        for entry in self._drafters:
            self._lost.discard((entry, number))
            self._quietly(entry, entry.drafter.release, request)
            self._quietly(entry, self._resources[entry].free, request)

    def shutdown(self) -> None:
        """The engine is going away, and with it every generation that is not over."""
        for number in list(self._requests):
            self._release(number)
        for entry in self._drafters:
            self._quietly(entry, entry.drafter.shutdown)
            self._quietly(entry, self._resources[entry].shutdown)

    def _quietly(self, entry: DrafterEntry, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except BaseException as error:
            self._fail(entry, error, "it or its resource manager failed at the end")


def _is_interrupt(error: BaseException) -> bool:
    """Whether an error is meant for the program, and only came while a drafter was running.

    Signals are handled in the main thread. There a KeyboardInterrupt is taken for Ctrl-C, and what
    a signal handler has raised, such as SystemExit on SIGTERM, is the program's as well.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {_code(handler) for handler in handlers if callable(handler)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code(handler: Callable[..., object]) -> CodeType | None:
    """The code that runs when a handler is called; None if that is not Python."""
    while isinstance(handler, partial):
        handler = handler.func
    called = handler if hasattr(handler, "__code__") else type(handler).__call__
    return getattr(called, "__code__", None)


def _batch(parts: list[_RequestDraft], prefilling: list[DraftRequest]) -> ScheduledRequests:
    """New lists each time: whoever gets them may do with them what it likes."""
    return ScheduledRequests([part.request for part in parts], list(prefilling))


def _limit(part: _RequestDraft, entry: DrafterEntry) -> None:
    """Tell the request how far this drafter's answer may go."""
    part.request.max_draft_len = part.depths[entry]
    part.request.max_nodes = part.nodes[entry]
