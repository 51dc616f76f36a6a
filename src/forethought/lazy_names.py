"""Public names of a package that are imported when first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class LazyNames:
    """Loads the public names of a package for its module ``__getattr__`` (PEP 562).

    Args:
        package: the package's ``__name__``.
        homes: module below ``forethought`` -> names in it.
        submodules: modules of the package that are public themselves.
    """

    def __init__(
        self, package: str, homes: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
    ) -> None:
        self._package, self._submodules = package, submodules
        self._home = {name: module for module, names in homes.items() for name in names}
        self.public = sorted([*self._home, *submodules])

    def load(self, name: str) -> Any:
        """Import a name, and keep it in the package.

        Raises AttributeError if the package has no such name, DependencyError if its module needs a
        package that is not installed.
        """
        if name in self._submodules:
            return importlib.import_module(f"{self._package}.{name}")
        if name not in self._home:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"forethought.{self._home[name]}")
        except ModuleNotFoundError as error:
            from forethought.errors import DependencyError

            raise DependencyError.missing(error.name or "torch", name, "local") from error
        value = getattr(module, name)
        setattr(sys.modules[self._package], name, value)
        return value
