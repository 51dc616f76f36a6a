"""How the maker of a model advises to sample: the fields of its ``generation_config.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError

log = logging.getLogger(__name__)

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("xtc_probability", "xtc_threshold"),
)
"""Fields that are fields of ``SamplingParams``, by the same names; the last two of GGUF files."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "typical_p": (1.0,),
        "epsilon_cutoff": (0.0,),
        "eta_cutoff": (0.0,),
        "no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1.0,),
        "bad_words_ids": (),
        "suppress_tokens": (),
        "num_beams": (1,),
    }
)
"""Fields that change what is drawn, and that there is nothing for here -> values that do not."""


def sampling_defaults(written: Mapping[str, Any]) -> Mapping[str, float]:
    """The sampling fields in the content of the file, without those that change nothing.

    ``do_sample`` False is temperature 0. A value outside its range is left out, with a warning.
    """
    neutral, fields = SamplingParams(), dict[str, float]()
    for name in SAMPLING:
        value = written.get(name)
        if value is None:
            continue
        try:
            checked = getattr(SamplingParams(**{name: value}), name)
        except ParameterError as error:
            log.warning("generation_config.json: %s; the neutral value is taken", error)
            continue
        if checked != getattr(neutral, name):
            fields[name] = checked
    if written.get("do_sample") is False:
        penalty = {name: v for name, v in fields.items() if name == "repetition_penalty"}
        fields = {"temperature": 0.0, **penalty}
    return MappingProxyType(fields)


def not_honoured(written: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields in the content of the file that change what is drawn, and have no effect here."""
    return tuple(
        name
        for name, neutral in _NEUTRAL.items()
        if written.get(name) is not None and written[name] not in neutral
    )


def described(sampling: Mapping[str, Any]) -> str:
    """Sampling fields for people, such as ``temperature 0.6, top_p 0.95``."""
    texts = [f"{name} {v:g}" for name, v in sampling.items() if isinstance(v, int | float)]
    return ", ".join(texts) or "none"
