"""What all endpoints share: errors in OpenAI's shape, streams of events, clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from forethought.errors import (
    BudgetExceeded,
    ContextLengthError,
    EngineStopped,
    ForethoughtError,
    ParameterError,
    RequestCancelled,
    RequestTimeout,
    TaskError,
    UnknownNameError,
    UpstreamError,
    UsageError,
)
from forethought.server.limits import Overloaded
from forethought.server.sessions import AgentSession
from forethought.tracing.trace_otel import TraceParent

Result = TypeVar("Result")
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Encoders keep no state."""


class Caller(NamedTuple):
    """Who sends a request: the salt of its key, its span from ``traceparent``, its session."""

    tenant: str = ""
    parent: TraceParent | None = None
    session: AgentSession = AgentSession()


FIRST_SECONDS = 5.0
"""How long the status of a stream waits for the first token, or for an error."""
CLIENT_CLOSED = 499
"""Status of a request whose client has gone away; it is only logged."""


class HttpError(HTTPException):
    """A refusal with a status of its own.

    Args:
        param: the field that it is about.
        code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers or {})
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """In OpenAI's shape, with the ``type`` that Anthropic's has."""
        error = {
            "message": self.message,
            "type": _type_of(self.status),
            "param": self.param,
            "code": self.code,
        }
        return {"type": "error", "error": error}

    def response(self, path: str) -> JSONResponse:
        """As the response of an endpoint. Clients of ollama's, below ``/api``, read a text
        alone.
        """
        content = {"error": self.message} if path.startswith("/api/") else self.to_dict()
        return JSONResponse(content, self.status, dict(self.headers or {}))


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 404:
        return "not_found_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def http_error(error: BaseException) -> HttpError:
    """The error as the client sees it. Only our own errors say more than their kind."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, TaskError) and error.__cause__ is not None:
        cause = error.__cause__
        if isinstance(cause, ForethoughtError):
            return http_error(cause)
        return _foreign(cause)
    if isinstance(error, Overloaded):
        status, code = (503, "draining") if error.draining else (429, "overloaded")
        headers = {"Retry-After": str(error.retry_after)}
        return HttpError(status, str(error), code=code, headers=headers)
    if isinstance(error, UnknownNameError):
        is_model = error.kind == "model"
        return HttpError(
            404 if is_model else 400,
            str(error),
            param=error.param or ("speculation" if error.kind == "drafter" else error.kind),
            code=f"{error.kind}_not_found",
        )
    if isinstance(error, ContextLengthError):
        return HttpError(400, str(error), code="context_length_exceeded")
    if isinstance(error, UsageError):
        param = error.param if isinstance(error, ParameterError) else None
        return HttpError(400, str(error), param=param, code="invalid_value")
    if isinstance(error, BudgetExceeded):
        return HttpError(400, str(error), param="budget", code="budget_exceeded")
    if isinstance(error, RequestTimeout):
        return HttpError(504, str(error), code="timeout")
    if isinstance(error, RequestCancelled):
        return HttpError(CLIENT_CLOSED, str(error), code="cancelled")
    if isinstance(error, UpstreamError):
        return HttpError(502, f"the upstream server failed: {error}", code="upstream_error")
    if isinstance(error, EngineStopped):
        return HttpError(503, str(error), code="engine_stopped")
    if isinstance(error, ForethoughtError):
        return HttpError(500, str(error), code="failed")
    return _foreign(error)


def _said(error: BaseException) -> str:
    """What an upstream server said, without what clients and servers before it put in front."""
    body = getattr(error, "body", None)
    message = body.get("message") if isinstance(body, Mapping) else None
    return message if isinstance(message, str) and message else str(error)


def _foreign(error: BaseException) -> HttpError:
    """An error of another library, of an upstream server or of this one."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int):  # of the openai package
        message = f"the upstream server answered {status}: {_said(error)[:500]}"
        passed = status if status in (400, 404, 413, 422, 429) else 502
        code = getattr(error, "code", None)  # as context_length_exceeded, which clients look for
        is_passed = passed == status and isinstance(code, str)
        return HttpError(passed, message, code=code if is_passed else "upstream_error")
    if isinstance(error, ConnectionError) or type(error).__name__ in (
        "APIConnectionError",
        "APITimeoutError",
    ):
        return HttpError(502, f"the upstream server failed: {error}", code="upstream_error")
    return HttpError(500, f"the request failed: {type(error).__name__}", code="internal_error")


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, run as a task and cancelled as soon as the client disconnects.

    A stream's task is resumed with each chunk; that of the request would be resumed through all
    layers between the connection and the endpoint.

    Raises HttpError: 499 if the client has disconnected, 503 if the server ends.
    """
    doing, watching = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    watching.add_done_callback(lambda _: doing.cancel())
    try:
        return await doing
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if not watching.done() or (waiting is not None and waiting.cancelling()):
            raise
        if watching.result() is ENDED:
            raise http_error(ENDING) from None
        message = "the client has gone away"
        raise HttpError(CLIENT_CLOSED, message, code="cancelled") from None
    finally:
        watching.cancel()


ENDED: Message = {"type": "http.disconnect"}
"""What a request receives from a server that has ended before it."""
ENDING = Overloaded("the server has ended", "the time for what ran is over", 30, draining=True)


async def _gone(receive: Receive) -> Message:
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message


def encode(event: str | None, data: Any) -> bytes:
    """A server-sent event; JSON is written without line ends."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {_JSON.encode(data)}\n\n".encode(errors="replace")


def encode_failure(error: BaseException) -> bytes:
    """The end of a stream that has failed."""
    return encode(None, http_error(error).to_dict()) + b"data: [DONE]\n\n"


class ChunkEncoder:
    """Encodes the chunks of one stream; ``head`` are the fields before ``choices``, the same in
    all.
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._opening = f'data: {_JSON.encode(head)[:-1]},"choices":['

    def encode(self, choice: Mapping[str, Any]) -> bytes:
        """The event of a chunk with one choice."""
        return f"{self._opening}{_JSON.encode(choice)}]}}\n\n".encode(errors="replace")

    def encode_delta(self, index: int, names: Sequence[str], text: str) -> bytes:
        """The event of a chat's chunk with only new text, as ``encode`` writes it; most are of this
        kind.

        ``names`` are the fields of the delta that have the text.
        """
        written = _JSON.encode(text)
        delta = ",".join([f'"{name}":{written}' for name in names])
        choice = f'{{"index":{index},"delta":{{{delta}}},"logprobs":null,"finish_reason":null}}'
        return f"{self._opening}{choice}]}}\n\n".encode(errors="replace")


class LastEvents(bytes):
    """The last events of a stream, with which its response ends: in one write."""


class EventStream(Response):
    """Server-sent events; when the client disconnects their source is cancelled.

    The status is sent with the first event, so that an error of that can set it, or after a while.

    Args:
        events: encoded; several at once are sent together. No ``LastEvents``, or at the end.
        held: closed at the end, however it comes.
        on_disconnect: called if the client disconnects before the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        held: ExitStack | None = None,
        *,
        on_disconnect: Callable[[], object] | None = None,
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._events, self._held, self._on_disconnect = events, held or ExitStack(), on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, until they end or the client disconnects.

        Raises what the first event failed with, or HttpError if the client disconnects before it
        (499) or the server ends.
        """
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        opening = _Opening(send, start)
        with self._held:
            try:
                await until_disconnected(receive, self._write(send, opening))
            except HttpError as error:
                if self._on_disconnect is not None:
                    self._on_disconnect()
                if not opening.has_begun:
                    raise
                if error.status != CLIENT_CLOSED:
                    await opening.sent()
                    await send(_body(self.encode_failure(error), more=False))

    def encode_failure(self, error: BaseException) -> bytes:
        """The end of a stream that has failed."""
        return encode_failure(error)

    async def _write(self, send: Send, opening: _Opening) -> None:
        last = b""
        try:
            async for data in self._events:
                await opening.sent()
                if isinstance(data, LastEvents):
                    last = data
                else:
                    await send(_body(data))
            await opening.sent()
        except Exception as error:
            if not opening.has_begun:
                raise
            await opening.sent()
            last = self.encode_failure(error)
        finally:
            opening.close()
            await self._events.aclose()
        await send(_body(last, more=False))


class _Opening:
    """The first message of a response, sent once: when it is asked for, or after a while.
    ``has_begun`` once it is sent or being sent.
    """

    def __init__(self, send: Send, message: Message) -> None:
        self._send, self._message, self.has_begun = send, message, False
        self._late: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(FIRST_SECONDS, self._begin_late)

    async def sent(self) -> None:
        """Wait until it has been sent."""
        if self._late is not None:
            await self._late
        elif not self.has_begun:
            self.has_begun = True
            self._timer.cancel()
            await self._send(self._message)

    def close(self) -> None:
        self._timer.cancel()

    def _begin_late(self) -> None:
        self.has_begun = True
        self._late = asyncio.ensure_future(self._send(self._message))


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
