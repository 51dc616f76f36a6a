"""``ClientWorker``: the base of workers that send requests to a server.

``Clients`` holds a client of the ``openai`` package per event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forethought.errors import UsageError
from forethought.scaffolding.worker import Worker
from forethought.workers.routing import shown_url

CONNECTION_ERRORS = ("APIConnectionError", "ReadError", "RemoteProtocolError")
"""Names of exceptions of ``openai`` and ``httpx``, which need not be installed."""


def is_stream_error(error: Any) -> bool:
    """Whether ``openai`` raises this error for one that a server has sent within a stream."""
    return type(error).__name__ == "APIError"


class Clients:
    """A client per event loop, since the connections of a client belong to one loop.

    Args:
        client: an ``openai.AsyncOpenAI``, of which every loop gets a copy; a double without
            connections, which serves all loops; or a function that makes a client.
    """

    def __init__(self, client: Any) -> None:
        self._given, self._is_taken = client, False
        self._by_loop: dict[asyncio.AbstractEventLoop, Any] = {}
        self._lock = threading.Lock()

    def of_this_loop(self) -> Any:
        """The client of the running loop; ``UsageError`` if there can be no second one."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._by_loop:
                open_loops = [other for other in self._by_loop if not other.is_closed()]
                self._by_loop = {other: self._by_loop[other] for other in open_loops}
                self._by_loop[loop] = self._new()
            return self._by_loop[loop]

    async def close(self) -> None:
        """Close the client of the running loop, unless it is the constructor's."""
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._by_loop.get(loop, self._given)
            if client is self._given:
                return
            del self._by_loop[loop]
        await client.close()

    def _new(self) -> Any:
        client = self._given
        if not hasattr(client, "completions") and callable(client):
            return client()
        http = getattr(client, "_client", None)
        if http is None or not hasattr(client, "copy"):
            return client
        base = importlib.import_module("openai._base_client")
        default = getattr(base, "AsyncHttpxClientWrapper", None)
        if type(http) is default:
            return client.copy(
                http_client=default(base_url=client.base_url, timeout=client.timeout)
            )
        if self._is_taken:
            raise UsageError(
                "this client cannot serve a second event loop",
                "its connections belong to the first, and its http_client was set up by hand",
                "Give the worker a function that makes it: OpenaiWorker(lambda: ..., model)",
            )
        self._is_taken = True
        return client


class ClientWorker(Worker):
    """Base of workers that send requests with a client per event loop.

    Args:
        async_client: see ``Clients``.
    """

    def __init__(self, async_client: Any) -> None:
        self.async_client = async_client
        self._clients = Clients(async_client)
        self._num_open: Counter[asyncio.AbstractEventLoop] = Counter()

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request as open on the running loop."""
        loop = asyncio.get_running_loop()
        self._num_open[loop] += 1
        try:
            yield
        finally:
            self._num_open[loop] -= 1
            if not self._num_open[loop]:
                del self._num_open[loop]

    def connection_error(self, error: Exception, begun: bool) -> ConnectionError:
        """A connection error of the client, with the address and the system's reason.

        Args:
            error: as the client raises it.
            begun: whether the answer had begun.
        """
        url = getattr(self._clients.of_this_loop(), "base_url", "an unknown address")
        url = shown_url(str(url))
        what = f"the connection to {url} was lost" if begun else f"no server answers at {url}"
        return ConnectionError(f"{what} ({error.__cause__ or error})")

    async def on_loop_end(self) -> None:
        """Close this loop's connections, unless requests are in flight on them."""
        if not self._num_open[asyncio.get_running_loop()]:
            await self._clients.close()

    async def async_shutdown(self) -> None:
        """Close this loop's connections."""
        await self._clients.close()
