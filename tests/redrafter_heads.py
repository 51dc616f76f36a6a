"""ReDrafter heads with random weights, for the tiny models."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from forethought.speculative.heads.redrafter import ReDrafterHead, ReDrafterShape
from models import VOCAB, tiny

HIDDEN = 32


def make_head(seed: int = 0, **sizes: Any) -> ReDrafterHead:
    """A head whose every weight matters."""
    shape = {"hidden": HIDDEN, "vocab": VOCAB, "exit": 48, "blocks": 2, **sizes}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = ReDrafterHead(ReDrafterShape(**shape))
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return head


@functools.cache
def random_head() -> Path:
    """A directory with such a head; made once per process."""
    directory = tiny("llama").parent / "redrafter"
    make_head().save(directory)
    return directory
