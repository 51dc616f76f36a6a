"""The sampling fields of generation tasks, for authors of methods and workers.

A field that the task sets itself wins; one that it leaves at its default is the controller's.

======================  ========================================================================
a method                ``checked`` its ``sampling_params`` once; ``fill`` each task with them;
                        ``task.samples_of(n)`` and ``task.fork(...)`` for further tasks;
                        ``carry`` fields to a task made otherwise; ``refuse`` what it cannot honour
a method's ``generate`` ``choose`` what the caller of the request has set
a worker                ``refuse`` what it cannot honour; ``to_params``, ``stop_strings``,
                        ``is_set`` to read the others
======================  ========================================================================
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from types import MappingProxyType
from typing import Any

from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import BREAKERS, SamplingParams, SpeculationParams
from forethought.errors import ParameterError

__all__ = [
    "DEFAULTS",
    "FIELDS",
    "OF_ASIDES",
    "OF_ONE_PART",
    "OF_THOUGHTS",
    "carry",
    "checked",
    "choose",
    "derived_seed",
    "fill",
    "is_set",
    "refuse",
    "stop_strings",
    "to_params",
    "vary",
]

_SAME_NAME = (
    "max_tokens",
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "guided_decoding",
    "speculation",
    "confidence",
    "thinking_budget",
    "thinking_soft",
    "thinking_end",
)
NEUTRAL = {
    "min_tokens": 0,
    "top_k": 0,
    "min_p": 0.0,
    "top_n_sigma": 0.0,
    "repetition_penalty": 1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": list(BREAKERS),
}
"""Values that clients send to say that nothing is changed: a server that does not take the field
does what they ask."""
_NONE_IS_DEFAULT = ("temperature", "top_p", *NEUTRAL)


@dataclass(eq=False)
class SamplingFields:
    """The sampling fields of a ``GenerationTask``. At its default, a field is not set."""

    # sampling, in the order of OpenAI's reference
    best_of: int | None = None
    echo: bool = False
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    num_logprobs: int | None = None
    """Log-probabilities per token, beside the chosen one's (``logprobs`` holds the result)."""
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = field(default_factory=list)
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    ignore_eos: bool = False

    # sampling beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_context_logits: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    """The shape of the output."""
    speculation: SpeculationParams | None = None
    """Speculative decoding of this request; changes the speed only."""
    confidence: int | None = None
    """Confidence of each token over its top k (``confidences`` holds the result)."""
    thinking_budget: int | None = None
    """Most tokens of thought; 0: no thinking."""
    thinking_soft: int | None = None
    """From this many tokens on, the thought is closed at the end of a line or sentence."""
    thinking_end: str | list[int] | None = None
    """Text or ids that close it; None: the model's marker."""

    chosen: set[str] = field(default_factory=set, init=False, repr=False)
    """Fields that the request sets, possibly to their defaults: controllers do not fill them."""
    sample_path: tuple[int, ...] = field(default=(), init=False, repr=False)
    """Numbers of the sample within its prompt, outermost first (a sample of a sample has two); a
    seed that a controller fills in is varied by them."""


_DECLARED = [field for field in dataclasses.fields(SamplingFields) if field.init]

FIELDS = tuple(field.name for field in _DECLARED)
"""Every sampling field of ``GenerationTask``."""

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {field.name: field.default if field.default is not MISSING else [] for field in _DECLARED}
)
"""The value that means "not set", by name of the field."""


OF_ASIDES = ("temperature", "top_p", "top_k", "min_p", "top_n_sigma", "seed", "speculation")
"""Fields of a request that what a method asks beside it, such as a probe, is drawn with, too."""

OF_THOUGHTS = ("thinking_budget", "thinking_soft", "thinking_end")
"""Fields that limit the thought of an output."""

OF_ONE_PART = (
    "n",
    "echo",
    "include_stop_str_in_output",
    "guided_decoding",
    "min_tokens",
    *OF_THOUGHTS,
)
"""Fields that an output cannot honour which is generated in several parts."""


def checked(owner: str, params: Mapping[str, Any] | SamplingParams | None) -> dict[str, Any]:
    """Sampling parameters by field name; raises ``ParameterError`` for unknown names.

    Args:
        owner: name of their receiver, for the error.
        params: by field name (``logprobs`` is accepted for ``num_logprobs``), or
            ``SamplingParams``, of which only the fields count that its caller set.
    """
    if not isinstance(params, Mapping | SamplingParams | None):
        raise ParameterError(
            f"{owner} takes sampling parameters by name",
            f"got {params!r}",
            "Give a dictionary, or SamplingParams",
        )
    if isinstance(params, SamplingParams):
        params = _given(params)
    fields = dict(params or {})
    if "logprobs" in fields:
        fields["num_logprobs"] = fields.pop("logprobs")
    unknown = fields.keys() - set(FIELDS)
    if unknown:
        raise ParameterError.unknown(owner, unknown, FIELDS)
    if "stop" in fields:
        _stop_strings(owner, fields["stop"])
    return fields


def _given(params: SamplingParams) -> dict[str, Any]:
    """The fields that the caller set; of those that tasks lack, only the ones that change
    something.
    """
    plain, supported = SamplingParams(), {*FIELDS, "logprobs"}
    fields = {name: getattr(params, name) for name in params.given}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in fields.items()
        if name in supported or value != getattr(plain, name)
    }


def is_set(task: SamplingFields, name: str) -> bool:
    """Whether the task itself sets the field."""
    value = getattr(task, name)
    return bool(value != DEFAULTS[name] and not (name == "stop" and not value))


def choose(task: SamplingFields, params: Mapping[str, Any]) -> None:
    """Set fields so that no controller fills them, even those that are set to a default.

    Args:
        task: changed in place.
        params: by field name. None undoes a choice: the controller fills that field.
    """
    for name, value in params.items():
        setattr(task, name, copy.copy(DEFAULTS[name] if value is None else value))
        if value is None:
            task.chosen.discard(name)
        else:
            task.chosen.add(name)


def fill(task: SamplingFields, params: Mapping[str, Any]) -> None:
    """Set the fields that the task leaves at their defaults, unless its caller chose those."""
    for name, value in params.items():
        if name not in task.chosen and not is_set(task, name):
            if name == "seed" and value is not None:
                for number in task.sample_path:
                    value = derived_seed(value, number)
            setattr(task, name, copy.copy(value))


def vary(task: Any, number: int) -> None:
    """Let a copy be sample ``number`` of its prompt: with one seed, all would be the same.

    The seed may be the task's, or come later, from the controller that generates. A task that does
    not generate is unchanged. ``task.samples_of`` copies and varies.
    """
    if not hasattr(task, "sample_path"):
        return
    if task.seed is None:
        task.sample_path = (*task.sample_path, number)
    else:
        task.seed = derived_seed(task.seed, number)


def derived_seed(seed: int, number: int) -> int:
    """The seed of sample ``number`` of something seeded with ``seed``; distinct for all numbers.

    A hash, so that the samples of a sample get seeds that no other sample has: sums of numbers
    would collide. 53 bits, which JSON parsers keep exactly.
    """
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 11


def carry(source: SamplingFields, target: SamplingFields, names: Iterable[str] = FIELDS) -> None:
    """Copy the fields that ``source`` sets itself."""
    target.chosen |= source.chosen & set(names)
    target.sample_path = source.sample_path
    for name in names:
        if is_set(source, name):
            setattr(target, name, copy.copy(getattr(source, name)))


def refuse(task: SamplingFields, names: Iterable[str], worker: str, fix: str) -> None:
    """Raise ``ParameterError`` if the task sets one of the fields that ``worker`` cannot honour."""
    unsupported = [name for name in names if is_set(task, name)]
    if unsupported:
        raise ParameterError(
            f"{worker} cannot honour {', '.join(unsupported)}",
            f"the task sets {unsupported[0]}={getattr(task, unsupported[0])!r}",
            fix,
        )


def to_params(task: SamplingFields, *, priority: int = 0, **changes: Any) -> SamplingParams:
    """The task's fields as the engine takes them, but for ``changes``, by its names.

    ``best_of``, ``echo``, ``suffix``, ``user`` and ``return_context_logits`` have no counterpart
    there: refuse them first.
    """
    own_priority = getattr(task, "priority", None)
    values: dict[str, Any] = {name: getattr(task, name) for name in _SAME_NAME}
    for name in _NONE_IS_DEFAULT:
        if getattr(task, name) is not None:
            values[name] = getattr(task, name)
    values |= {
        "logprobs": task.num_logprobs,
        "stop": stop_strings(task),
        "stop_token_ids": tuple(task.stop_token_ids),
        "priority": priority if own_priority is None else own_priority,
    }
    return SamplingParams(**{**values, **changes})


def stop_strings(task: SamplingFields) -> tuple[str, ...]:
    """The stop strings of a task, written as one string or several."""
    return _stop_strings("the task", task.stop)


def _stop_strings(owner: str, stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    several = isinstance(stop, list | tuple) and all(isinstance(text, str) for text in stop)
    if stop is not None and not several:
        raise ParameterError(
            f"{owner} has an invalid stop",
            f"got {stop!r}",
            "Give a string or a list of strings; token ids go into stop_token_ids",
        )
    return tuple(stop or ())
