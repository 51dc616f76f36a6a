"""A model runner that replays CUDA graphs where every token of the rows has its logits computed.

Those are decodes with their drafts, in whatever number and length (``graphs.Bucket``). Prefills,
and what no bucket holds, are computed eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from forethought.backends.cuda.graphs import (
    GRAPH_BYTES,
    MAX_GRAPH_TOKENS,
    Bucket,
    StaticBatch,
    capacity_of,
    padded_tokens,
)
from forethought.kv.storage import KvStorage
from forethought.model.batch import PackedRows, Row
from forethought.model.causal_lm import CausalLM
from forethought.model.graph_capturer import MAX_GRAPHS, Graph, GraphCapturer
from forethought.model.hidden_states import HiddenStateReader
from forethought.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    inputs: StaticBatch


class GraphRunner(ModelRunner):
    """Runs rows through ``lm``, by graphs where it can.

    Args:
        lm: with attention over pages (``backends.cuda.paged``).
        storage: its KV cache, with a scratch page; not resized once a graph was captured.
        graphs: captures them.
        max_tokens: of a batch that is computed by a graph.
    """

    def __init__(
        self,
        lm: CausalLM,
        storage: KvStorage,
        graphs: GraphCapturer,
        max_tokens: int = MAX_GRAPH_TOKENS,
    ) -> None:
        super().__init__(lm, storage)
        self.graphs: GraphCapturer = graphs
        self._max_tokens = min(max_tokens, MAX_GRAPH_TOKENS)
        self._captured: dict[tuple[Bucket, tuple[HiddenStateReader, ...]], _Captured | None] = {}
        self._logits: Tensor | None = None
        """float32 ``[tokens, vocab]``, in which all graphs leave their logits."""

    @override
    def forward(self, rows: Sequence[Row], readers: Sequence[HiddenStateReader] = ()) -> Tensor:
        """The logits are overwritten by the next forward. Rows with an adapter are computed
        eagerly: a graph has the products of one set of weights.
        """
        captured = None
        if not any(row.logits_from or row.concurrent or row.adapter for row in rows):
            bucket = Bucket.of(rows, self._max_tokens)
            captured = self._find(bucket, tuple(readers)) if bucket is not None else None
        if captured is None:
            return self.forward_eagerly(rows, readers)
        packed = PackedRows.of(rows)
        captured.inputs.fill(packed)
        logits = self.graphs.replay(captured.graph)
        slots = np.array(packed.slots, np.int64)
        for reader in readers:
            reader.mark_stored(slots)
        return logits[: len(slots)]

    @property
    def reserved_bytes(self) -> int:
        """An estimate, made before anything is captured.

        The logits as computed, in float32 and as the graphs leave them, the activations of a layer,
        and the graphs themselves.
        """
        lm, tokens = self.lm, padded_tokens(self._max_tokens)
        config = lm.config.get_text_config(decoder=True)
        inner = getattr(config, "intermediate_size", None) or 4 * lm.hidden_size
        activations = (8 * lm.hidden_size + 4 * inner) * lm.dtype.itemsize
        logits = lm.vocab_size * (lm.dtype.itemsize + 2 * torch.float32.itemsize)
        return tokens * (logits + activations) + MAX_GRAPHS * GRAPH_BYTES

    @override
    def prepare(self, readers: Sequence[HiddenStateReader] = ()) -> None:
        """Capture the smallest bucket, to know that the model can be captured.

        Args:
            readers: those of the forwards to come.

        Raises:
            Exception: it cannot.
        """
        key = Bucket(1, 1, capacity_of(1)), tuple(readers)
        self._captured[key] = self._capture(*key, must_work=True)

    def _find(self, bucket: Bucket, readers: tuple[HiddenStateReader, ...]) -> _Captured | None:
        key = bucket, readers
        if key not in self._captured:
            self._captured[key] = self._capture(bucket, readers)
        return self._captured[key]

    def _capture(
        self, bucket: Bucket, readers: tuple[HiddenStateReader, ...], must_work: bool = False
    ) -> _Captured | None:
        inputs = StaticBatch(bucket, self.storage)
        inputs.clear()
        output = self._output(bucket.num_tokens)

        def compute() -> Tensor:
            return output.copy_(self.compute(inputs.batch, readers))

        if must_work:
            return _Captured(self.graphs.capture(compute), inputs)
        graph = self.graphs.try_capture(bucket, compute)
        return None if graph is None else _Captured(graph, inputs)

    def _output(self, num_tokens: int) -> Tensor:
        if self._logits is None:
            size = padded_tokens(self._max_tokens), self.lm.vocab_size
            self._logits = torch.empty(size, dtype=torch.float32, device=self.lm.device)
        return self._logits[:num_tokens]
