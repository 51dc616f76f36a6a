"""``HttpClient``: HTTP/1.1 with little work per request, to load a server that shares its cores.

::

    async with HttpClient("http://host:8000/v1") as client:
        models = await client.get("/models")
        async for line in client.lines("/completions", body):
            ...

A client of the ``openai`` package takes about 2 ms of processor time for a streamed request, more
than a server takes for it beside its model; then the measurement is one of the client, and on the
same cores requests that should come at once come one after the other. This one takes about 0.4 ms.
It knows what API servers send: bodies in chunks, of a stated length, or up to the end of the
connection. It follows no redirects and uses no proxy.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote, urlsplit

from forethought.errors import RequestError

_LIMIT = 1 << 16
"""Bytes that are read at once; of the head of an answer, at most."""
_SHOWN = 500
"""Characters of the body of a refusal."""


class HttpClient:
    """Requests to one server, over connections that are kept open for the next ones.

    Args:
        url: in front of all paths; its scheme is ``http`` or ``https``.
        api_key: sent as a bearer token; None: none is, but for a user and a password in the URL.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._path = parts.hostname or "", parts.path.rstrip("/")
        self._port = parts.port or (443 if self._ssl else 80)
        headers = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        elif parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._free: list[_Connection] = []

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._free:
            await self._free.pop().close()

    async def get(self, path: str) -> Any:
        """The JSON at ``path``. Raises as ``lines``."""
        async with aclosing(self._body("GET", path, b"")) as chunks:
            return json.loads(b"".join([chunk async for chunk in chunks]))

    async def lines(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """The lines of the answer to a JSON body, as they come and without their ends.

        Raises:
            RequestError: the server refused the request, or the connection ended early.
            OSError: there is no connection.
        """
        rest = b""
        async with aclosing(self._body("POST", path, json.dumps(body).encode())) as chunks:
            async for chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.rstrip(b"\r").decode()
        if rest:
            yield rest.decode()

    async def _body(self, method: str, path: str, content: bytes) -> AsyncGenerator[bytes, None]:
        """The body of an answer in pieces; leaving it early closes the connection."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}"
        sent = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        connection = await self._answering(sent)
        try:
            async with aclosing(connection.body()) as chunks:
                if connection.status >= 400:
                    said = b"".join([chunk async for chunk in chunks]).decode(errors="replace")
                    raise RequestError(f"the server answered {connection.status}", said[:_SHOWN])
                async for chunk in chunks:
                    yield chunk
        except asyncio.IncompleteReadError as error:
            raise RequestError("the server closed the connection within its answer") from error
        finally:
            if connection.is_reusable:
                self._free.append(connection)
            else:
                await connection.close()

    async def _answering(self, sent: bytes) -> _Connection:
        """A connection over which ``sent`` went, and the head of its answer came.

        One that was kept open may have been closed by the server meanwhile; then the next is taken.
        """
        while True:
            is_new = not self._free
            connection = await self._open() if is_new else self._free.pop()
            try:
                await connection.ask(sent)
            except BaseException as error:
                await connection.close()
                is_closed = isinstance(error, asyncio.IncompleteReadError | ConnectionError)
                if is_new and isinstance(error, asyncio.IncompleteReadError):
                    raise RequestError("the server closed the connection unasked") from error
                if is_new or not is_closed:
                    raise
            else:
                return connection

    async def _open(self) -> _Connection:
        return _Connection(
            *await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=_LIMIT)
        )


class _Connection:
    """A connection, and the answer that comes over it.

    Attributes:
        status: of the answer.
        is_reusable: whether the answer has ended and the connection stays open.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._headers: dict[bytes, bytes] = {}
        self.status, self.is_reusable = 0, False

    async def ask(self, sent: bytes) -> None:
        """Send a request, and read the head of its answer.

        Raises:
            asyncio.IncompleteReadError, ConnectionError: the connection has ended.
        """
        self.status, self.is_reusable = 0, False
        self._writer.write(sent)
        await self._writer.drain()
        while self.status < 200:  # 100 Continue and such announce the answer
            first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            self.status = int(first.split(b" ", 2)[1])
            pairs = [line.partition(b":") for line in lines]
            self._headers = {name.lower(): value.strip().lower() for name, _, value in pairs}

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces.

        Raises:
            asyncio.IncompleteReadError: the connection ended within it.
        """
        length = self._headers.get(b"content-length")
        if self._headers.get(b"transfer-encoding") == b"chunked":
            while size := int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            while await self._reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
        elif length is not None:
            yield await self._reader.readexactly(int(length))
        else:
            while chunk := await self._reader.read(_LIMIT):
                yield chunk
            return
        self.is_reusable = self._headers.get(b"connection") != b"close"

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()
