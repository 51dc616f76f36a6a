"""Medusa heads with random weights, for the tiny models."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from forethought.speculative.heads.medusa import MedusaHeads, MedusaShape
from models import VOCAB

HIDDEN = 32


def make_heads(
    heads: int = 3,
    blocks: int = 1,
    seed: int = 0,
    bias: bool = True,
    vocab: int = VOCAB,
    **changes: Any,
) -> MedusaHeads:
    """Heads whose every weight matters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = MedusaHeads(MedusaShape(HIDDEN, vocab, heads, blocks, bias), **changes)
        for weight in made.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return made


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="medusa-heads-")


@functools.cache
def shared_heads() -> Path:
    """Such heads for the tiny models, made once per process."""
    return random_heads(Path(_directory().name) / "heads")


def random_heads(directory: Path, heads: int = 3, blocks: int = 1) -> Path:
    """A directory of such heads in the authors' layout."""
    make_heads(heads, blocks).save(directory)
    return directory
