"""Linear layers in the layout of ``panels.h``: panels of 16 outputs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.structures import LinearStruct
from forethought.model.block_weight import BLOCK_TYPES, BlockWeight
from forethought.model.device import native_threads
from forethought.model.integer_product import ACTIVATION_GROUP
from forethought.model.quantization import (
    INT4_GROUP_SIZES,
    QuantizedWeight,
    StoredWeight,
    concatenated,
    has_output_scales,
)

PANEL = 16  # outputs of a panel, as in panels.h
TILE_INPUTS = 32  # that the inputs of a panel in bf16 are a multiple of, as there
F32, BF16, I8, I4, W8A8, W4A8, Q8_0 = range(7)  # enum WeightType
TYPES = {torch.float32: F32, torch.bfloat16: BF16}
COMPARED_ELEMENTS = 2**20
"""Of a weight, at a time."""


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
        parts = [cls._of_alike(list(alike), gated) for _, alike in groupby(linears, kind_of)]
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


def kind_of(linear: nn.Module) -> tuple[object, ...]:
    """Weights of one kind can be packed as one."""
    weight = linear.weight
    return (16,) if isinstance(weight, Tensor) else weight.kind


def merges(linears: Sequence[nn.Module]) -> bool:
    """Whether one product can have their outputs: they are alike, or in blocks of several types."""
    weights = [linear.weight for linear in linears]
    if all(isinstance(weight, BlockWeight) for weight in weights):
        return len({weight.rounds_input for weight in weights}) == 1
    return len({kind_of(linear) for linear in linears}) == 1


def address(tensor: Tensor | None) -> int | None:
    """Of its first element; None: a null pointer."""
    return None if tensor is None else tensor.data_ptr()
