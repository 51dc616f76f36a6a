"""How a model's files say that its hidden states become an embedding.

Directories of sentence-transformers name the parts of a model in ``modules.json`` and the pooling
in ``1_Pooling/config.json``. Other models have the mean of their last hidden states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forethought.engine.embedding import Pooling
from forethought.errors import ModelError
from forethought.model_dir import read_json

_FOLDER = "1_Pooling"
_COMPUTED = ("Transformer", "Pooling", "Normalize")
"""Parts of a model that are computed here."""
_PREFIX = "pooling_mode_"
_POOLINGS: Mapping[str, Pooling] = {
    "mean_tokens": "mean",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",  # of the same direction
    "mean_sqrt_len": "mean",
    "lasttoken": "last",
    "cls_token": "first",
    "cls": "first",
}
"""Names of sentence-transformers; the length of an embedding is always 1 here."""


def read_pooling(directory: Path) -> Pooling:
    """The pooling of the model in a directory; ``"mean"`` where its files name none.

    Raises ModelError if it has parts, or a pooling, that are not computed here.
    """
    modules, folder = directory / "modules.json", _FOLDER
    for part in _parts(modules) if modules.is_file() else ():
        kind = str(part.get("type")).rpartition(".")[2]
        if kind not in _COMPUTED:
            raise _refused(directory, f"its modules.json has the part {kind:.80}")
        if kind == "Pooling":
            folder = str(part.get("path"))
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise _refused(directory, "its modules.json names a path outside of it")
    file = directory / folder / "config.json"
    return _pooling(directory, read_json(file)) if file.is_file() else "mean"


def _parts(file: Path) -> list[dict[str, Any]]:
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(file.parent, f"modules.json is no JSON: {error}") from error
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise _refused(file.parent, "modules.json is no list of parts")
    return parts


def _pooling(directory: Path, written: Mapping[str, Any]) -> Pooling:
    names = [name.removeprefix(_PREFIX) for name in written if name.startswith(_PREFIX)]
    chosen = [name for name in names if written[_PREFIX + name] is True]
    if isinstance(mode := written.get("pooling_mode"), str):
        chosen.append(mode)
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise _refused(directory, f"its pooling is {' and '.join(chosen) or 'none'}"[:200])
    return _POOLINGS[chosen[0]]


def _refused(directory: Path, why: str) -> ModelError:
    return ModelError(
        f"the model in {directory} gives no embeddings",
        why,
        f"Here are {', '.join(_COMPUTED)}, and the poolings {', '.join(_POOLINGS)}",
    )
