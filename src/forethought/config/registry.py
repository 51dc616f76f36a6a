"""Tables of objects by short name, loaded lazily.

A name resolves to the object that it is written down for, imported only when asked for; so does
``"module:Name"`` for the user's own; anything that is not a string is taken as it is.

Names from outside of the program (a request, a policy file) resolve in a ``ClosedRegistry``, which
imports nothing after it is made.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from forethought.errors import UnknownNameError, UsageError


@contextmanager
def _importing_from_here(module: str) -> Iterator[None]:
    """``module`` may be a file of the current directory, after all that is installed.

    Nothing else is imported from there: a program has its own directory on the import path
    instead, so that a folder which holds a model cannot take the place of an optional package.
    """
    top = module.partition(".")[0]
    is_here = top.isidentifier() and (os.path.exists(top) or os.path.exists(f"{top}.py"))
    here = os.getcwd() if is_here else ""
    if not here or here in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        if here in sys.path:  # the module may have changed it
            sys.path.remove(here)


class Registry:
    """Short name, ``"module:Name"`` or the object itself -> the object, loaded lazily.

    Plug-ins add names through the entry-point group ``forethought.<kind>``.

    Args:
        kind: what the table holds, in the singular: ``"method"``.
        table: short name -> ``"module:Name"``.

    Attributes:
        is_closed: whether it resolves the names of its table alone.
    """

    is_closed = False

    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        self.kind, self._table = kind, dict(table)

    def names(self) -> list[str]:
        """The short names, built-in ones in the order of the table, then plug-ins."""
        return [*self._table, *(name for name in self._plugins() if name not in self._table)]

    def resolve(self, spec: Any) -> Any:
        """The object that ``spec`` names.

        Raises UnknownNameError for a short name, UsageError for a ``"module:Name"``.
        """
        return self._load(spec) if isinstance(spec, str) else spec

    def create(self, spec: Any, *args: Any, **settings: Any) -> Any:
        """Resolve ``spec`` and call it, unless it is an instance already."""
        target = self.resolve(spec)
        return target(*args, **settings) if callable(target) else target

    def closed(self, allowed: Iterable[str] = ()) -> ClosedRegistry:
        """The names of the table, and ``allowed`` ones: plug-ins, or ``"module:Name"``.

        Raises UnknownNameError for an unknown name, UsageError for one that cannot be imported.
        """
        names = dict.fromkeys([*self._table, *allowed])
        return ClosedRegistry(self.kind, {name: self._load(name) for name in names})

    def _load(self, spec: str) -> Any:
        target = spec if ":" in spec else {**self._plugins(), **self._table}.get(spec)
        if target is None:
            raise UnknownNameError(self.kind, spec, self.names())
        module, _, name = target.partition(":")
        try:  # an empty or a relative name of a module is a ValueError or a TypeError
            with _importing_from_here(module):
                return getattr(importlib.import_module(module), name)
        except Exception as error:  # the user's own module may raise anything
            if spec in self._table:
                raise
            is_missing = isinstance(error, ImportError | AttributeError)
            raise UsageError(
                f"cannot load {self.kind} {spec!r}",
                str(error) if is_missing else f"{type(error).__name__}: {error}",
                "Write it as module:Name, with the module installed, in a directory of PYTHONPATH, "
                "or in the current directory",
            ) from error

    def _plugins(self) -> Mapping[str, str]:
        return _plugins(f"forethought.{self.kind}")


class ClosedRegistry(Registry):
    """Names and their objects, and no others: no plug-in, and nothing is imported for a name."""

    is_closed = True

    def __init__(self, kind: str, objects: Mapping[str, Any]) -> None:
        super().__init__(kind, {})
        self._objects = dict(objects)

    def names(self) -> list[str]:
        """All names that it resolves."""
        return list(self._objects)

    def _load(self, spec: str) -> Any:
        if spec not in self._objects:
            raise UnknownNameError(self.kind, spec, self._objects)
        return self._objects[spec]


@functools.cache
def _plugins(group: str) -> Mapping[str, str]:
    """Name -> ``"module:Name"`` of the entry points; a scan of all installed distributions."""
    return {point.name: point.value for point in entry_points(group=group)}
