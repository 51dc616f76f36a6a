"""``--speculative``: one way of guessing ahead, chosen by its name on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forethought import assets
from forethought.decoding import DecodingBaseConfig
from forethought.errors import ParameterError

_WITH_MODEL = ("draft_target", "pearl")
_WITH_HEADS = ("eagle3", "medusa", "mtp", "redrafter")
DRAFTERS = ("ngram", "suffix", *_WITH_MODEL, *_WITH_HEADS, "auto")
"""What can be chosen without a file; each is also a ``decoding_type``."""
_IN_TARGET = ("mtp",)
"""Those whose heads may lie in the directory of the model that they draft for."""
_DRAFT_LENS = {"draft_target": 4, "eagle3": 5, "mtp": 6, "pearl": 4}
"""Levels of drafts unless said otherwise; the other ways have defaults."""
_TREES = {"medusa": "likeliest"}
"""What trees are made of, where the default is the published way, which suits larger batches."""
_EMBEDDED_LENS = {"draft_target": 8, "pearl": 8}
"""The same with the embedded reasoner's own draft model, which is right nearly always."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--speculative",
        choices=DRAFTERS,
        help="guess ahead and verify: the same text in less time (medusa: with the likeliest "
        "trees, whatever tree the heads bring)",
    )
    parser.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR|ID",
        help="local directory or Hub id of the smaller model, or of the heads, that --speculative "
        "drafts with (default: for the embedded reasoner, its own)",
    )
    parser.add_argument(
        "--max-draft-len", type=int, metavar="K", help="most tokens to guess in a row"
    )


def embedded_draft_model(kind: str | None = "draft_target") -> Path | None:
    """Directory of what drafts for the embedded reasoner in such a way, where it is installed."""
    folder = assets.heads_dir(kind) if kind in _WITH_HEADS else assets.drafter_dir()
    return folder if folder.is_dir() else None


def config_of(
    args: argparse.Namespace, draft_model: Path | None = None
) -> DecodingBaseConfig | None:
    """What the options say; None if they say nothing.

    Args:
        args: the options.
        draft_model: what to draft with unless they say otherwise.

    Raises:
        UsageError: an impossible value, or an option without what it belongs to.
    """
    values: dict[str, Any] = {
        "max_draft_len": args.max_draft_len,
        "speculative_model": args.draft_model,
    }
    if args.speculative is None:
        given = [name for name, value in values.items() if value is not None]
        if given:
            raise ParameterError(
                "--max-draft-len and --draft-model need --speculative",
                f"{given[0]} is given, but not how to draft",
                f"Add --speculative with one of {', '.join(DRAFTERS)}",
            )
        return None
    if args.speculative in (*_WITH_MODEL, *_WITH_HEADS):
        values["speculative_model"] = args.draft_model or draft_model
        if values["speculative_model"] is None and args.speculative not in _IN_TARGET:
            raise ParameterError(
                f"--speculative {args.speculative} needs --draft-model",
                "there is nothing to draft with",
                "Give a smaller model with the same vocabulary, or heads: a directory or Hub id",
            )
        if args.max_draft_len is None:
            own = _EMBEDDED_LENS if args.draft_model is None else {}
            lengths = {**_DRAFT_LENS, **own}
            values["max_draft_len"] = lengths.get(args.speculative)
    if args.speculative in _TREES:
        values["tree"] = _TREES[args.speculative]
    config: DecodingBaseConfig = DecodingBaseConfig.from_dict(
        {"decoding_type": args.speculative, **values}
    )
    return config
