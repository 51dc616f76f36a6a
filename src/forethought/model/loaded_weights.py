"""Weights that transformers loads, checked before anything is computed with them.

transformers fills what is missing or misshapen at random, leaves out what it does not expect, and
only logs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forethought.errors import ModelError
from forethought.transformers_loading import one_module_at_a_time

_NUM_SHOWN = 3
_FIX = "Check that config.json and the weights are of one model, and all of it"
_AROUND = re.compile(
    r"(^|[._])mtp[._]|(^|\.)(v_head|vision\w*|visual|audio\w*|image\w*|multi_modal\w*)\.|inv_freq$"
)
"""Tensors that may be beside those of a language model: modules that predict further tokens, a
value head, other modalities, and frequencies, which are computed."""
_MTP_PART = re.compile(r"^(.*\.layers\.\d+\.)(enorm|hnorm|eh_proj|shared_head)\.")
"""What a layer has that is such a module, numbered on from the others."""


def broken(directory: Path, why: str, fix: str = "") -> ModelError:
    """The refusal of a directory that is not complete, or has something wrong."""
    return ModelError(
        f"cannot load the model in {directory}", why, fix or "Check that the directory is complete"
    )


def unsupported(directory: Path, why: str, fix: str = "") -> ModelError:
    """The refusal of a model that is not served here."""
    return ModelError(
        f"the model in {directory} is not supported",
        why,
        fix or "Choose another causal language model",
    )


def check_shapes(
    make: Callable[[], nn.Module],
    num_layers: int,
    shapes: Mapping[str, tuple[int, ...]],
    directory: Path,
    kind: str = "model",
) -> None:
    """Raises ModelError, before memory is taken, for weights that do not fit the sizes of a config.

    Args:
        make: makes the module; called where tensors take no memory.
        num_layers: of the module.
        shapes: of the stored tensors, by name. Those that transformers renames are not compared.
        kind: what messages call the content of ``directory``.
    """
    if num_layers > len(shapes):
        raise ModelError(
            f"cannot load the {kind} in {directory}",
            f"num_hidden_layers of its config.json is {num_layers}, and its checkpoint has "
            f"{len(shapes)} tensors",
            _FIX,
        )
    with one_module_at_a_time(), torch.device("meta"):
        expected = make().state_dict()
    wrong = (
        f"{name} {list(shapes[name])}, not {list(tensor.shape)}"
        for name, tensor in expected.items()
        if shapes.get(name, tensor.shape) != tensor.shape
    )
    _refuse(directory, kind, "has the wrong shape for", wrong)


def check_report(report: Mapping[str, Any], directory: Path, kind: str = "model") -> None:
    """Raises ModelError for tensors that are missing, of another shape, or unexpected, by the
    ``loading_info`` of transformers with ``ignore_mismatched_sizes``.
    """
    _refuse(directory, kind, "lacks", map(str, report["missing_keys"]))
    shapes = (
        f"{name} {list(stored)}, not {list(expected)}"
        for name, stored, expected in report.get("mismatched_keys", ())
    )
    _refuse(directory, kind, "has the wrong shape for", shapes)
    names = sorted(map(str, report.get("unexpected_keys", ())))
    mtp = tuple({match[1] for name in names if (match := _MTP_PART.match(name))})
    strays = [n for n in names if not _AROUND.search(n) and not n.startswith(mtp)]
    _refuse(directory, kind, "has tensors that its config.json does not explain:", strays)


def check_values(tensors: Iterable[tuple[str, Tensor]], directory: Path, kind: str) -> None:
    """Raises ModelError for NaN or infinity in one of the tensors; those that are not of floating
    point, or of 8 bits, are left out.
    """
    broken = (name for name, tensor in tensors if not _is_finite(tensor))
    _refuse(directory, kind, "has numbers that are NaN or infinite in", broken)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.numel() or not tensor.is_floating_point() or tensor.itemsize < 2:
        return True
    with torch.inference_mode():
        return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor.detach()))


def _refuse(directory: Path, kind: str, trouble: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        more = f" and {len(listed) - _NUM_SHOWN} more" if len(listed) > _NUM_SHOWN else ""
        raise ModelError(
            f"cannot load the {kind} in {directory}",
            f"its checkpoint {trouble} {', '.join(listed[:_NUM_SHOWN])}{more}",
            _FIX,
        )
