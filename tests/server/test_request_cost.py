"""What a request with a method costs the event loop, in calls of Python functions."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from forethought.config import registry
from forethought.server.app import create_app
from forethought.server.backends.scripted_backend import ScriptedBackend

MOST_CALLS = 7_000
"""Of ``majority_vote@8`` over answers of one token: about 2 ms of processor time in 2026."""


class Client:
    """Sends requests to an application on the same event loop."""

    def __init__(self, method: str) -> None:
        self.app = create_app(ScriptedBackend(lambda prompt, index: str(index % 3)))
        messages = [{"role": "user", "content": "2 + 2 = ?"}]
        self._body = json.dumps({"messages": messages, "method": method}).encode()

    async def send(self) -> int:
        """The status of the answer."""
        received, statuses = list[bool](), list[int]()

        async def receive() -> Any:
            if received:
                await asyncio.Event().wait()
            received.append(True)
            return {"type": "http.request", "body": self._body, "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "app": self.app}
        await self.app({**scope, "headers": headers, "query_string": b""}, receive, send)
        return statuses[0]


def test_a_vote_over_eight_samples_takes_a_bounded_number_of_calls() -> None:
    client, num_calls = Client("majority_vote@8"), [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        num_calls[0] += event == "call"

    async def main() -> list[int]:
        async with client.app.router.lifespan_context(client.app):
            statuses = [await client.send()]
            sys.setprofile(count)
            try:
                statuses.append(await client.send())
            finally:
                sys.setprofile(None)
            return statuses

    assert asyncio.run(main()) == [200, 200]
    assert 0 < num_calls[0] < MOST_CALLS, num_calls


def test_installed_distributions_are_scanned_once_and_not_for_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scans = list[str]()
    monkeypatch.setattr(registry, "entry_points", lambda group: scans.append(group) or ())
    registry._plugins.cache_clear()
    client = Client("dynasor+majority_vote@8|self_refine")

    async def main() -> list[int]:
        async with client.app.router.lifespan_context(client.app):
            before = len(scans)
            statuses = [await client.send() for _ in range(3)]
            return [*statuses, len(scans) - before]

    try:
        assert asyncio.run(main()) == [200, 200, 200, 0]
        registry.Registry("method", {}).names()
        registry.Registry("method", {}).names()
        assert scans.count("forethought.method") == 1
    finally:
        registry._plugins.cache_clear()
