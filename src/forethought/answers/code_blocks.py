"""Code in the text of a model: the code blocks of Markdown, and the program among them.

Blocks are found as CommonMark 0.31 says (https://spec.commonmark.org): between fences of three or
more backticks or tildes, with any info string, closed by as many or by the end of what holds them;
and indented by four columns where no paragraph goes on. Fences may stand in lists and block quotes.
One rule differs: tags of HTML hide no code, since models write it after ``<details>``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from forethought.config.thoughts import after_thought

_MAX_LINES = 100_000
_MAX_CONTAINERS = 50
_TAB, _SPACES = 4, " \t"


class CodeBlock(NamedTuple):
    """One block of code."""

    code: str
    """Its lines, each with its end."""
    info: str = ""
    """What follows the opening fence, such as ``python``."""
    is_fenced: bool = True


class Program(NamedTuple):
    """The program in a text."""

    code: str
    is_block: bool
    """Whether it is a block; otherwise it is the whole text."""


def program_in(text: str, definition: re.Pattern[str] | None = None) -> Program | None:
    """The program of an answer; None if the text is blank.

    It is the last fenced block with a ``definition``, else the last fenced block; else the text, if
    it is Python or has a ``definition``; else the last indented block; else the text.

    Args:
        text: of the model; a thought in it is skipped.
        definition: a pattern; a block with a match is preferred to later ones.
    """
    text = after_thought(text)
    blocks = [block for block in code_blocks(text) if block.code.strip()]
    fenced = [block.code for block in blocks if block.is_fenced] or _loosely_fenced(text)
    whole = [code for code in fenced if definition is not None and definition.search(code)]
    if fenced:
        return Program((whole or fenced)[-1], True)
    if not text.strip():
        return None
    is_program = _is_python(text) or (definition is not None and definition.search(text))
    if is_program or not blocks or text.lstrip("\r\n")[:1].isspace():
        return Program(text, False)
    return Program(blocks[-1].code, True)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


_LOOSE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^`\n]*\n(.*?)^[ \t]*\1", re.DOTALL | re.MULTILINE)


def _loosely_fenced(text: str) -> list[str]:
    """Blocks between fences whose lines do not belong to the list item that the fences are in."""
    return [match[2] for match in _LOOSE.finditer(text) if match[2].strip()]


def code_blocks(text: str) -> list[CodeBlock]:
    """The code blocks of a text, in their order."""
    parser = _BlockParser()
    lines = _LINE_END.split(text)
    for line in lines[: len(lines) - (not lines[-1])][:_MAX_LINES]:
        parser.add(line)
    return parser.finished()


_LINE_END = re.compile(r"\r\n|\n|\r")
"""Other line ends of Unicode are part of the code: a string of a program may have them."""


# ---- lines ---------------------------------------------------------------------------------------

_QUOTE = re.compile(r" {0,3}>")
_FENCE = re.compile(r" {0,3}(?:(`{3,})([^`]*)|(~{3,})(.*))$")
_BREAK = re.compile(r" {0,3}(?:(?:-[ \t]*){3,}|(?:_[ \t]*){3,}|(?:\*[ \t]*){3,})$")
_HEADING = re.compile(r" {0,3}#{1,6}(?:[ \t]|$)")
_UNDERLINE = re.compile(r" {0,3}(?:-+|=+)[ \t]*$")
_ITEM = re.compile(r"( {0,3})([-+*]|(\d{1,9})[.)])(?=[ \t]|$)")


class _Line(NamedTuple):
    """The rest of a line within its containers."""

    text: str
    column: int = 0
    """Where the text begins in the line; tab stops count from its beginning."""

    @property
    def is_blank(self) -> bool:
        return not self.text.strip(_SPACES)

    @property
    def indent(self) -> int:
        """Columns of white space at its beginning."""
        column = self.column
        for sign in self.text:
            if sign not in " \t":
                break
            column += _TAB - column % _TAB if sign == "\t" else 1
        return column - self.column

    def after(self, count: int) -> _Line:
        """The line without its first ``count`` signs, none of which is a tab."""
        return _Line(self.text[count:], self.column + count)

    def unindented(self, count: int) -> _Line:
        """The line without up to ``count`` columns of white space; the rest of a tab is spaces."""
        column, end = self.column, self.column + count
        for index, sign in enumerate(self.text):
            if column >= end or sign not in " \t":
                return _Line(" " * (column - end) + self.text[index:], min(column, end))
            column += _TAB - column % _TAB if sign == "\t" else 1
        return _Line(" " * max(0, column - end), min(column, end))


@dataclass(slots=True)
class _Leaf:
    """A code block that is open."""

    fence: str = ""
    indent: int = 0
    info: str = ""
    lines: list[str] = field(default_factory=list)

    def is_closed_by(self, line: str) -> bool:
        """Whether the line is its closing fence."""
        match = _FENCE.match(line.rstrip(_SPACES))
        fence = "" if match is None else match[1] or match[3]
        info = "" if match is None else match[2] or match[4] or ""
        return bool(fence) and fence.startswith(self.fence) and not info.strip(_SPACES)

    def block(self) -> CodeBlock:
        """The block, without the blank lines at the end of one that is indented."""
        lines = self.lines
        while not self.fence and lines and not lines[-1].strip(_SPACES):
            lines = lines[:-1]
        return CodeBlock("".join(f"{line}\n" for line in lines), self.info, bool(self.fence))


class _BlockParser:
    """The first phase of CommonMark's parsing strategy, as needed for code blocks."""

    def __init__(self) -> None:
        self._blocks: list[CodeBlock] = []
        self._containers: list[int] = []
        """0 for a block quote; for a list item the columns of its content."""
        self._leaf: _Leaf | None = None
        self._in_paragraph = False

    def finished(self) -> list[CodeBlock]:
        """The blocks; one that is open ends with the text."""
        self._close()
        return self._blocks

    def _close(self) -> None:
        if self._leaf is not None:
            self._blocks.append(self._leaf.block())
        self._leaf = None

    def add(self, text: str) -> None:
        line, num_matched = self._matched(_Line(text))
        is_inside = num_matched == len(self._containers)
        if self._leaf is not None:
            if is_inside and self._continues(self._leaf, line):
                return
            self._close()
        may_be_lazy = self._in_paragraph and not is_inside and not line.is_blank
        if may_be_lazy and (line.indent >= _TAB or not _begins_block(line.text)):
            return
        if not is_inside:
            del self._containers[num_matched:]
            self._in_paragraph = False
        self._open(line)

    def _matched(self, line: _Line) -> tuple[_Line, int]:
        """The rest of the line within the open containers that it belongs to; their number."""
        for number, indent in enumerate(self._containers):
            if indent == 0:
                match = _QUOTE.match(line.text)
                if match is None:
                    return line, number
                line = line.after(match.end()).unindented(1)
            elif line.is_blank or line.indent >= indent:
                line = line.unindented(indent)
            else:
                return line, number
        return line, len(self._containers)

    def _continues(self, leaf: _Leaf, line: _Line) -> bool:
        """Add a line to the open block, or close it by its fence; whether it was one of these."""
        if leaf.fence:
            if leaf.is_closed_by(line.text):
                self._close()
            else:
                leaf.lines.append(line.unindented(leaf.indent).text)
            return True
        if not line.is_blank and line.indent < _TAB:
            return False
        leaf.lines.append(line.unindented(_TAB).text)
        return True

    def _open(self, line: _Line) -> None:
        """Open the containers and the block that the line begins."""
        if self._in_paragraph and _UNDERLINE.match(line.text):
            self._in_paragraph = False
            return
        while not line.is_blank:
            if line.indent >= _TAB:
                if not self._in_paragraph:
                    self._leaf = _Leaf(lines=[line.unindented(_TAB).text])
                return
            if len(self._containers) < _MAX_CONTAINERS:
                inner = self._inside(line)
                if inner is not None:
                    line, self._in_paragraph = inner, False
                    continue
            if match := _FENCE.match(line.text):
                info = (match[2] or match[4] or "").strip(_SPACES)
                self._leaf = _Leaf(match[1] or match[3], line.indent, info)
            is_leaf = self._leaf is not None or _BREAK.match(line.text) or _HEADING.match(line.text)
            self._in_paragraph = not is_leaf
            return
        self._in_paragraph = False

    def _inside(self, line: _Line) -> _Line | None:
        """The rest of the line within the container that it begins; None: it begins none."""
        if match := _QUOTE.match(line.text):
            self._containers.append(0)
            return line.after(match.end()).unindented(1)
        mark = None if _BREAK.match(line.text) else _ITEM.match(line.text)
        if mark is None:
            return None
        content = line.after(mark.end())
        if self._in_paragraph and (content.is_blank or mark[3] not in (None, "1")):
            return None
        width = content.indent if not content.is_blank and content.indent <= _TAB else 1
        self._containers.append(mark.end() + width)
        return content.unindented(width)


def _begins_block(text: str) -> bool:
    """Whether a line ends the paragraph of another container."""
    return any(pattern.match(text) for pattern in (_QUOTE, _FENCE, _BREAK, _HEADING, _ITEM))
