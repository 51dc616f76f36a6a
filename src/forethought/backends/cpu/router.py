"""Routers of transformers' modules in C++: the product with their weight in float32, and the choice
of experts by a softmax or by sigmoids (``kernels/experts.h``).

Torch rounds both by the number of tokens, and where two experts are nearly as good, what is beside
a token would decide. What a router computes is found by trial: the settings that give what its
module does in float32.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.module_parts import float_rows
from forethought.backends.cpu.packed_linear import PackedLinear
from forethought.backends.cpu.structures import ExpertsStruct, RouteCallStruct
from forethought.model.device import native_threads
from forethought.model.tolerance import is_close

SOFTMAX, SIGMOID = range(2)
"""``enum Scoring`` in structures.h."""
NAMES = ("gate", "router")
"""Of the router in a block of experts."""
EPSILONS = (1e-20, 1e-6)
"""What modules add to the sum of the chosen sigmoids before they divide by it."""
TRIAL_TOKENS = 16


class NativeRouter:
    """The forward of a router, whose module keeps its weight.

    Args:
        gate: the module.
        bias: float32 ``[num_experts]``, added to the scores by which experts are chosen, or None.
        settings: fields of ``ExpertsStruct`` in structures.h.

    Attributes:
        dtype: of the weights that it returns.
    """

    def __init__(self, gate: Any, bias: Tensor | None, settings: dict[str, Any]) -> None:
        self._router = PackedLinear.pack(gate.weight, None, float32_input=True)
        self._bias, self.dtype = bias, torch.float32
        self._struct = ExpertsStruct(
            router=ctypes.pointer(self._router.struct),
            bias=None if bias is None else bias.data_ptr(),
            num_experts=len(gate.weight),
            top_k=gate.top_k,
            **settings,
        )

    @property
    def num_inputs(self) -> int:
        """Width of what it reads."""
        return int(self._router.struct.num_inputs)

    @property
    def num_experts(self) -> int:
        """Those it chooses among."""
        return int(self._struct.num_experts)

    def choosing(self, experts: ExpertsStruct) -> ExpertsStruct:
        """Packed experts, chosen by this router, whose weights the struct points to."""
        struct = ExpertsStruct.from_buffer_copy(self._struct)
        struct.gate_up, struct.down = experts.gate_up, experts.down
        struct.has_no_gates = experts.has_no_gates
        return struct

    def __call__(self, x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """x ``[..., hidden]`` -> logits ``[T, experts]``, weights and experts ``[T, top_k]``."""
        rows, struct = float_rows(x), self._struct
        num_tokens = len(rows)
        logits = torch.empty(num_tokens, self._router.struct.num_outputs)
        chosen = torch.empty(num_tokens, struct.top_k, dtype=torch.int32)
        weights = torch.empty(num_tokens, struct.top_k)
        call = RouteCallStruct(
            x=rows.data_ptr(),
            logits=logits.data_ptr(),
            chosen=chosen.data_ptr(),
            weights=weights.data_ptr(),
            num_tokens=num_tokens,
            num_threads=native_threads(),
        )
        load_library().route(ctypes.byref(struct), ctypes.byref(call))
        return logits[:, : struct.num_experts], weights.to(self.dtype), chosen.long()


def use_native_routers(module: nn.Module) -> None:
    """Have the routers of blocks of experts computed here, if that gives what they do."""
    for block in module.modules():
        if not hasattr(block, "experts"):
            continue
        for name in NAMES:
            gate: Any = getattr(block, name, None)
            router = _router_of(block, gate) if _may_be_router(gate) else None
            if router is not None:
                gate.forward = router


def _may_be_router(gate: Any) -> bool:
    weight = getattr(gate, "weight", None)
    is_known = isinstance(gate, nn.Module) and not isinstance(gate, nn.Linear)
    return is_known and isinstance(weight, Tensor) and weight.dim() == 2 and hasattr(gate, "top_k")


def _router_of(block: nn.Module, gate: Any) -> NativeRouter | None:
    """Of the settings in question, those that come closest to the module; None: none are close."""
    block_bias = getattr(block, "expert_bias", None)  # LFM2's block hands it to its router
    arguments = () if block_bias is None else (block_bias,)
    bias: Tensor | None = getattr(gate, "e_score_correction_bias", block_bias)
    bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
    num_experts, hidden = gate.weight.shape
    x = torch.arange(TRIAL_TOKENS * hidden, dtype=torch.float32).sin().view(-1, hidden)
    try:
        expected = _dense(copy.deepcopy(gate).float()(x, *arguments), num_experts)
        dtype = gate(x.to(gate.weight.dtype), *arguments)[1].dtype
    except (TypeError, RuntimeError, IndexError, ValueError, AttributeError):  # it is another
        return None
    routers = (NativeRouter(gate, bias, settings) for settings in _settings_of(gate))
    tried = [(router, _dense(router(x), num_experts)) for router in routers]
    router, weights = min(tried, key=lambda pair: float((pair[1] - expected).abs().max()))
    router.dtype = dtype
    return router if is_close(weights, expected) else None


def _settings_of(gate: Any) -> Iterator[dict[str, Any]]:
    norm_topk_prob = getattr(gate, "norm_topk_prob", None)
    for renormalise in (False, True) if norm_topk_prob is None else (bool(norm_topk_prob),):
        yield {"scoring": SOFTMAX, "renormalise": renormalise}
        for epsilon in EPSILONS:
            yield {
                "scoring": SIGMOID,
                "renormalise": renormalise,
                "num_groups": int(getattr(gate, "num_group", 0)),
                "top_groups": int(getattr(gate, "topk_group", 0)),
                "epsilon": epsilon,
                "scale": float(getattr(gate, "routed_scaling_factor", 1.0)),
            }


def _dense(routed: Any, num_experts: int) -> Tensor:
    """The weights of all experts ``[T, num_experts]``, 0 for those that are not chosen."""
    _, weights, chosen = routed
    return torch.zeros(len(chosen), num_experts).scatter_(1, chosen, weights.float())
