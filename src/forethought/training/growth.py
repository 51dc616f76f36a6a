"""A larger Llama that computes what a trained one computes, to be trained on from there.

    python -m forethought.training.growth --start forethought/countdown --width 2 --layers 10 \\
        --out runs/grown
    python -m countdown.train --start runs/grown --out runs/large ...

A model that grows has learned what the small one knows before its first step, which costs a
fraction of training it from new weights. Both ways to grow leave the function unchanged:

* **Width** (Net2Net: Chen et al., "Net2Net: Accelerating Learning via Knowledge Transfer", 2016,
  arXiv 1511.05641). Every unit of the residual stream, of the feed-forward and every head has
  copies; what reads a unit divides its weight among the copies. The shares are drawn, as copies
  with equal shares would have equal gradients for ever.
* **Depth** (block expansion: Wu et al., "LLaMA Pro: Progressive LLaMA with Block Expansion", 2024,
  arXiv 2401.02415). A layer is followed by copies of it whose two output matrices are zero, so they
  add nothing to the residual stream until they are trained.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from forethought.errors import ParameterError
from forethought.model_dir import find_model_dir
from forethought.training.from_scratch import export_model
from forethought.training.llama import Llama, LlamaLayer, LlamaShape

_LEAST_SHARE = 0.3
"""Of a weight that is divided among copies, times the number of copies."""


@torch.no_grad()
def grow(network: Llama, width: int = 1, num_layers: int | None = None, seed: int = 0) -> Llama:
    """A network that gives the logits of ``network``, up to rounding.

    Args:
        width: number of copies of each unit and head.
        num_layers: of the new network, spread evenly over the old ones; None: as many.
        seed: of the shares in which weights are divided.

    Raises:
        ParameterError: ``width`` below 1, or fewer layers than there are.
    """
    old = network.shape
    num_layers = old.num_layers if num_layers is None else num_layers
    if width < 1 or num_layers < old.num_layers:
        raise ParameterError(
            "a network cannot shrink",
            f"width {width}, and {num_layers} layers where there are {old.num_layers}",
            "Give a width of at least 1, and at least as many layers",
        )
    grown = Llama(_grown_shape(old, width, num_layers))
    shares = _Shares(width, seed)
    grown.embedding.weight.copy_(network.embedding.weight.repeat(1, width))
    grown.norm.weight.copy_(shares.divide(network.norm.weight))
    sources = [index * old.num_layers // num_layers for index in range(num_layers)]
    for index, source in enumerate(sources):
        is_copy = index > 0 and sources[index - 1] == source
        _grow_layer(network.layers[source], grown.layers[index], shares, is_copy)
    return grown


class _Shares:
    """Divides weights among copies of what they read, each in other shares that sum to 1."""

    def __init__(self, width: int, seed: int) -> None:
        self.width = width
        self._generator = torch.Generator().manual_seed(seed)

    def divide(self, weight: Tensor) -> Tensor:
        """``[..., N]`` -> ``[..., width * N]``."""
        shape = (self.width, *weight.shape)
        drawn = torch.rand(shape, generator=self._generator) * (1.0 - _LEAST_SHARE) + _LEAST_SHARE
        parts = weight * (drawn / drawn.sum(0))
        return torch.cat(parts.unbind(0), dim=-1)


def _grown_shape(old: LlamaShape, width: int, num_layers: int) -> LlamaShape:
    return replace(
        old,
        hidden_size=width * old.hidden_size,
        intermediate_size=width * old.intermediate_size,
        num_heads=width * old.num_heads,
        num_kv_heads=width * old.num_kv_heads,
        num_layers=num_layers,
    )


def _grow_layer(old: LlamaLayer, new: LlamaLayer, shares: _Shares, is_copy: bool) -> None:
    """Give ``new`` the weights of ``old``; of a copy, the output matrices are zero."""
    width, shape = shares.width, old.shape
    sizes = [n * shape.head_dim for n in (shape.num_heads, *2 * (shape.num_kv_heads,))]
    new.attention_norm.weight.copy_(old.attention_norm.weight.repeat(width))
    new.feed_norm.weight.copy_(old.feed_norm.weight.repeat(width))
    rows = [part.repeat(width, 1) for part in old.qkv.weight.split(sizes)]
    new.qkv.weight.copy_(shares.divide(torch.cat(rows)))
    rows = [part.repeat(width, 1) for part in old.gate_up.weight.chunk(2)]
    new.gate_up.weight.copy_(shares.divide(torch.cat(rows)))
    for source, target in ((old.attention_out, new.attention_out), (old.down, new.down)):
        grown = shares.divide(source.weight.repeat(width, 1))
        target.weight.copy_(torch.zeros_like(grown) if is_copy else grown)


def main() -> None:
    """Read the command line, and write the larger model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--start", required=True, help="model that was trained here, or its name")
    parser.add_argument("--out", type=Path, required=True, help="directory of the larger model")
    parser.add_argument("--width", type=int, default=1, help="copies of each unit (default: 1)")
    parser.add_argument("--layers", type=int, help="(default: as many as there are)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = find_model_dir(options.start)
    network = Llama.of(start)
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    grown = grow(network, options.width, options.layers, options.seed)
    export_model(grown, tokenizer, options.out)


if __name__ == "__main__":
    main()
