"""The directory that a GGUF file is to everything that takes a model's directory.

A *view* has the configuration and the tokenizer of the file, as a Hugging Face directory has them,
and in ``model.gguf.json`` where the file is. Weights are never copied. Views are in a cache, below
``$FORETHOUGHT_CACHE/gguf`` or ``~/.cache/forethought/gguf``, each under a digest of the file's
path, size and time of change: a file that changes gets another view. A view appears whole or not at
all, and may be deleted at any time.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forethought.errors import ModelError
from forethought.gguf.file import GgufFile, series_of

POINTER = "model.gguf.json"
"""The file of a view that says where the weights are."""
_VERSION = 1
"""Of what is written; a view of another one is not read."""
_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    POINTER,
)
_logger = logging.getLogger(__name__)


def view_of(path: Path, params: Mapping[str, Any] | None = None) -> Path:
    """The view of a GGUF file, made if it is not there yet.

    Args:
        path: of the file, or of one of a split series.
        params: settings of ollama, or advice of the model's card, for ``generation_config.json``.

    Raises ModelError for a file that cannot be read, or whose model is not supported.
    """
    paths = [Path(os.path.abspath(file)) for file in series_of(path)]
    pointer = {"version": _VERSION, "files": [_state(file) for file in paths]}
    identity = json.dumps([pointer, params or {}], sort_keys=True)
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    root = _cache_directory()
    if root is not None and _is_whole(root / name):
        return root / name
    contents = {**_contents(paths, params), POINTER: pointer}
    if root is not None:
        try:
            return _added(root, name, contents)
        except OSError as error:
            why = error.strerror or error
            _logger.warning("no view of %s is kept in %s: %s", paths[0].name, root, why)
    private = Path(tempfile.mkdtemp(prefix="forethought-gguf-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    _write(private, contents)
    return private


def weight_files(directory: Path) -> list[Path] | None:
    """The GGUF files that a directory is a view of, in their order; None: it is no view.

    Raises ModelError if the pointer cannot be read, a file is not there or has changed, or the
    directory has weights of its own.
    """
    pointer = directory / POINTER
    if not pointer.is_file():
        return None
    if weights := sorted(directory.glob("*.safetensors")):
        raise ModelError(
            f"cannot tell which model {directory} holds",
            f"it has {weights[0].name}, and {POINTER} says that its weights are in a GGUF file",
            f"Remove {POINTER} if the model is that of {weights[0].name}",
        )
    try:
        entries = json.loads(pointer.read_text(encoding="utf-8"))["files"]
        states = [(Path(entry["path"]), entry["size"], entry["mtime_ns"]) for entry in entries]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise _unusable(directory, f"its {POINTER} cannot be read ({error!r:.60})") from error
    if not states:
        raise _unusable(directory, f"its {POINTER} names no file")
    for path, *expected in states:
        state = _state(path)
        if [state["size"], state["mtime_ns"]] != expected:
            raise _unusable(directory, f"{path} has changed since")
    return [path for path, *_ in states]


def _unusable(directory: Path, why: str) -> ModelError:
    return ModelError(
        f"cannot load the model in {directory}", why, "Name the GGUF file itself, not this view"
    )


def _state(path: Path) -> dict[str, Any]:
    """What tells a state of a file from others; raises ModelError if there is no file."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(
            f"cannot read the GGUF file {path}", error.strerror or str(error), "Check the path"
        ) from error
    return {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _contents(paths: Sequence[Path], params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Name of a file of a view -> what it holds."""
    from forethought.gguf.generation_config import generation_config_of
    from forethought.gguf.metadata import Metadata
    from forethought.gguf.model_config import config_of
    from forethought.gguf.tensor_names import tensor_names
    from forethought.gguf.tokenizer import Vocabulary, tokenizer_files

    file = GgufFile.open(paths)
    config = config_of(file)
    tensor_names(config, file)
    vocabulary = Vocabulary(Metadata(file))
    return {
        "config.json": config,
        "generation_config.json": generation_config_of(vocabulary, params),
        **tokenizer_files(vocabulary),
    }


def _cache_directory() -> Path | None:
    """Where views are kept; None: there is no home directory."""
    root, home = os.environ.get("FORETHOUGHT_CACHE"), os.path.expanduser("~")
    if root:
        return Path(os.path.abspath(root), "gguf")
    return Path(home, ".cache", "forethought", "gguf") if os.path.isabs(home) else None


def _is_whole(directory: Path) -> bool:
    try:
        return all((directory / name).stat().st_size for name in _FILES)
    except OSError:
        return False


def _added(root: Path, name: str, contents: Mapping[str, Any]) -> Path:
    """Write a view beside its place, and move it there; raises OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    view, draft = root / name, Path(tempfile.mkdtemp(prefix="making-", dir=root))
    try:
        _write(draft, contents)
        if view.exists() and not _is_whole(view):
            os.rename(view, draft / "damaged")
        try:
            os.rename(draft, view)
        except OSError:
            if not _is_whole(view):  # else another process was faster
                raise
        shutil.rmtree(view / "damaged", ignore_errors=True)
        return view
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(directory: Path, contents: Mapping[str, Any]) -> None:
    for name, content in contents.items():
        text = json.dumps(content, ensure_ascii=False, indent=None if "tokenizer.j" in name else 2)
        (directory / name).write_text(f"{text}\n", encoding="utf-8")
