"""Hidden states of the target, which learned drafters read (auxiliary hidden states in vLLM).

They are captured by layer index. With n layers::

    i < n    the residual stream that enters layer i (0: the embeddings)
    n        the output of the last layer
    FINAL    the output of the final norm, from which the logits are computed

A forward is told the indices (``ForwardPass.layer_ids``). The fused network and the one in C++ hand
each state to ``ForwardPass.capture``; modules of transformers do so by hooks. The ``ModelRunner``
gives what was captured to its readers, of which ``HiddenStateCache`` stores it by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forethought.errors import ModelError
from forethought.kv.staging import upload
from forethought.kv.storage import DraftKvCache, KvStorage, LayerShape
from forethought.kv.table import ReadableTable
from forethought.model.attention.base import ForwardPass

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FINAL = -1
"""Layer index of the final norm's output."""


class HiddenStateReader(Protocol):
    """Receives hidden states of each forward."""

    @property
    def layer_ids(self) -> Sequence[int]:
        """The layers whose states it needs."""

    def write(self, slots: Tensor, states: Mapping[int, Tensor]) -> None:
        """Keep ``states`` [T, hidden], by layer index, of the tokens at ``slots`` int64 [T]. By
        tensor operations alone: a CUDA graph repeats them.
        """

    def mark_stored(self, slots: NDArray[np.int64]) -> None:
        """Called after ``write``, with the same slots [T] on the host."""


class HiddenStateCache(DraftKvCache):
    """The target's hidden states of every stored token, those of some layers concatenated in order
    of ``layer_ids``.

    Args:
        layer_ids: see above.
        hidden_size: of the target.
        like: its storage, with the same pages, dtype and device.
        roots_only: a draft reads only the state that its root was sampled from.
    """

    def __init__(
        self,
        layer_ids: Sequence[int],
        hidden_size: int,
        like: KvStorage,
        roots_only: bool = False,
    ) -> None:
        self.layer_ids, self.width = tuple(layer_ids), hidden_size * len(layer_ids)
        self.roots_only = roots_only
        shape = LayerShape(kv_heads=1, key_dim=self.width, value_dim=0)
        super().__init__(
            KvStorage(
                [shape],
                like.num_pages,
                like.page_size,
                like.dtype,
                like.device,
                has_scratch_page=like.has_scratch_page,
            )
        )

    def write(self, slots: Tensor, states: Mapping[int, Tensor]) -> None:
        """Store the states of T tokens: by layer index, [T, hidden], at slots int64 [T]."""
        parts = [states[layer_id] for layer_id in self.layer_ids]
        wide = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        self.storage.keys[0].index_copy_(0, slots, wide.unsqueeze(1))

    def mark_stored(self, slots: NDArray[np.int64]) -> None:
        """The states at these slots [T] are stored, or will be by what is queued on a GPU."""
        self._ready.reshape(-1)[slots] = True

    def covers(self, table: ReadableTable, length: int) -> bool:
        """Whether the states of the first ``length`` positions, at least one, are all stored."""
        return length > 0 and self.ready_length(table, length) == length

    def is_readable(self, table: ReadableTable, length: int) -> bool:
        """Whether a draft after the first ``length`` positions has all states that it reads."""
        if not self.roots_only:
            return self.covers(table, length)
        return length > 0 and bool(self._ready.reshape(-1)[table.slots(length - 1, length)].all())

    def read_last(self, tables: Sequence[ReadableTable], lengths: Sequence[int]) -> Tensor:
        """The states of the last of ``lengths`` positions of each table: [len(tables), width]."""
        slots: list[int] = []
        for table, length in zip(tables, lengths, strict=True):
            slots += table.slots(length - 1, length)
        stored = self.storage.keys[0]
        if len(slots) == 1:
            return stored[slots[0]]
        return stored.index_select(0, upload(slots, stored.device))[:, 0]

    def read(self, table: ReadableTable, start: int, stop: int) -> Tensor:
        """The states of positions ``[start, stop)``: [stop - start, width] in the model's dtype."""
        index, stored = table.slot_index(start, stop), self.storage.keys[0]
        if isinstance(index, slice):
            return stored[index, 0]
        return stored[upload(index, stored.device), 0]


def decoder_of(module: PreTrainedModel) -> PreTrainedModel:
    """The decoder of a causal language model, without the projection to logits."""
    decoder: PreTrainedModel = module.get_decoder()
    if decoder is module:  # as a Llama 4 says of itself
        decoder = getattr(module, "model", module)
    return decoder


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a transformers model, in order, whatever the list is called: the one
    outermost ``ModuleList`` with as many entries as the config has layers (``layers``, GPT-2's
    ``h``, OPT's ``decoder.layers``).

    Raises ModelError if there is no such list, or more than one.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    outer = [
        module
        for name, module in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
    ]
    if len(outer) != 1:
        names = ", ".join(lists) or "none"
        raise ModelError(
            f"the hidden states of a {model.config.model_type} model cannot be captured",
            f"its list of {count} decoder layers cannot be identified among its modules ({names})",
            "Use a drafter that reads no hidden states of single layers",
        )
    return list(outer[0])


@contextmanager
def capturing_hidden_states(
    model: PreTrainedModel, forward_pass: ForwardPass, find_layers: Callable[[], list[nn.Module]]
) -> Iterator[None]:
    """Install hidden-state hooks in a transformers decoder for one forward, whose pass gets the
    states.

    ``find_layers`` is called if states of single layers are captured; raises ModelError if these
    cannot be identified.
    """

    def entering(layer_id: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["hidden_states"]
            forward_pass.capture(layer_id, x[0])

        return hook

    def leaving(layer_id: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x: Tensor = output if isinstance(output, Tensor) else output[0]
            forward_pass.capture(layer_id, x[0])

        return hook

    if not forward_pass.layer_ids:
        yield
        return
    handles = []
    if forward_pass.layer_ids - {FINAL}:
        layers = find_layers()
        handles += [
            layer.register_forward_pre_hook(entering(layer_id), with_kwargs=True)
            for layer_id, layer in enumerate(layers)
            if layer_id in forward_pass.layer_ids
        ]
        if len(layers) in forward_pass.layer_ids:
            handles.append(layers[-1].register_forward_hook(leaving(len(layers))))
    if FINAL in forward_pass.layer_ids:
        handles.append(model.register_forward_hook(leaving(FINAL)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
