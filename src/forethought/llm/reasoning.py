"""Splits a text into its thought and its answer, also while it streams."""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """Two parts of a text."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Splits the pieces of one text at the markers of a thought.

    Text that may begin a marker is held back until that is known. White space around a marker
    belongs to it. A text has one thought, at its beginning; markers after it are content.

    Args:
        markers: what opens and closes a thought; None: all is content.
        is_open: whether the prompt has opened the thought.

    Attributes:
        position: characters of the text that have been sorted.
        thought: first and last character of the thought so far.
        answer_start: where the answer begins; None: not known.
    """

    def __init__(self, markers: tuple[str, str] | None, is_open: bool = False) -> None:
        self._start, self._end = markers or ("", "")
        self._held, self.position = "", 0
        self.thought, self.answer_start = (0, 0), None if markers else 0
        self._state = "before" if markers else "answer"
        if markers and is_open:
            self._state = "opened"

    @property
    def is_open(self) -> bool:
        """Whether the text so far ends within the thought."""
        return self._state in ("opened", "thought")

    def push(self, text: str) -> Split:
        """What is certain now of the text so far, ``text`` being its next piece."""
        self._held += text
        reasoning = content = ""
        while True:
            before = self._state
            if self._state == "before":
                self._before()
            elif self._state == "opened":
                self._skip_blanks()
                if self._held:
                    self._state, self.thought = "thought", (self.position, self.position)
            elif self._state == "thought":
                reasoning += self._thought()
            elif self._state == "closed":
                self._skip_blanks()
                if self._held:
                    self._begin_answer()
            else:
                content += self._take(len(self._held))
            if self._state == before:
                return Split(reasoning, content)

    def finish(self) -> Split:
        """What was held back, at the end of the text."""
        is_open, held = self.is_open, self._take(len(self._held))
        if is_open:
            self.thought = (self.thought[0], self.position)
            return Split(held, "")
        if held and self.answer_start is None:
            self.answer_start = self.position - len(held)
        return Split("", held)

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self.position += count
        return text

    def _skip_blanks(self) -> None:
        self._take(len(self._held) - len(self._held.lstrip()))

    def _begin_answer(self) -> None:
        self._state, self.answer_start = "answer", self.position

    def _before(self) -> None:
        """Before a thought there may be only white space."""
        text = self._held.lstrip()
        if text.startswith(self._start):
            self._take(len(self._held) - len(text) + len(self._start))
            self._state = "opened"
        elif text and not self._start.startswith(text):
            self._begin_answer()

    def _thought(self) -> str:
        """The part of a thought that certainly belongs to no closing marker."""
        thought, marker, _ = self._held.partition(self._end)
        if marker:
            certain, self._state = thought.rstrip(), "closed"
        else:
            num_held = overlap(self._held, self._end)
            certain = self._held[: len(self._held) - num_held].rstrip()
        text = self._take(len(certain))
        self.thought = (self.thought[0], self.position)
        if marker:
            self._take(len(thought) - len(certain) + len(marker))
        return text


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` with which ``marker`` begins, less than all of it."""
    first = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while first >= 0:
        if marker.startswith(text[first:]):
            return len(text) - first
        first = text.find(marker[0], first + 1)
    return 0


def split(text: str, markers: tuple[str, str] | None, is_open: bool = False) -> Split:
    """The thought and the answer of a whole text."""
    splitter = ReasoningSplitter(markers, is_open)
    first, last = splitter.push(text), splitter.finish()
    return Split(first.reasoning + last.reasoning, first.content + last.content)


def opens_thought(text: str, markers: tuple[str, str] | None) -> bool:
    """Whether a prompt ends within a thought."""
    if markers is None:
        return False
    start, end = markers
    opened = text.rfind(start)
    return opened >= 0 and text.find(end, opened) < 0
