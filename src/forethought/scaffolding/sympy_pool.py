"""Processes that work on formulas with sympy, for one owner that ends them.

Sympy may take for ever and cannot be interrupted in a thread, so each formula goes to a process
(``sympy_process``) that ends when its time is up. A ``ScaffoldingLlm`` has one pool, shared by its
requests; processes are started when first needed, and end with the pool or with this process.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from forethought.errors import DependencyError, EngineStopped, ForethoughtError
from forethought.scaffolding.canonical_form import Form

_NUM_PROCESSES = 4
_REMEMBERED = 4096
_T = TypeVar("_T")


class Forms(NamedTuple):
    """Canonical forms of formulas."""

    known: Mapping[str, Form]
    """By formula; those without one, and those for which there was no time, are left out."""
    seconds: float
    """What working them out has taken, without waiting for a process and for its start."""


class SympyPool:
    """Up to four processes, each at one formula at a time. Safe to share between threads.

    ``await asyncio.wrap_future(pool.forms(...))`` on an event loop, ``.result()`` in a thread.
    Cancelling the future ends the process that works on the formula.

    Args:
        num_processes: at most so many at once; further formulas wait.
    """

    def __init__(self, num_processes: int = _NUM_PROCESSES) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._num_processes, self._closed = num_processes, False
        self._known: dict[str, Form] = {}

    def forms(
        self, formulas: Iterable[str], seconds: float, longest: float | None = None
    ) -> Future[Forms]:
        """Work out canonical forms.

        Args:
            formulas: parts of answers, without repetitions.
            seconds: for all of them together.
            longest: seconds for one of them, so that others have their chance after a hostile one.

        Raises:
            DependencyError: (by the future) ``math-verify`` is not installed.
            EngineStopped: (by the future) the pool has been closed.
        """
        texts, each = list(formulas), seconds if longest is None else longest
        return self._start(lambda job: self._forms(job, texts, seconds, each))

    def verify(self, gold: str, answer: str, seconds: float) -> Future[bool]:
        """Whether math-verify finds two answers equal; not if it takes more than ``seconds``.

        Raises:
            DependencyError: (by the future) ``math-verify`` is not installed.
            EngineStopped: (by the future) the pool has been closed.
        """
        request = {"seconds": seconds, "verify": [gold, answer]}
        return self._start(lambda job: bool(self._ask(job, request)[0]))

    def close(self) -> None:
        """End all processes; what they are at fails with ``EngineStopped``."""
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
        """Begin ``work`` in a thread that does not hold up the end of the interpreter."""
        job = _Job(work, self._changed)
        threading.Thread(target=job.run, name="forethought-sympy", daemon=True).start()
        return job.future

    def _forms(self, job: _Job[Any], texts: list[str], seconds: float, each: float) -> Forms:
        found, left = dict[str, Form](), seconds
        for text in texts:
            form = self._known.get(text)
            if form is None and left > 0:
                reply, took = self._ask(job, {"seconds": min(left, each), "form": text})
                left -= took
                form = None if reply is None else self._remember(text, _form(reply))
            if form is not None:
                found[text] = form
        return Forms(found, seconds - left)

    def _remember(self, text: str, form: Form) -> Form:
        with self._changed:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[text] = form
        return form

    def _ask(self, job: _Job[Any], request: dict[str, Any]) -> tuple[Any, float]:
        """What a process answers, None if it ended over it; and the seconds it took."""
        process = self._take(job)
        try:
            if not process.wait_ready():
                raise ForethoughtError(
                    "cannot work on formulas", "the process for it does not start"
                )
            began = time.monotonic()
            return process.ask(request), time.monotonic() - began
        finally:
            self._give_back(job, process)
            self._check(job)

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
        """Raise if ``job`` was cancelled."""
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
            [sys.executable, "-I", script, *directories],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self.alive, self._ready = True, False
        self.end = weakref.finalize(self, _end, popen)

    def wait_ready(self) -> bool:
        """Wait until it takes requests; whether it does."""
        self._ready = self._ready or bool(self._reply())
        return self._ready

    def kill(self) -> None:
        """Have it end; who waits for its answer gets none. For any thread."""
        self.alive = False
        self._popen.kill()

    def ask(self, request: dict[str, Any]) -> Any:
        """Its answer; None if it has none, or ended over it."""
        try:
            print(json.dumps(request), file=self._popen.stdin, flush=True)
        except OSError:
            self.alive = False
            return None
        line = self._reply()
        return json.loads(line) if line else None

    def _reply(self) -> str:
        assert self._popen.stdout is not None, "it was opened with a pipe"
        line = self._popen.stdout.readline()
        if not line.endswith("\n"):
            self.alive = False
            return ""
        return line


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


def _end(popen: subprocess.Popen[str]) -> None:
    popen.kill()
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was written and never read
                pipe.close()


def _form(reply: Any) -> Form:
    """The form in a reply: a fraction if it is one, lists as tuples."""
    if isinstance(reply, list):
        return tuple(part if number == 0 else _form(part) for number, part in enumerate(reply))
    whole, _, rest = reply.partition("/")
    return Fraction(int(whole), int(rest)) if rest.isdigit() else reply
