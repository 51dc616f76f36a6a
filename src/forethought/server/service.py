"""``Service``: the model, its methods and the limits of one server, as all endpoints use them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request

from forethought import methods
from forethought.errors import ParameterError, RequestTimeout
from forethought.outputs import SpeculationMetrics, Usage
from forethought.scaffolding.budget import Budget
from forethought.scaffolding.controller import NativeGenerationController
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.worker import Worker
from forethought.server.backends.backend import Backend, Prompted, drawing
from forethought.server.composition import Dispatch, needs_text
from forethought.server.engine_job import EngineJob
from forethought.server.http import Caller, until_disconnected
from forethought.server.job import Ask, EchoJob, Job, MethodJob, Outcome, Update
from forethought.server.limits import Admission, ByteLimit, Overloaded
from forethought.server.method_settings import schema_of
from forethought.server.metrics import RequestMetrics, ServerMetrics
from forethought.server.names import Composition, read_method, read_model
from forethought.server.protocol.body import Generating
from forethought.server.protocol.chat_request import ChatRequest
from forethought.server.protocol.sampling import (
    RequestSampling,
    compact,
    named_by_client,
    sampling_of,
    sampling_params,
)
from forethought.server.protocol.tool_calls import Tools
from forethought.server.response_journal import ResponseJournal
from forethought.server.response_store import ResponseStore
from forethought.server.sessions import AgentSession, PlacementKeys
from forethought.server.settings import Settings
from forethought.server.telemetry import Telemetry, plain_trace
from forethought.server.workers import SMALL, Workers
from forethought.workers.mcp import MCPWorker

_MIN_BODIES = 8
"""Of the largest size that are held at once, however few requests run."""
_NUM_IDS = 256
"""Whose random bytes are read together."""


Result = TypeVar("Result")


class OpenRequest(Protocol):
    """A request on a connection."""

    def end(self) -> None:
        """End it, as the server ends."""


@dataclass(slots=True)
class Totals:
    """Counts of finished requests."""

    usage: Usage = field(default_factory=Usage)
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)


class _Counting:
    """Reports one job to the metrics of its request; ``outcome`` is its end, once it is known."""

    def __init__(self, job: Job, metrics: RequestMetrics) -> None:
        self._job, self.metrics = job, metrics
        self.outcome: Outcome | None = None
        self._last: float | None = None

    def count(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = self._job.seconds
        if self._last is None:
            self.metrics.first_token(now)
        else:
            self.metrics.tokens(num_tokens, now - self._last)
        self._last = now


def _journal_of(settings: Settings) -> ResponseJournal | None:
    if settings.response_dir is None:
        return None
    limits = settings.max_stored, settings.max_stored_bytes
    return ResponseJournal(Path(settings.response_dir), settings.store_seconds, *limits)


class Service:
    """What endpoints share. Made and closed on the event loop that serves.

    Attributes:
        calls: requests of clients that are connected.
        ids: random, of 128 bits, in hexadecimal.
        base_models: the names under which clients know the model without an adapter.
        methods: those that clients may name: closed.
        journal: the files of responses; None: they are in memory alone.
        mcp: runs the tools of MCP servers; None: there are none.
    """

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self.backend, self.settings, self.metrics = backend, settings, ServerMetrics()
        self.base_models = list(settings.served_model_names) or [backend.name]
        self.admission = Admission(settings.max_running, settings.max_waiting)
        self.started, self.totals, self.ids = time.time(), Totals(), _RandomIds()
        self.workers, self.calls = Workers(), set[OpenRequest]()
        self.body_bytes = ByteLimit(
            settings.max_body_bytes * max(_MIN_BODIES, settings.max_running)
        )
        endpoint = settings.otlp_endpoint
        self.telemetry = None if endpoint is None else Telemetry.to(endpoint, self.base_models[0])
        self.methods = methods.closed(settings.allowed_methods)
        schema_of(self.methods)  # all modules are imported and all types are read by now
        backend.warm_up()
        self.llm = ScaffoldingLlm(
            Dispatch(), self._workers(), settings.max_running, trace=endpoint is not None
        )
        self.store = ResponseStore(
            settings.max_stored,
            settings.max_stored_bytes,
            settings.store_seconds,
            max(1, len(settings.api_keys)),
        )
        self.journal = _journal_of(settings)
        self._recovering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.mcp = MCPWorker(settings.mcp_servers) if settings.mcp_servers else None
        self._tool_calls = Admission(max(1, settings.max_running // 2), 0)
        self._placement_keys = PlacementKeys()
        self._tasks: set[asyncio.Task[None]] = set()
        engine = backend.llm
        stats = None if engine is None else (lambda: engine.stats)
        self.metrics.observe_engine(self.load, stats)
        self._end_measuring = self.metrics.observe_loop(asyncio.get_running_loop())
        servers = getattr(backend, "servers", ())
        if servers:
            self.metrics.observe_upstream(servers)
        self._tenants = [(key.encode(), _salt(key)) for key in settings.api_keys]

    def _workers(self) -> Mapping[Any, Worker]:
        """The backend's, and the model's for other kinds of task of the allowed methods."""
        workers = self.backend.workers
        model = workers[NativeGenerationController.WorkerTag.GENERATION.value]
        others = set(self.methods.tags()) - set(methods.shipped().tags())
        return {**dict.fromkeys(others, model), **workers}

    def end_calls(self) -> None:
        """End what clients wait for: its streams end with an error, the rest gets status 503."""
        for call in [*self.calls]:
            call.end()

    async def finish(self) -> None:
        """Take no further request, let the others finish for a while, and end what is left."""
        await self.admission.drain(self.settings.drain_seconds)
        if self.journal is not None:
            self.journal.is_suspended = True  # what is ended here goes on elsewhere
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.llm.ashutdown()
        self.workers.close()
        if self.journal is not None:
            await asyncio.to_thread(self.journal.close)
        if self.mcp is not None:
            await self.mcp.async_shutdown()
        self._end_measuring()
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)

    def spawn(self, work: Coroutine[Any, Any, None], held: ExitStack) -> asyncio.Task[None]:
        """A task that outlives its connection; ``held`` is closed at its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: held.close())
        return task

    def recovering(self, response_id: str) -> asyncio.Lock:
        """Held while this response is taken over from its file, or the file is removed."""
        return self._recovering.setdefault(response_id, asyncio.Lock())

    # ---- tenants ------------------------------------------------------------------------------

    def tenant(self, authorization: str | None) -> str | None:
        """The salt of the tenant whose key a header shows; None: no key of this server. All keys
        are compared, each in constant time.
        """
        if not self._tenants:
            return ""
        scheme, _, shown = (authorization or "").partition(" ")
        key_shown, tenant_salt = shown.strip().encode(errors="replace"), None
        for key, salt in self._tenants:
            if hmac.compare_digest(key, key_shown) and scheme.lower() == "bearer":
                tenant_salt = salt
        return tenant_salt

    # ---- models -------------------------------------------------------------------------------

    @property
    def models(self) -> list[str]:
        """The names that clients may give: of the model, and ``base:adapter`` of each adapter."""
        return [*self.base_models, *self.adapters]

    @property
    def adapters(self) -> dict[str, tuple[str, str]]:
        """Name of the model and of the adapter, by the name that stands for both."""
        return {
            f"{base}:{adapter}": (base, adapter)
            for adapter in self.backend.adapters
            for base in self.base_models
        }

    def model_alone(self, name: str | None, what: str) -> str:
        """The model that a request of ``what`` names, without methods.

        Raises UnknownNameError for another model, ParameterError for one with methods.
        """
        if not name:
            return self.base_models[0]
        model, composition = read_model(name, self.models, self.methods)
        if composition is not None:
            why, fix = f"model is {name!r:.200}", f"Name {model!r:.200} alone"
            raise ParameterError(f"no method computes {what}", why, fix, param="model")
        return model

    # ---- requests -----------------------------------------------------------------------------

    def resolve(self, body: Generating) -> tuple[str, Composition]:
        """The model that a request names, and its methods.

        Raises UnknownNameError for another model or method, ParameterError for methods given twice.
        """
        model, named = (self.base_models[0], None)
        if body.model:
            model, named = read_model(body.model, self.models, self.methods)
        if body.method is None:
            return model, named or Composition(table=self.methods)
        if named is not None:
            raise ParameterError(
                "the method is given twice",
                f"model is {body.model!r:.200} and method is {body.method!r:.200}",
                "Give it once",
                param="method",
            )
        return model, read_method(body.method, self.methods)

    async def prepared(
        self, request: Request, work: Callable[[], Result], num_bytes: int = 0
    ) -> Result:
        """What ``work`` makes of a body: templates, tokens, schemas.

        A small body is handled on the event loop, a large one by a worker while the client is
        connected.

        Args:
            num_bytes: that are read beside the body.

        Raises:
            HttpError: the client has disconnected.
        """
        await self.backend.prepare()
        size, tenant = request.state.num_bytes + num_bytes, request.state.caller.tenant
        if size <= SMALL:
            return work()
        return await until_disconnected(request.receive, self.workers.run(work, tenant, size))

    def ask(
        self,
        kind: str,
        body: Generating,
        prompted: Prompted,
        request_sampling: RequestSampling,
        *,
        num_choices: int,
        caller: Caller,
    ) -> Ask:
        """What a request asks for, checked where that is possible before it runs.

        Raises:
            UsageError: it asks for what cannot be.
        """
        model, composition = self.resolve(body)
        self._check_choices(num_choices, len(composition.choices))
        adapter = self.adapters[model][1] if model in self.adapters else None
        cache_salt, priority = self._cache_salt(body, caller), body.priority or 0
        wants_thought = not isinstance(body, ChatRequest) or body.include_reasoning is not False
        keeps_thought = self.settings.reasoning_in_content and wants_thought
        prompted = replace(prompted, keeps_thought=keeps_thought)
        params = self._sampling_fields(prompted, request_sampling.params)
        if composition.is_plain:  # workers have the defaults for the tasks of methods
            defaults: Mapping[str, float] = self.backend.sampling_defaults
            params = {**(drawing(defaults) if num_choices > 1 else defaults), **params}
        with named_by_client(request_sampling.fields):
            further: dict[str, Any] = {"n": num_choices, "priority": priority}
            further["cache_salt"], further["adapter"] = cache_salt, adapter
            if request_sampling.prompt_logprobs is not None:
                further["prompt_logprobs"] = request_sampling.prompt_logprobs
            sampling = sampling_params(params, **further)
            params = self.backend.task_params(prompted, params)
            prompt = self.backend.check(prompted.prompt, sampling)
        if not needs_text(composition):
            prompted = replace(prompted, prompt=prompt)
        budget = body.budget.model_dump(exclude_none=True) if body.budget else {}
        return Ask(
            id=f"{kind}{next(self.ids)}",
            model=body.model or model,
            served=model,
            prompted=prompted,
            composition=composition,
            settings=body.method_params or {},
            params=params,
            fields=request_sampling.fields,
            sampling=sampling,
            num_choices=num_choices,
            budget=Budget(**budget),
            cache_salt=cache_salt,
            adapter=adapter,
            session=self._placement_keys.find(caller.tenant, AgentSession.of(caller.session, body)),
            timeout=self.settings.timeout,
            max_generations=self.settings.max_generations,
            priority=priority,
            streaming=bool(body.stream),
            events=bool(body.events),
            parent=caller.parent,
        )

    def _sampling_fields(self, prompted: Prompted, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of a request, with what reading its output needs."""
        if self.backend.llm is not None:
            fields = compact(fields)
        if prompted.reader is not None or prompted.shows_special:  # they may mark thoughts, calls
            return {"skip_special_tokens": False, **fields}
        return fields

    def sampling_of(self, body: Generating, tools: Tools | None = None) -> RequestSampling:
        """What a body and its tools ask of the sampling; raises as ``sampling_of`` of the
        module.
        """
        thinks, passes = self.backend.markers is not None, self.backend.passes_chats_on
        effort = self.backend.takes_effort
        return sampling_of(body, tools, thinks=thinks, passes_chats_on=passes, takes_effort=effort)

    def tools(self, tools: Tools) -> Tools:
        """The tools of a request, whose calls the model writes in its format."""
        return replace(tools, format=self.backend.tool_format)

    def _cache_salt(self, body: Generating, caller: Caller) -> str:
        """The salt of a request's prefixes: tenants share none."""
        if body.cache_salt is not None and not self.backend.salted:
            raise ParameterError(
                "cache_salt is not supported here",
                "this server has no prefix cache",
                "Leave it out",
                param="cache_salt",
            )
        return f"{caller.tenant}/{body.cache_salt}" if body.cache_salt else caller.tenant

    def _check_choices(self, num_choices: int, num_methods: int) -> None:
        if num_choices * num_methods > self.settings.max_choices:
            raise ParameterError(
                "too many choices",
                f"n={num_choices} of {num_methods} methods",
                f"Ask for at most {self.settings.max_choices} in all",
                param="n",
            )

    def start(self, ask: Ask) -> Job:
        """Begin a request that has been admitted.

        Raises UsageError if its methods cannot run, or the prompt's log-probabilities are not
        known.
        """
        gather, engine = self.settings.stream_interval, self.backend.llm
        is_plain = ask.composition.is_plain and not ask.is_limited and not ask.settings
        scores_prompt = ask.sampling.prompt_logprobs is not None
        if ask.sampling.max_tokens == 0 and (ask.settings or not ask.composition.is_plain):
            what, why = "a method generates tokens", "max_tokens is 0"
            raise ParameterError(what, why, "Leave one of them out", param="method")
        if ask.sampling.max_tokens == 0 and "num_logprobs" not in ask.params:
            return EchoJob(ask, self.backend)
        scored = scores_prompt or "num_logprobs" in ask.params
        if (
            engine is not None and is_plain and (scored or not ask.events)
        ):  # a worker's events have drafts
            return EngineJob(engine, self.backend, ask, self.llm.place, gather)
        if scores_prompt:
            raise ParameterError(
                "echo and logprobs exclude each other here",
                "only plain decoding on this machine knows the log-probabilities of a prompt",
                "Leave one of them out",
                param="echo",
            )
        with named_by_client(ask.fields):
            return MethodJob(self.llm, self.backend, ask, gather)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A request is unfinished inside; raises ``Overloaded``."""
        try:
            with self.admission.admit():
                yield
        except Overloaded as error:
            self.metrics.rejected("draining" if error.draining else "queue_full")
            raise

    @contextmanager
    def admitted_call(self) -> Iterator[None]:
        """A call of a tool is unfinished inside; raises ``Overloaded``. Calls have a part of the
        places alone, since a tool that hangs would take those of all requests.
        """
        with self.admitted(), self._tool_calls.admit():
            yield

    @asynccontextmanager
    async def pooled(self, model: str, kind: str) -> AsyncGenerator[Usage, None]:
        """Takes a place among the running requests for one that generates nothing, and counts it.

        Args:
            model: as it is served.
            kind: in the place of a method's name, in the metrics.

        Yields:
            What it has used, for the caller to fill in.

        Raises:
            RequestTimeout: it took too long, waiting included.
        """
        began, usage, reason = time.perf_counter(), Usage(), "error"
        metrics = self.metrics.request_started(model, kind)
        try:
            async with asyncio.timeout(self.settings.timeout), self.llm.place():
                metrics.admitted(time.perf_counter() - began)
                yield usage
            reason = "stop"
        except asyncio.CancelledError:
            reason = "abort"
            raise
        except TimeoutError as error:
            why = f"{self.settings.timeout} s have passed since it was submitted"
            raise RequestTimeout("the request took too long", why, "Ask for less") from error
        finally:
            self.totals.usage += usage
            metrics.finished(reason, usage, seconds=time.perf_counter() - began)

    async def outcome(self, job: Job) -> Outcome:
        """The end of a job, counted. Raises what it failed with."""
        with self._counted(job) as counting, named_by_client(job.ask.fields):
            outcome = counting.outcome = await job.outcome()
        return outcome

    async def updates(self, job: Job) -> AsyncGenerator[Update, None]:
        """The updates of a job, counted. Raises what it failed with."""
        with self._counted(job) as counting, named_by_client(job.ask.fields):
            async with aclosing(job.updates()) as updates:
                async for update in updates:
                    counting.count(sum(piece.num_tokens for piece in update.pieces))
                    yield update
            counting.outcome = job.ended()

    @contextmanager
    def _counted(self, job: Job) -> Iterator[_Counting]:
        spec = job.ask.composition
        method = "none" if spec.is_plain else spec.split(spec.choices[0][-1])[-1].name
        counting = _Counting(job, self.metrics.request_started(job.ask.served, method))
        reason = "abort"
        try:
            yield counting
            assert counting.outcome is not None, "it has ended"
            reason = counting.outcome.outputs[0].finish_reason or "stop"
        except Exception:
            reason = "error"
            raise
        finally:
            if job.queue_seconds is not None:
                counting.metrics.admitted(job.queue_seconds)
            usage, metrics = job.usage, job.metrics
            self.totals.usage += usage
            self.totals.speculation += metrics
            outcome = counting.outcome
            saved = sum(_saved(output.meta) for output in outcome.outputs) if outcome else 0
            counting.metrics.finished(
                reason, usage, metrics, seconds=job.seconds, tokens_saved=saved
            )
            self._send_spans(job, reason)

    def _send_spans(self, job: Job, reason: str) -> None:
        if self.telemetry is None:
            return
        if isinstance(job, MethodJob):
            job.on_trace(partial(self.telemetry.record, parent=job.ask.parent))
        else:
            self.telemetry.record(plain_trace(job, reason), job.ask.parent)

    def load(self) -> dict[str, Any]:
        """The body of ``GET /v1/load``."""
        unfinished, waiting = self.admission.unfinished, self.admission.waiting
        usage, metrics = self.totals.usage, self.totals.speculation
        prompts = usage.cached + usage.prefilled
        return {
            "running": unfinished - waiting,
            "waiting": waiting,
            "kv_cache_usage": None,
            "prefix_cache_hit_rate": usage.cached / prompts if prompts else 0.0,
            "num_generated_tokens": usage.completion_tokens,
            "drafted": metrics.drafted,
            "accepted": metrics.accepted,
            **self.backend.load(),
            "accepted_by_position": list(metrics.accepted_by_position),
            "steps": metrics.steps,
            "requests_unfinished": unfinished,
            "requests_waiting": waiting,
            "uptime": round(time.time() - self.started, 3),
        }


def _salt(key: str) -> str:
    """The tenant's salt in caches: no part of the key can be read from it."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"forethought").hexdigest()


class _RandomIds:
    """Endless, for all threads. Bytes for many are read at once: each read offers the GIL to the
    engine's thread."""

    def __init__(self) -> None:
        self._ids: deque[str] = deque()

    def __iter__(self) -> _RandomIds:
        return self

    def __next__(self) -> str:
        while True:
            try:
                return self._ids.popleft()
            except IndexError:
                read = os.urandom(16 * _NUM_IDS).hex()
                self._ids.extend(read[start : start + 32] for start in range(0, len(read), 32))


def _saved(meta: Mapping[str, Any]) -> int:
    """Tokens that methods report to have saved."""
    counts = [entry.get("tokens_saved") for entry in meta.values() if isinstance(entry, Mapping)]
    return sum(count for count in counts if isinstance(count, int))


def service_of(request: Request) -> Service:
    """The service that answers a request."""
    service: Service = request.app.state.service
    return service
