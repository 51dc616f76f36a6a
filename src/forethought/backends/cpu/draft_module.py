"""Draft modules as networks over pages, for targets that run in C++; see ``cpu.module``.

The torch networks of the same heads are their reference, and run everywhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from forethought.backends.cpu.module import DraftTarget, NativeModule, refusal_of
from forethought.backends.cpu.mtp_block import native_block
from forethought.backends.cpu.norms import norm_eps
from forethought.backends.cpu.weights import refusal, rotary_tables
from forethought.config.tree import TreeShape
from forethought.kv.storage import LayerShape
from forethought.model.attention.base import ForwardPass
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.causal_lm import CausalLM
from forethought.speculative.draft_module import DraftNetwork, ModuleOutput
from forethought.speculative.heads.module_parts import ModuleParts
from forethought.speculative.heads.mtp import ModuleStates, MtpModule, profile_of

log = logging.getLogger(__name__)


class NativeDraftModule(DraftNetwork):
    """A ``DraftModule`` in C++; states and logits are float32.

    Args:
        module: runs in C++.
        dtype: of weights and entries.
        shape: of its layer's keys and values.
        ids: see ``DraftNetwork``.
        window: of its attention; None: all is attended to.

    Attributes:
        native: its network in ``backends.cpu.native_steps``.
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


def native_module(parts: ModuleParts, target: DraftTarget | None) -> NativeModule | None:
    """The module in C++; None: the target does not run there, or the module cannot."""
    if target is None:
        return None
    reason = refusal_of(parts)
    if reason is not None:
        log.info("the draft module runs in torch operations: %s", reason)
        return None
    return NativeModule.of(parts, target)


def mtp_parts(module: MtpModule, lm: CausalLM, window: int | None) -> ModuleParts:
    """A module, whose block ``weights.refusal`` accepts, as a native one."""
    model, config = module.model, module.model.config
    types = getattr(config, "layer_types", None) or ["full_attention"]
    return ModuleParts(
        model.model.layers[0],
        rotary_tables(model, types, lm.max_positions)[types[0]],
        config.num_attention_heads,
        config.num_key_value_heads,
        norm_eps(module.enorm),
        token_norm=module.enorm,
        state_norm=module.hnorm,
        project=module.eh_proj,
        enters_normed=True,
        final_norm=model.model.norm,
        head=_draft_head(module, lm),
        activation=getattr(config, "hidden_activation", None) or config.hidden_act,
        window=window,
        state_first=module.layout.hidden_first,
        zero_first=module.layout.zero_first,
        feeds_normed=module.fed_back == "normed",
    )


def _draft_head(module: MtpModule, lm: CausalLM) -> nn.Linear | None:
    """The rows of the target's projection for a draft vocabulary; None: there is none."""
    if module.token_map is None:
        return None
    weight = lm.output_projection(module.token_map)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head


class NativeMtpNetwork(NativeDraftModule):
    """An :class:`MtpModule` in C++.

    Args:
        module: runs in C++.
        profile: of its attention.
        lm: the target.
        weights: those that it was made of.
    """

    def __init__(
        self, module: NativeModule, profile: LayerProfile, lm: CausalLM, weights: MtpModule
    ) -> None:
        super().__init__(module, lm.dtype, profile.shape, weights.token_map, profile.window)
        self._fed_back = weights.fed_back

    @classmethod
    def of(cls, module: MtpModule, lm: CausalLM, target: DraftTarget | None) -> Self | None:
        """The module for a target; None: one of the two does not run in C++."""
        if target is None:
            return None
        reason = refusal(module.model)
        if reason is not None:
            block = native_block(module, lm, target, _draft_head(module, lm))
            if block is None:
                log.info("the MTP module runs in torch operations: %s", reason)
                return None
            return cls(block.module, block.profile, lm, module)
        profile = profile_of(module)
        native = native_module(mtp_parts(module, lm, profile.window), target)
        return None if native is None else cls(native, profile, lm, module)

    def read(self, states: Tensor, forward_pass: ForwardPass) -> ModuleStates:
        """The states that the next draft step reads, and the normed ones."""
        last, normed = self._module.read(states, forward_pass)
        return ModuleStates(normed if self._fed_back == "normed" else last, normed)

    def most_probable(self, normed: Tensor) -> Tensor:
        """The target's ids of the most probable tokens, int64 ``[R]``."""
        tokens = self._module.logits(normed).argmax(-1)
        return tokens if self.ids is None else self.ids[tokens]
