"""The tensors of the KV cache move whole pages and single tokens in every layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forethought.kv.pool import PagePool
from forethought.kv.storage import DraftKvCache, KvStorage, LayerShape
from forethought.kv.table import PageCopy, PageTable, SlotMove

SHAPES = [LayerShape(2, 4, 4), LayerShape(1, 6, 3), LayerShape(2, 4, 4)]
PAGE_SIZE = 3


def filled() -> KvStorage:
    """Every element of every layer holds its own number."""
    storage = KvStorage(SHAPES, num_pages=5, page_size=PAGE_SIZE)
    for number, tensor in enumerate([*storage.keys, *storage.values]):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * number)
    return storage


def snapshot(storage: KvStorage) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in [*storage.keys, *storage.values]]


def test_layers_of_different_shapes_keep_their_order_and_their_own_tensors() -> None:
    storage = filled()
    for shape, keys, values in zip(SHAPES, storage.keys, storage.values, strict=True):
        assert keys.shape == (5 * PAGE_SIZE, shape.kv_heads, shape.key_dim)
        assert values.shape == (5 * PAGE_SIZE, shape.kv_heads, shape.value_dim)
    assert len({tensor[0, 0, 0].item() for tensor in [*storage.keys, *storage.values]}) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_new_storage_holds_zeros_at_the_start_of_cache_lines(dtype: torch.dtype) -> None:
    storage = KvStorage(SHAPES, num_pages=5, page_size=PAGE_SIZE, dtype=dtype)
    for tensor in [*storage.keys, *storage.values]:
        assert tensor.dtype == dtype
        assert not tensor.any()
    assert storage.keys[1].data_ptr() % 64 == storage.values[1].data_ptr() % 64 == 0


def test_a_storage_that_the_system_has_no_memory_for_raises_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        KvStorage(SHAPES, num_pages=2**50, page_size=PAGE_SIZE)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no huge pages"
)
def test_on_linux_a_storage_never_lies_in_huge_pages() -> None:
    """The first token of a sequence would wait until they are cleared."""
    storage = KvStorage(SHAPES, num_pages=5, page_size=PAGE_SIZE)
    address, flags = storage.keys[0].data_ptr(), []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            flags = rest.split()
    assert "nh" in flags


def test_bytes_per_page_is_what_the_tensors_take() -> None:
    storage = KvStorage(SHAPES, num_pages=7, page_size=PAGE_SIZE, dtype=torch.bfloat16)
    taken = sum(tensor.nbytes for tensor in [*storage.keys, *storage.values])
    assert storage.bytes_per_page * 7 == taken


def test_write_stores_each_token_at_its_slot_and_nothing_else() -> None:
    storage = filled()
    before = snapshot(storage)
    k, v = -torch.ones(2, 1, 6), -2 * torch.ones(2, 1, 3)
    storage.write(1, torch.tensor([7, 2]), k, v)
    before[1][[7, 2]] = k
    before[4][[7, 2]] = v
    assert all(map(torch.equal, before, snapshot(storage)))


def test_copied_pages_equal_their_sources_in_all_layers_and_all_else_is_untouched() -> None:
    storage = filled()
    before = snapshot(storage)
    storage.copy_pages([PageCopy(0, 3), PageCopy(4, 1)])
    for old, new in zip(before, snapshot(storage), strict=True):
        old = old.view(5, PAGE_SIZE, *old.shape[1:])
        expected = old[[0, 4, 2, 0, 4]]
        assert torch.equal(new.view(expected.shape), expected)


def test_moves_read_every_source_before_they_write() -> None:
    storage = filled()
    before = snapshot(storage)
    storage.move_slots([SlotMove(5, 6), SlotMove(6, 5), SlotMove(7, 8)])
    order = list(range(5 * PAGE_SIZE))
    order[6], order[5], order[8] = 5, 6, 7
    assert all(
        torch.equal(old[order], new) for old, new in zip(before, snapshot(storage), strict=True)
    )


def test_no_copies_and_no_moves_do_nothing() -> None:
    storage = filled()
    before = snapshot(storage)
    storage.copy_pages([])
    storage.move_slots([])
    assert all(map(torch.equal, before, snapshot(storage)))


def test_copied_pages_of_a_draft_cache_have_the_entries_of_their_sources() -> None:
    draft_cache, table = DraftKvCache(filled()), PageTable(PagePool(5, PAGE_SIZE))
    table.append(2)
    fork = table.fork()
    draft_cache.mark(table, 0, 2)
    copies = fork.append(1)
    draft_cache.copy_pages(copies)
    assert [draft_cache.ready_length(each, each.length) for each in (table, fork)] == [2, 2]
    other = PageTable(PagePool(5, PAGE_SIZE))
    other.append(5)  # all five slots from page 0 on
    draft_cache.invalidate(other, 0, 5)
    draft_cache.mark(fork, 0, 3)
    draft_cache.copy_pages([PageCopy(table.pages[0], fork.pages[0])])
    assert draft_cache.ready_length(fork, 3) == 0  # its source has no entries any more


def test_moved_tokens_of_a_draft_cache_have_the_entries_of_their_sources() -> None:
    draft_cache, table = DraftKvCache(filled()), PageTable(PagePool(5, PAGE_SIZE))
    table.append(6)
    draft_cache.mark(table, 0, 2)
    draft_cache.mark(table, 4, 5)
    draft_cache.move_slots([SlotMove(4, 2), SlotMove(5, 1)])
    assert draft_cache.ready_length(table, 6) == 1
    draft_cache.mark(table, 1, 2)
    assert draft_cache.ready_length(table, 6) == 3


def test_flags_of_a_draft_cache_are_those_of_scattered_pages_too() -> None:
    pool = PagePool(5, PAGE_SIZE)
    draft_cache, scattered, whole = DraftKvCache(filled()), PageTable(pool), PageTable(pool)
    scattered.append(PAGE_SIZE)
    whole.append(4 * PAGE_SIZE)
    whole.rewind(3 * PAGE_SIZE)
    scattered.append(PAGE_SIZE)
    assert scattered.first_slot() is None
    draft_cache.mark(scattered, 0, 2 * PAGE_SIZE)
    draft_cache.mark(whole, 0, 3 * PAGE_SIZE)
    draft_cache.invalidate(scattered, 1, PAGE_SIZE + 1)
    tables = (scattered, whole)
    lengths = [draft_cache.ready_length(table, table.length) for table in tables]
    assert lengths == [1, 3 * PAGE_SIZE]
    draft_cache.mark(scattered, 1, PAGE_SIZE + 1)
    assert draft_cache.ready_length(scattered, 2 * PAGE_SIZE) == 2 * PAGE_SIZE
