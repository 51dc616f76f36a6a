"""A drafter as the engine has it: its settings, the units that its requests hold, its errors."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import index
from types import CodeType

from forethought.config.sampling import SpeculationParams
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.length.policy import LengthPolicy, Schedule
from forethought.speculative.verify.verify import AcceptanceRule


class ManagedResources:
    """The units of a user's resource manager that requests hold.

    Each request is asked for its units until they are available, and freed once.

    Args:
        manager: the user's; None: every request has what it needs.
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

    def may_draft(self, own: SpeculationParams | None) -> bool:
        """Whether a request with these params may have drafts of this drafter."""
        return own is None or (own.enabled and own.drafter in (None, self.name))


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
