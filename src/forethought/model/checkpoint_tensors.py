"""The tensors of a checkpoint by name, each read when it is asked for: of safetensors files, or of
a GGUF file under the names that transformers gives them.

What is asked for with a call is read from the files that the call opens, and nothing stays mapped
but the blocks of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from forethought.gguf.block_type import BlockType
from forethought.gguf.file import GgufFile
from forethought.gguf.stored_name import HeadGroups, StoredName
from forethought.gguf.tensor_names import tensor_names
from forethought.model.block_weight import BLOCK_TYPES, BlockWeight
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
        """The tensors in ``dtype``, from files that are opened for this call alone."""
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
        """Whether any tensor is of another type than ``PLAIN``."""
        types = {self.file.tensors[stored.name].type for stored in self._stored.values()}
        return bool(types - {*PLAIN})

    def read(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor | BlockWeight]:
        """Matrices of ``BLOCK_TYPES`` in their blocks, and all else in ``dtype``. The memory of
        blocks that were read before is given back.
        """
        self.file.give_back()
        return {name: self._read(name, dtype) for name in names}

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor, dequantised; raises ModelError for NaN or infinity."""
        stored = self._stored[name]
        stored_dtype = torch.float32 if stored.adds or stored.is_decay else dtype
        values = _in_turns(
            [self._values(part, stored, stored_dtype) for part in stored.parts], stored
        )
        values = values.transpose(-1, -2).contiguous() if stored.transposes else values
        if stored.head_groups is not None and stored.groups_columns:
            values = _grouped(values.transpose(0, -1), stored.head_groups).transpose(0, -1)
        values = values.reshape(stored.shape)
        if stored.is_decay:
            values = (-values).log()
        if stored.adds:
            values = values + stored.adds
        check_values([(name, values)], self._directory, "model")
        return values.to(dtype)

    def experts(self, name: str, dtype: torch.dtype) -> list[BlockWeight] | None:
        """The weight ``[out, in]`` of each expert in its blocks, in whatever layout the module has
        them; None: they have none that stay.
        """
        stored = self._stored[name]
        kind = self._block_type(stored)
        if kind is None:
            return None
        num_experts = self.file.tensors[stored.name].shape[0]
        rows = [self._blocks(part, stored).unflatten(0, (num_experts, -1)) for part in stored.parts]
        return [self._block_weight(name, blocks, kind, dtype) for blocks in _in_turns(rows, stored)]

    def _read(self, name: str, dtype: torch.dtype) -> Tensor | BlockWeight:
        stored = self._stored[name]
        kind = self._block_type(stored)
        if kind is None or len(stored.shape) != 2 or not stored.keeps_rows:
            return self.tensor(name, dtype)
        rows = [self._blocks(part, stored) for part in stored.parts]
        return self._block_weight(name, _in_turns(rows, stored), kind, dtype)

    def _block_type(self, stored: StoredName) -> BlockType | None:
        """That of the blocks of a weight; None: they do not stay, or its parts have several."""
        kinds = {self.file.tensors[part].type for part in stored.parts}
        return kinds.pop() if len(kinds) == 1 and kinds <= {*BLOCK_TYPES} else None

    def _block_weight(
        self, name: str, blocks: Tensor, kind: BlockType, dtype: torch.dtype
    ) -> BlockWeight:
        weight = BlockWeight(blocks, kind, dtype, self._rounds_input)
        if not weight.has_finite_scales():
            check_values([(name, torch.tensor(torch.nan))], self._directory, "model")
        return weight

    def _values(self, name: str, stored: StoredName, dtype: torch.dtype) -> Tensor:
        """A tensor of the file, dequantised and copied, its rows in the order of the module."""
        info = self.file.tensors[name]
        blocks, plain = self._blocks(name, stored), PLAIN.get(info.type)
        values = dequantize(blocks, info.type) if plain is None else blocks.view(plain)
        return values.to(dtype, copy=True).view(info.shape)

    def _blocks(self, name: str, stored: StoredName) -> Tensor:
        """uint8 ``[rows, bytes of a row]`` of the mapped file. A projection of heads that were
        written with the pairs that are rotated side by side gets the first of all pairs, then the
        second of all. Value heads come in the order of their key heads.
        """
        info, raw = self.file.tensors[name], self.file.raw(name)
        row_bytes = info.type.row_bytes(info.shape[-1])
        num_heads, groups = stored.permutes_heads, stored.head_groups
        moves_rows = num_heads is not None or (groups is not None and not stored.groups_columns)
        if moves_rows and len(info.shape) == 1:  # a bias, or a number per head
            row_bytes = info.type.num_bytes
        rows = torch.frombuffer(raw, dtype=torch.uint8).view(-1, row_bytes)
        if num_heads is not None:
            pairs = rows.view(num_heads, -1, 2, row_bytes)
            return pairs.transpose(1, 2).reshape(-1, row_bytes)
        return _grouped(rows, groups) if groups is not None and moves_rows else rows


def _grouped(rows: Tensor, groups: HeadGroups) -> Tensor:
    """Rows with the value heads of each key head together."""
    before, heads = rows[: groups.begin], rows[groups.begin :]
    heads = heads.unflatten(0, (groups.group_size, groups.num_groups, -1)).transpose(0, 1)
    return torch.cat([before, heads.flatten(0, 2)])


def _in_turns(parts: Sequence[Tensor], stored: StoredName) -> Tensor:
    """The rows of all parts, one after the other, or in turns."""
    dim = parts[0].dim() + stored.row_dimension
    if not stored.turns:
        return torch.cat([*parts], dim) if len(parts) > 1 else parts[0]
    rows = torch.cat([*parts], dim)
    count = rows.shape[dim] // sum(stored.turns)
    sections = rows.split([count * size for size in stored.turns], dim)
    turns = torch.cat([section.unflatten(dim, (count, -1)) for section in sections], dim + 1)
    return turns.flatten(dim, dim + 1)
