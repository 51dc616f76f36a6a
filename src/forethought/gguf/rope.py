"""The rotary embeddings of a GGUF file as transformers' ``rope_parameters``.

A file has a base and a kind of scaling in its metadata, or tensors of factors by which the
frequencies are divided: ``rope_freqs`` (what Llama 3.1 computes from three settings, which the file
does not have) and ``rope_factors_long`` with ``rope_factors_short`` (LongRoPE).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from forethought.gguf.metadata import Metadata

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
Rotation = Literal["whole", "partly"]
"""Whether all of a head is rotated, or may be a part."""
TENSORS = (_FREQUENCIES, _LONG, _SHORT)
"""What belongs to the configuration and is no weight."""
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192
_LLAMA3_TOLERANCE = 1e-4
_FACTOR_TOLERANCE = 1e-6


def rope_parameters(metadata: Metadata) -> dict[str, Any]:
    """``rope_theta``, ``rope_type`` and what the type needs; raises ModelError for scaling that
    transformers has no form for.
    """
    theta = metadata.number("rope.freq_base", 10000.0)
    return {"rope_theta": theta, **_scaling(metadata, theta)}


def rope_fields(metadata: Metadata, rotation: Rotation) -> dict[str, Any]:
    """The fields of a configuration that say which positions are rotated how; raises ModelError
    where a part of a head is rotated and cannot be.
    """
    head_dim, rope = head_size(metadata), rope_parameters(metadata)
    key, size = "rope.dimension_count", metadata.size("rope.dimension_count", head_dim)
    if size > head_dim or size % 2:
        allowed = f"an even number up to {head_dim}, the size of a head"
        raise metadata.refused(metadata.full_key(key), size, allowed)
    if rotation == "whole":
        if size != head_dim:
            raise metadata.refused(metadata.full_key(key), size, f"{head_dim}, the size of a head")
        return {"rope_parameters": rope}
    factor = size / head_dim
    return {
        "rope_parameters": {**rope, "partial_rotary_factor": factor},
        "partial_rotary_factor": factor,
    }


def head_size(metadata: Metadata) -> int:
    """The size of a key in attention."""
    hidden_size, num_heads = (
        metadata.size("embedding_length"),
        metadata.size("attention.head_count"),
    )
    return metadata.size("attention.key_length", hidden_size // num_heads)


def _scaling(metadata: Metadata, theta: float) -> dict[str, Any]:
    tensors = metadata.file.tensors
    kind = metadata.text(metadata.full_key("rope.scaling.type"), "")
    if _FREQUENCIES in tensors and {*metadata.floats(_FREQUENCIES)} != {1.0}:
        return _llama3(metadata, theta)
    if _LONG in tensors or _SHORT in tensors or kind == "longrope":
        return _longrope(metadata)
    factor = metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1.0
    if kind == "none" or (kind in ("", "linear") and factor == 1.0):
        return {"rope_type": "default"}
    if kind in ("", "linear"):
        key = "rope.scaling.factor" if metadata.get("rope.scaling.factor") else "rope.scale_linear"
        return {"rope_type": "linear", "factor": metadata.number(key)}
    if kind == "yarn":
        return _yarn(metadata)
    raise metadata.unsupported(f"its positions are scaled in a way that is unknown ({kind:.40})")


def _yarn(metadata: Metadata) -> dict[str, Any]:
    extrapolation = metadata.get("rope.scaling.yarn_ext_factor")
    if extrapolation not in (None, 1.0, -1.0):
        raise metadata.unsupported(f"its YaRN extrapolation factor is {extrapolation!r:.40}, not 1")
    factor = metadata.number("rope.scaling.factor")
    length = metadata.optional_size("rope.scaling.original_context_length")
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": length
        or max(1, round(metadata.size("context_length") / factor)),
    }
    for name, key in (
        ("attention_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        value = metadata.optional_number(f"rope.scaling.{key}")
        if value is not None:
            rope[name] = value
    multiplier = metadata.optional_number("rope.scaling.yarn_log_multiplier")
    return rope if multiplier is None else {**rope, "mscale": 1.0, "mscale_all_dim": multiplier}


def _longrope(metadata: Metadata) -> dict[str, Any]:
    tensors = metadata.file.tensors
    if not (_LONG in tensors and _SHORT in tensors):
        raise metadata.unsupported(f"its positions are scaled, and it lacks {_LONG} or {_SHORT}")
    length = metadata.size("rope.scaling.original_context_length")
    rope = {
        "rope_type": "longrope",
        "long_factor": metadata.floats(_LONG),
        "short_factor": metadata.floats(_SHORT),
        "original_max_position_embeddings": length,
    }
    stored = metadata.optional_number("rope.scaling.attn_factor")
    scale = metadata.size("context_length") / length
    usual = math.sqrt(1 + math.log(scale) / math.log(length)) if scale > 1 and length > 1 else 1.0
    if stored is not None and abs(stored - usual) > _FACTOR_TOLERANCE * usual:
        rope["attention_factor"] = stored
    return rope


def _llama3(metadata: Metadata, theta: float) -> dict[str, Any]:
    """The settings whose factors are those of ``rope_freqs``; raises ModelError if none are."""
    factors = metadata.floats(_FREQUENCIES)
    length = metadata.optional_size("rope.scaling.original_context_length")
    factor = max(factors)
    for original in (_LLAMA3_LENGTH, length or _LLAMA3_LENGTH) if factor > 0 else ():
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": original,
        }
        expected = _llama3_factors(rope, theta, len(factors))
        pairs = zip(factors, expected, strict=True)
        if all(abs(stored - value) <= _LLAMA3_TOLERANCE * value for stored, value in pairs):
            return rope
    raise metadata.unsupported(
        f"the factors of its {_FREQUENCIES} are not those of Llama 3.1, which are the only ones "
        "that can be read"
    )


def _llama3_factors(rope: dict[str, Any], theta: float, count: int) -> list[float]:
    """By what Llama 3.1 divides the ``count`` frequencies of a head: 1 for short waves, ``factor``
    for long ones, and between them a mean of the frequencies.
    """
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for index in range(count):
        waves = rope["original_max_position_embeddings"] * theta ** (-index / count) / math.tau
        smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
