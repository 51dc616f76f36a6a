"""The Hugging Face Hub: files of a repository, in its cache or downloaded into it, and why not.

Imports ``huggingface_hub`` only where it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forethought.errors import DependencyError, ModelError


def download(
    name: str,
    revision: str | None,
    patterns: Sequence[str],
    left_out: Sequence[str] = (),
    *,
    from_cache: bool = False,
) -> Path:
    """The directory of a snapshot of a repository, with the files that match ``patterns`` and none
    of ``left_out``; ``from_cache``: what the cache has of it, without asking the Hub.

    Raises ModelError with the cause, and DependencyError if ``huggingface_hub`` is not installed.
    """
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise _not_installed(name) from error
    try:
        directory = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(left_out),
            local_files_only=from_cache,
        )
    except Exception as error:  # also what breaks off a download: the network, the disk, ...
        why, fix = explain_hub_error(error, name, revision)
        raise ModelError(f"cannot get the model {name}", why, fix) from error
    return Path(directory)


def file_names(name: str, revision: str | None) -> list[str] | None:
    """The paths of all files of a repository; None: the Hub cannot be asked.

    Raises ModelError if the Hub answers that there is no such repository, or refuses access, and
    DependencyError if ``huggingface_hub`` is not installed.
    """
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise _not_installed(name) from error
    try:
        siblings = huggingface_hub.HfApi().model_info(name, revision=revision).siblings
    except Exception as error:
        if not hub_has_answered(error):
            return None
        why, fix = explain_hub_error(error, name, revision)
        raise ModelError(f"cannot get the model {name}", why, fix) from error
    return [sibling.rfilename for sibling in siblings or ()]


def _not_installed(name: str) -> DependencyError:
    return DependencyError.missing(
        "huggingface_hub", f"{name} is no local directory, and a Hub id", "local"
    )


def explain_hub_error(
    error: Exception, name: str, revision: str | None, kind: str = "model"
) -> tuple[str, str]:
    """Why a download from the Hub failed, and what can be done about it; ``kind`` is "model" or
    "data set".
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

    classes = (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
    return isinstance(error, classes)


def _http_status(error: BaseException | None) -> int | None:
    """The status of the response that ``error`` comes from, through the errors that wrap it."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return None
