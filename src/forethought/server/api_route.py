"""``ApiRoute``: an endpoint that refuses query parameters which it does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from forethought.server.http import HttpError

_BETA = "beta"
"""Anthropic's clients say so of requests whose headers name features to try."""
_TAKES_BETA = ("/v1/messages", "/v1/messages/count_tokens")


class ApiRoute(APIRoute):
    """A route whose query parameters are those of its endpoint's signature."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._query = frozenset(field.alias for field in self.dependant.query_params)
        if path in _TAKES_BETA:
            self._query |= {_BETA}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; raises HttpError for an unknown query parameter."""
        if scope["query_string"] and scope["method"] in (self.methods or ()):
            self._check_query(scope["query_string"].decode("latin-1"))
        await super().handle(scope, receive, send)

    def _check_query(self, query: str) -> None:
        for name, _ in parse_qsl(query, keep_blank_values=True):
            if name not in self._query:
                shown = name[:80]
                message = f"the query parameter {shown} is not supported"
                raise HttpError(400, message, param=shown, code="unsupported_parameter")
