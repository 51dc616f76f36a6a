"""``BodyRoute``: an endpoint that takes a JSON body, without FastAPI's dependencies.

FastAPI finds and documents it, as any route. What it would do for each request (solve dependencies
that there are none of, enter exit stacks, parse the content type as an e-mail's) takes several
times as long as reading and validating the body of a chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send


class BodyRoute(APIRoute):
    """A route to ``async def endpoint(body: Model, request: Request) -> Response``.

    Args:
        path: of the URL.
        endpoint: ``body`` is annotated with the model that validates it.
        options: as ``APIRoute`` takes them.
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
        """The body of a request.

        Raises:
            RequestValidationError: it is no JSON, or not what the model takes.
        """
        content = await request.body()
        try:
            given = json.loads(content) if _is_json(request) else content
        except (ValueError, RecursionError) as error:
            complaint = {"type": "json_invalid", "loc": ("body",), "msg": str(error)}
            raise RequestValidationError([complaint]) from error
        try:
            return self._model.model_validate(given)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
            complaints = [{**each, "loc": ("body", *each["loc"])} for each in found]
            raise RequestValidationError(complaints) from error


def _is_json(request: Request) -> bool:
    """Whether the sender calls the body JSON; a page of another site cannot without being asked."""
    name = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return name == "application/json" or (name.startswith("application/") and name[-5:] == "+json")
