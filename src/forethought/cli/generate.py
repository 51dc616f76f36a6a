"""Answer one prompt, with any method. The answer streams to standard output; what it cost follows
on standard error.

The prompt goes through the model's chat template where it has one. With --url it is a chat with the
server, each sample of a method too; a method that continues its own text needs --raw there, and a
prompt in the model's own format, as only the server knows the template. Methods stack with '+', the
inner one first: --method dynasor+majority_vote.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from forethought import methods
from forethought.cli import backend
from forethought.cli.answer import Respondent
from forethought.cli.backend import Backend
from forethought.cli.settings import parse_settings, with_samples
from forethought.errors import ParameterError
from forethought.methods.stack import stack
from forethought.scaffolding.controller import Controller

_CHAT = "forethought.scaffolding.controller:NativeChatController"
_INNER = "generation_controller"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("prompt", help="the question; '-' reads it from standard input")
    parser.add_argument("--method", metavar="NAME", help="see 'forethought methods'")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the method"
    )
    backend.configure(parser)
    parser.add_argument("--raw", action="store_true", help="do not use the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Generate."""
    params = backend.sampling_of(args)
    method = _method(args, params)
    question = _question(args.prompt)
    if args.raw and args.system:
        raise ParameterError(
            "--system needs the chat template", "--raw leaves it out", "Put it into the prompt"
        )
    with backend.open_backend(args) as chosen:
        prompt = _prompt(args, question, chosen)
        with closing(Respondent(method, chosen.worker)) as respondent:
            write = _Writing(chosen, show=not args.json)
            with write:
                answer = respondent.answer(prompt, params, write)
    if args.json:
        report = {**answer.to_dict(), "method": args.method or "plain", "model": chosen.name}
        print(json.dumps(report, ensure_ascii=False))
    else:
        _write("" if answer.text.endswith("\n") else "\n")
        print(answer.summary(), file=sys.stderr)
    return 0


class _Writing:
    """Writes an answer as it comes, behind what there is to say about the model.

    After Ctrl-C the text so far stays, on a line that is ended.

    Args:
        chosen: what answers.
        show: whether the text is written, and not only awaited.
    """

    def __init__(self, chosen: Backend, *, show: bool) -> None:
        self._chosen, self._show, self._begun = chosen, show, False

    def __call__(self, text: str) -> None:
        """Write another piece."""
        if not self._begun:
            self._chosen.introduce()
        self._begun = True
        if self._show:
            _write(text)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt and self._begun and self._show:
            _write("\n")


def _question(prompt: str) -> str:
    """The prompt as it was typed, or what standard input says for ``-``."""
    if prompt == "-" and sys.stdin is None:
        raise ParameterError("no prompt", "standard input is closed", "Give the prompt itself")
    question = sys.stdin.read() if prompt == "-" else prompt
    if not question.strip():
        raise ParameterError("empty prompt", "there is nothing to answer", "Give some text")
    try:
        question.encode()
    except UnicodeEncodeError as error:  # what Python makes of bytes that it cannot read
        raise ParameterError(
            "invalid prompt", f"its character {error.start} is not valid UTF-8", "Give UTF-8 text"
        ) from error
    return question


def _method(args: argparse.Namespace, params: dict[str, Any]) -> Controller:
    """The method that was chosen; plain decoding, greedy unless told otherwise, if none was."""
    spec = args.method or "plain"
    settings = with_samples(spec, parse_settings(args.set))
    if spec == "plain" and args.url is None:
        params.setdefault("temperature", 0.0)
    if args.url is not None and not args.raw:
        spec = _as_chat(spec, settings)
        if args.system:
            settings["system"] = args.system
    if "streaming" in methods.describe(spec.split("+")[-1]).parameters and not args.json:
        settings.setdefault("streaming", True)
    return stack(spec, **settings)


def _as_chat(spec: str, settings: Mapping[str, Any]) -> str:
    """The same stack of methods with a turn of chat where it decodes plainly.

    Raises:
        ParameterError: what is innermost is not plain decoding.
    """
    first, *others = spec.split("+")
    if first == "plain":
        return "+".join([_CHAT, *others])
    if _INNER in methods.describe(first).parameters and _INNER not in settings:
        return f"{_CHAT}+{spec}"
    raise ParameterError(
        f"--method {spec} cannot chat with a server",
        "it continues text, and only the server knows its model's chat template",
        "Write the prompt in the model's own format and give --raw",
    )


def _prompt(args: argparse.Namespace, question: str, chosen: Backend) -> Any:
    """The prompt that the method is to be given."""
    if args.url is not None:
        return question
    if args.raw or not chosen.can_chat:
        if args.system:
            raise ParameterError(
                "--system needs a chat template",
                f"{chosen.name} has none",
                "Put it into the prompt",
            )
        if not args.raw:
            print(
                f"{chosen.name} has no chat template: the prompt is continued as it stands",
                file=sys.stderr,
            )
        return question
    assert chosen.llm is not None, "what is no server is an engine"
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": question})
    return chosen.llm.chat_prompt(messages)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
