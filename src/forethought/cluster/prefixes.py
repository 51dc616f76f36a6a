"""``PrefixMemory``: the prefixes that an ingress believes a replica to have cached."""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

BLOCK = 64
"""Tokens of the prefixes that are remembered."""
MAX_BLOCKS = 1 << 16
"""Of the prefixes that are remembered of a replica."""


class PrefixMemory:
    """Which prefixes a replica has computed, as its ingress knows it: hashes of blocks of tokens,
    the least recently used of which are forgotten. What it has evicted may still be here.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks = OrderedDict[bytes, None]()

    def add(self, blocks: Iterable[bytes]) -> None:
        """A sequence with these blocks is computed there."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def num_tokens(self, blocks: Iterable[bytes]) -> int:
        """Tokens at the beginning of a sequence with these blocks that are known there."""
        return BLOCK * sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks))


def blocks_of(tokens: Sequence[int], root: tuple[str, ...] = ()) -> Iterator[bytes]:
    """The hash of each full block of tokens and all before it. ``root``: what else keys and values
    depend on, or who may share them.
    """
    digest = repr(root).encode()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = array("q", tokens[start : start + BLOCK]).tobytes()
        digest = blake2b(digest + block, digest_size=16).digest()
        yield digest


def num_shared_tokens(blocks: Iterable[bytes], others: Iterable[bytes]) -> int:
    """Tokens that two sequences with these blocks begin with, in full blocks."""
    pairs = zip(blocks, others, strict=False)
    return BLOCK * sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
