"""A Llama-like model whose layers run in one call of ``forward.cpp``.

See :class:`~forethought.model.causal_lm.Network`. The reference implementation is the module that
the weights come from. Activations are float32 whatever the dtype of the weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forethought.model.attention.base import ForwardPass, KvLayout
from forethought.model.batch import Batch
from forethought.model.causal_lm import FINAL
from forethought.model.native.library import (
    CallStruct,
    LayerStruct,
    ModelStruct,
    RowStruct,
    load_library,
)
from forethought.model.native.weights import (
    ACTIVATIONS,
    BF16,
    F32,
    PackedLayer,
    PackedLinear,
    norm_eps,
    norm_weight,
    rotary_tables,
)

_ROW = np.dtype(RowStruct)
MIN_SCORES = 64  # tokens of a row that scratch memory is made for, at least


class NativeNetwork:
    """Token ids to logits.

    One forward at a time: scratch memory is kept between calls.

    Args:
        module: one that ``weights.refusal`` accepts; its layers' weights are taken.
        max_positions: that a sequence may have.
        windows: of each layer's attention; None: all is attended to.
    """

    def __init__(
        self, module: PreTrainedModel, max_positions: int, windows: Sequence[int | None]
    ) -> None:
        config, model = module.config, module.model
        self._library = load_library()
        self.dtype = module.dtype
        types = getattr(config, "layer_types", None) or ["full_attention"] * len(model.layers)
        tables = rotary_tables(module, types, max_positions)
        attention = model.layers[0].self_attn
        self._head_norm_eps = norm_eps(attention.q_norm) if hasattr(attention, "q_norm") else 0.0
        head_dim = attention.head_dim
        self._layers: list[PackedLayer] = []
        for index, layer in enumerate(model.layers):
            self._layers.append(PackedLayer.of(layer, tables[types[index]], windows[index]))
            model.layers[index] = nn.Identity()  # frees the layer's own weights
        self._final_norm = norm_weight(model.norm)
        self._embedding = model.embed_tokens
        self._tied = module.lm_head.weight is model.embed_tokens.weight
        self._head = PackedLinear.of(module.lm_head)
        del module.lm_head
        self._embed_scale: Tensor | None = getattr(model.embed_tokens, "embed_scale", None)
        if self._tied:  # it is read from the packed output projection
            model.embed_tokens = self._embedding = nn.Identity()
        structs = (LayerStruct * len(self._layers))(*(layer.struct for layer in self._layers))
        assert self._final_norm is not None
        self._model = ModelStruct(
            structs,
            self._final_norm.data_ptr(),
            ctypes.pointer(self._head.struct),
            len(self._layers),
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            next(iter(tables.values())).shape[-1],
            ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act],
            BF16 if self.dtype == torch.bfloat16 else F32,
            norm_eps(model.norm),
            self._head_norm_eps,
            getattr(config, "final_logit_softcapping", None) or 0.0,
            getattr(config, "attn_logit_softcapping", None) or 0.0,
        )
        self._scratch = torch.empty(0)
        self._scratch_fits: tuple[int, ...] = (0, 0, 0)
        """Tokens, length of a row and threads that it is large enough for."""

    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Logits float32 ``[R, vocab]``."""
        layout, num_threads = forward_pass.layout(), torch.get_num_threads()
        for tensor in (batch.positions, batch.logit_index, *layout.indices):
            assert tensor.is_contiguous()
        embedded = self._embedded(batch.token_ids)
        num_tokens, num_logits = len(batch.token_ids), len(batch.logit_index)
        longest = max(row.prefix + len(row.recent) for row in layout.rows)
        max_length = max(MIN_SCORES, -(-longest // MIN_SCORES) * MIN_SCORES)
        states = self._states(forward_pass, num_tokens)
        logits = torch.empty(num_logits, self._head.struct.num_outputs)
        rows, keep = _packed_rows(layout)
        keys, values = (
            np.array([x.data_ptr() for x in side]) for side in (layout.keys, layout.values)
        )
        pointers = np.array([0 if x is None else x.data_ptr() for x in states])
        scratch = self._scratch_for(num_tokens, max_length, num_threads)
        call = CallStruct(
            embedded.data_ptr(),
            batch.positions.data_ptr(),
            layout.slots.data_ptr(),
            batch.logit_index.data_ptr(),
            rows.ctypes.data,
            keys.ctypes.data,
            values.ctypes.data,
            pointers.ctypes.data,
            logits.data_ptr(),
            scratch.data_ptr(),
            num_tokens,
            num_logits,
            len(rows),
            layout.page_size,
            max_length,
            num_threads,
        )
        self._library.forward(ctypes.byref(self._model), ctypes.byref(call))
        del keep
        for name, state in zip((*range(len(self._layers) + 1), FINAL), states, strict=True):
            if state is not None:
                forward_pass.capture(name, state.to(self.dtype))
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        if not self._tied:
            embedded: Tensor = self._embedding(token_ids)
            return embedded
        embedded = self._embedded(token_ids.flatten()).to(self.dtype)
        return embedded.view(*token_ids.shape, -1)

    def unembed(self, states: Tensor) -> Tensor:
        """Final-norm states ``[..., hidden]`` -> logits ``[..., vocab]``."""
        x = states.float().reshape(-1, states.shape[-1]).contiguous()
        logits = torch.empty(len(x), self._head.struct.num_outputs)
        self._library.linear(
            ctypes.byref(self._head.struct),
            ctypes.c_void_p(x.data_ptr()),
            len(x),
            ctypes.c_void_p(logits.data_ptr()),
            torch.get_num_threads(),
        )
        return logits.to(states.dtype).view(*states.shape[:-1], -1)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """int64 ``[T]`` -> float32 ``[T, hidden]``."""
        if not self._tied:
            plain: Tensor = self._embedding(token_ids)
            return plain.float()
        embedded, ids = torch.empty(len(token_ids), self._model.hidden), token_ids.contiguous()
        written = self._library.embed(
            ctypes.byref(self._head.struct),
            ctypes.c_void_p(ids.data_ptr()),
            len(ids),
            ctypes.c_void_p(embedded.data_ptr()),
        )
        if written < len(ids):
            raise IndexError(f"token id {int(ids[written])} is outside the vocabulary")
        return embedded if self._embed_scale is None else embedded * self._embed_scale

    def _states(self, forward_pass: ForwardPass, num_tokens: int) -> list[Tensor | None]:
        """Where hidden states are written, by layer; the final norm's last."""
        size, wanted = len(self._layers), forward_pass.layer_ids
        return [
            torch.empty(num_tokens, self._model.hidden) if name in wanted else None
            for name in (*range(size + 1), FINAL)
        ]

    def _scratch_for(self, num_tokens: int, max_length: int, num_threads: int) -> Tensor:
        wanted = (num_tokens, max_length, num_threads)
        if any(more > enough for more, enough in zip(wanted, self._scratch_fits, strict=True)):
            fits = tuple(map(max, wanted, self._scratch_fits))
            size = self._library.scratch_size(ctypes.byref(self._model), *fits)
            self._scratch, self._scratch_fits = torch.empty(size), fits
        return self._scratch


def _packed_rows(layout: KvLayout) -> tuple[np.ndarray, list[np.ndarray]]:
    """``Row`` structures, and the arrays that they point into."""
    keep: list[np.ndarray] = []

    def pointer(array: np.ndarray | None) -> int:
        if array is None:
            return 0
        keep.append(array)
        return int(array.ctypes.data)

    slots, positions = layout.recent_slots.data_ptr(), layout.recent_positions.data_ptr()
    packed = [
        (
            -1 if row.first_slot is None else row.first_slot,
            pointer(None if row.pages is None else np.array(row.pages, np.int32)),
            slots + row.recent.start * 8,  # int64
            positions + row.recent.start * 8,
            pointer(row.visible),
            row.start,
            row.num_tokens,
            row.prefix,
            row.seen_from,
            len(row.recent),
            0,
        )
        for row in layout.rows
    ]
    return np.array(packed, _ROW), keep
