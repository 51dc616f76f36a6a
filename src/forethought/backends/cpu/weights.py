"""Weights in the layout of ``panels.h``: panels of 16 outputs, read from transformers modules.

Each family is described once: where the parts of a layer are, and what its norms add. Everything
else (windows, head counts) is known from the capability probe and the config.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu.expert_store import ExpertStore
from forethought.backends.cpu.norms import norm_weight
from forethought.backends.cpu.packed_linear import (
    I8,
    TYPES,
    PackedLinear,
    address,
    kind_of,
    merges,
    stored_refusal,
)
from forethought.backends.cpu.structures import ExpertsStruct, LayerStruct, LinearStruct
from forethought.model.checkpoint_module import CheckpointConfig, CheckpointModule
from forethought.model.llama.layers import rotary_table
from forethought.model.quantization import (
    QuantizedLinear,
)
from forethought.model.quantized_experts import QuantizedExperts, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KV_TYPES = {**TYPES, torch.int8: I8}
"""Of keys and values, as ``kv.entries`` holds them."""
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
MAX_HEAD_DIM, MAX_GROUP = 1024, 64
"""As in structures.h."""

FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
)
"""Exactly these classes of transformers: a subclass may compute something else."""


def refusal(module: PreTrainedModel | CheckpointModule) -> str | None:
    """Why the module cannot run natively; None: it can."""
    config, cls = module.config, type(module)
    is_plain = isinstance(module, CheckpointModule)
    is_theirs = cls.__module__.startswith("transformers.models.")
    if not is_plain and not (is_theirs and cls.__name__ in FAMILIES):
        return f"{cls.__name__} is not among its families"
    if _activation(config) not in ACTIVATIONS:
        return f"the activation {_activation(config)}"
    if isinstance(module, CheckpointModule):
        return _sizes_refusal(config)
    if module.dtype not in TYPES:
        return f"weights in {str(module.dtype).removeprefix('torch.')}"
    if getattr(config, "use_bidirectional_attention", False):
        return "attention to later tokens"
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Linear | QuantizedLinear):
            why = _linear_refusal(submodule, module.dtype)
            if why is not None:
                return f"{name} has {why}"
    for layer in module.model.layers:
        attention = layer.self_attn
        size = attention.head_dim
        if size > MAX_HEAD_DIM or attention.num_key_value_groups > MAX_GROUP:
            return f"heads of {size} in groups of {attention.num_key_value_groups}"
        mlps = _shared(layer.mlp) if _is_sparse(layer.mlp) else [layer.mlp]
        if any(len({kind_of(linear) for linear in _gate_up(mlp)}) > 1 for mlp in mlps):
            return "weights of gate and up that were quantised differently"
        if not merges(_qkv(attention)):
            return "weights that are merged and were quantised differently"
        shared_gate = getattr(layer.mlp, "shared_expert_gate", None)
        if isinstance(shared_gate, QuantizedLinear):
            return "gates of shared experts that are quantised"
    return None


def _sizes_refusal(config: CheckpointConfig) -> str | None:
    group = config.num_attention_heads // config.num_key_value_heads
    if config.head_dim > MAX_HEAD_DIM or group > MAX_GROUP:
        return f"heads of {config.head_dim} in groups of {group}"
    return None


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _linear_refusal(linear: nn.Module, dtype: torch.dtype) -> str | None:
    weight = linear.weight
    if type(linear) not in (nn.Linear, QuantizedLinear):
        return f"a forward of its own ({type(linear).__name__})"
    if isinstance(weight, Tensor):
        return None if weight.dtype == dtype else f"weights in {weight.dtype}"
    return stored_refusal(weight)


def _qkv(attention: nn.Module) -> list[nn.Module]:
    if hasattr(attention, "qkv_proj"):
        return [attention.qkv_proj]
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _gate_up(mlp: nn.Module) -> list[nn.Module]:
    return [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]


def _is_sparse(mlp: nn.Module) -> bool:
    return hasattr(mlp, "experts")


def _shared(mlp: nn.Module) -> list[nn.Module]:
    """The experts of a mixture that all tokens use, times the sigmoid of a gate: one or none."""
    return [mlp.shared_expert] if hasattr(mlp, "shared_expert") else []


@dataclass(slots=True)
class PackedExperts:
    """The experts of a layer.

    Attributes:
        struct: for ``forward.cpp``.
        arrays: of the ``gate_up`` and the ``down`` of each expert, then of the shared ones.
        packed: what is in memory.
    """

    struct: ExpertsStruct
    arrays: tuple[ctypes.Array[LinearStruct], ctypes.Array[LinearStruct]]
    packed: list[PackedLinear]

    @classmethod
    def of(cls, mlp: nn.Module, store: ExpertStore | None = None) -> PackedExperts:
        """Pack the experts of a mixture as Qwen's, with a shared expert or without; into ``store``,
        if there is one, all but the shared one.
        """
        shared, first = _shared(mlp), 0 if store is None else len(store)
        gates = [mlp.gate.weight, *(mlp.shared_expert_gate.weight for _ in shared)]
        router = PackedLinear.pack(torch.cat(gates), None, float32_input=True)
        held, structs = [router], list[tuple[LinearStruct, LinearStruct]]()
        for gate_up, down in zip(*_expert_weights(mlp.experts), strict=True):
            pair = PackedLinear.pack(gate_up, None, gated=True), PackedLinear.pack(down, None)
            if store is None:
                held += pair
            else:
                store.put(*((linear.struct, linear.tensors) for linear in pair))
            structs.append((pair[0].struct, pair[1].struct))
        num_experts = len(structs)
        for expert in shared:
            pair = PackedLinear.of(*_gate_up(expert), gated=True), PackedLinear.of(expert.down_proj)
            held += pair
            structs.append((pair[0].struct, pair[1].struct))
        kind = LinearStruct * len(structs)
        arrays = kind(*(pair[0] for pair in structs)), kind(*(pair[1] for pair in structs))
        struct = ExpertsStruct(
            router=ctypes.pointer(router.struct),
            gate_up=arrays[0],
            down=arrays[1],
            num_experts=num_experts,
            top_k=mlp.gate.top_k,
            renormalise=bool(mlp.gate.norm_topk_prob),
            num_shared=len(shared),
        )
        if store is not None:
            store.add_layer(struct, arrays, first)
        return cls(struct, arrays, held)

    @classmethod
    def chosen_elsewhere(cls, experts: nn.Module) -> PackedExperts:
        """Pack a module of experts, without a router."""
        module = experts._activation if isinstance(experts, QuantizedExperts) else experts
        has_gates = bool(module.has_gate)
        pairs = [
            (PackedLinear.pack(gate_up, None, gated=has_gates), PackedLinear.pack(down, None))
            for gate_up, down in zip(*_expert_weights(experts), strict=True)
        ]
        kind = LinearStruct * len(pairs)
        gate_ups, downs = (kind(*(one.struct for one in half)) for half in zip(*pairs, strict=True))
        arrays = gate_ups, downs
        struct = ExpertsStruct(
            gate_up=arrays[0],
            down=arrays[1],
            num_experts=len(pairs),
            has_no_gates=not has_gates,
        )
        return cls(struct, arrays, [linear for pair in pairs for linear in pair])

    def linears(self) -> Iterator[tuple[LinearStruct, list[Tensor]]]:
        """Those of the experts that are in memory, in ``arrays``, with their tensors."""
        structs = [struct for pair in zip(*self.arrays, strict=True) for struct in pair]
        for struct, packed in zip(structs, self.packed[1:], strict=True):  # the first one routes
            yield from packed.linears(struct)

    @property
    def num_bytes(self) -> int:
        """Of what is in memory."""
        return sum(packed.num_bytes for packed in self.packed)


def _expert_weights(experts: nn.Module) -> tuple[list[Any], list[Any]]:
    """``[2 I, H]``, without gates ``[I, H]``, and ``[H, I]`` of each expert."""
    if isinstance(experts, QuantizedExperts):
        gate_up, down = experts.gate_up, experts.down
        return [linear.weight for linear in gate_up], [linear.weight for linear in down]
    entering, down = weights_of(experts)
    return list(getattr(experts, entering)), list(getattr(experts, down))


@dataclass(slots=True)
class PackedLayer:
    """A decoder layer.

    Attributes:
        struct: for ``forward.cpp``.
        parts: what it points into.
    """

    struct: LayerStruct
    parts: list[Any]

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        rotary: Tensor,
        window: int | None,
        enters_normed: bool = True,
        store: ExpertStore | None = None,
    ) -> PackedLayer:
        """Pack a layer.

        Args:
            layer: of a module that ``refusal`` accepts, or of a draft head.
            rotary: float32 ``[positions, 2, rotary_dim]`` of its kind of layer.
            window: of its attention; None: none.
            enters_normed: its attention reads what enters after ``input_layernorm``.
            store: takes its experts; None: they stay in memory.
        """
        attention, mlp = layer.self_attn, layer.mlp
        post_norms = hasattr(layer, "pre_feedforward_layernorm")
        norms = {
            "input_norm": layer.input_layernorm if enters_normed else None,
            "q_norm": getattr(attention, "q_norm", None),
            "k_norm": getattr(attention, "k_norm", None),
            "attention_norm": layer.post_attention_layernorm if post_norms else None,
            "mlp_norm": (
                layer.pre_feedforward_layernorm if post_norms else layer.post_attention_layernorm
            ),
            "output_norm": layer.post_feedforward_layernorm if post_norms else None,
        }
        weights = {name: norm_weight(norm) for name, norm in norms.items()}
        qkv = PackedLinear.of(*_qkv(attention))
        out = PackedLinear.of(attention.o_proj)
        experts = gate_up = down = None
        if _is_sparse(mlp):
            experts = PackedExperts.of(mlp, store)
        else:
            gate_up = PackedLinear.of(*_gate_up(mlp), gated=True)
            down = PackedLinear.of(mlp.down_proj)
        struct = LayerStruct(
            **{name: address(weight) for name, weight in weights.items()},
            rotary=rotary.data_ptr(),
            qkv=qkv.struct,
            out=out.struct,
            gate_up=LinearStruct() if gate_up is None else gate_up.struct,
            down=LinearStruct() if down is None else down.struct,
            experts=None if experts is None else ctypes.pointer(experts.struct),
            scale=attention.scaling,
            window=window or 0,
        )
        return cls(struct, [weights, rotary, qkv, out, gate_up, down, experts])

    def linears(self, struct: LayerStruct) -> Iterator[tuple[LinearStruct, list[Tensor]]]:
        """The products in ``struct``, a copy of its own one, with their tensors."""
        *products, experts = self.parts[2:]
        for name, packed in zip(("qkv", "out", "gate_up", "down"), products, strict=True):
            if packed is not None:
                yield from packed.linears(getattr(struct, name))
        if experts is not None:
            yield from experts.linears()

    @property
    def num_bytes(self) -> int:
        """Of its products."""
        return sum(part.num_bytes for part in self.parts[2:] if part is not None)


def rotary_tables(
    module: PreTrainedModel | CheckpointModule, layer_types: Sequence[str], num_positions: int
) -> dict[str, Tensor]:
    """Float32 ``[positions, 2, rotary_dim]`` by type of layer: cosines, signed sines."""
    rotary = module.model.rotary_emb
    like = torch.empty(0, dtype=torch.float32)
    tables = {}
    for name in dict.fromkeys(layer_types):
        # Gemma3 has frequencies by type of layer.
        layer_rotary = (
            partial(rotary, layer_type=name) if hasattr(rotary, "layer_types") else rotary
        )
        tables[name] = rotary_table(layer_rotary, num_positions, like)[:, :, 0].contiguous()
    return tables
