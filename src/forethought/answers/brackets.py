"""Brackets in a formula: their depth, and what is outside of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

_OPEN, _CLOSE = {"(", "[", "{", "\\{"}, {")", "]", "}", "\\}"}


def levels(text: str) -> Iterator[tuple[int, str, int]]:
    r"""Place, sign and depth of every bracket and sign; ``\{`` is one, other commands too."""
    depth = 0
    for match in re.finditer(r"\\[A-Za-z]+|\\.|.", text, re.DOTALL):
        sign = match[0]
        depth -= sign in _CLOSE
        yield match.start(), sign, depth
        depth += sign in _OPEN


def brackets(text: str) -> tuple[str, str] | None:
    """The brackets around all of ``text``; None if there are none, or they close before its end."""
    if not text.startswith(tuple(_OPEN)) or not text.endswith(tuple(_CLOSE)):
        return None
    signs = list(levels(text))
    if len(signs) < 2 or signs[0][1] not in _OPEN or signs[-1][1] not in _CLOSE:
        return None
    if signs[-1][2] != 0 or any(depth < 1 for _, _, depth in signs[1:-1]):
        return None
    return signs[0][1], signs[-1][1]


def unbraced(text: str) -> str:
    """The text without braces around all of it."""
    while brackets(text) == ("{", "}"):
        text = text[1:-1].strip()
    return text


def matches_outside(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    """The matches of ``pattern`` outside of brackets, as (sign, match)."""
    if pattern.search(text) is None:
        return
    outside = {place for place, sign, depth in levels(text) if depth == 0}
    for match in pattern.finditer(text):
        if match.start() in outside:
            yield match[0], match


def split_outside(text: str, pattern: re.Pattern[str]) -> list[str] | None:
    """The parts of ``text`` between matches of ``pattern`` outside of brackets, if any."""
    parts, begin = [], 0
    for _, match in matches_outside(text, pattern):
        parts.append(text[begin : match.start()].strip())
        begin = match.end()
    return [*parts, text[begin:].strip()] if begin else None
