"""A method with its settings, as one row of a comparison; and the four recipes of the demo.

The demo's are greedy decoding, Dynasor-CoT on the same chains, a vote of eight samples, and both
together. The embedded reasoner's chains have some hundreds of tokens, so it is probed more often
than a large model.
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
    """One row of a comparison."""

    name: str
    controller: Controller
    """Prototype; cloned for each problem."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields of every task, by name; they override the controller's."""
    chains: int = 1
    """Chains of thought that it has under way at once for one problem."""
    workers: Mapping[Any, Worker] = field(default_factory=dict)
    """Workers by tag, beside the model's."""
    is_chat: bool = False
    """Whether its prompts are the questions, which it sends as chats; otherwise they are the
    questions rendered by the chat template."""


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
        samples: of a method that draws several answers.
        temperature: of those samples; every other method is greedy.
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
"""The reasoner repeats itself when it checks its steps: n-grams draft it well."""
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
