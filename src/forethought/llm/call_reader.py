"""Calls of tools in a text that grows: what is content, and the name and arguments of each call.

A format is a function that reads a text after the mark that opens a call
(``llm.tool_format.FORMATS``). It is a generator: it pauses where it needs more text, so a text in
fragments is read as a whole one is, and each character once::

    text  --push-->  content, thought (harmony alone), CallDelta: a call's name, new arguments

* Arguments are checked as JSON while they come. A call begins once its name is that of a function
  of the request and its arguments have begun; what is malformed before is content.
* Where arguments turn out to be malformed, the call is withdrawn (``ReadCall.is_withdrawn``) and
  its text is content; a stream has given the beginning of the arguments by then.
* A call that the end of the text cuts has the arguments so far.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from forethought.llm.reasoning import overlap
from forethought.llm.typed_argument import is_text, typed_argument

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""Pauses where it needs more text."""

MAX_CALLS = 128
"""Calls in one text; what follows is content."""
_MAX_HEAD = 512
"""Characters between a call's opening and its arguments, where these are no JSON."""
_MAX_DEPTH = 128
"""Arrays and objects within each other in arguments."""
_SLICE = 1024
"""Characters that are read together: what is held is copied with each that is taken."""
_MAX_SCALAR = 512
"""Characters of a number."""
_SCALAR = re.compile(r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)\Z")
_SCALAR_RUN = re.compile(r"[-+.\w]*")
_PLAIN_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})\Z')
_BLANKS = re.compile(r"\s*")
_NAMES, _ARGUMENTS = ("name", "function"), ("arguments", "parameters")
"""Members of a call in JSON."""


class CallDelta(NamedTuple):
    """New text of a call."""

    number: int
    """Of the call in its text."""
    name: str | None
    """Where the call begins here."""
    arguments: str
    """That are new: JSON, or its beginning."""


@dataclass(slots=True)
class ReadCall:
    """A call in a text."""

    name: str
    arguments: str = ""
    """JSON; its beginning where the text ends within it."""
    is_withdrawn: bool = False
    """It was malformed after its arguments had begun: its text is content."""


class _Malformed(Exception):
    """The text is no call in the format."""


class _Cut(Exception):
    """The text ends within a call."""


class Source:
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
        """The next characters, which stay; raises _Cut if the text ends before."""
        while len(self.held) < count:
            if self.has_ended:
                raise _Cut
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
        """Take one of ``marks``; raises _Malformed if none is next."""
        mark = yield from self.which(*marks)
        if not mark:
            cut = self.has_ended and any(mark.startswith(self.held) for mark in marks)
            raise _Cut if cut else _Malformed
        return self.take(len(mark))

    def until(self, *marks: str) -> Reading[tuple[str, str]]:
        """Take a short text; the mark that ends it is next, and stays."""
        while True:
            places = [(place, m) for m in marks if (place := self.held.find(m)) >= 0]
            place, mark = min(places, default=(len(self.held), ""))
            if place > _MAX_HEAD:
                raise _Malformed
            if mark:
                return self.take(place), mark
            if self.has_ended:
                raise _Cut
            yield


# ---- JSON ----------------------------------------------------------------------------------------

Emit = Callable[[str], Any]


def _value(source: Source, emit: Emit) -> Reading[None]:
    """Take one JSON value, and emit its text as it comes; raises _Malformed where it is none."""
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
            yield from _string(source, emit)
            state = "colon"
        elif character in "{[":
            if len(closers) == _MAX_DEPTH:
                raise _Malformed
            closers.append("}" if character == "{" else "]")
            emit(source.take(1))
            state = "first"
        else:
            yield from (_string if character == '"' else _scalar)(source, emit)
            state = "next"


def _string(source: Source, emit: Emit) -> Reading[None]:
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
                raise _Malformed
            emit(source.take(len(escape)))
        elif character < " ":
            emit(json.dumps(source.take(1))[1:-1])


def _scalar(source: Source, emit: Emit) -> Reading[None]:
    text = source.run(_SCALAR_RUN)
    while not source.held and not source.has_ended and len(text) <= _MAX_SCALAR:
        yield
        text += source.run(_SCALAR_RUN)
    is_cut = source.has_ended and not source.held
    if len(text) > _MAX_SCALAR or not (is_cut or _SCALAR.match(text)):
        raise _Malformed
    emit(text)
    if is_cut:
        raise _Cut


def _text(source: Source) -> Reading[str]:
    """Take a string, and decode it."""
    chunks: list[str] = []
    yield from _string(source, chunks.append)
    text = json.loads("".join(chunks))
    assert isinstance(text, str)
    return text


# ---- the reader ----------------------------------------------------------------------------------


class CallReader:
    """Reads one text.

    Args:
        openings: mark that begins a call -> what reads the text after it; of a format.
        functions: name -> schema of the parameters, of the functions that may be called.
        reads_bare: whether JSON at the very beginning of the text is a call.
        is_forced: whether the text is nothing but a call.
        max_calls: calls that count; further ones are read and left out.

    Attributes:
        calls: those that have begun.
        num_malformed: texts after a mark that are no call.
    """

    def __init__(
        self,
        openings: Mapping[str, Callable[[CallReader], Reading[None]]],
        functions: Mapping[str, Mapping[str, Any]],
        *,
        reads_bare: bool = False,
        is_forced: bool = False,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self.source, self.functions = Source(), functions
        self.calls: list[ReadCall] = []
        self.num_malformed = 0
        self._openings, self._max_calls = openings, max_calls
        self._deltas: list[CallDelta] = []
        self._thought: list[str] = []
        self._content: list[str] = []
        self.has_thought, self.has_content = False, False
        self._blanks, self._follows_call = list[str](), False
        self._open: ReadCall | None = None
        self._lead = ""
        """Arguments that were not given to the client yet."""
        self._is_forced, self._drops_cut = is_forced, False
        self._reading = self._read(reads_bare or is_forced)
        self._is_over = False

    def push(self, text: str) -> tuple[str, str]:
        """The thought and the content that are certain now, ``text`` being the next piece."""
        for start in range(0, len(text), _SLICE):
            self.source.held += text[start : start + _SLICE]
            self._advance()
        return self._new()

    def finish(self, is_cut: bool = False) -> tuple[str, str]:
        """What is missing at the end of the text. ``is_cut``: it ends at a limit of tokens; a call
        whose name is not known is left out then, and is content otherwise.
        """
        self.source.has_ended, self._drops_cut = True, is_cut
        self._advance()
        if not self._follows_call:
            self._content += self._blanks
        return self._new()

    @property
    def whole_calls(self) -> list[ReadCall]:
        """Those that count, at the end of the text; the last one may be cut."""
        return [call for call in self.calls if not call.is_withdrawn][: self._max_calls]

    def take_deltas(self) -> list[CallDelta]:
        """What is new of calls since they were taken last."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _advance(self) -> None:
        if not self._is_over:
            self._is_over = next(self._reading, self) is self
        if self._open is not None and self._lead.strip() not in ("", "{"):
            self._flush()  # a brace alone may belong to no call

    def _new(self) -> tuple[str, str]:
        thought, content = "".join(self._thought), "".join(self._content)
        self._thought, self._content = [], []
        return thought, content

    def _read(self, reads_bare: bool) -> Reading[None]:
        if reads_bare:
            self.write((yield from self.source.blanks()))
            is_opening = yield from self.source.which(*self._openings)
            if not is_opening and self.source.held[:1] in ("{", "["):
                yield from self.attempt(json_calls)
        while opening := (yield from self.copy(*self._openings)):
            yield from self.attempt(self._openings[opening], opening)
        self.write(self.source.held)

    # ---- what formats write to ----------------------------------------------------------------

    def write(self, text: str) -> None:
        """Add content. White space around calls belongs to them."""
        certain = text.rstrip()
        if certain:
            before = "".join(self._blanks) + certain
            self._content.append(before if self.has_content or not self._follows_call else certain)
            self._blanks, self.has_content = [], True
        if self.has_content or not self._follows_call:
            self._blanks.append(text[len(certain) :])

    def think(self, text: str) -> None:
        """Add thought."""
        self.has_thought = self.has_thought or bool(text)
        self._thought.append(text)

    def copy(self, *marks: str, write: Emit | None = None) -> Reading[str]:
        """Copy text to the content, or ``write`` it, up to the first of ``marks``, which is not
        taken; empty: there is none.
        """
        source, write = self.source, write or self.write
        while True:
            places = [(place, m) for m in marks if (place := source.held.find(m)) >= 0]
            if places:
                place, mark = min(places)
                write(source.take(place))
                return mark
            num_held = max((overlap(source.held, mark) for mark in marks), default=0)
            if source.has_ended and not (self._drops_cut and num_held > 1):
                num_held = 0
            write(source.take(len(source.held) - num_held))
            source.begin()
            if source.has_ended:
                source.held = ""
                return ""
            yield

    def attempt(
        self, read: Callable[[CallReader], Reading[None]], opening: str = ""
    ) -> Reading[None]:
        """Read calls; what is none is content."""
        self.source.begin()
        try:
            self.source.take(len(opening))
            yield from read(self)
        except _Malformed:
            self.num_malformed += bool(opening)
            if self._open is not None:
                self._withdraw(self._open)
            self.write(self.source.taken)
        except _Cut:
            if self._open is not None:
                self.close()
            elif not (self._drops_cut and (opening or self._is_forced or self._follows_call)):
                self.write(self.source.taken + self.source.held)
            else:
                self._follows_call = True
            self.source.held = ""

    def open(self, name: str) -> None:
        """Begin a call; raises _Malformed if there is no such function."""
        if name not in self.functions or len(self.calls) >= MAX_CALLS:
            raise _Malformed
        self._open, self._lead = ReadCall(name), ""
        self.calls.append(self._open)

    def emit(self, text: str) -> None:
        """Add to the arguments of the call."""
        self._lead += text

    def close(self, arguments: str | None = None) -> None:
        """End the call; ``arguments``: all of them, where they were not emitted."""
        call = self._open
        assert call is not None
        if arguments is not None:
            self._lead = arguments
        self._flush()
        self._open = None
        self.source.begin()

    def _withdraw(self, call: ReadCall) -> None:
        """Take back the open call, of which clients may have got the beginning."""
        call.is_withdrawn, self._open = True, None
        if not call.arguments:
            self.calls.pop()
        self._follows_call = any(not call.is_withdrawn for call in self.calls)

    def _flush(self) -> None:
        call, number = self._open, len(self.calls) - 1
        assert call is not None
        self._follows_call = True
        if number < self._max_calls:
            name = None if call.arguments else call.name
            self._deltas.append(CallDelta(number, name, self._lead))
        call.arguments += self._lead
        self._lead = ""


# ---- formats -------------------------------------------------------------------------------------


def arguments(reader: CallReader, name: str) -> Reading[None]:
    """Read the value of a call's arguments. An object is emitted as it comes; a text that holds one
    is read; none and null are an empty object.
    """
    source, chunks = reader.source, list[str]()
    if (yield from source.characters()) == "{":
        reader.open(name)
        yield from _value(source, reader.emit)
        reader.close()
        return
    yield from _value(source, chunks.append)
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
        key = yield from _text(source)
        yield from source.blanks()
        yield from source.expect(":")
        yield from source.blanks()
        if key in _NAMES and (yield from source.which('"')):
            name = yield from _text(source)
            if name not in reader.functions:
                raise _Malformed
        elif key in _ARGUMENTS and name and len(reader.calls) == num_before:
            yield from arguments(reader, name)
        else:
            if key in _ARGUMENTS:
                chunks.clear()
            yield from _value(source, chunks.append if key in _ARGUMENTS else len)
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


def _raw_value(source: Source, emit: Emit) -> Reading[None]:
    """Take text up to a closing mark after which the call goes on: others belong to the text."""
    while True:
        place = source.held.find(_VALUE_END)
        if place < 0:
            num_held = max(
                overlap(source.held, f"\n{_VALUE_END}"), overlap(source.held, _VALUE_END)
            )
            emit(source.take(len(source.held) - num_held))
            if source.has_ended:
                raise _Cut
            yield
            continue
        begin = place + len(_VALUE_END)
        after = source.held[begin : begin + _MAX_HEAD]
        rest, waits = after.lstrip(), not source.has_ended and len(after) < _MAX_HEAD
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
            raise _Malformed
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
