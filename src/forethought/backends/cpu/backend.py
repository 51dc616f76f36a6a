"""The backend of the C++ forward: a model's layers, its drafters' networks, and whole steps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu import library, weights
from forethought.backends.cpu.network import NativeNetwork
from forethought.errors import ModelError
from forethought.model.backends import NativeBackend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forethought.backends.cpu.attention import NativeAttention
    from forethought.backends.cpu.draft_module import NativeDraftModule, NativeMtpNetwork
    from forethought.backends.cpu.draft_network import NativeDraftNetwork
    from forethought.backends.cpu.heads import NativeBeamSearch, NativeDraftHeads
    from forethought.backends.cpu.module import DraftTarget
    from forethought.backends.cpu.module_forward import ModuleForward
    from forethought.backends.cpu.recurrent import NativeRecurrence
    from forethought.backends.cpu.sampler import NativeSampler
    from forethought.backends.cpu.sublayers import NativeSublayers
    from forethought.kv.storage import LayerShape
    from forethought.model.attention.layer_profile import LayerProfile
    from forethought.model.causal_lm import CausalLM
    from forethought.model.quantization import StoredWeight
    from forethought.speculative.heads.medusa import MedusaHeads
    from forethought.speculative.heads.module_parts import ModuleParts
    from forethought.speculative.heads.mtp import MtpModule
    from forethought.speculative.heads.redrafter import ReDrafterHead
    from forethought.speculative.step_runner import StepRunner

log = logging.getLogger(__name__)


class CpuBackend(NativeBackend):
    """The entry ``cpu`` of the table in ``model.backends``.

    Networks that read the target's packed weights need a target that runs here.
    Methods raise ModelError where the library has to be compiled and cannot be.
    """

    NO_COMPILER = library.NO_COMPILER
    refusal = staticmethod(weights.refusal)
    uses_amx = staticmethod(library.uses_amx)
    warn_unavailable = staticmethod(library.warn_unavailable)

    @staticmethod
    def why_unavailable() -> str | None:
        """Why nothing can run here on this machine; None: it can."""
        return None if library.is_available() else library.NO_COMPILER

    @staticmethod
    def causal_lm_class(config: Any) -> Any | None:
        """The class of transformers whose layers run here; None: this config has none."""
        import transformers

        classes = (getattr(transformers, name) for name in weights.FAMILIES)
        return next((cls for cls in classes if cls.config_class is type(config)), None)

    @staticmethod
    def network(
        module: PreTrainedModel,
        max_positions: int,
        windows: Sequence[int | None],
        expert_bytes: int | None = None,
        layer_window: int | None = None,
    ) -> NativeNetwork:
        """The network of a module that ``refusal`` accepts; its layers' weights are taken."""
        return NativeNetwork(module, max_positions, windows, expert_bytes, layer_window)

    @staticmethod
    def linear(weight: StoredWeight) -> weights.PackedLinear:
        """The product with a weight, packed."""
        return weights.PackedLinear.pack(weight, None)

    @staticmethod
    def recurrence(modules: Sequence[nn.Module]) -> NativeRecurrence | None:
        """The recurrent layers of a module of transformers; None: some are not known here."""
        from forethought.backends.cpu.recurrent import NativeRecurrence

        return NativeRecurrence.of(modules)

    @staticmethod
    def attention(
        modules: Sequence[nn.Module], profiles: Sequence[LayerProfile]
    ) -> NativeAttention:
        """The attention layers of a module of transformers."""
        from forethought.backends.cpu.attention import NativeAttention

        return NativeAttention.of(modules, profiles)

    @staticmethod
    def sublayers(
        layers: Sequence[nn.Module],
        attention: NativeAttention,
        recurrence: NativeRecurrence | None,
    ) -> NativeSublayers | None:
        """Decoder layers of a module of transformers, whose parts run here; None: they have
        others. ``recurrence``: None if there are no recurrent layers.
        """
        from forethought.backends.cpu.sublayers import NativeSublayers

        return NativeSublayers.of(layers, attention, recurrence)

    @staticmethod
    def use_native_parts(module: nn.Module, excluded: Collection[nn.Module]) -> None:
        """Have linears, MLPs, norms, routers and experts of a module that torch runs computed
        here; ``excluded`` linears are not called.
        """
        from forethought.backends.cpu.mixture import use_native_mixtures
        from forethought.backends.cpu.module_parts import use_native_parts
        from forethought.backends.cpu.router import use_native_routers

        use_native_parts(module, excluded)
        use_native_routers(module)
        use_native_mixtures(module)

    @staticmethod
    def network_of(lm: CausalLM) -> NativeNetwork | None:
        """The network of a model that runs here; None: it does not."""
        return lm.network if isinstance(lm.network, NativeNetwork) else None

    @classmethod
    def draft_target(cls, lm: CausalLM) -> DraftTarget | None:
        """What draft modules of a target read its embedding and head of; None: it does not run
        here.
        """
        network = cls.network_of(lm)
        return getattr(lm.network, "whole", None) if network is None else network

    @classmethod
    def draft_network(cls, lm: CausalLM, vocab_size: int) -> NativeDraftNetwork | None:
        """A draft model for targets with ``vocab_size`` tokens; None: it does not run here."""
        from forethought.backends.cpu.draft_network import NativeDraftNetwork

        network = cls.network_of(lm)
        if network is None:
            return None
        num_choices = min(vocab_size, lm.vocab_size)
        return NativeDraftNetwork(network.forward, num_choices, lm.vocab_size)

    @classmethod
    def draft_module(
        cls,
        parts: ModuleParts,
        lm: CausalLM,
        dtype: torch.dtype,
        shape: LayerShape,
        ids: Tensor | None = None,
    ) -> NativeDraftModule | None:
        """A draft module; None: its target does not run here, or the module cannot.

        Args:
            parts: of the module; their weights are copied.
            lm: the target.
            dtype: of weights and entries.
            shape: of its layer's keys and values.
            ids: see ``DraftNetwork``.
        """
        from forethought.backends.cpu.draft_module import NativeDraftModule, native_module

        module = native_module(parts, cls.draft_target(lm))
        return None if module is None else NativeDraftModule(module, dtype, shape, ids)

    @classmethod
    def mtp_module(cls, module: MtpModule, lm: CausalLM) -> NativeMtpNetwork | None:
        """A multi-token prediction module; None: as of ``draft_module``."""
        from forethought.backends.cpu.draft_module import NativeMtpNetwork

        return NativeMtpNetwork.of(module, lm, cls.draft_target(lm))

    @classmethod
    def draft_heads(cls, heads: MedusaHeads, lm: CausalLM) -> NativeDraftHeads | None:
        """Medusa's heads; None: the target does not run here."""
        from forethought.backends.cpu.heads import NativeDraftHeads

        return None if cls.network_of(lm) is None else NativeDraftHeads(heads, lm.dtype)

    @classmethod
    def beam_search(cls, head: ReDrafterHead, lm: CausalLM) -> NativeBeamSearch | None:
        """The search with ReDrafter's head; None: the target does not run here."""
        from forethought.backends.cpu.heads import NativeBeams, NativeBeamSearch
        from forethought.speculative.heads.redrafter import beam_head

        network = cls.network_of(lm)
        if network is None:
            return None
        return NativeBeamSearch(NativeBeams(beam_head(head), network, lm.dtype))

    @staticmethod
    @cache
    def sampler() -> NativeSampler | None:
        """What samples from logits on a CPU; None: there is no library, and none can be made."""
        from forethought.backends.cpu.sampler import NativeSampler

        try:
            return NativeSampler() if library.is_available() else None
        except ModelError as error:
            log.info("torch samples: %s", error)
            return None

    @staticmethod
    def module_forward(lm: CausalLM) -> ModuleForward | None:
        """The forward of a module of transformers whose decoder layers run here; None: what is
        around them does not.
        """
        from forethought.backends.cpu.module_forward import ModuleForward

        return ModuleForward.of(lm)

    @staticmethod
    def step_runners() -> tuple[type[StepRunner], ...]:
        """What makes several steps in one call."""
        from forethought.backends.cpu.module_steps import ModuleSteps
        from forethought.backends.cpu.native_steps import NativeSteps

        return NativeSteps, ModuleSteps
