"""Traces: the tree of branches and tasks of one request, with its tokens, times and results.

::

    with ScaffoldingLlm(controller, workers, trace=True) as llm:
        llm.generate("Why?").trace.save("why.json")
    print(Trace.load("why.json").text())

A trace holds what a controller needs to run again without a model (``replay``): what each task was
answered with, and the order in which tasks and branches ended.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from forethought.errors import ForethoughtError, UsageError
from forethought.outputs import Usage
from forethought.scaffolding import sampling
from forethought.scaffolding.budget import BudgetAccount
from forethought.scaffolding.parallel import Branch, Item
from forethought.scaffolding.result import ScaffoldingOutput, Stage
from forethought.scaffolding.settings import NON_NEGATIVE_FLOAT, validated
from forethought.scaffolding.task import (
    ChatTask,
    ComputeTask,
    GenerationTask,
    MCPCallTask,
    RestoreSessionTask,
    RewardTask,
    SaveSessionTask,
    StreamGenerationTask,
    Task,
)
from forethought.scaffolding.trace_values import decoded, encoded

VERSION = 1
_NOT_RESULTS = frozenset(
    {
        "attention_group",
        "draft_spans",
        "error",
        "fork_point",
        "request_handle",
        "result",
        "status",
        "streaming_output_flag",
        "streaming_output_list",
        "usage",
        "worker_tag",
    }
)
"""Attributes of tasks that the driver sets, or that belong to one process alone."""


@dataclass(slots=True)
class Span:
    """One branch, one execution of a task (of a stream: one step), or the end of the budget."""

    number: int
    """Position among the spans, which are in the order in which they began."""
    kind: str
    """``task``, ``branch`` or ``budget``."""
    name: str
    """Class of the task or of the branch's controller; of a budget, what was spent."""
    branch: str
    """Path of the branch that executes it; of a branch, its own path."""
    start: float
    """Seconds from the start of the request."""
    end: float | None = None
    outcome: str | None = None
    """``done``, ``failed``, ``cancelled`` or ``budget``; None: it had not ended."""
    order: int | None = None
    """How many spans had ended before it."""
    tag: str | None = None
    """Worker tag of a task."""
    request: dict[str, Any] = field(default_factory=dict)
    """What the task asked for: ``prompt``, ``messages``, ``sampling``, ..., as encoded."""
    fork_of: int | None = None
    """Number of the span whose sequence it continues."""
    step_of: int | None = None
    """Number of the stream's first step, if this is a later one."""
    usage: dict[str, int] = field(default_factory=dict)
    """See ``Usage``; of a stream, of all its steps so far."""
    results: dict[str, Any] = field(default_factory=dict)
    """Attributes of the task that its execution changed, as encoded."""
    omitted: list[str] = field(default_factory=list)
    """Attributes that it changed too, and that a file cannot hold."""
    error: dict[str, str] | None = None
    """``type``, ``what``, ``why`` and ``fix`` of a failure."""

    @property
    def seconds(self) -> float:
        """How long it took; 0.0 if it had not ended."""
        return 0.0 if self.end is None else self.end - self.start

    @property
    def text(self) -> str | None:
        """The text that a task generated; of a stream's step, what is new."""
        text = self.results.get("output_str")
        return text["items"] if isinstance(text, dict) else text

    @property
    def prompt(self) -> Any:
        """What a task was given: text, ids, messages, or the suffix of a fork."""
        names = ("messages", "suffix", "prompt", "answer")
        return next((self.request[name] for name in names if self.request.get(name)), None)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of tokens, per million, in any currency.

    Raises:
        ParameterError: one is negative, or no number.
    """

    input: float
    output: float
    cached: float | None = None
    """Of prompt tokens found in a prefix cache; None: as ``input``."""

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached"):
            value = getattr(self, name)
            if value is not None or name != "cached":
                validated(name, value, NON_NEGATIVE_FLOAT)

    def cost(self, usage: Mapping[str, int]) -> float:
        """What the tokens of a ``usage`` cost: those of prompts, and all that were generated."""
        prompt = usage.get("prompt_tokens", 0)
        cached = min(prompt, usage.get("cached", 0))
        output = max(usage.get("completion_tokens", 0), usage.get("decoded", 0))
        of_cached = self.input if self.cached is None else self.cached
        return ((prompt - cached) * self.input + cached * of_cached + output * self.output) / 1e6


@dataclass(slots=True)
class Trace:
    """The record of one request.

    ``spans`` are in the order in which they began, ``stages`` in the order in which they came:
    ``at`` (seconds from the start), ``branch``, ``name``, ``why`` and ``fields``.
    """

    request_id: str
    method: str
    """Class of the controller."""
    started: float
    """Seconds since 1970, UTC."""
    seconds: float | None = None
    """Duration of the request; None while it runs."""
    prompt: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Other arguments of ``generate`` of the controller, as encoded."""
    budget: dict[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    resumed: list[list[Any]] = field(default_factory=list)
    """For each time that a controller went on after waiting, in order: the path of its branch, and
    how many spans had ended before. What a controller decides may depend on it."""
    outputs: list[Any] = field(default_factory=list)
    """As encoded; ``scaffolding_outputs`` decodes them."""
    usage: dict[str, int] = field(default_factory=dict)
    error: dict[str, str] | None = None
    """Why it failed; None if it did not."""
    stopped: bool = False
    """It was ended from outside: by its timeout, by ``abort``, or by a shutdown."""
    version: int = VERSION

    @property
    def scaffolding_outputs(self) -> list[ScaffoldingOutput]:
        """What the request returned."""
        return [decoded(output) for output in self.outputs]

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        Path(path).write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` has written.

        Raises:
            UsageError: there is no such file, or it is no trace of this version.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict) or values.get("version") != VERSION:
                raise ValueError(f"it is no trace of version {VERSION}")
            values["spans"] = [Span(**span) for span in values["spans"]]
            for branch, num_ended in values.get("resumed", []):
                if not isinstance(branch, str) or not isinstance(num_ended, int):
                    raise ValueError(f"{branch!r} does not go on behind {num_ended!r} tasks")
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"cannot read the trace {path}", str(error), "Give a file that Trace.save wrote"
            ) from error

    # ---- reading it ---------------------------------------------------------------------------

    def tasks(self) -> list[Span]:
        """The executions of tasks, a stream's steps each for itself."""
        return [span for span in self.spans if span.kind == "task"]

    def inside(self, branch: str) -> list[Span]:
        """The tasks that ``branch`` executed, and the branches that it spawned, as they began."""
        return [
            span
            for span in self.spans
            if (span.branch if span.kind != "branch" else parent_path(span.branch)) == branch
            and not (span.kind == "branch" and span.branch == branch)
        ]

    def cost(self, prices: Prices) -> float:
        """What the tokens of the whole request cost, in the currency of ``prices``."""
        return prices.cost(self.usage)

    def text(self, width: int = 100, prices: Prices | None = None) -> str:
        """The tree as text, one line per branch, task and stage.

        Args:
            width: characters per line.
            prices: adds what the request and each of its tasks cost; None: no costs.
        """
        head = f"{self.method}  {_seconds(self.seconds)}  {_tokens(self.usage)}"
        head += f"  {shown_cost(self.usage, prices)}" if prices else ""
        failure = (
            [] if self.error is None else [f"failed: {self.error['why'] or self.error['what']}"]
        )
        answers = [
            f"answer: {_short(output.text, width - 8)}" for output in self.scaffolding_outputs
        ]
        return "\n".join([head, *self._lines("", width, prices), *failure, *answers])

    def _lines(self, branch: str, width: int, prices: Prices | None) -> list[str]:
        entries: list[tuple[float, int, list[str]]] = []
        for span in self.inside(branch):
            lines = [_line(span, width - 2, prices)]
            if span.kind == "branch":
                lines += self._lines(span.branch, width - 2, prices)
            entries.append((span.start, len(entries), lines))
        for stage in self.stages:
            if stage["branch"] == branch and stage["name"] not in ("spawned", "ended"):
                entries.append((stage["at"], len(entries), [_stage_line(stage, width - 2)]))
        return [f"  {line}" for _, _, lines in sorted(entries) for line in lines]


def parent_path(branch: str) -> str:
    """The path of the branch that spawned ``branch``; ``""`` is the request itself."""
    return branch.rpartition(".")[0]


def shown_cost(usage: Mapping[str, int], prices: Prices) -> str:
    """The cost of a ``usage``, as text; empty if it has no tokens."""
    return f"cost {prices.cost(usage):.6f}" if _tokens(usage) else ""


def _line(span: Span, width: int, prices: Prices | None) -> str:
    place = f"branch {span.branch} " if span.kind == "branch" else ""
    parts = [f"{place}{span.name}", _seconds(span.end and span.seconds)]
    if span.kind == "task":
        parts += [_tokens(span.usage), shown_cost(span.usage, prices) if prices else ""]
    if span.fork_of is not None:
        parts.append(f"fork of {span.fork_of}")
    if span.outcome != "done":
        parts.append(span.outcome or "not ended")
    head = f"{span.number:>3} " + "  ".join(filter(None, parts))
    shown = span.text if span.text is not None else span.results.get("score")
    return head if shown is None else f"{head}  {_short(shown, max(10, width - len(head) - 2))}"


def _stage_line(stage: Mapping[str, Any], width: int) -> str:
    details = ", ".join(f"{name} {value}" for name, value in stage["fields"].items())
    parts = [stage["name"], stage["why"], details]
    return _short("    * " + ": ".join(filter(None, parts)), width, quote=False)


def _seconds(seconds: float | None) -> str:
    return "not ended" if seconds is None else f"{seconds:.3f} s"


def _tokens(usage: Mapping[str, int]) -> str:
    prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return f"{prompt} + {completion} tokens" if prompt or completion else ""


def _short(value: Any, width: int, quote: bool = True) -> str:
    text = json.dumps(value, ensure_ascii=False) if quote else str(value)
    return text if len(text) <= width else text[: max(1, width - 3)] + "..."


class Tracer:
    """What the driver shows of a request: spans as they begin and end, and stages.

    Attributes:
        trace: where they are recorded.
    """

    trace: Trace

    def begin(self, branch: str, item: Item) -> Span:
        """``item`` is about to run: a task in ``branch``, or the branch of this path itself."""
        raise NotImplementedError

    async def turn(self, span: Span) -> None:
        """Returns once ``span`` may end. Only a branch or a computation waits for it."""

    async def resume(self, branch: str) -> None:
        """The wait of the controller of ``branch`` is over; returns once it may go on."""

    def ended(self, span: Span, item: Item, outcome: str) -> None:
        """The job of ``item`` is over, however."""

    def stage(self, branch: str, stage: Stage) -> None:
        """A stage of ``branch``."""

    def exhausted(self, then: Callable[[], None]) -> None:
        """The budget has run out under way; ``then`` stops what goes on."""

    def finish(self, outcome: Sequence[Any] | BaseException, *, stopped: bool = False) -> None:
        """The request is over: with its outputs, or failed; ``stopped`` from outside or not."""


class Recorder(Tracer):
    """Records a request.

    Args:
        trace: filled.
        account: of the request.
        prompt: of the request.
        kwargs: other arguments of ``generate`` of the controller.
    """

    def __init__(
        self, trace: Trace, account: BudgetAccount, prompt: Any, kwargs: Mapping[str, Any]
    ) -> None:
        self.trace, self._account = trace, account
        trace.prompt = encoded(prompt, lenient=True)
        trace.kwargs = encoded(dict(kwargs), lenient=True)
        self._began, self._num_ended = time.perf_counter(), 0
        self._before: dict[int, dict[str, Any]] = {}
        self._handles: dict[int, tuple[Any, int]] = {}  # holding the first keeps its id its own
        self._streams: dict[int, tuple[Task, int]] = {}

    def begin(self, branch: str, item: Item) -> Span:
        """Record what is asked for."""
        kind = "branch" if isinstance(item, Branch) else "task"
        name = type(item.controller if isinstance(item, Branch) else item).__name__
        span = self._new(kind, name, branch)
        if isinstance(item, Task):
            self._describe(span, item)
            self._before[span.number] = _snapshot(item)
        return span

    async def resume(self, branch: str) -> None:
        """Record what had ended by then."""
        self.trace.resumed.append([branch, self._num_ended])

    def ended(self, span: Span, item: Item, outcome: str) -> None:
        """Record the results."""
        self._end(span, outcome)
        if item.error is not None and outcome != "done":
            span.error = described(item.error)
        if not isinstance(item, Task):
            return
        span.usage = _counts(item.usage)
        before = self._before.pop(span.number)
        if not isinstance(item, ComputeTask):
            _record_results(span, before, vars(item))
        handle = getattr(item, "request_handle", None)
        if handle is not None:
            self._handles[id(handle)] = handle, span.number

    def stage(self, branch: str, stage: Stage) -> None:
        """Record the stage."""
        fields = encoded(dict(stage.fields), lenient=True)
        values = {"branch": branch, "name": stage.name, "why": stage.why, "fields": fields}
        self.trace.stages.append({"at": self._now(), **values})

    def exhausted(self, then: Callable[[], None]) -> None:
        """Record when the budget ran out."""
        what = "seconds" if self._account.expired else "tokens"
        span = self._new("budget", what, "")
        self._end(span, "budget")
        if self._account.exhausted is not None:
            span.error = described(self._account.exhausted)
        then()

    def finish(self, outcome: Sequence[Any] | BaseException, *, stopped: bool = False) -> None:
        """Record how the request ended."""
        self.trace.seconds, self.trace.usage = self._now(), _counts(self._account.usage)
        self.trace.stopped = stopped or isinstance(outcome, GeneratorExit)
        if isinstance(outcome, BaseException):
            self.trace.error = described(outcome)
        else:
            self.trace.outputs = [encoded(output, lenient=True) for output in outcome]

    def _now(self) -> float:
        return round(time.perf_counter() - self._began, 6)

    def _new(self, kind: str, name: str, branch: str) -> Span:
        span = Span(len(self.trace.spans), kind, name, branch, self._now())
        self.trace.spans.append(span)
        return span

    def _end(self, span: Span, outcome: str) -> None:
        span.end, span.outcome, span.order = self._now(), outcome, self._num_ended
        self._num_ended += 1

    def _describe(self, span: Span, task: Task) -> None:
        """Record what ``task`` asks for."""
        tag = getattr(task.worker_tag, "value", task.worker_tag)
        span.tag = None if tag is None else str(tag)
        if isinstance(task, StreamGenerationTask) and task.under_way:
            span.step_of = self._streams.get(id(task), (task, None))[1]
            span.request = {"step": task.streaming_step, "cancel": task.cancel_flag}
            return
        self._streams[id(task)] = task, span.number
        if isinstance(task, GenerationTask):
            span.request = self._asked(span, task)
        elif isinstance(task, RewardTask):
            span.request = {
                "prompt": encoded(task.input_tokens or task.input_str, lenient=True),
                "answer": task.output_str,
            }
        elif isinstance(task, MCPCallTask):
            span.request = {"tool": task.tool_name, "args": encoded(task.args, lenient=True)}
        elif isinstance(task, SaveSessionTask | RestoreSessionTask):
            span.request = {"snapshot": task.name}
        elif isinstance(task, ComputeTask):
            span.request = {"function": getattr(task.function, "__qualname__", "")}

    def _asked(self, span: Span, task: GenerationTask) -> dict[str, Any]:
        own = {name: getattr(task, name) for name in sampling.FIELDS if sampling.is_set(task, name)}
        asked = {"sampling": encoded(own, lenient=True)}
        point = task.fork_point
        if isinstance(task, ChatTask):
            return {**asked, "messages": encoded(task.messages_to_dict_content(), lenient=True)}
        if point is not None and point.input_str == task.input_str:
            handle, number = self._handles.get(id(point.handle), (None, None))
            span.fork_of = number if handle is point.handle else None
            digest = hashlib.blake2b((task.input_str or "").encode(), digest_size=8).hexdigest()
            asked |= {"suffix": point.suffix, "kept": point.kept, "digest": digest}
        if span.fork_of is None:
            asked["prompt"] = encoded(task.input_tokens or task.input_str, lenient=True)
        return asked


def _counts(usage: Usage) -> dict[str, int]:
    return asdict(usage)


def _snapshot(task: Task) -> dict[str, Any]:
    """The attributes of ``task``, containers copied, each with the object itself."""
    return {
        name: (value, copy.copy(value) if isinstance(value, list | dict | set) else value)
        for name, value in vars(task).items()
        if name not in _NOT_RESULTS
    }


def _record_results(span: Span, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, value in after.items():
        if name in _NOT_RESULTS:
            continue
        same, old = before.get(name, (None, None))
        try:
            if name in before and (same is value or old == value) and bool(old == value):
                continue
            span.results[name] = _change(same, old, value)
        except (TypeError, ValueError, RuntimeError):
            span.omitted.append(name)


def _change(same: Any, old: Any, value: Any) -> Any:
    """``value`` as encoded, or only what it has grown by."""
    extends = type(old) is type(value) and isinstance(value, str | list) and bool(old)
    if extends and value[: len(old)] == old:
        grown = {"kept": len(old), "items": encoded(value[len(old) :])}
        return {"$": "grown", **grown, "in_place": same is value}
    return encoded(value)


def apply_results(span: Span, task: Task) -> None:
    """Put what the execution of ``span`` changed on ``task``.

    Raises:
        UsageError: the trace lacks some of it.
    """
    if span.omitted:
        raise UsageError(
            f"the trace cannot answer span {span.number}",
            f"it lacks {', '.join(span.omitted)} of its {span.name}",
            "Replay methods whose tasks have plain results",
        )
    for name, value in span.results.items():
        if isinstance(value, dict) and value.get("$") == "grown":
            old, items = getattr(task, name), decoded(value["items"])
            if value["in_place"] and isinstance(old, list):
                old[value["kept"] :] = items
            else:
                setattr(task, name, old[: value["kept"]] + items)
        else:
            setattr(task, name, decoded(value))


def described(error: BaseException) -> dict[str, str]:
    """An error as plain values; of a failed task, what its worker raised."""
    cause = error.__cause__ or error
    if isinstance(cause, ForethoughtError):
        texts = {"what": cause.what, "why": cause.why, "fix": cause.fix}
    else:
        texts = {"what": str(cause), "why": "", "fix": ""}
    return {"type": type(cause).__name__, **texts}
