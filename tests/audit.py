"""What Python does beyond computing, by its audit events: imports, files, processes, sockets."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_HARMLESS_TO_WATCH = (
    *("import", "open", "exec", "compile", "ctypes.dlopen", "glob.glob", "socket.getaddrinfo"),
    *("os.listdir", "os.scandir", "os.chdir", "os.mkdir", "os.remove", "os.rename", "tempfile"),
)
_PREVENTED = (
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn"),
    *("subprocess.Popen", "socket.connect", "socket.bind", "shutil.rmtree", "webbrowser.open"),
)


class Prevented(RuntimeError):
    """Raised in the place of what would have run."""


class _Watch:
    """The one audit hook of the process, which cannot be removed: idle unless events are wanted."""

    def __init__(self) -> None:
        self.events: list[str] | None = None
        self.is_watched: Callable[[int], bool] = lambda thread: True

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        events = self.events
        if events is None or not self.is_watched(threading.get_ident()):
            return
        if event in _HARMLESS_TO_WATCH or event in _PREVENTED:
            events.append(f"{event} {args!r:.200}")
            if event in _PREVENTED:
                raise Prevented(event)


@functools.cache
def _installed() -> _Watch:
    watch = _Watch()
    sys.addaudithook(watch.hook)
    return watch


@contextmanager
def audited(is_watched: Callable[[int], bool]) -> Iterator[list[str]]:
    """The events of the watched threads, each as one line; processes and connections do not start.

    Args:
        is_watched: of the identifier of a thread.
    """
    watch, events = _installed(), list[str]()
    watch.events, watch.is_watched = events, is_watched
    try:
        yield events
    finally:
        watch.events = None
