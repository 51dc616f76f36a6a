"""Runs the application with uvicorn until the process is told to end."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from forethought.errors import UsageError
from forethought.server.service import Service


class Server(uvicorn.Server):
    """uvicorn, which refuses new requests from the first signal on and finishes what runs.

    Args:
        app: to be served.
        drain_seconds: for what runs.
    """

    def __init__(self, app: FastAPI, drain_seconds: float) -> None:
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=math.ceil(drain_seconds) + 1,
        )
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: end, after what runs; a second one ends at once."""
        service: Service | None = getattr(self._app.state, "service", None)
        if service is not None:
            service.admission.draining = True
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UsageError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise UsageError(
            f"cannot listen at {host} port {port}", str(error), "Give another --host or --port"
        ) from error
    opened.listen(2048)
    opened.set_inheritable(False)
    return opened


def serve(
    app: FastAPI, host: str, port: int, drain_seconds: float, announce: Callable[[str], None]
) -> int:
    """Serve until a signal; returns the exit status.

    Args:
        app: the application.
        host: address to listen at.
        port: 0: any that is free.
        drain_seconds: for requests that run when the signal comes.
        announce: called with the URL once requests can come.
    """
    with listen(host, port) as opened:
        bound = opened.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{bound}")
        server = Server(app, drain_seconds)
        server.run(sockets=[opened])
    return 0 if server.started else 1
