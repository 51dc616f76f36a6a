"""The directory of a published head, ``config.json`` and tensors: read completely or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forethought.errors import ModelError
from forethought.model.loaded_weights import check_values
from forethought.model_dir import (
    check_config,
    check_model_dir,
    check_weight_files,
    first_words,
    read_json,
)
from forethought.saved_file import save_text, saving

Module = TypeVar("Module", bound=nn.Module)
TOKEN_MAP = "token_map"
"""Name of a draft vocabulary in a checkpoint: int64, the target's id of each logit."""
_FORMATS = ("*.safetensors", "pytorch_model*.bin", "*.pt")
OTHER_KIND = "Check that it is a head of this kind, and that the directory is complete"
OTHER_MODEL = "Give a head that was trained for this model"
"""What to do about a checkpoint whose tensors are others, or of another size."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head as stored on disk.

    Attributes:
        directory: where it was read.
        config: what its ``config.json`` says.
        tensors: on the host, under the names that its author gave them.
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, directory: Path) -> Checkpoint:
        """Read ``config.json`` and all weights: safetensors, or else ``pytorch_model*.bin``.

        Raises:
            ModelError: one of them is missing or broken.
        """
        check_model_dir(directory, "head")
        config = read_json(directory / "config.json", "head")
        check_config(config, directory, "head")
        forms = (sorted(directory.glob(form)) for form in _FORMATS)
        files = next((files for files in forms if files), None)
        if files is None:
            raise refused(directory, f"it has no weights ({', '.join(_FORMATS)})")
        check_weight_files(directory, "head")
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= _load(file)
        check_values(tensors.items(), directory, "head")
        return cls(directory, config, tensors)

    def write(self) -> None:
        """Create the directory with ``config.json`` and ``model.safetensors``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.config, indent=2) + "\n"
        save_text(self.directory / "config.json", text, "config.json of a head")
        tensors = {name: x.detach().cpu().contiguous() for name, x in self.tensors.items()}
        weights = self.directory / "model.safetensors"
        with saving(weights, "weights of a head") as file:
            save_file(tensors, file, metadata={"format": "pt"})
        weights.chmod(0o644)

    def build(self, make: Callable[[], Module], tensors: Mapping[str, Tensor]) -> Module:
        """The module that ``make`` makes, with ``tensors`` as its parameters and buffers.

        Args:
            make: called where tensors take no memory, and again once they have been compared.
            tensors: under the module's own names.

        Raises:
            ModelError: one is missing, unexpected, or of another shape.
        """
        with torch.device("meta"):
            shapes = make().state_dict()
        self.expect_fit(tensors, shapes)
        module = make()
        module.load_state_dict(dict(tensors))
        return module

    def expect_fit(self, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Refuse the checkpoint unless ``tensors`` have the names and shapes of ``expected``."""
        self.expect_none(set(expected) - set(tensors), "lacks")
        self.expect_none(set(tensors) - set(expected), "has unexpected")
        shapes = [
            f"{name} {list(tensors[name].shape)}, not {list(expected[name].shape)}"
            for name in expected
            if tensors[name].shape != expected[name].shape
        ]
        self.expect_none(shapes, "has the wrong shape for", OTHER_MODEL)

    def expect_none(self, names: Collection[str], trouble: str, fix: str = OTHER_KIND) -> None:
        """Refuse the checkpoint if there are ``names``."""
        if names:
            first = sorted(names)[:3]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            why = f"its checkpoint {trouble} {', '.join(first)}{more}"
            raise refused(self.directory, why, fix)


def pop_token_map(tensors: dict[str, Tensor], directory: Path, vocab: int) -> Tensor | None:
    """Take the draft vocabulary out of the tensors of a checkpoint: int64 ``[D]``; None: there is
    none. Raises ModelError if it is no list of ids below ``vocab``.
    """
    ids = tensors.pop(TOKEN_MAP, None)
    if ids is None:
        return None
    if ids.ndim != 1 or not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise refused(directory, f"its {TOKEN_MAP} is no list of ids below {vocab}")
    return ids.long()


def refused(directory: Path, why: str, fix: str = "") -> ModelError:
    """The error that says why a head cannot be loaded."""
    return ModelError(
        f"cannot load the head in {directory}", why, fix or "Check that the directory is complete"
    )


def _load(file: Path) -> dict[str, Tensor]:
    """The tensors of a file; ``ModelError`` if it cannot be read or holds anything else."""
    try:
        if file.suffix == ".safetensors":
            loaded: dict[str, Tensor] = load_file(file)
            return loaded
        stored: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise anything
        raise refused(file.parent, f"{file.name} cannot be read ({first_words(error)})") from error
    if not isinstance(stored, dict) or not all(isinstance(x, Tensor) for x in stored.values()):
        raise refused(file.parent, f"{file.name} holds no tensors by name")
    return stored
