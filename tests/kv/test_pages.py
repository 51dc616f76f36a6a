"""Pages: no page is lost, shared by accident or written by two; tables behave like plain lists."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forethought.kv.pool import FreeRuns, OutOfPages, PagePool, PrefixIndex
from forethought.kv.table import PageTable

PAGES = 24


class PagedLists(RuleBasedStateMachine):
    """Random appends, forks, rewinds, tree paths and releases against plain Python lists.

    ``memory`` stands for the tensors: what is written to a slot stays there until overwritten.
    """

    @initialize(page_size=st.sampled_from([1, 3, 16]), reuse=st.booleans())
    def start(self, page_size: int, reuse: bool) -> None:
        self.pool = PagePool(PAGES, page_size)
        self.index = PrefixIndex(self.pool, reuse)
        self.memory: dict[int, int] = {}
        self.rows: list[tuple[PageTable, list[int]]] = []
        self.clock = 0
        self.prefixes: dict[bytes, list[int]] = {}
        """All tokens that a published hash stands for."""

    @rule()
    def open_row(self) -> None:
        self.rows.append((PageTable(self.pool), []))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 20))
    def append(self, data: Any, count: int) -> None:
        table, tokens = data.draw(st.sampled_from(self.rows))
        before = list(table.pages), table.length, self.pool.available
        try:
            copies = table.append(count)
        except OutOfPages:
            assert (list(table.pages), table.length, self.pool.available) == before
            return
        size = self.pool.page_size
        for src, dst in copies:
            page = {dst * size + i: self.memory.get(src * size + i, -1) for i in range(size)}
            self.memory.update(page)
        new = list(range(self.clock, self.clock + count))
        self.clock += count
        slots = table.slots(len(tokens), len(tokens) + count)
        self.memory.update(zip(slots, new, strict=True))
        tokens += new

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        table, tokens = data.draw(st.sampled_from(self.rows))
        length = data.draw(st.integers(0, len(tokens)))
        used = self.pool.in_use
        self.rows.append((table.fork(length), tokens[:length]))
        assert self.pool.in_use == used

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def rewind(self, data: Any) -> None:
        table, tokens = data.draw(st.sampled_from(self.rows))
        length = data.draw(st.integers(0, len(tokens)))
        table.rewind(length)
        del tokens[length:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def keep_path(self, data: Any) -> None:
        table, tokens = data.draw(st.sampled_from(self.rows))
        drafts = data.draw(st.integers(1, 9))
        base, seen = len(tokens), self.clock
        self.rows = [row for row in self.rows if row[0] is not table] + [(table, tokens)]
        self.append_to_last(drafts)
        if table.length != base + drafts:
            return
        path = sorted(data.draw(st.sets(st.integers(0, drafts - 1))))
        moves = table.keep_path(base, path)
        self.memory.update({dst: self.memory[src] for src, dst in moves})
        tokens[base:] = [seen + offset for offset in path]

    def append_to_last(self, count: int) -> None:
        table, tokens = self.rows[-1]
        if table.pages_needed(count) > self.pool.available:
            return
        size = self.pool.page_size
        for src, dst in table.append(count):
            page = {dst * size + i: self.memory.get(src * size + i, -1) for i in range(size)}
            self.memory.update(page)
        new = list(range(self.clock, self.clock + count))
        self.clock += count
        self.memory.update(zip(table.slots(len(tokens), len(tokens) + count), new, strict=True))
        tokens += new

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def publish(self, data: Any) -> None:
        """As the engine does: from the first page on that the table has not published yet."""
        table, tokens = data.draw(st.sampled_from(self.rows))
        size, root = self.pool.page_size, self.index.root("")
        for page in range(len(table.digests), len(tokens) // size):
            run = tokens[page * size : (page + 1) * size]
            parent = table.digests[-1] if page else root
            table.digests.append(self.index.publish(parent, run, table.pages[page]))
        assert len(table.digests) == len(tokens) // size
        digest = root
        for page in range(len(table.digests)):
            digest = self.index.chain(digest, tokens[page * size : (page + 1) * size])
            assert table.digests[page] == digest
            self.prefixes[digest] = tokens[: (page + 1) * size]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def adopt(self, data: Any) -> None:
        _, tokens = data.draw(st.sampled_from(self.rows))
        table = PageTable(self.pool)
        table.adopt(self.index.find(self.index.digests(tokens)))
        self.rows.append((table, tokens[: table.length]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        row = data.draw(st.sampled_from(self.rows))
        row[0].release()
        self.rows = [other for other in self.rows if other[0] is not row[0]]

    @invariant()
    def tables_hold_their_tokens(self) -> None:
        for table, tokens in getattr(self, "rows", []):
            assert table.length == len(tokens)
            slots = table.slots(0, len(tokens))
            assert [self.memory[slot] for slot in slots] == tokens
            first = table.first_slot()
            if first is not None:
                assert slots == list(range(first, first + len(tokens)))

    @invariant()
    def what_the_index_finds_is_what_was_written(self) -> None:
        size = self.pool.page_size if hasattr(self, "pool") else 0
        for digest, tokens in getattr(self, "prefixes", {}).items():
            pages = self.index.find(self.index.digests(tokens))
            if len(pages) * size == len(tokens):
                slots = range(pages[-1] * size, (pages[-1] + 1) * size)
                assert [self.memory[slot] for slot in slots] == tokens[-size:], digest

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            self.index.check_integrity()
            holders = [page for table, _ in self.rows for page in table.pages]
            assert all(self.pool.refs[page] == holders.count(page) for page in range(PAGES))


PagedLists.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPagedLists = PagedLists.TestCase


def test_neighbouring_rows_grow_contiguously() -> None:
    pool = PagePool(64, 1)
    tables = [PageTable(pool) for _ in range(4)]
    for _ in range(12):  # taking turns, as decoding rows do
        for table in tables:
            table.append(1)
    assert all(table.first_slot() is not None for table in tables)


def test_rows_begin_no_further_apart_than_they_can_grow() -> None:
    """So that short ones do not each begin in memory that nothing has touched."""
    pool = PagePool(4096, 4)
    tables = [PageTable(pool) for _ in range(20)]
    for table in tables:
        table.longest = 64
        table.append(10)
    pages = [page for table in tables for page in table.pages]
    assert max(pages) <= 20 * (3 + 16)
    for table in tables:
        table.append(54)
    assert all(table.first_slot() is not None for table in tables)


def test_free_runs_join_again_whatever_the_order() -> None:
    runs = FreeRuns(32)
    taken = [runs.take_apart(1) for _ in range(32)]
    assert sorted(taken) == list(range(32))
    for page in sorted(taken, key=lambda page: page * 7 % 32):
        runs.put(page)
    assert runs.take_apart(32) == 0
    assert all(runs.take_at(page) for page in range(1, 32))


def test_the_oldest_cached_page_is_evicted_first_and_those_in_use_never() -> None:
    pool = PagePool(4, 1)
    index = PrefixIndex(pool)
    for token in range(3):
        table = PageTable(pool)
        table.append(1)
        index.publish(index.root(""), [token], table.pages[0])
        table.release()
    held = PageTable(pool)
    held.adopt(index.find(index.digests([0])))  # the oldest is in use again
    other = PageTable(pool)
    other.append(2)  # one page is free, one must be evicted
    assert [len(index.find(index.digests([token]))) for token in range(3)] == [1, 0, 1]
    pool.check_integrity()
    index.check_integrity()


def test_equal_pages_behind_different_prefixes_or_tenants_are_different() -> None:
    pool = PagePool(8, 2)
    index = PrefixIndex(pool)
    table = PageTable(pool)
    table.append(4)
    digest = index.publish(index.root("a"), [1, 2], table.pages[0])
    index.publish(digest, [3, 4], table.pages[1])
    assert index.find(index.digests([1, 2, 3, 4, 5], "a")) == table.pages
    assert index.find(index.digests([1, 2, 3], "a")) == table.pages[:1]
    assert index.find(index.digests([3, 4], "a")) == []
    assert index.find(index.digests([1, 2, 3, 4], "b")) == []


@pytest.mark.parametrize("count", [4, 7])
def test_an_append_that_does_not_fit_changes_nothing(count: int) -> None:
    """One page is free, and is needed for the copy of the shared one."""
    pool = PagePool(3, 4)
    table = PageTable(pool)
    table.append(6)
    fork = table.fork()
    with pytest.raises(OutOfPages):
        fork.append(count)
    assert (fork.length, fork.pages) == (6, table.pages)
    assert pool.available == 1
    assert fork.append(2)  # copies the shared page
    pool.check_integrity()


def test_a_page_rewritten_after_a_rewind_leaves_the_prefix_cache() -> None:
    pool = PagePool(4, 4)
    index, table = PrefixIndex(pool), PageTable(pool)
    table.append(4)
    index.publish(index.root(""), [1, 2, 3, 4], table.pages[0])
    table.rewind(2)
    assert index.find(index.digests([1, 2, 3, 4])) == table.pages  # still what it was
    assert table.append(1) == []
    assert index.find(index.digests([1, 2, 3, 4])) == []
    pool.check_integrity()
    index.check_integrity()


def test_a_fork_has_the_hashes_of_its_own_full_pages_alone() -> None:
    table = PageTable(PagePool(4, 4))
    table.append(12)
    table.digests += [b"a", b"b", b"c"]
    assert [len(table.fork(length).digests) for length in (12, 11, 8, 3)] == [3, 2, 2, 0]


def test_of_a_prefix_that_is_evicted_the_end_goes_first() -> None:
    pool = PagePool(3, 1)
    index, table = PrefixIndex(pool), PageTable(pool)
    table.append(3)
    digest = index.root("")
    for token, page in enumerate(table.pages):
        digest = index.publish(digest, [token], page)
    table.release()
    for left in (2, 1, 0):
        pool.take()
        assert len(index.find(index.digests([0, 1, 2]))) == left


def test_a_row_that_needs_many_pages_at_once_gets_contiguous_ones() -> None:
    pool = PagePool(16, 1)
    first, second = PageTable(pool), PageTable(pool)
    first.append(1)
    second.append(12)
    assert second.first_slot() is not None
    first.append(3)
    assert first.first_slot() is not None


def test_rewinding_drops_the_hashes_of_pages_that_are_not_full_any_more() -> None:
    pool = PagePool(4, 4)
    table = PageTable(pool)
    table.append(12)
    table.digests += [b"a", b"b", b"c"]
    for length, kept in ((12, 3), (11, 2), (8, 2), (5, 1), (0, 0)):
        table.rewind(length)
        assert len(table.digests) == kept
