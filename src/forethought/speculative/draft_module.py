"""What EAGLE's and MTP's heads have in common: they read pairs of a state and the next token.

Pair i is the target's state at position i and the token at i + 1; from it the head guesses the
token at i + 2. A guess's own state takes the target's place in the pair that follows. Knows nothing
about what states are, or what becomes of guesses.

[pairs] A head's pairs over the target's pages: what it has read, and how it reads on.

The pair of the state at position p - 1 and the token at p has its entry, the keys and values of the
head's layer, at the slot of position p. So an entry depends on nothing behind its own slot, and
forks, prefix hits and rewinds of the target serve the head as they serve the target; position 0
alone has no entry, and nobody sees it. Entries behind the root are made of the head's own states;
they are never stored, so what is accepted is read again from the target's.

Knows nothing about which tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forethought.kv.draft_cache import DraftKvCache, HiddenStateCache
from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import ReadableTable
from forethought.model.attention.base import ForwardPass, PagedPass
from forethought.model.attention.workspace import KvWorkspace, catch_up_start
from forethought.model.batch import Batch, Span
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.registry import Target


class ModuleOutput(NamedTuple):
    """What a head thinks behind R pairs."""

    states: Tensor
    """[R, hidden]: for the pairs that follow."""
    logits: Tensor
    """[R, D]: of the tokens that follow."""


class DraftModule(Protocol):
    """A head over pages.

    Attributes:
        dtype: of its weights, states and entries; that of the target's may differ.
        shape: what its one attention layer stores per pair.
        vocab_size: D, tokens that it knows.
        ids: int64 ``[D]``, the target's id of each; None: all there are.
    """

    dtype: torch.dtype
    shape: LayerShape
    vocab_size: int
    ids: Tensor | None

    def enter(self, features: Tensor) -> Tensor:
        """The target's captured states side by side ``[T, width]`` -> ``[T, hidden]``."""
        ...

    def __call__(self, states: Tensor, forward_pass: ForwardPass) -> ModuleOutput:
        """Read T pairs, and guess behind the R of them whose logits the pass's batch wants.

        Args:
            states: ``[T, hidden]``, from ``enter`` or from guesses.
            forward_pass: over a storage of one layer; its batch has the pairs' tokens and, as
                positions, those of the states.
        """
        ...


class RootOutput(NamedTuple):
    """What a head makes of some requests' roots, and where it reads on."""

    workspace: KvWorkspace
    """Behind the roots' pairs."""
    positions: Tensor
    """int64 [B]: of the states behind the roots."""
    guess: ModuleOutput
    """Behind the roots."""


class _Part(NamedTuple):
    """Tokens of one sequence; ``start`` is at least 1."""

    request: DraftRequest
    start: int
    stop: int


class DraftModuleRunner:
    """Runs a head.

    Args:
        head: over pages, on the target's device.
        layer_ids: where the states that it reads are taken; see ``model.causal_lm``.
        target: whose they are.
    """

    def __init__(self, head: DraftModule, layer_ids: Sequence[int], target: Target) -> None:
        lm, pages = target.runner.lm, target.runner.storage
        self.head, self._backend = head, lm.backend
        self._most_tokens, self._device = target.max_num_tokens, lm.device
        self.features = HiddenStateCache(layer_ids, lm.hidden_size, pages)
        self._storage = KvStorage(
            [head.shape], pages.num_pages, pages.page_size, head.dtype, pages.device
        )
        self.entries = DraftKvCache(self._storage)

    @property
    def draft_caches(self) -> tuple[DraftKvCache, ...]:
        """The target's states and the head's entries."""
        return self.features, self.entries

    def can_read(self, request: DraftRequest) -> bool:
        """Whether the target's states lie there, up to the root."""
        assert request.table is not None
        known = len(request.tokens) - 1  # the root is not computed yet
        return known > 0 and self.features.ready_length(request.table, known) == known

    def begin(self, requests: Sequence[DraftRequest], room: int) -> RootOutput:
        """Read all pairs that were not read yet, the one of the root at least.

        Args:
            requests: B of them.
            room: drafted tokens of each that are to be read at most.
        """
        parts = []
        for request in requests:
            root = len(request.tokens) - 1
            start = max(1, self.entries.ready_length(_table(request), root))
            parts.append(_Part(request, start, root + 1))
        alike = catch_up_start(
            [part.start for part in parts], [part.stop for part in parts], first=1
        )
        if alike is not None:
            parts = [part._replace(start=at) for part, at in zip(parts, alike, strict=True)]
            known = parts[0].stop - alike[0]
            workspace = self._workspace(requests, alike, known + room)
            guess = self._read_on(workspace, parts)
        else:
            while sum(part.stop - part.start for part in parts) > max(
                self._most_tokens, len(parts)
            ):
                parts = self._read_some(parts)
            guess = self._read(parts, wanted=1)
            workspace = self._workspace(requests, [part.stop for part in parts], room)
        positions = torch.tensor([part.stop - 1 for part in parts], device=self._device)
        return RootOutput(workspace, positions, guess)

    def advance(
        self,
        begun: RootOutput,
        depth: int,
        token_ids: Tensor,
        states: Tensor,
        seen: Tensor | None = None,
    ) -> ModuleOutput:
        """Read a level of drafts.

        Args:
            begun: of as many requests as are left.
            depth: of the tokens, from 1 behind the root.
            token_ids: int64 ``[B * n]``, on the device, request by request.
            states: ``[B * n, hidden]``, those of their parents' guesses.
            seen: bool ``[B, n, m]``, which of the m drafted tokens so far each one sees, itself
                included; None: all.

        Returns:
            The guess behind each of them.
        """
        workspace, size = begun.workspace, len(token_ids) // begun.workspace.rows
        positions = begun.positions[: workspace.rows] + (depth - 1)
        if size > 1:
            positions = positions.repeat_interleave(size)
        with torch.inference_mode():
            return self.head(states, workspace.level(token_ids, positions, depth, seen))

    def _workspace(
        self, requests: Sequence[DraftRequest], lengths: Sequence[int], room: int
    ) -> KvWorkspace:
        return KvWorkspace(self._storage, list(map(_table, requests)), lengths, room, seen_from=1)

    def _read_on(self, workspace: KvWorkspace, parts: Sequence[_Part]) -> ModuleOutput:
        """Read a few pairs of the target's states, equally many of each request."""
        tokens, positions, found = list[int](), list[int](), list[Tensor]()
        for request, start, stop in parts:
            tokens += request.tokens[start:stop]
            positions += range(start - 1, stop - 1)
            found.append(self.features.read(_table(request), start - 1, stop - 1))
        index = torch.tensor([tokens, positions], device=self._device)
        with torch.inference_mode():
            states = self.head.enter(found[0] if len(found) == 1 else torch.cat(found))
            guess = self.head(states, workspace.chain(index[0], index[1]))
        workspace.store([stop - start for _, start, stop in parts])
        self._mark(parts)
        return guess

    def _mark(self, parts: Sequence[_Part]) -> None:
        for request, start, stop in parts:
            self.entries.mark(_table(request), start if start > 1 else 0, stop)

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

    def _read(self, parts: Sequence[_Part], wanted: int) -> ModuleOutput:
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
            spans.append(_span(request.table, begin, stop - start, stop))
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
        self._mark(parts)
        return guess

    def _forward_pass(self, batch: Batch) -> ForwardPass:
        return PagedPass(batch, self._storage, self._backend, [None])


def _table(request: DraftRequest) -> ReadableTable:
    assert request.table is not None
    return request.table


def _span(table: ReadableTable, begin: int, size: int, stop: int) -> Span:
    pages = table.prefix(stop).pages
    return Span(begin, begin + size, stop, tuple(pages), table.first_slot(), None, seen_from=1)
