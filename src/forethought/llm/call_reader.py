"""Calls of tools in a text that grows: what is content, and the name and arguments of each call.

A format is a function that reads a text after the mark that opens a call (``llm.call_formats``)::

    text  --push-->  content, thought (harmony alone), CallDelta: a call's name, new arguments

* Arguments are checked as JSON while they come. A call begins once its name is that of a function
  of the request and its arguments have begun; what is malformed before is content.
* Where arguments turn out to be malformed, the call is withdrawn (``ReadCall.is_withdrawn``) and
  its text is content; a stream has given the beginning of the arguments by then.
* A call that the end of the text cuts has the arguments so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from forethought.llm.growing_text import Cut, Emit, GrowingText, Malformed, Reading
from forethought.llm.reasoning import overlap

MAX_CALLS = 128
"""Calls in one text; what follows is content."""
_SLICE = 1024
"""Characters that are read together: what is held is copied with each that is taken."""


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


ReadCalls = Callable[["CallReader"], Reading[None]]
"""Reads the calls of one place in the text, of which its opening is taken."""


class CallReader:
    """Reads one text.

    Args:
        openings: mark that begins a call -> what reads the text after it; of a format.
        functions: name -> schema of the parameters, of the functions that may be called.
        bare: reads JSON at the very beginning of the text; None: that is content.
        is_forced: whether the text is nothing but a call.
        max_calls: calls that count; further ones are read and left out.

    Attributes:
        calls: those that have begun.
        num_malformed: texts after a mark that are no call.
    """

    def __init__(
        self,
        openings: Mapping[str, ReadCalls],
        functions: Mapping[str, Mapping[str, Any]],
        *,
        bare: ReadCalls | None = None,
        is_forced: bool = False,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self.source, self.functions = GrowingText(), functions
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
        self._reading = self._read(bare)
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

    def _read(self, bare: ReadCalls | None) -> Reading[None]:
        if bare is not None:
            self.write((yield from self.source.blanks()))
            is_opening = yield from self.source.which(*self._openings)
            if not is_opening and self.source.held[:1] in ("{", "["):
                yield from self.attempt(bare)
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

    def attempt(self, read: ReadCalls, opening: str = "") -> Reading[None]:
        """Read calls; what is none is content."""
        self.source.begin()
        try:
            self.source.take(len(opening))
            yield from read(self)
        except Malformed:
            self.num_malformed += bool(opening)
            if self._open is not None:
                self._withdraw(self._open)
            self.write(self.source.taken)
        except Cut:
            if self._open is not None:
                self.close()
            elif not (self._drops_cut and (opening or self._is_forced or self._follows_call)):
                self.write(self.source.taken + self.source.held)
            else:
                self._follows_call = True
            self.source.held = ""

    def open(self, name: str) -> None:
        """Begin a call; raises Malformed if there is no such function."""
        if name not in self.functions or len(self.calls) >= MAX_CALLS:
            raise Malformed
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
