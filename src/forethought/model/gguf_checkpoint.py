"""GGUF files as modules of transformers: architectures that ``checkpoint_module.py`` does not take,
and devices other than a CPU.

Linear layers and experts keep their blocks (``BlockWeight``); all else is dequantised.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forethought.errors import ModelError
from forethought.model.block_weight import BlockWeight
from forethought.model.checkpoint_tensors import GgufTensors
from forethought.model.quantization import QuantizedLinear
from forethought.model.quantized_checkpoint import HEAD, empty_module, load_others, untie
from forethought.model.quantized_experts import QuantizedExperts, is_readable, weights_of

_EMBEDDING = "model.embed_tokens.weight"


def read(
    directory: Path, config: Any, dtype: torch.dtype, rounds_input: bool, **options: Any
) -> PreTrainedModel:
    """The module of a directory that names a GGUF file.

    Args:
        config: its transformers configuration.
        dtype: of activations and of the weights that have no blocks.
        rounds_input: blocks are multiplied by activations in 8 bits.
        **options: of ``AutoModelForCausalLM.from_config``.

    Raises:
        ModelError: tensors that are missing, of the wrong shape, not explained, or not finite.
    """
    config, tensors = copy.deepcopy(config), _Tensors(directory, dtype, rounds_input)
    blocks = tensors.blocks(f"{HEAD}.weight" if tensors.has(f"{HEAD}.weight") else _EMBEDDING)
    if blocks is not None:
        untie(config)  # the embedding is dequantised, and the output projection is not
    module = empty_module(directory, config, dtype, **options)
    for name, part in list(module.named_modules()):
        if type(part) is nn.Linear and (weight := tensors.blocks(f"{name}.weight")) is not None:
            _place(module, name, weight, tensors)
        elif is_readable(part):
            _place_experts(module, name, tensors)
    if blocks is not None:
        module.set_submodule(HEAD, QuantizedLinear(blocks))
    module.tie_weights()
    load_others(module, tensors, dtype)
    return module


def _place(module: nn.Module, name: str, weight: BlockWeight, tensors: _Tensors) -> None:
    linear = module.get_submodule(name)
    if weight.shape != linear.weight.shape:
        why = f"{name} is {list(weight.shape)}, not {list(linear.weight.shape)}"
        raise _refused(tensors.directory, why)
    bias = tensors[f"{name}.bias"] if linear.bias is not None else None
    module.set_submodule(name, QuantizedLinear(weight, bias))


def _place_experts(module: nn.Module, name: str, tensors: _Tensors) -> None:
    """Keep the blocks of a module of experts, if all of its weights have blocks that stay."""
    experts = module.get_submodule(name)
    weights = weights_of(experts)
    gate_up, down = (tensors.experts(f"{name}.{part}") for part in weights)
    if gate_up is None or down is None:
        return
    for part in weights if experts.has_bias else ():
        bias = nn.Parameter(tensors[f"{name}.{part}_bias"], requires_grad=False)
        setattr(experts, f"{part}_bias", bias)
    tensors.have_read(f"{name}.{part}" for part in weights)
    module.set_submodule(name, QuantizedExperts.holding(experts, gate_up, down))


class _Tensors:
    """The weights of linears in their blocks, and all others dequantised (``NamedTensors``)."""

    def __init__(self, directory: Path, dtype: torch.dtype, rounds_input: bool) -> None:
        self.directory, self._dtype = directory, dtype
        self._source = GgufTensors(directory, rounds_input)
        self._unread = set(self._source.names)

    def has(self, name: str) -> bool:
        return name in self._source.names

    def __getitem__(self, name: str) -> Tensor:
        if not self.has(name):
            raise _refused(self.directory, f"its file lacks {name}")
        self._unread.discard(name)
        return self._source.tensor(name, self._dtype)

    def blocks(self, name: str) -> BlockWeight | None:
        """The weight of a linear; None: it has no blocks, or is not there."""
        if not self.has(name):
            return None
        weight = self._source.read([name], self._dtype)[name]
        if not isinstance(weight, BlockWeight):
            return None
        self._unread.discard(name)
        return weight

    def experts(self, name: str) -> list[BlockWeight] | None:
        """The weights of experts, see ``GgufTensors.experts``; None: they are not there either."""
        return self._source.experts(name, self._dtype) if self.has(name) else None

    def have_read(self, names: Iterable[str]) -> None:
        """These are placed."""
        self._unread.difference_update(names)

    def unread(self) -> list[str]:
        return sorted(self._unread)


def _refused(directory: Path, why: str) -> ModelError:
    return ModelError(
        f"cannot load the model in {directory}", why, "Check that the file is of one whole model"
    )
