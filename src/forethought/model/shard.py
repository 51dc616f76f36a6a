"""Slices of a model's weights, one for each rank of tensor parallelism; which models can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forethought.errors import ModelError
from forethought.model import backends
from forethought.model.attention.layer_profile import LayerProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Shard(Protocol):
    """One of ``size`` slices of a model's weights."""

    @property
    def size(self) -> int:
        """How many slices there are."""
        ...

    def cut(self, module: PreTrainedModel) -> None:
        """Replace the linears of a module that ``is_fusable`` by their slices."""

    def profiles(self, layers: Sequence[LayerProfile]) -> tuple[LayerProfile, ...]:
        """What the slices of layers need of attention."""
        ...


def check_shardable(path: Path, size: int, trust_remote_code: bool = False) -> None:
    """Raises ModelError, with the reason, if by its config a model cannot be cut into ``size``
    shards.
    """
    from forethought.model.transformers_module import quant_method, read_config

    config = read_config(path, trust_remote_code)
    method = quant_method(path, config)
    why = backends.tensor_parallel().refusal(config, size)
    if method is not None:
        why = f"its weights are quantised, by {method}"
    if why is not None:
        raise _refusal(path, size, why)


def cut(
    module: PreTrainedModel, layers: tuple[LayerProfile, ...], shard: Shard, directory: Path
) -> tuple[LayerProfile, ...]:
    """Cut a module to a shard, and return what its layers then need of attention. Raises ModelError
    for a module that is not ``is_fusable``.
    """
    from forethought.model.llama.network import is_fusable

    if not is_fusable(module):
        why = "its modules are not those of the fused forward"
        raise _refusal(directory, shard.size, why)
    shard.cut(module)
    return shard.profiles(layers)


def _refusal(directory: Path, size: int, why: str) -> ModelError:
    return ModelError(
        f"tensor_parallel_size={size} is not possible for the model in {directory}",
        why,
        "Leave it out, or choose a size or a model that fit",
    )
