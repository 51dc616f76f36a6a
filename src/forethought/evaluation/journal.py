"""The journal of an evaluation: every finished attempt is one line of a file, so that a killed run
loses only the unfinished attempts.

::

    {"journal": 1, "hash": "5f2c...", "settings": {"model": ..., "seed": 0, ...}}
    {"attempt": {"method": "plain", "number": 3, "sample": 0, "correct": true, ...}}
    {"finished": {}}

The first line holds everything that decides the results. A run with the same settings takes over
the attempts in the file and makes the others. A run with other settings gets a file of its own
beside a journal that is finished, and is refused beside one that is not. Seeds belong to problem
and sample, so the concurrency of attempts does not matter: in float32 the resumed run gives the
answers of an uninterrupted one. In 16 bits the rows of a batch may round differently when other
rows are beside them, and near-ties between tokens may fall the other way, as from run to run with
another ``in_flight``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forethought.errors import FileError, ParameterError, UsageError
from forethought.evaluation.problems import Problem
from forethought.outputs import Usage

_FORMAT = 1
_BEGIN_ANEW = "Begin anew with --fresh, or give another --out"
_SHORT_HASH = 8  # hexadecimal digits
_FINISHED = "finished"
_TOKENS = ("prefilled", "decoded", "discarded", "cached")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One problem, solved by one method."""

    method: str
    problem: Problem
    text: str
    """The answer; empty if there is none."""
    correct: bool
    number: int = 0
    """Index of the problem in the evaluation."""
    sample: int = 0
    """Which of the attempts at this problem."""
    usage: Usage = field(default_factory=Usage)
    """Tokens of everything that was run for it."""
    num_answer_tokens: int = 0
    """Tokens of the answer alone."""
    elapsed: float = 0.0
    """Seconds of the method's wall time at its end; of a resumed run, those before included."""
    candidates: tuple[bool | None, ...] = ()
    """Whether each sample that the method drew is right; None for one that was ended early."""
    error: str = ""
    """Why there is no answer: the budget was spent."""
    answer_rule: str | None = None
    """What found the answer in the text; empty if nothing did, None if the grader does not say."""
    is_cut: bool = False
    """Whether the text ends at its limit of tokens."""

    @property
    def key(self) -> tuple[int, int]:
        """Number of the problem, and which attempt at it."""
        return self.number, self.sample

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the problem is its number."""
        record = {
            "method": self.method,
            "number": self.number,
            "sample": self.sample,
            "correct": self.correct,
            "text": self.text,
            "tokens": {name: getattr(self.usage, name) for name in _TOKENS},
            "num_answer_tokens": self.num_answer_tokens,
            "elapsed": self.elapsed,
        }
        if self.candidates:
            record["candidates"] = list(self.candidates)
        if self.error:
            record["error"] = self.error
        if self.answer_rule is not None:
            record["answer_rule"] = self.answer_rule
        if self.is_cut:
            record["is_cut"] = True
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], problems: Sequence[Problem]) -> Self:
        """The attempt of a record; raises KeyError, IndexError or TypeError if it is none."""
        values = dict(record)
        values["usage"] = Usage(**values.pop("tokens"))
        values["candidates"] = tuple(values.get("candidates", ()))
        return cls(problem=problems[values["number"]], **values)


class Journal:
    """Reads and appends to the journal in a folder.

    Args:
        path: of the file; its folder exists. If a finished journal with other settings has this
            name, a hash of the settings is added to it.
        settings: everything that decides the results, as plain values by name.
        is_fresh: discard the file's attempts.

    Attributes:
        path: of the file.
        num_appended: records written since it was opened.

    Raises:
        ParameterError: the file belongs to an unfinished evaluation with other settings.
        UsageError: the file is no journal, is damaged, or another process writes to it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], is_fresh: bool = False) -> None:
        self._settings = json.loads(json.dumps(settings))
        self.path = _path_of(path, hash_of(self._settings))
        self.num_appended = 0
        self._records: dict[str, list[dict[str, Any]]] = {}
        try:
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            why, fix = error.strerror or str(error), "Give another --out"
            raise FileError(f"cannot write the journal {self.path}", why, fix) from error
        try:
            self._lock()
            if is_fresh:
                self._file.truncate(0)
            self._read()
        except BaseException:
            self._file.close()
            raise

    def records(self, kind: str) -> list[dict[str, Any]]:
        """All records of a kind, in the order in which they were written."""
        return self._records.get(kind, [])

    def append(self, kind: str, record: Mapping[str, Any]) -> None:
        """Write a record; it is in the file when this returns."""
        line = {kind: dict(record)}
        self._write(line)
        self.num_appended += 1
        self._records.setdefault(kind, []).append(line[kind])

    @property
    def is_finished(self) -> bool:
        """Whether a run has made all of its attempts."""
        return bool(self.records(_FINISHED))

    def finish(self) -> None:
        """Record that all attempts were made."""
        if not self.is_finished:
            self.append(_FINISHED, {})

    def attempts(self, method: str, problems: Sequence[Problem]) -> list[Attempt]:
        """The recorded attempts of a method, one for each problem and sample."""
        attempts: dict[tuple[int, int], Attempt] = {}
        for record in self.records("attempt"):
            if record.get("method") == method:
                attempt = self._attempt(record, problems)
                attempts.setdefault(attempt.key, attempt)
        return list(attempts.values())

    def _attempt(self, record: Mapping[str, Any], problems: Sequence[Problem]) -> Attempt:
        try:
            return Attempt.from_dict(record, problems)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"a record of an attempt is incomplete ({error!r})") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- the file -----------------------------------------------------------------------------

    def _lock(self) -> None:
        """Refuse to write beside another process, where the system has locks of files."""
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(
                    f"another evaluation writes to {self.path}",
                    "it holds the lock of the file",
                    "Wait for it, or give another --out",
                ) from error

    def _read(self) -> None:
        """Take over the records; an incomplete last line is cut off."""
        self._file.seek(0)
        lines = list(self._complete_lines())
        if not lines:
            self._write(
                {"journal": _FORMAT, "hash": hash_of(self._settings), "settings": self._settings}
            )
            return
        self._check(lines[0])
        for line in lines[1:]:
            for kind, record in line.items():
                self._records.setdefault(kind, []).append(record)

    def _complete_lines(self) -> Iterator[dict[str, Any]]:
        data = self._file.read()
        complete, _, torn = data.rpartition(b"\n")
        if torn:
            self._file.truncate(len(data) - len(torn))
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise self._damaged(f"line {number} is not JSON") from error
            if not isinstance(record, dict):
                raise self._damaged(f"line {number} is no object")
            yield record

    def _check(self, header: Mapping[str, Any]) -> None:
        if header.get("journal") != _FORMAT or not isinstance(header.get("settings"), dict):
            raise self._damaged("its first line is not that of a journal of this version")
        if header.get("hash") != hash_of(self._settings):
            changes = "; ".join(differences(header["settings"], self._settings))
            raise ParameterError(
                f"{self.path} is the journal of another evaluation, which is not finished",
                changes or "its settings were edited",
                _BEGIN_ANEW,
            )

    def _damaged(self, why: str) -> UsageError:
        return UsageError(f"cannot read the journal {self.path}", why, _BEGIN_ANEW)

    def _write(self, line: Mapping[str, Any]) -> None:
        data, size = json.dumps(line).encode() + b"\n", self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(size)
            raise FileError(
                f"cannot write the journal {self.path}",
                error.strerror or str(error),
                "Make space and run the command again: it goes on with what is in the journal",
            ) from error


def hash_of(value: Any) -> str:
    """SHA-256 of plain values, in hexadecimal; the order of names does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _path_of(path: Path, settings_hash: str) -> Path:
    """The path of the journal with these settings: ``path``, unless a finished one of others has
    it.
    """
    named = path.with_name(f"{path.stem}-{settings_hash[:_SHORT_HASH]}{path.suffix}")
    if named.exists():
        return named
    try:
        first, *others = path.read_bytes().splitlines()
        is_other = json.loads(first)["hash"] != settings_hash
        is_finished = any(_FINISHED in json.loads(line) for line in others)
    except (OSError, ValueError, LookupError, TypeError):  # there is none, or opening it says why
        return path
    return named if is_other and is_finished else path


def folder_name(label: str, settings: Mapping[str, Any]) -> str:
    """The name of the folder of one evaluation.

    Args:
        label: for readers; other characters than letters, digits and a few signs become dashes.
        settings: everything that decides the results; a hash of them follows the label.
    """
    readable = re.sub(r"[^\w@+.]+", "-", label, flags=re.ASCII)[:_LABEL_CHARACTERS].strip("-")
    return f"{readable}-{hash_of(settings)[:_SHORT_HASH]}"


_LABEL_CHARACTERS = 60
_SHOWN_CHARACTERS = 60


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between the settings of two evaluations, in words: "seed: 0 -> 1"."""
    changes: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if before != after:
            changes += _changes(name, before, after)
    counts = [settings.get("num_problems") for settings in (old, new)]
    if counts[0] != counts[1]:  # the hash of the problems says no more
        return [change for change in changes if change != _OTHER_PROBLEMS]
    return changes


_OTHER_PROBLEMS = "problems: others, or in another order"


def _changes(name: str, before: Any, after: Any) -> list[str]:
    if name == "problems":
        return [_OTHER_PROBLEMS]
    if name == "files":
        before, after = before or {}, after or {}
        changed = sorted(one for one in {**before, **after} if before.get(one) != after.get(one))
        return [f"files that have changed: {', '.join(changed)}"]
    if isinstance(before, dict) and isinstance(after, dict):
        return [f"{name}.{inner}" for inner in differences(before, after)]
    if name == "methods" and before and after:
        names = [[one.get("name") for one in methods] for methods in (before, after)]
        if names[0] == names[1]:
            pairs = zip(names[0], before, after, strict=True)
            return [f"{name} {inner}" for name, *pair in pairs for inner in differences(*pair)]
        before, after = (", ".join(map(str, side)) for side in names)
    return [f"{name}: {_shown(before)} -> {_shown(after)}"]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = "none" if value in (None, "") else text
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def fingerprint(path: Path) -> dict[str, Any]:
    """What identifies the state of a model directory, or of another file, without reading weights.

    For each file its size and time of change (ns), and of JSON files their hash instead.
    """
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file())
    return {one.name: _file_fingerprint(one) for one in files}


def _file_fingerprint(path: Path) -> Any:
    if path.suffix == ".json":
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def problems_hash(problems: Sequence[Problem]) -> str:
    """A hash of the problems and their order."""
    return hash_of([[one.question, one.answer, dict(one.fields)] for one in problems])
