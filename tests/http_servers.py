"""Servers of this package on a free port of this machine, and plain requests to them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from openai import OpenAI

from forethought.server.app import create_app
from forethought.server.backends.backend import Backend
from forethought.server.backends.scripted_backend import ScriptedBackend
from forethought.server.runner import Server, bind
from forethought.server.service import Service
from forethought.server.settings import Settings
from forethought.workers.scripted import Script

WAIT = 60.0
"""Seconds after which something that should have happened is taken not to happen."""


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """Of a refusal, in OpenAI's shape."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Server-sent events: name and data."""
        found = []
        for block in self.text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines())
            if lines:
                data = lines["data"]
                name = lines.get("event", "message")
                found.append((name, data if data == "[DONE]" else json.loads(data)))
        return found


class Served(NamedTuple):
    """A server that runs."""

    port: int
    backend: Any
    server: Server
    service: Service
    client: OpenAI
    """The official client."""
    thread: threading.Thread
    """In which it runs."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def send(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = WAIT,
    ) -> Answer:
        """One request; ``body`` is sent as it is if it is bytes, and else as JSON."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as opened:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            sent = {"content-type": "application/json", **(headers or {})}
            opened.request(method or ("GET" if data is None else "POST"), path, data, sent)
            answer = opened.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read().decode())


@contextmanager
def served(
    backend: Backend, settings: Settings | None = None, drain_seconds: float = WAIT
) -> Iterator[Served]:
    """A server in a thread, ended at the end."""
    app = create_app(backend, settings)
    with bind("127.0.0.1", 0) as opened:
        opened.listen()
        server, started = Server(app, drain_seconds), threading.Event()
        failed: list[BaseException] = []
        own_startup = server.startup

        async def startup(*args: Any, **kwargs: Any) -> None:
            try:
                await own_startup(*args, **kwargs)
            finally:
                started.set()

        def run() -> None:
            try:
                server.run(sockets=[opened])
            except BaseException as error:
                failed.append(error)

        server.startup = startup  # type: ignore[method-assign]
        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert started.wait(WAIT)
            port = opened.getsockname()[1]
            url = f"http://127.0.0.1:{port}/v1"
            with OpenAI(base_url=url, api_key="key", max_retries=0, timeout=WAIT) as client:
                yield Served(port, backend, server, app.state.service, client, thread)
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()
            assert not failed


@contextmanager
def scripted(
    script: Script, settings: Settings | None = None, drain_seconds: float = WAIT
) -> Iterator[Served]:
    """A server with scripted answers."""
    with served(ScriptedBackend(script), settings, drain_seconds) as running:
        yield running


def eventually(condition: Callable[[], Any]) -> None:
    """Until something holds that another thread brings about."""
    waiting, latest = threading.Event(), time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < latest, "it did not happen in time"
        waiting.wait(0.01)
