"""The tensors of a checkpoint by name, each read when it is asked for: of safetensors files, or of
a GGUF file under the names that transformers gives them.

What is asked for with a call is read from the files that the call opens, and nothing stays mapped
but the blocks of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from forethought.gguf.block_type import BlockType
from forethought.gguf.file import GgufFile, TensorInfo
from forethought.gguf.tensor_names import StoredName, tensor_names
from forethought.model.block_weight import BlockWeight
from forethought.model.dequantize import dequantize
from forethought.model.loaded_weights import check_values
from forethought.model_dir import gguf_files, read_json

PLAIN = {BlockType.F32: torch.float32, BlockType.F16: torch.float16, BlockType.BF16: torch.bfloat16}
"""Types whose blocks are single weights."""
_DTYPES = ("F32", "BF16", "F16")
"""Of safetensors."""


class CheckpointTensors(Protocol):
    """The tensors of a checkpoint."""

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        ...

    @property
    def has_blocks(self) -> bool:
        """Whether any weight is quantised in the files."""
        ...

    def read(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor | BlockWeight]:
        """The tensors, in ``dtype`` or in their blocks; ModelError for NaN or infinity."""
        ...


def tensors_of(directory: Path, rounds_input: bool) -> CheckpointTensors | None:
    """The tensors of a model directory; None: it has other files, or other dtypes. ``rounds_input``
    is as of :class:`GgufTensors`.
    """
    if gguf_files(directory) is not None:
        return GgufTensors(directory, rounds_input)
    files = _safetensors_files(directory)
    if files is None or not _has_dtypes(directory, files):
        return None
    return SafetensorsTensors(directory, files)


def _safetensors_files(directory: Path) -> dict[str, str] | None:
    """The name of the file of each tensor; None: they are not safetensors."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists():
        with safe_open(directory / "model.safetensors", "pt") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")
    return dict(read_json(index)["weight_map"]) if index.exists() else None


def _has_dtypes(directory: Path, files: Mapping[str, str]) -> bool:
    """Whether all tensors are of ``_DTYPES``."""
    for file_name in {*files.values()}:
        with safe_open(directory / file_name, "pt") as file:
            if any(file.get_slice(name).get_dtype() not in _DTYPES for name in file.keys()):  # noqa: SIM118
                return False
    return True


class SafetensorsTensors:
    """Of ``*.safetensors``.

    Args:
        files: name of the file in ``directory`` of each tensor.
    """

    has_blocks = False

    def __init__(self, directory: Path, files: Mapping[str, str]) -> None:
        self._directory, self._files = directory, files
        self.names = frozenset(files)

    def read(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor | BlockWeight]:
        """See :class:`CheckpointTensors`."""
        tensors = dict[str, Tensor]()
        wanted = list(names)
        for file_name in dict.fromkeys(self._files[name] for name in wanted):
            with safe_open(self._directory / file_name, "pt") as file:
                for name in wanted:
                    if self._files[name] == file_name:
                        tensors[name] = file.get_tensor(name)
        check_values(tensors.items(), self._directory, "model")
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}


class GgufTensors:
    """Of a GGUF file.

    Args:
        rounds_input: its blocks are multiplied by activations in 8 bits.
    """

    def __init__(self, directory: Path, rounds_input: bool) -> None:
        paths = gguf_files(directory)
        assert paths is not None
        self._directory, self._rounds_input = directory, rounds_input
        self.file = GgufFile.open(paths)
        self._stored = tensor_names(read_json(directory / "config.json"), self.file)
        self.names = frozenset(self._stored)

    @cached_property
    def has_blocks(self) -> bool:
        """See :class:`CheckpointTensors`."""
        types = {self.file.tensors[stored.name].type for stored in self._stored.values()}
        return bool(types - {*PLAIN})

    def read(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor | BlockWeight]:
        """See :class:`CheckpointTensors`."""
        return {name: self._read(name, dtype) for name in names}

    def _read(self, name: str, dtype: torch.dtype) -> Tensor | BlockWeight:
        stored = self._stored[name]
        info = self.file.tensors[stored.name]
        blocks = _in_rotary_order(self._blocks(info), stored.num_heads)
        if len(info.shape) == 2 and BlockWeight.takes(info.type):
            weight = BlockWeight(blocks, info.type, dtype, self._rounds_input)
            weight.check_finite(name, self._directory)
            return weight
        plain = PLAIN.get(info.type)
        values = dequantize(blocks, info.type) if plain is None else blocks.view(plain)
        values = values.reshape(info.shape).to(dtype, copy=True) + stored.adds
        check_values([(name, values)], self._directory, "model")
        return values

    def _blocks(self, info: TensorInfo) -> Tensor:
        """uint8 ``[rows, bytes of a row]``, of the mapped file."""
        raw = torch.frombuffer(self.file.raw(info.name), dtype=torch.uint8)
        return raw.view(-1, info.type.row_bytes(info.shape[-1]))


def _in_rotary_order(blocks: Tensor, num_heads: int | None) -> Tensor:
    """Rows of a projection whose heads were written with rotated pairs side by side, as
    transformers has them: the first of all pairs, then the second of all.
    """
    if num_heads is None:
        return blocks
    return blocks.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
