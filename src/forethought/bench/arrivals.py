"""When the requests of a serving benchmark arrive, and what they ask.

Open loop: a request is sent when its time has come, however many are in progress. The times are
those of a Poisson process, or of a trace in Mooncake's format (Qin et al., Mooncake, 2024): one
JSON object per line with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
``hash_ids``, one id per block of 512 tokens of the prompt.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forethought.errors import ParameterError, UsageError
from forethought.evaluation import problems
from forethought.scaffolding.settings import POSITIVE_INT, validated

BLOCK_SIZE = 512
"""Tokens per block in a trace."""
_WORDS = ("the", "of", "and", "to", "in", "is", "it", "for", "on", "as", "with", "by", "at", "from")
"""Of which prompts for traces are made: about one token each in any vocabulary."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be sent."""

    at: float
    """Seconds from the start."""
    prompt: str
    max_tokens: int


def poisson(
    prompts: Sequence[str], count: int, rate: float, max_tokens: int, seed: int = 0
) -> list[Arrival]:
    """``count`` requests with exponentially distributed gaps, which take their prompts in turn.

    Args:
        rate: requests per second; infinite: all at once.
        max_tokens: of each answer.

    Raises:
        ParameterError: a count or a rate that is not above zero.
    """
    validated("num_requests", count, POSITIVE_INT)
    validated("max_tokens", max_tokens, POSITIVE_INT)
    if not rate > 0:
        raise ParameterError("invalid rate", f"got {rate}", "Give requests per second, or inf")
    source, at, arrivals = random.Random(seed), 0.0, []
    for number in range(count):
        arrivals.append(Arrival(at, prompts[number % len(prompts)], max_tokens))
        at += 0.0 if math.isinf(rate) else source.expovariate(rate)
    return arrivals


def load_mooncake(path: Path, speed: float = 1.0, max_requests: int | None = None) -> list[Arrival]:
    """The requests of a trace; equal blocks get equal texts, so that prefixes are shared as there.

    Args:
        speed: the timestamps are divided by it.
        max_requests: only the first ones; None: all.

    Raises:
        ParameterError: a speed that is not above zero.
        UsageError: the file cannot be read, or a line is no request.
    """
    if not (speed > 0 and math.isfinite(speed)):
        raise ParameterError("invalid speed", f"got {speed}", "Give a factor above 0")
    lines = problems.read_lines(path, "requests", "Give a trace in Mooncake's format")
    arrivals = [_arrival(line, where, speed) for where, line in lines[:max_requests]]
    first = min(arrival.at for arrival in arrivals)
    shifted = [
        Arrival(arrival.at - first, arrival.prompt, arrival.max_tokens) for arrival in arrivals
    ]
    return sorted(shifted, key=lambda arrival: arrival.at)


def _arrival(line: str, where: str, speed: float) -> Arrival:
    try:
        record = json.loads(line)
        at, length, limit = (
            record[name] for name in ("timestamp", "input_length", "output_length")
        )
        ids = record.get("hash_ids") or []
        if not (_is_number(at) and _is_count(length) and _is_count(limit)):
            raise ValueError("a field is no number, or below its range")
        if not isinstance(ids, list):
            raise ValueError("hash_ids is no list")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"no request at {where}",
            f"{type(error).__name__}: {error}",
            'Write {"timestamp": 0, "input_length": 100, "output_length": 20, "hash_ids": [1]}',
        ) from error
    return Arrival(at / 1000 / speed, _text(ids, length, where), limit)


def _text(ids: Sequence[Any], length: int, where: str) -> str:
    """A prompt of ``length`` words, the same for the same blocks from its start on."""
    words: list[str] = []
    for identity in ids:
        source = random.Random(f"block {identity}")
        words += source.choices(_WORDS, k=min(BLOCK_SIZE, max(0, length - len(words))))
    ending = random.Random(f"rest {where}")
    words += ending.choices(_WORDS, k=max(0, length - len(words)))
    return " ".join(words)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
