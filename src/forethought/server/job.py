"""``Job``: one request of any generating API, and what it streams.

::

    ChatRequest, CompletionRequest, ResponseRequest --> Ask --> Job --> Update, Update, ... Outcome

A ``MethodJob`` runs methods on workers; an ``EngineJob`` decodes plainly on this machine's engine;
an ``EchoJob`` generates nothing.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.llm.reasoning import split
from forethought.methods.stack import parameters
from forethought.outputs import SpeculationMetrics, TokenLogprobs, Usage
from forethought.scaffolding.budget import Budget
from forethought.scaffolding.result import (
    CallDelta,
    Delta,
    ScaffoldingOutput,
    ScaffoldingResult,
    Stage,
    StreamedItem,
    StreamEvent,
)
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.task import ChatTask, GenerationTask
from forethought.scaffolding.trace import Trace
from forethought.server.backends.backend import Backend, Prompted
from forethought.server.composition import (
    check_generations,
    compose,
    needs_text,
    refuse_conversation,
    streams_truly,
)
from forethought.server.names import Composition
from forethought.server.protocol.usage import chat_usage, speculation
from forethought.server.settings import DEFAULT_MAX_GENERATIONS
from forethought.tracing.trace_otel import TraceParent

MAX_UNREAD = 1 << 22
"""Characters of the events of a job that its client has not read."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asks for, whatever the API.

    Attributes:
        model: name that the answer carries.
        served: name of the served model that generates it.
        settings: of the method, if there is one.
        params: sampling fields that the client sets, by the names of tasks.
        fields: path of the body's field by the name of the sampling parameter that it sets, where
            the two differ.
        sampling: the sampling fields as the engine takes them, with choices, priority and salt.
        num_choices: answers of each of the composition's choices.
        budget: limits of all that runs inside.
        cache_salt: of the tenant.
        adapter: the LoRA adapter of all that is generated; None: the model alone.
        session: key of the session of an agent; None: it belongs to none.
        timeout: seconds until the request fails; None: never.
        max_generations: that its methods may begin.
        priority: lower runs first.
        streaming: whether text is wanted as it comes.
        events: whether stages and the text of branches are wanted as well.
        parent: the caller's span, if there is one.
    """

    id: str
    model: str
    served: str
    prompted: Prompted
    composition: Composition = field(default_factory=Composition)
    settings: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_choices: int = 1
    budget: Budget = field(default_factory=Budget)
    cache_salt: str = ""
    adapter: str | None = None
    session: str | None = None
    timeout: float | None = None
    max_generations: int = DEFAULT_MAX_GENERATIONS
    priority: int = 0
    streaming: bool = False
    events: bool = False
    parent: TraceParent | None = None

    @property
    def is_limited(self) -> bool:
        """Whether it has a budget."""
        return self.budget != Budget()


@dataclass(slots=True)
class Piece:
    """New text of one choice."""

    index: int
    text: str = ""
    num_tokens: int = 0
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    """One entry per token, where they are asked for."""
    thought: str = ""
    """From another server, which returns it apart from the text."""
    calls: list[CallDelta] = field(default_factory=list)
    """The same of calls."""


@dataclass(frozen=True, slots=True)
class Update:
    """What has come since the last one."""

    pieces: list[Piece]
    events: list[dict[str, Any]]
    is_last: bool = False
    """Whether it is known that none follows."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job."""

    outputs: Sequence[ScaffoldingOutput]
    """One per choice."""
    usage: Usage
    metrics: SpeculationMetrics
    seconds: float
    spent_budget: str | None = None
    """The limit of the budget that ended it: ``"tokens"``, ``"calls"`` or ``"seconds"``."""


class Job(abc.ABC):
    """A request in progress.

    Attributes:
        num_choices: answers that it gives.
        streams_logprobs: whether log-probabilities come with the pieces, or with the outcome alone.
    """

    streams_logprobs = False

    def __init__(self, ask: Ask, backend: Backend) -> None:
        self.ask, self._backend = ask, backend
        self.num_choices = ask.num_choices * len(ask.composition.choices)
        self._streamed = [""] * self.num_choices
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it was submitted."""
        return time.perf_counter() - self._began

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited for its turn; None: it has not begun, or is queued by the engine."""
        return None

    @property
    def generations(self) -> Sequence[GenerationTask]:
        """The generations that were begun inside, once it is over; none if there is no method."""
        return ()

    @property
    def prompt_scores(self) -> tuple[Sequence[TokenLogprobs | None], Sequence[int]] | None:
        """Log-probabilities and ids of the prompt's tokens, if they are asked for, once it has
        streamed or ended."""
        return None

    @property
    def choices(self) -> range:
        """The indices of its choices."""
        return range(self.num_choices)

    @property
    @abc.abstractmethod
    def usage(self) -> Usage:
        """Of the whole request, so far."""

    @property
    @abc.abstractmethod
    def metrics(self) -> SpeculationMetrics:
        """Of its drafts, once it is over."""

    @abc.abstractmethod
    async def outcome(self) -> Outcome:
        """The end. Raises what the request failed with; cancelling ends it."""

    @abc.abstractmethod
    def updates(self) -> AsyncGenerator[Update, None]:
        """What it streams; leaving the iterator early ends the request. The pieces of a choice join
        to the beginning of its text; ``rest`` is what is missing.
        """

    @abc.abstractmethod
    def ended(self) -> Outcome:
        """The end of a job whose updates are over."""

    def rest(self, index: int, text: str) -> str:
        """The part of a choice's text that has not been streamed."""
        streamed = self._streamed[index]
        return text[len(streamed) :] if text.startswith(streamed) else ""

    # ---- events -------------------------------------------------------------------------------

    def started(self) -> dict[str, Any]:
        """The first event."""
        name, reason = self._drafter()
        return {
            "type": "started",
            "id": self.ask.id,
            "at": 0.0,
            "method": self.ask.composition.spec,
            "model": self.ask.model,
            "speculation": {"drafter": name, "reason": reason},
        }

    def finished(self, outcome: Outcome) -> dict[str, Any]:
        """The last event."""
        first = outcome.outputs[0]
        return {
            "type": "finished",
            "at": self._at(),
            "usage": chat_usage(outcome.usage, outcome.metrics, None, outcome.spent_budget),
            "speculation": speculation(outcome.metrics),
            "seconds": round(outcome.seconds, 4),
            "text": first.text or "",
            "finish_reason": first.finish_reason,
        }

    def failed(self, message: str) -> dict[str, Any]:
        """The last event of a job that has failed."""
        return {"type": "error", "at": self._at(), "message": message}

    def _drafter(self) -> tuple[str | None, str | None]:
        """The drafter that is asked first, and why there is none or why it may not help."""
        speculation = self.ask.params.get("speculation")
        drafters = [drafter for drafter in self._backend.drafters() if drafter.active]
        if speculation is not None and not speculation.enabled:
            return None, "the request switches drafts off"
        if speculation is not None and speculation.drafter is not None:
            return speculation.drafter, None
        return (drafters[0].name, None) if drafters else (None, "the server has no drafter")

    def _delta(self, branch: str, text: str, num_tokens: int) -> dict[str, Any]:
        return {
            "type": "delta",
            "at": self._at(),
            "branch": branch,
            "text": text,
            "num_tokens": num_tokens,
        }

    def _at(self) -> float:
        return round(self.seconds, 4)


class EchoJob(Job):
    """A request that generates nothing: its answers are empty texts after the echoed prompt."""

    @property
    def usage(self) -> Usage:
        """The tokens of the prompt."""
        return Usage(prompt_tokens=self._backend.length(self.ask.prompted.text_or_ids))

    @property
    def metrics(self) -> SpeculationMetrics:
        """There are no drafts."""
        return SpeculationMetrics()

    async def outcome(self) -> Outcome:
        """The end."""
        return self.ended()

    async def updates(self) -> AsyncGenerator[Update, None]:
        """The last one, without anything new."""
        yield Update([], [], is_last=True)

    def ended(self) -> Outcome:
        """The end."""
        outputs = [ScaffoldingOutput("", finish_reason="length") for _ in self.choices]
        return Outcome(outputs, self.usage, self.metrics, self.seconds)


_EVENT_SIZE = 256
"""Characters for which the fields of an event count, beside its text."""


class Unread:
    """Texts, joined, and events that a job has streamed and its reader has not taken.

    Events are bounded to ``max_size`` characters, for a slow client: further ones are left out
    until the reader has taken these. Texts of answers are as long as the answers.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size, self._has_ended = max_size, False
        self._changed = asyncio.Event()
        self._clear()

    def _clear(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._pieces: dict[int, Piece] = {}
        self._size = self._num_omitted = 0

    def add_text(self, index: int, delta: Delta) -> None:
        """New text of a choice."""
        piece = self._pieces.setdefault(index, Piece(index))
        piece.text += delta.text
        piece.thought += delta.reasoning
        piece.calls += delta.calls
        piece.num_tokens += len(delta.token_ids) or 1

    def add_event(self, event: dict[str, Any], size: int) -> bool:
        """A further event; False: it is left out."""
        if is_added := self.fits(size):
            self.events.append(event)
        return is_added

    def fits(self, size: int) -> bool:
        """Whether events may grow by ``size``; what may not is counted as left out."""
        if self._size + size > self._max_size:
            self._num_omitted += 1
            return False
        self._size += size
        return True

    def show(self) -> None:
        """Let the reader go on."""
        self._changed.set()

    def end(self) -> None:
        """Nothing will follow."""
        self._has_ended = True
        self._changed.set()

    async def has_come(self) -> bool:
        """Wait until there is something; False: it has ended, and all is taken."""
        await self._changed.wait()
        return bool(self._pieces or self.events) or not self._has_ended

    def take(self, at: float) -> Update:
        """What has come since the last time, taken ``at`` seconds after the start."""
        waiting = self._pieces.values()
        pieces = [piece for piece in waiting if piece.text or piece.thought or piece.calls]
        events = self.events
        if self._num_omitted:
            events.append({"type": "omitted", "at": at, "num_events": self._num_omitted})
        self._clear()
        if not self._has_ended:
            self._changed.clear()
        return Update(pieces, events)


class MethodJob(Job):
    """A request that methods answer.

    Args:
        llm: runs it; its prototype is a ``Dispatch``.
        gather: seconds in which new tokens are gathered.

    Raises:
        UsageError: an invalid method or setting.
    """

    def __init__(
        self, llm: ScaffoldingLlm, backend: Backend, ask: Ask, gather: float = 0.0
    ) -> None:
        super().__init__(ask, backend)
        self._gather = gather
        self._streams = ask.streaming and streams_truly(ask.composition)
        streams = self._streams or ask.events
        prompted, prompt, asking = ask.prompted, ask.prompted.prompt, ask.prompted.asking
        if needs_text(ask.composition) and not isinstance(prompt, ChatTask):
            prompt = backend.as_text(prompt)
            asking = lambda text: backend.as_text(prompted.asking(text))  # noqa: E731
        try:
            controller = compose(
                ask.composition,
                ask.settings,
                innermost=lambda: prompted.innermost(streams),
                reward=backend.reward,
                streaming=streams,
                num_choices=ask.num_choices,
                pipeline=(asking, self._visible),
            )
            check_generations(controller, ask.max_generations)
            if prompted.is_chat:
                is_text = not isinstance(prompt, ChatTask)
                table = ask.composition.table
                refuse_conversation(controller, table, backend.missing, as_text=is_text)
        except ParameterError as error:
            error.param = _field_of(error.param, ask)
            raise
        self._submit = partial(
            llm.generate_async,
            prompt,
            sampling_params=ask.params,
            timeout=ask.timeout,
            priority=ask.priority,
            budget=ask.budget,
            cache_salt=ask.cache_salt if backend.salted else "",
            adapter=ask.adapter,
            session=ask.session,
            controller=controller,
            question=prompted.question,
            **({"history": prompted.history} if prompted.history else {}),
        )

    @cached_property
    def _result(self) -> ScaffoldingResult:
        """Submitted when it is first asked for: a job that nobody runs does not begin."""
        return self._submit()

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited for its turn; None: it has not begun."""
        return self._result.queue_s

    def on_trace(self, record: Callable[[Trace | None], None]) -> None:
        """``record`` gets the trace once the request is over; None if it never began."""
        self._result.on_finish(lambda: record(self._result.trace))

    @property
    def usage(self) -> Usage:
        """Of all that was run inside; live."""
        return self._result.usage

    @property
    def metrics(self) -> SpeculationMetrics:
        """Of all drafts, once it is over."""
        return self._result.metrics

    @property
    def generations(self) -> Sequence[GenerationTask]:
        """The generations that were begun inside, once it is over."""
        return self._result.generations

    async def outcome(self) -> Outcome:
        """The end. Raises what the request failed with; cancelling ends it."""
        await self._result
        return self.ended()

    async def updates(self) -> AsyncGenerator[Update, None]:
        """What it streams; leaving the iterator early ends the request. Nothing waits for a slow
        client.
        """
        unread = Unread(MAX_UNREAD)
        reading = asyncio.create_task(self._read(unread))
        try:
            while await unread.has_come():
                yield unread.take(self._at())
            await reading
        finally:
            reading.cancel()
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            if not self._result.finished:
                self._result.abort()

    async def _read(self, unread: Unread) -> None:
        try:
            async for batch in self._result.abatches(self._gather):
                self._add(batch, unread)
        finally:
            unread.end()

    def ended(self) -> Outcome:
        """The end of a job whose updates are over."""
        outputs = list(self._result.outputs)[: self.num_choices]
        outputs += [ScaffoldingOutput("")] * (self.num_choices - len(outputs))
        result = self._result
        return Outcome(
            outputs,
            result.usage,
            result.metrics,
            self.seconds,
            spent_budget=result.spent_budget,
        )

    def _add(self, batch: Sequence[StreamedItem], unread: Unread) -> None:
        for item in batch:
            if self._streams:
                for index, delta in self._content(item):
                    unread.add_text(index, delta)
                    self._streamed[index] += delta.text
            if self.ask.events and item.event is not None:
                self._add_event(unread, item.event)
        unread.show()

    def _content(self, item: StreamedItem) -> list[tuple[int, Delta]]:
        """The new text of choices, by index."""
        if self.num_choices == 1:
            return [(0, delta) for delta in item.grown]
        event = item.event
        if event is None or not event.branch.isdecimal() or not isinstance(event.output, Delta):
            return []
        return [(int(event.branch), event.output)]

    def _add_event(self, unread: Unread, event: StreamEvent) -> None:
        """Append an event; new text of the branch of the last one joins that."""
        output, last = event.output, unread.events[-1] if unread.events else {}
        if isinstance(output, Stage):
            stage = {
                "type": "stage",
                "at": self._at(),
                "branch": event.branch if output.branch is None else output.branch,
                "name": output.name,
                "why": output.why,
                "fields": dict(output.fields),
            }
            unread.add_event(stage, len(repr(stage)))
        elif isinstance(output, Delta):
            text, num_tokens = output.reasoning + output.text, len(output.token_ids) or 1
            if not _is_same_stream(last, event):
                last = self._delta(event.branch, "", 0)
                if event.fields is not None:
                    last["fields"] = dict(event.fields)
                if not unread.add_event(last, _EVENT_SIZE):
                    return
            if unread.fits(len(text)):
                _add_drafts(last, output)
                last["text"] += text
                last["num_tokens"] += num_tokens

    def _visible(self, text: str) -> str:
        prompted = self.ask.prompted
        if prompted.reader is None:
            return split(text, self._backend.markers, prompted.is_open).content
        reader = prompted.reader(False)
        return reader.push(text)[1] + reader.finish()[1]


def _field_of(setting: str | None, ask: Ask) -> str:
    """The field of a request that a refused setting of its methods belongs to; None: of none."""
    if setting is None:
        return "method"
    stacks = [stack for stages in ask.composition.choices for stack in stages]
    is_setting = any(
        setting in (*ask.settings, *parameters(stack, ask.composition.table)) for stack in stacks
    )
    return f"method_params.{setting}" if is_setting else setting


def _is_same_stream(last: Mapping[str, Any], event: StreamEvent) -> bool:
    """Whether new text goes on from the last event of a client."""
    if last.get("type") != "delta" or last["branch"] != event.branch:
        return False
    return bool(last.get("fields") == event.fields)


def _add_drafts(event: dict[str, Any], delta: Delta) -> None:
    """Add the verified drafts of a delta whose text is about to be appended to an event's."""
    before = len(event["text"])
    for start, end, drafter, rejected in delta.drafts:
        drafts: list[Any] = event.setdefault("drafts", [])
        if end > start:
            drafts.append([before + start, before + end, True, drafter])
        if rejected:
            drafts.append([before + end, before + end, False, drafter, rejected])
