"""Mixtures of experts of transformers' modules in C++: router, packed experts, and a shared MLP,
with a gate or without, in one call (``mixture.h``). Blocks that compute something else call their
parts one by one.
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
from forethought.backends.cpu.packed_linear import PackedLinear
from forethought.backends.cpu.router import NAMES, NativeRouter
from forethought.backends.cpu.structures import MixtureCallStruct, MixtureStruct
from forethought.model.device import native_threads

SHARED = {"shared_expert": "shared_expert_gate", "shared_experts": None}
"""Names of the MLP that all tokens pass, and of its gate."""


class NativeMixture:
    """The forward of a block of experts, whose module keeps its parts.

    Args:
        experts: packed ones.
        router: that chooses them.
        shared: the MLP that all tokens pass; None: there is none.
        gate: of that, packed; None: its outputs are added as they are.

    Attributes:
        hidden, num_outputs: widths of what it reads and gives.
        width: floats of a token between the products, beside memory of the call.
        has_shared: whether there is such an MLP.
    """

    def __init__(
        self,
        experts: NativeExperts,
        router: NativeRouter,
        shared: NativeMlp | None = None,
        gate: NativeLinear | None = None,
    ) -> None:
        self._parts = experts, router
        self._shared, self._gate = shared, gate
        self.has_shared = shared is not None
        self._experts = router.choosing(experts.packed.struct)
        self.hidden = self.num_outputs = self.width = router.num_inputs
        self._struct = MixtureStruct(
            experts=ctypes.pointer(self._experts),
            activation=experts.activation,
            hidden=self.hidden,
        )
        if shared is not None:
            shared_struct = shared.packed_struct()
            assert shared_struct is not None
            self._struct.shared = ctypes.pointer(shared_struct)
        if gate is not None:
            self._struct.shared_gate = ctypes.pointer(gate.packed.struct)

    def beside(self, mlp: NativeMlp) -> NativeMixture | None:
        """The same and an MLP of the same inputs; None: its linears are not packed, or it has a
        factor.
        """
        if self.has_shared or mlp.packed_struct() is None or mlp.scale != 1:
            return None
        return NativeMixture(*self._parts, mlp)

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
        if self._shared is not None and are_hooked(self.linears()):
            shared = float_rows(self._shared(x))
            call.shared = shared.data_ptr()
            if self._gate is not None:
                gates = float_rows(self._gate(x))
                call.gates = gates.data_ptr()
        load_library().mixture(ctypes.byref(self._struct), ctypes.byref(call))
        return outputs.to(x.dtype).view(x.shape)

    def linears(self) -> list[nn.Module]:
        """Those to which something may be added."""
        shared = [] if self._shared is None else self._shared.linears()
        return shared if self._gate is None else [*shared, self._gate]

    def packed_struct(self) -> MixtureStruct:
        """With the weights."""
        return self._struct

    def take_gate(self, block: Any) -> None:
        """Have the gate of the shared MLP in the place of the block's."""
        if self._gate is not None:
            block.shared_expert_gate = self._gate


def _packed_gate(block: Any, name: str) -> NativeLinear | None:
    """The gate of a shared MLP, which is packed if it is not yet; None: it is no linear."""
    gate = getattr(block, name)
    if type(gate) is nn.Linear:
        packed = PackedLinear.pack(gate.weight, gate.bias, float32_input=True)
        gate = NativeLinear(packed, gate.in_features)
    return gate if isinstance(gate, NativeLinear) else None


def use_native_mixtures(module: nn.Module) -> None:
    """Have blocks of experts computed here whose experts and routers are, if that gives what they
    do.
    """
    for block in module.modules():
        mixture = _mixture_of(block)
        if mixture is None:
            continue
        x = trial_input(mixture.hidden, module.dtype)  # type: ignore[arg-type]
        if agrees(block.forward, mixture, x):
            block.forward = mixture  # type: ignore[assignment]
            mixture.take_gate(block)


def _mixture_of(block: Any) -> NativeMixture | None:
    children = dict(block.named_children())
    experts = children.pop("experts", None)
    routers = [children.pop(name).forward for name in NAMES if name in children]
    if not isinstance(experts, NativeExperts) or len(routers) != 1:
        return None
    [router] = routers
    if not isinstance(router, NativeRouter) or router.num_experts != len(experts):
        return None
    shared = gate = None
    for name in SHARED.keys() & children.keys():
        shared, gate_name = children.pop(name).forward, SHARED[name]
        if not isinstance(shared, NativeMlp) or shared.packed_struct() is None:
            return None
        if shared.scale != 1:
            return None
        if gate_name is not None:
            gate = _packed_gate(block, gate_name) if children.pop(gate_name, None) else None
            if gate is None:
                return None
    if not all(type(child) is nn.Identity for child in children.values()):
        return None
    return NativeMixture(experts, router, shared, gate)
