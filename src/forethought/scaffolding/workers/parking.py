"""The live sequences of each request, for later tasks of the same request to continue.

Two rules, both exact. A prompt that begins with the prompt and output of an earlier task continues
that task's tokens; of several such tasks, the one that gives the longest text. A prompt that
another task of the request has too, word for word, shares its prefill.
"""

from __future__ import annotations

from typing import NamedTuple

from forethought.scaffolding.scope import ExecutionScope
from forethought.scaffolding.workers.live import Live, Prompt


class Source(NamedTuple):
    """What a task continues."""

    live: Live
    length: int
    """Tokens kept, from the start of the prompt."""
    rest: str
    """Text to be put behind them."""


class _Kept(NamedTuple):
    path: str
    """Of the scope it was started in."""
    live: Live


class Parking:
    """Keeps live sequences until their scope is over.

    Args:
        capacity: sequences per scope that are kept after they have ended; beyond it the one that
            was not used for longest leaves.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._requests: dict[str, list[_Kept]] = {}
        """Least recently used first."""

    def add(self, scope: ExecutionScope | None, live: Live) -> list[Live]:
        """Keep a sequence that has been started. Returns those that have to leave for it."""
        request, path = _where(scope)
        kept = self._requests.setdefault(request, [])
        ended = [one for one in kept if one.path == path and one.live.over]
        leaving = ended[: max(0, len(ended) - self._capacity + 1)]
        self._requests[request] = [one for one in kept if one not in leaving] + [_Kept(path, live)]
        return [one.live for one in leaving]

    def end_scope(self, scope_id: str) -> list[Live]:
        """A scope is over: the sequences that were kept for it."""
        request, _, path = scope_id.partition(":")
        kept = self._requests.pop(request, [])
        staying = [one for one in kept if path and one.path != path]
        if staying:
            self._requests[request] = staying
        return [one.live for one in kept if one not in staying]

    def clear(self) -> list[Live]:
        """Everything is over: all sequences that were kept."""
        lives = [one.live for kept in self._requests.values() for one in kept]
        self._requests.clear()
        return lives

    def holds(self, live: Live) -> bool:
        """Whether the sequence is kept and can be continued."""
        return not live.closed and any(
            one.live is live for kept in list(self._requests.values()) for one in kept
        )

    def find(self, scope: ExecutionScope | None, prompt: Prompt) -> Source | None:
        """What a task with this prompt continues; None if nothing known fits."""
        request, path = _where(scope)
        kept = [one for one in self._requests.get(request, ()) if not one.live.closed]
        best: tuple[int, _Kept, Source] | None = None
        for one in kept:
            # A task goes on from its own branch and those around it, not from those beside it.
            inside = one.path in ("", path) or path.startswith(f"{one.path}.")
            spelled = one.live.spelled
            if inside and spelled is not None and isinstance(prompt, str):
                size = len(spelled.text)
                if prompt.startswith(spelled.text) and (best is None or size > best[0]):
                    best = size, one, Source(one.live, spelled.length, prompt[size:])
        if best is not None:
            self._use(request, best[1])
            return best[2]
        twin = next((one for one in kept if one.live.prompt == prompt), None)
        return None if twin is None else Source(twin.live, twin.live.prompt_length, "")

    def _use(self, request: str, used: _Kept) -> None:
        others = [one for one in self._requests[request] if one is not used]
        self._requests[request] = [*others, used]


def _where(scope: ExecutionScope | None) -> tuple[str, str]:
    return ("", "") if scope is None else (scope.request_id, scope.path)
