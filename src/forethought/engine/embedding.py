"""``EmbeddingPass``: rows of token ids in, pooled hidden states out, with the engine's weights.

A pass is a series of forwards of a bounded number of tokens, between which the engine steps::

    rows       [ a a a ][ b b b b b b b ][ c ]      at most 4 tokens in a forward
    forwards   [ a a a    b ][ b b b b ][ b b    c ]

Keys and values are in a storage of its own, which lives as long as the pass: no page of the
engine's KV cache is taken, and no prefix of it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from forethought.errors import ParameterError
from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.model.batch import Batch, Row
from forethought.model.hidden_states import FINAL
from forethought.model.runner import ModelRunner
from forethought.model.token_adapters import PlacedAdapter

Pooling = Literal["mean", "last", "first"]
"""What makes one vector of the hidden states of a row: their mean, or that of one token."""
MAX_FORWARD_TOKENS = 512
"""Of a forward: generation waits for one."""
MAX_PASS_TOKENS = 4 * MAX_FORWARD_TOKENS
"""Of a pass with several rows: other embeddings wait for it."""


class _Chunk(NamedTuple):
    """Tokens ``[start, stop)`` of a row."""

    row: int
    start: int
    stop: int


class EmbeddingPass:
    """The embeddings of R rows. Used by the engine's thread.

    Args:
        rows: token ids, at least one in each; checked by the engine.
        pooling: of the final norm's outputs.
        max_tokens: of a forward.
        adapter: of all rows; None: the model alone.
        dimensions: the first numbers of an embedding, which are kept; None: all.

    Raises:
        ParameterError: the model's hidden states have fewer ``dimensions``.
        ModelError: the runner's model gives no hidden states outside of its own KV cache.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: Sequence[Sequence[int]],
        pooling: Pooling,
        max_tokens: int = MAX_FORWARD_TOKENS,
        adapter: PlacedAdapter | None = None,
        dimensions: int | None = None,
    ) -> None:
        self._lm, self._rows, self._pooling, self._adapter = runner.lm, rows, pooling, adapter
        self._dimensions = _checked_dimensions(dimensions, runner.lm.hidden_size)
        self._forwards = _plan([len(row) for row in rows], max_tokens)[::-1]
        page_size = runner.storage.page_size
        num_pages = max(
            sum(-(-chunk.stop // page_size) for chunk in chunks) for chunks in self._forwards
        )
        self._storage = runner.scratch_storage(num_pages)
        self._pool, self._tables = PagePool(num_pages, page_size), dict[int, PageTable]()
        self._pooled = torch.zeros(len(rows), self._lm.hidden_size, device=self._lm.device)
        """float32 [R, hidden]; of a mean the sum so far."""

    @property
    def has_ended(self) -> bool:
        """Whether all rows are computed."""
        return not self._forwards

    @torch.inference_mode()
    def advance(self) -> int:
        """Run the next forward; returns the number of its tokens."""
        chunks = self._forwards.pop()
        batch = Batch.build([self._row(chunk) for chunk in chunks], self._lm.device)
        layers = frozenset({FINAL})
        _, states = self._lm.forward_with_hidden_states(batch, self._storage, layers)
        for chunk, span in zip(chunks, batch.spans, strict=True):
            self._pool_states(chunk, states[FINAL][span.start : span.stop].float())
            if chunk.stop == len(self._rows[chunk.row]):
                self._tables.pop(chunk.row).release()
        return len(batch.token_ids)

    def _row(self, chunk: _Chunk) -> Row:
        table = self._tables.setdefault(chunk.row, PageTable(self._pool))
        table.append(chunk.stop - chunk.start)
        tokens = list(self._rows[chunk.row][chunk.start : chunk.stop])
        return Row(tokens, chunk.start, table, logits_from=len(tokens), adapter=self._adapter)

    def _pool_states(self, chunk: _Chunk, states: Tensor) -> None:
        """Add the states float32 [n, hidden] of a chunk to its row's vector."""
        if self._pooling == "mean":
            self._pooled[chunk.row] += states.sum(0)
        elif self._pooling == "last" and chunk.stop == len(self._rows[chunk.row]):
            self._pooled[chunk.row] = states[-1]
        elif self._pooling == "first" and chunk.start == 0:
            self._pooled[chunk.row] = states[0]

    @torch.inference_mode()
    def result(self) -> Tensor:
        """The embeddings on the host, float32 [R, dimensions], each of length 1: so a sum of states
        need not become their mean.
        """
        assert self.has_ended, "advance until it has ended"
        return torch.nn.functional.normalize(self._pooled[:, : self._dimensions], dim=-1).cpu()


def _checked_dimensions(dimensions: int | None, hidden_size: int) -> int:
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        raise ParameterError(
            "invalid dimensions",
            f"got {dimensions}, and the model's hidden states have {hidden_size}",
            "Ask for as many or fewer",
            param="dimensions",
        )
    return dimensions or hidden_size


def groups_of(rows: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Rows in order, for one pass each: of up to ``MAX_PASS_TOKENS``, or one row."""
    groups: list[list[Sequence[int]]] = []
    num_free = 0
    for row in rows:
        if len(row) > num_free:
            groups.append([])
            num_free = MAX_PASS_TOKENS
        groups[-1].append(row)
        num_free -= len(row)
    return groups


def _plan(lengths: Sequence[int], max_tokens: int) -> list[list[_Chunk]]:
    """The forwards of all rows, in order, each of ``max_tokens`` but the last."""
    forwards: list[list[_Chunk]] = [[]]
    num_free = max_tokens
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            if not num_free:
                forwards.append([])
                num_free = max_tokens
            stop = min(length, start + num_free)
            forwards[-1].append(_Chunk(row, start, stop))
            num_free -= stop - start
            start = stop
    return forwards
