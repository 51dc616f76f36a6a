"""A model's directory: found on this machine or on the Hugging Face Hub, and checked.

Whatever names a model (``LLM``, ``--model``, ``speculative_model``, ``RewardWorker``, ``--target``)
is a local directory, the name of an embedded model such as ``"forethought/countdown"``, a Hub id
such as ``"Qwen/Qwen3-0.6B"``, or a GGUF file in one of its forms; :func:`find_model_dir` makes a
directory of each. That of a GGUF file is a view of it (``gguf/view.py``).
:func:`check_model_dir` says what a directory holds where that is no model.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forethought import assets, hub
from forethought.errors import ModelError, ParameterError
from forethought.gguf import names as gguf_names
from forethought.gguf import view as gguf_view
from forethought.gguf.file import GgufFile
from forethought.gguf.tensor_names import tensor_names

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_TEXTS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Files of configuration and tokenizer."""
_SAFETENSORS = ("*.safetensors",)
_OTHER_WEIGHTS = ("pytorch_model*.bin", "*.pt")
"""Weights of repositories that have no safetensors."""
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_LEFT_OUT = (
    *("*/*", "consolidated*"),
    *("optimizer*", "scheduler*", "rng_state*", "training_args*"),
)
"""Duplicates of the weights, in folders or in another layout, and the files of a trainer."""
_LFS_HEAD = b"version https://git-lfs"
_LFS_MOST_BYTES = 1024


def find_model_dir(
    model: str | Path,
    revision: str | None = None,
    *,
    weights: bool = True,
    code: bool = False,
) -> Path:
    """The directory of a model, downloaded into the Hub's cache if it is not there yet.

    An existing path wins over a name. ``forethought/...`` names an embedded model, and is never
    looked for on the Hub. Cache, offline mode, endpoint and token are those of ``huggingface_hub``
    (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``, ``HF_TOKEN``). Weights are downloaded as
    safetensors, in other formats only where there are none.

    Of a GGUF file it is a view, which has a ``config.json`` and the files of a tokenizer.

    Args:
        model: local directory, name of an embedded model, or Hub id; or, of a model in GGUF: a
            file (one of a split series stands for all), a directory with one model,
            ``user/repository:QUANTISATION``, ``ollama:NAME[:TAG]``, or ``smollm2``.
        revision: branch, tag or commit of a Hub id; None: its main branch.
        weights: False for a tokenizer only.
        code: whether Python files are wanted, too.

    Raises:
        ModelError: there is no such directory, and the Hub does not have it, cannot be reached or
            refuses access; or a GGUF file cannot be read, or its model is not supported.
        UnknownNameError: there is no embedded model of this name.
        ParameterError: a revision of a local directory or an embedded model.
        DependencyError: ``huggingface_hub`` is not installed.
    """
    path = Path(model)
    if not path.exists() and assets.is_embedded(model):
        path = assets.embedded_dir(str(model))
    if path.exists():
        return _local_dir(path, revision)
    view = gguf_names.named_view(str(model), revision)
    if view is not None:
        return view
    _check_hub_id(str(model))
    patterns = [*_TEXTS, *(_SAFETENSORS if weights else ()), *(("*.py",) if code else ())]
    directory = _download(str(model), revision, patterns)
    if weights and not any(directory.glob("*.safetensors")):
        directory = hub.download(str(model), revision, [*patterns, *_OTHER_WEIGHTS], _LEFT_OUT)
    if weights and not any(directory.glob("*config.json")):
        raise _without_config(str(model), revision)
    return directory


def _local_dir(path: Path, revision: str | None) -> Path:
    """The directory of a model that is on this machine."""
    if revision is not None:
        raise ParameterError(
            f"invalid revision {revision!r}",
            f"{path} is on this machine, and revisions are those of the Hugging Face Hub",
            "Leave it out",
        )
    return gguf_names.local_view(path) if gguf_names.is_gguf_model(path) else path


def _check_hub_id(model: str) -> None:
    """Raises ModelError for a name that is none of the Hub."""
    if Path(model).suffix == gguf_names.SUFFIX:
        raise ModelError(
            f"no model at {model}",
            "there is no such file",
            "Check the path, or write user/repository:QUANTISATION for a file of the Hub",
        )
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"no model at {model}",
            "there is no such directory",
            "Give a local Hugging Face directory, or a Hub id such as Qwen/Qwen3-0.6B",
        )


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    """The files of a Hub id; where the Hub has none, a model of nearly this name is proposed."""
    try:
        return hub.download(model, revision, patterns, _LEFT_OUT)
    except ModelError as error:
        if similar := _similar_name(model):
            raise ModelError(error.what, error.why, f"Give {similar}, if you mean that") from error
        raise


def _similar_name(name: str) -> str:
    """The model of an installed package that is nearly called ``name``; empty: none is."""
    known = {full.rpartition("/")[2]: full for full in (*gguf_names.PACKAGES, *assets.names())}
    close = difflib.get_close_matches(name, known, n=1)
    return known[close[0]] if close else ""


def _without_config(name: str, revision: str | None) -> ModelError:
    """The refusal of a repository that is no Hugging Face directory."""
    what, choices = f"cannot load the model {name}", gguf_names.on_hub(name, revision)
    if not choices:
        why = "its repository on the Hub has no config.json"
        return ModelError(what, why, "Give the repository of the original model")
    return ModelError(
        what,
        f"its repository on the Hub has GGUF files: {', '.join(choices)}",
        f"Name one of them, as in {name}:{choices[0]}",
    )


def checked_model_dir(
    model: str | Path, revision: str | None = None, *, kind: str = "model", code: bool = False
) -> Path:
    """The directory of a model as ``find_model_dir`` finds it, checked without torch.

    ``kind`` is as of ``check_model_dir``; of a ``model`` the files are checked, too. Raises as
    ``find_model_dir``, ``check_model_dir`` and ``check_checkpoint``.
    """
    directory = find_model_dir(model, revision, code=code)
    if kind == "model":
        check_checkpoint(directory)
    else:
        check_model_dir(directory, kind)
    return directory


def gguf_files(directory: Path) -> list[Path] | None:
    """The GGUF files that have the weights of a directory, in their order; None: they are in files
    of the directory itself. Raises ModelError for files that are not there or have changed.
    """
    return gguf_view.weight_files(directory)


def check_checkpoint(directory: Path) -> dict[str, tuple[int, ...]]:
    """Check a model's configuration and weights; returns the shapes of the tensors by name.

    Raises ModelError as ``check_model_dir``, ``check_config``, ``check_token_ids`` and
    ``check_weight_files``, or if there are no weights.
    """
    check_model_dir(directory)
    written = read_json(directory / "config.json")
    check_config(written, directory)
    check_token_ids(written, directory)
    if gguf_files(directory) is None and not any(
        file for pattern in _WEIGHT_FILES for file in directory.glob(pattern)
    ):
        raise _broken(directory, "model", f"it has no weights ({', '.join(_WEIGHT_FILES)})")
    return check_weight_files(directory)


def check_model_dir(directory: Path, kind: str = "model") -> None:
    """Refuse what is no Hugging Face directory; weights are not read.

    Raises ModelError if it is missing, has no ``config.json``, or holds an adapter or pointers of
    Git LFS instead of weights, and for what cannot be in a GGUF file and is. ``kind`` is what
    messages call it.
    """
    if not directory.is_dir():
        why, fix = "there is no such directory", "Give the path of a local Hugging Face directory"
        if gguf_names.is_gguf_model(directory):
            why, fix = "it is a GGUF file", _GGUF_FIX
        elif directory.exists():
            why = "it is a file"
        raise ModelError(f"no {kind} at {directory}", why, fix)
    files = gguf_files(directory)
    if files is not None and kind not in _GGUF_KINDS:
        why = f"{files[0]} is a GGUF file, from which no {kind} is read"
        raise _broken(directory, kind, why, "Give a Hugging Face directory with safetensors")
    _refuse_adapter(directory, kind)
    if not (directory / "config.json").is_file():
        if gguf_names.is_gguf_model(directory):
            raise _broken(directory, kind, "it holds GGUF files", _GGUF_FIX)
        trained = directory / ("model" if kind == "model" else "drafter")
        fix = f"Give {trained}, which 'forethought train' has written"
        there = (trained / "config.json").is_file()
        raise _broken(directory, kind, "it has no config.json", fix if there else "")
    for file in sorted(directory.iterdir()):
        if _is_lfs_pointer(file):
            raise _broken(
                directory,
                kind,
                f"{file.name} is a pointer of Git LFS to a file that was not fetched",
                f"Run 'git lfs pull' in {directory}",
            )


def read_json(file: Path, kind: str = "model") -> dict[str, Any]:
    """The object in a JSON file of a model's directory; raises ModelError if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(file.parent, kind, f"{file.name} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise _broken(file.parent, kind, f"{file.name} holds no object, but {content!r:.40}")
    return content


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "sliding_window"),
    *("max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions", "n_inner"),
)
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_NAMES = ("model_type", "dtype", "torch_dtype", "hidden_act", "activation_function")
_MAX_SIZE = 2**27
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_config(written: Mapping[str, Any], directory: Path, kind: str = "model") -> None:
    """Refuse a ``config.json``, or a nested one, with a field of the wrong type or an impossible
    size.

    Raises ModelError with the field. ``kind`` is what messages call the directory's content.
    """
    for prefix, part in (("", written), ("text_config.", written.get("text_config"))):
        if not isinstance(part, Mapping):
            continue
        for names, allowed, check in (
            (_SIZES, f"a whole number from 1 to {_MAX_SIZE}", _is_size),
            (_NUMBERS, "a number above zero", _is_positive),
            (_SWITCHES, "true or false", lambda value: isinstance(value, bool)),
            (_NAMES, "a name", lambda value: isinstance(value, str)),
            (_TOKENS, "the id of a token, or a list of ids", _is_ids),
        ):
            for name in names:
                value = part.get(name)
                is_flat = name == "num_hidden_layers" and kind == "head"
                is_off = name == "sliding_window" and part.get("use_sliding_window") is False
                is_none = value == 0 and (is_flat or is_off)  # Qwen2-MoE writes its window as 0
                if value is not None and not check(value) and not is_none:
                    raise _bad_field(directory, kind, f"{prefix}{name}", value, allowed)


def check_token_ids(written: Mapping[str, Any], directory: Path) -> None:
    """Raises ModelError for a ``config.json`` that has passed ``check_config``, with an id that is
    no token.
    """
    for prefix, part in (("", written), ("text_config.", written.get("text_config"))):
        if not isinstance(part, Mapping):
            continue
        for name in ("eos_token_id", "pad_token_id"):
            size, value = part.get("vocab_size"), part.get(name)
            if size is not None and value is not None and max(_listed(value)) >= size:
                allowed = f"the id of one of {size} tokens"
                raise _bad_field(directory, "model", f"{prefix}{name}", value, allowed)


def _bad_field(
    directory: Path, kind: str, name: str, value: Any, allowed: str, file: str = "config.json"
) -> ModelError:
    why = f"{name} of its {file} is {value!r:.60}, not {allowed}"
    return _broken(directory, kind, why, "Correct the field")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_size(value: Any) -> bool:
    if isinstance(value, list):  # one for each layer
        return all(type(one) is int and one >= 0 for one in value)
    return type(value) is int and 0 < value <= _MAX_SIZE


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_ids(value: Any) -> bool:
    ids = _listed(value)
    return bool(ids) and all(type(one) is int and one >= -1 for one in ids)


def check_generation_config(directory: Path, vocab_size: int, kind: str = "model") -> None:
    """Raises ModelError for a ``generation_config.json`` that cannot be read, or whose ids are no
    tokens.
    """
    file = directory / "generation_config.json"
    if not file.exists():
        return
    written = read_json(file, kind)
    for name in _TOKENS:
        value = written.get(name)
        if value is None:
            continue
        if not _is_ids(value) or (name == "eos_token_id" and max(_listed(value)) >= vocab_size):
            allowed = f"the id of one of {vocab_size} tokens, or a list of ids"
            raise _bad_field(directory, kind, name, value, allowed, file.name)


def check_weight_files(directory: Path, kind: str = "model") -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors by name, from the heads of the weight files. Those in GGUF files
    are under the names of transformers, in the shapes that its modules have.

    Raises ModelError with the name of a file that is missing, unreadable or cut short.
    """
    files = gguf_files(directory)
    if files is not None:
        config, file = read_json(directory / "config.json", kind), GgufFile.open(files)
        return {name: entry.shape for name, entry in tensor_names(config, file).items()}
    try:
        return _stored_shapes(directory, kind)
    except OSError as error:
        name = Path(str(error.filename)).name
        raise _broken(directory, kind, f"{name} cannot be read ({error.strerror})") from error


def _stored_shapes(directory: Path, kind: str) -> dict[str, tuple[int, ...]]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if index.is_file() and not single.is_file():
        return _indexed_shapes(index, kind)
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        _check_archives(directory, kind)
    return {name: shape for file in files for name, shape in tensor_shapes(file, kind).items()}


def _indexed_shapes(index: Path, kind: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in the shards that an index names."""
    directory, files = index.parent, read_json(index, kind).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise _broken(directory, kind, f"{index.name} has no weight_map of tensors to files")
    stored: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in sorted(set(files.values())):
        if Path(name).name != name or not (directory / name).is_file():
            raise _broken(directory, kind, f"{index.name} names {name}, and there is no such file")
        stored[name] = tensor_shapes(directory / name, kind)
    for tensor, name in files.items():
        if tensor not in stored[name]:
            raise _broken(directory, kind, f"{index.name} has {tensor} in {name}, which lacks it")
    return {tensor: stored[name][tensor] for tensor, name in files.items()}


def tensor_shapes(file: Path, kind: str = "model") -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, all of whose bytes are there.

    Raises ModelError if the file is cut short, or is none.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length:
            why = f"{file.name} is cut short or no safetensors file: it has {size} bytes"
            raise _broken(file.parent, kind, why)
        try:
            tensors = json.loads(stream.read(length))
            tensors.pop("__metadata__", None)
            shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
            ends = [entry["data_offsets"][1] for entry in tensors.values()]
            end = 8 + length + max(ends, default=0)
        except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
            why = f"{file.name} is no safetensors file: its header cannot be read ({error!r:.60})"
            raise _broken(file.parent, kind, why) from error
    if size != end:
        why = f"{file.name} has {size} bytes, and its tensors end at {end}"
        raise _broken(file.parent, kind, why)
    return shapes


def _check_archives(directory: Path, kind: str) -> None:
    """Refuse files of ``torch.save`` that are cut short: the table of a zip archive is its end."""
    for file in sorted(directory.glob("pytorch_model*.bin")):
        with file.open("rb") as stream:
            is_archive = stream.read(2) == b"PK"
        if file.stat().st_size == 0 or (is_archive and not zipfile.is_zipfile(file)):
            raise _broken(directory, kind, f"{file.name} is cut short")


def check_tokenizer_files(directory: Path, kind: str = "tokenizer") -> None:
    """Raises ModelError for a tokenizer's JSON file that cannot be read."""
    for name in _TOKENIZER_FILES:
        if (directory / name).is_file():
            read_json(directory / name, kind)


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "chat_template.json"),
)


def first_words(error: BaseException) -> str:
    """The message of another library's error on one line, cut to its beginning."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}..."


_MAX_WORDS = 300
_GGUF_FIX = "Find the directory that is a view of it with find_model_dir"
_GGUF_KINDS = ("model", "draft model", "tokenizer")


def _refuse_adapter(directory: Path, kind: str) -> None:
    """Refuse a directory with weights of an adapter and no others."""
    written = directory / "adapter_config.json"
    weights = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    if not written.is_file() or any(not file.name.startswith("adapter_") for file in weights):
        return
    try:
        config = json.loads(written.read_text(encoding="utf-8"))
        method, base = config.get("peft_type") or "", config.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        method, base = "", None
    raise _broken(
        directory,
        kind,
        f"it holds an adapter ({method or 'adapter_config.json'}), not a whole model",
        f"Give {base or 'the model that it was trained on'} as the model, and this as its adapter: "
        "adapters={name: directory}, --adapter NAME=DIR",
    )


def _is_lfs_pointer(file: Path) -> bool:
    if not file.is_file() or file.stat().st_size > _LFS_MOST_BYTES:
        return False
    with file.open("rb") as stream:
        return stream.read(len(_LFS_HEAD)) == _LFS_HEAD


def _broken(directory: Path, kind: str, why: str, fix: str = "") -> ModelError:
    return ModelError(
        f"cannot load the {kind} in {directory}", why, fix or "Check that the directory is complete"
    )
