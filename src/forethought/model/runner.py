"""Rows in, logits out: one model over one KV storage.

Rows, not requests: a draft model has rows and pages too, but no request.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forethought.errors import ModelError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM, HiddenStateReader


class ModelRunner:
    """Runs rows through ``lm``, whose keys and values live in ``storage``."""

    def __init__(self, lm: CausalLM, storage: KvStorage) -> None:
        assert tuple(lm.layer_shapes) == storage.layers
        assert lm.dtype == storage.dtype
        self.lm, self.storage = lm, storage

    def forward(self, rows: Sequence[Row], readers: Sequence[HiddenStateReader] = ()) -> Tensor:
        """float32 ``[R, vocab]``: the logits that the rows want, in order of rows and tokens.

        Args:
            rows: what to compute.
            readers: who gets hidden states of all tokens.
        """
        batch = Batch.build(rows, self.lm.device)
        if not readers:
            return self.lm.forward(batch, self.storage)
        layer_ids = frozenset(layer_id for reader in readers for layer_id in reader.layer_ids)
        logits, states = self.lm.forward_with_hidden_states(batch, self.storage, layer_ids)
        for reader in readers:
            reader.write(batch.slots, states)
        return logits

    def check_hidden_states(self, layer_ids: Sequence[int]) -> None:
        """Run one token and see that the hidden states at ``layer_ids`` can be taken.

        Only while nothing is stored: the first page is written over.

        Args:
            layer_ids: see ``model.causal_lm``.

        Raises:
            ModelError: they cannot, or have another width than ``lm.hidden_size``.
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
            raise self._untappable(f"{type(error).__name__}: {error}") from error
        odd = {shape for shape in shapes.values() if shape != (1, self.lm.hidden_size)}
        if odd:
            raise self._untappable(
                f"they are {odd.pop()} for one token, not [1, {self.lm.hidden_size}]"
            )

    def _untappable(self, why: str) -> ModelError:
        return ModelError(
            f"the hidden states of a {self.lm.config.model_type} model cannot be taken",
            why,
            "Draft with something that does not read them",
        )
