"""The scope that code runs in: a request, or one of its parallel branches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

from forethought.scaffolding.budget import BudgetAccount


class Resource(Protocol):
    """Something that is made without arguments and must be closed."""

    def close(self) -> None:
        """Free what it holds."""


_R = TypeVar("_R", bound=Resource)


class SharedResources:
    """One object of each class that is asked for, made at its first use; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[type[Resource], Resource] = {}
        self._closed = False

    def get(self, kind: type[_R]) -> _R:
        """The object of a class; a closed one after ``close``."""
        with self._lock:
            if kind not in self._objects:
                self._objects[kind] = kind()
                if self._closed:
                    self._objects[kind].close()
            return cast(_R, self._objects[kind])

    def close(self) -> None:
        """Close all objects."""
        with self._lock:
            self._closed = True
            for resource in self._objects.values():
                resource.close()


@dataclass(frozen=True, slots=True)
class ExecutionScope:
    """A request, or one of its parallel branches."""

    request_id: str
    path: str
    """``""`` for the request itself, ``"2"`` for a branch, ``"2.0"`` for a branch of that."""
    account: BudgetAccount
    """What the whole request has spent, and its limits."""
    priority: int = 0
    parent: ExecutionScope | None = None
    resources: SharedResources | None = None
    """What all requests of a ``ScaffoldingLlm`` share, such as processes for formulas."""
    thinking: Callable[[Any, Any], Any] | None = None
    """``thinking(task, tag)``: the ``ThinkingProfile`` of a worker's model after the prompt of a
    task; None: it is not known."""
    cache_salt: str = ""
    """Prefixes that a worker has cached are shared only among requests of the same salt."""
    adapter: str | None = None
    """The LoRA adapter of all that the request generates, by its name; None: the worker's."""
    session: str | None = None
    """Key of what the request is a part of, such as a session of an agent: its requests are placed
    together where there are several replicas or servers."""

    @property
    def ledger(self) -> BudgetAccount:
        """The former name of ``account``."""
        return self.account

    @property
    def scope_id(self) -> str:
        """``"request"`` or ``"request:2.0"``: the key under which workers keep state."""
        return f"{self.request_id}:{self.path}" if self.path else self.request_id

    def child(self, index: int) -> ExecutionScope:
        """The scope of a branch."""
        path = f"{self.path}.{index}" if self.path else str(index)
        return replace(self, path=path, parent=self)


_current: ContextVar[ExecutionScope | None] = ContextVar("forethought_scope", default=None)


class _CurrentScope:
    """``current_scope()``, or ``current_scope.get()`` as of a ``ContextVar``."""

    def __call__(self) -> ExecutionScope | None:
        return _current.get()

    get = __call__


current_scope = _CurrentScope()


def enter(scope: ExecutionScope) -> None:
    """Make ``scope`` the one of the running asyncio task, and of those that it will start."""
    _current.set(scope)


def num_generated() -> int:
    """Tokens that the current request has generated so far; 0 outside of one."""
    scope = current_scope()
    return scope.account.usage.completion_tokens if scope else 0
