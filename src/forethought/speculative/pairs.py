"""A head's pairs over the target's pages: what it has read, and how it reads on.

The pair of the state at position p - 1 and the token at p has its entry, the keys and values of the
head's layer, at the slot of position p. So an entry depends on nothing behind its own slot, and
forks, prefix hits and rewinds of the target serve the head as they serve the target; position 0
alone has no entry, and nobody sees it. Entries behind the root are made of the head's own states;
they are never marked as ready, so what is accepted is read again from the target's.

Knows nothing about which tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forethought.kv.companion import Companion
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.attention.base import ForwardPass
from forethought.model.batch import Batch, Span
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.features import Features
from forethought.speculative.heads.pair_head import Guess, PairHead
from forethought.speculative.table import Target


class Level(NamedTuple):
    """One level of some drafts that is to be read: ``size`` tokens behind each request."""

    requests: Sequence[DraftRequest]
    depth: int
    """Of the tokens, from 1 behind the root."""
    stored: int
    """Drafted tokens of each request that were read before."""
    size: int
    seen: Sequence[Tensor] | None
    """For each request bool [size, stored + size]: which drafted ones each token sees, itself
    included; None: all."""


class _Part(NamedTuple):
    """Tokens of one sequence; ``start`` is at least 1."""

    request: DraftRequest
    start: int
    stop: int


class Pairs:
    """Runs a head.

    Args:
        head: over pages, on the target's device.
        places: where the states that it reads are taken; see ``model.taps``.
        target: whose they are.
    """

    def __init__(self, head: PairHead, places: Sequence[int], target: Target) -> None:
        lm, pages = target.runner.lm, target.runner.storage
        self.head, self._backend = head, lm.backend
        self._most_tokens, self._device = target.max_num_tokens, lm.device
        self.features = Features(places, lm.hidden_size, pages)
        self._storage = KvStorage(
            [head.shape], pages.num_pages, pages.page_size, head.dtype, pages.device
        )
        self.entries = Companion(self._storage)

    @property
    def companions(self) -> tuple[Companion, ...]:
        """The target's states and the head's entries."""
        return self.features, self.entries

    def can_read(self, request: DraftRequest) -> bool:
        """Whether the target's states lie there, up to the root."""
        assert request.table is not None
        known = len(request.tokens) - 1  # the root is not computed yet
        return known > 0 and self.features.ready_length(request.table, known) == known

    def catch_up(self, requests: Sequence[DraftRequest]) -> Guess:
        """Read all pairs that were not read yet, the one of the root at least.

        Returns:
            The guess behind each root.
        """
        parts = []
        for request in requests:
            assert request.table is not None
            root = len(request.tokens) - 1
            start = max(1, self.entries.ready_length(request.table, root))
            parts.append(_Part(request, start, root + 1))
        while sum(part.stop - part.start for part in parts) > max(self._most_tokens, len(parts)):
            parts = self._read_some(parts)
        return self._read(parts, wanted=1)

    def _read_some(self, parts: list[_Part]) -> list[_Part]:
        """Read as much as one forward may, nobody's root; return what is left."""
        room, now, left = self._most_tokens, list[_Part](), list[_Part]()
        for part in parts:
            stop = min(part.stop - 1, part.start + room)
            if stop > part.start:
                now.append(part._replace(stop=stop))
                room -= stop - part.start
            left.append(part._replace(start=max(part.start, stop)))
        self._read(now, wanted=0)
        return left

    def _read(self, parts: Sequence[_Part], wanted: int) -> Guess:
        """Read pairs of the target's states; guess behind the last ``wanted`` of each part."""
        tokens, positions, slots, before = list[int](), list[int](), list[int](), list[int]()
        last, spans = list[int](), list[Span]()
        for request, start, stop in parts:
            assert request.table is not None
            begin = len(tokens)
            tokens += request.tokens[start:stop]
            positions += range(start - 1, stop - 1)
            around = request.table.slots(start - 1, stop)
            before += around[:-1]
            slots += around[1:]
            spans.append(_span(request.table, begin, stop - start, stop, None))
            last += range(len(tokens) - wanted, len(tokens))
        index = torch.tensor([tokens, positions, slots, before], device=self._device)
        token_ids, positions_, slots_, before_ = index.unbind(0)
        batch = Batch(
            token_ids,
            positions_,
            slots_,
            torch.tensor(last, dtype=torch.int64, device=self._device),
            tuple(spans),
        )
        with torch.inference_mode():
            states = self.head.enter(self.features.storage.keys[0][before_, 0])
            guess = self.head(states, self._forward_pass(batch))
        for request, start, stop in parts:
            assert request.table is not None
            self.entries.mark(request.table, start if start > 1 else 0, stop)
        return guess

    def advance(self, level: Level, token_ids: Tensor, states: Tensor) -> Guess:
        """Read a level of drafts.

        Args:
            level: where its tokens stand.
            token_ids: int64 ``[requests * size]``, on the device, request by request.
            states: ``[requests * size, hidden]``, those of their parents' guesses.

        Returns:
            The guess behind each of them.
        """
        positions, slots, spans = list[int](), list[int](), list[Span]()
        for number, request in enumerate(level.requests):
            assert request.table is not None
            length = len(request.tokens)
            start = length + level.stored
            positions += [length - 2 + level.depth] * level.size
            slots += request.table.slots(start, start + level.size)
            tree = None if level.seen is None else level.seen[number]
            begin = number * level.size
            spans.append(_span(request.table, begin, level.size, start + level.size, tree))
        index = torch.tensor([positions, slots, range(len(slots))], device=self._device)
        batch = Batch(token_ids, index[0], index[1], index[2], tuple(spans))
        with torch.inference_mode():
            return self.head(states, self._forward_pass(batch))

    def _forward_pass(self, batch: Batch) -> ForwardPass:
        return ForwardPass(batch, self._storage, self._backend, [None])


def _span(table: PageTable, begin: int, size: int, stop: int, tree: Tensor | None) -> Span:
    pages = table.window(stop).pages
    return Span(begin, begin + size, stop, tuple(pages), table.run(), tree, seen_from=1)
