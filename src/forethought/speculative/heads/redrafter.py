"""ReDrafter's head: a small recurrent network after one hidden state of the target.

Cheng et al., 2024 (arXiv 2403.09919, section 3.1). The recurrent state starts with ``s = 0`` and is
updated with one token after the other, ``s' = silu(W e + U s + b)``, e being the target's embedding
of the token. The next token is predicted from the concatenation ``[c; s']``, c being the target's
state that the first of these tokens was sampled from, the same for the whole draft: a projection
where the width differs, residual blocks ``x + silu(V x + d)``, and an LM head. Older heads have no
W and U, and ``s' = e + s``. There are three implementations: :class:`ReDrafterHead` has the weights
under Apple's names and is used in training, :class:`DraftRecurrence` computes the same in few
operations, and C++ does within the whole search (:func:`beam_head`).

A tensor ``token_map`` beside those of Apple's heads is an extension: the target's id of each logit,
where the head drafts the tokens of a draft vocabulary only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.model.llama.layers import Projection, projection
from forethought.speculative.heads.checkpoint import TOKEN_MAP, Checkpoint, pop_token_map, refused
from forethought.speculative.heads.layers import ResidualBlock

MODEL_TYPE = "recurrent_drafting_drafter"
"""``model_type`` in ``config.json``."""
_SIZES = ("hidden_size", "vocab_size", "exit_dim", "num_draft_layers")


@dataclass(frozen=True, slots=True)
class ReDrafterShape:
    """Sizes of a head."""

    hidden: int
    """Width of the target's states and embeddings, and of its own state."""
    vocab: int
    """Size of its vocabulary: the target's ids below this, or those of its ``token_map``."""
    exit: int
    """Width of the residual blocks; unless it is ``2 * hidden``, there is a projection to it."""
    blocks: int
    recurrent: bool = True
    """Whether it has W and U."""

    @property
    def projects(self) -> bool:
        """Whether there is a projection to ``exit``."""
        return self.exit != 2 * self.hidden


class ReDrafterHead(nn.Module):
    """The weights, in float32 unless converted.

    Args:
        shape: its sizes.
        token_map: int64 ``[vocab]``, the target's id of each logit; None: the same ids.
    """

    def __init__(self, shape: ReDrafterShape, token_map: Tensor | None = None) -> None:
        super().__init__()
        self.shape, self.token_map = shape, token_map
        if shape.projects:
            self.input_proj = nn.Linear(2 * shape.hidden, shape.exit)
        self.lm_head = nn.Sequential(
            *(ResidualBlock(shape.exit) for _ in range(shape.blocks)),
            nn.Linear(shape.exit, shape.vocab, bias=False),
        )
        if shape.recurrent:
            self.rnn_u = nn.Linear(shape.hidden, shape.hidden)
            self.rnn_w = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def advance(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Update the state with a token.

        Args:
            embedded: ``[..., hidden]``, the target's embedding of it.
            state: ``[..., hidden]``; 0 before the first token.

        Returns:
            ``[..., hidden]``: the new state.
        """
        if not self.shape.recurrent:
            return embedded + state
        return F.silu(self.rnn_w(embedded) + self.rnn_u(state))

    def forward(self, context: Tensor, state: Tensor) -> Tensor:
        """Predict the next token.

        Args:
            context: ``[..., hidden]``, the target's state after its final norm.
            state: ``[..., hidden]``.

        Returns:
            ``[..., vocab]``: logits.
        """
        logits: Tensor = self.projection(self.mix(context, state))
        return logits

    def mix(self, context: Tensor, state: Tensor) -> Tensor:
        """As :meth:`forward`, up to the input of the projection: ``[..., exit]``."""
        x = torch.cat([context, state], -1)
        mixed: Tensor = self.lm_head[:-1](self.input_proj(x) if self.shape.projects else x)
        return mixed

    @property
    def projection(self) -> nn.Linear:
        """From the last residual block to the logits."""
        last: nn.Linear = self.lm_head[-1]
        return last

    @classmethod
    def load(cls, directory: Path, hidden: int, vocab: int) -> ReDrafterHead:
        """Read a head as it is published, in float32.

        Args:
            directory: with ``config.json`` and weights.
            hidden: width of the target's states.
            vocab: the target's ids are below it.

        Raises:
            ModelError: it is none, it is another target's, or a tensor is missing, unexpected or
                of the wrong shape.
        """
        stored = Checkpoint.read(directory)
        shape = _shape(stored)
        if shape.hidden != hidden or shape.vocab > vocab:
            raise refused(
                directory,
                f"it reads states of {shape.hidden} values and has {shape.vocab} tokens; the "
                f"target has {hidden} and {vocab}",
                "Use a head that was trained for this target",
            )
        tensors = dict(stored.tensors)
        token_map = pop_token_map(tensors, directory, vocab)
        return stored.build(lambda: cls(shape, token_map), tensors)

    def save(self, directory: Path) -> None:
        """Write it as :meth:`load` reads it, in the weights' dtype."""
        shape, weight = self.shape, self.lm_head[-1].weight
        config: dict[str, Any] = {
            "model_type": MODEL_TYPE,
            "architectures": ["Drafter"],
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab,
            "exit_dim": shape.exit,
            "num_draft_layers": shape.blocks,
            "rnn": shape.recurrent,
            "torch_dtype": str(weight.dtype).removeprefix("torch."),
        }
        tensors = self.state_dict()
        if self.token_map is not None:  # an extension: Apple's heads have none
            tensors[TOKEN_MAP] = self.token_map
        Checkpoint(directory, config, tensors).write()


@dataclass(frozen=True, slots=True)
class BeamHead:
    """The parts of a head that a beam search computes with.

    Attributes:
        recur: ``[hidden, 2 * hidden]``, of the embedding of a token and the state before it; None:
            they are added.
        enter: ``[exit, 2 * hidden]``, of context and state; None: they are concatenated.
        linears: those of residual blocks, then the projection to the logits.
        token_map: int64 ``[vocab]``, the target's id of each logit; None: the same ids.
    """

    recur: nn.Linear | None
    enter: nn.Linear | None
    linears: Sequence[nn.Linear]
    token_map: Tensor | None = None


def beam_head(head: ReDrafterHead) -> BeamHead:
    """Its parts for the search in C++."""
    *blocks, last = head.lm_head
    return BeamHead(
        _side_by_side(head.rnn_w, head.rnn_u) if head.shape.recurrent else None,
        head.input_proj if head.shape.projects else None,
        [*(block.linear for block in blocks), last],
        head.token_map,
    )


def _side_by_side(first: nn.Linear, second: nn.Linear) -> nn.Linear:
    """Their sum, as one layer that reads both inputs concatenated; the second one has the bias."""
    joined = nn.Linear(first.in_features + second.in_features, first.out_features)
    joined.weight = nn.Parameter(torch.cat([first.weight, second.weight], 1), requires_grad=False)
    joined.bias = second.bias
    return joined


class DraftRecurrence:
    """The forward of a head, for drafting.

    Args:
        head: its weights are copied.
        dtype, device: of weights, states and embeddings.
    """

    forward_path = "torch"

    def __init__(self, head: ReDrafterHead, dtype: torch.dtype, device: torch.device) -> None:
        def product(weight: Tensor, bias: Tensor | None) -> Projection:
            placed = None if bias is None else bias.to(device, dtype)
            return projection(weight.to(device, dtype), placed)

        shape = self.shape = head.shape
        self.token_map = None if head.token_map is None else head.token_map.to(device)
        with torch.inference_mode():
            *blocks, last = head.lm_head
            self._enter, self._recur = None, None
            if shape.projects:
                self._enter = product(head.input_proj.weight, head.input_proj.bias)
            if shape.recurrent:  # W and U side by side: one product
                both = _side_by_side(head.rnn_w, head.rnn_u)
                self._recur = product(both.weight, both.bias)
            self._blocks = [product(block.linear.weight, block.linear.bias) for block in blocks]
            self._last = product(last.weight, None)

    def advance(self, embedded: Tensor, state: Tensor) -> Tensor:
        """The next recurrent state, both ``[R, hidden]``."""
        if self._recur is None:
            return embedded + state
        return self._recur.silu(torch.cat([embedded, state], -1))

    def __call__(self, context: Tensor, state: Tensor) -> Tensor:
        """Logits ``[R, vocab]``; see ``ReDrafterHead.forward``, both ``[R, hidden]``."""
        x = torch.cat([context, state], -1)
        if self._enter is not None:
            x = self._enter(x)
        for block in self._blocks:
            x = x + block.silu(x)
        return self._last(x)


def _shape(stored: Checkpoint) -> ReDrafterShape:
    config = stored.config
    kind = config.get("model_type", MODEL_TYPE)
    if kind != MODEL_TYPE:
        raise refused(stored.directory, f"its model_type is {kind!r}, not {MODEL_TYPE!r}")
    missing = [name for name in _SIZES if not isinstance(config.get(name), int)]
    if missing:
        raise refused(stored.directory, f"its config.json lacks {', '.join(missing)}")
    hidden, vocab, wide, blocks = (config[name] for name in _SIZES)
    return ReDrafterShape(hidden, vocab, wide, blocks, bool(config.get("rnn", False)))
