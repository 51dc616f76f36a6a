"""A sandbox for untrusted Python programs, such as those that a model has written.

A program is one process with the standard library and nothing else. It reads its standard input,
computes, may start threads, and may keep files in a directory of its own, which is empty at first
and deleted afterwards. It ends with its time; then nothing of it is left. It ends with its parent,
too; only a parent that is killed cannot delete the directory. ``namespaces`` and ``landlock`` both
guarantee, by a system call filter (seccomp: an allow list) and dropped capabilities:

* no network: no socket can be made, not even to this machine;
* no other process: none is started, signalled, traced or read, the parent included, so that a fork
  bomb, a daemon or a new session fails at its first call;
* no environment: the program sees none of the parent's variables, and of its open files only the
  three standard streams.

They differ in what is seen of files. The first kind that the machine allows is used:

==============  ====================================================================================
``namespaces``  User, mount, network, IPC and UTS namespaces. Nothing of the machine's file system
                is there but Python's own directories and the system's libraries, read-only. The
                program's files lie in memory. The superuser becomes ``nobody``. From Linux 5.12
                on, where users may make namespaces: not in Docker's default profile.
``landlock``    The same directories can be opened for reading and nothing else can; writing is
                possible in the program's directory alone, which is one of the machine's. Whether
                other files exist, their sizes and times can be seen (``stat``). From Linux 5.13 on
                where Landlock is enabled, also in containers.
``seccomp``     Not isolated, ``unsafe`` only: the filter alone. No network and no other process;
                but all files of the user can be read and written, and those in ``/proc`` hold the
                variables and the memory of the user's other processes.
``none``        Not isolated, ``unsafe`` only: everything that the user may do. Time, memory and
                file sizes are limited, for each process; processes that leave the program's process
                group outlive it.
==============  ====================================================================================

All limit the address space, the processor time, the time by the clock, the number of open files and
the size of a file. A program with more than 64 threads, 1024 files or ``disk_limit`` bytes in its
directory is killed at the next look, every 20 ms; the file system in memory ends at these limits.
The directory holds files only, no other directories. Code that exploits a bug in the kernel is not
held, nor is what a program learns from how long something takes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from forethought.errors import ForethoughtError, IsolationError, ParameterError
from forethought.sandbox.sandbox_process import MEMORY_EXIT

logger = logging.getLogger(__name__)

Status = Literal["ok", "error", "timeout", "memory"]
Isolation = Literal["namespaces", "landlock", "seccomp", "none"]
SAFE: tuple[Isolation, ...] = ("namespaces", "landlock")
"""The kinds that isolate, best first."""
UNSAFE: tuple[Isolation, ...] = ("seccomp", "none")

_MEBIBYTE = 2**20
_START_SECONDS = 60.0
_MAX_THREADS = 64
_MAX_FILES = 1024
_TIME = "out of time"
_READY = b"ready"
"""What a process says that has isolated itself, and begins to run its program."""
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
_SCRIPT = str(Path(__file__).with_name("sandbox_process.py"))


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program has ended."""

    status: Status
    """``ok`` (exit code 0), ``error`` (any other, or a signal), ``timeout``, or ``memory`` (an
    uncaught ``MemoryError``)."""
    stdout: str
    """At most ``output_limit`` bytes; of more, the beginning and the end."""
    stderr: str
    """The same; the traceback of an uncaught exception is in it."""
    exit_code: int
    """Negative: the signal that has ended it."""
    seconds: float
    """By the clock, without the time to start and isolate it."""


class Sandbox:
    """Runs Python programs in isolation, several at once. Safe to share between threads.

    On an event loop: ``await asyncio.to_thread(sandbox.run, source)``; in a controller, yield a
    ``ComputeTask(sandbox.run, source)``.

    Args:
        time_limit: seconds for one program, by the clock and, rounded up, of processor time.
        memory_limit: bytes of address space; Python itself takes about 30 MiB.
        disk_limit: bytes of each output stream, of each file, and of all files together.
        output_limit: bytes that a result keeps of each stream.
        max_running: programs at once, further ones wait; None: as many as there are processors.
        unsafe: run also where programs cannot be isolated, with what isolation there is.

    Attributes:
        isolation: the kind in use.

    Raises:
        IsolationError: programs cannot be isolated here, and ``unsafe`` is not given.
        ParameterError: a limit is out of its range.
    """

    def __init__(
        self,
        *,
        time_limit: float = 10.0,
        memory_limit: int = 512 * _MEBIBYTE,
        disk_limit: int = 16 * _MEBIBYTE,
        output_limit: int = 65536,
        max_running: int | None = None,
        unsafe: bool = False,
    ) -> None:
        num_slots = os.cpu_count() or 1 if max_running is None else max_running
        _check("time_limit", time_limit, 0.01, 86400.0)
        _check("memory_limit", memory_limit, 64 * _MEBIBYTE, 2**50)
        _check("disk_limit", disk_limit, 4096, 2**40)
        _check("output_limit", output_limit, 256, disk_limit)
        _check("max_running", num_slots, 1, 4096)
        self._time_limit, self._output_limit = float(time_limit), output_limit
        self._limits = {
            "memory": memory_limit,
            "seconds": math.ceil(time_limit) + 1,
            "file_size": disk_limit,
            "disk": disk_limit,
        }
        self._slots = threading.BoundedSemaphore(num_slots)
        self.isolation = find_isolation(unsafe=unsafe)

    def run(self, source: str, stdin: str = "") -> SandboxResult:
        """Run a program to its end. Blocks: not for an event loop.

        Args:
            source: of the program, which runs as ``__main__``.
            stdin: its standard input.

        Raises:
            ForethoughtError: its process cannot be started; a program that fails is a result.
        """
        with self._slots, _Streams(source, stdin) as streams:
            settings = {**self._limits, "isolation": self.isolation}
            with _started(settings, streams) as process:
                return self._result(process, streams)

    def _result(self, process: _Process, streams: _Streams) -> SandboxResult:
        began = time.monotonic()
        excess = process.wait(self._time_limit, self._limits["disk"])
        seconds = time.monotonic() - began
        code = process.end()
        status: Status = "ok" if code == 0 and not excess else "error"
        if excess == _TIME or code == -signal.SIGXCPU:
            status = "timeout"
        elif code == MEMORY_EXIT:
            status = "memory"
        out, error = [_shortened(stream, self._output_limit) for stream in streams.outputs]
        if excess:
            error += f"\n[killed: {excess}]\n"
        return SandboxResult(status, out, error, code, seconds)


def find_isolation(*, unsafe: bool = False) -> Isolation:
    """The first kind of isolation that works on this machine, by trying them.

    Args:
        unsafe: whether ``seccomp`` and ``none`` are acceptable.

    Raises:
        IsolationError: there is none; names what is missing.
    """
    missing: list[str] = []
    for kind in (*SAFE, *UNSAFE) if unsafe else SAFE:
        why = why_not(kind)
        if why is None:
            if kind in UNSAFE:
                logger.warning("programs are not isolated (%s): %s", kind, "; ".join(missing))
            return kind
        missing.append(f"{kind}: {why}")
    raise IsolationError(
        "programs cannot be isolated on this machine",
        "; ".join(missing),
        "Allow user namespaces or enable Landlock (Linux 5.13), or run them with what isolation "
        "there is: unsafe=True, --unsafe-code",
    )


def why_not(kind: Isolation) -> str | None:
    """Why a kind of isolation does not work on this machine; None: it does.

    An isolated program tries what it must not do.
    """
    if kind == "none":
        return None
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    limits = {"memory": 512 * _MEBIBYTE, "seconds": 10, "file_size": 4096, "disk": 4096}
    with tempfile.NamedTemporaryFile(prefix="forethought-") as secret:
        source = _PROBE.format(secret=secret.name, kind=kind)
        try:
            with (
                _Streams(source, "") as streams,
                _started({**limits, "isolation": kind}, streams) as process,
            ):
                process.wait(_START_SECONDS, _MEBIBYTE)
                code = process.end()
                tail = _shortened(streams.outputs[1], 4096).strip().splitlines()[-1:]
        except ForethoughtError as error:
            return error.why
    return None if code == 0 else f"a program was able to break it ({''.join(tail) or code})"


_PROBE = """
import os, socket
def refused(action, *values):
    try:
        action(*values)
    except OSError:
        return True
    return False
assert refused(socket.socket), "a socket"
assert refused(os.fork), "another process"
assert refused(os.kill, os.getppid(), 0), "a signal"
if {kind!r} != "seccomp":
    assert refused(open, {secret!r}), "a file"
open("own", "w").close()
"""


# ---- one process ---------------------------------------------------------------------------------


class _Process:
    """A program's process, which has isolated itself."""

    def __init__(self, popen: subprocess.Popen[bytes], directory: str) -> None:
        self._popen, self._directory = popen, directory

    def wait(self, seconds: float, disk: int) -> str | None:
        """Wait until it has ended, and leave it a zombie; returns the limit that it has exceeded,
        if any.

        Args:
            seconds: until then.
            disk: bytes of all its files.
        """
        deadline, delay = time.monotonic() + seconds, 0.0005
        while not self._has_ended():
            seconds_left = deadline - time.monotonic()
            excess = _TIME if seconds_left <= 0 else self._excess(disk)
            if excess is not None:
                return excess
            delay = min(delay * 2, 0.02)
            time.sleep(min(delay, seconds_left))
        return None

    def _excess(self, disk: int) -> str | None:
        with contextlib.suppress(OSError):  # it has just ended, or there is no /proc
            if len(os.listdir(f"/proc/{self._popen.pid}/task")) > _MAX_THREADS:
                return f"more than {_MAX_THREADS} threads"
        used = 0
        with os.scandir(self._directory) as files:
            for number, file in enumerate(files, start=1):
                with contextlib.suppress(FileNotFoundError):
                    used += file.stat(follow_symlinks=False).st_blocks * 512
                if used > disk or number > _MAX_FILES:
                    return f"more than {disk} bytes or {_MAX_FILES} files"
        return None

    def end(self) -> int:
        """Kill its process group and reap it; its exit code."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        return self._popen.wait()

    def _has_ended(self) -> bool:
        if self._popen.returncode is not None:
            return True
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._popen.pid, how) is not None


class _Streams:
    """The files of a program: its source, its standard streams, and its directory."""

    def __init__(self, source: str, stdin: str) -> None:
        self._stack = contextlib.ExitStack()
        self.source, self.stdin = self._file(source), self._file(stdin)
        self.outputs = (self._file(""), self._file(""))
        self.directory = tempfile.mkdtemp(prefix="forethought-sandbox-")
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)

    def _file(self, text: str) -> IO[bytes]:
        stream = tempfile.TemporaryFile()  # noqa: SIM115
        self._stack.push(stream)
        stream.write(text.encode("utf-8", "replace"))
        stream.seek(0)
        return stream

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def _started(settings: dict[str, Any], streams: _Streams) -> Iterator[_Process]:
    """An isolated process that begins to run its program; it is killed on exit.

    Raises:
        ForethoughtError: it cannot isolate itself; ``why`` names what is missing.
    """
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as status:
        try:
            popen = _popen({**settings, "status": writing}, streams)
        finally:
            os.close(writing)
        process = _Process(popen, streams.directory)
        try:
            status_text = _read_all(status, time.monotonic() + _START_SECONDS)
            if status_text != _READY:
                raise ForethoughtError(
                    "cannot start a program", _why(status_text, process, streams)
                )
            yield process
        finally:
            process.end()


def _why(status_text: bytes, process: _Process, streams: _Streams) -> str:
    """Why a process has not isolated itself: its status, or Python's error at its end."""
    if status_text:
        return status_text.decode(errors="replace")
    code = process.end()
    lines = _shortened(streams.outputs[1], 4096).strip().splitlines()
    return f"its process ended with code {code}{f': {lines[-1]}' if lines else ''}"


def _popen(settings: dict[str, Any], streams: _Streams) -> subprocess.Popen[bytes]:
    passed = (streams.source.fileno(), settings["status"])
    request = {
        **settings,
        "source": passed[0],
        "directory": streams.directory,
        "readable": _readable(),
        "parent": os.getpid(),
    }
    variables = {"TMPDIR": streams.directory, "HOME": streams.directory}
    if settings["isolation"] == "namespaces":
        variables = {"TMPDIR": "/tmp", "HOME": "/tmp"}
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-S", "-X", "utf8", _SCRIPT, json.dumps(request)],
        stdin=streams.stdin,
        stdout=streams.outputs[0],
        stderr=streams.outputs[1],
        env=_ENVIRONMENT | variables,
        cwd="/",
        pass_fds=passed,
        start_new_session=True,
    )


def _readable() -> list[str]:
    """The files that a program may read: Python's own, the system's libraries, and two devices."""
    directories = [f"{prefix}/lib" for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    directories.append(os.path.dirname(os.__file__))
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/dev/null", "/dev/urandom"]
    paths = dict.fromkeys(
        os.path.abspath(path) for path in [*directories, *system] if os.path.exists(path)
    )
    return sorted(paths, key=lambda path: path.count("/"))


def _read_all(status: IO[bytes], deadline: float) -> bytes:
    """The content of a pipe until it ends in ``ready`` or is closed, or until the deadline."""
    content, poll = b"", select.poll()
    poll.register(status, select.POLLIN)
    while content != _READY and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = status.read(4096)
        if not part:
            break
        content += part
    return content


def _shortened(stream: IO[bytes], limit: int) -> str:
    """The text of a stream; of a longer one its beginning and its end."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if size <= limit:
        return stream.read().decode(errors="replace")
    half = limit // 2
    head = stream.read(half).decode(errors="replace")
    stream.seek(size - half)
    tail = stream.read(half).decode(errors="replace")
    return f"{head}\n[{size - 2 * half} bytes left out]\n{tail}"


def _check(name: str, value: float, lowest: float, highest: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest:
        raise ParameterError(
            f"invalid {name}", f"got {value!r}", f"Give a number from {lowest} to {highest}"
        )
