"""What a computed row leaves behind: counts, published pages, log-probabilities of the prompt.

Knows nothing about the order in which things run.
"""

from __future__ import annotations

from torch import Tensor

from forethought.engine.scheduler import PlannedRow
from forethought.engine.sequence import Sequence
from forethought.kv.prefix import PrefixIndex
from forethought.model.sampling import prompt_logprobs
from forethought.outputs import EngineStats


class Accounting:
    """Writes the counters of sequences and engine, and the prefix index.

    Args:
        stats: the engine's totals.
        index: where full pages are published.
        page_size: tokens in a page.
    """

    def __init__(self, stats: EngineStats, index: PrefixIndex, page_size: int) -> None:
        self._stats, self._index, self._page_size = stats, index, page_size

    def count(
        self, sequence: Sequence, prefilled: int = 0, decoded: int = 0, discarded: int = 0
    ) -> None:
        """Count tokens for the sequence and for the engine."""
        for counts in (sequence.usage, self._stats):
            counts.prefilled += prefilled
            counts.decoded += decoded
            counts.discarded += discarded

    def count_draft(self, row: PlannedRow, accepted: int) -> None:
        """A decode was verified, and this many tokens of its draft were accepted."""
        size = len(row.draft)
        metrics = row.sequence.metrics
        metrics.record(size, accepted)
        if row.rule is not None:
            metrics.lossy = True
            metrics.synthetic |= row.rule.synthetic
        self._stats.drafted += size
        self._stats.accepted += accepted

    def withdraw(self, sequence: Sequence) -> None:
        """What is stored of the sequence may be wrong: nobody is to find it."""
        self._index.withdraw(sequence.table.pages)

    def record(self, row: PlannedRow) -> None:
        """A row was computed, and has its logits.

        Tokens that the sequence did not draw in this generation, or that were computed before, are
        prefilled; the others were counted when they were drawn.
        """
        sequence = row.sequence
        known = max(sequence.prompt_length, sequence.peak)
        self.count(sequence, prefilled=max(0, min(known, row.stop) - row.start))
        sequence.peak = max(sequence.peak, sequence.table.length)
        if self._index.enabled:
            self._publish(sequence)
        if sequence.wants_prompt_logprobs:
            assert row.known_logits is not None, "a computed row has its logits"
            self._add_prompt_logprobs(sequence, row.known_logits, row.start)

    def _publish(self, sequence: Sequence) -> None:
        """Make the full pages of computed tokens findable, for the tenant that had them computed.

        A sequence that was resumed under another salt begins another chain. The pages that were
        found under the first one stay there, so the new ones can be found under neither.
        """
        table, size = sequence.table, self._page_size
        if len(table.digests) >= table.length // size:
            return
        root = self._index.root(sequence.params.cache_salt)
        if table.root != root:
            table.root = root
            table.digests.clear()
        for page in range(len(table.digests), table.length // size):
            parent = table.digests[-1] if page else root
            tokens = sequence.tokens[page * size : (page + 1) * size]
            table.digests.append(self._index.publish(parent, tokens, table.pages[page]))

    def _add_prompt_logprobs(self, sequence: Sequence, logits: Tensor, start: int) -> None:
        """The logits [M, V] at the positions from ``start`` tell about the tokens behind them."""
        found = sequence.prompt_logprobs
        if not found:
            found.append(None)
        first = len(found) - 1  # earlier positions were told of before a preemption
        stop = min(start + len(logits), sequence.prompt_length - 1)
        if first < stop:
            following = sequence.tokens[first + 1 : stop + 1]
            k = sequence.params.prompt_logprobs or 0
            found += prompt_logprobs(logits[first - start : stop - start], following, k)
