"""``--set key=value``: settings of a method as they are typed on a command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from forethought.errors import ParameterError
from forethought.methods.stack import parameters

SAMPLES = 8
"""Samples of a vote, unless the user says otherwise."""


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """``["threshold=3", "streaming=true"]`` -> ``{"threshold": 3, "streaming": True}``.

    A value is read as JSON (numbers, ``true``, ``false``, ``null``, quoted text, lists), and as
    text where it is none.

    Raises:
        ParameterError: a pair without ``=`` or without a key, or a key given twice.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ParameterError(
                f"invalid setting {pair!r}", "it is not key=value", "Write --set key=value"
            )
        if key in settings:
            raise ParameterError(
                f"setting {key!r} is given twice", f"again as {text!r}", "Give it once"
            )
        settings[key] = _scalar(text)
    return settings


def with_samples(spec: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a method, with ``SAMPLES`` samples where it would draw a single one.

    A vote of one sample is TensorRT-LLM's default, which the class keeps, and no vote.
    """
    if parameters(spec).get("default_sample_num") != 1:
        return settings
    return {"default_sample_num": SAMPLES, **settings}


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
