"""Processes that evaluate formulas with sympy, for one owner that ends them.

Sympy may take for ever and cannot be interrupted in a thread, so each formula goes to a process
(``sympy_process``), which counts steps of work. A ``ScaffoldingLlm`` has one pool, shared by its
requests; processes are started when first needed, and end with the pool or with this process. No
step here has a time limit: on a busy machine a form comes later, and is the same.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from forethought.answers.canonical_form import Form
from forethought.answers.exact_value import number_form, values_form
from forethought.errors import DependencyError, EngineStopped, ForethoughtError

_NUM_PROCESSES = 4
_REMEMBERED = 4096
_NUM_STARTS = 3
"""Attempts to start a process before it is given up."""
_T = TypeVar("_T")


class Forms(NamedTuple):
    """Canonical forms of formulas."""

    by_formula: Mapping[str, Form]
    """By formula; those that sympy cannot read are missing."""
    uncompared: frozenset[str] = frozenset()
    """The formulas that take more steps than they may."""


class SympyPool:
    """Up to four processes, each at one formula at a time. Safe to share between threads.

    ``await asyncio.wrap_future(pool.forms(...))`` on an event loop, ``.result()`` in a thread.
    Cancelling the future ends the process that works on the formula.

    Args:
        num_processes: the maximum; further formulas wait.
    """

    def __init__(self, num_processes: int = _NUM_PROCESSES) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._num_processes, self._closed = num_processes, False
        self._replies: dict[tuple[str, int], Any] = {}

    def forms(self, formulas: Iterable[str], steps: int) -> Future[Forms]:
        """Compute canonical forms.

        Args:
            formulas: parts of answers, without repetitions.
            steps: of work for each of them, see ``sympy_process``.

        Raises:
            DependencyError: (by the future) ``math-verify`` is not installed.
            ForethoughtError: (by the future) no process can be started.
            EngineStopped: (by the future) the pool has been closed.
        """
        texts = list(formulas)
        return self._start(lambda job: self._forms(job, texts, steps))

    def close(self) -> None:
        """End all processes; unfinished formulas fail with ``EngineStopped``."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()  # its thread sees that, and ends it
            self._changed.notify_all()
        for process in idle:
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- in threads of its own ------------------------------------------------------------------

    def _start(self, work: Callable[[_Job[_T]], _T]) -> Future[_T]:
        """Run ``work`` in a thread that does not delay the end of the interpreter."""
        job = _Job(work, self._changed)
        threading.Thread(target=job.run, name="forethought-sympy", daemon=True).start()
        return job.future

    def _forms(self, job: _Job[Any], texts: list[str], steps: int) -> Forms:
        replies = {text: self._reply(job, text, steps) for text in texts}
        uncompared = frozenset(text for text, reply in replies.items() if reply == _LIMIT)
        read = {text: reply for text, reply in replies.items() if isinstance(reply, dict)}
        return Forms({text: _form(reply) for text, reply in read.items()}, uncompared)

    def _reply(self, job: _Job[Any], text: str, steps: int) -> Any:
        """The reply of a process, or an earlier reply to the same formula."""
        key = text, steps
        reply = self._replies.get(key, _ENDED)
        if reply is _ENDED:
            reply = self._ask(job, {"form": text, "steps": steps})
            with self._changed:
                if len(self._replies) >= _REMEMBERED:
                    self._replies.clear()
                self._replies[key] = reply
        return reply

    def _ask(self, job: _Job[Any], request: dict[str, Any]) -> Any:
        """The reply of a process, or the limit, if two processes have ended over the request."""
        num_failed = 0
        for _ in range(_NUM_STARTS):
            process = self._take(job)
            try:
                if process.wait_ready():
                    reply = process.ask(request)
                    if reply is not _ENDED:
                        return reply
                    num_failed += 1
            finally:
                self._give_back(job, process)
                self._check(job)
        if num_failed:
            return _LIMIT
        raise ForethoughtError("cannot work on formulas", "the process for it does not start")

    def _take(self, job: _Job[Any]) -> _Process:
        """An idle process or a new one."""
        with self._changed:
            while len(self._busy) >= self._num_processes and not job.future.cancelled():
                self._changed.wait()
            self._check(job)
            job.process = self._idle.pop() if self._idle else _Process()
            self._busy.add(job.process)
            return job.process

    def _give_back(self, job: _Job[Any], process: _Process) -> None:
        with self._changed:
            job.process = None
            self._busy.discard(process)
            if process.alive:
                self._idle.append(process)
            self._changed.notify()
        if not process.alive:
            process.end()

    def _check(self, job: _Job[Any]) -> None:
        if self._closed or job.future.cancelled():
            raise EngineStopped("the work on formulas was stopped")


class _Job(Generic[_T]):
    """Work in a thread, and the process that runs it now."""

    def __init__(self, work: Callable[[_Job[_T]], _T], changed: threading.Condition) -> None:
        self.future: Future[_T] = Future()
        self.process: _Process | None = None
        self._work, self._changed = work, changed
        self.future.add_done_callback(self._end)

    def run(self) -> None:
        """Run it; the result of a cancelled job is not awaited."""
        try:
            result = self._work(self)
        except Exception as error:
            with contextlib.suppress(InvalidStateError):
                self.future.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self.future.set_result(result)

    def _end(self, future: Future[_T]) -> None:
        if future.cancelled():
            with self._changed:
                if self.process is not None:
                    self.process.kill()
                self._changed.notify_all()


class _Process:
    """One ``sympy_process`` and the two pipes to it; for one thread at a time."""

    def __init__(self) -> None:
        directories = _search_path()
        if importlib.machinery.PathFinder.find_spec("math_verify", directories) is None:
            raise DependencyError.missing("math-verify", "comparing formulas", "eval")
        script = str(Path(__file__).with_name("sympy_process.py"))
        self._popen = popen = subprocess.Popen(
            [sys.executable, "-P", "-s", script, *directories],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )
        self.alive, self._ready = True, False
        self.end = weakref.finalize(self, _end, popen)

    def wait_ready(self) -> bool:
        """Wait until it takes requests; returns whether it does."""
        self._ready = self._ready or bool(self._reply())
        return self._ready

    def kill(self) -> None:
        """End it; a waiting caller gets no reply. For any thread."""
        self.alive = False
        _kill(self._popen)

    def ask(self, request: dict[str, Any]) -> Any:
        """Its reply; ``_ENDED`` if it ended over it."""
        try:
            print(json.dumps(request), file=self._popen.stdin, flush=True)
        except OSError:
            self.alive = False
            return _ENDED
        line = self._reply()
        return json.loads(line) if line else _ENDED

    def _reply(self) -> str:
        assert self._popen.stdout is not None, "it was opened with a pipe"
        line = self._popen.stdout.readline()
        if not line.endswith("\n"):
            self.alive = False
            return ""
        return line


def _environment() -> dict[str, str]:
    """The process's environment: no variables that change what Python runs, one hash seed."""
    inherited = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
    return {**inherited, "PYTHONHASHSEED": "0"}


def _search_path() -> list[str]:
    """Where the process may import from: what this one has, without the working directory."""
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it has been deleted
        here = ""
    return [
        directory
        for directory in sys.path
        if os.path.isabs(directory) and os.path.realpath(directory) != here
    ]


def _kill(popen: subprocess.Popen[str]) -> None:
    """End the process and the fork that works on a formula."""
    if popen.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)


def _end(popen: subprocess.Popen[str]) -> None:
    _kill(popen)
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was written and never read
                pipe.close()


_LIMIT = "limit"
_ENDED = object()


def _form(reply: Mapping[str, Any]) -> Form:
    """The form in the reply to a formula."""
    [(kind, content)] = reply.items()
    if kind in {"structure", "infinity"}:
        return kind, content
    numbers = [number_form(*map(_number, parts)) for parts in content]
    return values_form(numbers) if kind == "values" else (kind, *numbers)


def _number(text: str) -> Fraction | Decimal:
    """A fraction in hexadecimal digits, or a decimal."""
    above, sign, below = text.partition("/")
    return Fraction(int(above, 16), int(below, 16)) if sign else Decimal(above)
