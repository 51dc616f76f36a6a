"""``SamplingParams``: what a caller asks of one generation. Needs no torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

from forethought.config.guided import GuidedDecodingParams
from forethought.errors import ParameterError

MAX_LOGPROBS = 64
"""Most alternatives per token that a request may ask log-probabilities of."""

MAX_SAMPLES = 4096
"""Most samples of one prompt, all of which the engine holds at once."""

_Params = TypeVar("_Params", bound="_Given")


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Speculative decoding of one request. It never changes the output, only the speed.

    ===================  ===========================================================================
    ``enabled``          False: plain decoding
    ``max_draft_len``    most levels of a draft, within what the engine was built for; None: all
    ``drafter``          the only drafter to ask, by its name; None: all, in the engine's order
    ===================  ===========================================================================

    Raises:
        ParameterError: a value is outside its range.
    """

    enabled: bool = True
    max_draft_len: int | None = None
    drafter: str | None = None

    def __post_init__(self) -> None:
        length = self.max_draft_len
        if not isinstance(self.enabled, bool):
            raise _refuse("speculation.enabled", self.enabled, "it must be True or False")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
            raise _refuse("speculation.max_draft_len", length, "it must be a whole number")
        if length is not None and length < 0:
            raise _refuse("speculation.max_draft_len", length, "it must be at least 0")
        if self.drafter is not None and (not isinstance(self.drafter, str) or not self.drafter):
            raise _refuse("speculation.drafter", self.drafter, "it must be a drafter's name")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculationParams:
        """Build from field names and values.

        Raises:
            ParameterError: a name is not a field, or a value is outside its range.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) - names:
            raise ParameterError.unknown("SpeculationParams", set(values) - names, names)
        return cls(**values)


class _Given:
    """Has a place for the names of the fields that the constructor was given."""

    __slots__ = ("given",)

    given: frozenset[str]


def _noting_given(cls: type[_Params]) -> type[_Params]:
    """Have the constructor of a dataclass note in ``given`` what it was given."""
    construct: Callable[..., None] = cls.__init__
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(construct)
    def __init__(self: _Params, *args: Any, **values: Any) -> None:
        object.__setattr__(self, "given", frozenset((*names[: len(args)], *values)))
        construct(self, *args, **values)

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    return cls


@_noting_given
@dataclass(frozen=True, slots=True)
class SamplingParams(_Given):
    """How to draw the tokens of one request, and when to stop.

    =========================  =====================================================================
    ``max_tokens``             most new tokens; None: up to the end of the context
    ``min_tokens``             end-of-sequence and stop tokens cannot be drawn before this many
    ``n``                      samples of the one prompt; the prompt is prefilled once
    ``seed``                   same seed, same tokens, in any batch (see below); None: fresh
    ``temperature``            0 is greedy
    ``top_k`` ``top_p``        keep the k most probable; the smallest set of mass p (off: 0, 1.0)
    ``min_p``                  keep tokens with this fraction of the highest probability
    ``repetition_penalty``     divides positive, multiplies negative logits of tokens seen
    ``presence_penalty``       subtracted once from the logit of a token generated before
    ``frequency_penalty``      subtracted for each earlier occurrence among generated tokens
    ``logit_bias``             token id -> added to its logit, in [-100, 100]
    ``stop``                   strings that end the text; ``include_stop_str_in_output`` keeps them
    ``stop_token_ids``         tokens that end the generation, beside the model's own
    ``ignore_eos``             the model's end-of-sequence tokens do not end the generation
    ``logprobs``               log-probabilities of the chosen token and of the top k
    ``prompt_logprobs``        the same for the tokens of the prompt
    ``skip_special_tokens``    leave special tokens out of the text
    ``priority``               lower runs first; equal ones in order of arrival
    ``cache_salt``             cached prefixes are shared only among requests of the same salt
    ``speculation``            ``SpeculationParams``, or a dictionary; None: as the engine does
    ``guided_decoding``        ``GuidedDecodingParams``, or a dictionary: the shape of the output
    =========================  =====================================================================

    Seeded sampling is batch-invariant in float32, and for small models on a CPU in bfloat16 and
    float16 as well. Elsewhere the rounding of logits depends on the batch, and where two tokens are
    nearly equally probable the same seed may draw another one; see docs/models.md, Seeds.

    Attributes:
        given: names of the fields that were given, be it with their defaults. Where layers merge,
            such as a request's params and a method's settings, these win. No part of equality.

    Raises:
        ParameterError: a value is outside its range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    speculation: SpeculationParams | None = None
    guided_decoding: GuidedDecodingParams | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        if isinstance(self.speculation, Mapping):
            chosen = SpeculationParams.from_dict(self.speculation)
            object.__setattr__(self, "speculation", chosen)
        if isinstance(self.guided_decoding, Mapping):
            shape = GuidedDecodingParams.from_dict(self.guided_decoding)
            object.__setattr__(self, "guided_decoding", shape)
        self._check_types()
        self._check_counts()
        self._check_numbers()
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise _refuse("stop", self.stop, "every stop string must be a non-empty string")
        for token, value in (self.logit_bias or {}).items():
            if token < 0 or not -100.0 <= value <= 100.0:
                raise _refuse(
                    "logit_bias", {token: value}, "ids start at 0, values lie in [-100, 100]"
                )

    def _check_types(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "it must be True or False")
        if not isinstance(self.cache_salt, str):
            raise _refuse("cache_salt", self.cache_salt, "it must be a string")
        try:
            self.cache_salt.encode()
        except UnicodeEncodeError as error:  # a lone surrogate
            reason = f"it must be text that UTF-8 can encode: {error.reason}"
            raise _refuse("cache_salt", self.cache_salt, reason) from error
        if not isinstance(self.speculation, SpeculationParams | None):
            raise _refuse("speculation", self.speculation, "it must be SpeculationParams")
        if not isinstance(self.guided_decoding, GuidedDecodingParams | None):
            reason = "it must be GuidedDecodingParams"
            raise _refuse("guided_decoding", self.guided_decoding, reason)

    def _check_counts(self) -> None:
        for name, low, high, optional in (
            ("max_tokens", 1, None, True),
            ("min_tokens", 0, None, False),
            ("n", 1, MAX_SAMPLES, False),
            ("seed", 0, 2**64 - 1, True),
            ("top_k", 0, None, False),
            ("logprobs", 0, MAX_LOGPROBS, True),
            ("prompt_logprobs", 0, MAX_LOGPROBS, True),
            ("priority", None, None, False),
        ):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise _refuse(name, value, "it must be a whole number")
            if (low is not None and value < low) or (high is not None and value > high):
                limit = f"at least {low}" + (f" and at most {high}" if high is not None else "")
                raise _refuse(name, value, f"it must be {limit}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"it exceeds max_tokens={self.max_tokens}")
        for token in self.stop_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise _refuse("stop_token_ids", token, "token ids are whole numbers from 0")

    def _check_numbers(self) -> None:
        for name, low, high, open_low in (
            ("temperature", 0.0, 100.0, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("repetition_penalty", 0.0, 100.0, True),
            ("presence_penalty", -100.0, 100.0, False),
            ("frequency_penalty", -100.0, 100.0, False),
        ):
            value = getattr(self, name)
            if (
                not isinstance(value, int | float)
                or isinstance(value, bool)
                or not math.isfinite(value)
            ):
                raise _refuse(name, value, "it must be a finite number")
            if value < low or value > high or (open_low and value == low):
                raise _refuse(
                    name, value, f"it must lie in {'(' if open_low else '['}{low}, {high}]"
                )

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax: no randomness is used."""
        return self.temperature == 0.0

    @property
    def cuts(self) -> bool:
        """Whether improbable tokens are cut from the distribution (top-k, top-p, min-p)."""
        return not self.greedy and bool(self.top_k or self.top_p < 1.0 or self.min_p > 0.0)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed; what was given before still counts as given.

        Raises:
            ParameterError: a field does not exist or its value is outside its range.
        """
        return SamplingParams.from_dict({**self._given_values(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _given_values(self) -> dict[str, Any]:
        """What makes these params: all other fields are at their defaults."""
        return {name: getattr(self, name) for name in self.given}

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplingParams.from_dict, (self._given_values(),)

    @classmethod
    def names(cls) -> frozenset[str]:
        """The names of all fields."""
        return frozenset(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from field names and values.

        Raises:
            ParameterError: a name is not a field, or a value is outside its range.
        """
        unknown = set(values) - cls.names()
        if unknown:
            raise ParameterError.unknown("SamplingParams", unknown, cls.names())
        return cls(**values)


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """None stands for no values."""
    try:
        return tuple(values or ())
    except (TypeError, ValueError) as error:
        raise _refuse(name, values, "it must be a list") from error


def _as_bias(bias: Any) -> dict[int, float] | None:
    """With ids as whole numbers, which JSON writes as strings; None for an empty one."""
    reason = "it must map token ids to numbers"
    if bias is not None and not isinstance(bias, Mapping):
        raise _refuse("logit_bias", bias, reason)
    try:
        read = {_as_id(token): float(value) for token, value in (bias or {}).items()}
    except (TypeError, ValueError) as error:
        raise _refuse("logit_bias", bias, reason) from error
    return read or None


def _as_id(token: Any) -> int:
    if isinstance(token, bool) or not isinstance(token, str | Integral):
        raise TypeError("a token id is a whole number")
    return int(token)


def _refuse(name: str, value: Any, reason: str) -> ParameterError:
    return ParameterError(f"invalid {name}", f"got {value!r}, but {reason}", f"Change {name}")
