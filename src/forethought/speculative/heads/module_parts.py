"""The parts of a draft module of one decoder layer, for a backend that computes it as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModuleParts:
    """Parts of a draft module, in one dtype and on one device.

    The embedding of a token and the state before it are normed and concatenated. What comes of it,
    projected to the width of the module, is the input of the layer; or the layer's attention reads
    both, and the state is its residual.

    Attributes:
        layer: a decoder layer, of a Llama-like model.
        rotary: float32 ``[positions, 2, rotary_dim]``; see ``llama.layers.rotary_table``.
        num_heads, num_kv_heads: of its attention.
        token_norm, state_norm: None: what is joined is not normed.
        project: ``[hidden, 2 * hidden]``; None: attention reads both.
        enters_normed: the layer norms its input.
        final_norm: in front of the head; None: there is none.
        head: to the logits; None: the target's.
        embedding: its own; None: the target's.
        activation: of the feed-forward.
        window: of the attention; None: all is attended to.
        state_first: the state comes before the embedding.
        zero_first: the embedding of a token at position 0 is 0.
        norm_residual: the residual is the normed state.
        feeds_normed: the state that is fed back is after the final norm.
        entry: ``[hidden, width]``, of the target's states; None: they are read as they are.
        entry_norm: in front of it.
    """

    layer: nn.Module
    rotary: Tensor
    num_heads: int
    num_kv_heads: int
    eps: float
    token_norm: nn.Module | None = None
    state_norm: nn.Module | None = None
    project: nn.Module | None = None
    enters_normed: bool = False
    final_norm: nn.Module | None = None
    head: nn.Module | None = None
    embedding: nn.Embedding | None = None
    activation: str = "silu"
    window: int | None = None
    state_first: bool = False
    zero_first: bool = False
    norm_residual: bool = False
    feeds_normed: bool = False
    entry: nn.Module | None = None
    entry_norm: nn.Module | None = None
