"""``GET /v1/sampling``: the sampling fields of a request, as a form shows them.

Types, ranges and defaults are those of ``SamplingParams``; where the model advises a value, that is
the default here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from forethought.config.sampling import SamplingParams
from forethought.server.service import Service

USUAL: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "0 takes the most probable token; more is more varied.",
        "top_p": "Draws from the fewest tokens that have this probability together.",
        "top_k": "Draws from this many most probable tokens; 0: all.",
        "min_p": "Leaves out tokens below this fraction of the highest probability.",
        "max_tokens": "Tokens of one generation; none: to the end of the context.",
        "seed": "The same seed draws the same tokens.",
        "stop": "Texts that end the answer: one, or a JSON list.",
    }
)
"""What each field does, of those that a user looks for first."""
FURTHER: Mapping[str, str] = MappingProxyType(
    {
        "min_tokens": "The answer does not end before this many.",
        "presence_penalty": "Subtracted from the logits of tokens that were written.",
        "frequency_penalty": "The same, for each time that a token was written.",
        "repetition_penalty": "Divides the logits of tokens seen, in the prompt too; 1: off.",
        "top_n_sigma": "Leaves out logits this many deviations below the highest; 0: off.",
        "xtc_probability": "XTC: how often the most probable tokens are left out; 0: off.",
        "xtc_threshold": "XTC: the probability from which a token is one of them.",
        "dry_multiplier": "DRY: how much a continued repetition costs; 0: off.",
        "dry_base": "DRY: by what the cost grows with each repeated token.",
        "dry_allowed_length": "DRY: repeated tokens that cost nothing.",
        "dry_penalty_last_n": "DRY: tokens that are looked through; -1: all.",
        "dry_sequence_breakers": "DRY: texts that no repetition reaches across.",
        "logit_bias": "Added to the logits of tokens, by their ids.",
        "ignore_eos": "Go on after the model's end of the answer.",
        "thinking_budget": "Most tokens of thought.",
    }
)
_THINKING = "thinking_budget"


@cache
def _schemas() -> Mapping[str, Mapping[str, Any]]:
    properties: Mapping[str, Mapping[str, Any]] = TypeAdapter(SamplingParams).json_schema()[
        "properties"
    ]
    return properties


def sampling_fields(service: Service) -> dict[str, Any]:
    """The body of ``GET /v1/sampling``; ``is_usual`` marks those that are shown first."""
    fields = [*((name, True) for name in USUAL), *((name, False) for name in FURTHER)]
    return {
        "object": "list",
        "data": [
            _field(service, name, is_usual)
            for name, is_usual in fields
            if name != _THINKING or service.backend.thinks
        ],
    }


def _field(service: Service, name: str, is_usual: bool) -> dict[str, Any]:
    schema = {key: value for key, value in _schemas()[name].items() if key != "title"}
    default = schema.pop("default", None)
    if name == "stop":
        schema = {"anyOf": [{"type": "string"}, schema]}
        default = None
    return {
        "name": name,
        "default": service.backend.sampling_defaults.get(name, default),
        "description": USUAL[name] if is_usual else FURTHER[name],
        "is_usual": is_usual,
        "schema": schema,
    }
