"""Named KV snapshots of sessions: safetensors files in ``snapshot_dir``.

::

    <name>.safetensors
        token_ids                  int64 [tokens]
        kv.<i>                     as KvStorage.read_slots: [layers, stored, kv_heads, dim]
        hidden.<layer>.<layer>...  the target's hidden states that drafters read: [stored, width]
        state.<name>               what recurrent layers keep after the last token
        metadata                   format, model, dtype, layers, digest, and of an adapter, with
                                   which it was computed, name and digest

A snapshot is of one model: ``model`` is a hash of its config and of its weight files, ``layers``
the shapes of its KV, and a snapshot whose ``model``, ``dtype`` or ``layers`` differ is refused.
``digest`` is a hash of all tensors, so that a file which was damaged is found out. A file appears
under its name when it is complete, in the place of an older one of the same name.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forethought.config.sampling import SamplingParams
from forethought.engine.snapshot import SequenceSnapshot
from forethought.errors import ParameterError, SnapshotError, UnknownNameError
from forethought.kv.storage import KvStorage
from forethought.model_dir import gguf_files
from forethought.saved_file import replace_file

PREFILL = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
"""The shortest generation, of a fork that is to be computed before it is saved."""
FORMAT = "forethought.kv_snapshot.1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_SUFFIX = ".safetensors"
_STATE = "state."
_CHUNK = 2**22
"""Bytes of a file that are read and hashed at once."""


class SnapshotStore:
    """The snapshots in one directory, for one model; safe to use from any thread.

    The first method that needs the hash of the model reads the weights.

    Args:
        directory: None: snapshots are refused.
        storage: of the model's keys and values.
        quantization: of its weights at load; None: as the checkpoint has them.
    """

    def __init__(
        self,
        directory: Path | None,
        model_dir: Path,
        storage: KvStorage,
        quantization: str | None = None,
    ) -> None:
        self._directory, self._model_dir = directory, model_dir
        self._dtype = _dtype_of(storage)
        self._quantization = quantization or "none"
        self._layers = [
            [shape.kv_heads, shape.key_dim, shape.value_dim] for shape in storage.whole_layers
        ]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the model's config and weights: of whole files, in the order of their names."""
        return _hash_of_files(self._model_dir)

    def path(self, name: str) -> Path:
        """The file of a name.

        Raises ParameterError if there is no directory, or the name is not a plain file name.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ParameterError(
                "invalid name of a snapshot",
                f"got {name!r}",
                "Use up to 100 letters, digits, '.', '_' and '-', the first a letter or a digit",
            )
        return self._checked_directory() / f"{name}{_SUFFIX}"

    def names(self) -> list[str]:
        """The names of all snapshots in the directory, also those of other models.

        Raises ParameterError if there is no directory.
        """
        files = self._checked_directory().glob(f"*{_SUFFIX}")
        return sorted(f.name.removesuffix(_SUFFIX) for f in files if not f.name.startswith("."))

    def save(self, name: str, snapshot: SequenceSnapshot) -> Path:
        """Write a snapshot, in the place of one that has the name.

        Raises ParameterError as ``path``, and SnapshotError if the file cannot be written.
        """
        path, tensors = self.path(name), _tensors(snapshot)
        metadata = {**self._identity(), "digest": _digest(tensors), **_adapter_of(snapshot)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as written:
                file = Path(written) / path.name
                save_file(tensors, file, metadata)
                replace_file(file, path)
        except (OSError, SafetensorError) as error:
            raise SnapshotError(
                f"cannot write the snapshot {name!r}",
                _first_line(error),
                f"Check that {path.parent} is a directory with enough space that can be written to",
            ) from error
        return path

    def load(self, name: str) -> SequenceSnapshot:
        """Read a snapshot and check it. Raises as ``path``, UnknownNameError if there is none of
        this name, SnapshotError if it is damaged or of another model, dtype or layout.
        """
        path = self.path(name)
        if not path.is_file():
            raise UnknownNameError("snapshot", name, self.names())
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                self._check(name, metadata)
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise _damaged(name, _first_line(error)) from error
        if _digest(tensors) != metadata.get("digest"):
            raise _damaged(name, "its tensors are not those that were saved")
        if not {"token_ids", "kv.0"} <= tensors.keys():
            raise _damaged(name, "it lacks tokens or keys and values")
        try:
            return _snapshot(tensors, metadata)
        except ValueError as error:
            raise _damaged(name, _first_line(error)) from error

    def _checked_directory(self) -> Path:
        if self._directory is None:
            raise ParameterError(
                "snapshots have no directory",
                "snapshot_dir is not set",
                'Give one to the model: LLM(..., snapshot_dir="snapshots")',
            )
        return self._directory

    def _identity(self) -> dict[str, str]:
        """What a snapshot must have in common with the model that restores it."""
        return {
            "format": FORMAT,
            "dtype": self._dtype,
            "layers": json.dumps(self._layers),
            "quantization": self._quantization,
            "model": self.fingerprint,
        }

    def _check(self, name: str, metadata: Mapping[str, str]) -> None:
        for key, expected in self._identity().items():
            value = metadata.get(key)
            if value != expected:
                raise SnapshotError(
                    f"the snapshot {name!r} does not fit this model",
                    f"its {key} is {_short(value)}, and that of the model {_short(expected)}",
                    "Restore it with the model and dtypes that it was saved with, or save it anew",
                )


def _dtype_of(storage: KvStorage) -> str:
    """Of hidden states, and of keys and values where they are held in another one."""
    computed, stored = (
        str(dtype).removeprefix("torch.") for dtype in (storage.dtype, storage.stored_dtype)
    )
    return computed if stored == computed else f"{computed} with keys and values in {stored}"


def _tensors(snapshot: SequenceSnapshot) -> dict[str, Tensor]:
    tensors = {"token_ids": torch.tensor(snapshot.token_ids, dtype=torch.int64)}
    tensors |= {f"kv.{number}": stack for number, stack in enumerate(snapshot.kv)}
    for layer_ids, states in snapshot.hidden_states.items():
        tensors[".".join(["hidden", *map(str, layer_ids)])] = states
    tensors |= {f"{_STATE}{name}": tensor for name, tensor in snapshot.state.items()}
    return {key: tensor.contiguous() for key, tensor in tensors.items()}


def _adapter_of(snapshot: SequenceSnapshot) -> dict[str, str]:
    if not snapshot.adapter_digest:
        return {}
    digest = snapshot.adapter_digest.hex()
    return {"adapter": snapshot.adapter, "adapter_digest": digest}


def _snapshot(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SequenceSnapshot:
    num_stacks = sum(key.startswith("kv.") for key in tensors)
    hidden = [key for key in tensors if key.startswith("hidden.")]
    return SequenceSnapshot(
        tensors["token_ids"].tolist(),
        [tensors[f"kv.{number}"] for number in range(num_stacks)],
        {tuple(map(int, key.split(".")[1:])): tensors[key] for key in hidden},
        metadata.get("adapter", ""),
        bytes.fromhex(metadata.get("adapter_digest", "")),
        {key.removeprefix(_STATE): x for key, x in tensors.items() if key.startswith(_STATE)},
    )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _hash_of_files(directory: Path) -> str:
    """A hash of the files that decide what a model computes."""
    digest = blake2b(digest_size=16)
    patterns = ("config.json", "*.safetensors", "*.bin", "*.pt")
    try:
        files = {file for pattern in patterns for file in directory.glob(pattern)}
        for file in [*sorted(files), *(gguf_files(directory) or ())]:
            digest.update(f"{file.name} {os.path.getsize(file)}\n".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
    except OSError as error:
        raise SnapshotError(
            f"cannot read the model in {directory}",
            _first_line(error),
            "Snapshots need its files, to tell one model from another",
        ) from error
    return digest.hexdigest()


def _damaged(name: str, why: str) -> SnapshotError:
    return SnapshotError(
        f"the snapshot {name!r} is damaged", why, "Delete its file, and save it anew"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
