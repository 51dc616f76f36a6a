"""The ``generation_config.json`` of a model in a GGUF file: what ends an answer, and how its maker
advises to sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from forethought.gguf.metadata import shortest
from forethought.gguf.tokenizer import TokenType, Vocabulary

_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<|eot|>"),
    *("<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|return|>", "<|call|>"),
)
"""Control tokens with which models end a turn or a text, beside those that a file names so."""
_HARMONY_END, _HARMONY_RETURN = "<|end|>", "<|return|>"
"""In gpt-oss the first ends one of several messages of an answer, and the second the answer."""
_SAMPLING = {
    "temp": "temperature",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_repeat": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
}
"""Names of GGUF (``general.sampling.*``) and ollama -> those of transformers."""


def generation_config_of(
    vocabulary: Vocabulary, params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The configuration.

    Args:
        vocabulary: of the file.
        params: of ollama or of the model's card, in the place of what the file says; a ``stop``
            that is a token ends an answer.
    """
    metadata, params = vocabulary.metadata, params or {}
    prefix = "general.sampling."
    stored = {
        key.removeprefix(prefix): value
        for key, value in metadata.file.metadata.items()
        if key.startswith(prefix)
    }
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    tokens = {
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": _eos_token_ids(vocabulary, stops),
        "pad_token_id": metadata.token_id("padding"),
    }
    return {
        **{name: value for name, value in tokens.items() if value not in (None, [])},
        **_sampling({**stored, **params}),
    }


def _eos_token_ids(vocabulary: Vocabulary, stops: Iterable[Any]) -> list[int]:
    metadata, ids = vocabulary.metadata, vocabulary.ids
    named = [metadata.token_id(name) for name in ("eos", "eot", "eom")]
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED)
    texts = [*_ENDS, *(stop for stop in stops if isinstance(stop, str))]
    by_text = [ids[text] for text in texts if text in ids and vocabulary.types[ids[text]] in kinds]
    ends = dict.fromkeys(token for token in (*named, *by_text) if token is not None)
    if _HARMONY_RETURN in ids:
        ends.pop(ids.get(_HARMONY_END, -1), None)
    return [token for token in ends if token < metadata.num_tokens]


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    for name, value in values.items():
        is_number = type(value) in (int, float) and math.isfinite(value) and value >= 0
        if name in _SAMPLING and is_number:
            sampling[_SAMPLING[name]] = value if type(value) is int else shortest(value)
    if not sampling:
        return {}
    if not sampling.get("temperature", 1.0):
        del sampling["temperature"]
        return {"do_sample": False, **sampling}
    return {"do_sample": True, **sampling}
