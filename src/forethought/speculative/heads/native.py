"""Draft modules in C++, for targets that run there; see ``backends.cpu.module``.

The torch networks of the same heads are their reference, and run everywhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from forethought.backends.cpu.forward import TreeShape
from forethought.backends.cpu.module import ModuleParts, NativeModule
from forethought.backends.cpu.network import NativeNetwork
from forethought.kv.storage import LayerShape
from forethought.model.attention.base import ForwardPass
from forethought.model.causal_lm import CausalLM
from forethought.speculative.draft_module import DraftNetwork, ModuleOutput

log = logging.getLogger(__name__)


class NativeDraftModule(DraftNetwork):
    """See ``DraftModule``; states and logits are float32.

    Args:
        module: runs in C++.
        dtype: of weights and entries.
        shape: of its layer's keys and values.
        ids: see ``DraftNetwork``.
        window: of its attention; None: all is attended to.

    Attributes:
        native: what drafts in ``backends.cpu.native_steps``.
    """

    forward_path = "native"

    def __init__(
        self,
        module: NativeModule,
        dtype: torch.dtype,
        shape: LayerShape,
        ids: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        self._module, self.enter = module, module.enter
        self.dtype, self.shape = dtype, shape
        self.windows: Sequence[int | None] = (window,)
        self.vocab_size, self.ids = module.vocab_size, ids
        self.native = module.draft_network(ids)

    @override
    def __call__(self, states: Tensor, forward_pass: ForwardPass) -> ModuleOutput:
        return ModuleOutput(*self._module(states, forward_pass))

    @override
    def draft_chains(
        self, states: Tensor, forward_pass: ForwardPass, slots: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        return self._module.draft_chains(states, forward_pass, slots, self.ids)

    @override
    def draft_trees(
        self,
        states: Tensor,
        forward_pass: ForwardPass,
        slots: Sequence[Sequence[int]],
        shape: TreeShape,
    ) -> list[list[list[int]]]:
        return self._module.draft_trees(states, forward_pass, slots, shape, self.ids)


def native_module(parts: ModuleParts, lm: CausalLM) -> NativeModule | None:
    """The module in C++; None: the target does not run there, or the module cannot."""
    if not isinstance(lm.network, NativeNetwork):
        return None
    reason = parts.refusal()
    if reason is not None:
        log.info("the draft module runs in torch operations: %s", reason)
        return None
    return NativeModule(parts, lm.network)
