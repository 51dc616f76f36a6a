"""Records of a data set: from a file, a directory of files, or a data set on the Hugging Face Hub.

=====================  =============================================================
``.jsonl``             one JSON object per line
``.json``              one object (MATH has a file per problem), or an array of them
``.csv``               the first row names the fields
``.parquet``           needs ``pyarrow``
=====================  =============================================================

All but parquet may be compressed (``.jsonl.gz``). A file with another ending is read as JSON lines.
Of a directory, and of a data set on the Hub, the test split is read if files or folders are named
so, else the validation split, else all; of several formats the first of the table.
``org/name@revision:pattern`` names a revision of a data set and a pattern of files.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

from forethought.errors import DependencyError, UsageError
from forethought.hub import explain_hub_error, hub_has_answered
from forethought.strict_json import read_json

_SPLITS = (r"test", r"validation|valid|val|dev")
_NO_DATA = frozenset({"dataset_infos.json", "dataset_dict.json", "state.json", "config.json"})
"""JSON files that describe a data set."""
_HUB_ID = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<pattern>.+))?",
    re.ASCII,
)
_FORMATS_FIX = "Give a .jsonl, .json, .csv or .parquet file (or .gz of the first three)"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a data set, and its place, for messages."""

    values: Mapping[str, Any]
    """By field, with names in small letters: published files differ in their case."""
    where: str
    """Path of the file, and line, row or item in it, counted from 1."""
    name: str
    """The same with the last part of the path alone."""

    def get(self, *fields: str) -> Any:
        """The value of the first of ``fields`` that is present and not empty; None without one.
        ``UsageError`` for NaN and infinity, which Parquet can hold.
        """
        values = (self.values.get(field) for field in fields)
        value = next((value for value in values if value not in (None, "")), None)
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(f"{' or '.join(map(repr, fields))} is {value}", "Give a finite number")
        return value

    def text(self, *fields: str) -> str:
        """The text in the first of ``fields`` that is present; ``UsageError`` if there is none."""
        value = self.get(*fields)
        names = " or ".join(map(repr, fields))
        if value is None:
            has = ", ".join(map(repr, self.values)) or "none"
            is_empty = any(field in self.values for field in fields)
            why = f"{names} is empty" if is_empty else f"it has no {names}"
            self.refuse(why, f"Fields that it has: {has}")
        if not isinstance(value, str) or not value.strip():
            self.refuse(f"{names} is {value!r:.200}", "It has to be text")
        if any("\ud800" <= char <= "\udfff" for char in value):
            self.refuse(f"{names} has half of a surrogate pair", "It has to be Unicode text")
        return value

    def refuse(self, why: str, fix: str) -> NoReturn:
        """Raise the ``UsageError`` that names this record."""
        raise UsageError(f"bad problem at {self.where}", why, fix)


def read_records(data: str | Path, folder: str | None = None) -> list[Record]:
    """The records of a data set, in the order of its files.

    Args:
        data: a file or directory, or the id of a data set on the Hub, see above. A path that exists
            wins over an id.
        folder: of a data set that has several configurations in folders, the one to read.

    Raises:
        UsageError: there is no such data, it cannot be read, or a record is no object.
        DependencyError: ``huggingface_hub`` or ``pyarrow`` is needed and not installed.
    """
    files = _files(data, folder)
    records = [record for file in files for record in _read(file)]
    if not records:
        raise UsageError(f"no problems in {data}", "there are no records in it", _FORMATS_FIX)
    return records


# ---- which files ---------------------------------------------------------------------------------


def _files(data: str | Path, folder: str | None) -> list[Path]:
    path = Path(data)
    if path.is_dir():
        return [path / name for name in _chosen(str(data), _within(path), folder)]
    if path.exists():
        return [path]
    match = _HUB_ID.fullmatch(str(data))
    if match is None or _format(match["name"]) is not None:
        raise UsageError(
            f"cannot read the problems in {data}",
            "there is no such file or directory",
            "Check the path, or give the id of a data set on the Hub, such as openai/gsm8k",
        )
    return _from_hub(match["name"], match["revision"], match["pattern"], folder)


def _within(directory: Path) -> list[str]:
    """The files in a directory and those below it, without hidden ones, as paths within it."""
    names = (
        file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()
    )
    return [name for name in names if not re.search(r"(?:^|/)\.", name)]


def _chosen(
    data: str, names: Iterable[str], folder: str | None, pattern: str | None = None
) -> list[str]:
    """The data files among ``names``, paths within ``data``; ``UsageError`` without any."""
    data_files = [name for name in names if _format(name) and Path(name).name not in _NO_DATA]
    if pattern is not None:
        matches = [name for name in data_files if fnmatch(name, pattern)]
    else:
        matches = _split(_in_folder(data_files, folder))
    if not matches:
        why = f"no data file matches {pattern!r}" if data_files else "it holds no data file"
        there = f"There are: {', '.join(sorted(data_files)[:20])}" if data_files else _FORMATS_FIX
        raise UsageError(f"no problems in {data}", why, there)
    first = min(map(_rank, matches))
    return sorted((name for name in matches if _rank(name) == first), key=_natural)


def _in_folder(names: list[str], folder: str | None) -> list[str]:
    return [name for name in names if folder in Path(name).parts[:-1]] or names


def _split(names: list[str]) -> list[str]:
    for split in _SPLITS:
        word = re.compile(rf"(?:^|[/_.-])(?:{split})(?:[/_.-]|$)", re.IGNORECASE)
        matches = [name for name in names if word.search(name)]
        if matches:
            return matches
    return names


def _natural(name: str) -> list[tuple[str, int]]:
    """A key that sorts ``2.json`` before ``10.json``."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D+)(\d*)", f"/{name}")]


def _from_hub(
    name: str, revision: str | None, pattern: str | None, folder: str | None
) -> list[Path]:
    """The files of a data set, downloaded into the Hub's cache if they are not there yet."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise DependencyError.missing(
            "huggingface_hub", f"{name} is no local file, and a Hub id", "local"
        ) from error
    source: dict[str, Any] = {"repo_id": name, "repo_type": "dataset", "revision": revision}
    try:
        listed = huggingface_hub.dataset_info(name, revision=revision).siblings or []
        chosen = _chosen(name, [file.rfilename for file in listed], folder, pattern)
        root = huggingface_hub.snapshot_download(**source, allow_patterns=chosen)
    except UsageError:
        raise
    except Exception as error:
        try:
            if hub_has_answered(error):
                raise
            chosen = _chosen(name, _listed_before(source), folder, pattern)
            root = huggingface_hub.snapshot_download(
                **source, allow_patterns=chosen, local_files_only=True
            )
        except Exception as cause:
            why, fix = explain_hub_error(cause, name, revision, "data set")
            raise UsageError(f"cannot get the data set {name}", why, fix) from cause
    return [Path(root) / file for file in chosen]


def _listed_before(source: Mapping[str, Any]) -> list[str]:
    """The files that a data set had when it was last downloaded, without a request to the Hub."""
    from huggingface_hub import errors

    try:
        from huggingface_hub import get_cached_repo_tree  # from version 2 on

        return [file.path for file in get_cached_repo_tree(**source)]
    except Exception as error:
        raise errors.LocalEntryNotFoundError("the list of its files is not cached") from error


# ---- formats -------------------------------------------------------------------------------------


def _read(path: Path) -> Iterator[Record]:
    try:
        for place, values in _READERS[_format(path.name) or ".jsonl"](path):
            yield _record(path, place, values)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        _refuse_file(path, str(error) or type(error).__name__, "Check that the file is complete")


def _record(path: Path, place: str, values: Any) -> Record:
    where = f"{path}{place}"
    if not isinstance(values, dict):
        raise UsageError(
            f"bad problem at {where}", "it is no object", 'Write {"question": "...", ...}'
        )
    names = [str(field).strip().lower() for field in values]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(
            f"bad problem at {where}",
            f"it has the field {twice} twice: case and spaces do not count",
            "Leave one of them out",
        )
    fields = dict(zip(names, values.values(), strict=True))
    return Record(fields, where, f"{path.name}{place}")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f":{number}", _parsed(line, f"{path}:{number}", "one JSON object per line")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    with _opened(path) as stream:
        content = _parsed(stream.read(), str(path), "one JSON object, or an array of them")
    if isinstance(content, list):
        for number, item in enumerate(content, start=1):
            yield f":item {number}", item
    else:
        yield "", content


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    with _opened(path) as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            if None in row:
                raise UsageError(
                    f"bad problem at {path}:{reader.line_num}",
                    "it has more fields than the first line names",
                    "Quote fields that hold commas",
                )
            yield f":{reader.line_num}", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ModuleNotFoundError as error:
        raise DependencyError(
            "pyarrow is not installed",
            f"reading {path} needs it",
            "Install it with: pip install pyarrow. Or give the problems as JSON lines",
        ) from error
    try:
        rows = read_table(path).to_pylist()
    except ArrowException as error:
        _refuse_file(path, str(error).splitlines()[0], "Check that the file is complete")
    for number, row in enumerate(rows, start=1):
        yield f":row {number}", row


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""By ending; what they yield is the place in the file, and the values of a record."""


def _format(name: str) -> str | None:
    """The ending, if it is that of a data file."""
    plain = name.lower()
    ending = Path(plain.removesuffix(".gz")).suffix
    if ending == ".parquet" and plain.endswith(".gz"):
        return None
    return ending if ending in _READERS else None


def _rank(name: str) -> int:
    return list(_READERS).index(_format(name) or "")


def _opened(path: Path) -> io.TextIOBase:
    """The text of a file; a byte-order mark is left out."""
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _parsed(text: str, where: str, expected: str) -> Any:
    try:
        return read_json(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"bad problem at {where}", f"not JSON: {error}", f"Write {expected}"
        ) from error


def _refuse_file(path: Path, why: str, fix: str) -> NoReturn:
    raise UsageError(f"cannot read the problems in {path}", why, fix)
