"""Finds pages that hold a known prefix. Knows tokens and page ids; nothing about rows or tensors.

A full page is known by the chained hash of all tokens up to its end and of the tenant's salt, so
equal pages behind different prefixes differ, and tenants never see each other's pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from forethought.kv.pool import PagePool


class PrefixIndex:
    """Chained hash of full pages -> page id.

    Args:
        pool: owner of the pages; tells which ones it evicts.
        enabled: if False, nothing is ever found.
    """

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self._pool, self.enabled = pool, enabled
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._page_of)

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
        """Make a full page findable, unless an equal one is already; returns its hash."""
        digest = self.chain(parent, tokens)
        if self.enabled and digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest], self._digest_of[page] = page, digest
            self._pool.keep(page)
        return digest

    def withdraw(self, pages: Sequence[int]) -> None:
        """Have none of these pages found again; who holds them keeps them."""
        for page in pages:
            if page in self._digest_of:
                self._pool.drop(page)

    def _forget(self, page: int) -> None:
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]

    def check_integrity(self) -> None:
        """Assert that both directions agree and that the pool keeps exactly these pages."""
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of
        assert all(self._pool.is_kept(page) for page in self._digest_of)
