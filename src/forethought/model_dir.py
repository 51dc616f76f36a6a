"""A model's directory: found on this machine or on the Hugging Face Hub, and checked.

Whatever names a model (``LLM``, ``--model``, ``speculative_model``, ``RewardWorker``, ``--target``)
is a local directory, the name of an embedded model such as ``"forethought/countdown"``, or a Hub id
such as ``"Qwen/Qwen3-0.6B"``; :func:`find_model_dir` makes a directory of each.
:func:`check_model_dir` says what a directory holds where that is no model.
Imports ``huggingface_hub`` only where a Hub id is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from forethought import assets
from forethought.errors import DependencyError, ModelError, ParameterError

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_TEXTS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Files of configuration and tokenizer."""
_SAFETENSORS = ("*.safetensors",)
_OTHER_WEIGHTS = ("pytorch_model*.bin", "*.pt")
"""Weights of repositories that have no safetensors."""
_LEFT_OUT = (
    *("*/*", "consolidated*"),
    *("optimizer*", "scheduler*", "rng_state*", "training_args*"),
)
"""Duplicates of the weights, in folders or in another layout, and what a trainer left behind."""
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

    Args:
        model: local directory, name of an embedded model, or Hub id.
        revision: branch, tag or commit of a Hub id; None: its main branch.
        weights: False for a tokenizer only.
        code: whether Python files are wanted, too.

    Raises:
        ModelError: there is no such directory, and the Hub does not have it, cannot be reached or
            refuses access.
        UnknownNameError: there is no embedded model of this name.
        ParameterError: a revision of a local directory or an embedded model.
        DependencyError: ``huggingface_hub`` is not installed.
    """
    path = Path(model)
    is_local = path.exists()
    if not is_local and assets.is_embedded(model):
        path, is_local = assets.embedded_dir(str(model)), True
    if is_local:
        if revision is not None:
            raise ParameterError(
                f"invalid revision {revision!r}",
                f"{path} lies on this machine, and revisions are those of the Hugging Face Hub",
                "Leave it out",
            )
        return path
    if not _HUB_ID.fullmatch(str(model)):
        raise ModelError(
            f"no model at {model}",
            "there is no such directory",
            "Give a local Hugging Face directory, or a Hub id such as Qwen/Qwen3-0.6B",
        )
    wanted = [*_TEXTS, *(_SAFETENSORS if weights else ()), *(("*.py",) if code else ())]
    directory = _download(str(model), revision, wanted)
    if weights and not any(directory.glob("*.safetensors")):
        directory = _download(str(model), revision, [*wanted, *_OTHER_WEIGHTS])
    if weights and not any(directory.glob("*config.json")):
        raise ModelError(
            f"cannot load the model {model}",
            "its repository on the Hub has no config.json; it may hold GGUF files",
            "Give the repository of the original model",
        )
    return directory


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The snapshot of a repository with the files that match."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise DependencyError.missing(
            "huggingface_hub", f"{name} is no local directory, and a Hub id", "local"
        ) from error
    try:
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_LEFT_OUT),
        )
    except Exception as error:  # also what breaks off a download: the network, the disk, ...
        why, fix = explain_hub_error(error, name, revision)
        raise ModelError(f"cannot get the model {name}", why, fix) from error
    return Path(found)


def explain_hub_error(
    error: Exception, name: str, revision: str | None, kind: str = "model"
) -> tuple[str, str]:
    """Why a download failed, and what can be done about it.

    Args:
        error: of ``huggingface_hub``.
        name: id on the Hub.
        revision: branch, tag or commit that was asked for.
        kind: "model" or "data set".
    """
    from huggingface_hub import constants, errors

    hub = f"the Hugging Face Hub at {constants.ENDPOINT}"
    local = "directory" if kind == "model" else "file or directory"
    page = f"{constants.ENDPOINT}/{name if kind == 'model' else f'datasets/{name}'}"
    status = None if _is_about_repository(error) else _http_status(error)
    if status in (401, 403):
        return f"{hub} refuses access (HTTP {status})", "Set HF_TOKEN to a token that has access"
    if status is not None:
        return f"{hub} answers with HTTP {status}", "Try again later: what has come is kept"
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = f"{hub} cannot be reached"
        if constants.HF_HUB_OFFLINE:
            cause = "HF_HUB_OFFLINE forbids to ask the Hub"
        return (
            f"there is no such {local}, the Hub's cache does not hold all of it, and {cause}",
            f"Give a local {local}, or download it where there is a network",
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{hub} gives it only to those who have been granted access",
            f"Ask for access at {page}, and set HF_TOKEN",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no such {local}, and no such {kind} on {hub}, or it is private",
            f"Check the name; for a private {kind} set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"on {hub} it has no revision {revision!r}", "Give a branch, a tag or a commit"
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return reason, "Try again: what has been downloaded is kept"


def hub_has_answered(error: Exception) -> bool:
    """Whether an error of ``huggingface_hub`` is the Hub's answer, and not the lack of one."""
    return _is_about_repository(error) or _http_status(error) is not None


def _is_about_repository(error: Exception) -> bool:
    """Whether the Hub says what is wrong with the name, the revision or the access."""
    from huggingface_hub import errors

    known = (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
    return isinstance(error, known)


def _http_status(error: BaseException | None) -> int | None:
    """The status of the response that ``error`` comes from, through the errors that wrap it."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return None


def check_model_dir(directory: Path, kind: str = "model") -> None:
    """Refuse what is no Hugging Face directory, with the cause.

    Args:
        directory: to be checked; weights are not read.
        kind: what it should hold, as messages say it.

    Raises:
        ModelError: it is missing, has no ``config.json``, or holds an adapter, GGUF files or
            pointers of Git LFS instead of weights.
    """
    if not directory.is_dir():
        why, fix = "there is no such directory", "Give the path of a local Hugging Face directory"
        if directory.suffix == ".gguf":
            why, fix = "it is a GGUF file", _GGUF_FIX
        elif directory.exists():
            why = "it is a file"
        raise ModelError(f"no {kind} at {directory}", why, fix)
    _refuse_adapter(directory, kind)
    if not (directory / "config.json").is_file():
        if any(directory.glob("*.gguf")):
            raise _broken(directory, kind, "it holds GGUF files", _GGUF_FIX)
        raise _broken(directory, kind, "it has no config.json")
    for file in sorted(directory.iterdir()):
        if _is_lfs_pointer(file):
            raise _broken(
                directory,
                kind,
                f"{file.name} is a pointer of Git LFS to a file that was not fetched",
                f"Run 'git lfs pull' in {directory}",
            )


_GGUF_FIX = "Give the safetensors that it was made from, as a Hugging Face directory"


def _refuse_adapter(directory: Path, kind: str) -> None:
    """Refuse a directory with weights of an adapter and no others."""
    written = directory / "adapter_config.json"
    weights = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    if not written.is_file() or any(not file.name.startswith("adapter_") for file in weights):
        return
    try:
        found = json.loads(written.read_text(encoding="utf-8"))
        method, base = found.get("peft_type") or "", found.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        method, base = "", None
    raise _broken(
        directory,
        kind,
        f"it holds an adapter ({method or 'adapter_config.json'}), not a whole model",
        f"Merge it into {base or 'the model that it was trained on'}, and give the result",
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
