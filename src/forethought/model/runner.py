"""Runs rows of tokens through one model over one KV storage.

Rows, not requests: a draft model has rows and pages too, but no requests.

``decode`` makes several greedy decode steps in one call, so that what is around a forward is paid
once for all of them. The implementation that forwards as often as there are tokens to decode is the
reference for the native one, which makes all steps in one call of C++. On a GPU each step reads the
tokens of the one before on the device, and the host waits once, at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from forethought.backends.cpu.network import NativeNetwork
from forethought.backends.cuda.graphs import GraphCapturer
from forethought.errors import ModelError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.attention.base import PagedPass
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM, HiddenStateReader
from forethought.model.sampling import NO_TOKEN, most_probable
from forethought.model.sampling.sampler import mark_not_finite


@dataclass(slots=True, eq=False)
class DecodeRow:
    """The most probable tokens to decode behind one sequence, one after the other.

    Attributes:
        token: the last known one.
        start: its position.
        table: page table with ``table.length == start + num_tokens``: slots for the known token and
            for all decoded ones but the last.
        num_tokens: to decode, at least one.
        ends: ids behind which no more are wanted.
    """

    token: int
    start: int
    table: PageTable
    num_tokens: int
    ends: Collection[int]

    def row(self, step: int, token: int, on_device: Tensor | None = None) -> Row:
        """What step ``step`` computes: its input token, on the host or int64 ``[1]``."""
        start = self.start + step
        return Row([token], start, self.table.prefix(start + 1), drafted=on_device)

    def slots(self) -> list[int]:
        """Of the decoded tokens; the last one is not stored."""
        return [*self.table.slots(self.start + 1, self.start + self.num_tokens), 0]

    def up_to_end(self, tokens: Sequence[int]) -> list[int]:
        """The decoded tokens up to the one that ends the row."""
        for size, token in enumerate(tokens, 1):
            if token == NO_TOKEN or token in self.ends:
                return list(tokens[:size])
        return list(tokens)


@dataclass(frozen=True, slots=True)
class DecodedTokens:
    """What ``ModelRunner.decode`` has decoded.

    Attributes:
        tokens: of each row, up to one of its ``ends``. ``NO_TOKEN`` is the last one where the
            largest of the logits is not finite.
        num_forwards: that were made.
    """

    tokens: list[list[int]]
    num_forwards: int


class ModelRunner:
    """Runs rows through ``lm``, whose KV cache is ``storage``.

    Attributes:
        graphs: captures CUDA graphs of the engine; None: all is computed eagerly.
    """

    graphs: GraphCapturer | None = None

    def __init__(self, lm: CausalLM, storage: KvStorage) -> None:
        assert tuple(lm.layer_shapes) == storage.layers
        assert lm.dtype == storage.dtype
        self.lm, self.storage = lm, storage

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the device that its forwards hold for good, beside weights and KV cache."""
        return 0

    def check_running(self) -> None:
        """Raises EngineStopped where a rank of the model has ended."""

    def shutdown(self) -> None:
        """End what computes outside of this process; nothing is run any more."""

    def forward(self, rows: Sequence[Row], readers: Sequence[HiddenStateReader] = ()) -> Tensor:
        """The logits that the rows ask for, float32 ``[R, vocab]``, in order of rows and tokens.

        The next forward may overwrite them.

        Args:
            rows: what to compute.
            readers: get hidden states of all tokens.
        """
        return self.forward_eagerly(rows, readers)

    def forward_eagerly(
        self, rows: Sequence[Row], readers: Sequence[HiddenStateReader] = ()
    ) -> Tensor:
        """The same without CUDA graphs."""
        batch = Batch.build(rows, self.lm.device)
        logits = self.compute(batch, readers)
        for reader in readers:
            reader.mark_stored(batch.slot_numbers)
        return logits

    def decode(self, rows: Sequence[DecodeRow]) -> DecodedTokens:
        """Make greedy decode steps until each row has ended; rows that have ended may go on.

        Args:
            rows: none has more tokens to decode than the one before it.
        """
        if isinstance(self.lm.network, NativeNetwork):
            return self._decode_natively(self.lm.network, rows)
        if self.lm.device.type == "cuda":
            return self._decode_on_device(rows)
        return self.decode_by_forwards(rows)

    def decode_by_forwards(self, rows: Sequence[DecodeRow]) -> DecodedTokens:
        """The reference implementation: one forward for each step, whose tokens are read."""
        columns, ended = list[list[int]](), set[int]()
        for step in range(rows[0].num_tokens):
            going = [row for row in rows if step < row.num_tokens]
            if all(index in ended for index in range(len(going))):
                break
            inputs = columns[-1] if columns else [row.token for row in rows]
            logits = self.forward(
                [
                    row.row(step, max(token, 0))  # what is behind NO_TOKEN has no meaning
                    for row, token in zip(going, inputs, strict=False)
                ]
            )
            columns.append(most_probable(logits))
            for index, (row, token) in enumerate(zip(going, columns[-1], strict=True)):
                if token == NO_TOKEN or token in row.ends:
                    ended.add(index)
        return _decoded(rows, columns, len(columns))

    def _decode_natively(self, network: NativeNetwork, rows: Sequence[DecodeRow]) -> DecodedTokens:
        batch = Batch.build([row.row(0, row.token) for row in rows])
        forward_pass = PagedPass(batch, self.storage, self.lm.backend, self.lm.windows)
        found = network.forward.draft_chains(
            forward_pass, None, [row.slots() for row in rows], ends=[row.ends for row in rows]
        )
        tokens = [row.up_to_end(own) for row, own in zip(rows, found, strict=True)]
        return DecodedTokens(tokens, max(map(len, tokens)))

    def _decode_on_device(self, rows: Sequence[DecodeRow]) -> DecodedTokens:
        """One forward for each step, of which all tokens are read at the end."""
        largest, tokens = list[Tensor](), list[Tensor]()
        for step in range(rows[0].num_tokens):
            going = [row for row in rows if step < row.num_tokens]
            before = tokens[-1].split(1) if tokens else [None] * len(rows)
            logits = self.forward(
                [row.row(step, row.token, token) for row, token in zip(going, before, strict=False)]
            )
            values, ids = logits.max(dim=-1)
            largest.append(values)
            tokens.append(ids)
        read = iter(mark_not_finite(torch.cat(tokens), torch.cat(largest)).tolist())
        return _decoded(rows, [list(islice(read, len(ids))) for ids in tokens], len(tokens))

    def compute(self, batch: Batch, readers: Sequence[HiddenStateReader]) -> Tensor:
        """What the device does in a forward; see :meth:`forward`."""
        if not readers:
            return self.lm.forward(batch, self.storage)
        layer_ids = frozenset(layer_id for reader in readers for layer_id in reader.layer_ids)
        logits, states = self.lm.forward_with_hidden_states(batch, self.storage, layer_ids)
        for reader in readers:
            reader.write(batch.slots, states)
        return logits

    def check_hidden_states(self, layer_ids: Sequence[int]) -> None:
        """Run one token to check that the hidden states at ``layer_ids`` can be captured.

        Only while the KV cache is empty: the first page is overwritten.

        Args:
            layer_ids: see ``model.causal_lm``.

        Raises:
            ModelError: they cannot be, or have another width than ``lm.hidden_size``.
        """
        table = PageTable(PagePool(self.storage.num_pages, self.storage.page_size))
        table.append(1)
        batch = Batch.build([Row([0], 0, table)], self.lm.device)
        try:
            _, states = self.lm.forward_with_hidden_states(
                batch, self.storage, frozenset(layer_ids)
            )
            shapes = {layer_id: tuple(states[layer_id].shape) for layer_id in layer_ids}
        except ModelError:
            raise
        except Exception as error:  # hooks into modules of any architecture
            raise self._not_capturable(f"{type(error).__name__}: {error}") from error
        wrong = {shape for shape in shapes.values() if shape != (1, self.lm.hidden_size)}
        if wrong:
            raise self._not_capturable(
                f"they are {wrong.pop()} for one token, not [1, {self.lm.hidden_size}]"
            )

    def _not_capturable(self, why: str) -> ModelError:
        return ModelError(
            f"the hidden states of a {self.lm.config.model_type} model cannot be captured",
            why,
            "Draft with something that does not read them",
        )


def _decoded(
    rows: Sequence[DecodeRow], columns: Sequence[Sequence[int]], num_forwards: int
) -> DecodedTokens:
    """The tokens of each row, from those of each step."""
    found = [
        [column[index] for column in columns[: row.num_tokens]] for index, row in enumerate(rows)
    ]
    tokens = [row.up_to_end(own) for row, own in zip(rows, found, strict=True)]
    return DecodedTokens(tokens, num_forwards)
