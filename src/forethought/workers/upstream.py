"""``UpstreamWorker``: executes tasks on several OpenAI-compatible servers.

::

    task --> OneAnswer --> UpstreamClient.create --> Router.choose --> a server --> chunks
                               ^                                          |
                               +----- back-off, another server -----------+ (failed, broke off)

A request whose answer has not begun is sent again, to another server if there is one. One that
breaks off later goes on there after the text that has come (``partial_answer``); where that cannot
be done, its task fails, since what was streamed cannot be taken back. A server that hangs, so that
health checks take it down, is no longer waited for.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, TypeVar

from forethought.errors import DependencyError, ParameterError
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.settings import POSITIVE_INT, SECONDS, validated
from forethought.workers.clients import Clients, is_stream_error
from forethought.workers.concurrency import (
    AdaptiveConcurrency,
    back_off,
    is_overload,
    retry_after,
)
from forethought.workers.openai import OpenaiWorker
from forethought.workers.openai_requests import prompt_text
from forethought.workers.partial_answer import PartialAnswer
from forethought.workers.routing import Router, Routing, UpstreamServer

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_ENDING = ("draining", "engine_stopped")
"""Codes with which a server of this package ends its streams as it ends itself."""
_BUSY = (408, 425, 429, 503)
"""Statuses with which a server that works refuses a request for now."""
_LOST = ("APIConnectionError", "TransportError")
"""Bases of the connection errors of the ``openai`` package and of its HTTP client."""


@dataclass(frozen=True, slots=True)
class Retries:
    """When a request is given up on a server, and when for good; all values are above zero."""

    num_tries: int = 5
    """Of one request, on all servers together."""
    pause: float = 0.1
    """Seconds before the first repetition; doubled at each further one, with jitter."""
    timeout: float = 600.0
    """Seconds for which a server may send nothing before it counts as down."""
    check_seconds: float = 10.0
    """Between two health checks of each server; a check takes at most as long."""

    def __post_init__(self) -> None:
        validated("num_tries", self.num_tries, POSITIVE_INT)
        for name in ("pause", "timeout", "check_seconds"):
            validated(name, getattr(self, name), SECONDS)


class UpstreamWorker(OpenaiWorker):
    """Executes generation, stream and chat tasks on several servers of the same model.

    Args:
        urls: of the servers' APIs, such as ``http://host:8000/v1``. A user and a password in one
            are sent as a header, and shown nowhere.
        model: name of the model on the servers.
        api_key: sent to all of them whose URL names no user.
        routing: thresholds of the router.
        retries: of failed requests, and the health checks.
        max_concurrency: maximum of requests in flight per server, within which the limit adapts to
            the server; the worker then serves one event loop at a time. None: no limit.
        continues_chats: whether the servers honour ``continue_final_message``, so that a chat goes
            on in another one if its server dies.
        **options: those of ``OpenaiWorker``, but ``concurrency``.

    Raises:
        ParameterError: as ``Router``, ``Routing``, ``Retries`` and ``OpenaiWorker``.
        DependencyError: the ``openai`` package is not installed.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        api_key: str | None = None,
        routing: Routing | None = None,
        retries: Retries | None = None,
        max_concurrency: int | None = None,
        continues_chats: bool = False,
        **options: Any,
    ) -> None:
        if "concurrency" in options:
            raise ParameterError(
                "UpstreamWorker has no parameter 'concurrency'",
                "each server has a limit of its own",
                "Use max_concurrency",
            )
        self.upstream = UpstreamClient(Router(urls, routing), retries, api_key, max_concurrency)
        self.upstream.continues_chats = continues_chats
        super().__init__(self.upstream, model, **options)

    @property
    def servers(self) -> list[UpstreamServer]:
        """The servers as the router knows them."""
        return self.upstream.router.servers

    async def on_scope_end(self, scope_id: str) -> None:
        """End the streams of the scope; with the request itself, remove its sticky key."""
        await super().on_scope_end(scope_id)
        self.upstream.router.forget(scope_id)

    async def on_loop_end(self) -> None:
        """Close this loop's connections, unless requests are in flight on them."""
        if not self._num_open[asyncio.get_running_loop()]:
            await self.upstream.close()

    async def async_shutdown(self) -> None:
        """End all running streams, and close this loop's connections."""
        await super().async_shutdown()
        await self.upstream.close()


class UpstreamClient:
    """Sends each request to the server that the router chooses; a client to ``OpenaiWorker``.

    Args:
        router: of the servers.
        retries: as ``UpstreamWorker``.
        api_key: as ``UpstreamWorker``.
        max_concurrency: as ``UpstreamWorker``.

    Attributes:
        max_lengths: context lengths of the models by name, where servers report them.
        continues_chats: as ``UpstreamWorker``.

    Raises:
        DependencyError: the ``openai`` package is not installed.
    """

    def __init__(
        self,
        router: Router,
        retries: Retries | None = None,
        api_key: str | None = None,
        max_concurrency: int | None = None,
    ) -> None:
        self.router, self.retries = router, retries or Retries()
        try:
            openai = importlib.import_module("openai")
        except ModuleNotFoundError as error:
            raise DependencyError.missing("openai", "UpstreamWorker", "openai") from error
        make = partial(_client_of, openai)
        fields = {"api_key": api_key or "none", "max_retries": 0, "timeout": self.retries.timeout}
        self._clients = {
            server: Clients(partial(make, base_url=server.url, **_headers(server), **fields))
            for server in router.servers
        }
        self.max_lengths: dict[str, int] = {}
        self.continues_chats = False
        self._limits: Mapping[UpstreamServer, AdaptiveConcurrency] = {}
        if max_concurrency is not None:
            limits = {server: AdaptiveConcurrency(max_concurrency) for server in router.servers}
            self._limits = limits
        self._checks: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._waits = _Waits()
        self.completions = SimpleNamespace(create=partial(self.create, chat=False))
        self.chat = SimpleNamespace(
            completions=SimpleNamespace(create=partial(self.create, chat=True))
        )

    def open_clients(self) -> None:
        """Make the clients of the running loop, with all that they import, before a request."""
        for clients in self._clients.values():
            client = clients.of_this_loop()
            for requests in (client.completions, client.chat.completions):
                assert callable(requests.create), "its module is imported when it is asked for"

    async def create(self, *, chat: bool, **fields: Any) -> Any:
        """Send a request, and again while servers fail before they answer.

        Returns:
            The completion, or its chunks if ``stream`` is set: another server goes on with them
            where one fails.

        Raises:
            ConnectionError: no server could be reached.
            Exception: the last server's answer, or one that no other server can improve.
        """
        self._begin_checks()
        answer = await self.begin(chat, fields, set())
        if not fields.get("stream"):
            return answer
        partial = PartialAnswer(fields, chat=chat, continues_chats=self.continues_chats)
        return _LastingChunks(self, partial, answer)

    async def begin(self, chat: bool, fields: dict[str, Any], tried: set[UpstreamServer]) -> Any:
        """The answer of a server, or its chunks once they have begun; servers that were ``tried``
        come last. Raises as ``create``.
        """
        scope, text = current_scope(), prompt_text(fields)
        key, session = (scope.request_id, scope.session) if scope else (None, None)
        for number in range(1, self.retries.num_tries + 1):
            server = self.router.choose(text, key, tried, session)
            try:
                return await self._send(server, chat, fields)
            except Exception as error:
                if not self.is_failure(server, error, number):
                    raise
                if number == self.retries.num_tries:
                    raise self._final(server, error) from error
            tried.add(server)
            pause = back_off(number, self.retries.pause)
            await asyncio.sleep(max(pause, self.router.seconds_until_ready(tried)))
        raise AssertionError("unreachable")

    async def num_tokens(self, partial: PartialAnswer, tried: set[UpstreamServer]) -> int | None:
        """Tokens of the text that has come of an answer; None: the servers do not tell.

        It is the difference of two prompts in the usages of answers of one token.
        """
        if partial.num_scored is not None:
            return partial.num_scored
        usages = []
        for prompt in partial.counting_prompts():
            fields = {"model": partial.fields["model"], "max_tokens": 1, **prompt}
            answer = await self.begin(partial.chat, fields, set(tried))
            usages.append(getattr(answer, "usage", None))
        return partial.num_counted(usages)

    async def models(self) -> list[str]:
        """The names of the models that the servers serve, each once; ``ConnectionError`` if none
        answers.
        """
        names: dict[str, None] = {}
        failure: Exception | None = None
        for server in self.router.servers:
            try:
                page = await self._client(server, self.retries.check_seconds).models.list()
            except Exception as error:
                failure = error
                self.is_failure(server, error, 1)
                continue
            names |= dict.fromkeys(model.id for model in page.data)
            lengths = {model.id: getattr(model, "max_model_len", None) for model in page.data}
            self.max_lengths |= {name: n for name, n in lengths.items() if isinstance(n, int)}
        if not names and failure is not None:
            raise self._final(self.router.servers[-1], failure) from failure
        return list(names)

    async def ask_lengths(self) -> bool:
        """Read ``max_lengths`` from the servers that report them; False: none of them answers."""
        try:
            await self.models()
        except ConnectionError:
            return False
        except Exception as error:
            log.info("the servers list no models: %s", type(error).__name__)
        return True

    async def check_health(self) -> None:
        """Ask every server once whether it works; one that does not counts as down until it does.

        ``GET /health`` beside the API, or the list of its models where there is none.
        """
        await asyncio.gather(*(self._check(server) for server in self.router.servers))

    async def close(self) -> None:
        """Close the connections of the running loop, and end its health checks."""
        checks = self._checks.pop(asyncio.get_running_loop(), None)
        if checks is not None:
            checks.cancel()
            await asyncio.wait([checks])
        for clients in self._clients.values():
            await clients.close()

    # ---- one request --------------------------------------------------------------------------

    async def _send(self, server: UpstreamServer, chat: bool, fields: dict[str, Any]) -> Any:
        """The answer of ``server``, once its first chunk has come."""
        client = self._clients[server].of_this_loop()
        api = client.chat.completions if chat else client.completions
        async with AsyncExitStack() as stack:
            stack.callback(self.router.release, server)
            limit, request = self._limits.get(server), None
            if limit is not None:
                request = await stack.enter_async_context(limit.request())
            try:
                answer = await self._waits.result(server, api.create(**fields))
                if not fields.get("stream"):
                    self.router.answered(server)
                    return answer
                await stack.enter_async_context(answer)
                chunks = aiter(answer)
                stack.push_async_callback(chunks.aclose)
                first = await self._waits.result(server, anext(chunks, None))
                if first is None:
                    raise ConnectionError(f"{server.url} ended its answer before it began")
            except Exception as error:
                if request is not None and is_overload(error):
                    request.on_refused()
                raise
            self.router.answered(server)
            if request is not None:
                request.on_token()
            return _Chunks(server, first, chunks, stack.pop_all(), self._waits)
        raise AssertionError("unreachable")

    def is_failure(self, server: UpstreamServer, error: Exception, number: int) -> bool:
        """Whether ``error`` is the server's own, so that another one may answer; records it."""
        status = getattr(error, "status_code", None)
        if is_stream_error(error):
            status = _status_in(error)
        elif isinstance(error, _BROKEN):
            status = 502
        if status in _BUSY:
            seconds = retry_after(error)
            pause = back_off(number, self.retries.pause) if seconds is None else seconds
            self.router.busy(server, pause)
        elif isinstance(status, int):
            if status < 500:
                return False
            self.router.failed(server)
        elif is_lost(error):
            self.router.lost(server)
        else:
            return False
        return True

    def _final(self, server: UpstreamServer, error: Exception) -> Exception:
        if not is_lost(error):
            return error
        others = len(self.router.servers) - 1
        also = f", the last of {others + 1} servers" if others else ""
        return ConnectionError(f"no answer from {server.url}{also} ({error.__cause__ or error})")

    # ---- health -------------------------------------------------------------------------------

    def _begin_checks(self) -> None:
        loop = asyncio.get_running_loop()
        if loop not in self._checks:
            self._checks = {loop: task for loop, task in self._checks.items() if not task.done()}
            self._checks[loop] = loop.create_task(self._check_repeatedly())

    async def _check_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self.retries.check_seconds)
            await self.check_health()

    async def _check(self, server: UpstreamServer) -> None:
        client = self._client(server, self.retries.check_seconds)
        try:
            await _ask_health(client, server.url)
        except Exception as error:
            # One that is slow may be busy; one that refuses connections is not there.
            is_slow = is_overload(error)
            (self.router.failed if is_slow else self.router.lost)(server)
            if not server.is_healthy:
                self._waits.end(server, self.retries.check_seconds)
        else:
            self.router.answered(server)

    def _client(self, server: UpstreamServer, timeout: float) -> Any:
        return self._clients[server].of_this_loop().with_options(timeout=timeout)


def _client_of(openai: Any, **fields: Any) -> Any:
    """A client of the router's servers alone: redirections are not followed."""
    return openai.AsyncOpenAI(
        http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False), **fields
    )


def _headers(server: UpstreamServer) -> dict[str, Any]:
    """Arguments of a client of ``server``; its own user goes before the key of all servers."""
    if server.authorization is None:
        return {}
    return {"default_headers": {"Authorization": server.authorization}}


async def _ask_health(client: Any, url: str) -> None:
    """Raises if the server at ``url`` does not work."""
    try:
        await client.get(f"{url.rpartition('/')[0]}/health", cast_to=type(None))
    except Exception as error:
        if getattr(error, "status_code", None) not in (404, 405):
            raise
        await client.models.list()


class _Wait(NamedTuple):
    """One that has begun, on the clock of its loop."""

    server: UpstreamServer
    loop: asyncio.AbstractEventLoop
    since: float


class _Waits:
    """What is waited for, by server, until health checks take it down."""

    def __init__(self) -> None:
        self._begun: dict[asyncio.Timeout, _Wait] = {}

    async def result(self, server: UpstreamServer, answer: Awaitable[_T]) -> _T:
        """Wait for something of a server; ``ConnectionError`` where that is ended."""
        loop, timeout = asyncio.get_running_loop(), asyncio.timeout(None)
        try:
            async with timeout:
                self._begun[timeout] = _Wait(server, loop, loop.time())
                return await answer
        except TimeoutError:
            if not timeout.expired():
                raise
            raise ConnectionError("it answers no health check either") from None
        finally:
            self._begun.pop(timeout, None)

    def end(self, server: UpstreamServer, seconds: float) -> None:
        """End the waits of the running loop that have taken longer than ``seconds``."""
        loop = asyncio.get_running_loop()
        for timeout, wait in [*self._begun.items()]:
            is_of_server = wait.server is server and wait.loop is loop
            if is_of_server and loop.time() - wait.since > seconds:
                timeout.reschedule(loop.time())


class _Chunks:
    """The chunks of one server's answer that has begun; holds its capacity until it is closed."""

    def __init__(
        self,
        server: UpstreamServer,
        first: Any,
        rest: AsyncIterator[Any],
        stack: AsyncExitStack,
        waits: _Waits,
    ) -> None:
        self.server, self._first, self._rest = server, [first], rest
        self._stack, self._waits = stack, waits

    async def close(self, *error: Any) -> None:
        """End the answer; ``error`` as of ``__aexit__``."""
        await self._stack.__aexit__(*(error or (None, None, None)))

    async def next(self) -> Any:
        """The next chunk; None: there are no more."""
        if self._first:
            return self._first.pop()
        return await self._waits.result(self.server, anext(self._rest, None))


class _LastingChunks:
    """The chunks of an answer, with which another server goes on where one fails.

    A server whose connection is lost is down, until a request or a health check succeeds.
    """

    def __init__(self, client: UpstreamClient, partial: PartialAnswer, chunks: _Chunks) -> None:
        self._client, self._partial, self._chunks = client, partial, chunks
        self._num_losses = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._chunks.close(*error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                chunk = await self._chunks.next()
            except Exception as error:
                loss = error
            else:
                if chunk is not None:
                    return self._partial.take(chunk)
                loss = _Unfinished("it sent no finish_reason")
            if self._partial.is_complete:
                raise StopAsyncIteration
            if (last := await self._go_on(loss)) is not None:
                return last

    async def _go_on(self, error: Exception) -> Any:
        """Have another server go on after ``error``; returns a chunk where only the end is missing.

        Raises the error, or ConnectionError with the reason, if none can.
        """
        client, partial, server = self._client, self._partial, self._chunks.server
        self._num_losses += 1
        if not client.is_failure(server, error, self._num_losses):
            raise error
        await self._chunks.close(type(error), error, error.__traceback__)
        reason = partial.refusal() if partial.has_begun else None
        if self._num_losses >= client.retries.num_tries:
            reason = f"it has broken off {self._num_losses} times"
        if reason is not None:
            raise _broken(server, error, reason) from error
        fields = partial.fields
        if partial.has_begun:
            num_tokens = await client.num_tokens(partial, {server})
            if num_tokens is None:
                reason = "the servers send no usage, so that its tokens are not counted"
                raise _broken(server, error, reason) from error
            if (rest := partial.rest(num_tokens)) is None:
                return partial.end()
            fields = rest
        log.warning("%s broke an answer off; it goes on (%s)", server.url, type(error).__name__)
        self._chunks = await client.begin(partial.chat, dict(fields), {server})
        return None


class _Unfinished(ConnectionError):
    """A server has ended a stream, but not its answer."""


_BROKEN = (_Unfinished, json.JSONDecodeError, UnicodeDecodeError)
"""What shows that a server has ended in the middle of an answer, or of a line of it."""


def _broken(server: UpstreamServer, error: Exception, reason: str) -> Exception:
    """The error of an answer with which no other server goes on."""
    if not is_lost(error) and not isinstance(error, _BROKEN):
        return error
    what = f"the connection to {server.url} was lost"
    if isinstance(error, _BROKEN):
        what = f"the answer of {server.url} broke off"
    why = f"({error.__cause__ or error!r})"
    return ConnectionError(f"{what} {why}; no other server can go on with it: {reason}")


def _status_in(error: Any) -> int | None:
    """The status in an error within a stream, as some servers send it; None: there is none."""
    status = error.body.get("code") if isinstance(error.body, dict) else None
    if status in _ENDING:
        return 503
    return status if isinstance(status, int) and 400 <= status < 600 else None


def is_lost(error: Exception) -> bool:
    """Whether a server could not be reached, or has stopped answering."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError) or not names.isdisjoint(_LOST)
