"""One chunk of an OpenAI-compatible server's answer, read and checked.

The client library takes what a server sends as it is. ``read_chunk`` makes values of the types that
the API promises of it, or fails with ``UpstreamError``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    """Tokens of thoughts, if the usage reports them."""
    pieces: list[ChoicePiece] = field(default_factory=list)


def read_chunk(chunk: Any) -> Chunk:
    """A chunk of the API; ``UpstreamError`` if it is an error, or no chunk."""
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
    """The error for an answer that does not follow the API."""
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
    deltas = [getattr(choice, name, None) for name in ("delta", "message")]
    delta = next((delta for delta in deltas if delta is not None), None)
    if delta is None:
        if getattr(choice, "text", None) is not None:  # else nothing is new
            piece.text = _text(choice.text)
            piece.scores = _completion_logprobs(choice.logprobs)
        return piece
    piece.text, thought = _content(delta.content)
    piece.scores = _chat_logprobs(getattr(choice, "logprobs", None))
    piece.thought = thought + _thought(delta)
    piece.refusal = _text(getattr(delta, "refusal", None))
    calls = getattr(delta, "tool_calls", None) or ()
    piece.calls = [_call(part) for part in calls if part is not None]
    return piece


def _content(content: Any) -> tuple[str, str]:
    """Text and thought of a content, which some servers, as Mistral's, send as a list of parts."""
    if not isinstance(content, list):
        return _text(content), ""
    thoughts = [part.get("thinking") or () for part in content]
    return (
        "".join(_text(part.get("text")) for part in content),
        "".join(_text(p if isinstance(p, str) else p["text"]) for t in thoughts for p in t),
    )


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
        pairs = (others[0] or {}).items() if others else ()
        scored = [_Scored.read(text, logprob) for text, logprob in pairs]
        entries.append(_entries(_Scored.read(token, value), scored))
    return entries


def _chat_logprobs(logprobs: Any) -> list[TokenLogprobs]:
    def scored(entry: Any) -> _Scored:
        return _Scored.read(entry.token, entry.logprob, getattr(entry, "bytes", None))

    return [
        _entries(scored(entry), [scored(other) for other in entry.top_logprobs or ()])
        for entry in (logprobs and logprobs.content) or ()
    ]


class _Scored(NamedTuple):
    """A token as a server scores it."""

    token: str
    logprob: float
    raw: bytes | None
    """Its bytes, where they are not those of its text."""

    @classmethod
    def read(cls, token: Any, logprob: Any, values: Any = None) -> _Scored:
        """A token of which a server has sent the text, the score and perhaps the bytes."""
        text, raw = _text(token), bytes(values or ())
        is_text = not raw or raw == text.encode()
        return cls(text, _logprob(logprob), None if is_text else raw)


def _entries(chosen: _Scored, others: Sequence[_Scored]) -> TokenLogprobs:
    ranked = list(enumerate(sorted(others, key=lambda other: -other.logprob), start=1))
    token, value, raw = chosen
    rank = next((n for n, other in ranked if (other.token, other.raw) == (token, raw)), None)
    entries = {_token_id(token, -1): Logprob(value, rank, token, raw)}
    for number, other in ranked:
        if number != rank:
            logprob = Logprob(other.logprob, number, other.token, other.raw)
            entries[_token_id(other.token, -1 - number)] = logprob
    return entries


def _logprob(value: Any) -> float:
    """A number; minus infinity may be one, what is no number may not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise TypeError("a log-probability is a number")
    return float(value)


def _token_id(token: str, unknown: int) -> int:
    digits = token.removeprefix(_ID_PREFIX)
    return int(digits) if token.startswith(_ID_PREFIX) and digits.isdecimal() else unknown
