"""The names of what ``quantization`` may be."""

from __future__ import annotations

from typing import Literal, get_args

Quantization = Literal["int8", "int4", "w8a8", "w4a8"]
"""``int8``, ``int4``: weights in as many bits. ``w8a8``, ``w4a8``: weights in 8 or 4 bits, and
activations in 8."""
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
