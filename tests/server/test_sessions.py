"""Requests of one session of an agent are placed together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from forethought import AsyncLLM
from forethought.cluster.placement import Placement
from forethought.scaffolding.execution_scope import current_scope
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.backends.remote_backend import RemoteBackend
from forethought.server.sessions import AgentSession, PlacementKeys
from forethought.server.settings import Settings
from forethought.workers.upstream import UpstreamWorker
from http_servers import Served, served
from openai_server import OpenaiServer, serving
from tokens import speaking

CHAT = "/v1/chat/completions"


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


@pytest.fixture
def upstream() -> Iterator[list[OpenaiServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving()) for _ in range(3)]


@pytest.fixture
def server(upstream: list[OpenaiServer]) -> Iterator[Served]:
    backend = RemoteBackend(UpstreamWorker([other.url for other in upstream], "m"), "m")
    with served(backend) as running:
        yield running
    backend.close()


def test_the_requests_of_a_session_go_to_one_upstream_server(
    server: Served, upstream: list[OpenaiServer]
) -> None:
    names = ["X-Session-Id", "x-dynamo-session-id"]
    for name in names:
        for number in range(6):
            answer = server.send(CHAT, say(f"{name} {number}"), headers={name: f"{name}-1"})
            assert answer.status == 200
    for number in range(6):
        context = {"session_id": "in the body"}
        body = say(f"body {number}", nvext={"agent_context": context})
        assert server.send(CHAT, body).status == 200
    asked = [[body["messages"][0]["content"] for body in other.requests] for other in upstream]
    requests = [[text.split()[0] for text in texts] for texts in asked]
    assert {(name, texts.count(name)) for texts in requests for name in texts} == {
        (name, 6) for name in [*names, "body"]
    }
    assert max(map(len, requests)) < 18


def test_a_method_of_a_session_and_its_children_are_with_it(
    server: Served, upstream: list[OpenaiServer]
) -> None:
    headers = {"X-Session-Id": "child", "X-Parent-Session-Id": "parent"}
    server.send(CHAT, say("first"), headers={"X-Session-Id": "parent"})
    server.send(CHAT, say("second", model="majority_vote@3-m"), headers=headers)
    server.send(CHAT, say("third"), headers={"X-Session-Id": "child"})
    grandchild = {"X-Session-Id": "grandchild", "X-Parent-Session-Id": "child"}
    server.send(CHAT, say("fourth"), headers=grandchild)
    assert sorted(len(other.requests) for other in upstream) == [0, 0, 6]


def test_an_id_that_is_too_long_is_refused(server: Served) -> None:
    answer = server.send(CHAT, say("a"), headers={"X-Session-Id": "x" * 257})
    assert answer.status == 400
    assert "x-session-id" in answer.error["message"]
    hints = say("a", nvext={"agent_hints": {"priority": 1}})
    assert "nvext.agent_hints" in server.send(CHAT, hints).error["param"]


def test_sessions_of_two_tenants_have_nothing_in_common() -> None:
    keys = PlacementKeys(max_sessions=3)
    session = AgentSession("one")
    first = keys.find("a", session)
    assert first != keys.find("b", session)
    assert keys.find("a", AgentSession("two", "one")) == first
    assert keys.find("a", AgentSession("two")) == first
    assert keys.find("a", AgentSession()) is None
    for number in range(3):
        keys.find("a", AgentSession(str(number)))
    assert len(keys._keys) == 3
    assert keys.find("a", AgentSession("two")) != first  # forgotten


def test_a_session_stays_on_a_replica_between_its_requests() -> None:
    class Replica:
        def __init__(self, name: str) -> None:
            self.name, self.load, self.capacity, self.takes = name, 0, 8, True

    replicas = [Replica("a"), Replica("b")]
    placement = Placement()
    home = placement.choose(replicas, "session", None)
    assert home is not None
    placement.opened("session", home)
    placement.closed("session")
    home.load = 5
    assert placement.choose(replicas, "session", None) is home
    placement.lost(home)
    assert placement.choose(replicas, "session", None) is not home


def test_plain_decoding_runs_in_the_scope_of_its_session() -> None:
    llm, scopes = AsyncLLM(speaking(), dtype="float32"), []
    generate = llm.generate

    async def noting(*args: Any, **kwargs: Any) -> Any:
        scopes.append(current_scope())
        return await generate(*args, **kwargs)

    with (
        mock.patch.object(llm, "generate", noting),
        served(EngineBackend(llm, "m"), Settings(api_keys=("key",))) as running,
    ):
        headers = {"Authorization": "Bearer key", "X-Session-Id": "mine"}
        body = {"prompt": "a", "max_tokens": 2}
        assert running.send("/v1/completions", body, headers=headers).status == 200
        del headers["X-Session-Id"]
        assert running.send("/v1/completions", body, headers=headers).status == 200
    llm.shutdown()
    with_session, without = scopes
    assert with_session is not None
    assert with_session.session.endswith("/mine")
    assert without is None
