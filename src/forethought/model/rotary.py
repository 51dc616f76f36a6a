"""Rotary embeddings without transformers: cosines and sines by position, scaled or not.

Those of transformers (``modeling_rope_utils``), operation by operation, so that they are the same
to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_NAMES = ("rotary_emb", "pos_emb")
"""Of the module that rotates, in decoders of transformers."""


def find_rotary(decoder: nn.Module) -> nn.Module | None:
    """What computes the rotation of a decoder of transformers; None: it is not found."""
    parts = (getattr(decoder, name, None) for name in _NAMES)
    return next((part for part in parts if isinstance(part, nn.Module)), None)


def rope_of(written: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ``rope_parameters`` of a ``config.json``, as transformers 5 names them; None: they are of
    a type that is not known here.
    """
    rope = written.get("rope_parameters")
    if rope is None:
        rope = dict(written.get("rope_scaling") or {})
        if "rope_theta" not in written:
            return None
        rope.setdefault("rope_theta", written["rope_theta"])
        rope.setdefault("rope_type", rope.pop("type", "default"))
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else None
    if kind not in ("default", "llama3") or rope.get("rope_theta") is None:
        return None
    if kind == "llama3" and any(rope.get(name) is None for name in _LLAMA3):
        return None
    return rope if rope.get("partial_rotary_factor", 1.0) == 1.0 else None


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions.

    Args:
        config: with ``rope_parameters`` and ``head_dim``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        rope, dim = config.rope_parameters, config.head_dim
        numbers = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float)
        self.frequencies = 1.0 / (rope["rope_theta"] ** (numbers / dim))
        if rope.get("rope_type") == "llama3":
            self.frequencies = llama3_frequencies(self.frequencies, rope)

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 ``[1, T]`` -> cosines, sines ``[1, T, dim]`` in the dtype of ``like``."""
        angles = positions[..., None].float() * self.frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(like.dtype), both.sin().to(like.dtype)


def llama3_frequencies(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Frequencies of Llama 3.1's longer context: long wavelengths are stretched by ``factor``,
    short ones are kept, and those between are interpolated.
    """
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    longest, shortest = length / low, length / high
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > longest, frequencies / factor, frequencies)
    smooth = (length / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = ~(wavelengths < shortest) * ~(wavelengths > longest)
    return torch.where(is_between, smoothed, scaled)
