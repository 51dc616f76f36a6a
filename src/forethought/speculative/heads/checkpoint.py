"""The directory of a published head, ``config.json`` and tensors: read completely or refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forethought.errors import ModelError
from forethought.model_dir import check_model_dir
from forethought.saved_file import save_text, saving

_FORMATS = ("*.safetensors", "pytorch_model*.bin", "*.pt")


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
        try:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            files = next(found for form in _FORMATS if (found := sorted(directory.glob(form))))
            tensors: dict[str, Tensor] = {}
            for file in files:
                tensors |= _load(file)
        except StopIteration:
            raise refused(directory, f"it has no weights ({', '.join(_FORMATS)})") from None
        except Exception as error:  # json, torch and safetensors raise anything
            raise refused(directory, str(error).split("\n")[0]) from error
        return cls(directory, config, tensors)

    def write(self) -> None:
        """Create the directory with ``config.json`` and ``model.safetensors``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.config, indent=2) + "\n"
        save_text(self.directory / "config.json", text, "config.json of a head")
        kept = {name: x.detach().cpu().contiguous() for name, x in self.tensors.items()}
        weights = self.directory / "model.safetensors"
        with saving(weights, "weights of a head") as file:
            save_file(kept, file, metadata={"format": "pt"})
        weights.chmod(0o644)

    def fill(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors``, under the module's own names, into all parameters and buffers.

        Raises:
            ModelError: one is missing, unexpected, or of another shape.
        """
        self.expect_fit(tensors, module.state_dict())
        module.load_state_dict(dict(tensors))

    def expect_fit(self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Refuse the checkpoint unless ``tensors`` have the names and shapes of ``own``."""
        self.expect_none(set(own) - set(tensors), "lacks")
        self.expect_none(set(tensors) - set(own), "has unexpected")
        shapes = [
            f"{name} {list(tensors[name].shape)}, not {list(own[name].shape)}"
            for name in own
            if tensors[name].shape != own[name].shape
        ]
        self.expect_none(shapes, "has the wrong shape for")

    def expect_none(self, names: Collection[str], trouble: str) -> None:
        """Refuse the checkpoint if there are ``names``."""
        if names:
            first = sorted(names)[:3]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise refused(self.directory, f"its checkpoint {trouble} {', '.join(first)}{more}")


def refused(directory: Path, why: str, fix: str = "") -> ModelError:
    """The error that says why a head cannot be loaded."""
    return ModelError(
        f"cannot load the head in {directory}", why, fix or "Check that the directory is complete"
    )


def _load(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        loaded: dict[str, Tensor] = load_file(file)
        return loaded
    stored: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return stored
