"""List the inference-time methods: what each does, the paper it follows, and its settings.

A setting is given as --set name=value, and the defaults are those of the command line; methods
stack with '+', the inner one first: dynasor+majority_vote.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from forethought import methods
from forethought.cli.options import with_samples
from forethought.methods import Method

WIDTH = 96


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: one name, or none for all."""
    parser.add_argument("name", nargs="?", help="show only this method")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    names = methods.names() if args.name is None else [args.name]
    print("\n\n".join(_entry(methods.describe(name)) for name in names))
    return 0


def _entry(method: Method) -> str:
    lines = [method.name, *_wrapped(method.description)]
    if method.paper:
        lines += _wrapped(f"Paper: {method.paper}")
    return "\n".join([*lines, "  Settings:", *_settings(method)])


def _settings(method: Method) -> list[str]:
    """Name, default and meaning of each, one below the other."""
    lines = []
    defaults = {**method.parameters, **with_samples(method.name, {})}
    for name, default in defaults.items():
        meaning = method.explanations.get(name, "")
        shown = f"{_setting(name, default)}: {meaning}" if meaning else _setting(name, default)
        lines += textwrap.wrap(shown, WIDTH, initial_indent="    ", subsequent_indent="      ")
    return lines


def _setting(name: str, default: Any) -> str:
    if default is Method.REQUIRED:
        return f"{name} (required)"
    return f"{name}={getattr(default, '__name__', None) or repr(default)}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
