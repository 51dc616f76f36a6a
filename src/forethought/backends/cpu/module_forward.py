"""A module of transformers whose forward is one call of C++: embedding, decoder layers, final norm,
output projection and what scales its logits (``module_forward.h``).

The reference is the module. Its parts are found by their attributes, and tried on a few tokens: the
logits have to be the same to the last bit, or the module stays as it is.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from forethought.backends.cpu.attention import NativeAttention
from forethought.backends.cpu.forward import NativeForward, PackedCall, Wanted, check_known
from forethought.backends.cpu.module_parts import NativeEmbedding, NativeLinear, NativeNorm
from forethought.backends.cpu.packed_linear import TYPES, PackedLinear
from forethought.backends.cpu.recurrent import NativeTokenTable
from forethought.backends.cpu.structures import ModelStruct, ModuleDecoderStruct
from forethought.backends.cpu.sublayers import NativeSublayers
from forethought.kv.pool import PagePool
from forethought.kv.recurrent import RecurrentStorage
from forethought.kv.table import PageTable
from forethought.model.attention.base import ForwardPass
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM, TransformersNetwork
from forethought.model.hidden_states import decoder_of
from forethought.model.llama.layers import rotary_table
from forethought.model.recurrent_layers import RecurrentLayers
from forethought.model.rotary import find_rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TRIAL_TOKENS = 4
MIN_POSITIONS = 256
"""Whose rotation is computed at a time, at least."""


@dataclass(slots=True)
class RotaryTable:
    """Cosines and signed sines of the first positions, as many as were asked for."""

    module: nn.Module
    dtype: torch.dtype
    max_positions: int
    table: Tensor = field(default_factory=lambda: torch.empty(0))
    """Float32 ``[positions, 2, rotary_dim]``."""

    @classmethod
    def of(
        cls, module: PreTrainedModel, rotation: Any, dtype: torch.dtype, max_positions: int
    ) -> RotaryTable | None:
        """Of all layers of a module; None: there is no rotation, or it is not found.

        Args:
            module: of transformers.
            rotation: cosines and sines ``[1, T, rotary_dim]`` of the first positions, as its layers
                have got them; None: they have got none.
            dtype: of hidden states, to which they are rounded.
            max_positions: of the table.
        """
        part = find_rotary(decoder_of(module))
        if part is None or rotation is None:
            return None
        rotary = cls(part, dtype, max_positions)
        cosines, sines = (x[0].float() for x in rotation)
        table = rotary.cover(len(cosines))[: len(cosines)]
        half = table.shape[-1] // 2
        signed = torch.cat([-sines[:, :half], sines[:, half:]], -1)
        return rotary if torch.stack([cosines, signed], 1).equal(table) else None

    def cover(self, num_positions: int) -> Tensor:
        """The table, of ``num_positions`` at least."""
        if len(self.table) < num_positions:
            size = min(max(MIN_POSITIONS, 2 * len(self.table)), self.max_positions)
            like = torch.empty(0, dtype=self.dtype)
            table = rotary_table(self.module, max(size, num_positions), like)
            self.table = table[:, :, 0].float().contiguous()
        return self.table


@dataclass(slots=True, eq=False)
class DecoderForward(NativeForward):
    """Calls ``module_forward.h``; its model has a ``ModuleDecoder`` in the place of layers."""

    sublayers: NativeSublayers = field(kw_only=True)
    attention: NativeAttention = field(kw_only=True)
    decoder: ModuleDecoderStruct = field(kw_only=True)
    rotary: RotaryTable | None = field(kw_only=True)

    @override
    def pack(
        self, forward_pass: ForwardPass, outputs: Wanted, further: int = 0, at_once: int = 0
    ) -> PackedCall:
        if self.rotary is not None:
            last = int(forward_pass.batch.positions.max()) + further
            self.decoder.rotary = self.rotary.cover(last + 1).data_ptr()
        return NativeForward.pack(self, forward_pass, outputs, further, at_once)

    @override
    def _scratch_for(self, num_tokens: int, max_length: int, num_threads: int) -> Tensor:
        return self.attention.scratch(num_tokens, max_length, num_threads)


@dataclass(slots=True, eq=False)
class ModuleForward(DecoderForward):
    """The forward of a whole module."""

    head: PackedLinear = field(kw_only=True)
    dtype: torch.dtype = field(kw_only=True)

    @property
    def forward(self) -> NativeForward:
        """Itself: draft modules read the target's embedding and head there."""
        return self

    @classmethod
    def of(cls, lm: CausalLM) -> ModuleForward | None:
        """Of a module whose decoder layers are one call; None: what is around them is not known
        here, or gives other logits.
        """
        network = lm.network
        assert isinstance(network, TransformersNetwork)
        assert network.decoder is not None
        parts = _Parts.of(network.module)
        if parts is None:
            return None
        module, rotation = network.module, network.decoder.rotation
        rotary = RotaryTable.of(module, rotation, module.dtype, lm.max_positions)
        if (rotary is None) != (rotation is None):
            return None
        forward = parts.forward(network, lm.max_positions, rotary)
        assert network.recurrent is not None
        return forward if forward.agrees(lm, network.recurrent) else None

    def are_hooked(self) -> bool:
        """Whether something, such as an adapter, changes what a linear computes."""
        return self.sublayers.are_hooked()

    def logits(self, forward_pass: ForwardPass, tokens: NativeTokenTable) -> Tensor:
        """Float32 ``[R, vocab]`` of a batch, from and to the states of its tokens; ``IndexError``
        for a token outside the vocabulary.
        """
        size = len(forward_pass.batch.logit_index), self.vocab_size
        logits, states = torch.empty(size), self.wanted_states(forward_pass)
        packed = self.pack(forward_pass, Wanted(logits, states))
        num_known = self._library.module_forward(
            ctypes.byref(self.model), ctypes.byref(packed.struct), tokens.states
        )
        check_known(forward_pass.batch, num_known)
        self.capture(forward_pass, states, self.dtype)
        return logits

    def agrees(self, lm: CausalLM, recurrent: RecurrentLayers) -> bool:
        """Whether it gives the logits of a module, which has these layers, to the last bit."""
        table = PageTable(PagePool(1, _TRIAL_TOKENS))
        table.append(_TRIAL_TOKENS)
        batch = Batch.build([Row([*range(_TRIAL_TOKENS)], 0, table)])
        expected = lm.forward(batch, lm.storage(1, _TRIAL_TOKENS))
        storage = lm.storage(1, _TRIAL_TOKENS)
        assert isinstance(storage, RecurrentStorage)
        forward_pass = lm.forward_pass(batch, storage)
        with recurrent.over(batch, storage):
            return self.logits(forward_pass, recurrent.token_table).equal(expected)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is around the decoder layers of a module."""

    embedding: nn.Embedding | NativeEmbedding
    norm: NativeNorm
    head: NativeLinear
    config: Any

    @classmethod
    def of(cls, module: PreTrainedModel) -> _Parts | None:
        """None: they are others."""
        decoder = decoder_of(module)
        norms = [
            part.forward for part in decoder.children() if isinstance(part.forward, NativeNorm)
        ]
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        is_table = type(embedding) is nn.Embedding and embedding.weight.dtype in TYPES
        is_known = is_table or isinstance(embedding, NativeEmbedding)
        if len(norms) != 1 or not is_known or not isinstance(head, NativeLinear):
            return None
        if head.packed.following is not None:
            return None
        return cls(embedding, norms[0], head, module.config.get_text_config(decoder=True))

    def forward(
        self, network: TransformersNetwork, max_positions: int, rotary: RotaryTable | None
    ) -> ModuleForward:
        """Of these, and the decoder layers of a network."""
        assert network.decoder is not None
        assert network.attention is not None
        sublayers: NativeSublayers = network.decoder.native
        decoder = ModuleDecoderStruct(
            sublayers=sublayers.structs,
            num_sublayers=len(sublayers.structs),
            width=sublayers.width,
            type=TYPES[network.module.dtype],
            embedding_factor=self._factor("embedding_multiplier"),
            logits_factor=self._factor("lm_head_multiplier"),
            logits_divisor=self._factor("logits_scaling"),
        )
        model = ModelStruct(
            final_norm=self.norm.weight.data_ptr(),
            head=ctypes.pointer(self.head.packed.struct),
            decoder=ctypes.pointer(decoder),
            num_layers=sublayers.num_layers,
            hidden=sublayers.hidden,
            eps=self.norm.eps,
            embed_scale=1.0,
            **self._embedding_fields(),
        )
        return ModuleForward(
            model,
            max_positions,
            [self],
            sublayers=sublayers,
            attention=network.attention.native,
            decoder=decoder,
            rotary=rotary,
            head=self.head.packed,
            dtype=network.module.dtype,
        )

    def _factor(self, name: str) -> float:
        return float(getattr(self.config, name, 1.0))

    def _embedding_fields(self) -> dict[str, Any]:
        embedding = self.embedding
        if isinstance(embedding, NativeEmbedding):
            pointer = ctypes.pointer(embedding.packed.struct)
            return {"embedding": pointer, "num_embeddings": embedding.num_embeddings}
        weight = embedding.weight
        assert weight.is_contiguous()
        fields = {"table": weight.data_ptr(), "table_type": TYPES[weight.dtype]}
        return {**fields, "num_embeddings": len(weight)}
