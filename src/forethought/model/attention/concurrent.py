"""Attention of a row to tokens of other sequences, in the pages where those computed them.

Sequences that begin alike read what the others have written since, as if it followed the common
beginning, before their own tokens::

    pages          [ prefix 0..P | own P..P+n ]      [ other P..P+m ]
    view           [ prefix 0..P | other P..P+m | own P+m..P+m+n ]

Rotary embeddings make scores depend on the distance of query and key alone. Keys stay as they are
stored, and a query is rotated once more for each part of the view, by as many positions as the
distance is greater there than the stored positions say: here m for the prefix and for the other
sequence, 0 for the row's own tokens. So one stored key serves every reader.

In torch it is computed one row at a time, with the softmax written out in float32: that is the
reference of the C++ forward, which gets the same view as a layout (``attention.h``).

Source: Rodionov et al., "Hogwild! Inference: Parallel LLM Generation via Concurrent Attention",
2025, section 3; arXiv 2504.06261.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from forethought.kv.entries import from_entries
from forethought.kv.storage import KvStorage
from forethought.model.attention.base import (
    AttentionBackend,
    KvLayout,
    KvRow,
    PagedPass,
    Scoring,
)
from forethought.model.batch import Batch, Span


class ConcurrentPass(PagedPass):
    """A forward pass over pages with rows that attend to other sequences, beside others, whose
    attention ``backend`` computes. ``rotations`` are cosines and signed sines
    ``[positions, 2, rotary_dim]``, of all layers.
    """

    def __init__(
        self,
        batch: Batch,
        storage: KvStorage,
        backend: AttentionBackend,
        rotations: Tensor,
        layer_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(batch, storage, backend, [None] * len(storage.layers), layer_ids)
        self._rotations = rotations
        self._views = [
            (span, _view(span, storage.page_size).to(storage.device))
            for span in batch.spans
            if span.concurrent is not None
        ]

    @override
    def attend_stored(self, layer: int, q: Tensor, scoring: Scoring) -> Tensor:
        attended = super().attend_stored(layer, q, scoring)
        for span, slots in self._views:
            keys = from_entries(self.storage.keys[layer][slots], torch.float32)
            values = from_entries(self.storage.values[layer][slots], torch.float32)
            queries = q[span.start : span.stop].float()
            attended[span.start : span.stop] = self._attend(span, queries, keys, values, scoring)
        return attended

    def _attend(
        self, span: Span, q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
    ) -> Tensor:
        """q ``[n, heads, key_dim]``, rotated at the row's own positions, over the view's L tokens,
        keys and values ``[L, kv_heads, dim]``: ``[n, heads, value_dim]``.
        """
        group, scores, begin = q.shape[1] // keys.shape[1], [], 0
        for count, turn in (*_segments(span), (len(keys), 0)):
            turned = rotated(q, self._rotations, turn).unflatten(1, (-1, group))
            scores.append(torch.einsum("nkgd,lkd->nkgl", turned, keys[begin : begin + count]))
            begin += count
        weights = _weights(torch.cat(scores, -1) * scoring.scale, scoring)
        return torch.einsum("nkgl,lkd->nkgd", weights, values).flatten(1, 2)

    def layout(self) -> KvLayout:
        """See :class:`~forethought.model.attention.base.ForwardPass`.

        A row that sees others has as prefix what is before the first one; all the rest is recent.
        """
        layout = super().layout()
        slots, rows = [layout.recent_slots], list(layout.rows)
        begin = len(self.batch.slots)
        for span, view in self._views:
            number = next(n for n, row in enumerate(rows) if row.start == span.start)
            rows[number] = _row(rows[number], span, begin, len(view))
            slots.append(view[rows[number].prefix :])
            begin += len(slots[-1])
        together = torch.cat(slots)
        positions = torch.zeros_like(together)  # read where layers have windows
        return replace(layout, recent_slots=together, recent_positions=positions, rows=rows)


def _segments(span: Span) -> list[tuple[int, int]]:
    assert span.concurrent is not None
    return span.concurrent.segments()


def _view(span: Span, page_size: int) -> Tensor:
    """The slots of all that the row sees, in the order of its view: int64 ``[L]``."""
    assert span.concurrent is not None
    return torch.from_numpy(span.concurrent.view(span.pages, span.kv_length, page_size))


def _row(row: KvRow, span: Span, begin: int, length: int) -> KvRow:
    """A row over a view of ``length`` tokens, whose recent ones lie from ``begin`` on."""
    assert span.concurrent is not None
    prefix = span.concurrent.starts[0]
    recent = range(begin, begin + length - prefix)
    return replace(row, prefix=prefix, recent=recent, segments=_segments(span))


def rotated(q: Tensor, rotations: Tensor, turn: int) -> Tensor:
    """Queries ``[n, heads, key_dim]`` rotated further, by ``turn`` positions.

    The first ``rotary_dim`` elements are rotated, in halves. Tables may hold a factor of the rotary
    embedding, which the queries have already: the cosine at position 0.
    """
    if not turn:
        return q
    width = rotations.shape[-1]
    cos, sin = (rotations[turn] / rotations[0, 0, 0]).float()
    turning, rest = q[..., :width], q[..., width:]
    turning = turning * cos + turning.roll(width // 2, -1) * sin
    return torch.cat([turning, rest], -1)


def _weights(scores: Tensor, scoring: Scoring) -> Tensor:
    """Softmax of scores ``[n, kv_heads, group, L]``; the last n of L are the new tokens."""
    num_new, length = scores.shape[0], scores.shape[-1]
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    hidden = torch.ones(num_new, length, dtype=torch.bool, device=scores.device)
    hidden = hidden.triu_(length - num_new + 1)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.float().view(1, *scores.shape[1:3], 1).expand(num_new, -1, -1, 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
