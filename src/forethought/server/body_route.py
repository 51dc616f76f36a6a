"""``BodyRoute``: an endpoint that takes a JSON body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from forethought.server.api_route import ApiRoute
from forethought.server.http import HttpError
from forethought.server.protocol.body import check_values, path_of
from forethought.server.service import service_of

_MAX_COMPLAINTS = 1000
"""Of the fields of a body; more are counted and not described."""


class BodyRoute(ApiRoute):
    """A route to ``async def endpoint(body: Model, request: Request) -> Response``.

    FastAPI finds and documents it like any route. FastAPI's own handling of each request
    (dependencies, exit stacks, the content type) takes several times as long as reading and
    validating the body of a chat.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._model: type[BaseModel] = get_type_hints(endpoint)["body"]
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        response = await self.endpoint(await self._body(request), request)
        await response(scope, receive, send)

    async def _body(self, request: Request) -> BaseModel:
        """The body of a request; raises RequestValidationError if the model does not take it."""
        if not _is_json(request):
            raise _no_json(request)
        service = service_of(request)
        content = await _received(request, service.settings.receive_seconds)
        size = request.state.num_bytes = len(content)
        read = partial(self._read, content, service.settings.max_body_values)
        return await service.workers.run(read, request.state.caller.tenant, size)

    def _read(self, content: bytes, max_values: int) -> BaseModel:
        """The body in ``content``. Raises as ``_body``, and HttpError for too many values."""
        try:
            check_values(content, max_values)
            values = from_json(content, cache_strings="keys")
        except ValueError as error:
            complaint = {"type": "json_invalid", "loc": ("body",), "msg": str(error)}
            raise RequestValidationError([complaint]) from error
        try:
            return self._model.model_validate(values)
        except ValidationError as error:
            if error.error_count() > _MAX_COMPLAINTS:
                message = f"the body has {error.error_count():,} invalid or unknown fields"
                raise HttpError(400, message, code="invalid_value") from None
            details = error.errors(include_url=False, include_context=False)
            complaints = [
                {**detail, "loc": ("body", *path_of(detail, values))} for detail in details
            ]
            raise RequestValidationError(complaints) from error


async def _received(request: Request, seconds: float) -> bytes:
    """The whole body, if it comes in time."""
    try:
        async with asyncio.timeout(seconds):
            return await request.body()
    except TimeoutError:
        message = f"the body did not come within {seconds:g} seconds"
        raise HttpError(408, message, code="timeout", headers={"Connection": "close"}) from None


def _is_json(request: Request) -> bool:
    """Whether the sender calls the body JSON; a page of another site cannot without being asked.
    Clients of ollama's call it nothing, and browsers name the page's origin then.
    """
    name = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not name and request.url.path.startswith("/api/"):
        return "origin" not in request.headers
    return name == "application/json" or (name.startswith("application/") and name[-5:] == "+json")


def _no_json(request: Request) -> HttpError:
    shown = repr(request.headers.get("content-type", "")[:80])
    message = f"the header Content-Type is {shown}, and it has to be application/json"
    return HttpError(415, message, code="unsupported_content_type")
