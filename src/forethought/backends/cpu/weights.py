"""Weights in the layout of ``panels.h``: panels of 16 outputs, read from transformers modules.

Each family is described once: where the parts of a layer are, and what its norms add. Everything
else (windows, head counts) is known from the capability probe and the config.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.backends.cpu.expert_store import ExpertStore
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.norms import norm_weight
from forethought.backends.cpu.structures import ExpertsStruct, LayerStruct, LinearStruct
from forethought.model.block_weight import BLOCK_TYPES, BlockWeight
from forethought.model.checkpoint_module import CheckpointConfig, CheckpointModule
from forethought.model.device import native_threads
from forethought.model.integer_product import ACTIVATION_GROUP
from forethought.model.llama.layers import rotary_table
from forethought.model.quantization import (
    INT4_GROUP_SIZES,
    QuantizedLinear,
    QuantizedWeight,
    StoredWeight,
    concatenated,
    has_output_scales,
)
from forethought.model.quantized_experts import QuantizedExperts, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PANEL = 16  # outputs of a panel, as in panels.h
TILE_INPUTS = 32  # that the inputs of a panel in bf16 are a multiple of, as there
F32, BF16, I8, I4, W8A8, W4A8, Q8_0 = range(7)  # enum WeightType
TYPES = {torch.float32: F32, torch.bfloat16: BF16}
KV_TYPES = {**TYPES, torch.int8: I8}
"""Of keys and values, as ``kv.entries`` holds them."""
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
MAX_HEAD_DIM, MAX_GROUP = 1024, 64
"""As in structures.h."""
COMPARED_ELEMENTS = 2**20
"""Of a weight, at a time."""

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
        if any(len({_kind(linear) for linear in _gate_up(mlp)}) > 1 for mlp in mlps):
            return "weights of gate and up that were quantised differently"
        if not _merges(_qkv(attention)):
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


def stored_refusal(weight: StoredWeight) -> str | None:
    """What there are no panels of; None: the weight can be packed."""
    if not isinstance(weight, QuantizedWeight):
        return None
    if weight.bits == 8 and not has_output_scales(weight):
        return "8 bits in groups or with zero points"
    if weight.bits == 4 and (weight.shape[1] % 2 or weight.group_size % 2):
        return "4 bits in groups of odd size"
    if weight.bits == 4 and weight.shape[1] % weight.scales.shape[1]:
        return "4 bits in groups of unequal size"
    return None


def _kind(linear: nn.Module) -> tuple[object, ...]:
    weight = linear.weight
    return (16,) if isinstance(weight, Tensor) else weight.kind


def _merges(linears: Sequence[nn.Module]) -> bool:
    """Whether one product can have their outputs: they are alike, or in blocks of several types."""
    weights = [linear.weight for linear in linears]
    if all(isinstance(weight, BlockWeight) for weight in weights):
        return len({weight.rounds_input for weight in weights}) == 1
    return len({_kind(linear) for linear in linears}) == 1


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
class PackedLinear:
    """A weight in panels, with what points into it.

    Attributes:
        struct: for ``forward.cpp``.
        tensors: that it points into.
        following: further outputs, whose weights are blocks of another type; None: there are none.
    """

    struct: LinearStruct
    tensors: list[Tensor] = field(default_factory=list)
    following: PackedLinear | None = None

    @classmethod
    def pack(
        cls,
        weight: Tensor | StoredWeight,
        bias: Tensor | None,
        gated: bool = False,
        float32_input: bool = False,
    ) -> PackedLinear:
        """Pack a weight ``[out, in]``.

        Args:
            weight: plain, quantised or in blocks.
            bias: ``[out]``; None for none.
            gated: its halves are those of a gate and of what it multiplies, whose panels are packed
                in turns.
            float32_input: inputs are multiplied in float32, as those of a weight in float32 are,
                although the weight is in bf16.
        """
        halves = 2 if gated else 1
        by_output = partial(_by_output, halves=halves)
        added = None if bias is None else by_output(bias.float()).contiguous()
        if isinstance(weight, BlockWeight):
            return cls._pack_blocks(weight, added, halves)
        assert isinstance(weight, Tensor | QuantizedWeight)
        if isinstance(weight, Tensor):
            float32_input |= weight.dtype == torch.float32
            weight = _as_stored(weight)
        kind, num_inputs = _type_of(weight), weight.shape[1]
        assert isinstance(weight, Tensor | QuantizedWeight)
        plain = weight if isinstance(weight, Tensor) else weight.values
        values = LAYOUTS[kind](by_output(plain)).contiguous()
        group_size, scale, zero = num_inputs, None, None
        if isinstance(weight, QuantizedWeight):
            group_size = weight.group_size
            scale, zero = (
                None if x is None else by_output(x).transpose(1, 2).contiguous()
                for x in _scales_and_zeros(weight)
            )
        owned = [x for x in (values, scale, zero, added) if x is not None]
        struct = LinearStruct(
            weight=values.data_ptr(),
            scale=address(scale),
            zero=address(zero),
            bias=address(added),
            num_inputs=num_inputs,
            num_outputs=_padded_outputs(weight, halves),
            type=kind,
            group_size=group_size,
            float32_input=float32_input,
        )
        return cls(struct, owned)

    @classmethod
    def _pack_blocks(cls, weight: BlockWeight, bias: Tensor | None, halves: int) -> PackedLinear:
        """Pack blocks, which may be mapped from a file; the bias is by panel."""
        library, kind = load_library(), Q8_0 + BLOCK_TYPES.index(weight.type)
        num_outputs, num_inputs = weight.shape
        num_panels = _num_panels(num_outputs, halves)
        values, scales = (
            torch.empty(num_panels * size(kind, num_inputs), dtype=torch.uint8)
            for size in (library.block_panel_bytes, library.block_scale_bytes)
        )
        struct = LinearStruct(
            weight=values.data_ptr(),
            scale=scales.data_ptr(),
            bias=address(bias),
            num_inputs=num_inputs,
            num_outputs=_padded_outputs(weight, halves),
            type=kind,
            group_size=weight.type.num_weights,
            float32_input=not weight.rounds_input,
        )
        blocks = weight.blocks.contiguous()
        library.pack_blocks(
            ctypes.byref(struct),
            ctypes.c_void_p(blocks.data_ptr()),
            num_outputs,
            halves,
            native_threads(),
        )
        return cls(struct, [values, scales] if bias is None else [values, scales, bias])

    @classmethod
    def of(cls, *linears: nn.Module, gated: bool = False) -> PackedLinear:
        """Pack one linear whose outputs are those of ``linears``, concatenated. They may be in
        blocks of several types, unless they are ``gated``.
        """
        parts = [cls._of_alike(list(alike), gated) for _, alike in groupby(linears, _kind)]
        assert not gated or len(parts) == 1
        for part, following in pairwise(parts[::-1]):  # the last one has no following one
            following.following, following.struct.next = part, ctypes.pointer(part.struct)
        return parts[0]

    @classmethod
    def _of_alike(cls, linears: Sequence[nn.Module], gated: bool) -> PackedLinear:
        weights = [linear.weight for linear in linears]
        is_plain = isinstance(weights[0], Tensor)
        weight = torch.cat(weights) if is_plain else concatenated(weights)
        if all(linear.bias is None for linear in linears):
            return cls.pack(weight, None, gated)
        biases = [
            torch.zeros(linear.out_features, dtype=torch.float32)
            if linear.bias is None
            else linear.bias.float()
            for linear in linears
        ]
        return cls.pack(weight, torch.cat(biases), gated)

    def multiply(self, x: Tensor) -> Tensor:
        """x ``[..., in]`` -> float32 ``[..., out]``."""
        rows = x.float().reshape(-1, x.shape[-1]).contiguous()
        num_rows, num_outputs = rows.shape[0], self.num_outputs
        output = torch.empty(num_rows, num_outputs, dtype=torch.float32)
        load_library().linear(
            ctypes.byref(self.struct),
            rows.data_ptr(),
            num_rows,
            output.data_ptr(),
            native_threads(),
        )
        return output.view(*x.shape[:-1], num_outputs)

    def linears(self, struct: LinearStruct) -> Iterator[tuple[LinearStruct, list[Tensor]]]:
        """``struct``, a copy of its own one, and what follows, with the tensors of each."""
        yield struct, self.tensors
        if self.following is not None:
            yield from self.following.linears(self.following.struct)

    @property
    def num_outputs(self) -> int:
        """With those that follow."""
        following = 0 if self.following is None else self.following.num_outputs
        return int(self.struct.num_outputs) + following

    @property
    def num_bytes(self) -> int:
        """Of its tensors, with those of what follows."""
        following = 0 if self.following is None else self.following.num_bytes
        return sum(tensor.nbytes for tensor in self.tensors) + following


def _num_panels(num_outputs: int, halves: int) -> int:
    return -(-(num_outputs // halves) // PANEL) * halves


def _padded_outputs(weight: Tensor | StoredWeight, halves: int) -> int:
    """Its outputs; those of panels in turns are with the padding of each half."""
    return weight.shape[0] if halves == 1 else _num_panels(weight.shape[0], halves) * PANEL


def _by_output(x: Tensor, halves: int) -> Tensor:
    """``[out, ...]`` -> ``[panels, PANEL, ...]``, padded with zeros."""
    parts = x.unflatten(0, (halves, -1))
    missing = -parts.shape[1] % PANEL
    padded = F.pad(parts, (0, 0) * (parts.dim() - 2) + (0, missing)) if missing else parts
    return padded.unflatten(1, (-1, PANEL)).transpose(0, 1).flatten(0, 1)


def _type_of(weight: Tensor | QuantizedWeight) -> int:
    """Of ``WeightType``."""
    if isinstance(weight, Tensor):
        return TYPES[weight.dtype]
    if weight.rounds_input:
        return W8A8 if weight.bits == 8 else W4A8
    return I8 if weight.bits == 8 else I4


def _scales_and_zeros(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """``[out, groups]`` each, in the dtypes of ``structures.h``; 8 bits have one group, and no
    zeros.
    """
    if weight.bits == 8:
        return weight.scales.float(), None
    zeros = weight.scales.new_full(weight.scales.shape, weight.offset)
    zeros = zeros if weight.zeros is None else weight.zeros
    if not weight.rounds_input:
        return weight.scales.float(), zeros.float()
    assert weight.group_size in INT4_GROUP_SIZES  # powers of 2, which blocks.h relies on
    return weight.scales.bfloat16(), zeros.to(torch.uint8)


def _by_input(panels: Tensor) -> Tensor:
    """``[panels, PANEL, in]`` -> ``[panels, in, PANEL]``."""
    return panels.transpose(1, 2)


def _in_pairs(panels: Tensor) -> Tensor:
    """``[panels, PANEL, in]`` -> ``[panels, in / 2, PANEL, 2]``, ``in`` padded with zeros."""
    missing = -panels.shape[2] % TILE_INPUTS
    padded = F.pad(panels, (0, missing)) if missing else panels
    return padded.unflatten(2, (-1, 2)).transpose(1, 2)


def _in_quads(panels: Tensor) -> Tensor:
    """``[panels, PANEL, in]`` -> ``[panels, in / 4, PANEL, 4]``, ``in`` padded with zeros."""
    padded = F.pad(panels, (0, -panels.shape[2] % ACTIVATION_GROUP))
    return padded.unflatten(2, (-1, 4)).transpose(1, 2)


def _in_two(panels: Tensor) -> Tensor:
    """``[panels, PANEL, in]`` of 4 bits -> bytes ``[panels, in / 2, PANEL]``, even inputs low."""
    values = _by_input(panels)
    return values[:, ::2] | values[:, 1::2] << 4


def _in_two_quads(panels: Tensor) -> Tensor:
    """``[panels, PANEL, in]`` of 4 bits -> bytes ``[panels, groups, 4, PANEL, 4]``, the first half
    of a group low.
    """
    quads = _in_quads(panels).unflatten(1, (-1, 2, 4))
    return quads[:, :, 0] | quads[:, :, 1] << 4


LAYOUTS = {
    F32: _by_input,
    BF16: _in_pairs,
    I8: _by_input,
    I4: _in_two,
    W8A8: _in_quads,
    W4A8: _in_two_quads,
}
"""Of the inputs of a panel, by type."""


def _as_stored(weight: Tensor) -> Tensor:
    """In bf16 if that loses nothing, as of a checkpoint in bf16 that was loaded in float32.

    It takes half of the memory, and its products are the same to the last bit.
    """
    if weight.dtype == torch.bfloat16:
        return weight
    rounded = weight.to(torch.bfloat16)
    rows = max(1, COMPARED_ELEMENTS // max(1, weight[0].numel()))  # small copies in float32
    pairs = zip(rounded.split(rows), weight.split(rows), strict=True)
    is_same = all(torch.equal(part.float(), original.float()) for part, original in pairs)
    return rounded if is_same else weight


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


def address(tensor: Tensor | None) -> int | None:
    """Of its first element; None: a null pointer."""
    return None if tensor is None else tensor.data_ptr()


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
