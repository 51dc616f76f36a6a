"""Runs rows of tokens through one model over one KV storage.

Rows, not requests: a draft model has rows and pages too, but no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forethought.errors import ModelError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM
from forethought.model.graph_capturer import GraphCapturer
from forethought.model.hidden_states import HiddenStateReader


class ModelRunner:
    """Runs rows through ``lm``, whose KV cache is ``storage``. ``graphs`` captures CUDA graphs of
    the engine; None: all is computed eagerly.
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

    @property
    def failure(self) -> str | None:
        """Which rank of the model has ended, and why; None: none has. From any thread."""
        return None

    def shutdown(self) -> None:
        """End what computes outside of this process; nothing is run any more."""

    def forward(self, rows: Sequence[Row], readers: Sequence[HiddenStateReader] = ()) -> Tensor:
        """The logits that the rows ask for, float32 ``[R, vocab]``, in order of rows and tokens;
        the next forward may overwrite them. ``readers`` get hidden states of all tokens.
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

    def compute(self, batch: Batch, readers: Sequence[HiddenStateReader]) -> Tensor:
        """What the device does in a forward; see :meth:`forward`."""
        if not readers:
            return self.lm.forward(batch, self.storage)
        layer_ids = frozenset(layer_id for reader in readers for layer_id in reader.layer_ids)
        logits, states = self.lm.forward_with_hidden_states(batch, self.storage, layer_ids)
        for reader in readers:
            reader.write(batch.slots, states)
        return logits

    def scratch_storage(self, num_pages: int) -> KvStorage:
        """An empty storage beside the KV cache, with pages of its size, for ``lm.forward``. Raises
        ModelError if there can be none.
        """
        return self.lm.storage(num_pages, self.storage.page_size)

    def prepare(self, readers: Sequence[HiddenStateReader] = ()) -> None:
        """Make what forwards need, before the first: nothing here."""

    def check_hidden_states(self, layer_ids: Sequence[int]) -> None:
        """Run one token to check that the hidden states at ``layer_ids`` can be captured.

        Only while the KV cache is empty: the first page is overwritten.

        Raises ModelError if they cannot be, or have another width than ``lm.hidden_size``.
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
