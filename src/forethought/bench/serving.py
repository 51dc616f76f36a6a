"""``bench serving``: load on an OpenAI-compatible server, and the latencies that it gives.

====  ==============================================================================================
TTFT  time to first token: from sending a request to its first text
ITL   inter-token latency: between two chunks of text of one answer
TPOT  time per output token: (e2e - TTFT) / (output tokens - 1)
e2e   from sending a request to the end of its answer
====  ==============================================================================================

Goodput is the rate of requests that meet all given targets (Zhong et al., DistServe, 2024).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from forethought.bench.arrivals import Arrival
from forethought.errors import DependencyError, ParameterError, RequestError
from forethought.evaluation.report import aligned
from forethought.workers.routing import basic_authorization, shown_url

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

PERCENTILES = (50, 90, 95, 99)
TARGETS = MappingProxyType({"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"})
"""Names of the targets for goodput, as vLLM's benchmark has them, and the measure of each."""
_TIMEOUT = 3600.0
"""Seconds for an answer."""
_KEPT_SECONDS = 2.0
"""For which an idle connection is kept: less than servers keep theirs, which would break requests
that are just being sent."""
_LINE_BYTES = 1 << 20
"""Half of the longest line of a stream."""
_SHOWN = 500
"""Characters of the body of a refusal."""


@dataclass(slots=True)
class Exchange:
    """A request that was sent, and what came of it."""

    sent: float
    """Seconds from the start of the run; so are the others."""
    chunks: list[float] = field(default_factory=list)
    """When chunks with text arrived."""
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """As the server counts them; the number of chunks if it does not."""
    error: str | None = None
    """None: the answer is complete."""
    choices_ended: dict[int, bool] = field(default_factory=dict)
    """Whether the server has said why it ended, of each choice by its index."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token; until the end, if there was none."""
        return (self.chunks[0] if self.chunks else self.ended) - self.sent

    @property
    def e2e(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        rest = self.num_output_tokens - 1
        return (self.e2e - self.ttft) / rest if rest > 0 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between chunks."""
        return [b - a for a, b in itertools.pairwise(self.chunks)]


@dataclass(frozen=True, slots=True)
class ServingReport:
    """The measurements of a run that took ``seconds`` up to the end of the last answer.

    Args:
        targets: seconds by the names of ``TARGETS``.
    """

    exchanges: Sequence[Exchange]
    seconds: float
    targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def completed(self) -> list[Exchange]:
        """Those with a complete answer."""
        return [exchange for exchange in self.exchanges if exchange.error is None]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of complete answers, over the whole run."""
        return sum(exchange.num_output_tokens for exchange in self.completed) / self.seconds

    @property
    def goodput(self) -> float | None:
        """Requests per second that meet all targets; None without targets."""
        if not self.targets:
            return None
        return sum(map(self._meets, self.completed)) / self.seconds

    def _meets(self, exchange: Exchange) -> bool:
        measured = {name: getattr(exchange, TARGETS[name]) for name in self.targets}
        return all(value is None or value <= self.targets[name] for name, value in measured.items())

    def latencies(self) -> dict[str, list[float]]:
        """All measurements of each kind, in seconds."""
        done = self.completed
        return {
            "ttft": [exchange.ttft for exchange in done],
            "tpot": [exchange.tpot for exchange in done if exchange.tpot is not None],
            "itl": [gap for exchange in done for gap in exchange.itl],
            "e2e": [exchange.e2e for exchange in done],
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values; latencies in milliseconds."""
        done, goodput = self.completed, self.goodput
        errors = sorted(
            {exchange.error for exchange in self.exchanges if exchange.error is not None}
        )
        return {
            "num_requests": len(self.exchanges),
            "num_completed": len(done),
            "num_failed": len(self.exchanges) - len(done),
            "errors": errors[:5],
            "seconds": round(self.seconds, 3),
            "requests_per_second": round(len(done) / self.seconds, 3),
            "output_tokens_per_second": round(self.tokens_per_second, 1),
            "num_prompt_tokens": sum(exchange.num_prompt_tokens for exchange in done),
            "num_output_tokens": sum(exchange.num_output_tokens for exchange in done),
            "goodput": None if goodput is None else round(goodput, 3),
            "targets_ms": {name: round(s * 1000, 3) for name, s in self.targets.items()},
        } | {f"{name}_ms": _summary(values) for name, values in self.latencies().items()}

    def lines(self) -> list[str]:
        """For people."""
        report = self.to_dict()
        head = ("ms", "mean", *(f"p{p}" for p in PERCENTILES))
        cells = [
            [name.upper(), *(f"{value:,.1f}" for value in report[f"{name}_ms"].values())]
            for name in ("ttft", "tpot", "itl", "e2e")
            if report[f"{name}_ms"]
        ]
        lines = [aligned([head, *cells])] if cells else []
        lines.append(
            f"{report['num_completed']} of {report['num_requests']} requests in "
            f"{report['seconds']:.1f} s: {report['requests_per_second']:.2f} requests/s, "
            f"{report['output_tokens_per_second']:,.1f} output tokens/s"
        )
        if self.goodput is not None:
            targets = ", ".join(f"{name} <= {s * 1000:g} ms" for name, s in self.targets.items())
            lines.append(f"goodput: {self.goodput:.2f} requests/s with {targets}")
        return lines + [f"failed: {error}" for error in report["errors"]]


def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile, interpolated linearly; ``values`` is not empty."""
    ranked = sorted(values)
    rank = (len(ranked) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ranked[low] + (ranked[high] - ranked[low]) * (rank - low)


def _summary(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty if nothing was measured."""
    if not values:
        return {}
    statistics = {"mean": sum(values) / len(values)}
    statistics |= {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {name: round(value * 1000, 3) for name, value in statistics.items()}


def read_targets(texts: Sequence[str]) -> dict[str, float]:
    """Targets such as ``ttft:200`` (milliseconds), in seconds by name.

    Raises ParameterError if one is written in another way, or named twice.
    """
    seconds: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in TARGETS or name in seconds or not limit > 0:
            raise ParameterError(
                f"invalid target {text!r}",
                "it is no name and milliseconds above 0, or it is given twice",
                f"Write it as in ttft:200; names: {', '.join(TARGETS)}",
            )
        seconds[name] = limit / 1000
    return seconds


class ServingBench:
    """Sends requests to a server as they arrive. Raises DependencyError without ``aiohttp``.

    Args:
        url: of the server's API, such as ``http://host:8000/v1``. A user and a password in it are
            sent as a header, and shown nowhere.
        model: name of the model; None: the first one that the server lists.
        chat: as chats; else as completions.
        api_key: of the server, if its URL names no user.
        max_concurrency: most requests at once; further ones wait. None: no limit.
        fields: further fields of every request's body.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        chat: bool = True,
        api_key: str | None = None,
        max_concurrency: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise DependencyError.missing("aiohttp", "bench serving", "eval") from error
        self._http, self._model, self._chat = aiohttp, model, chat
        self._url = shown_url(url).rstrip("/")
        authorization = basic_authorization(url) or (f"Bearer {api_key}" if api_key else None)
        self._headers = {} if authorization is None else {"Authorization": authorization}
        self._max_concurrency, self._fields = max_concurrency, dict(fields or {})

    async def run(
        self,
        arrivals: Sequence[Arrival],
        targets: Mapping[str, float] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> ServingReport:
        """Send all requests, and wait for their answers.

        Args:
            arrivals: in the order of their times.
            targets: for goodput, in seconds.
            on_end: called after each request.

        Raises:
            ConnectionError: the server does not list its models, and none was given.
        """
        limit = asyncio.Semaphore(self._max_concurrency) if self._max_concurrency else nullcontext()
        async with self._session() as session:
            self._model = self._model or await self._first_model(session)
            began = time.perf_counter()

            async def one(arrival: Arrival) -> Exchange:
                await asyncio.sleep(arrival.at - (time.perf_counter() - began))
                async with limit:
                    exchange = await self._ask(session, arrival, began)
                on_end()
                return exchange

            exchanges = await asyncio.gather(*map(one, arrivals))
        seconds = max(exchange.ended for exchange in exchanges)
        return ServingReport(exchanges, seconds, targets or {})

    def _session(self) -> ClientSession:
        """Connections without a limit: a client of the ``openai`` package would take longer for a
        streamed request than a server does beside its model.
        """
        return self._http.ClientSession(
            headers=self._headers,
            connector=self._http.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS),
            timeout=self._http.ClientTimeout(total=_TIMEOUT),
            read_bufsize=_LINE_BYTES,
        )

    async def _first_model(self, session: ClientSession) -> str:
        try:
            async with session.get(f"{self._url}/models") as response:
                await _check(response)
                return str((await response.json(content_type=None))["data"][0]["id"])
        except Exception as error:
            raise ConnectionError(
                f"{self._url} lists no model ({error}): start the server, or name the model"
            ) from error

    async def _ask(self, session: ClientSession, arrival: Arrival, began: float) -> Exchange:
        exchange = Exchange(time.perf_counter() - began)
        path = "/chat/completions" if self._chat else "/completions"
        fields: dict[str, Any] = {"model": self._model, "max_tokens": arrival.max_tokens}
        if self._chat:
            fields["messages"] = [{"role": "user", "content": arrival.prompt}]
        else:
            fields["prompt"] = arrival.prompt
        fields |= {"stream": True, "stream_options": {"include_usage": True}, **self._fields}
        try:
            async with session.post(self._url + path, json=fields) as response:
                await _check(response)
                async for line in response.content:
                    _take(exchange, line.rstrip(), began)
            _check_finished(exchange)
        except Exception as error:
            exchange.error = f"{type(error).__name__}: {error}"
        exchange.ended = time.perf_counter() - began
        exchange.num_output_tokens = exchange.num_output_tokens or len(exchange.chunks)
        return exchange


async def _check(response: ClientResponse) -> None:
    """Raises RequestError with the server's text if it refused a request."""
    if response.status >= 400:
        text = await response.text(errors="replace")
        raise RequestError(f"the server answered {response.status}", text[:_SHOWN])


def _check_finished(exchange: Exchange) -> None:
    """Raises RequestError for a stream that ended before its answers did."""
    if not exchange.choices_ended or not all(exchange.choices_ended.values()):
        raise RequestError("the answer broke off", "the server sent no finish_reason")


def _take(exchange: Exchange, line: bytes, began: float) -> None:
    """Read a line of the stream; raises RequestError if it says that the request has failed."""
    if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
        return
    chunk = json.loads(line[5:])
    if "error" in chunk:
        raise RequestError("the server failed", str(chunk["error"]))
    choices = chunk.get("choices") or ()
    if any(map(_has_text, choices)):
        exchange.chunks.append(time.perf_counter() - began)
    for choice in choices:
        index, ended = choice.get("index") or 0, bool(choice.get("finish_reason"))
        exchange.choices_ended[index] = ended or exchange.choices_ended.get(index, False)
    if usage := chunk.get("usage"):
        exchange.num_prompt_tokens = usage.get("prompt_tokens") or 0
        exchange.num_output_tokens = usage.get("completion_tokens") or 0


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(delta.get(name) for name in ("content", "text", "reasoning_content", "reasoning"))
