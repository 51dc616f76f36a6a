"""Runs the application with uvicorn until the process gets a signal to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

import uvicorn
from fastapi import FastAPI

from forethought.errors import UsageError
from forethought.garbage_collection import left_out_of_collections, rare_collections
from forethought.server.limits import Admission
from forethought.server.service import Service

_CLOSING_SECONDS = 1
"""For connections whose requests were cancelled when the drain time was over."""
_POLL_SECONDS = 0.1
"""How often a second signal is looked for."""
_MAX_HEAD = 1 << 16
"""Bytes of the headers of a request."""
_LOG_SECONDS = 0.1
"""How long lines of the log are gathered."""
_MAX_LINES = 1 << 16
"""Of the log that wait to be written; further ones are lost."""


class Server(uvicorn.Server):
    """uvicorn, which refuses new requests from the first signal on and finishes what runs.

    While requests run, the server still listens and answers others with 503. It ends after
    ``drain_seconds``, or at once with a second signal.
    """

    def __init__(self, app: FastAPI, drain_seconds: float) -> None:
        config = uvicorn.Config(
            app,
            http=_impatient(_protocol(), app.state.settings.receive_seconds),
            access_log=False,
            log_config=None,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        super().__init__(config)
        self._app, self._drain_seconds = app, drain_seconds

    @property
    def _admission(self) -> Admission | None:
        service: Service | None = getattr(self._app.state, "service", None)
        return None if service is None else service.admission

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: end, after what runs; a second one ends at once. It is not raised again
        afterwards, so that the process ends with a status of its own.
        """
        if self._admission is not None:
            self._admission.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what runs, then close the connections and the application."""
        if self._admission is not None:
            draining = asyncio.create_task(self._admission.drain(self._drain_seconds))
            while not draining.done() and not self.force_exit:
                await asyncio.wait([draining], timeout=_POLL_SECONDS)
            draining.cancel()
            self._app.state.service.end_calls()
        await super().shutdown(sockets)


def _protocol() -> type[asyncio.Protocol]:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ModuleNotFoundError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol
    return _without_upgrades(HttpToolsProtocol)


def _without_upgrades(protocol: type[Any]) -> type[asyncio.Protocol]:
    """A protocol of HTTP that answers a request to upgrade as one without that header.

    httptools takes what follows the headers of such a request for another protocol. Clients that
    offer HTTP/2 with every request, as those of Java do, would lose their bodies.
    """
    import httptools

    class WithoutUpgrades(protocol):  # type: ignore[misc]
        """Reads the request again without the header."""

        _head: bytes | None = None
        _data = b""

        def data_received(self, data: bytes) -> None:
            self._data = data
            super().data_received(data)

        def on_headers_complete(self) -> None:
            method = self.parser.get_method()
            if not self.parser.should_upgrade() or method == b"CONNECT":
                super().on_headers_complete()
                return
            version = self.parser.get_http_version().encode()
            lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
            lines += [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self._head = b"\r\n".join([*lines, b"", b""])

        def on_message_complete(self) -> None:
            if self._head is None:
                super().on_message_complete()

        def _unsupported_upgrade_warning(self) -> None:
            """Called while the parser's exception, which tells where it stopped, is handled."""
            stopped = sys.exc_info()[1]
            if self._head is None or stopped is None:
                return
            head, self._head = self._head, None
            self.parser = httptools.HttpRequestParser(self)
            with contextlib.suppress(AttributeError):  # of httptools before 0.6.3
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.data_received(head + self._data[stopped.args[0] :])

    return WithoutUpgrades


def _impatient(protocol: type[Any], seconds: float) -> type[asyncio.Protocol]:
    """A protocol of HTTP that closes a connection whose next request does not arrive.

    Else clients that send a header a minute, or headers without end, hold connections and memory.
    ``seconds`` count from the connection, or the first byte of a further request, to the end of the
    headers.
    """

    class Impatient(protocol):  # type: ignore[misc]
        """Closes it after ``seconds`` without a request."""

        _timer: asyncio.TimerHandle | None = None
        _num_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._follow()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._num_bytes += len(data)
            self._follow()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _follow(self) -> None:
            if self.cycle is not None and self.cycle.more_body:
                self._num_bytes = 0  # it has been answered, and its body is read to its end
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
                self._num_bytes = 0
            elif self._num_bytes > _MAX_HEAD:
                self.transport.close()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self._give_up)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Impatient


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen yet: connections are refused.

    Raises UsageError if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise _unusable(host, port, error) from error
    opened.set_inheritable(False)
    return opened


def _unusable(host: str, port: int, error: OSError) -> UsageError:
    why = error.strerror or str(error)
    return UsageError(f"cannot listen at {host} port {port}", why, "Give another --host or --port")


def serve(
    app: FastAPI, bound: socket.socket, drain_seconds: float, announce: Callable[[str], None]
) -> int:
    """Serve until a signal; returns the exit status: 0 unless a second signal cut off what ran.

    Args:
        bound: socket of ``bind``.
        drain_seconds: for requests that run when the signal comes.
        announce: called with the URL once requests can come.

    Raises:
        UsageError: another process has begun to listen at the address.
    """
    host, port = bound.getsockname()[:2]
    try:
        bound.listen(2048)
    except OSError as error:
        raise _unusable(host, port, error) from error
    shown = f"[{host}]" if ":" in host else host
    announce(f"http://{shown}:{port}")
    server = Server(app, drain_seconds)
    # The event loop waits for each collection: one of all objects takes a second with those of
    # fifty thousand samples.
    with left_out_of_collections(), rare_collections():
        server.run(sockets=[bound])
    return 0 if server.started and not server.force_exit else 1


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the lines of a log together every ``seconds``; warnings and errors without delay.

    A write wakes up what reads the log; one per request would cost several per cent of the event
    loop's time. A thread writes, so that nobody who logs waits for a disk or a full pipe.
    """

    def __init__(self, stream: TextIO, seconds: float = _LOG_SECONDS) -> None:
        super().__init__(stream)
        self._seconds, self._lines = seconds, deque[str]()
        self._writing = threading.Lock()
        self._has_lines, self._is_urgent = threading.Event(), threading.Event()
        threading.Thread(target=self._write_late, name="forethought-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line."""
        try:
            if len(self._lines) < _MAX_LINES:
                self._lines.append(self.format(record) + self.terminator)
            if record.levelno >= logging.WARNING:
                self._is_urgent.set()
            if not self._has_lines.is_set():
                self._has_lines.set()
        except Exception:  # as logging does: a line that cannot be written hurts nothing else
            self.handleError(record)

    def flush(self) -> None:
        """Write what has been gathered; also called at the end of the process."""
        with self._writing:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if lines:
                self.stream.write("".join(lines))
            self.stream.flush()

    def _write_late(self) -> None:
        while True:
            self._has_lines.wait()
            self._is_urgent.wait(self._seconds)
            self._has_lines.clear()
            self._is_urgent.clear()
            with contextlib.suppress(OSError, ValueError):  # the stream is closed
                self.flush()
