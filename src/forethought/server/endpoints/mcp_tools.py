"""``GET /v1/tools`` and ``POST /v1/tools/call``: the tools of the server's MCP servers.

The operator names the servers (``--mcp``). A client offers their tools to the model as those of a
request, and has the calls run here: the page does.
"""

from __future__ import annotations

import logging
import time
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.errors import UsageError
from forethought.scaffolding.base_task import MCPCallTask
from forethought.server.http import HttpError, until_disconnected
from forethought.server.protocol.body import ArgumentsText, Body
from forethought.server.service import Service

log = logging.getLogger(__name__)
_UNREACHABLE = "a server of tools cannot be reached"
"""What clients read; which one, and why, is in the log of the operator."""


class ToolRequest(Body):
    """``POST /v1/tools/call``; ``arguments`` as a model writes them."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: ArgumentsText = "{}"


async def tool_list(service: Service) -> dict[str, Any]:
    """The body of ``GET /v1/tools``, in OpenAI's form; HttpError: a server cannot be reached."""
    try:
        tools = [] if service.mcp is None else await service.mcp.list_tools()
    except UsageError as error:
        log.warning("%s", error)
        raise HttpError(502, _UNREACHABLE, code="upstream_error") from error
    return {"object": "list", "data": tools}


async def call_tool(service: Service, body: ToolRequest, request: Request) -> Response:
    """Run a tool. What goes wrong in it is its result, for the model to read."""
    with service.admitted_call():
        return await until_disconnected(request.receive, _called(service, body))


async def _called(service: Service, body: ToolRequest) -> Response:
    began = time.perf_counter()
    task = MCPCallTask.create_mcptask("", body.name, body.arguments, "tool_call")
    task.result_str, task.is_error = "Error: this server has no tools.", True
    if service.mcp is not None:
        try:
            await service.mcp.call_handler(task)
        except UsageError as error:
            log.warning("%s", error)
            task.result_str = f"Error: {_UNREACHABLE}."
    return JSONResponse(
        {
            "result": task.result_str or "",
            "is_error": task.is_error,
            "seconds": round(time.perf_counter() - began, 4),
        }
    )
