"""Rows are packed without padding, with every index that a forward needs."""

from __future__ import annotations

import pytest
import torch

from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.model.batch import Batch, Row


def table(pool: PagePool, length: int) -> PageTable:
    made = PageTable(pool)
    made.append(length)
    return made


def test_rows_are_packed_without_padding() -> None:
    pool = PagePool(16, 4)
    first, second = table(pool, 6), table(pool, 1)
    batch = Batch.build([Row([5, 6, 7], 3, first, logits_from=2), Row([8], 0, second)])
    assert batch.token_ids.tolist() == [5, 6, 7, 8]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.slots.tolist() == first.slots(3, 6) + second.slots(0, 1)
    assert batch.logit_index.tolist() == [2, 3]
    assert [(span.start, span.stop, span.kv_length) for span in batch.spans] == [
        (0, 3, 6),
        (3, 4, 1),
    ]


def test_a_row_may_ask_for_no_logits() -> None:
    pool = PagePool(4, 4)
    batch = Batch.build([Row([5, 6], 0, table(pool, 2), logits_from=2)])
    assert batch.logit_index.shape == (0,)


def test_a_span_has_a_first_slot_if_its_pages_are_contiguous() -> None:
    pool = PagePool(8, 2)
    together, apart = table(pool, 3), PageTable(pool)
    pages = [pool.take() for _ in range(3)]
    apart.adopt([pages[2], pages[0]])
    apart.append(1)
    spans = Batch.build([Row([1], 2, together), Row([1], 4, apart)]).spans
    assert spans[0].first_slot == together.slots(0, 1)[0]
    assert spans[1].first_slot is None
    assert spans[1].pages == tuple(apart.pages)


def test_positions_in_a_tree_follow_depth_and_nodes_attend_to_their_ancestors_only() -> None:
    pool = PagePool(8, 4)
    row = Row([1, 2, 3, 4, 5], 3, table(pool, 8), parents=(-1, 0, 0, 1, 2))
    batch = Batch.build([row])
    assert batch.positions.tolist() == [3, 4, 4, 5, 5]
    assert batch.spans[0].tree is not None
    assert batch.spans[0].tree.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


def test_a_chain_is_a_thin_tree() -> None:
    pool = PagePool(8, 4)
    chain = Row([1, 2, 3], 0, table(pool, 3))
    thin = Row([1, 2, 3], 0, chain.table, parents=(-1, 0, 1))
    assert chain.depths() == thin.depths()
    assert torch.equal(chain.visible(), thin.visible())


def test_a_row_whose_table_does_not_reach_its_end_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError):
        Batch.build([Row([1, 2], 0, table(PagePool(4, 4), 1))])
