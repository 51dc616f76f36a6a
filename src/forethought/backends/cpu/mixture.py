"""Mixtures of experts of transformers' modules in C++: a softmax router, packed experts, and a
shared MLP with its gate, in one call (``mixture.h``). Blocks whose routers compute something else
call their parts one by one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.module_parts import (
    NativeExperts,
    NativeLinear,
    NativeMlp,
    agrees,
    are_hooked,
    float_rows,
    trial_input,
)
from forethought.backends.cpu.structures import ExpertsStruct, MixtureCallStruct, MixtureStruct
from forethought.backends.cpu.weights import PackedLinear
from forethought.model.device import native_threads


class NativeMixture:
    """The forward of a block of experts, whose module keeps its parts.

    Args:
        block: the module, whose gate of the shared MLP is packed.

    Attributes:
        hidden, num_outputs: widths of what it reads and gives.
        width: floats of a token between the products, beside memory of the call.
    """

    def __init__(self, block: Any) -> None:
        experts: NativeExperts = block.experts
        shared = getattr(block, "shared_expert", None)
        self._shared: NativeMlp | None = None if shared is None else shared.forward
        self._gate = None if shared is None else _packed_gate(block.shared_expert_gate)
        self._router = PackedLinear.pack(block.gate.weight, None, float32_input=True)
        self.hidden = self.num_outputs = self.width = int(self._router.struct.num_inputs)
        chosen = experts.packed.struct
        self._experts = ExpertsStruct(
            router=ctypes.pointer(self._router.struct),
            gate_up=chosen.gate_up,
            down=chosen.down,
            num_experts=chosen.num_experts,
            top_k=block.gate.top_k,
            renormalise=bool(getattr(block.gate, "norm_topk_prob", True)),
        )
        self._struct = MixtureStruct(
            experts=ctypes.pointer(self._experts),
            activation=experts.activation,
            hidden=self.hidden,
        )
        self._kept: list[Any] = [experts]
        if self._shared is not None and self._gate is not None:
            shared_struct, gate = self._shared.packed_struct(), self._gate.packed
            assert shared_struct is not None
            self._kept += [shared_struct, gate]
            self._struct.shared = ctypes.pointer(shared_struct)
            self._struct.shared_gate = ctypes.pointer(gate.struct)
            block.shared_expert_gate = self._gate

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[..., hidden]`` -> the same."""
        rows = float_rows(x)
        outputs = torch.empty_like(rows)
        call = MixtureCallStruct(
            x=rows.data_ptr(),
            y=outputs.data_ptr(),
            num_tokens=len(rows),
            num_threads=native_threads(),
        )
        if are_hooked(self.linears()):
            assert self._shared is not None
            assert self._gate is not None
            shared, gates = float_rows(self._shared(x)), float_rows(self._gate(x))
            call.shared, call.gates = shared.data_ptr(), gates.data_ptr()
        load_library().mixture(ctypes.byref(self._struct), ctypes.byref(call))
        return outputs.to(x.dtype).view(x.shape)

    def linears(self) -> list[nn.Module]:
        """Those to which something may be added."""
        if self._shared is None or self._gate is None:
            return []
        return [*self._shared.linears(), self._gate]

    def packed_struct(self) -> MixtureStruct:
        """With the weights."""
        return self._struct


def _packed_gate(gate: Any) -> NativeLinear:
    if isinstance(gate, NativeLinear):
        return gate
    packed = PackedLinear.pack(gate.weight, gate.bias, float32_input=True)
    return NativeLinear(packed, gate.in_features)


def use_native_mixtures(module: nn.Module) -> None:
    """Have blocks of experts computed here whose experts are, if that gives what they do."""
    for block in module.modules():
        if _may_be_mixture(block):
            mixture = NativeMixture(block)
            x = trial_input(mixture.hidden, module.dtype)  # type: ignore[arg-type]
            if agrees(block.forward, mixture, x):
                block.forward = mixture  # type: ignore[assignment]


def _may_be_mixture(block: Any) -> bool:
    children = dict(block.named_children())
    shared = {"shared_expert", "shared_expert_gate"}
    if children.keys() - shared != {"gate", "experts"} or not hasattr(children["gate"], "top_k"):
        return False
    if not isinstance(children["experts"], NativeExperts):
        return False
    weight = getattr(children["gate"], "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[0] != len(children["experts"]):
        return False
    if not shared & children.keys():
        return True
    if not shared <= children.keys():
        return False
    mlp, gate = children["shared_expert"].forward, children["shared_expert_gate"]
    plain = isinstance(gate, NativeLinear) or type(gate) is nn.Linear
    return isinstance(mlp, NativeMlp) and mlp.packed_struct() is not None and plain
