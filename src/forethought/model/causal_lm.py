"""A causal language model whose attention runs over pages.

Holds the network (the transformers module, or the fused forward built from it) and what the engine
must know about it. It knows nothing about requests or sampling; batch and cache are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forethought.kv.storage import KvStorage, LayerShape
from forethought.model.attention.base import AttentionBackend, ForwardPass, PagedPass
from forethought.model.attention.interface import KEYWORD, LayerProfile
from forethought.model.batch import Batch
from forethought.model.taps import tapped


class Network(Protocol):
    """Token ids to logits, with attention left to the pass."""

    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Logits ``[R, vocab]`` in the model's dtype."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        ...

    def unembed(self, states: Tensor) -> Tensor:
        """States behind the final norm ``[T, hidden]`` -> logits ``[T, vocab]``."""
        ...


@dataclass(frozen=True, slots=True)
class TransformersNetwork:
    """The module exactly as transformers defines it, with our attention installed."""

    module: PreTrainedModel

    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """See :class:`Network`."""
        with tapped(self.module.get_decoder(), forward_pass):
            output = self.module(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_index,
                **{KEYWORD: forward_pass},
            )
        return output.logits[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        """See :class:`Network`."""
        embedded: Tensor = self.module.get_input_embeddings()(token_ids)
        return embedded

    def unembed(self, states: Tensor) -> Tensor:
        """See :class:`Network`."""
        logits: Tensor = self.module.get_output_embeddings()(states)
        return logits


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What is known of a loaded model.

    Attributes:
        config: the transformers configuration.
        layers: what each attention layer asks for, found by the probe.
        vocab_size: width of the logits.
        max_positions: tokens that a sequence may hold.
        eos_token_ids: ids that end a sequence.
        dtype: of weights, keys and values.
        device: where they live.
    """

    config: Any
    layers: tuple[LayerProfile, ...]
    vocab_size: int
    max_positions: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device


class CausalLM:
    """A network, its attention backend and its traits."""

    def __init__(self, network: Network, backend: AttentionBackend, traits: ModelTraits) -> None:
        self.network, self.backend, self.traits = network, backend, traits
        self.config = traits.config
        self.vocab_size, self.max_positions = traits.vocab_size, traits.max_positions
        self.eos_token_ids = traits.eos_token_ids
        self.dtype, self.device = traits.dtype, traits.device
        self.layer_shapes: list[LayerShape] = [layer.shape for layer in traits.layers]
        self.windows = [layer.window for layer in traits.layers]

    def forward(self, batch: Batch, storage: KvStorage) -> Tensor:
        """Run the batch, store its keys and values, return float32 logits ``[R, vocab]``."""
        return self.forward_tapped(batch, storage, frozenset())[0]

    def forward_tapped(
        self, batch: Batch, storage: KvStorage, taps: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The same, with hidden states: by place (see ``model.taps``) ``[T, hidden]``."""
        with torch.inference_mode():
            forward_pass = PagedPass(batch, storage, self.backend, self.windows, taps)
            return self.run(forward_pass), forward_pass.states

    def run(self, forward_pass: ForwardPass) -> Tensor:
        """Float32 logits ``[R, vocab]`` of a pass, in whatever way it attends."""
        with torch.inference_mode():
            return self.network(forward_pass.batch, forward_pass).float()

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.config.get_text_config(decoder=True).hidden_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config.get_text_config(decoder=True).num_hidden_layers)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> the input embeddings ``[..., hidden]``, as drafting heads share them.

        A model that scales them outside its embedding module is not followed there.
        """
        return self.network.embed(token_ids)

    def unembed(self, states: Tensor) -> Tensor:
        """States behind the final norm ``[T, hidden]`` -> logits ``[T, vocab]`` in their dtype.

        The output projection alone: what some models do to logits afterwards is left out.
        """
        return self.network.unembed(states)
