r"""Log-probabilities as OpenAI's APIs write them, and where their tokens are in a text.

::

    tokens --TokenSpans--> Span (first character, end) --AnswerLogprobs--> of the thought
                                                                       \-> of the content
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from forethought.outputs import Logprob, TokenLogprobs

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""

TokenText = Callable[[int, Logprob | None], str | None]
"""The text that one more token makes certain; None: the text is without it. A token that is a part
of a character makes it certain with the last of its parts."""


def texts_of_entries() -> TokenText:
    """From what the entries say of their tokens, one after the other."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def text(token: int, entry: Logprob | None) -> str | None:
        return "" if entry is None else decoder.decode(_bytes(entry))

    return text


def texts_within(text: str, entries: Sequence[TokenLogprobs]) -> TokenText:
    """The same for a text that is without some of its tokens, as special ones: those with which it
    does not go on.
    """
    text_of, parts, length = texts_of_entries(), list[str | None](), 0
    for entry in entries:
        part = text_of(-1, next(iter(entry.values()), None)) or ""
        is_shown = text.startswith(part, length)
        parts.append(part if is_shown else None)
        length += len(part) if is_shown else 0
    if length < len(text):  # it is cut, or tokens are written in another way there
        return texts_of_entries()
    remaining = iter(parts)
    return lambda token, entry: next(remaining)


class Span(NamedTuple):
    """One token, and the characters of a text that it has a part in."""

    start: int
    end: int
    """``start`` of a token that the text is without."""
    token: int | None
    entry: TokenLogprobs | None
    """None: its probability is not known."""
    text: str = ""
    """Of a token without an entry."""

    @property
    def chosen(self) -> Logprob | None:
        """The entry of the token itself."""
        return None if not self.entry else _chosen(self.entry, self.token)


class TokenSpans:
    """Finds the characters of each token of a text, of which ``start`` come before the first."""

    def __init__(self, text_of: TokenText, start: int = 0) -> None:
        self._text_of, self._length = text_of, start

    def add(self, entries: Sequence[TokenLogprobs | None], ids: Sequence[int]) -> Iterator[Span]:
        """The spans of further tokens; without ``ids``, a token is the first of its entry."""
        for number, entry in enumerate(entries):
            token = ids[number] if number < len(ids) else None
            chosen = _chosen(entry, token) if entry else None
            text, start = self._text_of(-1 if token is None else token, chosen), self._length
            self._length += len(text or "")
            end = start if text is None else max(self._length, start + 1)
            yield Span(start, end, token, entry)


class AnswerSpans(NamedTuple):
    """The ranges of characters of a text that are its thought and its content."""

    thought: tuple[int, int]
    content: tuple[int, int]


class AnswerLogprobs:
    """Sorts the log-probabilities of one answer's tokens into those of its thought and its content.

    Markers, white space between, calls, a stop string and what ended the generation belong to
    neither.
    """

    def __init__(self, text_of: TokenText) -> None:
        self._spans, self._waiting = TokenSpans(text_of), deque[Span]()

    def add(self, entries: Sequence[TokenLogprobs], ids: Sequence[int]) -> None:
        """Further tokens, with the arguments of ``TokenSpans.add``."""
        self._waiting.extend(self._spans.add(entries, ids))

    def leave_out_ending(self, text: str) -> None:
        """Leave out the last tokens that ``text``, which another server has returned, does not end
        with, not even with a part of them: what ended the generation, which only servers of which
        each token is known here can tell by its place.
        """
        while self._waiting and not _ends_with_part(text, self._waiting[-1]):
            self._waiting.pop()

    def take(
        self, spans: AnswerSpans, position: int | None = None
    ) -> tuple[list[Span], list[Span]]:
        """The tokens of the thought, and of the content, that have not been taken.

        ``spans`` are final up to character ``position``; None: all of them.
        """
        by_kind: tuple[list[Span], list[Span]] = ([], [])
        while self._waiting and (position is None or self._waiting[0].end <= position):
            span = self._waiting.popleft()
            if not span.entry or span.end == span.start:
                continue
            for (begin, end), spans_of_kind in zip(spans, by_kind, strict=True):
                if span.end > begin and span.start < end:
                    spans_of_kind.append(span)
                    break
        return by_kind


class TextLogprobs:
    """The log-probabilities of the tokens of a text that is continued, without those of a stop
    string. ``start`` characters of an echoed prompt come before the first one.
    """

    def __init__(self, text_of: TokenText, start: int = 0) -> None:
        self._spans, self._waiting, self._start = TokenSpans(text_of, start), deque[Span](), start

    def add(self, entries: Sequence[TokenLogprobs], ids: Sequence[int]) -> None:
        """Further tokens, with the arguments of ``TokenSpans.add``."""
        self._waiting.extend(self._spans.add(entries, ids))

    def take(self, length: int) -> list[Span]:
        """The next tokens that end within the first ``length`` characters of the text."""
        spans = []
        while self._waiting and self._waiting[0].end <= self._start + length:
            spans.append(self._waiting.popleft())
        return spans

    def take_rest(self, length: int, keeps_last: bool) -> list[Span]:
        """The next tokens that begin within them; those that the text is without at its end and
        the last one as well, if that ended the text.
        """
        rest, self._waiting = list(self._waiting), deque()
        end = self._start + length
        spans = [span for span in rest if span.start < end or (keeps_last and span.end <= end)]
        return [*spans, rest[-1]] if keeps_last and len(spans) < len(rest) else spans


def chat_logprobs(spans: Sequence[Span], top: int) -> list[dict[str, Any]]:
    """One item per token, with ``top`` alternatives."""
    return [
        {
            **_named(span.chosen),
            "top_logprobs": [_named(logprob) for logprob in _ranked(span.entry)[:top]],
        }
        for span in spans
        if span.entry and span.chosen
    ]


def completion_logprobs(spans: Sequence[Span], top: int) -> dict[str, Any]:
    """Four lists with one item per token; those of a prompt's first token are None."""
    columns: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for span in spans:
        chosen = span.chosen
        text = span.text if chosen is None else _label(chosen)
        columns["tokens"].append(text)
        columns["token_logprobs"].append(None if chosen is None else _finite(chosen.logprob))
        ranked = {
            _label(logprob): _finite(logprob.logprob) for logprob in _ranked(span.entry or {})[:top]
        }
        if chosen is not None and top:  # OpenAI lists the token itself too
            ranked.setdefault(text, _finite(chosen.logprob))
        columns["top_logprobs"].append(ranked or None)
        columns["text_offset"].append(span.start)
    return columns


def _chosen(entry: TokenLogprobs, token: int | None) -> Logprob:
    logprob = None if token is None else entry.get(token)
    return logprob or next(iter(entry.values()))


def _ends_with_part(text: str, span: Span) -> bool:
    """Whether a text ends with a token, or is cut within it; of a part of a character or a token
    without an entry that is not known: True.
    """
    token = "" if span.chosen is None or span.chosen.raw is not None else span.chosen.token or ""
    return not token or any(text.endswith(token[:end]) for end in range(1, len(token) + 1))


def _ranked(entry: Mapping[int, Logprob]) -> list[Logprob]:
    return sorted(entry.values(), key=lambda logprob: -logprob.logprob)


def _bytes(entry: Logprob) -> bytes:
    return (entry.token or "").encode(errors="replace") if entry.raw is None else entry.raw


def _label(entry: Logprob) -> str:
    """The token's text; of a part of a character its bytes, as OpenAI's completions write them."""
    if entry.raw is None:
        return entry.token or ""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.raw)


def _named(entry: Logprob) -> dict[str, Any]:
    return {
        "token": entry.token or "",
        "logprob": _finite(entry.logprob),
        "bytes": list(_bytes(entry)),
    }


def _finite(value: float) -> float:
    return max(value, _LOWEST)
