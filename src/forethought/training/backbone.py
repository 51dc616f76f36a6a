"""A target that is trained with low-rank adapters, and read with gradients.

LoRA (Hu et al., 2021, arXiv 2106.09685, section 4.1): a layer ``W x`` becomes ``W x + s B A x``,
with ``A`` of few rows and random, and ``B`` zero at first, so that a new adapter changes nothing.
Layers are found by their type, in any architecture. Adapters apply only inside
:meth:`LoraAdapters.attached`: one copy of the weights is the original and the adapted model. The
adapted model is saved as a directory like the target's, with the adapters merged into the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from forethought.errors import ModelError
from forethought.model.attention.base import Capability
from forethought.model.attention.interface import ATTENTION
from forethought.model.hidden_states import decoder_of
from forethought.model.quantization import is_quantised
from forethought.training.teacher import Teacher
from forethought.transformers_loading import without_progress_bars


class LoraAdapter(nn.Module):
    """The product ``scale * B A x`` that is added to one layer's output; A has ``rank`` rows."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` -> ``[..., outputs]``, in the dtype of x."""
        return F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * self._scale

    def weight(self) -> Tensor:
        """The product as one matrix: float32 ``[outputs, inputs]``."""
        return self._scale * (self.b @ self.a).detach()


class LoraAdapters(nn.Module):
    """An adapter for every linear layer but the output projection, in float32.

    The projection is left out because it is often tied to the embedding. The adapter of a layer
    that the model never calls, but reads the weight of, gets no gradient and changes nothing.

    Args:
        module: its layers are read; its weights are neither changed nor parameters of this module.
        rank: of each adapter.
        alpha: ``s`` is ``alpha / rank``.

    Raises:
        ModelError: it has no such layers, or its weights are quantised, which cannot be merged.
    """

    def __init__(self, module: PreTrainedModel, rank: int, alpha: float) -> None:
        super().__init__()
        self._layers = _adapted_layers(module)
        self._adapters = nn.ModuleDict(
            {
                _key(name): LoraAdapter(*_sizes(layer), rank, alpha / rank)
                for name, layer in self._layers.items()
            }
        )
        self.to(module.device)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the model is the adapted one."""
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
        weights = {}
        for name, layer in self._layers.items():
            added = self._adapters[_key(name)].weight()
            if isinstance(layer, Conv1D):
                added = added.T
            weights[f"{name}.weight"] = (layer.weight.float() + added).to(layer.weight.dtype)
        return weights


def _adapted_layers(module: PreTrainedModel) -> dict[str, nn.Module]:
    """By their names; raises ModelError as ``LoraAdapters``."""
    projection = module.get_output_embeddings()
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) in (nn.Linear, Conv1D) and layer is not projection
    }
    if not layers or _is_quantised(module):
        raise ModelError(
            "the model cannot be adapted",
            f"{type(module).__name__} is quantised, or has no linear layers",
            "Give a model whose weights have 16 or 32 bits",
        )
    return layers


def _is_quantised(module: PreTrainedModel) -> bool:
    """Whether transformers reads it from quantised weights, or forethought does."""
    return getattr(module.config, "quantization_config", None) is not None or is_quantised(module)


def _adding(adapter: nn.Module) -> Any:
    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + adapter(args[0])

    return hook


def _sizes(layer: nn.Module) -> tuple[int, int]:
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _key(name: str) -> str:
    return name.replace(".", "/")


_BEYOND_SDPA = frozenset({Capability.SOFTCAP, Capability.SINKS})


@dataclass(frozen=True, slots=True)
class BackboneOutput:
    """States and logits of R texts of W tokens."""

    states: Tensor
    """``[R, W, hidden]`` after the final norm, in the model's dtype."""
    logits: Tensor
    """``[R, W, vocab]`` in the model's dtype."""


def check_adaptable(teacher: Teacher) -> None:
    """Raises ModelError as ``LoraAdapters``, and for recurrent layers, which are computed over a
    storage and without gradients.
    """
    _adapted_layers(teacher.module)
    if teacher.lm.state_bytes:
        raise ModelError(
            "the model cannot be adapted",
            f"{type(teacher.module).__name__} has recurrent layers",
            "Train heads for it as it is: forethought train medusa",
        )


class Backbone:
    """A teacher's model and its adapters. Raises ModelError as ``check_adaptable``.

    Args:
        teacher: loaded with ``fuse=False``; its model stays the original.
        rank, alpha: see :class:`~forethought.training.backbone.LoraAdapters`.
    """

    def __init__(self, teacher: Teacher, rank: int, alpha: float) -> None:
        check_adaptable(teacher)
        self._teacher, self._module = teacher, teacher.module
        self.adapters = LoraAdapters(self._module, rank, alpha)
        sdpa = getattr(self._module, "_supports_sdpa", False) and all(
            _BEYOND_SDPA.isdisjoint(layer.needs()) for layer in teacher.lm.traits.layers
        )
        self._attention = "sdpa" if sdpa else "eager"

    def original(self, tokens: Tensor) -> BackboneOutput:
        """Read texts, int64 ``[R, W]``, padded at their ends, as the original does; without
        gradients.
        """
        with torch.no_grad():
            return self._read(tokens)

    def adapted(self, tokens: Tensor) -> BackboneOutput:
        """Read texts as the adapted model does, with gradients for the adapters."""
        with self.adapters.attached():
            return self._read(tokens)

    def _read(self, tokens: Tensor) -> BackboneOutput:
        states: list[Tensor] = []

        def keep_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states.append(output[0])

        with ExitStack() as open_:
            open_.enter_context(self._differentiable())
            hook = decoder_of(self._module).register_forward_hook(keep_output)
            open_.callback(hook.remove)
            all_ones = torch.ones_like(tokens)  # causal: padding comes after all that counts
            output = self._module(input_ids=tokens, attention_mask=all_ones, use_cache=False)
        return BackboneOutput(states[0], output.logits)

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        """Inside, transformers' own attention replaces attention over pages."""
        self._module.set_attn_implementation(self._attention)
        try:
            yield
        finally:
            self._module.set_attn_implementation(ATTENTION)

    def save(self, directory: Path) -> None:
        """Write the adapted model, with the target's tokenizer, as a Hugging Face directory."""
        weights = {**self._module.state_dict(), **self.adapters.merged()}
        with without_progress_bars():
            self._module.save_pretrained(directory, state_dict=weights)
        for file in directory.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors makes files that only their owner can read
        self._teacher.tokenizer.hf.save_pretrained(directory)
