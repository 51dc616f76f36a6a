"""A method with its settings, ready to be measured. Knows nothing about problems.

[demo] The four recipes that the package shows itself with, tuned to the embedded reasoner.

Greedy decoding, Dynasor-CoT on the same chains, a vote of eight samples, and both together. The
reasoner's chains are some hundreds of tokens long, so it is probed more often than a large model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forethought.config.drafters import NGramDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.methods.stack import parameters, stack
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.worker import Worker

_SAMPLES = "default_sample_num"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is measured as one row."""

    name: str
    controller: Controller
    """Prototype; cloned for each problem."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields of every task, by name; they win over the controller's own."""
    chains: int = 1
    """Chains of thought that it has under way at once for one problem."""
    workers: Mapping[Any, Worker] = field(default_factory=dict)
    """Workers by tag, beside the model's."""
    is_chat: bool = False
    """It is given the question itself and makes a chat of it; otherwise, what the chat template
    makes of the question."""


def recipe(
    spec: str,
    *,
    samples: int = 8,
    temperature: float = 0.8,
    max_tokens: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Recipe:
    """The usual way to measure a method: greedy, unless it draws several samples.

    Args:
        spec: name of a method, or several as for ``stack``: ``"dynasor+majority_vote"``.
        samples: answers that a method draws which draws several.
        temperature: at which it draws them; 0 is used for every other method.
        max_tokens: of each chain; None: to the end of the context.
        settings: parameters of the method.

    Raises:
        UnknownNameError, ParameterError: as ``stack``.
    """
    given = dict(settings or {})
    several = _SAMPLES in parameters(spec)
    if several:
        given.setdefault(_SAMPLES, samples)
    params: dict[str, Any] = {"temperature": temperature if several else 0.0, "top_p": 1.0}
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    SamplingParams(**params)  # refuses values outside their ranges before anything runs
    return Recipe(spec, stack(spec, **given), params, given[_SAMPLES] if several else 1)


DRAFTS = NGramDecodingConfig(max_draft_len=8, max_matching_ngram_size=3, is_use_oldest=False)
"""The reasoner checks its own steps, and so repeats itself: n-grams guess it well."""
PROBING = {"chunk_size": 16, "certainty_threshold": 2}
SAMPLES = 8
TEMPERATURE = 0.8


def demo_recipes() -> list[Recipe]:
    """Plain, Dynasor-CoT, majority vote, and Dynasor-CoT under majority vote."""
    sampled = partial(recipe, samples=SAMPLES, temperature=TEMPERATURE)
    return [
        recipe("plain"),
        recipe("dynasor", settings=PROBING),
        sampled("majority_vote"),
        sampled("dynasor+majority_vote", settings=PROBING),
    ]
