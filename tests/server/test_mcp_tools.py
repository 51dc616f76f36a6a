"""The tools of MCP servers that the operator names, listed and called over HTTP."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mcp_server
from forethought.cli import serve
from forethought.errors import UsageError
from forethought.scaffolding.base_task import MCPCallTask
from forethought.server.settings import Settings
from forethought.workers.mcp import MCPWorker
from http_servers import Served, eventually, scripted

pytest.importorskip("mcp")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with (
        mcp_server.serving() as url,
        scripted({"?": "x"}, Settings(mcp_servers=[url])) as running,
    ):
        yield running


COMMAND = shlex.join([sys.executable, mcp_server.__file__])


@pytest.fixture(scope="module")
def local() -> Iterator[Served]:
    """A server whose tools are those of a program."""
    with scripted({"?": "x"}, Settings(mcp_servers=[COMMAND], max_running=4)) as running:
        yield running


def called(server: Served, name: str, arguments: str = "{}") -> dict[str, Any]:
    answer: dict[str, Any] = server.send(
        "/v1/tools/call", {"name": name, "arguments": arguments}
    ).json
    return answer


def test_tools_are_listed_in_the_form_that_requests_have(server: Served) -> None:
    tools = server.send("/v1/tools").json["data"]
    names = {tool["function"]["name"] for tool in tools}
    assert {"add", "echo", "divide"} <= names
    body = {"messages": [{"role": "user", "content": "?"}], "tools": tools}
    assert server.send("/v1/chat/completions", body).status == 200


def test_a_call_has_its_result_and_its_time(server: Served) -> None:
    answer = called(server, "add", '{"a": 30, "b": 1}')
    assert (answer["result"], answer["is_error"]) == ("31", False)
    assert 0 < answer["seconds"] < 60


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("nothing", "{}", "there is no tool 'nothing'"),
        ("divide", '{"a": 1, "b": 0}', "divide"),
        ("add", "no JSON", "the arguments are no JSON"),
    ],
)
def test_what_goes_wrong_in_a_tool_is_its_result(
    server: Served, name: str, arguments: str, why: str
) -> None:
    answer = called(server, name, arguments)
    assert answer["is_error"] is True
    assert answer["result"].startswith("Error: ")
    assert why in answer["result"]


def test_a_tools_server_that_is_not_there_is_told_before_a_model_is_loaded() -> None:
    with pytest.raises(UsageError, match="no MCP server answers at http"):
        serve.check_tools(Settings(mcp_servers=["http://127.0.0.1:9/mcp"]))
    serve.check_tools(Settings())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "add", "server": "http://x"}, "server"),
        ({"name": "add", "arguments": "[" * 100 + "]" * 100}, "arguments"),
    ],
)
def test_a_request_names_no_server_and_no_more_than_its_bounds(
    server: Served, body: dict[str, Any], param: str
) -> None:
    answer = server.send("/v1/tools/call", body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_server_without_tools_says_so() -> None:
    with scripted({"?": "x"}) as plain:
        assert plain.send("/v1/tools").json["data"] == []
        assert called(plain, "add")["is_error"] is True


def test_no_arguments_end_the_calls_of_others(local: Served) -> None:
    with ThreadPoolExecutor() as pool:
        other = pool.submit(called, local, "pause", '{"seconds": 0.5}')
        eventually(lambda: local.service.admission.unfinished)
        answer = called(local, "echo", '{"text": "\\ud800"}')
        assert answer["is_error"] is True
        assert "no JSON" in answer["result"]
        assert other.result()["result"] == "done"


def test_a_server_that_writes_no_text_is_still_understood(local: Served) -> None:
    local.service.mcp.call_timeout = 10.0
    assert called(local, "noise")["result"] == "done"
    assert called(local, "add", '{"a": 1, "b": 1}')["result"] == "2"


def test_an_error_is_cut_as_a_result_is(local: Served) -> None:
    answer = called(local, "refuse", '{"size": 100000}')
    assert answer["is_error"] is True
    assert len(answer["result"]) < 21_000


def test_a_message_that_is_too_long_is_an_error_of_its_call_alone(local: Served) -> None:
    with ThreadPoolExecutor() as pool:
        other = pool.submit(called, local, "pause", '{"seconds": 0.5}')
        eventually(lambda: local.service.admission.unfinished)
        answer = called(local, "long", LONG)
        assert answer["is_error"] is True
        assert "larger than 1,048,576 bytes" in answer["result"]
        assert other.result()["result"] == "done"
    shorter = called(local, "long", '{"size": 1000000}')
    assert shorter["is_error"] is False


LONG = '{"size": 30000000}'


def test_an_answer_over_http_has_a_limit() -> None:
    with (
        mcp_server.serving(json_response=True) as url,
        scripted({"?": "x"}, Settings(mcp_servers=[url])) as running,
    ):
        answer = called(running, "long", LONG)
        assert answer["is_error"] is True
        assert "larger than 1,048,576 bytes" in answer["result"]
        assert called(running, "add", '{"a": 1, "b": 1}')["result"] == "2"


def test_calls_that_hang_leave_places_to_chats(local: Served) -> None:
    local.service.mcp.call_timeout = 1.0
    with ThreadPoolExecutor(8) as pool:
        hanging = [
            pool.submit(local.send, "/v1/tools/call", {"name": "pause", "arguments": HANG})
            for _ in range(8)
        ]
        eventually(lambda: sum(call.done() for call in hanging) == 6)
        assert local.service.admission.unfinished == 2
        body = {"messages": [{"role": "user", "content": "?"}]}
        assert local.send("/v1/chat/completions", body).status == 200
    assert sorted(call.result().status for call in hanging) == [200] * 2 + [429] * 6


HANG = '{"seconds": 60}'


def test_a_dead_server_takes_no_tools_of_another_one_away(tmp_path: Path) -> None:
    mortal = f"{COMMAND} {tmp_path / 'started'} once"
    settings = Settings(mcp_servers=[mortal, COMMAND])
    with scripted({"?": "x"}, settings) as server:
        tools = server.send("/v1/tools").json
        assert "Connection closed" in called(server, "fall")["result"]
        assert called(server, "add", '{"a": 1, "b": 1}')["result"] == "2"
        assert server.send("/v1/tools").json == tools
        lost = called(server, "fall")
        assert (lost["result"], lost["is_error"]) == (UNREACHABLE, True)


UNREACHABLE = "Error: a server of tools cannot be reached."
"""Without its name: a command may hold a password."""


def test_a_call_may_take_longer_than_a_connection() -> None:
    async def waited(url: str, seconds: float) -> MCPCallTask:
        worker = MCPWorker([url], connect_timeout=seconds)
        pause = json.dumps({"seconds": 1.2 * seconds})
        task = MCPCallTask.create_mcptask("1", "pause", pause, "tool_call")
        await worker.call_handler(task)
        await worker.async_shutdown()
        return task

    with mcp_server.serving() as url:
        limits = (0.5, 2.0, 8.0, 32.0)  # a busy machine may take longer to connect than the first
        assert any(asyncio.run(waited(url, seconds)).result_str == "done" for seconds in limits)


def test_tools_that_no_request_could_have_are_told_before_a_model_is_loaded() -> None:
    async def listed(self: MCPWorker) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": f"t{i}"}} for i in range(129)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MCPWorker, "list_tools", listed)
        with pytest.raises(UsageError, match="fit in no request: List should have at most 128"):
            serve.check_tools(Settings(mcp_servers=[COMMAND]))
