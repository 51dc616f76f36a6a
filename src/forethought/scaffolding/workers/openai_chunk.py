"""One chunk of an OpenAI-compatible server's answer, read and checked.

The client library takes what a server sends as it is. ``read_chunk`` makes values of the types that
the API promises of it, or fails with ``UpstreamError``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forethought.errors import ForethoughtError, UpstreamError
from forethought.outputs import Logprob, TokenLogprobs, Usage

_ID_PREFIX = "token_id:"
_MAX_COUNT = 1 << 48
"""Of tokens in a usage; a larger number is none."""


@dataclass(slots=True)
class CallPiece:
    """New text of a tool call."""

    index: int | None
    id: str | None
    name: str
    arguments: str


@dataclass(slots=True)
class ChoicePiece:
    """What a chunk adds to one choice."""

    index: int
    text: str = ""
    thought: str = ""
    refusal: str = ""
    scores: list[TokenLogprobs] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)
    finish_reason: str | None = None
    tells_stop_reason: bool = False
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Chunk:
    """A chunk, or a whole answer that is no stream."""

    request_id: str | None = None
    usage: Usage | None = None
    num_reasoning: int = 0
    """Tokens of thoughts, as far as the usage tells them."""
    pieces: list[ChoicePiece] = field(default_factory=list)


def read_chunk(chunk: Any) -> Chunk:
    """What a server has sent.

    Raises:
        UpstreamError: it is an error, or no chunk of the API.
    """
    try:
        _refuse_error(chunk)
        request_id, reported = getattr(chunk, "id", None), getattr(chunk, "usage", None)
        details = getattr(reported, "completion_tokens_details", None)
        return Chunk(
            request_id if isinstance(request_id, str) else None,
            _usage(reported) if reported else None,
            _count(details, "reasoning_tokens"),
            [_piece(choice) for choice in getattr(chunk, "choices", None) or ()],
        )
    except ForethoughtError:
        raise
    except Exception as error:  # of any kind: the chunk may hold anything
        raise malformed() from error


def malformed() -> UpstreamError:
    """That an answer is none of the API."""
    return UpstreamError.of("it sent what is no answer of OpenAI's API")


def _piece(choice: Any) -> ChoicePiece:
    index, reason = choice.index, choice.finish_reason
    if not _is_count(index) or not isinstance(reason, str | None):
        raise TypeError("a choice has an index and the reason of its end")
    extra = getattr(choice, "model_extra", None) or {}
    piece = ChoicePiece(index, finish_reason=reason)
    if "stop_reason" in extra:
        piece.tells_stop_reason, stopped = True, extra["stop_reason"]
        piece.stop_reason = stopped if isinstance(stopped, int | str) else None
    delta = getattr(choice, "delta", None) or getattr(choice, "message", None)
    if delta is None:
        piece.text = _text(choice.text)
        piece.scores = _completion_logprobs(choice.logprobs)
        return piece
    piece.text, piece.scores = _text(delta.content), _chat_logprobs(choice.logprobs)
    piece.thought = _thought(delta)
    piece.refusal = _text(getattr(delta, "refusal", None))
    piece.calls = [_call(part) for part in getattr(delta, "tool_calls", None) or ()]
    return piece


def _call(part: Any) -> CallPiece:
    index, function = getattr(part, "index", None), getattr(part, "function", None)
    arguments = getattr(function, "arguments", None) or ""
    return CallPiece(
        index if isinstance(index, int) else None,
        _text(part.id) or None,
        _text(getattr(function, "name", None)),
        _text(arguments if isinstance(arguments, str) else json.dumps(arguments)),
    )


def _thought(delta: Any) -> str:
    """The reasoning text of a chunk, under any of the names that servers use."""
    names = ("reasoning_content", "reasoning")
    return next((t for name in names if (t := _text(getattr(delta, name, None)))), "")


def _text(value: Any) -> str:
    """A text, in which ``?`` stands for what UTF-8 cannot encode; empty for None."""
    if not isinstance(value, str | None):
        raise TypeError(f"{type(value).__name__} in the place of a text")
    return (value or "").encode(errors="replace").decode()


# ---- usage ---------------------------------------------------------------------------------------


def _usage(reported: Any) -> Usage:
    """The usage that a server reports for one request; what is no number of tokens counts as 0."""
    prompt, completion = _count(reported, "prompt_tokens"), _count(reported, "completion_tokens")
    details = getattr(reported, "prompt_tokens_details", None)
    cached = min(prompt, _count(details, "cached_tokens"))
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        prefilled=prompt - cached,
        cached=cached,
        decoded=completion,
    )


def _count(source: Any, name: str) -> int:
    value: Any = getattr(source, name, None)
    return int(value) if _is_count(value) else 0


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _refuse_error(chunk: Any) -> None:
    """Raises ``UpstreamError`` for a chunk with which a server ends an answer that has failed."""
    error = getattr(chunk, "error", None)
    choices = getattr(chunk, "choices", None) or ()
    reasons = [getattr(choice, "finish_reason", None) for choice in choices]
    if error or getattr(chunk, "object", None) == "error" or "error" in reasons:
        raise UpstreamError.of(error or getattr(chunk, "message", None))


# ---- log-probabilities ---------------------------------------------------------------------------


def _completion_logprobs(logprobs: Any) -> list[TokenLogprobs]:
    if logprobs is None or not logprobs.tokens:
        return []
    entries = []
    for index, (token, value) in enumerate(
        zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    ):
        others: list[Mapping[str, Any] | None] = (logprobs.top_logprobs or [])[index : index + 1]
        entries.append(_entries(token, value, (others[0] or {}).items() if others else ()))
    return entries


def _chat_logprobs(logprobs: Any) -> list[TokenLogprobs]:
    entries = (logprobs and logprobs.content) or ()
    return [
        {
            token: dataclasses.replace(logprob, raw=_raw(entry))
            if logprob.token == _text(entry.token)
            else logprob
            for token, logprob in _entries(
                entry.token, entry.logprob, [(o.token, o.logprob) for o in entry.top_logprobs or ()]
            ).items()
        }
        for entry in entries
    ]


def _raw(entry: Any) -> bytes | None:
    """The bytes of a token, where they are not those of its text."""
    raw = bytes(entry.bytes or ())
    return raw if raw and raw != entry.token.encode(errors="replace") else None


def _entries(chosen: str, value: Any, others: Any) -> TokenLogprobs:
    """The chosen token first, then the others by rank."""
    chosen = _text(chosen)
    pairs = [(_text(token), _logprob(logprob)) for token, logprob in others]
    ranked = sorted(pairs, key=lambda pair: -pair[1])
    rank = next((n for n, (token, _) in enumerate(ranked, 1) if token == chosen), None)
    entries = {_token_id(chosen, -1): Logprob(_logprob(value), rank, chosen)}
    for number, (token, logprob) in enumerate(ranked, start=1):
        if token != chosen:
            entries[_token_id(token, -1 - number)] = Logprob(logprob, number, token)
    return entries


def _logprob(value: Any) -> float:
    """A number; minus infinity may be one, what is no number may not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise TypeError("a log-probability is a number")
    return float(value)


def _token_id(token: str, unknown: int) -> int:
    digits = token.removeprefix(_ID_PREFIX)
    return int(digits) if token.startswith(_ID_PREFIX) and digits.isdecimal() else unknown
