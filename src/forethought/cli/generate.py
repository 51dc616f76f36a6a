"""Answer one prompt, with any method. The answer streams to standard output; what it cost follows
on standard error. --trace FILE writes what the method did, for 'forethought trace show FILE'.

The prompt goes through the model's chat template where it has one. With --url it is a chat with the
server, each sample of a method too; a method that continues its own text needs --raw there, and a
prompt in the model's own format, as only the server knows the template. Methods stack with '+', the
inner one first: --method dynasor+majority_vote. sleep_time, hogwild, hogwild_turns and specreason
write prompts of their own and take the question as text, with --raw; the workers of specreason are
then one model, and 'forethought bench specreason' has two. Best of N needs a judge: --method
best_of_n --reward-model DIR, or --reward-url URL on a server, which reads the question and each
answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from forethought.cli.backend import (
    Backend,
    Respondent,
    add_backend_options,
    check_chats,
    open_backend,
    sampling_of,
)
from forethought.cli.judge import (
    check_judge,
    check_reward_model,
    configure_judge,
    judged_by,
    open_judge,
    wants_judge,
)
from forethought.cli.options import parse_settings, with_samples
from forethought.errors import ParameterError
from forethought.evaluation.problems import user_prompt
from forethought.methods.stack import (
    refuse_greedy_samples,
    refuse_too_many_generations,
    split,
    stack,
)
from forethought.saved_file import check_file
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.messages import SystemMessage
from forethought.scaffolding.reward_controller import NativeRewardController
from forethought.scaffolding.task import ChatTask


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("prompt", help="the question; '-' reads it from standard input")
    parser.add_argument("--method", metavar="NAME", help="see 'forethought methods'")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the method"
    )
    add_backend_options(parser)
    configure_judge(parser)
    parser.add_argument("--raw", action="store_true", help="do not use the chat template")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write what the method did there, for 'forethought trace'",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Generate."""
    params = sampling_of(args)
    check_judge(args, [_spec(args)], parse_settings(args.set))
    stand_in = NativeRewardController() if wants_judge(args) else None
    # Both are checked before a model is loaded.
    controller = _method(args, {}, stand_in)
    refuse_too_many_generations(controller)
    refuse_greedy_samples(controller, args.temperature)
    check_reward_model(args.reward_model)
    question = _question(args.prompt)
    if args.raw and args.system:
        raise ParameterError(
            "--system needs the chat template", "--raw leaves it out", "Put it into the prompt"
        )
    if args.trace is not None:
        check_file(args.trace, "trace")
    backend = open_backend(args)
    with ExitStack() as opened:
        judge = opened.enter_context(open_judge(args))
        method = _method(args, params, judge.controller if judge else None)
        chosen = opened.enter_context(backend)
        prompt = _prompt(args, question, chosen)
        others = judge.workers if judge else None
        pays = chosen.drafts_where_they_pay
        respondent = Respondent(
            method, chosen.worker, others, args.trace, drafts_where_they_pay=pays
        )
        write = _Writing(chosen, show=not args.json)
        with closing(respondent), write:
            answer = respondent.answer(prompt, params, write, question)
    if args.json:
        report = {**answer.to_dict(), "method": _spec(args), "model": chosen.name}
        print(json.dumps(report, ensure_ascii=False))
    else:
        _write("" if answer.text.endswith("\n") else "\n")
        print(answer.summary(), file=sys.stderr)
    return 0


class _Writing:
    """Writes an answer as it streams, if ``show``, after the introduction of the model. Ctrl-C ends
    the line of the text so far.
    """

    def __init__(self, chosen: Backend, *, show: bool) -> None:
        self._chosen, self._show, self._begun = chosen, show, False

    def __call__(self, text: str) -> None:
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
    """The prompt as given, or standard input for ``-``."""
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


def _spec(args: argparse.Namespace) -> str:
    """The method as it is written; plain decoding where none is named."""
    return "plain" if args.method is None else str(args.method)


def _method(
    args: argparse.Namespace, params: dict[str, Any], judging: NativeRewardController | None
) -> Controller:
    """The chosen method; by default plain decoding, which is greedy unless sampling is set."""
    spec = _spec(args)
    settings = with_samples(spec, parse_settings(args.set))
    if spec == "plain" and args.url is None:
        params.setdefault("temperature", 0.0)
    settings = judged_by(spec, judging) | settings
    if _chats(args):
        instead = "Write the prompt in the model's own format and give --raw"
        check_chats(spec, instead)
    if "streaming" in split(spec)[-1].parameters and not args.json:
        settings.setdefault("streaming", True)
    return stack(spec, **settings)


def _chats(args: argparse.Namespace) -> bool:
    """Whether the method gets the bare question and sends it as a chat: a server applies the chat
    template itself, and a reward model reads the question without one.
    """
    return not args.raw and (args.url is not None or wants_judge(args))


def _prompt(args: argparse.Namespace, question: str, chosen: Backend) -> Any:
    if _chats(args):
        system = [SystemMessage(args.system)] if args.system else []
        return ChatTask.create_from_prompt(question, system)
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
                f"{chosen.name} has no chat template: the prompt is continued as it is",
                file=sys.stderr,
            )
        return question
    assert chosen.llm is not None, "a backend is a server or an engine"
    return user_prompt(chosen.llm, question, args.system)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
