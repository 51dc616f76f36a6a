"""MTP modules whose block is no layer of a Llama-like model in one call of C++
(``module_forward.h``): those of Qwen3.5 and Qwen3-Next.

The block is computed as the layers of such targets are: by its parts, which are found by their
attributes and tried beside the module on a few tokens. So is the whole module beside its parts.
"""

from __future__ import annotations

import copy
import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from forethought.backends.cpu.attention import NativeAttention
from forethought.backends.cpu.draft_network import NativeEntry
from forethought.backends.cpu.module import DraftTarget, NativeModule, target_fields
from forethought.backends.cpu.module_forward import DecoderForward, RotaryTable
from forethought.backends.cpu.module_parts import NativeLinear, NativeNorm, native_norm
from forethought.backends.cpu.packed_linear import TYPES, PackedLinear
from forethought.backends.cpu.structures import JoinStruct, ModelStruct, ModuleDecoderStruct
from forethought.backends.cpu.sublayers import NativeSublayers
from forethought.errors import ModelError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import backends
from forethought.model.attention.base import KEYWORD, PagedPass
from forethought.model.attention.interface import ATTENTION
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.attention_layers import AttentionLayers
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM
from forethought.model.decoder_layers import DecoderLayers
from forethought.model.hidden_states import decoder_layers, decoder_of
from forethought.model.quantized_experts import routers
from forethought.model.rotary import find_rotary
from forethought.model.tolerance import TOLERANCES, is_close
from forethought.speculative.heads.mtp import ModuleStates, MtpModule, profile_of

_TRIAL_TOKENS = 4


class NativeBlock(NamedTuple):
    """A module in C++."""

    module: NativeModule
    profile: LayerProfile
    """Of its attention."""


@torch.inference_mode()
def native_block(
    module: MtpModule, lm: CausalLM, target: DraftTarget, head: nn.Linear | None
) -> NativeBlock | None:
    """A module in C++; None: some of its parts are not known there, or it gives something else.

    Args:
        module: its weights are copied.
        lm: the target.
        target: the same in C++.
        head: to the logits; None: the target's.
    """
    if lm.dtype not in TOLERANCES:
        return None
    profile, copied = profile_of(module), copy.deepcopy(module)
    copied.model.set_attn_implementation(ATTENTION)
    trial = _Trial(copied, lm)
    attention = AttentionLayers(copied.model, [profile], lambda tried: trial.run(tried, lm.dtype))
    if not attention.num_native:
        return None
    backends.cpu().use_native_parts(copied.model, routers(copied.model))
    around = _Around.of(copied)
    decoder = None if around is None else _decoder_of(copied, attention, trial)
    if around is None or decoder is None:
        return None
    rotary = RotaryTable.of(copied.model, decoder.rotation, torch.float32, lm.max_positions)
    if (rotary is None) != (decoder.rotation is None):
        return None
    fields, packed = target_fields(target), target.head
    if head is not None:
        packed = PackedLinear.of(head)
        fields["head"] = ctypes.pointer(packed.struct)
    forward = around.forward(decoder.native, attention.native, rotary, lm.max_positions, fields)
    forward.parts += [target, packed]
    entry = NativeEntry(None, None, 0.0)  # states after the target's final norm are read unchanged
    native = NativeModule(forward, packed, entry, copied.fed_back == "normed")
    block = NativeBlock(native, attention.profiles[0])
    return block if trial.agrees(native, attention) else None


class _Trial:
    """A few tokens, which a module reads over pages.

    Args:
        module: parts of which may run in C++.
        lm: the target.
    """

    def __init__(self, module: MtpModule, lm: CausalLM) -> None:
        self._module, self._lm = module, lm
        table = PageTable(PagePool(1, _TRIAL_TOKENS))
        table.append(_TRIAL_TOKENS)
        self._batch = Batch.build([Row([*range(_TRIAL_TOKENS)], 0, table)])
        numbers = torch.arange(_TRIAL_TOKENS * lm.hidden_size, dtype=torch.float32)
        self._states = numbers.sin().view(_TRIAL_TOKENS, -1).to(lm.dtype)

    def run(self, attention: AttentionLayers, dtype: torch.dtype) -> ModuleStates:
        """``[1, T, hidden]`` each, of inputs in a dtype."""
        embedded = self._lm.embed(self._batch.token_ids).to(dtype)
        with attention.over(self._pass(attention)) as attending:
            carried = {KEYWORD: attending}
            positions, states = self._batch.positions, self._states.to(dtype)
            output: ModuleStates = self._module(
                embedded[None], states[None], positions[None], **carried
            )
        return output

    def agrees(self, native: NativeModule, attention: AttentionLayers) -> bool:
        """Whether the module in C++ gives what its parts give in float32, up to the dtype of the
        target's embeddings.
        """
        expected = self.run(attention, torch.float32)
        computed = native.read(self._states, self._pass(attention))
        states = computed.normed if self._module.fed_back == "normed" else computed.last
        pairs = (states, expected.states[0]), (computed.normed, expected.normed[0])
        return all(is_close(y, one.to(self._lm.dtype)) for y, one in pairs)

    def _pass(self, attention: AttentionLayers) -> PagedPass:
        [profile] = attention.profiles
        storage = KvStorage([profile.shape], 1, _TRIAL_TOKENS, self._lm.dtype)
        return PagedPass(self._batch, storage, self._lm.backend, [profile.window])


def _decoder_of(
    module: MtpModule, attention: AttentionLayers, trial: _Trial
) -> DecoderLayers | None:
    """The block, of which all parts run in C++; None: one does not."""
    try:
        layers = decoder_layers(module.model)
    except ModelError:  # there is no list of them
        return None
    rotary = find_rotary(decoder_of(module.model))
    return DecoderLayers.of(
        layers, None, attention, rotary, lambda: trial.run(attention, torch.float32)
    )


@dataclass(frozen=True, slots=True)
class _Around:
    """What is around the block of a module, in C++.

    Attributes:
        norms: of embeddings, of states, and after the block; of one epsilon.
        project: of what is joined.
        module: which computes by them.
    """

    norms: tuple[NativeNorm, NativeNorm, NativeNorm]
    project: PackedLinear
    module: MtpModule

    @classmethod
    def of(cls, module: MtpModule) -> _Around | None:
        """Of a module, which computes by them from then on; None: it has other norms."""
        dtype, last = module.model.dtype, module.model.base_model.norm.forward
        first, second = (native_norm(norm, dtype) for norm in (module.enorm, module.hnorm))
        if first is None or second is None or not isinstance(last, NativeNorm):
            return None
        if len({first.eps, second.eps, last.eps}) > 1:
            return None
        module.enorm.forward, module.hnorm.forward = first, second
        packed, num_inputs = PackedLinear.of(module.eh_proj), module.eh_proj.in_features
        module.eh_proj = NativeLinear(packed, num_inputs)
        return cls((first, second, last), packed, module)

    def forward(
        self,
        sublayers: NativeSublayers,
        attention: NativeAttention,
        rotary: RotaryTable | None,
        max_positions: int,
        fields: dict[str, Any],
    ) -> DecoderForward:
        """Of these and the block's sublayers; ``fields`` of ``ModelStruct`` are those of the
        embedding and the output projection.
        """
        decoder = ModuleDecoderStruct(
            sublayers=sublayers.structs,
            num_sublayers=len(sublayers.structs),
            width=sublayers.width,
            type=TYPES[torch.float32],
            embedding_factor=1.0,
            logits_factor=1.0,
            logits_divisor=1.0,
        )
        *entering, last = self.norms
        join = self._join(*entering)
        model = ModelStruct(
            final_norm=last.weight.data_ptr(),
            join=ctypes.pointer(join),
            decoder=ctypes.pointer(decoder),
            num_layers=1,
            hidden=sublayers.hidden,
            eps=last.eps,
            **fields,
        )
        return DecoderForward(
            model,
            max_positions,
            [self, join],
            sublayers=sublayers,
            attention=attention,
            decoder=decoder,
            rotary=rotary,
        )

    def _join(self, token_norm: NativeNorm, state_norm: NativeNorm) -> JoinStruct:
        return JoinStruct(
            token_norm=token_norm.weight.data_ptr(),
            state_norm=state_norm.weight.data_ptr(),
            project=ctypes.pointer(self.project.struct),
            state_first=self.module.layout.hidden_first,
            zero_first=self.module.layout.zero_first,
            feeds_normed=self.module.fed_back == "normed",
        )
