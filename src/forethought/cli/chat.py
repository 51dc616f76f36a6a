"""Talk to a model. /exit or Ctrl-D leaves, /clear begins again.

Ctrl-C ends the current answer and keeps its text so far; pressed at the prompt it leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from contextlib import closing
from typing import Any

from forethought.cli.backend import (
    Backend,
    ConversationController,
    Respondent,
    add_backend_options,
    open_backend,
    sampling_of,
    wants_server,
)
from forethought.cli.options import (
    add_generation_config_option,
    add_model_argument,
    uses_model_sampling,
)
from forethought.config.generation_config import described
from forethought.errors import ParameterError, TaskError, UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model_argument(parser)
    add_backend_options(parser)
    add_generation_config_option(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves."""
    options = sampling_of(args)
    if args.generation_config is not None and wants_server(args):
        why = "a server's model has that server's defaults"
        raise ParameterError(
            "--generation-config needs a model on this machine", why, "Leave it out"
        )
    if sys.stdin is None:
        raise UsageError(
            "chat needs input", "standard input is closed", "Use 'forethought generate'"
        )
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # makes input() a line editor
    with open_backend(args) as chosen:
        if not chosen.can_chat:
            raise UsageError(
                f"{chosen.name} cannot chat",
                "its tokenizer has no chat template",
                "Use 'forethought generate', or an instruction-tuned model",
            )
        chosen.introduce()
        params = {**_defaults(args, chosen), **options}
        print(f"{chosen.name}: /exit or Ctrl-D leaves, /clear begins again", file=sys.stderr)
        method, pays = ConversationController(streaming=True), chosen.drafts_where_they_pay
        with closing(Respondent(method, chosen.worker, drafts_where_they_pay=pays)) as respondent:
            conversation = Conversation(respondent, params, args.system)
            conversation.talk()
    return int(conversation.has_failed)


def _defaults(args: argparse.Namespace, chosen: Backend) -> dict[str, Any]:
    """Sampling fields that the user has not set: those that the model's maker advises, or greedy;
    a server's are its own.
    """
    if chosen.llm is None:
        return {}
    sampling = chosen.llm.profile.sampling
    if not sampling or not uses_model_sampling(args):
        return {"temperature": 0.0} if args.generation_config is None else {}
    print(f"sampling as the model's maker advises: {described(sampling)}", file=sys.stderr)
    return dict(sampling)


class Conversation:
    """The turns so far, after the prompt ``system``, and the loop that adds to them."""

    def __init__(self, respondent: Respondent, params: dict[str, Any], system: str | None) -> None:
        self._respondent, self._params = respondent, params
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self.has_failed = False
        """Whether an answer broke off: its question is not kept, and can be asked again."""

    def talk(self) -> None:
        """Read and answer until the user leaves."""
        while True:
            try:
                line = _ask().strip()
            except EOFError:
                if _is_interactive():
                    print()
                return
            if line == "/exit":
                return
            if line == "/clear":
                self._messages = list(self._opening)
            elif line.startswith("/"):
                print("there are /exit and /clear", file=sys.stderr)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        pieces: list[str] = []

        def write(text: str) -> None:
            pieces.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()

        turn = [*self._messages, {"role": "user", "content": line}]
        note = "stopped"
        try:
            note = self._respondent.answer(turn, self._params, write).summary()
        except KeyboardInterrupt:
            pass
        except UsageError as error:
            print(f"forethought: {error} (/clear begins again)", file=sys.stderr)
            return
        except TaskError as error:
            if pieces:
                print()
            print(f"forethought: {error} (the question can be asked again)", file=sys.stderr)
            self.has_failed = True
            return
        print()
        print(note, file=sys.stderr)
        self._messages = [*turn, {"role": "assistant", "content": "".join(pieces)}]


def _is_interactive() -> bool:
    """Whether a user types; otherwise the lines come from a file or a program."""
    return sys.stdin.isatty()


def _ask() -> str:
    """The next line; with a prompt where a user types, which never goes into a pipe."""
    if _is_interactive() and not sys.stdout.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
        return input()
    return input("> " if _is_interactive() else "")
