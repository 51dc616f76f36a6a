"""Traces: the tree of branches and tasks of one request, with its tokens, times and results.

::

    with ScaffoldingLlm(controller, workers, trace=True) as llm:
        llm.generate("Why?").trace.save("why.json")
    print(Trace.load("why.json").text())

A trace holds what a controller needs to run again without a model (``replay``): what each task was
answered with, and the order in which tasks and branches ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from forethought.errors import TraceError
from forethought.outputs import Usage
from forethought.saved_file import save_text
from forethought.scaffolding.budget import Budget
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.settings import NON_NEGATIVE_FLOAT, validated
from forethought.scaffolding.trace_values import checked, decoded
from forethought.strict_json import read_json

VERSION = 1

_KINDS = frozenset({"task", "branch", "budget"})
_OUTCOMES = frozenset({"done", "failed", "cancelled", "budget"})
_COUNTS = frozenset(field.name for field in fields(Usage))
_ERROR_FIELDS = frozenset({"type", "what", "why", "fix"})
_REQUEST_KINDS: Mapping[str, Any] = MappingProxyType(
    {
        "prompt": str | list | tuple | None,
        "messages": list,
        "sampling": dict,
        "suffix": str,
        "kept": int | None,
    }
)
_RESULT_KINDS: Mapping[str, Any] = MappingProxyType(
    {
        "output_str": str | None,
        "output_tokens": list | tuple | None,
        "inserted_tokens": list | tuple | None,
        "finish_reason": str | None,
    }
)
_STAGE_FIELDS: Mapping[str, type[Any]] = MappingProxyType(
    {"at": Real, "branch": str, "name": str, "why": str, "fields": dict}
)
_GROWN = frozenset({"$", "kept", "items", "in_place"})


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

    def check(self, number: int, branches: Collection[str]) -> None:
        """Check what the types of the fields leave open; raises ``ValueError`` that names the
        value.

        Args:
            number: its position among the spans.
            branches: paths of the branches of the trace.
        """
        place = f"spans.{number}"
        has_ended = self.outcome is not None
        for name, is_right in (
            ("number", self.number == number),
            ("kind", self.kind in _KINDS),
            ("outcome", not has_ended or self.outcome in _OUTCOMES),
            ("order", (self.order is not None) == has_ended),
            ("end", (self.end is not None) == has_ended),
            ("branch", self.branch in branches),
            ("fork_of", self.fork_of is None or 0 <= self.fork_of < number),
            ("step_of", self.step_of is None or 0 <= self.step_of < number),
            ("usage", self.usage.keys() <= _COUNTS),
            ("error", self.error is None or self.error.keys() == _ERROR_FIELDS),
        ):
            if not is_right:
                raise ValueError(f"{place}.{name} cannot be {getattr(self, name)!r}")

    def check_values(self) -> None:
        """Decode what was asked for and its results; raises a ``ValueError`` that names what is
        damaged.
        """
        place = f"spans.{self.number}"
        request = decoded(self.request, f"{place}.request")
        for name, kind in _REQUEST_KINDS.items():
            if name in request and not isinstance(request[name], kind):
                raise ValueError(f"{place}.request.{name} cannot be {request[name]!r}")
        stop = request.get("sampling", {}).get("stop")
        if not isinstance(stop, str | list | tuple | None):
            raise ValueError(f"{place}.request.sampling.stop cannot be {stop!r}")
        prompt = request.get("prompt")
        if isinstance(prompt, list | tuple) and not all(map(_is_count, prompt)):
            raise ValueError(f"{place}.request.prompt are no token ids")
        for name, value in self.results.items():
            grown = isinstance(value, dict) and value.get("$") == "grown"
            if grown and value.keys() != _GROWN:
                raise ValueError(f"{place}.results.{name} has not the fields {sorted(_GROWN)}")
            if grown and not (_is_count(value["kept"]) and isinstance(value["items"], str | list)):
                raise ValueError(f"{place}.results.{name} has not grown by {value['items']!r}")
            content = decoded(value["items"] if grown else value, f"{place}.results.{name}")
            if not isinstance(content, _RESULT_KINDS.get(name, object)):
                raise ValueError(f"{place}.results.{name} cannot be {content!r}")

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


def _is_count(value: Any, limit: float = math.inf) -> bool:
    return type(value) is int and 0 <= value <= limit


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of tokens, per million, in any currency; not negative."""

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
        """The cost of the tokens of a ``usage``: those of prompts, and all that were generated."""
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
    thinking: dict[str, Any] = field(default_factory=dict)
    """What workers told of how their models think, as encoded, by ``thinking_key``."""
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
        """The outputs of the request; raises ``TraceError`` if the record of one is damaged."""
        try:
            return [_output(output, f"outputs.{n}") for n, output in enumerate(self.outputs)]
        except ValueError as error:
            raise _damaged(error) from error

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON; an earlier file is replaced once all of it is written."""
        save_text(path, json.dumps(asdict(self), ensure_ascii=False), "trace")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace that ``save`` has written; raises ``TraceError`` if it is missing or no
        trace.
        """
        try:
            values = read_json(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict) or values.get("version") != VERSION:
                raise ValueError(f"it is no trace of version {VERSION}")
            spans = values.get("spans")
            if isinstance(spans, list):
                values["spans"] = [
                    checked(Span, span, f"spans.{number}.") for number, span in enumerate(spans)
                ]
            trace = checked(cls, values)
            trace._check_order()
            trace._check_values()
            return trace
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise TraceError(
                f"cannot read the trace {path}", str(error), "Give a file that Trace.save wrote"
            ) from error

    def check(self) -> None:
        """Check the values that a replay reads; ``load`` has done so."""
        try:
            self._check_values()
        except (ValueError, TypeError, RecursionError) as error:
            raise _damaged(error) from error

    def _check_values(self) -> None:
        Budget(**self.budget)
        for name in ("prompt", "kwargs", "thinking"):
            decoded(getattr(self, name), name)
        for number, output in enumerate(self.outputs):
            _output(output, f"outputs.{number}")
        for span in self.spans:
            span.check_values()

    def _check_order(self) -> None:
        """Check what the types of the fields leave open."""
        paths = {"", *(span.branch for span in self.spans if span.kind == "branch")}
        for number, span in enumerate(self.spans):
            span.check(number, paths)
        orders = sorted(span.order for span in self.spans if span.order is not None)
        if orders != list(range(len(orders))):
            raise ValueError(f"spans.order: {orders[:20]} do not number what has ended")
        if self.error is not None and self.error.keys() != _ERROR_FIELDS:
            raise ValueError(f"error has not the fields {sorted(_ERROR_FIELDS)}")
        for number, stage in enumerate(self.stages):
            if stage.keys() != _STAGE_FIELDS.keys():
                raise ValueError(f"stages.{number} has not the fields {sorted(_STAGE_FIELDS)}")
            for name, kind in _STAGE_FIELDS.items():
                if not isinstance(stage[name], kind):
                    raise ValueError(f"stages.{number}.{name} cannot be {stage[name]!r}")
        for number, wait in enumerate(self.resumed):
            branch, num_ended = wait if len(wait) == 2 else (None, None)
            is_path = isinstance(branch, str) and branch in paths
            if not (is_path and _is_count(num_ended, len(orders))):
                raise ValueError(f"resumed.{number}: {wait!r} is no branch and how much had ended")

    # ---- reading it ---------------------------------------------------------------------------

    def tasks(self) -> list[Span]:
        """The executions of tasks, each step of a stream separately."""
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
            prices: adds the costs of the request and of each of its tasks; None: no costs.
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


def _output(value: Any, place: str) -> ScaffoldingOutput:
    output = decoded(value, place)
    if not isinstance(output, ScaffoldingOutput):
        raise ValueError(f"{place} is no output: {output!r}")
    return output


def _damaged(error: Exception) -> TraceError:
    return TraceError("the trace is damaged", str(error), "Record the request anew")


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
