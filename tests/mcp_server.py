"""A small MCP server for tests of what calls tools: over stdio as a program, over HTTP in a thread.

``python mcp_server.py FILE`` writes a line with its process id to FILE when it starts; with a
further argument its tool is one that ends it, and it does not start again.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from mcp import MCPError
from mcp.server.mcpserver import MCPServer


def make_server(stdout: int = 1) -> MCPServer:
    """A server with a few tools; the package takes ``stdout`` for its own."""
    server: Any = MCPServer("arithmetic", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def echo(text: str) -> str:
        """Say it again."""
        return text

    @server.tool()
    def divide(a: int, b: int) -> float:
        """Divide two numbers."""
        return a / b

    @server.tool()
    def shell(line: str) -> dict[str, str]:
        """Say what a command prints."""
        return {"stdout": f"ran {line}", "stderr": "none"}

    @server.tool()
    async def wait(port: int) -> str:
        """Connect to a port, and never come back."""
        socket.create_connection(("127.0.0.1", port)).close()
        await anyio.sleep_forever()

    @server.tool()
    async def pause(seconds: float) -> str:
        """Come back after a while."""
        await anyio.sleep(seconds)
        return "done"

    @server.tool()
    def noise() -> str:
        """Write what is no text among the answers."""
        os.write(stdout, b"\xff\n")
        return "done"

    @server.tool()
    def refuse(size: int) -> str:
        """Fail, with many words."""
        raise MCPError(-32000, "E" * size)

    @server.tool(structured_output=False)
    def long(size: int) -> str:
        """Say much."""
        return "L" * size

    @server.tool()
    def crash() -> str:
        """End the server."""
        os._exit(3)

    return server


def make_mortal() -> MCPServer:
    """A server with one tool, which ends it."""
    server: Any = MCPServer("mortal", log_level="CRITICAL")

    @server.tool()
    def fall() -> str:
        """End the server."""
        os._exit(3)

    return server


@contextmanager
def serving(sse: bool = False, **options: Any) -> Iterator[str]:
    """The URL of a server in a thread, with options of its app."""
    import uvicorn

    server = make_server()
    app = server.sse_app() if sse else server.streamable_http_app(**options)
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, ws="none")
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))  # clients may connect before it runs
    thread = threading.Thread(target=server.run, args=[[listening]], daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/{'sse' if sse else 'mcp'}"
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    if len(sys.argv) > 2 and os.path.exists(sys.argv[1]):
        sys.exit("this server starts once")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
    (make_mortal() if len(sys.argv) > 2 else make_server(os.dup(1))).run()
