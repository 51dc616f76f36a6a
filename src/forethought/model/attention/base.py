"""The protocol of attention backends, and the one object that travels through a forward.

A :class:`ForwardPass` is handed to the network as an argument and reaches every attention layer;
there it stores the new keys and values and asks its backend to attend. Nothing here is global, so a
target, a draft model and a reward model can live in one process. This file knows nothing about
networks, and nothing about how a backend computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor

from forethought.kv.storage import KvStorage
from forethought.model.batch import Batch


class Capability(StrEnum):
    """What a model may ask of attention beyond plain causal softmax; a backend declares its own."""

    GROUPED_QUERIES = "grouped queries"  # fewer key/value heads than query heads
    VALUE_DIM = "value width unlike key width"
    SLIDING_WINDOW = "sliding window"
    SOFTCAP = "softcap"  # scores become cap * tanh(scores / cap)
    SINKS = (
        "attention sinks"  # one learned logit per head joins each softmax and attends to nothing
    )
    TREE = "draft trees"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer turns products of queries and keys into weights.

    Attributes:
        scale: factor on the products.
        softcap: bound of the scores, or None.
        sinks: ``[heads]``, a learned logit per head that joins the softmax, or None.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """A way to compute attention over a paged cache."""

    name: str
    capabilities: frozenset[Capability]

    def plan(self, batch: Batch, storage: KvStorage, window: int | None) -> Any:
        """Everything that depends on the batch alone: built once per forward and window.

        Args:
            batch: the packed rows.
            storage: the cache that they attend over; only its shapes and dtype matter here.
            window: a token sees the last ``window`` positions, its own included; None sees all.
        """
        ...

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: Any, scoring: Scoring
    ) -> Tensor:
        """Attend in one layer, whose new keys and values have already been stored.

        Args:
            q: ``[T, heads, key_dim]``.
            keys: ``[slots, kv_heads, key_dim]``, the layer's whole cache.
            values: ``[slots, kv_heads, value_dim]``.
            plan: what :meth:`plan` made for this layer's window.
            scoring: the layer's scale, softcap and sinks.

        Returns:
            ``[T, heads, value_dim]`` in the dtype of ``q``, contiguous.
        """
        ...


class ForwardPass(ABC):
    """One batch on its way through one network: what its layers need and do.

    Args:
        batch: the packed tokens.
        layer_ids: which hidden states to keep; see ``model.causal_lm``.

    Attributes:
        states: the hidden states that were asked for, by layer_id: ``[T, hidden]``.
    """

    def __init__(self, batch: Batch, layer_ids: frozenset[int] = frozenset()) -> None:
        self.batch, self.layer_ids, self.states = batch, layer_ids, dict[int, Tensor]()

    def capture(self, layer_id: int, x: Tensor) -> None:
        """x ``[T, hidden]`` is the state at ``layer_id``: kept if it was asked for."""
        if layer_id in self.layer_ids:
            self.states[layer_id] = x

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Store k, v of the new tokens and attend: ``[T, heads, value_dim]``.

        Args:
            layer: index of the attention layer.
            q: ``[T, heads, key_dim]``.
            k: ``[T, kv_heads, key_dim]``.
            v: ``[T, kv_heads, value_dim]``.
            scoring: the layer's scale, softcap and sinks.
        """


class PagedPass(ForwardPass):
    """A pass over a paged cache.

    Args:
        batch: the packed rows.
        storage: the cache.
        backend: how to attend.
        windows: each attention layer's window.
        layer_ids: which hidden states to keep; see ``model.causal_lm``.
    """

    def __init__(
        self,
        batch: Batch,
        storage: KvStorage,
        backend: AttentionBackend,
        windows: Sequence[int | None],
        layer_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(batch, layer_ids)
        self.storage, self.backend = storage, backend
        plans = {window: backend.plan(batch, storage, window) for window in dict.fromkeys(windows)}
        self._plans = [plans[window] for window in windows]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """See :class:`ForwardPass`."""
        storage = self.storage
        storage.write(layer, self.batch.slots, k, v)
        keys, values = storage.keys[layer], storage.values[layer]
        return self.backend.attend(q, keys, values, self._plans[layer], scoring)
