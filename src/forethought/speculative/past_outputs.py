"""Remembers what was generated before: a bounded queue of outputs, searchable by tenant.

The oldest outputs leave first. Knows nothing about requests.
"""

from __future__ import annotations

from collections import deque

from forethought.speculative.suffix_index import SuffixIndex, Text


class PastOutputs:
    """Outputs and one index of them per salt.

    Args:
        max_requests: most outputs, over all salts; 0: none are kept.
        max_tokens: most tokens of all outputs.
        max_depth: most tokens that a match is compared over.
    """

    def __init__(self, max_requests: int, max_tokens: int, max_depth: int) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._max_depth = max_depth
        self._indexes: dict[str, SuffixIndex] = {}
        self._outputs: deque[tuple[str, Text]] = deque()
        """Salt and text, the oldest first."""
        self.tokens = 0
        """Tokens of all outputs."""

    def __len__(self) -> int:
        """Outputs of all salts."""
        return len(self._outputs)

    @property
    def salts(self) -> list[str]:
        """Those who have outputs here."""
        return list(self._indexes)

    def index(self, salt: str) -> SuffixIndex | None:
        """The outputs of one salt; None if there are none."""
        return self._indexes.get(salt)

    def add(self, salt: str, output: Text) -> None:
        """Remember an output, unless it is too short to say what follows what, or too long."""
        if not self._max_requests or not 1 < len(output) <= self._max_tokens:
            return
        index = self._indexes.get(salt)
        if index is None:
            index = self._indexes[salt] = SuffixIndex(self._max_depth)
        index.add(output, 1, len(output))
        self._outputs.append((salt, output))
        self.tokens += len(output)
        while len(self._outputs) > self._max_requests or self.tokens > self._max_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        salt, output = self._outputs.popleft()
        self.tokens -= len(output)
        self._indexes[salt].remove(output)
        if not len(self._indexes[salt]):
            del self._indexes[salt]
