"""The journal of responses: files from which another process goes on where a server has died.

Each response that is kept has one file in a folder of the operator's, whose name is a hash of the
tenant and the id: no request names a file. Its lines are JSON: first what was asked, with the seed
that was drawn here, then the events in their order. An event is written before a client sees it.

The process that generates a response holds a lock on its file, which ends with the process however
that ends. Whoever gets the lock of a response without an end makes it again from the first line,
and compares what comes with the events that are there: ``Replay``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forethought.server.http import HttpError
from forethought.server.json_pieces import read_pieces, write_pieces

log = logging.getLogger(__name__)

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Kinds of the last event of a response."""
_T = TypeVar("_T")
_VERSION = 1
_ENCODER = json.JSONEncoder()
"""It keeps no state."""
_SUFFIX = ".jsonl"
_DELTA = ".delta"
"""How the kinds of events end that have a part of a text."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file has of a response.

    Attributes:
        request: what was asked, as ``ResponseJournal.begin`` got it.
        events: in order.
        file: open for what follows, and locked; closed where the last event is an end.
    """

    request: Mapping[str, Any]
    events: list[dict[str, Any]]
    file: JournalFile

    @property
    def has_ended(self) -> bool:
        """Whether its last event is an end."""
        return bool(self.events) and self.events[-1]["type"] in ENDS


@dataclass(eq=False, slots=True)
class JournalFile:
    """The file of one response, to which a thread writes.

    Attributes:
        journal: whose thread that is.
        path: of the file.
        descriptor: to append to it; None: it is closed, or writing has failed.
    """

    journal: ResponseJournal
    path: Path
    descriptor: int | None

    @property
    def is_suspended(self) -> bool:
        """Whether the server ends, and nothing more is to be written."""
        return self.journal.is_suspended

    def append(self, value: Mapping[str, Any], written: Callable[[], None]) -> None:
        """Write a line, then call ``written`` in the thread; also if it cannot be written."""
        self.journal.submit(self._append, value, written)

    def end(self, written: Callable[[], None]) -> None:
        """Close the file, and give up the lock, then call ``written`` in the thread."""
        self.journal.submit(self._end, written)

    def delete(self) -> Future[None]:
        """Remove the file; the result, or OSError, once that is done."""
        return self.journal.submit(self._delete)

    def close(self) -> None:
        """Close the file, and give up its lock; in the thread that writes."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _append(self, value: Mapping[str, Any], written: Callable[[], None]) -> None:
        try:
            if self.descriptor is not None:
                _write(self.descriptor, value)
        except OSError as error:
            log.warning("a response is not kept in %s: %s", self.path.parent, error)
            with contextlib.suppress(OSError):  # nor can it be removed: the disk is read-only
                self._delete()
        finally:
            written()

    def _end(self, written: Callable[[], None]) -> None:
        self.close()
        written()

    def _delete(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self.close()


class ResponseJournal:
    """The files of responses in a folder, which several servers may share.

    Args:
        folder: made if it is not there; what is in it can be read by its owner alone.
        seconds: after which a file is not read that nobody has written to. Such files are removed
            when a server starts.
        max_files: that are kept when a server starts, the newest ones; so are ``max_bytes``.
    """

    def __init__(self, folder: Path, seconds: float, max_files: int, max_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._seconds, self._max_bytes = folder, seconds, max_bytes
        self._writer = ThreadPoolExecutor(1, "forethought-responses")
        self.is_suspended = False
        self._clean(max_files)

    def submit(self, work: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Run something in the thread that writes, after what came before."""
        return self._writer.submit(work, *arguments)

    async def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run something as ``submit`` does, and wait for it: what is read has been written, and
        what has been removed is not read.
        """
        return await asyncio.wrap_future(self.submit(work, *arguments))

    def begin(self, response_id: str, tenant: str, request: Mapping[str, Any]) -> JournalFile:
        """The file of a new response, with what was asked; it waits for the disk."""
        path = self._path(response_id, tenant)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        file = JournalFile(self, path, descriptor)
        try:
            _lock(descriptor)
            head = {"version": _VERSION, "id": response_id, "tenant": tenant}
            _write(descriptor, {**head, **request})
        except BaseException:
            file._delete()
            raise
        return file

    def read(self, response_id: str, tenant: str) -> Saved | None:
        """What there is of a response, up to the first line that is damaged; None: nothing. It
        waits for the disk.

        Raises:
            HttpError: another process generates it.
            OSError: the file cannot be read.
        """
        path = self._path(response_id, tenant)
        try:
            descriptor = _opened(path)
        except FileNotFoundError:
            return None
        file = JournalFile(self, path, descriptor)
        saved = None
        try:
            saved = self._read(file, descriptor)
        finally:
            if saved is None or saved.has_ended:
                file.close()
        return saved

    def remove(self, response_id: str, tenant: str) -> bool:
        """Remove the file of a response, whatever is in it; False: there is none. Raises as
        ``read``.
        """
        path = self._path(response_id, tenant)
        try:
            descriptor = _opened(path)
        except FileNotFoundError:
            return False
        try:
            if not _is_locked_now(descriptor):
                raise _elsewhere()
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
        return True

    def close(self) -> None:
        """Wait for what is to be written; nothing may be submitted any more."""
        self._writer.shutdown()

    def _read(self, file: JournalFile, descriptor: int) -> Saved | None:
        is_ours, status = _is_locked_now(descriptor), os.fstat(descriptor)
        is_old = status.st_mtime < time.time() - self._seconds
        if not stat.S_ISREG(status.st_mode) or is_old or status.st_size > self._max_bytes:
            return None
        with open(descriptor, "rb", closefd=False) as lines:
            data = lines.read()
        values, num_bytes = _whole_lines(data)
        if not values or values[0].get("version") != _VERSION:
            return None
        saved = Saved(values[0], values[1:], file)
        if not is_ours and not saved.has_ended:
            raise _elsewhere()
        if is_ours and num_bytes < len(data):
            os.ftruncate(descriptor, num_bytes)
        return saved

    def _path(self, response_id: str, tenant: str) -> Path:
        key = json.dumps([tenant, response_id]).encode()
        return self._folder / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}{_SUFFIX}"

    def _clean(self, max_files: int) -> None:
        """Remove what is too old, and of the rest the oldest beyond the limits."""
        num_kept = num_bytes = 0
        paths = self._folder.glob(f"*{_SUFFIX}")
        files = [(status, path) for path in paths if (status := _status(path)) is not None]
        for status, path in sorted(files, key=lambda file: -file[0].st_mtime):
            num_kept, num_bytes = num_kept + 1, num_bytes + status.st_size
            is_over = num_kept > max_files or num_bytes > self._max_bytes
            if is_over or status.st_mtime < time.time() - self._seconds:
                _remove_unlocked(path)


def _lock(descriptor: int) -> None:
    """Raises OSError where another process, or another descriptor, has the lock of the file."""
    import fcntl  # there is none on Windows

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked_now(descriptor: int) -> bool:
    """Lock a file; False: another process has the lock. Raises OSError where there are no locks."""
    try:
        _lock(descriptor)
    except BlockingIOError:
        return False
    return True


def _elsewhere() -> HttpError:
    message = "another server generates the response: ask that one, or later"
    return HttpError(409, message, code="response_elsewhere")


def _opened(path: Path) -> int:
    """Descriptor of a file that is there; of no link, and it waits for no other end of a pipe."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)


def _status(path: Path) -> os.stat_result | None:
    """Of a file or link; None: another server has removed it meanwhile."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _whole_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The values up to the first line that its server was killed in, or that a disk has lost, and
    the bytes that they take.
    """
    values, num_bytes = list[dict[str, Any]](), 0
    for line in data.splitlines(keepends=True):
        try:
            value = read_pieces(line.decode())
        except ValueError:
            break
        number = len(values) - 1  # of an event; the first line is none
        is_next = isinstance(value, dict) and value.get("sequence_number", -1) == number
        if not is_next or not line.endswith(b"\n"):
            break
        values.append(value)
        num_bytes += len(line)
    return values, num_bytes


def _remove_unlocked(path: Path) -> None:
    """Remove a file, unless the server that writes it is alive."""
    try:
        with path.open("r+b") as file:
            _lock(file.fileno())
            path.unlink()
    except OSError:
        return


def _write(descriptor: int, value: Mapping[str, Any]) -> None:
    is_whole = value.get("type") in ENDS  # it has all of the response
    text = write_pieces(value, _ENCODER) if is_whole else _ENCODER.encode(value).encode()
    line = memoryview(text + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


@dataclass(slots=True)
class Replay:
    """The events of a response of before, which are made again and are to be the same.

    A text may come in other parts: what counts is the text of an item as a whole. Of the
    log-probabilities of a text, as many are passed over as there were.

    Args:
        events: of before, in order.
    """

    events: Sequence[Mapping[str, Any]]
    _number: int = 0
    """Of the next one that is to come again."""
    _offset: int = 0
    """Characters of its text that have come."""
    _num_scores: int = field(init=False)
    """Log-probabilities in all of them that have not come."""

    def __post_init__(self) -> None:
        self._num_scores = sum(len(_scores(e)) for e in self.events if _is_delta(e["type"]))

    @property
    def is_over(self) -> bool:
        """Whether all of them have come again."""
        self._pass_whole_deltas()
        return self._number == len(self.events)

    def event(self, kind: str, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The event of before in whose place one without a delta comes; None: it is new.

        Raises HttpError where another one was there.
        """
        if self.is_over:
            return None
        event = self.events[self._number]
        if event["type"] != kind:
            raise _diverged(f"{event['type']} was there, and {kind} comes")
        if _called(event) != _called(fields):
            raise _diverged(f"{_called(event)} was called, and {_called(fields)} is now")
        self._number += 1
        return event

    def rest(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """The fields of a delta without what was there; None: all of it was. Raises HttpError."""
        scores = list(_scores(fields))
        num_passed = min(self._num_scores, len(scores))
        self._num_scores -= num_passed
        text, scores = self._rest_of_text(kind, fields["delta"]), scores[num_passed:]
        if not text and not scores:
            return None
        return {**fields, "delta": text, **({"logprobs": scores} if "logprobs" in fields else {})}

    def _rest_of_text(self, kind: str, text: str) -> str:
        while text:
            if self.is_over:
                return text
            event = self.events[self._number]
            if event["type"] != kind:
                raise _diverged(f"{event['type']} was there, and {kind} comes")
            before = event["delta"][self._offset :][: len(text)]
            if not text.startswith(before):
                raise _diverged("its text is another one")
            self._offset += len(before)
            text = text[len(before) :]
        return text

    def _pass_whole_deltas(self) -> None:
        while self._number < len(self.events):
            event = self.events[self._number]
            if not _is_delta(event["type"]) or self._offset < len(event["delta"]):
                return
            self._number, self._offset = self._number + 1, 0


def _is_delta(kind: str) -> bool:
    return kind.endswith(_DELTA)


def _scores(fields: Mapping[str, Any]) -> Sequence[Any]:
    return fields.get("logprobs") or ()


def _called(fields: Mapping[str, Any]) -> str | None:
    """The function that an item of an event calls; None: none."""
    name: str | None = fields.get("item", {}).get("name")
    return name


def _diverged(why: str) -> HttpError:
    return HttpError(500, f"the response cannot go on after its server has died: {why}")
