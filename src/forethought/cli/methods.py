"""List the inference-time methods: what each does, the paper it follows, and its settings.

Rewards, listed after them, score the answers of others: --method best_of_n --set
reward_controller=judge.

A setting is given as --set name=value, and the defaults are those of the command line; methods
stack with '+', the inner one first: dynasor+majority_vote.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from forethought import methods
from forethought.cli.options import with_samples
from forethought.methods import Method

WIDTH = 96
_REWARDS = "Rewards: they score the answers of a method that takes a reward_controller."
_OTHERS = "In Python alone, or by an option of their own:"
_THINKING = {
    "unused": "",
    "adapts": "Thinking: closes or limits thoughts, and does without where the model has none.",
    "required": "Thinking: only for models that think.",
}
_IN_PYTHON = {
    "prm": "Scores the steps of answers with a process reward model: --reward-model DIR or "
    "--reward-url URL; in Python PRMController.of(worker).",
    "tools": "Runs the tools that the model calls, and goes on until it calls none: "
    "ChatWithMCPController, with the worker of the tools (docs/tools.md).",
}
"""Controllers that cannot be made of a name and settings alone."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: one name, or none for all."""
    parser.add_argument("name", nargs="?", help="show only this method")
    parser.add_argument("--json", action="store_true", help="print JSON, an object per method")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    if args.json:
        names = methods.names() if args.name is None else [args.name]
        described = [methods.describe(name).to_dict() for name in names]
        print(json.dumps(described, indent=2))
        return 0
    if args.name is not None:
        print(_entry(methods.describe(args.name)))
        return 0
    names = [name for name in methods.names() if name not in methods.REWARDS]
    rewards = [*map(_entry, map(methods.describe, methods.REWARDS))]
    others = ["\n".join([name, *_wrapped(what)]) for name, what in _IN_PYTHON.items()]
    sections = [*map(_entry, map(methods.describe, names)), _REWARDS, *rewards, _OTHERS, *others]
    print("\n\n".join(sections))
    return 0


def _entry(method: Method) -> str:
    lines = [method.name, *_wrapped(method.description)]
    if method.paper:
        lines += _wrapped(f"Paper: {method.paper}")
    lines += _wrapped(_THINKING[method.uses_thinking])
    return "\n".join([*filter(None, lines), "  Settings:", *_settings(method)])


def _settings(method: Method) -> list[str]:
    lines = []
    defaults = {**method.parameters, **with_samples(method.name, {})}
    for name, default in defaults.items():
        meaning = method.explanations.get(name, "")
        head = f"{_setting(name, default)}, {method.settings[name].type_text}"
        shown = f"{head}: {meaning}" if meaning else head
        lines += textwrap.wrap(shown, WIDTH, initial_indent="    ", subsequent_indent="      ")
    return lines


def _setting(name: str, default: Any) -> str:
    if default is Method.REQUIRED:
        return f"{name} (required)"
    return f"{name}={getattr(default, '__name__', None) or repr(default)}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
