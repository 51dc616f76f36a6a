"""EAGLE-1's and 2's head: a Llama layer that predicts the target's next hidden state.

Li et al., 2024 (arXiv 2401.15077; 2406.16858 uses the same head). ``fc`` joins the next token's
embedding and the state after the target's final norm; one layer without a first norm follows. Its
output is the predicted state, from which the target's LM head computes the logits. Tensors have the
authors' names (``fc``, ``layers.0.*``, ``embed_tokens``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from typing_extensions import override

from forethought.kv.storage import LayerShape
from forethought.model import backends
from forethought.model.attention.base import ForwardPass
from forethought.model.causal_lm import CausalLM
from forethought.model.llama.layers import projection
from forethought.speculative.draft_module import DraftModule, ModuleOutput
from forethought.speculative.heads.checkpoint import Checkpoint
from forethought.speculative.heads.layers import (
    Attend,
    DraftLayer,
    Linear,
    LlamaLayer,
    layer_fields,
    layer_shape,
    llama_config,
    native_rotary,
)
from forethought.speculative.heads.module_parts import ModuleParts


class EagleHead(nn.Module):
    """The weights, and the forward that training differentiates.

    Args:
        config: of the layer; ``vocab_size`` and ``hidden_size`` are the target's.
        bias: whether ``fc`` has one.
        own_embedding: it embeds tokens itself; otherwise with the target's embedding.
    """

    def __init__(self, config: LlamaConfig, bias: bool = True, own_embedding: bool = False) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        if own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.own_embedding = own_embedding
        self.fc = Linear(2 * hidden, hidden, bias=bias)
        self.layers = nn.ModuleList([LlamaLayer(config, hidden)])

    def forward(self, embedded: Tensor, states: Tensor, attend: Attend) -> Tensor:
        """embedded and states ``[..., hidden]`` -> the next states ``[..., hidden]``."""
        x = self.fc(torch.cat([embedded, states], -1))
        following: Tensor = self.layers[0](x, x, attend)
        return following

    @classmethod
    def load(cls, directory: Path) -> EagleHead:
        """Read a checkpoint, in float32.

        Raises:
            ModelError: it is missing, broken, or of an architecture that is not computed here.
        """
        stored = Checkpoint.read(directory)
        tensors = {name.removeprefix("model."): x for name, x in stored.tensors.items()}
        tensors.pop("lm_head.weight", None)  # a copy of the target's
        config = llama_config(directory, stored.config)
        traits = "fc.bias" in tensors, "embed_tokens.weight" in tensors
        return stored.build(lambda: cls(config, *traits), tensors)

    def save(self, directory: Path) -> None:
        """Write it as :meth:`load` reads it, in the weights' dtype."""
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle"],
            **layer_fields(self.config),
            "bias": self.fc.bias is not None,
            "torch_dtype": str(self.fc.weight.dtype).removeprefix("torch."),
        }
        Checkpoint(directory, config, dict(self.state_dict())).write()


def eagle_parts(head: EagleHead, max_positions: int) -> ModuleParts:
    """The head as a native module."""
    config, layer = head.config, head.layers[0]
    return ModuleParts(
        layer,
        native_rotary(config, max_positions),
        config.num_attention_heads,
        config.num_key_value_heads,
        config.rms_norm_eps,
        project=head.fc,
        embedding=head.embed_tokens if head.own_embedding else None,
    )


def eagle_network(head: EagleHead, lm: CausalLM) -> DraftModule:
    """The head over pages: in C++ where the target runs there, else in torch operations."""
    parts, shape = eagle_parts(head, lm.max_positions), layer_shape(head.config)
    native = backends.cpu().draft_module(parts, lm, head.fc.weight.dtype, shape)
    return native or EagleNetwork(head, lm)


class EagleNetwork(DraftModule):
    """An :class:`EagleHead` over pages, in few operations; see ``speculative.draft_module``.

    Args:
        head: in the dtype that it is to run in, on the device of the target.
        lm: the target.
    """

    forward_path = "torch"
    draft_chains = draft_trees = None

    def __init__(self, head: EagleHead, lm: CausalLM) -> None:
        self._lm, self._own = lm, head.embed_tokens if head.own_embedding else None
        self._join = projection(head.fc.weight, head.fc.bias)
        layer = head.layers[0]
        assert isinstance(layer, LlamaLayer)
        self._layer = DraftLayer(layer, head.config, lm.max_positions)
        self.dtype: torch.dtype = head.fc.weight.dtype
        self.shape: LayerShape = self._layer.shape
        self.windows: Sequence[int | None] = (None,)
        self.vocab_size: int = lm.vocab_size
        self.ids: Tensor | None = None

    @override
    def enter(self, states: Tensor) -> Tensor:
        """The state is read unchanged."""
        return states.to(self.dtype)

    @override
    def __call__(self, states: Tensor, forward_pass: ForwardPass) -> ModuleOutput:
        token_ids = forward_pass.batch.token_ids
        embedded = self._lm.embed(token_ids) if self._own is None else self._own(token_ids)
        x = self._join(torch.cat([embedded.to(self.dtype), states], -1))
        following = self._layer(x, x, forward_pass)
        return ModuleOutput(following, self._lm.unembed(following.to(self._lm.dtype)))
