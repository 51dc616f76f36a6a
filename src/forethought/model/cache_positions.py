"""Positions for attention layers that count them from the length of a cache, in place of taking
``position_ids``: Llama 4's, which scale the queries of layers without rotary embeddings.

A batch packs the tokens of many rows one after the other, so no one length is that of all: a layer
gets a length per token.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


class PackedLengths:
    """In the place of a cache: what stands before each token of a batch, less its packed index.

    Args:
        positions: int64 ``[T]``.
    """

    def __init__(self, positions: Tensor) -> None:
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """int64 ``[T]``, which a layer adds to the packed indices."""
        return self._lengths

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are: attention stores them."""
        return keys, values


def reads_cache_length(module: nn.Module) -> bool:
    """Whether a layer of a model counts positions from the length of its cache."""
    from transformers import PreTrainedModel  # not at a start: the module is one

    kinds = {type(part) for part in module.modules() if not isinstance(part, PreTrainedModel)}
    forwards = (inspect.unwrap(kind.forward) for kind in kinds)
    return any(inspect.isfunction(f) and "get_seq_length" in f.__code__.co_names for f in forwards)
