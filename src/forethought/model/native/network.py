"""A Llama-like model whose layers run in one call of ``forward.cpp``.

See :class:`~forethought.model.causal_lm.Network`. The reference implementation is the module that
the weights come from. Activations are float32 whatever the dtype of the weights.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

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
        embed_scale = getattr(model.embed_tokens, "embed_scale", None)
        self._head = PackedLinear.of(module.lm_head)
        del module.lm_head
        if self._tied:  # it is read from the packed output projection
            model.embed_tokens = self._embedding = nn.Identity()
        structs = (LayerStruct * len(self._layers))(*(layer.struct for layer in self._layers))
        assert self._final_norm is not None
        self._model = ModelStruct(
            structs,
            self._final_norm.data_ptr(),
            ctypes.pointer(self._head.struct),
            ctypes.pointer(self._head.struct) if self._tied else None,
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
            1.0 if embed_scale is None else float(embed_scale),
        )
        self._no_states = (ctypes.c_void_p * (len(self._layers) + 2))()
        self._scratch = torch.empty(0)
        self._scratch_fits: tuple[int, ...] = (0, 0, 0)
        """Tokens, length of a row and threads that it is large enough for."""

    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Logits float32 ``[R, vocab]``."""
        layout, num_threads = forward_pass.layout(), torch.get_num_threads()
        for tensor in (batch.token_ids, batch.positions, batch.logit_index, *layout.indices):
            assert tensor.is_contiguous()
        # What the call points to lives until it returns: every part of it has a name here.
        embedded = None if self._tied else self._embedding(batch.token_ids).float()
        num_tokens, num_logits = batch.token_ids.shape[0], batch.logit_index.shape[0]
        longest = max(row.prefix + len(row.recent) for row in layout.rows)
        max_length = max(MIN_SCORES, -(-longest // MIN_SCORES) * MIN_SCORES)
        states = self._states(forward_pass, num_tokens) if forward_pass.layer_ids else None
        state_pointers = self._no_states if states is None else _pointers(states)
        logits = torch.empty(num_logits, self._head.struct.num_outputs)
        rows, keep = _packed_rows(layout)
        keys, values = _pointers(layout.keys), _pointers(layout.values)
        call = CallStruct(
            batch.token_ids.data_ptr(),
            None if embedded is None else embedded.data_ptr(),
            batch.positions.data_ptr(),
            layout.slots.data_ptr(),
            batch.logit_index.data_ptr(),
            rows.buffer_info()[0],
            ctypes.addressof(keys),
            ctypes.addressof(values),
            ctypes.addressof(state_pointers),
            logits.data_ptr(),
            self._scratch_for(num_tokens, max_length, num_threads).data_ptr(),
            num_tokens,
            num_logits,
            len(layout.rows),
            layout.page_size,
            max_length,
            num_threads,
        )
        known = self._library.forward(ctypes.byref(self._model), ctypes.byref(call))
        del keep
        if known < num_tokens:
            raise _unknown(int(batch.token_ids[known]))
        if states is not None:
            for name, state in zip((*range(len(self._layers) + 1), FINAL), states, strict=True):
                if state is not None:
                    forward_pass.capture(name, state.to(self.dtype))
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        if not self._tied:
            embedded: Tensor = self._embedding(token_ids)
            return embedded
        ids, size = token_ids.flatten().contiguous(), token_ids.numel()
        weights = ctypes.byref(self._head.struct)
        known = self._library.first_unknown(weights, ctypes.c_void_p(ids.data_ptr()), size)
        if known < size:
            raise _unknown(int(ids[known]))
        found = torch.empty(size, self._model.hidden)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (ids, found))
        self._library.embed(weights, next(pointers), size, next(pointers))
        found *= self._model.embed_scale
        return found.to(self.dtype).view(*token_ids.shape, -1)

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

    def _states(self, forward_pass: ForwardPass, num_tokens: int) -> list[Tensor | None]:
        """Where hidden states are written, by layer; the final norm's last."""
        size, wanted = len(self._layers), forward_pass.layer_ids
        return [
            torch.empty(num_tokens, self._model.hidden) if name in wanted else None
            for name in (*range(size + 1), FINAL)
        ]

    def _scratch_for(self, num_tokens: int, max_length: int, num_threads: int) -> Tensor:
        tokens, length, threads = self._scratch_fits
        if num_tokens > tokens or max_length > length or num_threads > threads:
            fits = max(num_tokens, tokens), max(max_length, length), max(num_threads, threads)
            size = self._library.scratch_size(ctypes.byref(self._model), *fits)
            self._scratch, self._scratch_fits = torch.empty(size), fits
        return self._scratch


def _unknown(token_id: int) -> IndexError:
    return IndexError(f"token id {token_id} is outside the vocabulary")


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    found = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(found))(*found)


def _packed_rows(layout: KvLayout) -> tuple[array[int], list[object]]:
    """The integers of ``Row`` structures, and the arrays that they point into."""
    packed, keep = array("q"), list[object]()
    slots, positions = layout.recent_slots.data_ptr(), layout.recent_positions.data_ptr()
    for row in layout.rows:
        pages = visible = 0
        if row.pages is not None:
            keep.append(numbers := array("i", row.pages))
            pages = numbers.buffer_info()[0]
        if row.visible is not None:
            keep.append(row.visible)
            visible = torch.from_numpy(row.visible).data_ptr()  # a quarter of .ctypes.data's time
        shift = row.recent.start * 8  # int64
        packed.extend(
            (
                -1 if row.first_slot is None else row.first_slot,
                pages,
                slots + shift,
                positions + shift,
                visible,
                row.start,
                row.num_tokens,
                row.prefix,
                row.seen_from,
                len(row.recent),
            )
        )
    return packed, keep
