"""``MCPWorker``: runs the tools of MCP servers, local processes or servers on the network.

::

    worker = MCPWorker([["python", "server.py"], "http://127.0.0.1:8000/mcp"])

The worker connects to a server at the first use of a tool, once per event loop, and stays connected
until the ``ScaffoldingLlm`` on that loop ends; a local process ends with the connection. An error
in a call is its result, for the model to read; a server that cannot be reached is an error of the
caller.

A message of a server has at most ``MAX_MESSAGE_BYTES``: a longer one is read by nothing that others
wait for, and is an error of the call that it answers. A local server runs under ``mcp_relay`` for
that; of the events of a stream the package has the same limit.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import math
import shlex
import shutil
import sys
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from pydantic_core import from_json

from forethought.errors import DependencyError, ParameterError, UsageError
from forethought.scaffolding.base_task import MCPCallTask, MCPToolListTask, TaskStatus
from forethought.scaffolding.settings import POSITIVE_INT, SECONDS, validated
from forethought.scaffolding.worker import Worker

_logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20
"""Of a server, which are parsed on the event loop."""
_RELAY = Path(__file__).with_name("mcp_relay.py")
_HTTP_SECONDS, _STREAM_SECONDS = 30.0, 300.0
"""Until a request has failed, and a stream from which nothing comes."""
_MAX_PAGES = 100
"""Pages of a server's list of tools that are read."""


class MCPWorker(Worker):
    """Executes ``MCPCallTask`` and ``MCPToolListTask``.

    Several servers may have a tool of the same name: the first one's is called.

    Args:
        urls: the servers: URLs (streamable HTTP; SSE if the path ends in ``/sse``), commands that
            start one, as text or as a list of words, or ``mcp.StdioServerParameters``.
        call_timeout: seconds until a call fails, with an error that the model reads.
        connect_timeout: seconds until a connection fails.
        max_result_chars: characters of a result that the model reads; the rest is cut off.

    Raises:
        ParameterError: there is no server, or a setting of the wrong kind.
        DependencyError: the ``mcp`` package is not installed.
    """

    def __init__(
        self,
        urls: Sequence[Any] | str,
        *,
        call_timeout: float = 60.0,
        connect_timeout: float = 30.0,
        max_result_chars: int = 20_000,
    ) -> None:
        self._mcp = _package()
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        if not self.urls:
            raise ParameterError(
                "MCPWorker has no server", "urls is empty", "Give a URL or command"
            )
        for server in self.urls:
            _transport(self._mcp, server)
        self.call_timeout = validated("call_timeout", call_timeout, SECONDS)
        self.connect_timeout = validated("connect_timeout", connect_timeout, SECONDS)
        self.max_result_chars = validated("max_result_chars", max_result_chars, POSITIVE_INT)
        self._connections: dict[asyncio.AbstractEventLoop, dict[int, _Connection]] = {}
        self._lock = threading.Lock()

    @classmethod
    def init_with_urls(cls, urls: Sequence[Any] | str, **settings: Any) -> Self:
        """An alias of the constructor."""
        return cls(urls, **settings)

    async def init_in_asyncio_event_loop(self) -> None:
        """Connect to all servers now, rather than at the first use; ``UsageError`` if one is
        unreachable.
        """
        await asyncio.gather(*[connection.ready() for connection in self._connected()])

    async def list_tools(self) -> list[dict[str, Any]]:
        """Descriptions of all tools, in OpenAI's form, for ``ChatTask.tools``."""
        descriptions: dict[str, dict[str, Any]] = {}
        for connection in await self._listed():
            for name, tool in connection.tools.items():
                descriptions.setdefault(name, _description(tool))
        return list(descriptions.values())

    # ---- tasks --------------------------------------------------------------------------------

    async def list_handler(self, task: MCPToolListTask) -> TaskStatus:
        """List the tools."""
        task.tools = await self.list_tools()
        return TaskStatus.SUCCESS

    async def call_handler(self, task: MCPCallTask) -> TaskStatus:
        """Call the tool; ``result_str`` has the error of a failed call."""
        try:
            result = await self._call(str(task.tool_name), _arguments(task.args))
        except _CallError as error:
            task.result_str, task.is_error = f"Error: {error}", True
            return TaskStatus.SUCCESS
        text = _text(result)
        task.is_error = bool(result.is_error)
        task.result_str = self._cut(f"Error: {text}" if task.is_error else text)
        task.result_stdout, task.result_stderr = (
            _structured(result, name) for name in ("stdout", "stderr")
        )
        return TaskStatus.SUCCESS

    task_handlers = {  # noqa: RUF012
        MCPCallTask: call_handler,
        MCPToolListTask: list_handler,
    }

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of a tool, as the package returns it; ``_CallError`` if there is none."""
        connections = await self._listed()
        owner = next((connection for connection in connections if name in connection.tools), None)
        if owner is None:
            names = ", ".join(
                sorted({tool for connection in connections for tool in connection.tools})
            )
            raise _CallError(f"there is no tool {name!r}. Tools: {self._cut(names) or 'none'}.")
        await owner.ready()
        try:
            return await owner.call(name, arguments, self.call_timeout)
        except TimeoutError:
            raise _CallError(f"{name} took more than {self.call_timeout} seconds.") from None
        except self._mcp.MCPError as error:
            if error.code == self._mcp.types.CONNECTION_CLOSED:
                await owner.close()  # the next call connects again
            raise _CallError(f"{name} failed: {self._cut(error.message)}") from error
        except (OSError, ValueError, RuntimeError) as error:
            reason = self._cut(str(error)) or type(error).__name__
            raise _CallError(f"{name} failed: {reason}") from error

    def _cut(self, text: str) -> str:
        extra = len(text) - self.max_result_chars
        if extra <= 0:
            return text
        return f"{text[: self.max_result_chars]}\n[{extra} more characters are left out]"

    # ---- connections --------------------------------------------------------------------------

    async def _listed(self) -> list[_Connection]:
        """The connections of this loop, once the tools of all are known. Those of a server that
        has been reached before are, and nothing waits for it.
        """
        connections = self._connected()
        await asyncio.gather(*[server.ready() for server in connections if not server.tools])
        return connections

    def _connected(self) -> list[_Connection]:
        """A connection of this loop to every server, in their order, which may not be ready yet."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for closed in [loop for loop in self._connections if loop.is_closed()]:
                del self._connections[closed]
            mine = self._connections.setdefault(loop, {})
            for number, server in enumerate(self.urls):
                previous = mine.get(number)
                if previous is None or previous.is_over:
                    connection = _Connection(self._mcp, server, self.connect_timeout)
                    connection.tools = {} if previous is None else previous.tools
                    mine[number] = connection
            return [mine[number] for number in range(len(self.urls))]

    async def on_loop_end(self) -> None:
        """Close the connections of this loop, unless calls are in flight; local servers end."""
        mine = self._connections.get(asyncio.get_running_loop(), {})
        if not any(connection.num_calls for connection in mine.values()):
            await self.async_shutdown()

    async def async_shutdown(self) -> None:
        """Close the connections of this loop; local servers end."""
        with self._lock:
            mine = self._connections.pop(asyncio.get_running_loop(), {})
        await asyncio.gather(*[connection.close() for connection in mine.values()])

    def shutdown(self) -> None:
        """Close the connections of all running loops, without waiting for it."""
        with self._lock:
            mine, self._connections = self._connections, {}
        for loop, connections in mine.items():
            for connection in connections.values():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(connection.stop)


class _CallError(Exception):
    """Why a call has no result, for the model to read."""


class _Connection:
    """The session with one server.

    One asyncio task opens it and closes it, as the package demands.

    Attributes:
        tools: the server's tools by name; until it is ready, those that it last had.
        num_calls: calls in flight.
    """

    def __init__(self, mcp: Any, server: Any, timeout: float) -> None:
        self._mcp, self._server, self._timeout = mcp, server, timeout
        self.tools: dict[str, Any] = {}
        self.num_calls = 0
        self._client: Any = None
        self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._task = loop.create_task(self._run(), name=f"MCP server {_name(server)}")
        self._task.add_done_callback(self._on_ended)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._stop.is_set() or self._task.done()

    async def ready(self) -> None:
        """Wait until tools can be called; ``UsageError`` if the server cannot be reached."""
        done, _ = await asyncio.wait(
            [self._opened, self._task], timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if self._opened in done:
            return
        reason = f"it has not answered within {self._timeout} s"
        if self._task.done():
            error = None if self._task.cancelled() else self._task.exception()
            reason = _reason(error) if error is not None else "the connection was closed"
        if not self.is_over:
            self.stop()
            self._task.cancel()
        raise UsageError(
            f"no MCP server answers at {_name(self._server)}", reason, "Start it, or correct urls"
        )

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> Any:
        self.num_calls += 1
        try:
            async with asyncio.timeout(timeout):
                return await self._client.call_tool(name, arguments, read_timeout_seconds=math.inf)
        finally:
            self.num_calls -= 1

    def stop(self) -> None:
        """Have it end; a local server is ended too."""
        self._stop.set()

    async def close(self) -> None:
        """End it and wait for that, also if this is cancelled meanwhile."""
        self.stop()
        await asyncio.shield(asyncio.wait([self._task]))

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._opened.done():
            _logger.warning("the MCP server %s ended: %s", _name(self._server), _reason(error))

    async def _run(self) -> None:
        async with self._mcp.Client(
            _transport(self._mcp, self._server), read_timeout_seconds=self._timeout
        ) as client:
            self.tools = await _tools(client)
            self._client = client
            if not self._opened.done():
                self._opened.set_result(None)
            await self._stop.wait()


async def _tools(client: Any) -> dict[str, Any]:
    """A server's tools by name."""
    tools: dict[str, Any] = {}
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools |= {tool.name: tool for tool in page.tools}
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _package() -> Any:
    try:
        return importlib.import_module("mcp")
    except ModuleNotFoundError as error:
        raise DependencyError.missing("mcp", "MCPWorker", "mcp") from error


def _transport(mcp: Any, server: Any) -> Any:
    """How to reach a server, as ``mcp.Client`` takes it: by URL or command."""
    if isinstance(server, str) and server.startswith(("http://", "https://")):
        if server.rstrip("/").endswith("/sse"):
            connect = importlib.import_module("mcp.client.sse").sse_client
            return connect(server, httpx_client_factory=_http_client)
        return _streamable(server)
    words = _words(server) if isinstance(server, str) else server
    if isinstance(words, list | tuple) and words and all(isinstance(w, str) for w in words):
        words = mcp.StdioServerParameters(command=words[0], args=list(words[1:]))
    if not isinstance(words, mcp.StdioServerParameters):
        raise ParameterError(
            "invalid MCP server",
            f"got {server!r}",
            "Give a URL, a command as a list of words, or mcp.StdioServerParameters",
        )
    # bytes that are no text would end the reading, and the connection would seem to be alive
    words = words.model_copy(update={"encoding_error_handler": "replace"})
    return mcp.stdio_client(_relayed(words), errlog=sys.__stderr__ or sys.stderr)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        fix = "Close its quotes as a shell would read them"
        raise ParameterError("invalid MCP server", f"{command!r}: {error}", fix) from error


def _relayed(server: Any) -> Any:
    """How to start a local server under the relay; one that cannot be started is left as it is,
    so that the error says why.
    """
    if (
        not sys.executable
        or shutil.which(server.command, path=(server.env or {}).get("PATH")) is None
    ):
        return server
    relay = ["-I", str(_RELAY), str(MAX_MESSAGE_BYTES), server.command, *server.args]
    return server.model_copy(update={"command": sys.executable, "args": relay})


@asynccontextmanager
async def _streamable(url: str) -> AsyncGenerator[Any, None]:
    connect = importlib.import_module("mcp.client.streamable_http").streamable_http_client
    async with _http_client() as client, connect(url, http_client=client) as streams:
        yield streams


def _http_client(
    headers: Mapping[str, str] | None = None, timeout: Any = None, auth: Any = None
) -> Any:
    """A client as the package makes it, whose answers have a limit."""
    httpx = importlib.import_module("httpx2")
    return httpx.AsyncClient(
        headers={**(headers or {}), "accept-encoding": "identity"},
        timeout=timeout or httpx.Timeout(_HTTP_SECONDS, read=_STREAM_SECONDS),
        auth=auth,
        event_hooks={"response": [_bound]},
    )


async def _bound(response: Any) -> None:
    """Have the body of an answer fail where it is too large; one that is packed may become so."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        is_packed = response.headers.get("content-encoding", "identity") != "identity"
        response.stream = _bounded_stream(response.stream, 0 if is_packed else MAX_MESSAGE_BYTES)


def _bounded_stream(stream: Any, limit: int) -> Any:
    httpx = importlib.import_module("httpx2")

    class Bounded(httpx.AsyncByteStream):  # type: ignore[misc, name-defined]
        async def __aiter__(self) -> AsyncGenerator[bytes, None]:
            num_bytes = 0
            async for chunk in stream:
                num_bytes += len(chunk)
                if num_bytes > limit:
                    raise httpx.StreamError(f"the message is larger than {limit:,} bytes")
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def _name(server: Any) -> str:
    """The name of a server in error messages, without the password of its URL."""
    if isinstance(server, str):
        scheme, mark, rest = server.partition("://")
        return f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else server
    if isinstance(server, list | tuple):
        return shlex.join(server)
    return shlex.join([server.command, *server.args])


def _reason(error: BaseException) -> str:
    """The message of the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _arguments(args: Any) -> dict[str, Any]:
    """Arguments as a dictionary; else ``_CallError``."""
    if args is None or args == "":
        return {}
    if isinstance(args, str):
        try:
            args = from_json(args, allow_inf_nan=False)  # no lone surrogates, which end a session
        except ValueError as error:
            raise _CallError(f"the arguments are no JSON: {error}.") from error
    if not isinstance(args, Mapping):
        raise _CallError("the arguments are no JSON object.")
    return dict(args)


def _description(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        },
    }


def _text(result: Any) -> str:
    """The text of a tool's result; images and sounds are replaced by their kind."""
    parts = [_block(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _block(block: Any) -> str:
    resource = getattr(block, "resource", None)
    text = getattr(block, "text", getattr(resource, "text", None))
    return f"[{block.type}]" if text is None else str(text)


def _structured(result: Any, name: str) -> str | None:
    content = result.structured_content
    value = content.get(name) if isinstance(content, Mapping) else None
    return value if isinstance(value, str) else None
