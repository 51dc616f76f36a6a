"""Models in the local store of ollama.

A name such as ``smollm2:135m`` is a manifest below ``manifests``, which lists layers: the GGUF
file, parameters for sampling, a chat template in the language of Go, a system prompt, a licence.
Each is a blob, a file named by its SHA-256. The store is ``$OLLAMA_MODELS``, ``~/.ollama/models``
or that of the system's service, and only read.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forethought.errors import ModelError

PREFIX = "ollama:"
_SERVICE = Path("/usr/share/ollama/.ollama/models")
_REGISTRY, _LIBRARY, _TAG = "registry.ollama.ai", "library", "latest"
_PART = re.compile(r"[\w-][\w.-]*", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LAYER = "application/vnd.ollama.image."
_MAX_BYTES = 1 << 20
"""Of a manifest or of parameters."""
_NUM_SHOWN = 20
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OllamaModel:
    """A model of the store.

    Attributes:
        path: of its GGUF file.
        params: its parameters, such as ``temperature`` and ``stop``.
    """

    path: Path
    params: Mapping[str, Any] = field(default_factory=dict)


def ollama_model(name: str) -> OllamaModel:
    """The model of a name, with or without ``ollama:``: ``NAME[:TAG]``, ``USER/NAME[:TAG]`` or
    ``HOST/USER/NAME[:TAG]``.

    Raises ModelError if the store has no such model, or not all of it, or an adapter in it.
    """
    store, short = _store(), name.removeprefix(PREFIX)
    manifest = store / "manifests" / _manifest_path(short)
    if not manifest.is_file():
        names = _names(store)
        more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
        why = f"the store in {store} has no such model"
        has = f"; it has {', '.join(names[:_NUM_SHOWN])}{more}" if names else ""
        raise ModelError(f"no model {PREFIX}{short}", f"{why}{has}", f"Run 'ollama pull {short}'")
    layers = _layers(short, _read_json(short, manifest))
    if "adapter" in layers:
        raise _broken(short, "it is an adapter on another model, which is not supported")
    if "model" not in layers:
        raise _broken(short, "its manifest has no GGUF file")
    params = _read_json(short, _blob(store, short, layers["params"])) if "params" in layers else {}
    _report(short, layers, params)
    return OllamaModel(_blob(store, short, layers["model"]), params)


def _store() -> Path:
    chosen = os.environ.get("OLLAMA_MODELS")
    if chosen:
        return Path(chosen)
    home = Path(os.path.expanduser("~"), ".ollama", "models")
    return _SERVICE if not home.is_dir() and _SERVICE.is_dir() else home


def _manifest_path(name: str) -> Path:
    """Where the manifest of a name is; raises ModelError for what can be no name."""
    path, _, tag = name.partition(":")
    parts = path.split("/")
    if len(parts) > 3 or not all(_PART.fullmatch(part) for part in (*parts, tag or _TAG)):
        raise ModelError(
            f"no model {PREFIX}{name:.100}",
            "it is no name of ollama",
            f"Give one such as {PREFIX}smollm2:135m",
        )
    defaults = (_REGISTRY, _LIBRARY)[: 3 - len(parts)]
    return Path(*defaults, *parts, tag or _TAG)


def _names(store: Path) -> list[str]:
    """The names of all models of a store, as ``ollama list`` writes them."""
    root, names = store / "manifests", []
    for file in root.glob("*/*/*/*"):
        host, user, short, tag = file.relative_to(root).parts
        left_out = (f"{_REGISTRY}/{_LIBRARY}/", f"{_REGISTRY}/")
        name = f"{host}/{user}/{short}:{tag}"
        names.append(next((name.removeprefix(p) for p in left_out if name.startswith(p)), name))
    return sorted(names)


def _layers(name: str, manifest: Mapping[str, Any]) -> dict[str, str]:
    """The kind of a layer, such as ``model`` -> its digest."""
    layers = manifest.get("layers")
    if not isinstance(layers, list):
        raise _broken(name, "its manifest has no layers")
    digests: dict[str, str] = {}
    for layer in layers:
        kind, digest = (
            (layer.get("mediaType"), layer.get("digest")) if isinstance(layer, dict) else (0, 0)
        )
        if not isinstance(kind, str) or not isinstance(digest, str) or not _DIGEST.match(digest):
            raise _broken(name, f"its manifest has a layer {layer!r:.60}")
        digests.setdefault(kind.removeprefix(_LAYER), digest)
    return digests


def _blob(store: Path, name: str, digest: str) -> Path:
    file = store / "blobs" / digest.replace(":", "-")
    if not file.is_file():
        raise _broken(name, f"there is no {file}")
    return file


def _read_json(name: str, file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise _broken(name, f"{file} has more than {_MAX_BYTES:,} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise _broken(name, f"{file} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise _broken(name, f"{file} holds no object")
    return content


def _report(name: str, layers: Mapping[str, str], params: Mapping[str, Any]) -> None:
    """Log what the store has for the model and what is not made use of here."""
    unread = [kind for kind in ("template", "system", "messages", "projector") if kind in layers]
    if unread:
        _logger.info(
            "%s%s: the chat template is the one in its GGUF file; ollama's %s are not read",
            *(PREFIX, name, ", ".join(unread)),
        )
    if params:
        listed = ", ".join(f"{key}={value!r:.40}" for key, value in sorted(params.items()))
        _logger.info(
            "%s%s: ollama samples it with %s; here sampling is what SamplingParams says",
            *(PREFIX, name, listed),
        )


def _broken(name: str, why: str) -> ModelError:
    return ModelError(f"cannot load {PREFIX}{name}", why, f"Run 'ollama pull {name}'")
