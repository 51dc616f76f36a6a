"""Drafts that grow in the slots that are reserved for them, for networks with recurrent layers.

Such a network finds the state before a token by the slot of its parent, so drafted tokens need
slots of their own. A token of a chain goes on from the one before it. The read nodes of a tree are
one row, as the target verifies it; those above a level are computed again with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from forethought.kv.storage import KvStorage
from forethought.kv.table import ReadableTable
from forethought.model.attention.base import AttentionBackend, PagedPass
from forethought.model.batch import Batch, Row


class PagedDraft:
    """Counterpart of ``KvWorkspace`` over the pages.

    Args:
        storage: of the network's keys, values and states.
        tables: of B sequences, with slots after their known tokens.
        lengths: known tokens of each, which are stored.
        backend: computes attention over pages.
        windows: of the network's layers.

    Attributes:
        is_stored: whether what ``store`` would write is in the pages.
    """

    is_stored = True

    def __init__(
        self,
        storage: KvStorage,
        tables: Sequence[ReadableTable],
        lengths: Sequence[int],
        backend: AttentionBackend,
        windows: Sequence[int | None],
    ) -> None:
        self._storage, self._backend, self._windows = storage, backend, windows
        self._tables, self._lengths = list(tables), list(lengths)
        self._tokens = torch.empty(len(tables), 0, dtype=torch.int64, device=storage.device)
        """``[B, m]``: of the nodes that the network has read."""
        self._visible = torch.empty(len(tables), 0, 0, dtype=torch.bool)
        """``[B, m, m]`` on the host: which of them each one sees, itself included."""

    @property
    def rows(self) -> int:
        """Number of sequences B."""
        return len(self._tables)

    def keep(self, rows: int) -> None:
        """Continue with the first ``rows`` sequences only."""
        self._tables, self._lengths = self._tables[:rows], self._lengths[:rows]
        self._tokens, self._visible = self._tokens[:rows], self._visible[:rows]

    def level(
        self, token_ids: Tensor, positions: Tensor, depth: int, visible: Tensor | None = None
    ) -> PagedPass:
        """A forward pass over the n next nodes of each sequence; arguments as of
        ``KvWorkspace.level``. Positions are those of the nodes in their sequences.
        """
        drafted = token_ids.view(self.rows, -1)
        size, read = drafted.shape[1], self._tokens.shape[1]
        self._tokens = torch.cat([self._tokens, drafted], 1)
        columns = torch.ones(self.rows, size, read + size, dtype=torch.bool)
        if visible is not None:
            assert visible.shape[2] == read + size, "nodes see no other columns"
            columns = visible.cpu()
        self._visible = torch.cat([pad(self._visible, (0, size)), columns], 1)
        # In a chain a node sees all others: the last of them is stored, and its state with it.
        first = read if bool(self._visible.tril().equal(self._all())) else 0
        rows = [self._row(row, first, size) for row in range(self.rows)]
        batch = Batch.build(rows, self._storage.device)
        batch = replace(batch, token_ids=self._tokens[:, first:].flatten())
        return PagedPass(batch, self._storage, self._backend, self._windows)

    def store(self, counts: Sequence[int]) -> None:
        """The nodes of chains are stored already."""

    def _all(self) -> Tensor:
        return torch.ones_like(self._visible).tril()

    def _row(self, row: int, first: int, size: int) -> Row:
        """The nodes of a sequence from ``first`` on, with the logits of the last ``size``."""
        stop = self._tokens.shape[1]
        parents = None
        if first == 0:
            parents = tuple(map(_parent, self._visible[row].tril(-1).tolist()))
        start = self._lengths[row] + first
        table = self._tables[row].prefix(self._lengths[row] + stop)
        num_nodes = stop - first
        return Row(
            [0] * num_nodes,
            start,
            table,
            parents,
            logits_from=num_nodes - size,
            num_nodes=num_nodes,
        )


def _parent(ancestors: Sequence[bool]) -> int:
    """The last one of a node's ancestors; -1: it has none."""
    return max((node for node, is_seen in enumerate(ancestors) if is_seen), default=-1)
