"""A text that grows, read once from its beginning to its end.

What reads it is a generator that pauses where it needs more: a text in fragments is read as a whole
one is, and each character once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""Pauses where it needs more text."""
Emit = Callable[[str], Any]
"""Takes text as it comes."""

MAX_HEAD = 512
"""Characters between a call's opening and its arguments, where these are no JSON."""
_MAX_DEPTH = 128
"""Arrays and objects within each other."""
_MAX_SCALAR = 512
"""Characters of a number."""
_SCALAR = re.compile(r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)\Z")
_SCALAR_RUN = re.compile(r"[-+.\w]*")
_PLAIN_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})\Z')
_BLANKS = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not what is read."""


class Cut(Exception):
    """The text ends before what is read does."""


class GrowingText:
    """The part of a growing text that has not been read."""

    def __init__(self) -> None:
        self.held, self.has_ended = "", False
        self._taken: list[str] = []

    def begin(self) -> None:
        """Forget what has been taken."""
        self._taken.clear()

    @property
    def taken(self) -> str:
        """The text that was taken since ``begin``."""
        return "".join(self._taken)

    def take(self, count: int) -> str:
        """The next characters, which are held."""
        text, self.held = self.held[:count], self.held[count:]
        self._taken.append(text)
        return text

    def run(self, pattern: re.Pattern[str]) -> str:
        """Take what is held of a run of characters."""
        match = pattern.match(self.held)
        return self.take(match.end() if match else 0)

    def characters(self, count: int = 1) -> Reading[str]:
        """The next characters, which stay; raises Cut if the text ends before."""
        while len(self.held) < count:
            if self.has_ended:
                raise Cut
            yield
        return self.held[:count]

    def blanks(self) -> Reading[str]:
        """Take white space."""
        text = self.run(_BLANKS)
        while not self.held and not self.has_ended:
            yield
            text += self.run(_BLANKS)
        return text

    def which(self, *marks: str) -> Reading[str]:
        """With which of ``marks`` the text goes on; empty: with none. Nothing is taken."""
        while not any(self.held.startswith(mark) for mark in marks):
            if self.has_ended or not any(mark.startswith(self.held) for mark in marks):
                return ""
            yield
        return next(mark for mark in marks if self.held.startswith(mark))

    def skip(self, *marks: str) -> Reading[bool]:
        """Take one of ``marks``, or the beginning of one at the end of the text, if it is next."""
        mark = yield from self.which(*marks)
        is_beginning = self.has_ended and any(mark.startswith(self.held) for mark in marks)
        if mark or is_beginning:
            self.take(len(mark) or len(self.held))
        return bool(mark)

    def expect(self, *marks: str) -> Reading[str]:
        """Take one of ``marks``; raises Malformed if none is next."""
        mark = yield from self.which(*marks)
        if not mark:
            cut = self.has_ended and any(mark.startswith(self.held) for mark in marks)
            raise Cut if cut else Malformed
        return self.take(len(mark))

    def until(self, *marks: str) -> Reading[tuple[str, str]]:
        """Take a short text; the mark that ends it is next, and stays."""
        while True:
            places = [(place, m) for m in marks if (place := self.held.find(m)) >= 0]
            place, mark = min(places, default=(len(self.held), ""))
            if place > MAX_HEAD:
                raise Malformed
            if mark:
                return self.take(place), mark
            if self.has_ended:
                raise Cut
            yield


# ---- JSON ----------------------------------------------------------------------------------------


def json_value(source: GrowingText, emit: Emit) -> Reading[None]:
    """Take one JSON value, and emit its text as it comes; raises Malformed where it is none."""
    closers: list[str] = []
    state = "value"  # or first (of a container), key, colon, next (a comma, or the end)
    while closers or state != "next":
        if closers:
            emit((yield from source.blanks()))
        character = yield from source.characters()
        closer = closers[-1] if closers else ""
        if character == closer and state in ("first", "next"):
            closers.pop()
            emit(source.take(1))
            state = "next"
        elif state in ("next", "colon"):
            emit((yield from source.expect(":" if state == "colon" else ",")))
            state = "key" if state == "next" and closer == "}" else "value"
        elif state == "key" or (state == "first" and closer == "}"):
            yield from json_string(source, emit)
            state = "colon"
        elif character in "{[":
            if len(closers) == _MAX_DEPTH:
                raise Malformed
            closers.append("}" if character == "{" else "]")
            emit(source.take(1))
            state = "first"
        else:
            yield from (json_string if character == '"' else _scalar)(source, emit)
            state = "next"


def json_string(source: GrowingText, emit: Emit) -> Reading[None]:
    """Take a string with its quotes. Control characters, which JSON has none of, are escaped."""
    emit((yield from source.expect('"')))
    while True:
        emit(source.run(_PLAIN_RUN))
        character = yield from source.characters()
        if character == '"':
            emit(source.take(1))
            return
        if character == "\\":
            escape = yield from source.characters(2)
            if escape == "\\u":
                escape = yield from source.characters(6)
            if not _ESCAPE.match(escape):
                raise Malformed
            emit(source.take(len(escape)))
        elif character < " ":
            emit(json.dumps(source.take(1))[1:-1])


def _scalar(source: GrowingText, emit: Emit) -> Reading[None]:
    text = source.run(_SCALAR_RUN)
    while not source.held and not source.has_ended and len(text) <= _MAX_SCALAR:
        yield
        text += source.run(_SCALAR_RUN)
    is_cut = source.has_ended and not source.held
    if len(text) > _MAX_SCALAR or not (is_cut or _SCALAR.match(text)):
        raise Malformed
    emit(text)
    if is_cut:
        raise Cut


def decoded_string(source: GrowingText) -> Reading[str]:
    """Take a string, and decode it."""
    chunks: list[str] = []
    yield from json_string(source, chunks.append)
    text = json.loads("".join(chunks))
    assert isinstance(text, str)
    return text
