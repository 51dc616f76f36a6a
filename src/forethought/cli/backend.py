"""Where answers come from: the engine on this machine, or a server that speaks OpenAI's API."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.cli import model
from forethought.errors import DependencyError, ParameterError
from forethought.guided import GuidedDecodingParams
from forethought.params import SamplingParams
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import NativeChatController
from forethought.scaffolding.messages import RoleMessage
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.task import ChatTask
from forethought.scaffolding.worker import Worker

if TYPE_CHECKING:
    from forethought.text.async_llm import AsyncLLM

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Backend:
    """A worker, and the model behind it."""

    worker: Worker
    name: str
    """What the model is called in reports."""
    llm: AsyncLLM | None = None
    """The engine; None for a server."""
    introduction: str = ""
    """One line about the model, for who has not chosen it; empty where there is nothing to say."""

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template, as far as can be known."""
        return self.llm is None or bool(self.llm.tokenizer.chat_template)

    def introduce(self) -> None:
        """Say on standard error what the model is, if nobody has chosen it."""
        if self.introduction:
            print(self.introduction, file=sys.stderr)


class Turn(NativeChatController):
    """Answers a whole conversation: its prompt is the list of messages."""

    def generate(
        self,
        prompt: Sequence[Message],
        *,
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        **kwargs: Any,
    ) -> Process:
        """Let the assistant answer; its message is the output."""
        task = ChatTask.create_from_messages([RoleMessage.from_dict(said) for said in prompt])
        sampling.fill(task, sampling.checked("sampling_params", sampling_params))
        yield from self.process([task], **kwargs)
        return task.create_scaffolding_output()


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose a backend, and those of sampling."""
    model.configure(parser)
    parser.add_argument(
        "--url", help="use the OpenAI-compatible server at this base URL, as in http://host:8000/v1"
    )
    parser.add_argument(
        "--api-model",
        metavar="NAME",
        help="name of the model on that server; its key is read from OPENAI_API_KEY",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest of mass P")
    parser.add_argument("--seed", type=int, metavar="S", help="same seed, same tokens")
    parser.add_argument(
        "--json-schema", metavar="FILE|JSON", help="answer in JSON that fits this schema"
    )
    parser.add_argument("--regex", metavar="PATTERN", help="answer with what matches this pattern")
    parser.add_argument(
        "--choice", action="append", metavar="TEXT", help="answer with this or another --choice"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given, checked.

    Raises:
        ParameterError: a value is outside its range.
    """
    names = ("max_tokens", "temperature", "top_p", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if any(value is not None for value in (args.json_schema, args.regex, args.choice)):
        schema = None if args.json_schema is None else _schema(args.json_schema)
        shape = GuidedDecodingParams(json=schema, regex=args.regex, choice=args.choice)
        given["guided_decoding"] = shape
    SamplingParams(**given)
    return given


def _schema(given: str) -> str:
    """The schema itself, be it given or in a file."""
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"cannot read the schema in {given}", str(error), "Give a file, or the schema itself"
        ) from error


@contextmanager
def open_backend(args: argparse.Namespace) -> Iterator[Backend]:
    """The backend that the options choose, shut down at the end.

    Raises:
        UsageError: options that contradict each other, or a model that cannot be opened.
    """
    if args.url is not None or args.api_model is not None:
        yield _server(args)
        return
    fields = model.fields_of(args)
    open_llm = model.opener(fields)
    from forethought.scaffolding.workers.local import EngineWorker

    llm = open_llm()
    try:
        yield Backend(EngineWorker(llm), model.label(fields), llm, model.introduction(fields))
    finally:
        llm.shutdown()


def _server(args: argparse.Namespace) -> Backend:
    if args.url is None or args.api_model is None or model.is_chosen(args):
        raise ParameterError(
            "contradictory options",
            "--url and --api-model belong together; --model, --config, --speculative and what goes "
            "with them are for this machine",
            "Give --url and --api-model, or --model",
        )
    try:
        from openai import AsyncOpenAI
    except ModuleNotFoundError as error:
        raise DependencyError.missing("openai", "--url", "openai") from error
    from forethought.scaffolding.workers.openai import OpenaiWorker

    client = AsyncOpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    return Backend(OpenaiWorker(client, args.api_model), args.api_model)
