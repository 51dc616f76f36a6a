"""The prefix index: finds pages that hold a known prefix. Plain Python.

A full page is identified by the chained hash of all tokens up to its end and of the tenant's salt:
equal pages behind different prefixes differ, and tenants never share pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from forethought.kv.pool import PagePool


class PrefixIndex:
    """Chained hash of full pages -> page id.

    Args:
        pool: of the pages; its ``on_evict`` is set.
        enabled: if False, no page is published or found.
    """

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self._pool, self.enabled = pool, enabled
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        pool.on_evict = self._remove

    def root(self, salt: str) -> bytes:
        """The hash of the empty prefix of one tenant."""
        return blake2b(salt.encode(), digest_size=16).digest()

    def chain(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of a page of ``tokens`` behind the prefix ``parent``."""
        return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The pages of the longest known prefix of ``tokens``, in order; not yet retained."""
        pages: list[int] = []
        if not self.enabled:
            return pages
        size, digest = self._pool.page_size, self.root(salt)
        for start in range(0, len(tokens) - size + 1, size):
            digest = self.chain(digest, tokens[start : start + size])
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, parent: bytes, tokens: Sequence[int], page: int) -> bytes:
        """Add a full page, unless an equal one is known; returns its hash."""
        digest = self.chain(parent, tokens)
        if self.enabled and digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest], self._digest_of[page] = page, digest
            self._pool.keep(page)
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

    def check_integrity(self) -> None:
        """Assert that both directions agree and that the pool keeps exactly these pages."""
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of
        assert all(self._pool.is_kept(page) for page in self._digest_of)
