"""What holds of a generation, however its steps were made."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence

COUNTS = (
    *("steps", "decoded", "prefilled", "cached", "drafted", "accepted"),
    *("draft_failures", "failures"),
)


def facts(machine: Engine, sequence: Sequence) -> dict[str, Any]:
    """Of a kept sequence: tokens, counts, and all that is stored of it."""
    size = sequence.num_computed
    stored = sequence.table.slots(0, size)
    caches = machine.speculation.draft_caches
    ready = [cache._ready.reshape(-1)[stored].tolist() for cache in caches]
    kept = [[stored[at] for at, is_ready in enumerate(own) if is_ready] for own in ready]
    return {
        "tokens": sequence.tokens,
        "computed": (size, sequence.num_ever_computed),
        "digests": sequence.table.digests,
        "keys": [layer[stored].tolist() for layer in machine.runner.storage.keys],
        "ready": ready,
        "draft keys": [
            layer[own].tolist()
            for cache, own in zip(caches, kept, strict=True)
            for layer in cache.storage.keys
        ],
        "end": (sequence.finish_reason, sequence.stop_reason),
        "sampled": sequence.sampled_positions,
        "usage": sequence.usage,
        "metrics": sequence.metrics,
        "drafted": sequence.drafted_steps,
        "status": sequence.status,
    }


def expect_same(machines: List[Engine], kept: List[List[Sequence]]) -> None:
    """Two engines have done the same.

    Args:
        machines: the engines.
        kept: of each, the sequences that it has kept, in order.
    """
    for pair in zip(*kept, strict=True):
        expected, found = (facts(m, each) for m, each in zip(machines, pair, strict=True))
        for name in expected:
            assert found[name] == expected[name], name
    for name in COUNTS:
        expected_count, count = (getattr(machine.stats, name) for machine in machines)
        assert count == expected_count, name
    for machine in machines:
        machine.check_integrity()
