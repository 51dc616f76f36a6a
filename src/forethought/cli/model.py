"""The options by which commands choose a model, and how they open it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.errors import DependencyError

if TYPE_CHECKING:
    from forethought.text.async_llm import AsyncLLM


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare ``--model`` and what belongs to it."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="local Hugging Face directory (default: the embedded reasoner)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights (default: as the model's config says)",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ... (default: CUDA where there is one)"
    )


def opener(args: argparse.Namespace | None = None, **fields: Any) -> Callable[[], AsyncLLM]:
    """What builds the chosen model.

    Args:
        args: the options; None: the embedded reasoner.
        **fields: further fields of ``LlmArgs``.

    Raises:
        DependencyError: torch or transformers is not installed.
    """
    try:
        from transformers.utils import logging

        from forethought.text.async_llm import AsyncLLM
    except ModuleNotFoundError as error:
        raise DependencyError.missing(
            error.name or "torch", "running a model on this machine", "local"
        ) from error
    logging.disable_progress_bar()
    if args is not None:
        fields |= {"model": args.model, "dtype": args.dtype, "device": args.device}
    return lambda: AsyncLLM(**fields)


def label(args: argparse.Namespace) -> str:
    """What the chosen model is called in reports."""
    return "embedded reasoner" if args.model is None else str(args.model)
