"""``Service``: the model, its methods and the limits of one server, as all endpoints use them."""

from __future__ import annotations

import hashlib
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.errors import ParameterError
from forethought.outputs import SpeculationMetrics, Usage
from forethought.scaffolding.budget import Budget
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.server.backends import Backend, Prompted
from forethought.server.composition import Dispatch
from forethought.server.job import Ask, Job, Outcome, Update
from forethought.server.limits import Admission, Overloaded
from forethought.server.names import Composition, read_method, read_model
from forethought.server.protocol import Generating, Penalised
from forethought.server.settings import Settings

EFFORTS: Mapping[str, int | None] = {
    "none": 0,
    "minimal": 128,
    "low": 1024,
    "medium": 4096,
    "high": 16384,
    "xhigh": None,
}
"""Tokens of thought that a ``reasoning_effort`` stands for; None: no limit."""

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "thinking_soft",
)
_SAME_PENALISED = ("seed", "stop", "presence_penalty", "frequency_penalty")
_BUDGETS = ("thinking_budget", "thinking_token_budget", "reasoning_budget")


class Metrics(Protocol):
    """What the server tells of its requests; see ``server.metrics``."""

    def request_started(self, model: str, method: str) -> None:
        """A request was admitted."""

    def first_token(self, seconds: float) -> None:
        """The first token of a stream has come."""

    def tokens(self, count: int, seconds: float) -> None:
        """Further tokens of a stream have come within so many seconds."""

    def request_finished(
        self,
        status: str,
        usage: Usage,
        speculation_metrics: SpeculationMetrics,
        seconds: float,
        tokens_saved: int,
    ) -> None:
        """A request is over."""

    def rejected(self, reason: str) -> None:
        """A request was refused."""

    def observe_engine(self, stats: Mapping[str, Any]) -> None:
        """The state of the engine, before it is rendered."""

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""


@dataclass(slots=True)
class Totals:
    """Counts of finished requests."""

    usage: Usage = field(default_factory=Usage)
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)


class Service:
    """What endpoints share. Made and closed on the event loop that serves.

    Args:
        backend: of the model.
        settings: of the server.
        metrics: told of every request; None: nothing is.

    Attributes:
        started: time of its start.
        models: the names under which clients know the model.
    """

    def __init__(self, backend: Backend, settings: Settings, metrics: Metrics | None) -> None:
        self.backend, self.settings, self.metrics = backend, settings, metrics
        self.models = list(settings.served_model_names) or [backend.name]
        self.admission = Admission(settings.max_running, settings.max_waiting)
        self.started, self.totals = time.time(), Totals()
        self.llm = ScaffoldingLlm(Dispatch(), backend.workers, settings.max_running)
        self._tenants = [(key.encode(), _salt(key)) for key in settings.api_keys]

    async def finish(self) -> None:
        """Take no further request, let the others finish for a while, and end what is left."""
        await self.admission.drain(self.settings.drain_seconds)
        await self.llm.ashutdown()

    # ---- tenants ------------------------------------------------------------------------------

    def tenant(self, authorization: str | None) -> str | None:
        """The salt of the tenant whose key a header shows; None: no key of this server.

        All keys are compared, each in constant time.
        """
        if not self._tenants:
            return ""
        scheme, _, shown = (authorization or "").partition(" ")
        given, found = shown.strip().encode(errors="replace"), None
        for key, salt in self._tenants:
            if hmac.compare_digest(key, given) and scheme.lower() == "bearer":
                found = salt
        return found

    # ---- requests -----------------------------------------------------------------------------

    def resolve(self, body: Generating) -> tuple[str, Composition]:
        """The model that a request names, and its methods.

        Raises:
            UnknownNameError: there is no such model or method.
            ParameterError: methods are given twice.
        """
        model, named = (self.models[0], None)
        if body.model:
            model, named = read_model(body.model, self.models)
        if body.method is None:
            return model, named or Composition()
        if named is not None:
            raise ParameterError(
                "the method is given twice",
                f"model is {body.model!r:.200} and method is {body.method!r:.200}",
                "Give it once",
            )
        return model, read_method(body.method)

    def ask(
        self,
        kind: str,
        body: Generating,
        prompted: Prompted,
        params: Mapping[str, Any],
        *,
        num_choices: int,
        tenant: str,
    ) -> Ask:
        """What a request asks for, checked as far as it can be before it runs.

        Raises:
            UsageError: it asks for what cannot be.
        """
        model, composition = self.resolve(body)
        if num_choices * len(composition.choices) > self.settings.max_choices:
            raise ParameterError(
                "too many choices",
                f"n={num_choices} of {len(composition.choices)} methods",
                f"Ask for at most {self.settings.max_choices} in all",
            )
        check_params(params)
        self.backend.check(prompted.prompt, params)
        budget = body.budget.model_dump(exclude_none=True) if body.budget else {}
        return Ask(
            id=f"{kind}-{uuid.uuid4().hex}",
            model=body.model or model,
            prompted=prompted,
            composition=composition,
            settings=body.method_params or {},
            params=params,
            num_choices=num_choices,
            budget=Budget(**budget),
            cache_salt=f"{tenant}/{body.cache_salt}" if body.cache_salt else tenant,
            timeout=self.settings.timeout,
            priority=body.priority or 0,
            streaming=bool(body.stream),
            events=bool(body.events),
        )

    def start(self, ask: Ask) -> Job:
        """Begin a request that has been admitted."""
        job = Job(self.llm, self.backend, ask, self.settings.stream_interval)
        if self.metrics is not None:
            self.metrics.request_started(ask.model, ask.composition.spec)
        return job

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A request is unfinished inside; raises ``Overloaded``."""
        try:
            with self.admission.admit():
                yield
        except Overloaded as error:
            if self.metrics is not None:
                self.metrics.rejected("draining" if error.draining else "overloaded")
            raise

    async def watched(self, job: Job) -> AsyncIterator[Update]:
        """The updates of a job; the metrics are told of its tokens."""
        last = None
        async with aclosing(job.updates()) as updates:
            async for update in updates:
                count = sum(piece.num_tokens for piece in update.pieces)
                if count and self.metrics is not None:
                    now = job.seconds
                    if last is None:
                        self.metrics.first_token(now)
                    else:
                        self.metrics.tokens(count, now - last)
                    last = now
                yield update

    def ended(self, job: Job, outcome: Outcome | None, status: str) -> None:
        """A job is over: count what it has used."""
        usage, metrics = job.usage, job.metrics
        self.totals.usage += usage
        self.totals.speculation += metrics
        if self.metrics is not None:
            saved = sum(_saved(output.meta) for output in outcome.outputs) if outcome else 0
            self.metrics.request_finished(status, usage, metrics, job.seconds, saved)

    def load(self) -> dict[str, Any]:
        """The body of ``GET /v1/load``."""
        unfinished, waiting = self.admission.unfinished, self.admission.waiting
        usage, metrics = self.totals.usage, self.totals.speculation
        prompts = usage.cached + usage.prefilled
        return {
            "running": unfinished - waiting,
            "waiting": waiting,
            "kv_cache_usage": 0.0,
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
    """What stands for a tenant in caches: no part of the key can be read from it."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"forethought").hexdigest()


def _saved(meta: Mapping[str, Any]) -> int:
    """Tokens that methods report to have saved."""
    found = [each.get("tokens_saved") for each in meta.values() if isinstance(each, Mapping)]
    return sum(count for count in found if isinstance(count, int))


# ---- sampling ------------------------------------------------------------------------------------


def sampling_of(body: Generating) -> dict[str, Any]:
    """The sampling fields that a body sets, by the names of tasks.

    Raises:
        UsageError: fields that contradict each other.
    """
    names = (*_SAME, *(_SAME_PENALISED if isinstance(body, Penalised) else ()))
    params = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if isinstance(body, Penalised) and body.logit_bias:
        params["logit_bias"] = body.logit_bias
    if body.speculation is not None:
        params["speculation"] = _speculation(body.speculation)
    if (budget := _thinking_budget(body)) is not None:
        params["thinking_budget"] = budget
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        params["guided_decoding"] = GuidedDecodingParams(**given)
    return params


def with_effort(params: dict[str, Any], effort: str | None, thinks: bool) -> dict[str, Any]:
    """``params`` with the thinking budget that a ``reasoning_effort`` stands for.

    Raises:
        ParameterError: there is a budget too, or the model does not think.
    """
    if effort is None:
        return params
    if "thinking_budget" in params:
        raise ParameterError(
            "reasoning_effort and a thinking budget exclude each other",
            "both limit the thought",
            "Give one of them",
        )
    if not thinks:
        if effort == "none":
            return params
        raise ParameterError(
            "invalid reasoning_effort", "this model has no thoughts to limit", "Leave it out"
        )
    budget = EFFORTS[effort]
    return params if budget is None else {**params, "thinking_budget": budget}


def with_shape(params: dict[str, Any], shape: GuidedDecodingParams | None) -> dict[str, Any]:
    """``params`` with the shape of the output.

    Raises:
        ParameterError: they have one already.
    """
    if shape is None:
        return params
    if "guided_decoding" in params:
        raise ParameterError(
            "two shapes of the output",
            "structured_outputs, response_format and a forced tool each demand one",
            "Give one of them",
        )
    return {**params, "guided_decoding": shape}


def check_params(params: Mapping[str, Any]) -> SamplingParams:
    """Raises ``ParameterError`` for a value outside its range; a temperature of None and such."""
    given = {("logprobs" if name == "num_logprobs" else name): v for name, v in params.items()}
    return SamplingParams(**given)


def max_tokens_of(**given: int | None) -> dict[str, int]:
    """``max_tokens``, which some clients call otherwise.

    Raises:
        ParameterError: two names with different values.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if len(set(values.values())) > 1:
        raise ParameterError(
            "the limit of tokens is given twice", f"{values}", "Give max_completion_tokens alone"
        )
    return {"max_tokens": next(iter(values.values()))} if values else {}


def _speculation(given: Any) -> SpeculationParams:
    """Of a request: fields, or the name of a drafter; ``none``: no drafts."""
    if isinstance(given, str):
        name, enabled, length = given, True, None
    else:
        name, enabled, length = given.drafter, given.enabled, given.max_draft_len
    if name == "none":
        name, enabled = None, False
    return SpeculationParams(enabled=enabled, drafter=name, max_draft_len=length)


def _thinking_budget(body: Generating) -> int | None:
    given = {name: getattr(body, name) for name in _BUDGETS if getattr(body, name) is not None}
    if len(set(given.values())) > 1:
        raise ParameterError("the thinking budget is given twice", f"{given}", "Give one of them")
    budget: int | None = next(iter(given.values()), None)
    if budget is not None and budget < -1:
        raise ParameterError("invalid reasoning_budget", f"got {budget}", "-1 stands for no limit")
    return None if budget == -1 else budget
