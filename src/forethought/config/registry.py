"""Tables of objects by short name, loaded lazily.

A name resolves to the object that it is written down for, imported only when asked for; so does
``"module:Name"`` for the user's own; anything that is not a string is taken as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from forethought.errors import UnknownNameError, UsageError


class Registry:
    """Short name, ``"module:Name"`` or the object itself -> the object, loaded lazily.

    Plug-ins add names through the entry-point group ``forethought.<kind>``.

    Args:
        kind: what the table holds, in the singular: ``"method"``.
        table: short name -> ``"module:Name"``.
    """

    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        self.kind, self._table = kind, dict(table)

    def names(self) -> list[str]:
        """The short names, built-in ones in the order of the table, then plug-ins."""
        return [*self._table, *(name for name in self._plugins() if name not in self._table)]

    def resolve(self, spec: Any) -> Any:
        """The object that ``spec`` names.

        Raises:
            UnknownNameError: no such short name.
            UsageError: a ``"module:Name"`` that cannot be imported.
        """
        if not isinstance(spec, str):
            return spec
        target = spec if ":" in spec else {**self._plugins(), **self._table}.get(spec)
        if target is None:
            raise UnknownNameError(self.kind, spec, self.names())
        module, _, name = target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            if spec in self._table:
                raise
            raise UsageError(
                f"cannot load {self.kind} {spec!r}",
                str(error),
                "Write it as module:Name, with the module on the import path",
            ) from error

    def create(self, spec: Any, *args: Any, **settings: Any) -> Any:
        """Resolve ``spec`` and call it, unless it is an instance already."""
        target = self.resolve(spec)
        return target(*args, **settings) if callable(target) else target

    def _plugins(self) -> dict[str, str]:
        return {point.name: point.value for point in entry_points(group=f"forethought.{self.kind}")}
