"""``ReplicaCounts``: the counts of all replicas of an ingress, with those that are gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from forethought.cluster.fleet import Fleet
from forethought.cluster.link import Link
from forethought.cluster.migration import MigrationStats
from forethought.outputs import EngineStats


class ReplicaCounts:
    """Adds up what replicas count, so that the sums never fall."""

    def __init__(self) -> None:
        self._past = EngineStats()
        """Of the replicas that have died or were left."""

    def lost(self, link: Link) -> None:
        """A replica is gone: what it has counted stays."""
        self._past = _sum_of([self._past, link.stats])

    def total(self, fleet: Fleet, moves: MigrationStats, num_moved: int) -> EngineStats:
        """Of all replicas and of the ingress; ``num_moved`` of its generations have gone on
        elsewhere, as their replica had died.
        """
        total = _sum_of([self._past, *(link.stats for link in fleet.links)])
        total.replicas_lost, total.moved = fleet.num_lost, num_moved
        total.migrated, total.migrated_tokens = moves.num_moved, moves.num_tokens
        total.prefilled_apart = moves.num_prefilled
        return total


def assign(target: object, source: object) -> None:
    """Give one dataclass the values of another of the same class, as others refer to it."""
    for item in dataclasses.fields(source):  # type: ignore[arg-type]
        setattr(target, item.name, getattr(source, item.name))


def _sum_of(parts: Iterable[EngineStats]) -> EngineStats:
    """The counts of all; paths are those of the last."""
    total = EngineStats()
    for part in parts:
        for item in dataclasses.fields(part):
            value = getattr(part, item.name)
            if isinstance(value, int | float):
                value += getattr(total, item.name)
            if value:
                setattr(total, item.name, value)
    return total
