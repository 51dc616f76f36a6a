"""Page ids: reference counts, free pages, eviction order, prefix index. Plain Python, no tensors.

Every page is in exactly one of three states::

    free       refs == 0, not kept      in ``FreeRuns``
    evictable  refs == 0, kept          in the eviction order, least recently released first
    in use     refs >= 1                kept or not

*Kept* pages hold a prefix that the prefix index can find. They are evicted when no free page is
left.

A full page is identified by the chained hash of all tokens up to its end, of the tenant's salt and
of the adapter: equal pages after different prefixes differ, and neither tenants nor adapters share
pages.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Protocol

EVICTION_BATCH = 32
"""Pages evicted at once: neighbours were released together, so a batch frees whole runs."""


class OutOfPages(Exception):
    """No page is free or evictable. The scheduler reacts by waiting or preemption."""


class FreeRuns:
    """The free pages as maximal runs ``[start, stop)``. All operations are O(log runs). Runs make
    it cheap to take the page next to a given one, so that a row's pages are contiguous and it
    can attend through a view instead of a copy.
    """

    def __init__(self, num_pages: int) -> None:
        self._stop: dict[int, int] = {}
        self._start: dict[int, int] = {}
        self._by_length: list[tuple[int, int, int]] = []
        self.num_free = 0
        if num_pages:
            self._insert(0, num_pages)

    def take_at(self, page: int) -> bool:
        """Take ``page`` if a run starts there."""
        stop = self._stop.get(page)
        if stop is None:
            return False
        self._remove(page, stop)
        self._insert(page + 1, stop)
        return True

    def take_apart(self, num_pages: int, room: int | None = None) -> int:
        """Take the first page of a new row that is going to take ``num_pages``.

        It is in the middle of the longest run, so that the row before the run can grow as well, or
        earlier: where the second half is too short, or ``room`` pages after the run's beginning.
        Rows that lie no further apart than they can grow share pages of the system's memory, whose
        first use costs time in each layer.
        """
        start, stop = self._longest()
        middle = (start + stop) // 2 if room is None else min((start + stop) // 2, start + room)
        page = start if start == 0 else max(start, min(middle, stop - num_pages))
        self._remove(start, stop)
        self._insert(start, page)
        self._insert(page + 1, stop)
        return page

    def put(self, page: int) -> None:
        """Free ``page``, joining the runs on both sides."""
        start, stop = page, page + 1
        if page in self._start:
            start = self._start[page]
            self._remove(start, page)
        if stop in self._stop:
            end = self._stop[stop]
            self._remove(stop, end)
            stop = end
        self._insert(start, stop)

    def pages(self) -> set[int]:
        """All free pages (for checks)."""
        return {page for start, stop in self._stop.items() for page in range(start, stop)}

    def _longest(self) -> tuple[int, int]:
        while True:
            _, start, stop = self._by_length[0]
            if self._stop.get(start) == stop:
                return start, stop
            heapq.heappop(self._by_length)

    def _insert(self, start: int, stop: int) -> None:
        if start == stop:
            return
        self._stop[start], self._start[stop] = stop, start
        heapq.heappush(self._by_length, (start - stop, start, stop))
        self.num_free += stop - start
        if len(self._by_length) > 4 * len(self._stop) + 64:
            self._by_length = [(s - e, s, e) for s, e in self._stop.items()]
            heapq.heapify(self._by_length)

    def _remove(self, start: int, stop: int) -> None:
        del self._stop[start], self._start[stop]
        self.num_free -= stop - start


class PagePool:
    """Allocates page ids and counts references to them."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.refs = [0] * num_pages
        self.on_evict: Callable[[int], None] = lambda page: None
        """Called with each kept page that is evicted or dropped; the prefix index removes it."""
        self._free = FreeRuns(num_pages)
        self._kept: set[int] = set()
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of pages that are free or evictable."""
        return self._free.num_free + len(self._evictable)

    @property
    def num_free(self) -> int:
        """Number of pages that can be taken without evicting another one."""
        return self._free.num_free

    @property
    def in_use(self) -> int:
        """Number of pages with references."""
        return self.num_pages - self.available

    def take(self, near: int | None = None, num_pages: int = 1, room: int | None = None) -> int:
        """A page with one reference; raises OutOfPages if none is free or evictable.

        Args:
            near: the preferred page id, usually the one after the row's last page.
            num_pages: that the row is going to take now, this one included.
            room: number of pages left to the row before a new one; None: as many as can be.
        """
        if not self._free.num_free:
            self._evict()
        if near is not None and self._free.take_at(near):
            page = near
        else:
            page = self._free.take_apart(num_pages, room)
        self.refs[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Add a reference to a page that is in use or evictable."""
        assert self.refs[page] or page in self._evictable, f"page {page} is free"
        if not self.refs[page]:
            del self._evictable[page]
        self.refs[page] += 1

    def release(self, page: int) -> None:
        """Drop a reference; a page without any becomes evictable if kept, else free."""
        assert self.refs[page] > 0, f"page {page} is not in use"
        self.refs[page] -= 1
        if self.refs[page]:
            return
        if page in self._kept:
            self._evictable[page] = None
        else:
            self._free.put(page)

    def keep(self, page: int) -> None:
        """Mark a page in use as one that the prefix index can find."""
        assert self.refs[page], f"page {page} is not in use"
        self._kept.add(page)

    def is_kept(self, page: int) -> bool:
        """Whether the prefix index can find the page."""
        return page in self._kept

    def drop(self, page: int) -> None:
        """Stop keeping a page: it is evicted, or its content is about to change."""
        self._kept.discard(page)
        self.on_evict(page)
        if page in self._evictable:
            del self._evictable[page]
            self._free.put(page)

    def _evict(self) -> None:
        if not self._evictable:
            raise OutOfPages(f"all {self.num_pages} pages are in use")
        for _ in range(min(EVICTION_BATCH, max(1, len(self._evictable) // 4))):
            self.drop(next(iter(self._evictable)))

    def check_integrity(self) -> None:
        """Assert that every page is in exactly one state and that the counts agree."""
        free = self._free.pages()
        assert len(free) == self._free.num_free
        evictable = set(self._evictable)
        used = {page for page, refs in enumerate(self.refs) if refs}
        assert min(self.refs, default=0) >= 0
        assert len(free | evictable | used) == self.num_pages
        assert len(free) + len(evictable) + len(used) == self.num_pages
        assert evictable <= self._kept
        assert not free & self._kept


class IndexRecorder(Protocol):
    """Is told what a prefix index gains and loses (``kv.events``)."""

    def stored(self, digest: bytes, parent: bytes | None, tokens: Sequence[int], lora: str) -> None:
        """A page has been published; ``parent`` is None for the first page of a row."""

    def removed(self, digest: bytes) -> None:
        """A page has been withdrawn or evicted."""


class PrefixIndex:
    """The prefix cache: chained hash of full pages -> page id; sets ``on_evict`` of the pool.

    Pages are published when a step commits (``engine.step``), and found when a sequence is admitted
    (``engine.scheduler``). If not ``enabled``, none is.

    Attributes:
        recorder: of what it gains and loses; None: nobody wants to know.
    """

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self._pool, self.enabled = pool, enabled
        self.recorder: IndexRecorder | None = None
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        pool.on_evict = self._remove

    def root(self, salt: str, adapter: bytes = b"") -> bytes:
        """The hash of the empty prefix of one tenant, computed with the adapter of this digest."""
        return blake2b(salt.encode(), digest_size=16, key=adapter).digest()

    def chain(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of a page of ``tokens`` after the prefix ``parent``."""
        return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()

    def digests(self, tokens: Sequence[int], salt: str = "", adapter: bytes = b"") -> list[bytes]:
        """The hash of each full page of ``tokens``, in order; empty if nothing is published.
        ``salt`` and ``adapter`` as of ``root``.
        """
        digests: list[bytes] = []
        if not self.enabled:
            return digests
        size, digest = self._pool.page_size, self.root(salt, adapter)
        for start in range(0, len(tokens) - size + 1, size):
            digest = self.chain(digest, tokens[start : start + size])
            digests.append(digest)
        return digests

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The published pages that ``digests`` begin with, in order; not yet retained."""
        published = takewhile(self._page_of.__contains__, digests)
        return [self._page_of[digest] for digest in published]

    def publish(
        self,
        parent: bytes,
        tokens: Sequence[int],
        page: int,
        *,
        is_first: bool = False,
        lora: str = "",
    ) -> bytes:
        """Add a full page, unless an equal one is known; returns its hash.

        ``is_first`` says that ``parent`` is the root, ``lora`` names the adapter, for the recorder.
        """
        digest = self.chain(parent, tokens)
        if self.enabled and digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest], self._digest_of[page] = page, digest
            self._pool.keep(page)
            if self.recorder is not None:
                self.recorder.stored(digest, None if is_first else parent, tokens, lora)
        return digest

    def withdraw(self, pages: Sequence[int]) -> None:
        """Remove these pages from the index; references to them stay valid."""
        for page in pages:
            if page in self._digest_of:
                self._pool.drop(page)

    def _remove(self, page: int) -> None:
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
            if self.recorder is not None:
                self.recorder.removed(digest)

    def check_integrity(self) -> None:
        """Assert that both directions agree and that the pool keeps exactly these pages."""
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of
        assert all(self._pool.is_kept(page) for page in self._digest_of)
