"""What the commands that generate share: their options, the model or server, and one answer.

A ``Backend`` is the engine on this machine or a server that speaks OpenAI's API. A
``Respondent`` runs a method on one and writes its ``Answer`` as it streams.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.cli import options
from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import SamplingParams
from forethought.errors import DependencyError, ParameterError
from forethought.evaluation.report import count_of
from forethought.methods import describe, worker_tags
from forethought.methods.stack import split
from forethought.outputs import SpeculationMetrics, Usage
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    NativeChatController,
)
from forethought.scaffolding.messages import RoleMessage
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Delta, ScaffoldingOutput, ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.task import ChatTask
from forethought.scaffolding.worker import Worker
from forethought.workers.routing import shown_url, url_error

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM
    from forethought.workers.concurrency import AdaptiveConcurrency


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    output: ScaffoldingOutput
    usage: Usage
    """Tokens of everything that was run for it."""
    seconds: float
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    """Speculation of everything that was run for it; empty for a server."""
    drafts_where_they_pay: bool = False
    """Whether goodput control chose how long drafts were."""

    @property
    def text(self) -> str:
        """Its text."""
        return self.output.text or ""

    @property
    def token_count(self) -> int:
        """Tokens of the answer itself, as exactly as they are known."""
        tokens = self.output.token_ids
        return self.usage.completion_tokens if tokens is None else len(tokens)

    def summary(self) -> str:
        """One line: tokens of the answer and of all that was generated, seconds, acceptance."""
        speed = self.usage.decoded / self.seconds if self.seconds else 0.0
        line = count_of(self.token_count, "token")
        if self.usage.decoded > self.token_count:
            line += f" of {self.usage.decoded} generated"
        line += f" in {self.seconds:.2f} s ({speed:.0f} tokens/s)"
        if self.metrics.drafted:
            line += f", {self.metrics.mean_acceptance_length:.1f} tokens per step"
            line += " (drafts only where they pay)" if self.drafts_where_they_pay else ""
        if self.metrics.synthetic:
            line += " (synthetic acceptance)"
        elif self.metrics.lossy:
            line += " (lossy)"
        if (thought := self.output.thinking) is not None:
            how = f", closed by {thought.end}" if thought.end else ""
            line += f", {count_of(thought.num_tokens, 'token')} of thought{how}"
        return f"{line}, finished by {self.output.finish_reason}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "text": self.text,
            "token_count": self.token_count,
            "finish_reason": self.output.finish_reason,
            "thinking": asdict(self.output.thinking) if self.output.thinking else None,
            "usage": asdict(self.usage),
            "metrics": self.metrics.to_dict() if self.metrics.steps else None,
            "seconds": round(self.seconds, 3),
        }


class Respondent:
    """A method with a worker, ready to answer at the terminal.

    Args:
        worker: executes all its tasks, but for those of ``others``.
        others: further workers by tag.
        trace_file: where the trace of the last answer is written at the end; None: nowhere.
        drafts_where_they_pay: as of the answers.
    """

    def __init__(
        self,
        controller: Controller,
        worker: Worker,
        others: Mapping[Any, Worker] | None = None,
        trace_file: Path | None = None,
        *,
        drafts_where_they_pay: bool = False,
    ) -> None:
        self._drafts_where_they_pay = drafts_where_they_pay
        workers = dict.fromkeys(worker_tags(controller), worker) | dict(others or {})
        self._trace_file = trace_file
        self._result: ScaffoldingResult | None = None
        self._llm = ScaffoldingLlm(controller, workers, trace=trace_file is not None)

    def answer(
        self,
        prompt: Any,
        params: Mapping[str, Any],
        write: Callable[[str], None],
        question: str | None = None,
    ) -> Answer:
        """Answer one prompt; the pieces of text that ``write`` gets, all together, are the answer.

        Raises the method's error. If ``write`` raises, or Ctrl-C is pressed, the request ends
        first.

        Args:
            question: the user's text, for a method that verifies or scores its answers.
        """
        began = time.perf_counter()
        fields: dict[str, Any] = {} if question is None else {"question": question}
        result = self._llm.generate_async(prompt, sampling_params=params, **fields)
        self._result = result
        try:
            streamed = _print(result, write)
        except BaseException:
            result.abort()
            raise
        output = result.output or ScaffoldingOutput("")
        seconds = time.perf_counter() - began
        pays = self._drafts_where_they_pay
        answer = Answer(output, result.usage, seconds, result.metrics, pays)
        whole = answer.text  # the method may have streamed nothing, or another text
        write(whole[len(streamed) :] if whole.startswith(streamed) else f"\n{whole}")
        return answer

    def close(self) -> None:
        """End requests in flight, and write the trace, of an answer that failed too."""
        self._llm.shutdown()
        trace = None if self._result is None else self._result.trace
        if self._trace_file is not None and trace is not None:
            trace.save(self._trace_file)


def _print(result: ScaffoldingResult, write: Callable[[str], None]) -> str:
    """Write the stream of the request, without those of its branches; returns its text."""
    streamed = ""
    for event in result.events():
        if not event.branch and isinstance(event.output, Delta):
            streamed += event.output.text
            write(event.output.text)
    return streamed


Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Backend:
    """A worker, and its model."""

    worker: Worker
    name: str
    """Name of the model in reports."""
    llm: AsyncLLM | None = None
    """The engine; None for a server."""
    introduction: str = ""
    """One line about a model that the user has not named; empty otherwise."""
    drafts_where_they_pay: bool = False
    """Whether goodput control chooses how long drafts are."""

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template; True for a server, which does not say."""
        return self.llm is None or bool(self.llm.tokenizer.chat_template)

    def introduce(self) -> None:
        """Write ``introduction`` on standard error, if there is one."""
        if self.introduction:
            print(self.introduction, file=sys.stderr)


class ConversationController(NativeChatController):
    """Answers a whole conversation: its prompt is the list of messages."""

    def generate(
        self,
        prompt: Sequence[Message],
        *,
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        **kwargs: Any,
    ) -> Process:
        """Generate the assistant's message."""
        task = ChatTask.create_from_messages([RoleMessage.from_dict(message) for message in prompt])
        sampling.fill(task, sampling.checked("sampling_params", sampling_params))
        yield from self.process([task], **kwargs)
        return task.create_scaffolding_output()


def add_backend_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose a backend, and those of sampling."""
    configure_choice(parser)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="limit of an answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most probable tokens of mass P"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="same seed, same tokens")
    options.add_thinking_options(parser)
    parser.add_argument(
        "--json-schema", metavar="FILE|JSON", help="answer in JSON that fits this schema"
    )
    parser.add_argument("--regex", metavar="PATTERN", help="answer with what matches this pattern")
    parser.add_argument(
        "--choice", action="append", metavar="TEXT", help="answer with this or another --choice"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")


def configure_choice(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose a backend: a model on this machine, or a server."""
    options.add_model_options(parser)
    options.add_adapter_option(parser, "answers are generated with it")
    parser.add_argument(
        "--url", help="use the OpenAI-compatible server at this base URL, as in http://host:8000/v1"
    )
    parser.add_argument(
        "--api-model",
        metavar="NAME",
        help="name of the model on that server; its key is read from OPENAI_API_KEY",
    )
    parser.add_argument(
        "--thinking-field",
        metavar="NAME",
        help="that server's own field for --thinking-budget (vLLM: thinking_token_budget)",
    )
    options.add_thinks_option(parser)


def wants_server(args: argparse.Namespace) -> bool:
    """Whether the options choose a server."""
    return args.url is not None or args.api_model is not None


def check_chats(spec: str, instead: str) -> None:
    """Raises ParameterError if a method of a stack continues a text; ``instead`` says what to do
    about it.
    """
    for entry in split(spec):
        if describe(entry.name).conversation != ConversationForm.MESSAGES:
            raise ParameterError(
                f"method {entry.name} cannot chat with a server, nor be scored by a reward model",
                "it continues its own text, and both apply their own chat template",
                instead,
            )


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given; raises ParameterError for a value outside its range."""
    names = ("max_tokens", "temperature", "top_p", "seed", *options.THINKING)
    fields = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if any(value is not None for value in (args.json_schema, args.regex, args.choice)):
        _check_shape(args)
        schema = None if args.json_schema is None else _schema(args.json_schema)
        shape = GuidedDecodingParams(json=schema, regex=args.regex, choice=args.choice)
        fields["guided_decoding"] = shape
    SamplingParams(**fields)
    return fields


def _check_shape(args: argparse.Namespace) -> None:
    """Refuse a shape of the output that OpenAI's API cannot express, where a server answers."""
    if not wants_server(args):
        return
    if args.json_schema is None:
        option = "--regex" if args.regex is not None else "--choice"
        raise ParameterError(
            f"{option} needs a model on this machine",
            "OpenAI's API has no field for it, only for JSON",
            "Use --json-schema, or --model instead of --url",
        )
    if getattr(args, "raw", False):
        raise ParameterError(
            "--json-schema needs a chat with the server",
            "--raw asks for a completion, and OpenAI's API has no schema there",
            "Leave out --raw, or use --model instead of --url",
        )


def _schema(text_or_path: str) -> str:
    """The schema, given as text or as the path of a file."""
    if text_or_path.lstrip().startswith("{"):
        return text_or_path
    try:
        return Path(text_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"cannot read the schema in {text_or_path}",
            str(error),
            "Give a file, or the schema itself",
        ) from error


def open_backend(args: argparse.Namespace) -> AbstractContextManager[Backend]:
    """The backend that the options choose: loaded when entered, shut down at the end.

    Raises UsageError for contradictory options; when entered, for a model that cannot be loaded.
    """
    check_thinking_field(args)
    if wants_server(args):
        open_server = server_opener(args)
        return _server(open_server, args.api_model)
    fields = options.llm_args_of(args)
    return _engine(options.llm_opener(fields), fields)


@contextmanager
def _server(open_server: Callable[[], Worker], name: str) -> Iterator[Backend]:
    yield Backend(open_server(), name)


@contextmanager
def _engine(open_llm: Callable[[], AsyncLLM], fields: Mapping[str, Any]) -> Iterator[Backend]:
    from forethought.workers.local import EngineWorker

    adapter = options.only_adapter(fields)
    llm = open_llm()
    try:
        yield Backend(
            EngineWorker(llm, adapter=adapter),
            options.model_label(fields),
            llm,
            options.introduction(fields),
            options.drafts_where_they_pay(fields),
        )
    finally:
        llm.shutdown()


def check_thinking_field(args: argparse.Namespace) -> None:
    """Refuse what is about a server's model where no server is asked."""
    for name, why in (
        ("thinking_field", "it is the name under which a server gets a thinking budget"),
        ("thinks", "of a model on this machine its tokenizer tells whether it thinks"),
    ):
        if getattr(args, name) is not None and not wants_server(args):
            option = f"--{name.replace('_', '-')}"
            raise ParameterError(f"{option} needs --url", why, "Leave it out")


def server_opener(
    args: argparse.Namespace, concurrency: AdaptiveConcurrency | None = None
) -> Callable[[], Worker]:
    """A function that builds a worker for the server that the options choose.

    Args:
        concurrency: limits the worker's requests, and repeats those that are refused; None: all
            are sent at once, and the client repeats a refused one twice.

    Raises:
        ParameterError: options that contradict each other, or no URL.
        DependencyError: the client is not installed.
    """
    if args.url is None or args.api_model is None or options.has_model_options(args):
        raise ParameterError(
            "contradictory options",
            "--url and --api-model belong together; --model, --config, --speculative and what goes "
            "with them are for this machine",
            "Give --url and --api-model, or --model",
        )
    if reason := url_error(args.url):
        raise ParameterError(
            f"invalid --url {shown_url(args.url)!r}", reason, "Write it as in http://host:8000/v1"
        )
    try:
        from openai import DEFAULT_MAX_RETRIES, AsyncOpenAI
    except ModuleNotFoundError as error:
        raise DependencyError.missing("openai", "--url", "openai") from error
    from forethought.workers.openai import OpenaiWorker

    key, field = os.environ.get("OPENAI_API_KEY", "none"), args.thinking_field
    thinks = options.thinks_of(args)
    retries = DEFAULT_MAX_RETRIES if concurrency is None else 0

    def open_worker() -> Worker:
        client = AsyncOpenAI(base_url=args.url, api_key=key, max_retries=retries)
        return OpenaiWorker(
            client,
            args.api_model,
            thinking_field=field,
            thinks=thinks,
            concurrency=concurrency,
        )

    return open_worker
