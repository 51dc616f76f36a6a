"""The tools of MCP servers that the operator names, listed and called over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mcp_server
from forethought.cli import serve
from forethought.errors import UsageError
from forethought.server.settings import Settings
from http_servers import Served, scripted

pytest.importorskip("mcp")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with (
        mcp_server.serving() as url,
        scripted({"?": "x"}, Settings(mcp_servers=[url])) as running,
    ):
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
