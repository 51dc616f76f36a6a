"""One MTP module over keys and values of its own, and the texts whose pairs go through it.

In a lane of lag k, pair i is a state at position i and the token at i + k. Its keys and values lie
at the slot of that token, and are worth what the token is: what forks, prefix hits and rewinds do
to tokens they do to pairs. Knows nothing about how lanes follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forethought.kv.companion import Companion
from forethought.kv.storage import KvStorage
from forethought.kv.table import ReadableTable
from forethought.model.attention.base import PagedPass
from forethought.model.attention.strands import Strands
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.heads.mtp import Left, MtpNetwork

_UNKNOWN = 0
"""Stands for a token that only the device knows."""


@dataclass(eq=False, slots=True)
class PairText:
    """A request's text of L tokens, the last of which the target has not computed.

    Attributes:
        request: whose.
        depth: levels of the draft to be made.
        begin: the first pair that has to be computed.
    """

    request: DraftRequest
    depth: int
    begin: int

    @property
    def table(self) -> ReadableTable:
        """Where its tokens lie."""
        assert self.request.table is not None
        return self.request.table

    @property
    def pairs(self) -> int:
        """L - 1: how many positions have a state."""
        return len(self.request.tokens) - 1


class Lane:
    """A module over a storage.

    Args:
        network: the module.
        lm: its target.
        like: the target's storage, whose pages this lane's follow.
        lag: how far behind its state the token of a pair stands.
    """

    def __init__(self, network: MtpNetwork, lm: CausalLM, like: KvStorage, lag: int) -> None:
        self.network, self.lag, self._lm = network, lag, lm
        self.companion = Companion(
            KvStorage([network.shape], like.num_pages, like.page_size, like.dtype, like.device)
        )

    def missing_from(self, request: DraftRequest) -> int:
        """The first pair of a request that is not stored."""
        assert request.table is not None
        ready = self.companion.ready_length(request.table, len(request.tokens))
        return max(0, ready - self.lag)

    def mark(self, text: PairText, stop: int) -> None:
        """The pairs of a text up to ``stop`` are stored.

        Guessed tokens count: where one is accepted, its pair is what it would have been; where not,
        the target writes another token at its slot, and the pair is invalid.
        """
        begin = text.begin + self.lag if text.begin else 0  # the first slots hold no pair
        self.companion.mark(text.table, begin, stop + self.lag)

    def rows(self, texts: Sequence[PairText], stops: Sequence[int], whole: bool) -> list[Row]:
        """The missing pairs of each text up to its stop.

        Args:
            texts: whose.
            stops: up to ``pairs``.
            whole: what leaves behind every pair is wanted, not only behind the last ones.
        """
        rows = []
        for text, stop in zip(texts, stops, strict=True):
            begin, end = text.begin + self.lag, stop + self.lag
            tokens = list(text.request.tokens[begin:end])
            tokens += [_UNKNOWN] * (end - begin - len(tokens))
            rows.append(
                Row(
                    tokens,
                    begin,
                    text.table.window(end),
                    logits_from=0 if whole else -1 + len(tokens),
                )
            )
        return rows

    def strands(self, texts: Sequence[PairText], room: int) -> Strands:
        """Where pairs from ``begin`` on of each text can be read, at most ``room`` of them."""
        tables = [text.table for text in texts]
        lengths = [text.begin + self.lag for text in texts]
        storage, windows = self.companion.storage, [self.network.window]
        return Strands(storage, tables, lengths, room, windows, seen_from=self.lag)

    def read(self, states: Tensor, rows: Sequence[Row], guessed: Sequence[Tensor] = ()) -> Left:
        """Take pairs through the module.

        Args:
            states: ``[T, hidden]`` of the T pairs.
            rows: the pairs' tokens.
            guessed: int64 ``[len(rows)]`` each: the last tokens of the rows.
        """
        lm = self._lm
        packed = Batch.build(rows, lm.device)
        batch = replace(
            packed,
            token_ids=_completed(packed, guessed) if guessed else packed.token_ids,
            positions=packed.positions - self.lag,
            spans=tuple(replace(span, seen_from=self.lag) for span in packed.spans),
        )
        storage = self.companion.storage
        forward_pass = PagedPass(batch, storage, lm.backend, [self.network.window])
        return self.network.read(states, forward_pass)


def _completed(batch: Batch, guessed: Sequence[Tensor]) -> Tensor:
    """int64 ``[T]``: the batch's tokens, the last ones of each row replaced."""
    places: list[int] = []
    chosen: list[int] = []
    for row, span in enumerate(batch.spans):
        count = min(len(guessed), span.length)
        places += range(span.stop - count, span.stop)
        chosen += [level * len(batch.spans) + row for level in range(len(guessed))][-count:]
    known = torch.cat(list(guessed))
    if len(places) == len(batch.token_ids):  # single steps
        return known[: len(places)] if len(guessed) == 1 else known[_index(chosen, known)]
    return batch.token_ids.index_copy(0, _index(places, known), known[_index(chosen, known)])


def _index(places: list[int], like: Tensor) -> Tensor:
    return torch.tensor(places, device=like.device)
