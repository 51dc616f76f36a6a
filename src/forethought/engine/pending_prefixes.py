"""Prefixes that running prefills are about to store: a prompt that begins with one waits for it.

Prefixes that are stored already are found by the ``PrefixIndex``; these are the full pages that
follow, by the same hashes::

    running prefill  [ published ..... | pending ............ ) rest
    waiting prompt   [ the same tokens .................. ] its own tokens
                                                         ^ admitted when this page is published

A prompt waits only for a sequence that is served before it, whose prefill gets each step's budget
first: it would not have computed the common tokens sooner itself (BatchLLM, arXiv 2412.03594).
"""

from __future__ import annotations

from collections.abc import Iterable

from forethought.engine.sequence import Sequence
from forethought.kv.pool import PrefixIndex


class PendingPrefixes:
    """The pages that prefills are going to publish, as of one plan, whose ``running`` sequences are
    in the order of service.
    """

    def __init__(self, index: PrefixIndex, running: Iterable[Sequence]) -> None:
        self._index = index
        self._writer: dict[bytes, Sequence] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Note what a running sequence is going to publish, unless a step gives it fewer tokens."""
        table = sequence.table
        is_slow = sequence.wants_prompt_logprobs or sequence.had_nonfinite_logits
        if is_slow or sequence.others or table.private_from is not None:
            return
        for digest in sequence.page_digests[len(table.digests) :]:
            self._writer.setdefault(digest, sequence)

    def num_awaited(self, sequence: Sequence, num_pages: int) -> int:
        """Pages of a waiting prompt, of its ``num_pages`` full ones, that are published or pending;
        0 if none is pending. Its ``page_digests`` are known.
        """
        digests = sequence.page_digests[:num_pages]
        if not self._writer or not digests:
            return 0
        awaited = first = len(self._index.find(digests))
        for digest in digests[first:]:
            writer = self._writer.get(digest)
            if writer is None or writer.rank > sequence.rank:
                break
            awaited += 1
        return awaited if awaited > first else 0
