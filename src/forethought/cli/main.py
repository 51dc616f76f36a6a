"""The entry point: finds the subcommand, runs it, turns errors into one line and an exit status.

====  =============================================================
0     done
1     something failed while it ran
2     the caller asked for something that cannot be (``UsageError``)
130   interrupted by Ctrl-C
141   the reader of standard output went away
====  =============================================================
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import NoReturn

from forethought import __version__
from forethought.errors import ForethoughtError, UnknownNameError, UsageError

logger = logging.getLogger(__name__)

COMMANDS = {
    "generate": "answer one prompt, with any method",
    "chat": "talk to a model",
    "serve": "serve a model over HTTP, with all methods and a page",
    "cluster": "list the replicas of a served model, or drain one",
    "methods": "list the inference-time methods and their settings",
    "demo": "compare four methods on the embedded reasoner",
    "eval": "compare methods on your own model and problems",
    "bench": "measure what speeds up decoding on this machine",
    "trace": "show or export a recorded request",
    "train": "train a drafter for your own model",
    "doctor": "say what this machine has: versions, processor, GPU, extras, fast paths",
}
"""Subcommand -> what it does; ``forethought.cli.<subcommand>`` has ``configure`` and ``run``."""
_PACKAGE = Path(__file__).resolve().parent.parent


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UsageError``, so that its errors are one line, too."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        fix = self._fix(message) if message.startswith("unrecognized arguments") else ""
        raise UsageError(message, fix=fix or f"See {self.prog} --help")

    def _fix(self, message: str) -> str:
        """An option of the command that does the same as an engine's argument."""
        if "--config" not in self._option_string_actions:
            return ""
        from forethought.config.engine import LlmArgs

        for option in re.findall(r"--([a-z][\w-]*)", message):
            name = option.replace("-", "_")
            row = LlmArgs.foreign_arguments.get(name)
            field = name if name in LlmArgs.model_fields else row.name if row is not None else ""
            outer, _, inner = field.rpartition(".")
            line = f"{outer}: {{{inner}: VALUE}}" if outer else f"{field}: VALUE"
            if field:
                return f"Write '{line}' into the YAML file of --config"
            if row is not None:
                return row.fix or "Leave it out"
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Raises faults of ours alone."""
    if sys.stderr is None:  # closed by the caller; a print would go to standard output
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end
    if sys.stdout is None:
        return _complain("standard output is closed: there is nowhere to answer", 2)
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except ForethoughtError as error:
        return _complain(str(error), 2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except UnicodeDecodeError as error:
        return _complain(f"standard input is not valid {error.encoding.upper()}: {error}", 2)
    except BrokenPipeError:
        _silence_stdout()
        return 141
    except OSError as error:  # such as a full disk or a folder that may not be written
        _silence_stdout()
        return _complain(str(error), 1)
    except Exception as error:
        place = _users_line(error)
        if place is None:
            raise
        logger.debug("code of the user's failed", exc_info=True)
        return _complain(f"{type(error).__name__}: {error} ({place})", 1)


def _users_line(error: Exception) -> str | None:
    """The line of the user's code that failed, such as of a method; None: it is a fault of ours."""
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    for frame in reversed(extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(_PACKAGE):
            return None
        if not frame.filename.startswith(("<", *libraries)):
            return f"{frame.filename}:{frame.lineno}"
    return None


def _run(argv: list[str]) -> int:
    name = argv[0] if argv and not argv[0].startswith("-") else None
    if name is None:
        return _read(_top_level(), argv or ["--help"], lambda args: 0)
    command = _load(name)
    parser = Parser(prog=f"forethought {name}", description=command.__doc__, add_help=True)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.configure(parser)
    return _read(parser, argv[1:], command.run)


def _read(parser: Parser, argv: list[str], run: Callable[[argparse.Namespace], int]) -> int:
    """Parse and run; ``--help`` and ``--version``, after which argparse exits, are status 0."""
    try:
        args = parser.parse_args(argv)
    except SystemExit:
        return 0
    return run(args)


def _load(name: str) -> ModuleType:
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS)
    return importlib.import_module(f"forethought.cli.{name}")


def _top_level() -> Parser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    parser = Parser(
        prog="forethought",
        usage="forethought COMMAND [ARGUMENTS]",
        description=f"Draft ahead, think deeper.\n\ncommands:\n{listing}",
        epilog="forethought COMMAND --help shows the arguments of one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"forethought {__version__}")
    return parser


def _silence_stdout() -> None:
    """Python flushes standard output again at exit: let that go to the null device."""
    real = sys.__stdout__
    if real is not None and sys.stdout is real:
        os.dup2(os.open(os.devnull, os.O_WRONLY), real.fileno())


def _complain(message: str, status: int) -> int:
    print(f"forethought: {' '.join(message.split())}", file=sys.stderr)
    return status
