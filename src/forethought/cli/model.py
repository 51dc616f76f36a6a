"""The options by which commands choose a model and its engine, and how they open it.

What the command line says wins over what ``--config`` says, and that over the command's defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.cli import config_file, speculation
from forethought.config import LlmArgs
from forethought.errors import DependencyError

if TYPE_CHECKING:
    from forethought.text.async_llm import AsyncLLM

INTRODUCTION = (
    'embedded reasoner: 3.6 M parameters, solves arithmetic word problems such as "Sam has 110 '
    'nuts. He uses 84. How many nuts does Sam have now?"; --model DIR for a real one'
)
"""What the embedded model is, for those who have not chosen another."""
_OPTIONS = ("model", "revision", "dtype", "device")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare ``--model`` and what belongs to it."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR|ID",
        help="local Hugging Face directory, or Hub id such as Qwen/Qwen3-0.6B (default: the "
        "embedded reasoner)",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub id")
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights (default: as the model's config says)",
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA where there is one)")
    parser.add_argument(
        "--config",
        "--extra_llm_api_options",
        type=Path,
        metavar="FILE",
        help="YAML with any fields of LlmArgs, speculative_config among them",
    )
    speculation.configure(parser)


def is_chosen(args: argparse.Namespace) -> bool:
    """Whether any of the options is given."""
    names = (*_OPTIONS, "config", "speculative", "draft_model", "max_draft_len")
    return any(getattr(args, name) is not None for name in names)


def fields_of(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The fields of ``LlmArgs`` that the options stand for, checked.

    Args:
        args: the options.
        **defaults: fields that the command sets where nothing else does.

    Raises:
        UsageError: a file that cannot be read, an unknown field, or an impossible value.
    """
    fields = defaults | (config_file.load(args.config) if args.config is not None else {})
    given = {name: getattr(args, name) for name in _OPTIONS}
    fields |= {name: value for name, value in given.items() if value is not None}
    embedded = fields.get("model") is None
    own = speculation.embedded_draft_model(args.speculative) if embedded else None
    config = speculation.config_of(args, own)
    if config is not None:
        fields["speculative_config"] = config
    checked = LlmArgs.from_dict(fields)
    return {name: getattr(checked, name) for name in checked.model_fields_set}


def opener(fields: Mapping[str, Any]) -> Callable[[], AsyncLLM]:
    """What builds the chosen model.

    Args:
        fields: of ``LlmArgs``.

    Raises:
        DependencyError: torch or transformers is not installed.
    """
    check_installed()
    from forethought.text.async_llm import AsyncLLM

    return lambda: AsyncLLM(**fields)


def check_installed() -> None:
    """Whether a model can run here.

    Raises:
        DependencyError: torch or transformers is not installed.
    """
    try:
        import forethought.text.async_llm  # noqa: F401
    except ModuleNotFoundError as error:
        raise DependencyError.missing(
            error.name or "torch", "running a model on this machine", "local"
        ) from error


def introduction(fields: Mapping[str, Any]) -> str:
    """What there is to say about the chosen model before it answers; empty if it was named."""
    return INTRODUCTION if fields.get("model") is None else ""


def label(fields: Mapping[str, Any]) -> str:
    """What the chosen model is called in reports."""
    model = fields.get("model")
    return "embedded reasoner" if model is None else str(model)
