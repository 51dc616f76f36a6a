"""Layers of every kind of attention, tables for their rows, and one way to run them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import PageTable
from forethought.model.attention.base import PagedPass, Scoring
from forethought.model.batch import Batch


@dataclass(frozen=True)
class Case:
    """What one layer looks like."""

    heads: int = 4
    shape: LayerShape = field(default_factory=lambda: LayerShape(2, 8, 8))
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = {
    "plain": Case(heads=2),
    "grouped": Case(),
    "one kv head": Case(shape=LayerShape(1, 8, 8)),
    "window": Case(window=5),
    "window of one": Case(window=1),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True),
    "softcap, sinks and window": Case(softcap=2.0, sinks=True, window=4),
    "chunks": Case(window=-5),
    "chunks of one": Case(window=-1),
    "softcap, sinks and chunks": Case(softcap=2.0, sinks=True, window=-4),
    "narrow values": Case(shape=LayerShape(2, 8, 6)),
}


def tables(pool: PagePool, lengths: list[int], scattered: bool) -> list[PageTable]:
    """One table per length; scattered tables take their pages in turns and in random order."""
    if not scattered:
        made = [PageTable(pool) for _ in lengths]
        for table, length in zip(made, lengths, strict=True):
            table.append(length)
        return made
    order = [pool.take() for _ in range(pool.num_pages)]
    random.Random(0).shuffle(order)
    made = []
    for length in lengths:
        table = PageTable(pool)
        needed = -(-length // pool.page_size)
        table.adopt([order.pop() for _ in range(needed)])
        table.length = length
        made.append(table)
    return made


def attend(
    backend: object,
    case: Case,
    batch: Batch,
    storage: KvStorage,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """What the layer's attention returns for random q, k and v, which it stores."""
    source = torch.Generator().manual_seed(seed)
    total, shape = len(batch.token_ids), case.shape
    q = torch.randn(total, case.heads, shape.key_dim, generator=source)
    k = torch.randn(total, shape.kv_heads, shape.key_dim, generator=source)
    v = torch.randn(total, shape.kv_heads, shape.value_dim, generator=source)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    sinks = torch.randn(case.heads, generator=source) if case.sinks else None
    forward_pass = PagedPass(batch, storage, backend, [case.window])
    return forward_pass.attend(0, q, k, v, Scoring(0.4, case.softcap, sinks))


def storage_for(case: Case, num_pages: int, page_size: int) -> KvStorage:
    storage = KvStorage([case.shape], num_pages, page_size)
    source = torch.Generator().manual_seed(1)
    for stored in (storage.keys[0], storage.values[0]):
        stored.copy_(torch.randn(stored.shape, generator=source))
    return storage
