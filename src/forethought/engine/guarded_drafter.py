"""A drafter as the engine has it, and the one place where its errors end.

A drafter, its length policy and its resource manager may be a user's. ``GuardedDrafter`` calls
them: what a call raises is logged, counted and answered with "no draft". It costs the drafts of the
requests of that call, or of that step, and nothing else. Hooks that are called once for several
requests (``update`` and those of a resource manager) cannot be repeated, so if one raises, none of
these requests gets another draft. A length policy that raises costs the drafts of the step.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from types import CodeType
from typing import TypeVar

import torch

from forethought.config.sampling import SpeculationParams
from forethought.model.device import ForwardTimer
from forethought.outputs import EngineStats
from forethought.speculative.drafter import (
    NO_DRAFT,
    Draft,
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
    check_draft,
)
from forethought.speculative.length.policy import LengthPolicy, Schedule, SkippedSteps, StepRecord
from forethought.speculative.verify.verify import AcceptanceRule

log = logging.getLogger(__name__)

T = TypeVar("T")


class ManagedResources:
    """The units of a user's resource manager that requests hold. Each request is asked for its
    units until they are available, and freed once. Without a manager every request has what it
    needs.
    """

    def __init__(self, manager: ResourceManager | None) -> None:
        self.manager = manager
        self._held: dict[int, int] = {}

    def take(self, request: DraftRequest) -> bool:
        """Whether the request holds the units it may need; if not, a later step may try again."""
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
        """The drafter is about to draft."""
        if self.manager is not None:
            self.manager.prepare_resources(batch)

    def update(self, batch: ScheduledRequests) -> None:
        """The step is over."""
        if self.manager is not None:
            self.manager.update_resources(batch)

    def free(self, request: DraftRequest) -> None:
        """The request is over; the manager is called if the request held units."""
        if self._held.pop(request.request_id, None) is not None:
            assert self.manager is not None
            self.manager.free_resources(request)

    def shutdown(self) -> None:
        """The engine is going away."""
        if self.manager is not None:
            self.manager.shutdown()


@dataclass(eq=False, slots=True)
class DrafterEntry:
    """A drafter and its settings in the engine."""

    name: str
    """By which requests choose it."""
    drafter: Drafter
    policy: LengthPolicy
    schedule: Schedule
    """Max draft length by the number of running sequences."""
    max_nodes: int
    """Max tokens of a draft, whatever ``drafter.nodes`` returns."""
    resource_manager: ResourceManager | None = None
    rule: AcceptanceRule | None = None
    """Accepts or rejects its drafts where it applies; None: the exact rule."""


class GuardedDrafter:
    """A drafter with its length policy and resource manager, none of whose errors gets out, unless
    ``is_interrupt`` takes one for the program's own.

    Attributes:
        name, drafter, policy, schedule, rule, resource_manager: see ``DrafterEntry``.
        choosing_seconds: of the length policy in this step, and of the drafter where it drafted in
            a call of several steps; 0: it was not asked.
        learning_seconds: of drafter and length policy after the step before.
        timer: of its drafts.
        disabled: ids of the requests for which it has failed; they get no more of its drafts.
    """

    def __init__(
        self, entry: DrafterEntry, stats: EngineStats, vocab_size: int, device: torch.device
    ) -> None:
        self.name, self.drafter, self.policy = entry.name, entry.drafter, entry.policy
        self.schedule, self.rule = entry.schedule, entry.rule
        self.resource_manager = entry.resource_manager
        self._max_nodes, self._stats, self._vocab_size = entry.max_nodes, stats, vocab_size
        self.choosing_seconds = self.learning_seconds = 0.0
        self.timer = ForwardTimer(device)
        self.disabled: set[int] = set()
        self._resources = ManagedResources(entry.resource_manager)
        self._has_warned_of_ids = False

    def may_draft(self, params: SpeculationParams | None) -> bool:
        """Whether a request with these params may have drafts of this drafter."""
        return params is None or (params.enabled and params.drafter in (None, self.name))

    # ---- before the forward -----------------------------------------------------------------

    def take_resources(self, request: DraftRequest) -> bool:
        """Whether the request holds the units of the resource manager that it may need."""
        why = "its resource manager cannot say what a request needs"
        is_holding = self._guard(why, self._resources.take, request)
        if is_holding is None:
            self.disable([request])
        return bool(is_holding)

    def lengths(self, requests: list[DraftRequest], batch_size: int) -> list[int]:
        """The draft lengths that the policy chooses; zeros if it raises."""
        began = time.perf_counter()
        why = "its length policy failed: no drafts in this step"
        lengths = self._guard(why, self._chosen_lengths, requests, batch_size)
        self.choosing_seconds = time.perf_counter() - began
        return [0] * len(requests) if lengths is None else lengths

    def _chosen_lengths(self, requests: list[DraftRequest], batch_size: int) -> list[int]:
        lengths = [index(length) for length in self.policy.lengths(requests, batch_size)]
        if len(lengths) != len(requests):
            raise ValueError(f"{len(lengths)} lengths for {len(requests)} requests")
        return lengths

    def max_nodes(self, request: DraftRequest, length: int) -> int:
        """Max tokens of a draft of ``length`` levels; 0 if the drafter cannot say."""
        why = "it does not say how large its drafts are"
        num_nodes = self._guard(why, lambda: index(self.drafter.nodes(length)))
        if num_nodes is None:
            self.disable([request])
            return 0
        return min(num_nodes, self._max_nodes)

    def prepare(self, drafting: Sequence[DraftRequest], prefilling: Sequence[DraftRequest]) -> bool:
        """Whether the resource manager, if there is one, is ready for the requests."""
        if self._resources.manager is None:
            return True
        batch = ScheduledRequests(list(drafting), list(prefilling))
        is_ready = self._succeeds("prepare_resources failed", self._resources.prepare, batch)
        if not is_ready:
            self.disable(drafting)
        return is_ready

    def propose(self, drafting: Sequence[DraftRequest], prefilling: Sequence[DraftRequest]) -> bool:
        """Whether the drafter returned without an error; its proposals are in the requests."""
        batch = ScheduledRequests(list(drafting), list(prefilling))
        prepare = self.drafter.prepare_draft_tokens
        return self._succeeds("it raised", prepare, batch, self._resources.manager)

    def check(self, request: DraftRequest) -> Draft:
        """What was proposed for a request, if it is a draft, without ids the target lacks."""
        draft = self._guard("what it proposed is no draft", self._checked, request)
        request.draft = NO_DRAFT if draft is None else draft
        if draft is None:
            self.disable([request])
        return request.draft

    def _checked(self, request: DraftRequest) -> Draft:
        draft = check_draft(request, self._vocab_size)
        if len(draft) < len(request.draft.tokens):
            self._warn_of_ids(request.draft)
        return draft

    def _warn_of_ids(self, proposed: Draft) -> None:
        size = self._vocab_size
        outside = [token for token in map(index, proposed.tokens) if not 0 <= token < size]
        if outside and not self._has_warned_of_ids:
            self._has_warned_of_ids = True
            log.warning(
                "drafter %r proposed the id %d, and the target's are 0 to %d: such tokens and what "
                "follows them are left out of its drafts (logged once)",
                *(self.name, outside[0], size - 1),
            )

    # ---- after the step ---------------------------------------------------------------------

    def update(self, drafting: list[DraftRequest], prefilling: list[DraftRequest]) -> None:
        """Call drafter and resource manager after the step, for the requests that go on."""
        if not drafting:
            return

        def call() -> None:
            self.drafter.update(ScheduledRequests(list(drafting), list(prefilling)))
            if self._resources.manager is not None:
                self._resources.update(ScheduledRequests(list(drafting), list(prefilling)))

        if not self._succeeds("it or its resource manager failed after a step", call):
            self.disable(drafting)

    def observe(self, record: StepRecord) -> None:
        """Report a step to the length policy."""
        why = "its length policy did not take in what became of a step"
        self._guard(why, self.policy.observe, record)

    def observe_skipped(self, steps: SkippedSteps) -> None:
        """Report to the length policy the steps that were made without it."""
        why = "its length policy did not take in the steps it has skipped"
        self._guard(why, self.policy.skipped, steps)

    def num_skippable(self) -> int:
        """Steps that the length policy would skip; none if it raises."""
        why = "its length policy does not say what it would skip"
        return self._guard(why, lambda: index(self.policy.skip())) or 0

    def num_held_steps(self) -> int | float:
        """Steps for which the length policy keeps its choice; this one alone if it raises."""
        why = "its length policy does not say how long it keeps its choice"
        held = self._guard(why, self.policy.hold)
        return 1 if held is None else held

    def drop(self, request: DraftRequest, error: Exception) -> None:
        """The target failed on the request's draft: no more drafts for it."""
        self._count_failure(error, "the target failed on its draft")
        self.disable([request])

    # ---- the end ----------------------------------------------------------------------------

    def disable(self, requests: Sequence[DraftRequest]) -> None:
        """No more drafts for these requests; their units are freed."""
        for request in requests:
            self.disabled.add(request.request_id)
            self._guard(_AT_END, self._resources.free, request)

    def release(self, request: DraftRequest) -> None:
        """The request is over."""
        self.disabled.discard(request.request_id)
        self._guard(_AT_END, self.drafter.release, request)
        self._guard(_AT_END, self._resources.free, request)

    def shutdown(self) -> None:
        """The engine is going away."""
        self._guard(_AT_END, self.drafter.shutdown)
        self._guard(_AT_END, self._resources.shutdown)

    # ---- errors -----------------------------------------------------------------------------

    def _guard(self, why: str, call: Callable[..., T], *args: object) -> T | None:
        """What the call returns; None if it raises, even ``SystemExit``."""
        try:
            return call(*args)
        except BaseException as error:
            self._count_failure(error, why)
            return None

    def _succeeds(self, why: str, call: Callable[..., object], *args: object) -> bool:
        def succeed() -> bool:
            call(*args)
            return True

        return self._guard(why, succeed) is not None

    def _count_failure(self, error: BaseException, why: str) -> None:
        """Log and count an error; raises it again if it is the program's own (``is_interrupt``)."""
        if is_interrupt(error):
            raise error
        log.warning("drafter %r: %s", self.name, why, exc_info=error)
        self._stats.draft_failures += 1


_AT_END = "it or its resource manager failed at the end"


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is meant for the program, and was raised while a drafter was running.

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
