"""What callers may give as a prompt: text, or token ids. Knows nothing about engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeGuard

from forethought.errors import ParameterError
from forethought.params import SamplingParams
from forethought.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens."""

    text: str | None
    """None if ids were given."""
    token_ids: list[int]


def read_prompt(prompt: Any, tokenizer: Tokenizer) -> Prompt:
    """The tokens of a prompt: a string or a list of ids. An empty list is left to the engine.

    Raises:
        ParameterError: it is neither, or an empty string.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ParameterError("empty prompt", "there is no text to continue", "Give some text")
        return Prompt(prompt, tokenizer.encode(prompt))
    return Prompt(None, read_ids(prompt))


def read_ids(ids: Any) -> list[int]:
    """Token ids as plain integers.

    Raises:
        ParameterError: it is not a list of integers.
    """
    if isinstance(ids, Sequence) and all(map(_is_id, ids)) and not isinstance(ids, bytes):
        return [int(token) for token in ids]
    raise ParameterError(
        "invalid prompt",
        f"expected a string or a list of token ids, got {type(ids).__name__}: {str(ids)[:60]}",
        "Call .tolist() on arrays; give several prompts as a list of strings or of lists of ids",
    )


def read_length(length: Any) -> int:
    """A number of tokens as a plain integer.

    Raises:
        ParameterError: it is not a whole number.
    """
    if not _is_id(length):
        raise ParameterError("invalid length", f"got {length!r}", "Give a whole number of tokens")
    return int(length)


def is_batch(prompts: Any) -> bool:
    """Whether a list holds prompts rather than the ids of one."""
    return (
        isinstance(prompts, Sequence)
        and not isinstance(prompts, str | bytes)
        and not (prompts and all(map(_is_id, prompts)))
    )


def read_params(params: Any) -> SamplingParams:
    """The params of one prompt; None stands for the defaults.

    Raises:
        ParameterError: it is something else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ParameterError(
            "invalid params",
            f"expected SamplingParams, got {type(params).__name__}",
            "Build them with SamplingParams(...) or SamplingParams.from_dict({...})",
        )
    return params


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
