"""``ServerMetrics``: what ``/metrics`` shows, for Prometheus.

The names are vLLM's with ``forethought:`` in the place of ``vllm:``. Three gauges exist under
vLLM's own names too, since routers look for them there. Every registry belongs to one server.

Latencies and tokens are counted as requests stream and end; gauges and the totals of the engine are
read when ``/metrics`` is asked for.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from forethought.outputs import EngineStats, SpeculationMetrics, Usage
from forethought.server.protocol.usage import cached_prompt_tokens

PREFIX = "forethought:"
ALIASES = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
"""Gauges that exist under ``vllm:`` as well."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_METHODS = 64
"""Methods with a label of their own; clients can compose as many as they like."""
_OTHER = "other"
_REASONS = ("stop", "length", "abort", "error", "tool_calls", "content_filter")
"""Why requests end; other servers may say anything."""

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_REQUEST = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LAG_SECONDS = 0.25
"""Between two measurements of the event loop's lag."""
_COUNT = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)

_Metric = TypeVar("_Metric", Counter, Histogram)


class Upstream(Protocol):
    """An upstream server, or a replica."""

    @property
    def url(self) -> str:
        """Of the server; the name of the replica."""

    @property
    def is_healthy(self) -> bool:
        """Whether requests are sent there."""

    @property
    def num_in_flight(self) -> int:
        """Requests, or generations, there now."""

    @property
    def num_requests(self) -> int:
        """The same, of all time."""


class ServerMetrics:
    """The metrics of one server.

    ::

        metrics = ServerMetrics()
        metrics.observe_engine(backend.load, lambda: llm.stats)
        request = metrics.request_started("reasoner", "dynasor")
        request.first_token(0.2)
        request.tokens(4, 0.05)
        request.finished("stop", usage, speculation, seconds=1.5, tokens_saved=120)
        body = metrics.render()
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._methods: set[str] = set()
        self._series: dict[tuple[str, str], dict[Any, Any]] = {}
        """By model and method: each metric's series of these labels, which are slow to look up."""
        self._observed = _Observed()
        self._registry.register(self._observed)
        self._add_histograms(["model_name", "method"])
        self._add_counters(["model_name"], ["model_name", "method"])

    def _add_histograms(self, both: list[str]) -> None:
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", both, _FIRST_TOKEN
        )
        self.inter_token = TokenLatencies(
            PREFIX + "inter_token_latency_seconds", "Between two tokens of a stream.", both, _TOKEN
        )
        self._registry.register(self.inter_token)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Of a request: seconds after its first token, over the tokens after it.",
            both,
            _TOKEN,
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of the answer.", both, _REQUEST
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the start.", both, _REQUEST
        )
        self.prompt_size = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", both, _COUNT
        )
        self.loop_lag = self._histogram(
            "event_loop_lag_seconds", "How late the event loop calls what is due.", [], _LAG
        )
        self.generated = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", both, _COUNT
        )

    def _add_counters(self, model: list[str], both: list[str]) -> None:
        self.success = self._counter(
            "request_success", "Requests that ended.", [*both, "finished_reason"]
        )
        self.rejected_requests = self._counter(
            "requests_rejected", "Requests refused before they began.", ["reason"]
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.", both)
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.", both)
        self.cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens found in a prefix cache.", both
        )
        self.discarded_tokens = self._counter(
            "generation_tokens_discarded",
            "Tokens generated that are in no answer: probes, pruned branches.",
            both,
        )
        self.saved_tokens = self._counter(
            "tokens_saved", "Tokens that a method did without, by its own count.", both
        )
        self.num_drafts = self._counter(
            "spec_decode_num_drafts", "Decode steps of requests with drafts.", model
        )
        self.draft_tokens = self._counter(
            "spec_decode_num_draft_tokens", "Tokens proposed by drafters.", model
        )
        self.accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Proposed tokens that were accepted.", model
        )
        self.accepted_by_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Steps that accepted a token at this position of the draft.",
            [*model, "position"],
        )

    def request_started(self, model: str, method: str) -> RequestMetrics:
        """A request has arrived, for ``method``: the outermost one, or ``none`` for plain
        generation.
        """
        if method not in self._methods and len(self._methods) >= _MAX_METHODS:
            method = _OTHER
        self._methods.add(method)
        return RequestMetrics(self, model, method, self._series.setdefault((model, method), {}))

    def rejected(self, reason: str) -> None:
        """A request was refused before it began, such as for ``queue_full``."""
        self.rejected_requests.labels(reason).inc()

    def observe_engine(
        self,
        load: Callable[[], Mapping[str, Any]],
        stats: Callable[[], EngineStats] | None = None,
    ) -> None:
        """Read gauges and totals from these functions whenever the metrics are asked for.

        ``load`` has ``running``, ``waiting`` and, if there is a KV cache, ``kv_cache_usage`` (0 to
        1).
        """
        self._observed.load, self._observed.stats = load, stats

    def observe_upstream(self, servers: Sequence[Upstream]) -> None:
        """Show the upstream servers."""
        self._observed.servers = servers

    def observe_loop(self, loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
        """Measure how late an event loop calls what is due; returns a function that ends it."""

        async def measure() -> None:
            while True:
                due = loop.time() + _LAG_SECONDS
                await asyncio.sleep(_LAG_SECONDS)
                self.loop_lag.observe(max(0.0, loop.time() - due))

        return loop.create_task(measure()).cancel

    def render(self) -> bytes:
        """The metrics in Prometheus' text format, of type ``CONTENT_TYPE``."""
        return generate_latest(self._registry)

    def _histogram(
        self, name: str, help_text: str, labels: Iterable[str], buckets: Sequence[float]
    ) -> Histogram:
        full = PREFIX + name
        return Histogram(full, help_text, labels, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, help_text: str, labels: Iterable[str]) -> Counter:
        return Counter(PREFIX + name, help_text, labels, registry=self._registry)


class RequestMetrics:
    """Counts one request as it goes on, with labels for model and method."""

    def __init__(
        self, metrics: ServerMetrics, model: str, method: str, series: dict[Any, Any]
    ) -> None:
        self._metrics, self._labels, self._series = metrics, (model, method), series
        self._first_token: float | None = None

    def admitted(self, seconds: float) -> None:
        """It began ``seconds`` after it had arrived."""
        self._of(self._metrics.queue_time).observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Its first token came ``seconds`` after it had arrived."""
        self._first_token = seconds
        self._of(self._metrics.first_token).observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """``count`` more tokens came together, ``seconds`` after those before."""
        self._metrics.inter_token.observe(self._labels, seconds / count, count)

    def finished(
        self,
        reason: str,
        usage: Usage,
        speculation: SpeculationMetrics | None = None,
        *,
        seconds: float,
        tokens_saved: int = 0,
    ) -> None:
        """It is over.

        Args:
            reason: ``stop``, ``length``, ``abort``, ``error``, ...
            usage: of everything that ran for it.
            seconds: since it arrived.
            tokens_saved: tokens that its method did without; below 0 counts as 0.
        """
        metrics = self._metrics
        metrics.success.labels(*self._labels, reason if reason in _REASONS else _OTHER).inc()
        self._of(metrics.latency).observe(seconds)
        self._of(metrics.prompt_size).observe(usage.prompt_tokens)
        self._of(metrics.generated).observe(usage.completion_tokens)
        self._of(metrics.prompt_tokens).inc(usage.prompt_tokens)
        self._of(metrics.generation_tokens).inc(usage.completion_tokens)
        self._of(metrics.cached_tokens).inc(cached_prompt_tokens(usage))
        self._of(metrics.discarded_tokens).inc(usage.discarded)
        self._of(metrics.saved_tokens).inc(max(0, tokens_saved))
        if self._first_token is not None and usage.completion_tokens > 1:
            rest = (seconds - self._first_token) / (usage.completion_tokens - 1)
            self._of(metrics.per_token).observe(max(0.0, rest))
        if speculation is not None and speculation.drafted:
            self._count_drafts(speculation)

    def _of(self, metric: _Metric) -> _Metric:
        if metric not in self._series:
            self._series[metric] = metric.labels(*self._labels)
        series: _Metric = self._series[metric]
        return series

    def _count_drafts(self, speculation: SpeculationMetrics) -> None:
        metrics, (model, _) = self._metrics, self._labels
        metrics.num_drafts.labels(model).inc(speculation.steps)
        metrics.draft_tokens.labels(model).inc(speculation.drafted)
        metrics.accepted_tokens.labels(model).inc(speculation.accepted)
        for position, count in enumerate(speculation.accepted_by_position):
            metrics.accepted_by_position.labels(model, str(position)).inc(count)


class TokenLatencies(Collector):
    """A histogram that takes many observations of one value at once, as tokens come in streams. Its
    bucket ``bounds`` rise.
    """

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._help, self._labels, self._bounds = name, help_text, labels, bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        """By labels: observations of each bucket, the last without a bound."""
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, labels: tuple[str, ...], seconds: float, count: int) -> None:
        """``count`` observations of ``seconds``."""
        if labels not in self._counts:
            self._counts[labels], self._sums[labels] = [0] * (len(self._bounds) + 1), 0.0
        self._counts[labels][bisect_left(self._bounds, seconds)] += count
        self._sums[labels] += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The metric, its buckets cumulative."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            buckets = list(zip(names, itertools.accumulate(counts), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family


_ENGINE_TOTALS = {
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        ("prefilled", "cached"),
    ),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", ("cached",)),
    "num_preemptions": ("Times that a running sequence lost its pages.", ("preemptions",)),
    "engine_steps": ("Forward passes of the model.", ("steps",)),
    "engine_failures": ("Sequences that ended with an error.", ("failures",)),
    "replicas_lost": ("Replicas that have died or were given up.", ("replicas_lost",)),
    "generations_moved": ("Generations that have gone on in another replica.", ("moved",)),
    "sequences_migrated": ("Sequences moved to another replica, with their KV.", ("migrated",)),
    "tokens_migrated": ("Tokens of these sequences, whose KV was copied.", ("migrated_tokens",)),
    "prompts_prefilled_apart": (
        "Prompts that a prefill replica has computed for another one.",
        ("prefilled_apart",),
    ),
    "draft_failures": ("Times that a drafter failed.", ("draft_failures",)),
    "thoughts_closed": ("Thoughts that a thinking budget closed.", ("thoughts_closed",)),
}
"""Name -> what it counts, and the fields of ``EngineStats`` that make it up."""


class _Observed(Collector):
    """Reads the engine and the upstream servers when the metrics are asked for."""

    def __init__(self) -> None:
        self.load: Callable[[], Mapping[str, Any]] = dict
        self.stats: Callable[[], EngineStats] | None = None
        self.servers: Sequence[Upstream] = ()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        load = self.load()
        gauges = {
            "num_requests_running": ("Requests that are running.", load.get("running", 0)),
            "num_requests_waiting": ("Requests that are waiting.", load.get("waiting", 0)),
            "kv_cache_usage_perc": (
                "Share of the KV cache in use, from 0 to 1.",
                load.get("kv_cache_usage"),
            ),
        }
        for name, (help_text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(PREFIX + name, help_text, value=value)
                yield GaugeMetricFamily("vllm:" + name, f"{help_text} For routers.", value=value)
        if self.stats is not None:
            stats = self.stats()
            for name, (help_text, fields) in _ENGINE_TOTALS.items():
                total = sum(getattr(stats, field) for field in fields)
                yield CounterMetricFamily(PREFIX + name, help_text, value=total)
        yield from self._upstream()

    def _upstream(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        if not self.servers:
            return
        healthy = GaugeMetricFamily(
            f"{PREFIX}upstream_healthy",
            "Whether an upstream server, or a replica, works.",
            labels=["server"],
        )
        running = GaugeMetricFamily(
            f"{PREFIX}upstream_requests_running", "Requests in flight there.", labels=["server"]
        )
        sent = CounterMetricFamily(
            f"{PREFIX}upstream_requests", "Requests sent there.", labels=["server"]
        )
        for server in self.servers:
            healthy.add_metric([server.url], float(server.is_healthy))
            running.add_metric([server.url], server.num_in_flight)
            sent.add_metric([server.url], server.num_requests)
        yield from (healthy, running, sent)
