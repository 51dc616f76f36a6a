"""Every error that forethought raises at its users, and nothing else.

Each error says *what* happened, *why*, and what to do about it (*fix*); ``str(error)`` joins them.
Errors of other libraries are translated once, where they enter; ``__cause__`` keeps them.

::

    ForethoughtError
    ├── UsageError (also ValueError)      the caller asked for something that cannot be
    │   ├── ParameterError                a value out of range, an unknown field, a contradiction
    │   ├── UnknownNameError              a method, worker, backend, ... that is not in its table
    │   ├── ModelError                    a model directory that is missing, broken or not supported
    │   ├── SnapshotError                 a KV snapshot that is broken or of another model
    │   ├── TraceError                    a trace that is damaged, or of another controller
    │   ├── ContextLengthError            more tokens than the model's context holds
    │   ├── CapacityError                 more tokens than the KV cache holds
    │   ├── WorkerTagError                a task whose worker_tag no worker serves
    │   ├── IsolationError                programs cannot be isolated on this machine
    │   └── DependencyError (ImportError) an optional dependency that is not installed
    ├── TaskError                         a worker failed on a task; raised inside the controller
    ├── UpstreamError                     another server broke its answer off with an error
    ├── RequestError                      a request failed in the engine; others go on
    │   └── LogitsError                   the model's logits for it are NaN or infinite
    ├── RequestTimeout (TimeoutError)     a deadline passed; the request was aborted
    ├── RequestCancelled                  the request was cancelled by its owner
    ├── BudgetExceeded                    a method wanted more than its budget allows
    ├── FileError (also OSError)          a file cannot be written, such as on a full disk
    └── EngineStopped                     the engine has shut down or died; nothing more will run
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = 200
"""Characters of an unknown name that a message holds, and that are compared with known ones."""


class ForethoughtError(Exception):
    """Base of the tree.

    Args:
        what: what happened, in one clause.
        why: the reason, with the offending value.
        fix: what the reader can do about it.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        head = f"{self.what}: {self.why}" if self.why else self.what
        if not self.fix:
            return head
        return f"{head} {self.fix}" if head.endswith("?") else f"{head}. {self.fix}"


class UsageError(ForethoughtError, ValueError):
    """The caller asked for something that cannot be; nothing has run."""


class ParameterError(UsageError):
    """A value outside its range, an unknown field, or two fields that exclude each other. ``param``
    is the field that it is about; None: no single one.
    """

    def __init__(
        self, what: str, why: str = "", fix: str = "", *, param: str | None = None
    ) -> None:
        super().__init__(what, why, fix)
        self.param = param

    @classmethod
    def unknown(cls, owner: str, names: Iterable[str], allowed: Iterable[str]) -> ParameterError:
        """Refuse keyword names that ``owner`` does not have, naming those that it has."""
        unknown, choices = sorted(names), sorted(allowed)
        return cls(
            f"{owner} has no parameter {', '.join(map(repr, unknown)):.{_SHOWN}}",
            _nearest(unknown[0][:_SHOWN], choices) or "the name is unknown",
            f"Allowed: {', '.join(choices) or 'none'}",
            param=unknown[0],
        )


class UnknownNameError(UsageError):
    """A name that is not in its table.

    Args:
        kind: what the name should have named, such as ``"method"``.
        allowed: the names there are.

    Attributes:
        param: the field that has the name; None: not known.
    """

    param: str | None = None

    def __init__(self, kind: str, name: str, allowed: Iterable[str]) -> None:
        choices = sorted(allowed)
        super().__init__(
            f"unknown {kind} {name!r:.{_SHOWN}}",
            _nearest(str(name)[:_SHOWN], choices) or f"no {kind} has this name",
            f"Allowed: {', '.join(choices) or 'none'}",
        )
        self.kind, self.name, self.allowed = kind, name, choices

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.name, self.allowed)


class ModelError(UsageError):
    """A model directory that is missing, broken or holds a model that is not supported."""


class SnapshotError(UsageError):
    """A KV snapshot that cannot be read or written, or is of another model, dtype or layout."""


class TraceError(UsageError):
    """A trace that cannot be read or replayed: it is damaged, or of another controller."""


class ContextLengthError(UsageError):
    """More tokens than the model's context holds."""


class CapacityError(UsageError):
    """More tokens than the whole KV cache holds."""


class WorkerTagError(UsageError):
    """A task whose ``worker_tag`` no worker serves."""


class IsolationError(UsageError):
    """Programs cannot be isolated on this machine, and ``unsafe`` is not given."""


class DependencyError(UsageError, ImportError):
    """An optional dependency is needed and not installed."""

    @classmethod
    def missing(cls, package: str, purpose: str, extra: str) -> DependencyError:
        """The error for ``package``, which the extra ``forethought[extra]`` would install."""
        return cls(
            f"{package} is not installed",
            f"{purpose} needs it",
            f'Install it with: pip install "forethought[{extra}]"',
        )


class TaskError(ForethoughtError):
    """The failure of ``task`` on a worker, with its ``status``. Raised at the controller's
    ``yield``.
    """

    def __init__(
        self, what: str, why: str = "", fix: str = "", *, task: Any = None, status: Any = None
    ) -> None:
        super().__init__(what, why, fix)
        self.task, self.status = task, status


class UpstreamError(ForethoughtError):
    """Another server broke an answer off that had begun, and said why."""

    @classmethod
    def of(cls, error: Any) -> UpstreamError:
        """Of the error in a stream: an object with a ``message``, or a text."""
        message = error.get("message") if isinstance(error, Mapping) else error
        return cls(
            "the server ended its answer with an error", str(message or "it does not say why")
        )


class RequestError(ForethoughtError):
    """One request failed in the engine; ``__cause__`` is the error. The other requests go on."""


class LogitsError(RequestError):
    """The model's logits for a request are NaN or infinite, so that no token can be drawn."""


class RequestTimeout(ForethoughtError, TimeoutError):
    """A deadline passed before the result was there, or its grammar was compiled; the request was
    aborted."""


class RequestCancelled(ForethoughtError):
    """The request was cancelled by its owner."""


class BudgetExceeded(ForethoughtError):
    """A method wanted more tokens, calls or seconds than its budget allows."""


class FileError(ForethoughtError, OSError):
    """A file cannot be written; what had its name is as it was."""


class EngineStopped(ForethoughtError):
    """The engine has shut down or died; nothing more will run on it."""


def _nearest(name: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else ""
