"""``SamplingParams``: what a caller asks of one generation. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from forethought.config.base import STRICT, RequestParams, refusal, request_params
from forethought.config.foreign_arguments import SAMPLING_ARGUMENTS
from forethought.config.guided import GuidedDecodingParams

MAX_LOGPROBS = 64
"""Most alternatives per token that a request may ask log-probabilities of."""

MAX_SAMPLES = 4096
"""Most samples of one prompt, all of which the engine holds at once."""

BREAKERS = ("\n", ":", '"', "*")
"""Sequence breakers of DRY by default, those of llama.cpp."""

LLAMA_SAMPLERS = (
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
)
"""Fields of ``SamplingParams`` for llama.cpp's samplers, under its names."""
MAX_BREAKERS, MAX_BREAKER_LENGTH = 16, 40
"""Most sequence breakers of a request, and characters of each."""

_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
_Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
_Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
_Penalty = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]
_Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_LENGTH)]
_Breakers = Annotated[tuple[_Breaker, ...], Field(max_length=MAX_BREAKERS)]
_Ids = Annotated[tuple[_Count, ...], Field(min_length=1)]

_Encodable = Annotated[str, Field(min_length=0)]
"""Text that UTF-8 can encode: with any constraint, pydantic refuses lone surrogates."""


def seed_of(seed: Any) -> Any:
    """A seed as vLLM's clients write it: -1 is none, and other negative ones count modulo 2^64."""
    if type(seed) is not int or not -(2**63) <= seed < 0:
        return seed
    return None if seed == -1 else seed + 2**64


def top_k_of(top_k: Any) -> Any:
    """``top_k`` as vLLM's clients write it: -1 is no limit."""
    return 0 if type(top_k) is int and top_k == -1 else top_k


def top_n_sigma_of(top_n_sigma: Any) -> Any:
    """``top_n_sigma`` as llama.cpp's clients write it: -1 is no limit."""
    is_number = isinstance(top_n_sigma, int | float) and not isinstance(top_n_sigma, bool)
    return 0.0 if is_number and top_n_sigma == -1 else top_n_sigma


def _as_tuple(values: Any) -> Any:
    """A list as a tuple; None stands for no values."""
    if isinstance(values, Iterable) and not isinstance(values, str):
        return tuple(values)
    return () if values is None else values


def _stop_strings(stop: Any) -> Any:
    return (stop,) if isinstance(stop, str) else _as_tuple(stop)


def _text_or_ids(name: str) -> BeforeValidator:
    """Text, or ids as a tuple; ``name`` of the field is for messages."""

    def read(value: Any) -> Any:
        ids = value if isinstance(value, str | None) else _as_tuple(value)
        if isinstance(ids, tuple) and (not ids or any(type(token) is not int for token in ids)):
            raise refusal(name, value, "it must be text, or a list of token ids")
        return ids

    return BeforeValidator(read)


def _as_bias(bias: Any) -> Any:
    """With ids as whole numbers, which JSON writes as strings; None for an empty one."""
    if not isinstance(bias, Mapping):
        return bias
    try:
        return {_as_id(token): float(value) for token, value in bias.items()} or None
    except (TypeError, ValueError) as error:
        raise refusal("logit_bias", bias, "it must map token ids to numbers") from error


def _as_id(token: Any) -> int:
    if isinstance(token, bool) or not isinstance(token, str | Integral):
        raise TypeError("a token id is a whole number")
    return int(token)


def _from_dict(cls: type[RequestParams]) -> BeforeValidator:
    def build(value: Any) -> Any:
        return cls.from_dict(value) if isinstance(value, Mapping) else value

    return BeforeValidator(build)


@request_params("speculation.{}")
@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SpeculationParams(RequestParams):
    """Speculative decoding of one request. It leaves the distribution of outputs as it is.

    ===================  ===========================================================================
    ``enabled``          False: plain decoding
    ``max_draft_len``    most levels of a draft, within what the engine was built for; None: all
    ``drafter``          the only drafter to ask, by its name; None: all, in the engine's order
    ``prediction``       text or token ids that the output may turn out to be: the first draft, in
                         an engine without drafters too (OpenAI's predicted outputs)
    ===================  ===========================================================================

    Raises:
        ParameterError: a value is outside its range, or a prediction that would not be drafted.
    """

    enabled: bool = True
    max_draft_len: _Count | None = None
    drafter: _Text | None = None
    prediction: Annotated[_Text | _Ids | None, _text_or_ids("speculation.prediction")] = None

    def __post_init__(self) -> None:
        if self.prediction is None:
            return
        if not self.enabled or self.drafter is not None:
            reason = f"enabled is {self.enabled}, drafter is {self.drafter!r}"
            raise refusal("speculation.prediction", "a prediction", f"{reason}: none is drafted")


@request_params(foreign_arguments=SAMPLING_ARGUMENTS)
@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SamplingParams(RequestParams):
    """How to draw the tokens of one request, and when to stop.

    =========================  =====================================================================
    ``max_tokens``             most new tokens; None: up to the end of the context; 0, with
                               ``prompt_logprobs`` alone: the prompt is scored, no token generated
    ``min_tokens``             end-of-sequence and stop tokens cannot be drawn before this many
    ``n``                      samples of the one prompt; the prompt is prefilled once
    ``seed``                   same seed, same tokens, in any batch (see below); None, -1: fresh
    ``temperature``            0 is greedy
    ``top_k`` ``top_p``        keep the k most probable; the smallest set of mass p (off: 0 or -1,
                               and 1.0)
    ``min_p``                  keep tokens with this fraction of the highest probability
    ``top_n_sigma``            keep tokens whose logit is at most this many standard deviations of
                               the logits below the largest (off: 0 or -1)
    ``xtc_probability``        with this probability leave out the most probable tokens, those with
                               a probability from ``xtc_threshold`` on but for the least probable
                               of them (XTC; off: 0)
    ``dry_multiplier``         DRY (off: 0): from the logit of a token that would continue a repeat
                               of n tokens, subtract ``dry_multiplier`` times ``dry_base`` to the
                               power n - ``dry_allowed_length``; shorter repeats are allowed
    ``dry_penalty_last_n``     last tokens of prompt and output that DRY looks for repeats in; -1:
                               all, 0: DRY is off
    ``dry_sequence_breakers``  texts that no repeat reaches across
    ``repetition_penalty``     divides positive, multiplies negative logits of tokens seen
    ``presence_penalty``       subtracted once from the logit of a token generated before
    ``frequency_penalty``      subtracted for each earlier occurrence among generated tokens
    ``logit_bias``             token id -> added to its logit, in [-100, 100]
    ``stop``                   strings that end the text; ``include_stop_str_in_output`` keeps them
    ``stop_token_ids``         tokens that end the generation, beside the model's own
    ``ignore_eos``             the model's end-of-sequence tokens do not end the generation
    ``logprobs``               log-probabilities of the chosen token and of the top k
    ``prompt_logprobs``        the same for the tokens of the prompt; of a session, for those that
                               ``extend`` has added to it (``session.prompt_logprobs``)
    ``confidence``             ``TokenConfidence`` of each token, over its top k (DeepConf's is 20)
    ``skip_special_tokens``    leave special tokens out of the text
    ``priority``               lower runs first; equal ones in order of arrival
    ``cache_salt``             cached prefixes are shared only among requests of the same salt
    ``adapter``                the LoRA adapter by its name; "": none; None: that of the sequence
                               which is continued, and none for a prompt
    ``speculation``            ``SpeculationParams``, or a dictionary; None: as the engine does
    ``guided_decoding``        ``GuidedDecodingParams``, or a dictionary: the shape of the output
    ``thinking_budget``        most tokens of thought; at the cap the thought is closed (below)
    ``thinking_soft``          from this many on it is closed at the end of a line or sentence
    ``thinking_end``           text or token ids that close it; None: the model's own marker
    =========================  =====================================================================

    Seeded sampling is batch-invariant in float32, and in 16 bits where docs/determinism.md says so.
    Elsewhere the rounding of logits depends on the batch, and where two tokens are nearly equally
    probable the same seed may draw another one.

    A thought is what is between the model's markers, such as ``<think>`` and ``</think>``. Its
    tokens are counted from the opening marker, which the model or the prompt has written: those in
    the prompt count, the markers and the closing text do not. See docs/thinking-budgets.md.

    Raises:
        ParameterError: a value is outside its range.
    """

    max_tokens: _Count | None = None
    min_tokens: _Count = 0
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    seed: Annotated[_Seed | None, BeforeValidator(seed_of)] = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[_Count, BeforeValidator(top_k_of)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    min_p: _Fraction = 0.0
    top_n_sigma: Annotated[
        float,
        Field(ge=0.0, le=1000.0, allow_inf_nan=False),
        BeforeValidator(top_n_sigma_of),
    ] = 0.0
    xtc_probability: _Fraction = 0.0
    xtc_threshold: _Fraction = 0.1
    dry_multiplier: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 0.0
    dry_base: Annotated[float, Field(ge=1.0, le=100.0, allow_inf_nan=False)] = 1.75
    dry_allowed_length: Annotated[int, Field(ge=1, le=1024)] = 2
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    dry_sequence_breakers: Annotated[_Breakers, BeforeValidator(_as_tuple)] = BREAKERS
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: Annotated[Mapping[_Count, _Penalty] | None, BeforeValidator(_as_bias)] = None
    stop: Annotated[tuple[_Text, ...], BeforeValidator(_stop_strings)] = ()
    stop_token_ids: Annotated[tuple[_Count, ...], BeforeValidator(_as_tuple)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: _Logprobs | None = None
    prompt_logprobs: _Logprobs | None = None
    confidence: Annotated[int, Field(ge=1, le=MAX_LOGPROBS)] | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: _Encodable = ""
    adapter: _Encodable | None = None
    speculation: Annotated[SpeculationParams | None, _from_dict(SpeculationParams)] = None
    guided_decoding: Annotated[GuidedDecodingParams | None, _from_dict(GuidedDecodingParams)] = None
    thinking_budget: _Count | None = None
    thinking_soft: _Count | None = None
    thinking_end: Annotated[_Text | _Ids | None, _text_or_ids("thinking_end")] = None

    def __post_init__(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise refusal("max_tokens", 0, "without prompt_logprobs it must be at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reason = f"it exceeds max_tokens={self.max_tokens}"
            raise refusal("min_tokens", self.min_tokens, reason)
        budget, soft = self.thinking_budget, self.thinking_soft
        if budget is not None and soft is not None and soft > budget:
            raise refusal("thinking_soft", soft, f"it exceeds thinking_budget={budget}")
        if self.thinking_end is not None and not self.limits_thinking:
            reason = "without thinking_budget or thinking_soft no text is forced"
            raise refusal("thinking_end", self.thinking_end, reason)

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax: no randomness is used."""
        return self.temperature == 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether a bias or a penalty changes the model's logits."""
        return self.logit_bias is not None or self.penalises

    @property
    def penalises(self) -> bool:
        """Whether the logits of tokens are changed because of earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.penalises_repeats
        )

    @property
    def penalises_repeats(self) -> bool:
        """Whether tokens that continue a repeat are penalised (DRY)."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def takes_argmax(self) -> bool:
        """Whether each token is the argmax of the model's own logits, and no score is asked for."""
        plain = self.greedy and not self.edits_logits and not self.min_tokens
        return plain and self.logprobs is None and self.confidence is None

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end the generation; ``eos_ids``: the model's end-of-sequence ids."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)

    @property
    def cuts(self) -> bool:
        """Whether improbable tokens are cut from the distribution (top-k, top-p, min-p)."""
        return not self.greedy and bool(self.top_k or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def keeps_within_sigma(self) -> bool:
        """Whether tokens are cut whose logits are far below the largest (top-n-sigma)."""
        return not self.greedy and self.top_n_sigma > 0.0

    @property
    def excludes_top(self) -> bool:
        """Whether the most probable tokens may be left out (XTC)."""
        return not self.greedy and self.xtc_probability > 0.0

    @property
    def limits_thinking(self) -> bool:
        """Whether a thought may be closed before the model closes it."""
        return self.thinking_budget is not None or self.thinking_soft is not None

    @property
    def constrains(self) -> bool:
        """Whether a ``Constraint`` restricts the output: a shape, or a limit of the thought."""
        return self.guided_decoding is not None or self.limits_thinking
