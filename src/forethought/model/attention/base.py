"""The protocol of attention backends, and the forward pass that is handed to a network.

A :class:`ForwardPass` is an argument of the network's call and reaches every attention layer, which
hands it q, k, v: it stores the new keys and values and asks its backend to attend. There is no
global forward context, so a target, a draft model and a reward model can live in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from forethought.kv.storage import KvStorage
from forethought.model.batch import Batch
from forethought.model.fused_ops import has_kernels, rotate, rotate_and_store

KEYWORD = "forethought"
"""The extra argument of a module of transformers, which carries the pass or the probe."""


class Capability(StrEnum):
    """What a model may need beyond plain causal softmax attention; a backend declares its own."""

    GROUPED_QUERIES = "grouped queries"  # fewer key/value heads than query heads
    VALUE_DIM = "value width unlike key width"
    SLIDING_WINDOW = "sliding window"
    SOFTCAP = "softcap"  # scores become cap * tanh(scores / cap)
    SINKS = "attention sinks"  # a learned logit per head in the softmax's denominator


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer turns q k^T into attention weights.

    Attributes:
        scale: factor on q k^T.
        softcap: bound of the scores, or None.
        sinks: ``[heads]``, a learned logit per head in the denominator of the softmax, or None.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """A way to compute attention over a paged cache."""

    name: str
    capabilities: frozenset[Capability]

    def plan(self, batch: Batch, storage: KvStorage, window: int | None) -> Any:
        """What depends on the batch but not on the layer: built once per forward and window.

        Only shapes, dtype and device of ``storage`` are read. Tokens attend to the last ``window``
        positions, their own included; None: to all.
        """
        ...

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: Any, scoring: Scoring
    ) -> Tensor:
        """Attend in one layer, whose new keys and values have already been stored.

        ``q`` is ``[T, heads, key_dim]``; ``keys`` and ``values``, ``[slots, kv_heads, dim]``, are
        the layer's whole cache; ``plan`` is of the layer's window. Returns
        ``[T, heads, value_dim]`` in the dtype of ``q``, contiguous.
        """
        ...


@dataclass(slots=True, eq=False)
class KvRow:
    """Where the keys and values are that the new tokens of one sequence attend to: those of a
    prefix, then recent tokens, of which the last ones are the new tokens.

    Not frozen: there is one per row and step, and freezing takes most of making one.

    Attributes:
        start: index in the batch of the first new token.
        num_tokens: new tokens n.
        prefix: tokens of the prefix: positions ``[0, prefix)``.
        first_slot: of position 0 where the prefix is contiguous, else None.
        pages: of the prefix where it is not, else None.
        recent: range of the layout's recent tokens: m of them, of which the last n are new.
        visible: bool ``[n, m]``, contiguous: which recent tokens (columns) each new one attends to;
            None: a chain, in which each attends to those before it and to itself.
        seen_from: the first position that is attended to.
        segments: where it attends to other sequences, the parts of what it sees that its queries
            are rotated further for, from the prefix on: number of tokens, and positions.
    """

    start: int
    num_tokens: int
    prefix: int
    first_slot: int | None
    pages: Sequence[int] | None
    recent: range
    visible: Tensor | None
    seen_from: int = 0
    segments: Sequence[tuple[int, int]] = ()


@dataclass(slots=True, eq=False)
class KvLayout:
    """The keys and values of one forward, for networks that attend to them themselves.

    Attributes:
        addresses: in memory, of each layer's keys, contiguous, one entry per slot and KV head
            (``kv.entries``), then of each layer's values. The forward pass holds the tensors.
        dtype: of the same.
        slots: int64 ``[T]``, where each new token's keys and values are written.
        recent_slots: int64 ``[M]``, slots of the recent tokens of all rows.
        recent_positions: int64 ``[M]``, of the same; sliding windows count them.
        page_size: tokens of a page.
        rows: one per sequence.
    """

    addresses: array[int]
    dtype: torch.dtype
    slots: Tensor
    recent_slots: Tensor
    recent_positions: Tensor
    page_size: int
    rows: Sequence[KvRow]

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Its index tensors, all contiguous."""
        return self.slots, self.recent_slots, self.recent_positions


class ForwardPass(ABC):
    """One forward of one batch: how its layers attend, and which hidden states are captured.

    Attributes:
        layer_ids: of the hidden states to capture; see ``model.hidden_states``.
        states: the captured ones by layer index: ``[T, hidden]``.
    """

    def __init__(self, batch: Batch, layer_ids: frozenset[int] = frozenset()) -> None:
        self.batch, self.layer_ids, self.states = batch, layer_ids, dict[int, Tensor]()

    def capture(self, layer_id: int, x: Tensor) -> None:
        """Keep x ``[T, hidden]``, the state at ``layer_id``, if it was asked for."""
        if layer_id in self.layer_ids:
            self.states[layer_id] = x

    @abstractmethod
    def layout(self) -> KvLayout:
        """Where keys and values are, for a network that stores and attends itself."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Store k, v of the new tokens, ``[T, kv_heads, dim]``, and attend with q
        ``[T, heads, key_dim]``: ``[T, heads, value_dim]``.
        """

    def rotate_and_attend(
        self,
        layer: int,
        qk: Tensor,
        v: Tensor,
        rotation: tuple[Tensor, Tensor],
        scoring: Scoring,
    ) -> Tensor:
        """As ``attend``, with queries and keys ``qk`` ``[T, heads + kv_heads, dim]`` that are
        rotated first, by cosines and signed sines ``[T, 1, dim]`` of the tokens' positions.
        """
        kv_heads = v.shape[1]
        q, k = rotate(qk, *rotation).split_with_sizes([qk.shape[1] - kv_heads, kv_heads], 1)
        return self.attend(layer, q, k, v, scoring)


class PagedPass(ForwardPass):
    """A forward pass over the paged KV cache; each attention layer has its window."""

    def __init__(
        self,
        batch: Batch,
        storage: KvStorage,
        backend: AttentionBackend,
        windows: Sequence[int | None],
        layer_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(batch, layer_ids)
        self.storage, self.backend, self._windows = storage, backend, windows

    @cached_property
    def _plans(self) -> list[Any]:
        batch, storage = self.batch, self.storage
        windows = dict.fromkeys(self._windows)
        plans = {window: self.backend.plan(batch, storage, window) for window in windows}
        return [plans[window] for window in self._windows]

    @override
    def layout(self) -> KvLayout:
        batch, storage = self.batch, self.storage
        rows = [
            KvRow(
                start=span.start,
                num_tokens=span.length,
                prefix=span.kv_length - span.length,
                first_slot=span.first_slot,
                pages=span.pages if span.first_slot is None else None,
                recent=range(span.start, span.stop),
                visible=span.tree,
                seen_from=span.seen_from,
            )
            for span in batch.spans
        ]
        return KvLayout(
            addresses=storage.addresses,
            dtype=storage.stored_dtype,
            slots=batch.slots,
            recent_slots=batch.slots,
            recent_positions=self._sequence_positions(),
            page_size=storage.page_size,
            rows=rows,
        )

    def _sequence_positions(self) -> Tensor:
        """int64 ``[T]``: the batch's, counted from the beginning of each sequence."""
        offset = self.batch.spans[0].seen_from
        return self.batch.positions + offset if offset else self.batch.positions

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        self.storage.write(layer, self.batch.slots, k, v)
        return self.attend_stored(layer, q, scoring)

    def rotate_and_attend(
        self,
        layer: int,
        qk: Tensor,
        v: Tensor,
        rotation: tuple[Tensor, Tensor],
        scoring: Scoring,
    ) -> Tensor:
        """Where there are kernels, one rotates and stores; see :class:`ForwardPass`."""
        if not has_kernels(qk.device):
            return super().rotate_and_attend(layer, qk, v, rotation, scoring)
        keys, values = self.storage.keys[layer], self.storage.values[layer]
        q: Tensor = rotate_and_store(qk, v, list(rotation), self.batch.slots, keys, values)
        return self.attend_stored(layer, q, scoring)

    def attend_stored(self, layer: int, q: Tensor, scoring: Scoring) -> Tensor:
        """As ``attend``, where the new tokens' keys and values are stored already."""
        keys, values = self.storage.keys[layer], self.storage.values[layer]
        return self.backend.attend(q, keys, values, self._plans[layer], scoring)
