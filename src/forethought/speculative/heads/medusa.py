"""Medusa's heads: weights, forward, and the layouts in which they are published.

Head i predicts the token i + 2 positions after the one whose state it reads, from that state alone:
residual blocks ``x + silu(W x + b)``, then a projection to the vocabulary (Cai et al., 2024, arXiv
2401.10774, section 2.1.1). There are two implementations: :class:`MedusaHeads` has the weights
under the authors' names and is used in training, :class:`DraftHeads` computes the same in few
operations.

Layouts that are read and written, for head i and block j of n:

=========  ============================================  ====================  ==================
layout     block                                         projection            beside them
=========  ============================================  ====================  ==================
authors'   ``{i}.{j}.linear.weight``, ``.bias``          ``{i}.{n}.weight``
vLLM's     ``blocks.{i}.layers.{j}.weight``, ``.bias``   ``lm_heads.{i}.weight``  ``token_map``
=========  ============================================  ====================  ==================

A prefix ``medusa_head.`` or ``medusa_heads.`` is removed; in vLLM's layout ``lm_head.weight`` may
replace all projections; biases may be missing; ``token_map`` holds the target's id of each row of
the projections, or selects such rows of complete ones.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.model import backends
from forethought.model.causal_lm import CausalLM
from forethought.model.llama.layers import BatchedProjection, projection
from forethought.speculative.heads.checkpoint import TOKEN_MAP, Checkpoint, pop_token_map, refused
from forethought.speculative.heads.layers import ResidualBlock

log = logging.getLogger(__name__)

WEIGHTS = "medusa_lm_head.safetensors"
"""The authors' file name; its older form is ``medusa_lm_head.pt``."""
_PREFIX = re.compile(r"^(?:model\.)?medusa_heads?\.")


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Sizes of a set of heads."""

    hidden: int
    vocab: int
    """Rows of each projection."""
    heads: int
    blocks: int = 1
    bias: bool = True


class MedusaHeads(nn.ModuleList):
    """The heads, in float32 unless converted. Names of its tensors are the authors'.

    Args:
        shape: their sizes.
        token_map: int64 ``[vocab]``, the target's id of each row; None: the same ids.
    """

    def __init__(self, shape: MedusaShape, token_map: Tensor | None = None) -> None:
        super().__init__(
            nn.Sequential(
                *(ResidualBlock(shape.hidden, shape.bias) for _ in range(shape.blocks)),
                nn.Linear(shape.hidden, shape.vocab, bias=False),
            )
            for _ in range(shape.heads)
        )
        self.shape, self.token_map = shape, token_map

    def forward(self, states: Tensor) -> Tensor:
        """Target's states after the final norm ``[..., hidden]`` -> ``[..., heads, vocab]``."""
        return torch.stack([head(states) for head in self], dim=-2)

    @classmethod
    def load(
        cls, directory: Path, hidden: int, vocab: int, max_heads: int | None = None
    ) -> MedusaHeads:
        """Read heads of either layout.

        Args:
            directory: with ``config.json`` and weights.
            hidden: width of the target's states.
            vocab: the target's ids are below it.
            max_heads: heads to read; None: all.

        Raises:
            ModelError: a tensor is missing, unexpected or of the wrong shape.
        """
        stored = Checkpoint.read(directory)
        tensors = {_PREFIX.sub("", name): tensor for name, tensor in stored.tensors.items()}
        token_map = pop_token_map(tensors, directory, vocab)
        tensors = _authors_names(tensors, stored.config)
        shape = _shape(tensors, stored, hidden)
        if token_map is not None:
            _pick_rows(tensors, token_map, shape)
            shape = replace(shape, vocab=len(token_map))
        elif shape.vocab > vocab:
            raise refused(
                directory,
                f"its heads have {shape.vocab} tokens, the target has {vocab}",
                "Use heads that were trained for this target",
            )
        heads = stored.build(lambda: cls(shape, token_map), tensors)
        _warn_of_wrong_config(stored, shape)
        if max_heads is not None and max_heads < shape.heads:
            del heads[max_heads:]
            heads.shape = replace(shape, heads=max_heads)
        elif max_heads is not None and max_heads > shape.heads:
            log.warning(
                "%s holds %d heads, not the %d requested", directory, shape.heads, max_heads
            )
        return heads

    def save(
        self,
        directory: Path,
        layout: Literal["authors", "vllm"] = "authors",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``config.json`` and weights.

        Args:
            directory: made if it is not there.
            layout: of the names; the authors' has no ``token_map``.
            config: more for ``config.json``.
        """
        assert layout == "vllm" or self.token_map is None
        tensors, shape = self.state_dict(), self.shape
        if layout == "authors":
            written: dict[str, Any] = {
                "medusa_num_heads": len(self),
                "medusa_num_layers": shape.blocks,
            }
        else:
            tensors = {_vllm_name(name, shape.blocks): tensor for name, tensor in tensors.items()}
            written = {
                "model_type": "medusa",
                "architectures": ["MedusaModel"],
                "hidden_size": shape.hidden,
                "vocab_size": shape.vocab,
                "num_heads": len(self),
                "num_hidden_layers": shape.blocks,
                "medusa_fc_bias": shape.bias,
                "truncated_vocab_size": shape.vocab,
            }
            if self.token_map is not None:
                tensors[TOKEN_MAP] = self.token_map
                written["vocab_size"] = int(self.token_map.max()) + 1
        Checkpoint(directory, {**written, **(config or {})}, tensors).write()
        if layout == "authors":
            os.replace(directory / "model.safetensors", directory / WEIGHTS)


def draft_heads(heads: MedusaHeads, lm: CausalLM) -> RankingHeads:
    """Their forward: in C++ where the target runs there, else in torch operations."""
    native = backends.cpu().draft_heads(heads, lm)
    return DraftHeads(heads, lm.dtype, lm.device) if native is None else native


class RankedTokens(NamedTuple):
    """The most probable tokens by head and row, the most probable first."""

    logprobs: list[list[list[float]]]
    tokens: list[list[list[int]]]
    """The target's ids."""


class RankingHeads(Protocol):
    """The forward of some heads, for drafting."""

    forward_path: str
    token_map: Tensor | None
    vocab: int

    def __len__(self) -> int: ...

    def __call__(self, states: Tensor, count: int) -> Tensor:
        """The first ``count`` heads: states ``[N, hidden]`` -> logits ``[count, N, vocab]``."""
        ...

    def most_probable(self, states: Tensor, count: int, width: int) -> RankedTokens:
        """The ``width`` most probable tokens of the first ``count`` heads, by row of ``states``."""
        ...


class DraftHeads(RankingHeads):
    """The forward of some heads, for drafting.

    Args:
        heads: their weights are copied.
        dtype, device: of weights and states.
    """

    forward_path = "torch"

    def __init__(self, heads: MedusaHeads, dtype: torch.dtype, device: torch.device) -> None:
        self.token_map = None if heads.token_map is None else heads.token_map.to(device)
        self.vocab = heads.shape.vocab
        self._count, self._first = len(heads), None
        with torch.inference_mode():
            *blocks, out = zip(*map(linears_of, heads), strict=True)
            if blocks:  # the first blocks read the same state: one product
                weights, biases = _weights(blocks[0], dtype, device)
                bias = None if biases is None else torch.cat(biases)
                self._first = projection(torch.cat(weights), bias)
            self._blocks = [
                BatchedProjection(*_weights(layer, dtype, device)) for layer in blocks[1:]
            ]
            self._out = BatchedProjection(*_weights(out, dtype, device))

    def __len__(self) -> int:
        return self._count

    def __call__(self, states: Tensor, count: int) -> Tensor:
        """The first ``count`` heads: states ``[N, hidden]`` -> logits ``[count, N, vocab]``."""
        grown = states.expand(count, -1, -1)
        if self._first is not None:
            mixed = self._first.silu(states).view(len(states), self._count, -1)
            grown = grown + mixed.transpose(0, 1)[:count]
        for block in self._blocks:
            grown = grown + F.silu(block(grown))
        return self._out(grown)

    def most_probable(self, states: Tensor, count: int, width: int) -> RankedTokens:
        """The ``width`` most probable tokens of the first ``count`` heads, by row of ``states``."""
        top = self(states, count).log_softmax(-1, dtype=torch.float32).topk(width, dim=-1)
        tokens = top.indices if self.token_map is None else self.token_map[top.indices]
        # Token ids are exact in float64, so that one transfer brings everything.
        logprobs, ids = torch.stack([top.values.double(), tokens.double()]).tolist()
        return RankedTokens(logprobs, [[list(map(int, row)) for row in rows] for rows in ids])


def linears_of(head: nn.Module) -> list[nn.Linear]:
    """The linear layers of its blocks, then the last one."""
    *blocks, last = head.children()
    return [*(block.linear for block in blocks), last]


def _weights(
    linears: Sequence[nn.Linear], dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Weights and biases of linears that all have one, or all none."""
    weights = [linear.weight.to(device, dtype) for linear in linears]
    if linears[0].bias is None:
        return weights, None
    return weights, [linear.bias.to(device, dtype) for linear in linears]


def _authors_names(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of either layout under the authors' names; what is in neither keeps its own."""
    if not any(name.startswith(("blocks.", "lm_head")) for name in tensors):
        return dict(tensors)
    blocks = _count(tensors, r"blocks\.\d+\.layers\.(\d+)\.")
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name)
        last = re.fullmatch(r"lm_heads\.(\d+)\.weight", name)
        if match:
            renamed["{}.{}.linear.{}".format(*match.groups())] = tensor
        elif last:
            renamed[f"{last[1]}.{blocks}.weight"] = tensor
        else:
            renamed[name] = tensor
    shared = renamed.pop("lm_head.weight", None)
    if shared is None and config.get("original_lm_head"):
        shared = renamed.get(f"0.{blocks}.weight")
    if shared is not None:
        for head in range(_count(tensors, r"blocks\.(\d+)\.")):
            renamed.setdefault(f"{head}.{blocks}.weight", shared)
    return renamed


def _vllm_name(name: str, blocks: int) -> str:
    head, block, *rest = name.split(".")
    if int(block) == blocks:
        return f"lm_heads.{head}.weight"
    return f"blocks.{head}.layers.{block}.{rest[-1]}"


def _shape(tensors: Mapping[str, Tensor], stored: Checkpoint, hidden: int) -> MedusaShape:
    """Sizes by the tensors."""
    heads = _count(tensors, r"(\d+)\.\d+\.")
    blocks = _count(tensors, r"\d+\.(\d+)\.linear\.")
    last = tensors.get(f"0.{blocks}.weight")
    if last is None or last.ndim != 2:
        stored.expect_none([f"0.{blocks}.weight (lm_heads.0.weight)"], "lacks")
    assert last is not None
    bias = any(name.endswith(".bias") for name in tensors)
    return MedusaShape(hidden, len(last), heads, blocks, bias)


def _pick_rows(tensors: dict[str, Tensor], token_map: Tensor, shape: MedusaShape) -> None:
    """Select the rows of complete projections that the map contains."""
    for head in range(shape.heads):
        name = f"{head}.{shape.blocks}.weight"
        if name in tensors and len(tensors[name]) > len(token_map):
            tensors[name] = tensors[name][token_map]


def _warn_of_wrong_config(stored: Checkpoint, shape: MedusaShape) -> None:
    """Published configs are often wrong about the number of heads: the tensors decide."""
    listed = stored.config.get("medusa_num_heads", stored.config.get("num_heads", shape.heads))
    if listed != shape.heads:
        log.warning(
            "%s: config.json says %s heads, its tensors are those of %d",
            *(stored.directory, listed, shape.heads),
        )


def _count(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number that the pattern finds at the beginning of a name."""
    numbers = [int(match[1]) for name in names if (match := re.match(pattern, name))]
    return max(numbers, default=-1) + 1
