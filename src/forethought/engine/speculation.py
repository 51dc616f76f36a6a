"""Who guesses for which sequence, and how far: the engine's side of drafting.

Asks the length policies how many nodes to reserve, the drafters in their given order for drafts,
and checks what they answer. A drafter that fails, or answers nonsense, costs its request the
speculation and nothing else. Knows nothing about how drafts are made or verified.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from operator import index

from forethought.engine.passing import Outcome
from forethought.engine.scheduler import Plan, PlannedRow
from forethought.engine.sequence import Sequence
from forethought.engine.stats import EngineStats
from forethought.kv.companion import Companion
from forethought.speculative.check import checked
from forethought.speculative.draft import NO_DRAFT, Draft
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.features import Features
from forethought.speculative.length import LengthPolicy, StepRecord
from forethought.speculative.rule import AcceptanceRule

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Equipped:
    """A drafter with what belongs to it."""

    name: str
    """As requests name it."""
    drafter: Drafter
    policy: LengthPolicy
    max_draft_len: int
    """Most depth of its drafts."""
    resource_manager: ResourceManager | None = None
    rule: AcceptanceRule | None = None
    """What decides about its drafts where it applies; None: their law, exactly."""


@dataclass(eq=False, slots=True)
class _Part:
    """The part of one sequence in the current step."""

    request: DraftRequest
    depths: dict[Equipped, int] = field(default_factory=dict)
    """Whom to ask, in order, and the most depth of the answer."""
    nodes: dict[Equipped, int] = field(default_factory=dict)
    """And the most tokens of it."""
    asked: list[Equipped] = field(default_factory=list)
    """Who was asked; the draft, if there is one, is the last one's."""
    draft: Draft = NO_DRAFT
    """What was proposed, checked. The request's own is in the drafter's hands."""


class Speculation:
    """Drafts for the sequences of an engine.

    Args:
        drafters: asked in this order, the next one for whom the one before had nothing.
        stats: the engine's totals.
        vocab_size: ids are below this.
    """

    def __init__(self, drafters: List[Equipped], stats: EngineStats, vocab_size: int) -> None:
        self._drafters, self._stats, self._vocab_size = list(drafters), stats, vocab_size
        self.names = [equipped.name for equipped in drafters]
        self.companions: list[Companion] = [
            companion for equipped in drafters for companion in equipped.drafter.companions
        ]
        self.features = [each for each in self.companions if isinstance(each, Features)]
        self._requests: dict[int, DraftRequest] = {}
        self._lost: set[tuple[Equipped, int]] = set()
        """Which drafters have failed which requests."""
        self._held: dict[tuple[Equipped, int], int] = {}
        """Units that requests hold of resource managers."""
        self._parts: dict[int, _Part] = {}
        self._draft_seconds = 0.0

    # ---- before the forward -----------------------------------------------------------------

    def wishes(self, sequences: List[Sequence]) -> list[int]:
        """How many draft nodes each of the sequences, all about to decode, would like."""
        self._parts = {}
        for equipped in self._drafters:
            requests = [r for s in sequences if (r := self._request(equipped, s)) is not None]
            depths = equipped.policy.lengths(requests, len(sequences)) if requests else []
            for request, depth in zip(requests, depths, strict=True):
                depth = min(depth, request.max_draft_len)
                if depth > 0 and (nodes := self._nodes(equipped, request, depth)) > 0:
                    part = self._parts.setdefault(request.request_id, _Part(request))
                    part.depths[equipped], part.nodes[equipped] = depth, nodes
        parts = [self._parts.get(sequence.id) for sequence in sequences]
        return [max(part.nodes.values()) if part else 0 for part in parts]

    def draft(self, plan: Plan) -> None:
        """Fill the rows' drafts; each row keeps no more room than its draft needs."""
        began = time.perf_counter()
        rows = {row.sequence.id: row for row in plan.rows if row.nodes}
        for equipped in self._drafters:
            self._ask(equipped, rows)
        for number, row in rows.items():
            part = self._parts[number]
            row.draft = part.draft
            rule = part.asked[-1].rule if len(row.draft) else None
            if rule is not None and rule.bends(row.sequence.params):
                row.rule = rule
            if len(row.draft) != row.nodes:
                row.reserve(len(row.draft))
        self._draft_seconds = time.perf_counter() - began
        self._stats.draft_seconds += self._draft_seconds

    def _request(self, equipped: Equipped, sequence: Sequence) -> DraftRequest | None:
        """What the drafter is to see of the sequence; None if it is not to be asked."""
        wish = sequence.params.speculation
        room = sequence.limit - len(sequence.tokens) - 1  # the last token is drawn, not drafted
        depth = min(room, equipped.max_draft_len)
        if wish is not None:
            most = depth if wish.max_draft_len is None else wish.max_draft_len
            meant = wish.enabled and wish.drafter in (None, equipped.name)
            depth = min(depth, most) if meant else 0
        if depth <= 0 or (equipped, sequence.id) in self._lost:
            return None
        request = self._requests.get(sequence.id)
        if request is None:
            request = self._requests[sequence.id] = self._introduce(sequence)
        request.draft, request.max_draft_len = NO_DRAFT, depth
        return request if self._holds(equipped, request) else None

    @staticmethod
    def _introduce(sequence: Sequence) -> DraftRequest:
        prompt = tuple(sequence.tokens[: sequence.prompt_length])
        return DraftRequest(
            request_id=sequence.id,
            tokens=sequence.tokens,
            prompt_length=sequence.prompt_length,
            params=sequence.params,
            group=hash((sequence.params.cache_salt, prompt)),
            index=sequence.index,
            seed=sequence.seed,
        )

    def _holds(self, equipped: Equipped, request: DraftRequest) -> bool:
        """Whether the drafter's resource manager, if any, has enough for the whole request."""
        manager, key = equipped.resource_manager, (equipped, request.request_id)
        if manager is None or key in self._held:
            return True
        try:
            needed = manager.get_needed_resource_to_completion(request)
            held = sum(units for (owner, _), units in self._held.items() if owner is equipped)
            if held + needed > manager.get_max_resource_count():
                return False
        except Exception:
            self._lose(equipped, [request], "its resource manager failed")
            return False
        self._held[key] = needed
        return True

    def _nodes(self, equipped: Equipped, request: DraftRequest, depth: int) -> int:
        """Most tokens of a draft of ``depth`` levels; 0 if the drafter cannot say."""
        try:
            return index(equipped.drafter.nodes(depth))
        except Exception:
            self._lose(equipped, [request], "it does not say how large its drafts are")
            return 0

    def _ask(self, equipped: Equipped, rows: dict[int, PlannedRow]) -> None:
        """Let one drafter propose for those who may ask it and have nothing yet."""
        asking: list[_Part] = []
        for number, row in rows.items():
            part = self._parts[number]
            if equipped not in part.depths or len(part.draft):
                continue
            part.request.table = row.sequence.table
            part.nodes[equipped] = min(row.nodes, part.nodes[equipped])
            part.asked.append(equipped)
            asking.append(part)
        if asking and not self._prepare(equipped, asking):
            for part in asking:  # one by one: who fails alone loses its speculation
                if not self._prepare(equipped, [part]):
                    self._lost.add((equipped, part.request.request_id))

    def _prepare(self, equipped: Equipped, parts: list[_Part]) -> bool:
        """Whether the drafter came through; if not, nothing is proposed."""
        manager = equipped.resource_manager
        batch = ScheduledRequests([part.request for part in parts])
        for part in parts:
            _limit(part, equipped)
        try:
            if manager is not None:
                manager.prepare_resources(batch)
            equipped.drafter.prepare_draft_tokens(batch, manager)
            for part in parts:
                _limit(part, equipped)  # whatever the drafter has made of it
                part.draft = part.request.draft = checked(part.request, self._vocab_size)
        except Exception:
            log.warning("drafter %r failed", equipped.name, exc_info=True)
            self._stats.draft_failures += 1
            for part in parts:
                part.draft = part.request.draft = NO_DRAFT
            return False
        return True

    # ---- after the commit -------------------------------------------------------------------

    def observe(self, plan: Plan, outcomes: List[Outcome], seconds: float) -> None:
        """Tell drafters and policies what became of the drafts.

        Args:
            plan: the step's rows.
            outcomes: what was drawn after each.
            seconds: of the whole step.
        """
        accepted = {
            row.sequence.id: len(outcome[0][1].path)
            for row, outcome in zip(plan.rows, outcomes, strict=True)
            if outcome
        }
        for equipped in self._drafters:
            parts = [part for part in self._parts.values() if equipped in part.asked]
            alive = [part.request for part in parts if part.request.request_id in self._requests]
            if alive:
                self._update(equipped, alive)
            equipped.policy.observe(
                StepRecord(
                    requests=[
                        (part.request.request_id, part.draft.depth, accepted[number])
                        for part in parts
                        if part.asked[-1] is equipped
                        and len(part.draft)
                        and (number := part.request.request_id) in accepted
                    ],
                    batch_size=len(plan.rows),
                    tokens=plan.tokens,
                    context=sum(row.stop for row in plan.rows),
                    forward_seconds=seconds - self._draft_seconds,
                    draft_seconds=self._draft_seconds if parts else 0.0,
                )
            )
        self._parts = {}

    def _update(self, equipped: Equipped, requests: list[DraftRequest]) -> None:
        batch, manager = ScheduledRequests(requests), equipped.resource_manager
        try:
            equipped.drafter.update(batch)
            if manager is not None:
                manager.update_resources(batch)
        except Exception:
            self._lose(equipped, requests, "it failed after a step")

    def _lose(self, equipped: Equipped, requests: list[DraftRequest], why: str) -> None:
        log.warning("no more drafts of %r: %s", equipped.name, why, exc_info=True)
        self._stats.draft_failures += 1
        self._lost |= {(equipped, request.request_id) for request in requests}

    def release(self, sequence: Sequence) -> None:
        """The generation is over, for better or worse."""
        request = self._requests.pop(sequence.id, None)
        if request is None:
            return
        for equipped in self._drafters:
            self._lost.discard((equipped, sequence.id))
            self._quietly(equipped, equipped.drafter.release, request)
            if self._held.pop((equipped, sequence.id), None) is not None:
                assert equipped.resource_manager is not None
                self._quietly(equipped, equipped.resource_manager.free_resources, request)

    def shutdown(self) -> None:
        """The engine is going away."""
        for equipped in self._drafters:
            self._quietly(equipped, equipped.drafter.shutdown)
            if equipped.resource_manager is not None:
                self._quietly(equipped, equipped.resource_manager.shutdown)

    def _quietly(self, equipped: Equipped, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception:
            log.warning("drafter %r failed at the end", equipped.name, exc_info=True)
            self._stats.draft_failures += 1


def _limit(part: _Part, equipped: Equipped) -> None:
    """Tell the request how far this drafter's answer may go."""
    part.request.max_draft_len = part.depths[equipped]
    part.request.max_nodes = part.nodes[equipped]
