"""``create_app``: the endpoints, and the guard in front of them.

::

    request --> Guard (request id, body size, key, errors) --> endpoint --> Service --> Job
"""

from __future__ import annotations

import asyncio
import linecache
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forethought import __version__
from forethought.errors import ForethoughtError, ParameterError
from forethought.server.api_route import ApiRoute
from forethought.server.backends.backend import Backend
from forethought.server.body_route import BodyRoute
from forethought.server.endpoints import catalog, ollama, responses
from forethought.server.endpoints.chat import chat_completions
from forethought.server.endpoints.completions import completions
from forethought.server.endpoints.embeddings import embeddings
from forethought.server.endpoints.mcp_tools import ToolRequest, call_tool, tool_list
from forethought.server.endpoints.messages import count_tokens, messages
from forethought.server.endpoints.sampling_fields import sampling_fields
from forethought.server.endpoints.scores import rerank, score
from forethought.server.hosts import check_host
from forethought.server.http import CLIENT_CLOSED, ENDED, Caller, HttpError, http_error
from forethought.server.limits import ByteLimit
from forethought.server.markdown import blocks
from forethought.server.metrics import CONTENT_TYPE
from forethought.server.protocol import ollama_request, pooling_request
from forethought.server.protocol.chat_request import ChatRequest
from forethought.server.protocol.completion_request import (
    CompletionRequest,
    DetokenizeRequest,
    RenderRequest,
    TemplateRequest,
    TokenizeRequest,
)
from forethought.server.protocol.messages_request import CountTokensRequest, MessagesRequest
from forethought.server.protocol.responses_request import ResponseRequest
from forethought.server.response_store import Record
from forethought.server.service import Service, service_of
from forethought.server.sessions import AgentSession
from forethought.server.settings import Settings
from forethought.server.workers import SMALL
from forethought.tracing.trace_otel import TraceParent

log = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("page")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""What the page may do: load what this server has, and call it."""
_OPEN = ("/health", "/version")
"""Paths that need no key, beside the page's."""
_NAME = re.compile(r"[a-z0-9_-]+\.[a-z0-9]+")
"""Of a file of the page."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}


def create_app(backend: Backend, settings: Settings | None = None) -> FastAPI:
    """The application. The caller closes the backend once it has ended."""
    chosen = settings or Settings()
    linecache.getlines(__file__)  # FastAPI looks up the lines of each endpoint at its first request

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = app.state.service = Service(backend, chosen)
        try:
            if service.mcp is not None:
                await service.mcp.init_in_asyncio_event_loop()
            yield
        finally:
            await service.finish()

    app = FastAPI(
        title="forethought",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # FastAPI would make it on the event loop
    )
    app.router.route_class = ApiRoute
    app.state.settings = chosen
    _add_bodies(app)
    _add_responses(app)
    _add_catalog(app)
    _add_monitoring(app)
    _add_page(app)
    _add_handlers(app)
    if chosen.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(chosen.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Guard, settings=chosen)
    return app


async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await chat_completions(service_of(request), body, request)


async def complete(body: CompletionRequest, request: Request) -> Response:
    """Continue texts or token ids."""
    return await completions(service_of(request), body, request)


async def respond(body: ResponseRequest, request: Request) -> Response:
    """Answer, perhaps in the background."""
    return await responses.create_response(service_of(request), body, request)


async def message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, in the form of Anthropic's API."""
    return await messages(service_of(request), body, request)


async def count(body: CountTokensRequest, request: Request) -> Response:
    """The number of tokens of such a conversation."""
    return await count_tokens(service_of(request), body, request)


async def embed(body: pooling_request.EmbeddingRequest, request: Request) -> Response:
    """The embeddings of texts or token ids."""
    return await embeddings(service_of(request), body, request)


async def score_pairs(body: pooling_request.ScoreRequest, request: Request) -> Response:
    """Score pairs of texts with the reward model."""
    return await score(service_of(request), body, request)


async def order(body: pooling_request.RerankRequest, request: Request) -> Response:
    """Order documents by their relevance to a query."""
    return await rerank(service_of(request), body, request)


async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The ids of a text or a conversation."""
    return await service_of(request).prepared(
        request, lambda: JSONResponse(catalog.tokenize(service_of(request), body))
    )


async def template(body: TemplateRequest, request: Request) -> Response:
    """The text that the chat template makes of a conversation."""
    return await service_of(request).prepared(
        request, lambda: JSONResponse(catalog.apply_template(service_of(request), body))
    )


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of ids."""
    return await service_of(request).prepared(
        request, lambda: JSONResponse(catalog.detokenize(service_of(request), body))
    )


async def render(body: RenderRequest, request: Request) -> Response:
    """Markdown and formulas of a text as a tree, for the page."""
    work, tenant = partial(blocks, body.text), request.state.caller.tenant
    nodes, lines = await service_of(request).workers.run(work, tenant, SMALL + len(body.text))
    return JSONResponse({"nodes": nodes, "lines": lines})


async def run_tool(body: ToolRequest, request: Request) -> Response:
    """Run a tool of an MCP server."""
    return await call_tool(service_of(request), body, request)


async def ollama_chat(body: ollama_request.OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation, in the form of ollama's API."""
    return await ollama.ollama(service_of(request), body, request)


async def generate(body: ollama_request.OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt, in the form of ollama's API."""
    return await ollama.ollama(service_of(request), body, request)


async def ollama_show(body: ollama_request.ShowRequest, request: Request) -> Response:
    """One model, in the form of ollama's API."""
    return JSONResponse(ollama.show(service_of(request), body))


_POSTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "/api/chat": ollama_chat,
        "/api/generate": generate,
        "/api/show": ollama_show,
        "/v1/chat/completions": chat,
        "/v1/completions": complete,
        "/v1/responses": respond,
        "/v1/messages": message,
        "/v1/messages/count_tokens": count,
        "/v1/embeddings": embed,
        "/v1/score": score_pairs,
        "/score": score_pairs,
        "/v1/rerank": order,
        "/v2/rerank": order,
        "/rerank": order,
        "/apply-template": template,
        "/page/render": render,
        "/v1/tools/call": run_tool,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }
)
"""The endpoints that read a body, by path."""


def _add_bodies(app: FastAPI) -> None:
    for path, endpoint in _POSTS.items():
        app.router.add_api_route(
            path, endpoint, methods=["POST"], response_model=None, route_class_override=BodyRoute
        )


async def _response_of(request: Request, response_id: str) -> Record:
    """A stored response, if need be from the file of a server that has died."""
    service, tenant = service_of(request), request.state.caller.tenant
    return await responses.find(service, response_id, tenant)


def _add_responses(app: FastAPI) -> None:
    @app.get("/v1/responses/{response_id}", response_model=None)
    async def response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
        include_obfuscation: Literal["false"] | None = None,
    ) -> Response:
        """A stored response; or its events after a number."""
        if starting_after is not None and not stream:
            why, fix = "it is about a stream", "Add stream=true, or leave it out"
            raise ParameterError("starting_after needs stream", why, fix, param="starting_after")
        record = await _response_of(request, response_id)
        if stream:
            return responses.resumed(record, starting_after)
        return await responses.shown(record)

    @app.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str, request: Request) -> Response:
        """End a response that goes on."""
        record = await _response_of(request, response_id)
        await record.cancel()
        return await responses.shown(record)

    @app.delete("/v1/responses/{response_id}", response_model=None)
    async def delete(response_id: str, request: Request) -> Response:
        """Forget a response, and end it if it goes on."""
        tenant = request.state.caller.tenant
        await responses.delete(service_of(request), response_id, tenant)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _add_catalog(app: FastAPI) -> None:
    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> dict[str, Any]:
        """The models, by the names that clients give."""
        return catalog.models(service_of(request))

    @app.get("/v1/models/{model:path}", response_model=None)
    async def model(model: str, request: Request) -> dict[str, Any]:
        """One model."""
        return catalog.model(service_of(request), model)

    @app.get("/api/tags", response_model=None)
    async def ollama_tags(request: Request) -> dict[str, Any]:
        """The models, in the form of ollama's API."""
        return ollama.tags(service_of(request))

    @app.get("/v1/methods", response_model=None)
    async def method_list(request: Request) -> dict[str, Any]:
        """The inference-time methods and their settings."""
        return catalog.method_list(service_of(request))

    @app.get("/v1/drafters", response_model=None)
    async def drafters(request: Request) -> dict[str, Any]:
        """What may be named in ``speculation``."""
        return catalog.drafters(service_of(request))

    @app.get("/v1/sampling", response_model=None)
    async def sampling(request: Request) -> dict[str, Any]:
        """The sampling fields of a request."""
        return sampling_fields(service_of(request))

    @app.get("/v1/tools", response_model=None)
    async def tools(request: Request) -> dict[str, Any]:
        """The tools of the MCP servers."""
        return await tool_list(service_of(request))

    @app.get("/v1/examples", response_model=None)
    async def examples(request: Request) -> dict[str, Any]:
        """Questions to try."""
        return {"data": service_of(request).backend.examples()}

    @app.get("/v1/load", response_model=None)
    async def load(request: Request) -> dict[str, Any]:
        """How busy the server is."""
        return service_of(request).load()


def _add_monitoring(app: FastAPI) -> None:
    @app.get("/health", response_model=None)
    async def health(request: Request) -> Response:
        """Whether requests are taken."""
        service, status = service_of(request), "ok"
        if service.backend.has_ended:
            status = "stopped"
        elif service.admission.draining:
            status = "draining"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/version", response_model=None)
    @app.get("/api/version", response_model=None)  # for clients of ollama's
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": __version__}

    @app.get("/openapi.json", response_model=None, include_in_schema=False)
    async def schema(request: Request) -> Response:
        """The schema of the API; it is made once, which takes a while."""
        workers, tenant = service_of(request).workers, request.state.caller.tenant
        return await workers.run(lambda: JSONResponse(app.openapi()), tenant, SMALL + 1)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """All metrics in Prometheus' text format."""
        return Response(service_of(request).metrics.render(), media_type=CONTENT_TYPE)


def _add_page(app: FastAPI) -> None:
    """The page of the server. Each file has a route of its own: other paths have none."""
    for path in (path for path in PAGE.iterdir() if path.suffix in _TYPES):
        names = ["/", f"/{path.name}"] if path.name == "index.html" else [f"/{path.name}"]
        for name in names:
            app.router.add_api_route(
                name,
                partial(_file, path),
                methods=["GET"],
                include_in_schema=False,
                route_class_override=APIRoute,
            )


async def _file(path: Path) -> Response:
    headers = {"content-security-policy": POLICY, "referrer-policy": "no-referrer"}
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=headers)


def _add_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(error.errors()).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        names = {404: "there is no such endpoint", 405: "this endpoint takes another method"}
        message = names.get(error.status_code, str(error.detail))
        failure = HttpError(error.status_code, message, headers=dict(error.headers or {}))
        return failure.response(request.url.path)

    for kind in (HttpError, ForethoughtError):
        app.add_exception_handler(kind, _failed)


async def _failed(request: Request, error: Exception) -> Response:
    failure = http_error(error)
    if failure.status == 500:
        log.error("request %s failed", request.state.request_id, exc_info=error)
    return failure.response(request.url.path)


def _invalid(complaints: Any) -> HttpError:
    """The first complaint about a body, with the name of its field."""
    first = _foremost(complaints)
    kind, param = first["type"], ".".join(map(str, first["loc"][1:])) or None
    if kind == "json_invalid":
        return HttpError(400, "the body is no valid JSON", code="invalid_json")
    if param is None:
        return HttpError(400, "the body is no JSON object", code="invalid_json")
    if kind == "extra_forbidden":
        message = f"{param} is not supported"
        return HttpError(400, message, param=param, code="unsupported_parameter")
    if kind == "missing":
        return HttpError(400, f"{param} is missing", param=param, code="missing_parameter")
    message = first["msg"]
    if kind == "union_tag_invalid":
        kinds = message.partition("expected tags: ")[2].replace("<", "").replace(">", "")
        param, message = f"{param}.type", f"Input should be one of {kinds}"
    elif kind == "model_type":
        message = "Input should be an object"
    return HttpError(400, f"invalid {param}: {message}", param=param, code="invalid_value")


def _foremost(complaints: Any) -> Mapping[str, Any]:
    """The complaint to report: of a union, about the alternative that fits best."""

    def progress(complaint: Mapping[str, Any]) -> tuple[int, int, bool]:
        """How deep, and how far into a list, the value fits; whether it is of the right type."""
        last, is_of_type = complaint["loc"][-1], not complaint["type"].endswith("_type")
        return len(complaint["loc"]), last if isinstance(last, int) else 0, is_of_type

    unknown = [error for error in complaints if error["type"] == "extra_forbidden"]
    return max(unknown or complaints, key=progress)


def _authorization(headers: Mapping[bytes, bytes]) -> str:
    """The header ``Authorization``; ``x-api-key``, as Anthropic's clients send it, in its place."""
    key = headers.get(b"x-api-key")
    shown = b"Bearer " + key if key else b""
    return (headers.get(b"authorization") or shown).decode("latin-1")


class Guard:
    """Gives each request an id, and refuses those without a key or with too large a body. An
    exception of ``app`` that has no handler becomes a response here.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._max_bytes = app, settings.max_body_bytes
        self._hosts = settings.allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service: Service = scope["app"].state.service
        headers = dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = client_id if _ID.fullmatch(client_id) else next(service.ids)
        call = _OpenRequest(request_id, scope, receive, send, (self._max_bytes, service.body_bytes))
        scope.setdefault("state", {})["request_id"] = call.id
        service.calls.add(call)
        try:
            if self._hosts:
                check_host([v for name, v in scope["headers"] if name == b"host"], self._hosts)
            tenant = service.tenant(_authorization(headers))
            if tenant is None and _needs_key(scope):
                raise HttpError(
                    401,
                    "no valid API key: send Authorization: Bearer KEY, or x-api-key: KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            parent = TraceParent.read(headers.get(b"traceparent", b"").decode("latin-1"))
            session = AgentSession.read(headers)
            scope["state"]["caller"] = Caller(tenant or "", parent, session)
            call.check_length(headers.get(b"content-length"))
            await self._app(scope, call.receive, call.send)
        except ClientDisconnect:
            call.status = call.status or CLIENT_CLOSED
        except Exception as error:
            failure = http_error(error)
            if failure.status == 500:
                log.exception("request %s failed", call.id)
            if not call.status:
                await failure.response(scope["path"])(scope, receive, call.send)
        finally:
            service.calls.discard(call)
            call.close()
            call.log()


def _needs_key(scope: Scope) -> bool:
    path: str = scope["path"]
    page = path == "/" or (_NAME.fullmatch(path[1:]) and Path(path).suffix in _TYPES)
    return not (page or path in _OPEN or scope["method"] == "OPTIONS")


class _OpenRequest:
    """One request: its id, its status, and the bytes of its body."""

    def __init__(
        self,
        request_id: str,
        scope: Scope,
        receive: Receive,
        send: Send,
        limits: tuple[int, ByteLimit],
    ) -> None:
        self.id, self._scope, self._receive, self._send = request_id, scope, receive, send
        self._max_bytes, self._all_bytes = limits
        self._num_bytes = self.status = 0
        self._receiving: asyncio.Task[Any] | None = None
        self._has_ended = False
        self._began = time.perf_counter()

    def end(self) -> None:
        """Wake up whoever waits for a message, as the server ends."""
        self._has_ended = True
        if self._receiving is not None:
            self._receiving.cancel()

    def check_length(self, length: bytes | None) -> None:
        """Refuse a body whose header says that it is too large."""
        if length is not None and length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next message, or ``ENDED`` if the server ends; refuses a body that becomes too
        large.
        """
        if self._has_ended:
            return ENDED
        self._receiving = asyncio.current_task()
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            if not self._has_ended or self._receiving is None:
                raise
            self._receiving.uncancel()
            return ENDED
        finally:
            self._receiving = None
        size = len(message.get("body", b""))
        if self._num_bytes + size > self._max_bytes:
            raise self._too_large()
        self._all_bytes.take(size)
        self._num_bytes += size
        return message

    async def send(self, message: Message) -> None:
        """Send, with the id of the request among the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [(b"x-request-id", self.id.encode()), (b"x-content-type-options", b"nosniff")]
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await self._send(message)

    def close(self) -> None:
        self._all_bytes.give_back(self._num_bytes)

    def log(self) -> None:
        """One line: no header, query or body, which may hold secrets."""
        seconds, path = time.perf_counter() - self._began, self._scope["path"]
        log.info("%s %r %d %.3fs id=%s", self._scope["method"], path, self.status, seconds, self.id)

    def _too_large(self) -> HttpError:
        message = f"the body is larger than {self._max_bytes} bytes"
        return HttpError(413, message, code="body_too_large")
