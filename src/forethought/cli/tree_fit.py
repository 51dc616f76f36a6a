"""``bench speculation --fit-tree``: the static tree of drafts that suits a model, and its worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forethought.bench.profile import choices_field, measure_profile
from forethought.bench.tree_fit import AcceptanceProfile, fit_tree
from forethought.decoding import DecodingBaseConfig
from forethought.errors import ParameterError

_SIZES = (4, 8, 16, 32, 64)
_SHOWN = 4
"""Ranks of the profile in the table."""


def drafter_of(configs: Sequence[DecodingBaseConfig]) -> DecodingBaseConfig:
    """The drafter that a tree is fitted for.

    Raises:
        ParameterError: not exactly one is configured, or it has no static trees.
    """
    if len(configs) != 1:
        raise ParameterError(
            "--fit-tree needs one drafter",
            f"{len(configs)} are configured",
            "Choose it with --speculative",
        )
    choices_field(configs[0])
    return configs[0]


def fit(
    config: DecodingBaseConfig,
    nodes: int,
    model_dir: Path,
    prompts: Sequence[list[int]],
    max_tokens: int,
    **loading: Any,
) -> dict[str, Any]:
    """Measure, fit, and say so in plain values: a tree of so many ``nodes``, at least 1."""
    profile = measure_profile(model_dir, config, prompts, max_tokens=max_tokens, **loading)
    sizes = sorted({nodes, *(size for size in _SIZES if size < nodes)})
    return {
        "benchmark": "fit_tree",
        "drafter": config.name,
        "field": choices_field(config),
        "profile": [[round(chance, 4) for chance in level] for level in profile.chances],
        "sizes": {str(size): fit_tree(profile, size).to_dict() for size in sizes},
        **fit_tree(profile, nodes).to_dict(),
    }


def lines(report: dict[str, Any]) -> list[str]:
    """For people."""
    profile = AcceptanceProfile(tuple(map(tuple, report["profile"])))
    found = ["accepted, in % of the drafts that got there, by rank:"]
    for level, chances in enumerate(profile.chances, start=1):
        shown = "  ".join(f"{100 * chance:5.1f}" for chance in chances[:_SHOWN])
        found.append(f"  level {level}: {shown} ...")
    for size, tree in report["sizes"].items():
        nodes = "node: " if size == "1" else "nodes:"
        found.append(f"{size:>4} {nodes} {tree['acceptance_length']:.2f} tokens per step")
    choices = json.dumps(report["choices"], separators=(",", ":"))
    return [*found, f"{report['field']}: {choices}"]
