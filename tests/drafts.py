"""The drafts that an engine's drafters make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from forethought.engine.engine import Engine


class Seen(NamedTuple):
    """What one request showed, and what was drafted for it."""

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    parents: tuple[int, ...] | None


@contextmanager
def recording(machine: Engine) -> Iterator[list[Seen]]:
    """Keeps every draft that the engine's first drafter makes in this context."""
    seen: list[Seen] = []
    drafter = machine.speculation.drafters[0].drafter
    prepare = drafter.prepare_draft_tokens

    def record(batch, resources=None) -> None:
        prepare(batch, resources)
        for each in batch.generation_requests:
            draft = each.draft
            seen.append(Seen(tuple(each.tokens), tuple(draft.tokens), draft.parents))

    drafter.prepare_draft_tokens = record  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del drafter.prepare_draft_tokens  # type: ignore[method-assign]
