"""Low-rank adapters beside the linear layers of a model that itself stays as it is.

LoRA (Hu et al., 2021, arXiv 2106.09685, section 4.1): a layer ``W x`` becomes ``W x + s B A x``,
with ``A`` of few rows, drawn at random, and ``B`` zero at first, so that a new adapter changes
nothing. Layers are found by their type, whatever the architecture. The model is changed only while
:meth:`Adapters.attached` is open, so that it serves as the original and as the adapted one, and is
in memory once. Knows nothing about losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from forethought.errors import ModelError


class Adapter(nn.Module):
    """What is added to one layer's output.

    Args:
        inputs, outputs: of the layer.
        rank: rows of ``A``.
        scale: on the product.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` -> ``[..., outputs]``, in the dtype of x."""
        return F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * self._scale

    def weight(self) -> Tensor:
        """The same as one matrix: float32 ``[outputs, inputs]``."""
        return self._scale * (self.b @ self.a).detach()


class Adapters(nn.Module):
    """An adapter for every linear layer but the output projection, in float32.

    The projection is left out because it is often the embedding, too. A layer that the model never
    calls, but reads the weight of, keeps an adapter that learns nothing and changes nothing.

    Args:
        module: whose layers; its weights are neither changed nor held as parameters of this one.
        rank: of each adapter.
        alpha: ``s`` is ``alpha / rank``.

    Raises:
        ModelError: it has no such layers, or its weights are quantised: nothing could be merged.
    """

    def __init__(self, module: PreTrainedModel, rank: int, alpha: float) -> None:
        super().__init__()
        projection = module.get_output_embeddings()
        self._layers = {
            name: layer
            for name, layer in module.named_modules()
            if type(layer) in (nn.Linear, Conv1D) and layer is not projection
        }
        if not self._layers or getattr(module.config, "quantization_config", None) is not None:
            raise ModelError(
                "the model cannot be adapted",
                f"{type(module).__name__} is quantised, or has no linear layers",
                "Give a model whose weights have 16 or 32 bits",
            )
        self._adapters = nn.ModuleDict(
            {
                _key(name): Adapter(*_sizes(layer), rank, alpha / rank)
                for name, layer in self._layers.items()
            }
        )
        self.to(module.device)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While it is open, the model is the adapted one."""
        handles = [
            layer.register_forward_hook(_adding(self._adapters[_key(name)]))
            for name, layer in self._layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def merged(self) -> dict[str, Tensor]:
        """The adapted layers' weights by their names in the model, in its dtype and layout."""
        found = {}
        for name, layer in self._layers.items():
            added = self._adapters[_key(name)].weight()
            if isinstance(layer, Conv1D):
                added = added.T
            found[f"{name}.weight"] = (layer.weight.float() + added).to(layer.weight.dtype)
        return found


def _adding(adapter: nn.Module) -> Any:
    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + adapter(args[0])

    return hook


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _key(name: str) -> str:
    return name.replace(".", "/")
