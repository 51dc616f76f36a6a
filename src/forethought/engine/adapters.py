"""The adapters of an engine by name: added and removed while it serves.

Names are looked up when a generation starts; from then on its sequence holds the adapter itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from forethought.engine.sequence import Sequence
from forethought.errors import ParameterError, SnapshotError, UnknownNameError, UsageError
from forethought.model.token_adapters import PlacedAdapter

BASE = ""
"""What ``SamplingParams.adapter`` names the model alone."""


class AdapterTable:
    """The adapters that requests may choose. Looking up is possible from any thread."""

    def __init__(self) -> None:
        self._adapters: dict[str, PlacedAdapter] = {}

    @property
    def names(self) -> list[str]:
        """In the order in which they were added."""
        return list(self._adapters)

    def add(self, adapter: PlacedAdapter) -> None:
        """Raises ParameterError if there is one of its name."""
        if adapter.name in self._adapters:
            raise ParameterError(
                f"there is an adapter {adapter.name!r} already",
                "a name stands for one set of weights",
                "Remove it first, or choose another name",
            )
        self._adapters[adapter.name] = adapter

    def remove(self, name: str, live: Iterable[Sequence]) -> None:
        """Forget an adapter that none of the ``live`` sequences has.

        Raises:
            UnknownNameError: there is none of this name.
            UsageError: requests or sessions use it.
        """
        adapter = self.get(name)
        num_users = sum(sequence.adapter is adapter for sequence in live)
        if num_users:
            raise UsageError(
                f"the adapter {name!r} is in use",
                f"{num_users} sequences are computed with it",
                "Wait for its requests to end, and close its sessions",
            )
        del self._adapters[name]

    def get(self, name: str) -> PlacedAdapter:
        """Raises UnknownNameError if there is none of this name."""
        try:
            return self._adapters[name]
        except KeyError:
            raise UnknownNameError("adapter", name, self.names) from None

    def chosen(self, name: str | None, current: PlacedAdapter | None) -> PlacedAdapter | None:
        """The adapter that ``SamplingParams.adapter`` chooses for a sequence, which has
        ``current``. Raises as ``get``.
        """
        if name is None:
            return current
        return None if name == BASE else self.get(name)

    def of_snapshot(self, name: str, digest: bytes) -> PlacedAdapter | None:
        """The adapter that a snapshot was computed with, whatever its name is here; None: the model
        alone. Raises SnapshotError if there is none with the weights of ``digest``.
        """
        if not digest:
            return None
        for adapter in self._adapters.values():
            if adapter.digest == digest:
                return adapter
        raise SnapshotError(
            f"the snapshot was computed with the adapter {name!r}",
            "there is no adapter with its weights",
            "Add that adapter first",
        )
