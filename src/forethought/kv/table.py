"""Page tables: which pages hold the tokens of one row. Plain Python, without token ids or tensors.

Positions of a row and their pages (page size 4, length 10)::

    pages   [ 7        ][ 8        ][ 3        ]
    tokens    0 1 2 3     4 5 6 7     8 9 . .
    slots    28 ... 31   32 ... 35   12 13

Slot ``s`` of position ``t`` is ``pages[t // page_size] * page_size + t % page_size``. Full pages
may be shared by any number of tables. A table writes only at and after ``length``; a shared page
there is copied first (copy on write).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from forethought.kv.pool import OutOfPages, PagePool


class PageCopy(NamedTuple):
    """Copy all slots of page ``src`` to page ``dst``, before anything is written."""

    src: int
    dst: int


class SlotMove(NamedTuple):
    """Copy slot ``src`` to slot ``dst``; all sources are read before any is written."""

    src: int
    dst: int


class PageTable:
    """The page table of one row: append, fork, rewind, keep_path, release."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[int] = []
        self.length = 0
        """Tokens stored."""
        self.longest: int | None = None
        """Tokens that the row may come to hold, if that is known when its first page is taken."""
        self._gaps = 0
        """Number of consecutive pages of the table that are not contiguous in the cache."""
        self.digests: list[bytes] = []
        """One hash per full page that was published, from the first page on."""
        self.root = b""
        """The hash of the empty prefix, which the first of them continues."""
        self.private_from: int | None = None
        """The first token whose KV depends on other sequences than this one: its page and those
        after it are never published. None: there is none."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._pool.page_size

    def adopt(self, pages: Sequence[int]) -> None:
        """Start an empty table with full pages found in the prefix index."""
        assert not self.pages, "only an empty table can adopt pages"
        for page in pages:
            self._pool.retain(page)
        self._set_pages(list(pages))
        self.length = len(pages) * self._pool.page_size

    def keep_private(self, start: int) -> None:
        """The KV of tokens from ``start`` on depends on other sequences."""
        earlier = self.private_from
        self.private_from = start if earlier is None else min(start, earlier)

    def pages_needed(self, count: int) -> int:
        """Pages that ``append(count)`` would take from the pool."""
        if self._fits_tail(count):  # the usual case
            return 0
        total = self._pages_for(self.length + count)
        return total - len(self.pages) + (1 if count and self._tail_is_shared() else 0)

    def append(self, count: int) -> list[PageCopy]:
        """Allocate slots for ``count`` tokens after the last one; returns the copies that must be
        made before the tokens are written (copy on write).

        Raises OutOfPages if there are not enough pages; nothing has changed then.
        """
        if self._fits_tail(count):
            self.length += count
            return []
        needed = self.pages_needed(count)
        if needed > self._pool.available:
            raise OutOfPages(f"{needed} pages needed, {self._pool.available} available")
        copies = self._own_tail() if count else []
        for num_missing in range(self._pages_for(self.length + count) - len(self.pages), 0, -1):
            near = self.pages[-1] + 1 if self.pages else None
            page = self._take(near, num_missing)
            self._gaps += near is not None and page != near
            self.pages.append(page)
        self.length += count
        return copies

    def fork(self, length: int | None = None) -> PageTable:
        """A table with the first ``length`` tokens (all by default), sharing every page."""
        length = self.length if length is None else length
        assert 0 <= length <= self.length
        child = PageTable(self._pool)
        child._set_pages(self.pages[: self._pages_for(length)])
        for page in child.pages:
            self._pool.retain(page)
        child.length, child.longest = length, self.longest
        if self.private_from is not None and self.private_from < length:
            child.private_from = self.private_from
        child.root, child.digests = self.root, self.digests[: length // self._pool.page_size]
        return child

    def prefix(self, length: int) -> PageTable:
        """A table of the first ``length`` tokens for one forward, without references to its pages.
        Never append to it, and never release it.
        """
        assert 0 <= length <= self.length
        view = PageTable(self._pool)
        pages = self.pages[: self._pages_for(length)]
        if self._gaps:
            view._set_pages(pages)
        else:
            view.pages = pages
        view.length = length
        return view

    def rewind(self, length: int) -> None:
        """Drop all tokens from ``length`` on and release the pages after them."""
        assert 0 <= length <= self.length
        keep = self._pages_for(length)
        for page in reversed(self.pages[keep:]):  # last first: prefixes outlive what follows them
            self._pool.release(page)
        if keep < len(self.pages):
            self._set_pages(self.pages[:keep])
        self.length = length
        if self.private_from is not None and length <= self.private_from:
            self.private_from = None
        del self.digests[length // self._pool.page_size :]

    def keep_path(self, base: int, path: Sequence[int]) -> list[SlotMove]:
        """Keep only the accepted path of a draft tree whose nodes are stored from ``base`` on.

        ``path`` has rising offsets from ``base``; token ``path[i]`` moves to position ``base + i``.
        Returns the moves to make in the storage, before the next forward.
        """
        if base + len(path) == self.length and (not path or path[-1] < len(path)):
            return []  # the usual case without a draft, or where all of one is accepted
        assert list(path) == sorted(set(path)), "offsets of a path must rise"
        moves = [
            SlotMove(self.slot(base + offset), self.slot(base + index))
            for index, offset in enumerate(path)
            if offset != index
        ]
        self.rewind(base + len(path))
        return moves

    def release(self) -> None:
        """Release every page; the table is empty afterwards."""
        self.rewind(0)

    def slots(self, start: int, stop: int) -> list[int]:
        """The slots of positions ``[start, stop)``."""
        first, size = self.first_slot(), self._pool.page_size
        if first is not None:
            return list(range(first + start, first + stop))
        return [self.pages[t // size] * size + t % size for t in range(start, stop)]

    def slot_index(self, start: int, stop: int) -> slice | list[int]:
        """The same as an index into what has an entry per slot; of contiguous pages a slice."""
        first = self.first_slot()
        if first is None:
            return self.slots(start, stop)
        return slice(first + start, first + stop)

    def slot(self, position: int) -> int:
        """The slot of one position."""
        page, offset = divmod(position, self._pool.page_size)
        return self.pages[page] * self._pool.page_size + offset

    def first_slot(self) -> int | None:
        """The slot of position 0 if the pages are contiguous (slots rise by one), else None."""
        if self._gaps or not self.pages:
            return None
        return self.pages[0] * self._pool.page_size

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.page_size)

    def _set_pages(self, pages: list[int]) -> None:
        self.pages = pages
        self._gaps = sum(b != a + 1 for a, b in pairwise(pages))

    def _fits_tail(self, count: int) -> bool:
        """Whether the last page has ``count`` free slots and is neither shared nor kept."""
        used = self.length % self._pool.page_size
        if not used or used + count > self._pool.page_size:
            return False
        tail = self.pages[-1]
        return self._pool.refs[tail] == 1 and not self._pool.is_kept(tail)

    def _tail_is_shared(self) -> bool:
        return self.length % self._pool.page_size != 0 and self._pool.refs[self.pages[-1]] > 1

    def _own_tail(self) -> list[PageCopy]:
        """Make the last, partly filled page writable: copy it if it is shared."""
        if self.length % self._pool.page_size == 0:
            return []
        tail = self.pages[-1]
        if self._pool.refs[tail] == 1:
            if self._pool.is_kept(tail):  # rewound into a page of the prefix index
                self._pool.drop(tail)
            return []
        near = self.pages[-2] + 1 if len(self.pages) > 1 else None
        page = self._take(near)
        self._pool.release(tail)
        self._set_pages([*self.pages[:-1], page])
        return [PageCopy(tail, page)]

    def _take(self, near: int | None, num_pages: int = 1) -> int:
        room = None if self.longest is None else self._pages_for(self.longest)
        return self._pool.take(near, num_pages, room)


class TableView:
    """A read-only view of a page table, as drafters get it; lists of pages are copies."""

    __slots__ = ("_table",)

    def __init__(self, table: PageTable) -> None:
        self._table = table

    @property
    def pages(self) -> list[int]:
        """A copy of the page ids, in order."""
        return list(self._table.pages)

    @property
    def length(self) -> int:
        """Tokens stored."""
        return self._table.length

    def slots(self, start: int, stop: int) -> list[int]:
        """The slots of positions ``[start, stop)``."""
        return self._table.slots(start, stop)

    def slot_index(self, start: int, stop: int) -> slice | list[int]:
        """The same as an index into what has an entry per slot; of contiguous pages a slice."""
        return self._table.slot_index(start, stop)

    def slot(self, position: int) -> int:
        """The slot of one position."""
        return self._table.slot(position)

    def first_slot(self) -> int | None:
        """The slot of position 0 if the pages are contiguous (slots rise by one), else None."""
        return self._table.first_slot()

    def prefix(self, length: int) -> TableView:
        """A view of the first ``length`` tokens."""
        return TableView(self._table.prefix(length))


ReadableTable = PageTable | TableView
"""A page table that is only read."""
