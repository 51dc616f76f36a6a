"""Large values of JSON read and written in pieces, so that other threads have their turns.

A call of ``json`` holds the interpreter until it ends: for 10 MB about half a second, in which no
event loop runs, whichever thread calls it. Here a call is about one value that is some levels deep,
as an entry of the log-probabilities of a response is, and the levels above are Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

DEPTH = 7
"""Levels that are Python: of an event its response, output, item, content, part, list of scores."""
LARGE = 2**17
"""Characters from which on it is worth while; Python takes several times as long."""

_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Neither keeps a state."""
_SPACE = re.compile(r"[ \t\r\n]*")


def read_pieces(text: str) -> Any:
    """The value of a JSON text; raises ValueError as ``json.loads``."""
    if len(text) < LARGE:
        return json.loads(text)
    value, end = _read(text, _skip(text, 0), DEPTH)
    if _skip(text, end) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def write_pieces(value: Any, encoder: json.JSONEncoder = _ENCODER) -> bytes:
    """A value as JSON; without another ``encoder`` as the bodies of responses are written."""
    return "".join(_written(value, DEPTH, encoder)).encode(errors="replace")


def _read(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a character, and where it ends."""
    if depth and text.startswith("{", at):
        return _read_object(text, at + 1, depth - 1)
    if depth and text.startswith("[", at):
        return _read_list(text, at + 1, depth - 1)
    return _DECODER.raw_decode(text, at)


def _read_list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    values = list[Any]()
    at = _skip(text, at)
    while not text.startswith("]", at):
        if values:
            at = _skip(text, _after(text, at, ","))
        value, at = _read(text, at, depth)
        values.append(value)
        at = _skip(text, at)
    return values, at + 1


def _read_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    values = dict[str, Any]()
    at = _skip(text, at)
    while not text.startswith("}", at):
        if values:
            at = _skip(text, _after(text, at, ","))
        if not text.startswith('"', at):
            raise json.JSONDecodeError("Expecting property name", text, at)
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _after(text, _skip(text, at), ":"))
        values[name], at = _read(text, at, depth)
        at = _skip(text, at)
    return values, at + 1


def _after(text: str, at: int, mark: str) -> int:
    if not text.startswith(mark, at):
        raise json.JSONDecodeError(f"Expecting {mark!r}", text, at)
    return at + 1


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None, "it may be empty"
    return match.end()


def _written(value: Any, depth: int, encoder: json.JSONEncoder) -> Iterator[str]:
    if depth and isinstance(value, Mapping):
        opening = "{"
        for name, item in value.items():
            yield f"{opening}{encoder.encode(name)}:"
            yield from _written(item, depth - 1, encoder)
            opening = ","
        yield "}" if value else "{}"
    elif depth and isinstance(value, list | tuple):
        opening = "["
        for item in value:
            yield opening
            yield from _written(item, depth - 1, encoder)
            opening = ","
        yield "]" if value else "[]"
    else:
        yield encoder.encode(value)
