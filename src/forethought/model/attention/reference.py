"""The reference implementation: attention one token at a time, in float32.

The other backends are tested against it. For each new token it lists the positions that the token
attends to, gathers their keys and values by slot, and writes the softmax out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forethought.kv.storage import KvStorage
from forethought.model.attention.base import Capability, Scoring
from forethought.model.batch import Batch, Span


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The slots that each packed token attends to: T tensors, int64 ``[num_seen]``."""

    seen: list[Tensor]


class ReferenceAttention:
    """Slow and exact."""

    name = "reference"
    capabilities = frozenset(Capability)

    def plan(self, batch: Batch, storage: KvStorage, window: int | None) -> ReferencePlan:
        """List the slots that each new token attends to."""
        seen = []
        for span in batch.spans:
            slots = _slots(span, storage.page_size)
            for query in range(span.length):
                visible = visible_indices(span, query, window)
                chosen = [slots[index] for index in visible]
                seen.append(torch.tensor(chosen, dtype=torch.int64, device=storage.device))
        return ReferencePlan(seen)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: ReferencePlan, scoring: Scoring
    ) -> Tensor:
        """See :class:`~forethought.model.attention.base.AttentionBackend`."""
        heads, kv_heads = q.shape[1], keys.shape[1]
        out = torch.empty(q.shape[0], heads, values.shape[-1], dtype=q.dtype, device=q.device)
        for token, slots in enumerate(plan.seen):
            for head in range(heads):
                kv_head = head * kv_heads // heads
                k, v = keys[slots, kv_head].float(), values[slots, kv_head].float()
                scores = k @ q[token, head].float() * scoring.scale
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                if scoring.sinks is not None:
                    scores = torch.cat([scores, scoring.sinks[head : head + 1].float()])
                weights = torch.softmax(scores, 0)[: len(slots)]
                out[token, head] = (weights @ v).to(q.dtype)
        return out


def visible_indices(span: Span, query: int, window: int | None) -> list[int]:
    """Indices into the row's stored tokens that its new token number ``query`` attends to."""
    prefix = span.kv_length - span.length
    if span.tree is None:
        path = list(range(query + 1))
    else:
        path = [index for index, seen in enumerate(span.tree[query].tolist()) if seen]
    depth = len(path) - 1
    # Ancestors are in order of depth, so an ancestor's index in the path is its depth.
    positions = [(index, index) for index in range(span.seen_from, prefix)]
    positions += [(prefix + index, prefix + order) for order, index in enumerate(path)]
    return [
        index
        for index, position in positions
        if window is None or prefix + depth - position < window
    ]


def _slots(span: Span, page_size: int) -> list[int]:
    located = (divmod(position, page_size) for position in range(span.kv_length))
    return [span.pages[number] * page_size + offset for number, offset in located]
