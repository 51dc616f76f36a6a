"""A Llama-like model whose layers run in one call of ``forward.cpp``.

See :class:`~forethought.model.causal_lm.Network`. The reference implementation is the module that
the weights come from. Activations are float32 whatever the dtype of the weights; those that
are multiplied by weights in bf16 are rounded where the processor multiplies bf16 (``tiles.h``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from forethought.backends.cpu.adapters import NativeAdditions
from forethought.backends.cpu.expert_store import ExpertStore
from forethought.backends.cpu.forward import NativeForward, Wanted, unknown_token
from forethought.backends.cpu.layer_window import LayerWindow
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.norms import norm_eps, norm_weight
from forethought.backends.cpu.packed_linear import TYPES, PackedLinear
from forethought.backends.cpu.structures import LayerStruct, ModelStruct
from forethought.backends.cpu.weights import ACTIVATIONS, PackedLayer, rotary_tables
from forethought.model.adapter import Adapter, layer_additions
from forethought.model.attention.base import ForwardPass
from forethought.model.batch import Batch
from forethought.model.block_weight import BlockWeight
from forethought.model.device import owned
from forethought.model.token_adapters import PlacedAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from forethought.model.checkpoint_module import CheckpointModule


class _Embedding(NamedTuple):
    """Where the embeddings are read.

    Attributes:
        packed: their panels; None: they are a table.
        table: ``[vocab, hidden]``.
        num_bytes: beside those of the output projection.
    """

    packed: PackedLinear | None
    table: Tensor | None
    num_bytes: int

    @classmethod
    def of(cls, module: PreTrainedModel | CheckpointModule, head: PackedLinear) -> Self:
        """Panels of a tied output projection or of weights in blocks, otherwise a table, which the
        module keeps.
        """
        embedding = module.model.embed_tokens
        if module.lm_head.weight is embedding.weight:
            return cls(head, None, 0)
        if isinstance(embedding.weight, BlockWeight):
            packed = PackedLinear.pack(embedding.weight, None)
            return cls(packed, None, packed.num_bytes)
        embedding.weight = nn.Parameter(owned(embedding.weight), requires_grad=False)
        table = embedding.weight.detach().contiguous()
        table = table if table.dtype in TYPES else table.float()
        return cls(None, table, table.nbytes)

    def fields(self, dtype: torch.dtype) -> dict[str, Any]:
        """Of ``ModelStruct``; ``dtype`` is the module's."""
        packed, table = self.packed, self.table
        if packed is not None:
            pointer = ctypes.pointer(packed.struct)
            sizes = {"num_embeddings": packed.struct.num_outputs, "table_type": TYPES[dtype]}
            return {"embedding": pointer, "table": None, **sizes}
        assert table is not None
        sizes = {"num_embeddings": len(table), "table_type": TYPES[table.dtype]}
        return {"embedding": None, "table": table.data_ptr(), **sizes}


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of ``ModelStruct`` that the configuration has."""
    return {
        "hidden": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "activation": ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act],
        "logit_cap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "score_cap": getattr(config, "attn_logit_softcapping", None) or 0.0,
    }


def _head_sizes(attention: nn.Module) -> dict[str, Any]:
    """Fields of ``ModelStruct`` that the attention of each layer has."""
    has_norms = hasattr(attention, "q_norm")
    eps = norm_eps(attention.q_norm) if has_norms else 0.0
    return {"head_dim": attention.head_dim, "head_norm_eps": eps}


class NativeNetwork:
    """Token ids to logits.

    Args:
        module: one that ``weights.refusal`` accepts; its layers' weights are taken.
        max_positions: that a sequence may have.
        windows: of each layer's attention; None: all is attended to.
        expert_bytes: of memory for experts, the others of which are in a file; None: all of them
            are in memory.
        layer_window: layers in memory, fewer than there are, the others of which are in a file;
            None: all of them are in memory.

    Attributes:
        forward: its packed weights.
        head: its output projection.
        num_bytes: of what of these is in memory, with the embeddings.
        experts: those in a file; None: none are.
        window: layers in a file; None: there are none.
    """

    def __init__(
        self,
        module: PreTrainedModel | CheckpointModule,
        max_positions: int,
        windows: Sequence[int | None],
        expert_bytes: int | None = None,
        layer_window: int | None = None,
    ) -> None:
        model = module.model
        self._library = load_library()
        self.dtype = module.dtype
        types = getattr(module.config, "layer_types", None)
        types = types or ["full_attention"] * len(model.layers)
        tables = rotary_tables(module, types, max_positions)
        self.rotations = next(iter(tables.values())) if len(tables) == 1 else None
        embed_scale = getattr(model.embed_tokens, "embed_scale", None)
        self.head = PackedLinear.of(module.lm_head)
        embedding = _Embedding.of(module, self.head)
        self._packed = embedding.packed
        del module.lm_head
        if embedding.packed is not None:
            model.embed_tokens = nn.Identity()
        self._embedding = model.embed_tokens
        heads = _head_sizes(model.layers[0].self_attn)
        store = self.experts = None if expert_bytes is None else ExpertStore(expert_bytes)
        num_layers = len(model.layers)
        window = None if layer_window is None else LayerWindow(num_layers, layer_window)
        self.window = window
        structs = (LayerStruct * num_layers)()
        self._layers = layers = [
            self._pack_layer(model.layers, index, structs, tables[types[index]], windows[index])
            for index in range(num_layers)
        ]
        if store is not None:
            store.open()
        final_norm = norm_weight(model.norm)
        assert final_norm is not None
        struct = ModelStruct(
            layers=structs,
            final_norm=final_norm.data_ptr(),
            head=ctypes.pointer(self.head.struct),
            join=None,
            stored=None if window is None else window.open(),
            num_layers=num_layers,
            rotary_dim=next(iter(tables.values())).shape[-1],
            eps=norm_eps(model.norm),
            embed_scale=1.0 if embed_scale is None else float(embed_scale),
            **heads,
            **embedding.fields(self.dtype),
            **_sizes(module.config),
        )
        held = [layers, self.head, embedding, final_norm, store]
        self.forward = NativeForward(struct, max_positions, held, window)
        self.num_bytes = self.head.num_bytes + embedding.num_bytes
        self.num_bytes += sum(layer.num_bytes for layer in layers)
        self.num_bytes += 0 if store is None else store.memory_bytes
        self.num_bytes += 0 if window is None else window.memory_bytes

    def _pack_layer(
        self,
        modules: MutableSequence[nn.Module],
        index: int,
        structs: ctypes.Array[LayerStruct],
        rotary: Tensor,
        window: int | None,
    ) -> PackedLayer:
        """Pack one of the layers into its struct, and to the file if it belongs there; its module
        is freed. ``rotary``, ``window``: as of ``PackedLayer``.
        """
        packed = PackedLayer.of(modules[index], rotary, window, store=self.experts)
        structs[index] = packed.struct
        modules[index] = nn.Identity()
        if self.window is not None and index in self.window:
            self.window.put(index, packed.linears(structs[index]))
            structs[index].is_stored = True
        return packed

    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Logits float32 ``[R, vocab]``."""
        states = self.forward.wanted_states(forward_pass)
        size = batch.logit_index.numel(), self.forward.vocab_size
        logits = torch.empty(size, dtype=torch.float32)
        self.forward.compute(forward_pass, Wanted(logits, states))
        self.forward.capture(forward_pass, states, self.dtype)
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        if self._packed is None:
            embedded: Tensor = self._embedding(token_ids)
            return embedded
        ids = token_ids.flatten().contiguous()
        num_known = self.forward.first_unknown(ids)
        if num_known < len(ids):
            raise unknown_token(int(ids[num_known]))
        embeddings = torch.empty(len(ids), self.forward.model.hidden, dtype=torch.float32)
        self._library.embed(
            ctypes.byref(self._packed.struct),
            ctypes.c_void_p(ids.data_ptr()),
            len(ids),
            ctypes.c_void_p(embeddings.data_ptr()),
        )
        embeddings *= self.forward.model.embed_scale
        return embeddings.to(self.dtype).view(*token_ids.shape, -1)

    def unembed(self, states: Tensor) -> Tensor:
        """Final-norm states ``[..., hidden]`` -> logits ``[..., vocab]``."""
        return self.head.multiply(states).to(states.dtype)

    def place(self, adapter: Adapter, linears: Mapping[str, tuple[int, int]]) -> PlacedAdapter:
        """An adapter in panels; see ``Network``."""
        additions = layer_additions(adapter, linears)
        parts = NativeAdditions.of(additions, self.forward.model.num_layers)
        return PlacedAdapter(adapter.name, adapter.digest, parts)
