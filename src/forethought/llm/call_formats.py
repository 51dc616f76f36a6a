"""The formats of calls: each function reads a text after the mark that opens a call, and writes to
the reader what is content, what is a call's name, and what are its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from forethought.llm.call_reader import CallReader
from forethought.llm.growing_text import (
    MAX_HEAD,
    Cut,
    Emit,
    GrowingText,
    Malformed,
    Reading,
    decoded_string,
    json_value,
)
from forethought.llm.reasoning import overlap
from forethought.llm.typed_argument import is_text, typed_argument

_NAMES, _ARGUMENTS = ("name", "function"), ("arguments", "parameters")
"""Members of a call in JSON."""


def arguments(reader: CallReader, name: str) -> Reading[None]:
    """Read the value of a call's arguments. An object is emitted as it comes; a text that holds one
    is read; none and null are an empty object.
    """
    source, chunks = reader.source, list[str]()
    if (yield from source.characters()) == "{":
        reader.open(name)
        yield from json_value(source, reader.emit)
        reader.close()
        return
    yield from json_value(source, chunks.append)
    reader.open(name)
    reader.close(_as_object("".join(chunks)))


def _as_object(text: str) -> str:
    """The JSON of arguments that are no object."""
    value = json.loads(text)
    if value in (None, ""):
        return "{}"
    if isinstance(value, str):
        try:
            is_object = isinstance(json.loads(value), dict)
        except (ValueError, RecursionError):
            is_object = False
        return value if is_object else text
    return text


def json_calls(reader: CallReader) -> Reading[None]:
    """One object with a name and arguments, several after each other, or a list of them."""
    source = reader.source
    in_list = yield from source.skip("[")
    yield from source.blanks()
    yield from _call_object(reader)
    while True:
        yield from source.blanks()
        if in_list and (yield from source.expect(",", "]")) == "]":
            return
        if not in_list and not (yield from source.which("{", ";", ",")):
            return
        yield from source.skip(";", ",")
        yield from source.blanks()
        yield from _call_object(reader)


def _call_object(reader: CallReader) -> Reading[None]:
    """``{"name": ..., "arguments": {...}}``, with its members in any order, and others."""
    source, chunks = reader.source, list[str]()
    name, num_before, mark = "", len(reader.calls), "{"
    while mark != "}":
        yield from source.expect(mark)
        yield from source.blanks()
        key = yield from decoded_string(source)
        yield from source.blanks()
        yield from source.expect(":")
        yield from source.blanks()
        if key in _NAMES and (yield from source.which('"')):
            name = yield from decoded_string(source)
            if name not in reader.functions:
                raise Malformed
        elif key in _ARGUMENTS and name and len(reader.calls) == num_before:
            yield from arguments(reader, name)
        else:
            if key in _ARGUMENTS:
                chunks.clear()
            yield from json_value(source, chunks.append if key in _ARGUMENTS else len)
        yield from source.blanks()
        mark = "," if (yield from source.which(",")) else "}"
    yield from source.expect("}")
    if len(reader.calls) == num_before:
        reader.open(name)
        reader.close(_as_object("".join(chunks) or "null"))
    source.begin()


def tagged_calls(reader: CallReader) -> Reading[None]:
    """After ``<tool_call>``: JSON, or XML of functions and parameters."""
    yield from reader.source.blanks()
    if (yield from reader.source.skip("<function=")):
        yield from function_call(reader)
    else:
        yield from json_calls(reader)
    yield from reader.source.blanks()
    yield from reader.source.skip("</tool_call>")


def function_call(reader: CallReader) -> Reading[None]:
    """After ``<function=``: a name and parameters, whose types are those of the schema."""
    source = reader.source
    name = (yield from source.until(">"))[0].strip()
    reader.open(name)
    reader.emit("{")
    separator = ""
    yield from source.expect(">")
    yield from source.blanks()
    while (yield from source.expect(*_AFTER_VALUE)) == "<parameter=":
        key = (yield from source.until(">"))[0].strip()
        yield from source.expect(">")
        reader.emit(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _parameter(reader, reader.functions[name], key)
        yield from source.blanks()
        separator = ", "
    reader.emit("}")
    reader.close()
    yield from source.blanks()
    yield from source.skip("</tool_call>")


def _parameter(reader: CallReader, schema: Mapping[str, Any], key: str) -> Reading[None]:
    """The value of a parameter, up to its closing mark; a line end at either end is the mark's."""
    source = reader.source
    yield from source.skip("\n")
    if is_text(schema, key):
        reader.emit('"')
        yield from _raw_value(source, lambda text: reader.emit(_escaped(text)))
        reader.emit('"')
        return
    chunks: list[str] = []
    yield from _raw_value(source, chunks.append)
    reader.emit(typed_argument("".join(chunks), schema, key))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_VALUE_END = "</parameter>"
_AFTER_VALUE = ("<parameter=", "</function>", "</tool_call>")


def _raw_value(source: GrowingText, emit: Emit) -> Reading[None]:
    """Take text up to a closing mark after which the call goes on: others belong to the text."""
    while True:
        place = source.held.find(_VALUE_END)
        if place < 0:
            num_held = max(
                overlap(source.held, f"\n{_VALUE_END}"), overlap(source.held, _VALUE_END)
            )
            emit(source.take(len(source.held) - num_held))
            if source.has_ended:
                raise Cut
            yield
            continue
        begin = place + len(_VALUE_END)
        after = source.held[begin : begin + MAX_HEAD]
        rest, waits = after.lstrip(), not source.has_ended and len(after) < MAX_HEAD
        if rest.startswith(_AFTER_VALUE) or not (rest or waits):
            emit(source.take(place).removesuffix("\n"))
            source.take(len(_VALUE_END))
            return
        if waits and any(mark.startswith(rest) for mark in _AFTER_VALUE):
            yield
        else:
            emit(source.take(place + len(_VALUE_END)))


def mistral_calls(reader: CallReader) -> Reading[None]:
    """After ``[TOOL_CALLS]``: a list in JSON, or one name and its arguments."""
    source = reader.source
    yield from source.blanks()
    if (yield from source.which("[{", "[ ", "[\n", "{")):
        yield from json_calls(reader)
        return
    name, mark = yield from source.until("[ARGS]", "[CALL_ID]", "{")
    if mark == "[CALL_ID]":
        yield from source.until("[ARGS]", "{")
    yield from source.skip("[ARGS]")
    yield from source.blanks()
    yield from arguments(reader, name.strip())


_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS_END, _SEPARATOR = "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"


def deepseek_calls(reader: CallReader) -> Reading[None]:
    """After ``<｜tool▁calls▁begin｜>``."""
    yield from reader.source.blanks()
    yield from reader.source.expect(_CALL_BEGIN)
    yield from deepseek_call(reader)


def deepseek_call(reader: CallReader) -> Reading[None]:
    """After ``<｜tool▁call▁begin｜>``: of V3 a kind, a name and a block of JSON, of V3.1 a name and
    JSON; and further calls.
    """
    source, mark = reader.source, _CALL_BEGIN
    while mark == _CALL_BEGIN:
        name, _ = yield from source.until(_SEPARATOR)
        yield from source.expect(_SEPARATOR)
        is_block = (yield from source.characters()) != "{"
        if is_block:
            name, _ = yield from source.until("\n")
            yield from source.blanks()
            yield from source.expect("```json")
            yield from source.blanks()
        yield from arguments(reader, name.strip())
        yield from source.blanks()
        if is_block:
            yield from source.skip("```")
            yield from source.blanks()
        yield from source.skip(_CALL_END)
        yield from source.blanks()
        source.begin()
        mark = yield from source.which(_CALL_BEGIN, _CALLS_END)
        source.take(len(mark))


_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony_message(reader: CallReader) -> Reading[None]:
    """A message of gpt-oss, from its header: thought, a call, or content."""
    source = reader.source
    yield from source.until(_MESSAGE)
    yield from source.expect(_MESSAGE)
    header = source.taken
    recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
    if recipient is not None:
        if not recipient[1].startswith("functions."):
            raise Malformed
        yield from source.blanks()
        yield from arguments(reader, recipient[1].removeprefix("functions."))
        yield from source.blanks()
    elif channel is not None and channel[1] == "analysis":
        reader.think("\n" if reader.has_thought else "")
        yield from reader.copy(*_ENDS, _START, write=reader.think)
    else:
        reader.write("\n" if reader.has_content else "")
        yield from reader.copy(*_ENDS, _START)
    yield from source.skip(*_ENDS)


HARMONY_OPENINGS = {
    _START: harmony_message,
    _CHANNEL: harmony_message,
    " to=functions.": harmony_message,
}
