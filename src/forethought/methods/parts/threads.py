"""Threads that a model spawns as it thinks: how it writes spawn and join, and what they cost.

A ``ThreadFormat`` parses the threads in the text that spawns them, and formats their results. A
``ThreadProgress`` is the state of one of them, or of the main one: its newest part, and the tokens
that all its parts and the threads that it has spawned have generated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from forethought.errors import UnknownNameError
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.task import GenerationTask


@dataclass(frozen=True)
class ThreadFormat:
    """How a model writes spawn and join. ``{number}`` and ``{text}`` are of one thread."""

    spawn_begin: str
    """Opens the block that spawns."""
    spawn_end: str
    """Closes it."""
    task: str
    """Regular expression of one thread in the block, with the groups ``number`` (counted from 1
    where it has none) and ``text``."""
    thread_end: str
    """Closes what a thread writes."""
    inherits: bool
    """Whether a thread goes on from the main thread; else it sees only ``thread_begin``."""
    thread_begin: str
    """What a thread goes on from."""
    returned: str
    """Regular expression with the group ``text``: what of a thread, its closing tag included, is
    returned; nothing if it does not match. Empty: all that it has written."""
    joined: str
    """The main thread's form of the text that a thread returns."""
    join_end: str
    """The text after them, from which the main thread goes on."""

    @property
    def is_whole(self) -> bool:
        """Whether the main thread contains a thread as it was generated, after the same text."""
        whole = f"{self.thread_begin}{{text}}{self.thread_end}"
        return self.inherits and not self.returned and self.joined == whole

    def tasks(self, text: str) -> list[tuple[str, str]] | None:
        """Number and text of each thread of the block with which a text ends; None: there is none.

        A server that does not report which stop string ended a text may have reached its end.
        """
        _, begun, block = text.rpartition(self.spawn_begin)
        if not begun:
            return None
        matches = re.finditer(self.task, block, re.DOTALL)
        return [
            (match.groupdict().get("number") or str(count), match["text"].strip())
            for count, match in enumerate(matches, start=1)
        ]

    def result(self, written: str) -> str:
        """The result in the text of a thread."""
        if not self.returned:
            return written
        match = re.search(self.returned, written, re.DOTALL)
        return match["text"] if match else ""

    def join(self, numbers: Sequence[str], written: Sequence[str]) -> str:
        """The main thread's text after the threads that it spawns.

        Args:
            numbers: of the threads.
            written: by each of them.
        """
        texts = [
            self.joined.format(number=number, text=self.result(text))
            for number, text in zip(numbers, written, strict=True)
        ]
        return f"{self.spawn_end}{''.join(texts)}{self.join_end}"


FORMATS: Mapping[str, ThreadFormat] = MappingProxyType(
    {
        "threadweaver": ThreadFormat(
            spawn_begin="<Outlines>",
            spawn_end="</Outlines>",
            task=r"<Outline>\s*(?P<number>\d+)\s*:(?P<text>.*?)</Outline>",
            inherits=True,
            thread_begin="\n<Thread>{number}:",
            thread_end="</Thread>",
            returned="",
            joined="\n<Thread>{number}:{text}</Thread>",
            join_end="\n</Parallel>",
        ),
        "apr": ThreadFormat(
            spawn_begin="<spawn>",
            spawn_end="</spawn>",
            task=r"<msg>(?P<text>.*?)</msg>",
            inherits=False,
            thread_begin="{text}\n",
            thread_end="</join>",
            returned=r".*<join>(?P<text>.*?)</join>",
            joined="\n<join>{text}</join>",
            join_end="\n",
        ),
    }
)


def format_of(format: str | ThreadFormat) -> ThreadFormat:
    """The format itself, or the one of that name; else raises ``UnknownNameError``."""
    if isinstance(format, ThreadFormat):
        return format
    if format not in FORMATS:
        raise UnknownNameError("thread_format", str(format), FORMATS)
    return FORMATS[format]


@dataclass
class ThreadProgress:
    """The state of a thread: the main one, or one that was spawned."""

    part: GenerationTask
    """The newest part; ``part.joined`` is all of them."""
    limit: int | None
    """Tokens that it may generate itself."""
    depth: int = 0
    """Of the main thread 0, of those that it spawns 1."""
    num_own: int = 0
    thread_tokens: int = 0
    longest_path: int = 0
    join_tokens: int | None = 0
    spawns: list[int] = field(default_factory=list)
    """Threads of each spawn; after it those of the spawns in these threads."""
    num_spawns: int = 0
    """Its own, those that were left to itself included."""
    text: str = ""
    """All that it has written, with what was joined."""
    output: ScaffoldingOutput | None = None
    """All parts that have ended, with what was joined between them."""
    read: str | None = None
    """The text before the newest part, if it reads threads in their pages; None: it goes on
    after their text."""

    @property
    def left(self) -> int | None:
        """Tokens that it may still generate itself."""
        return None if self.limit is None else max(0, self.limit - self.num_own)

    @property
    def joined(self) -> ScaffoldingOutput | None:
        """All parts with the joined texts between them; None before one has generated."""
        if self.read is None or self.output is None:
            return self.part.joined
        result = self.part.result
        return (
            self.output
            if result is None
            else ScaffoldingOutput.join([self.output, self.read, result])
        )

    def written(self, form: ThreadFormat) -> str:
        """Its text; where only a part of it is returned, with its closing tag."""
        closed = form.returned and self.part.stop_reason == form.thread_end
        return self.text + form.thread_end if closed else self.text

    def add(self, part: GenerationTask) -> None:
        """Count a part, which has ended."""
        if self.output is not None:  # it goes on after a join
            self.count_inserted([part])
        self.output = self.joined
        self.text += part.output_str or ""
        self.num_own += part.num_generated
        self.longest_path += part.num_generated

    def count_inserted(self, parts: Sequence[GenerationTask]) -> None:
        """Count the tokens before parts that were prefilled for a join, if they are known."""
        for part in parts:
            inserted = part.inserted_tokens
            is_known = inserted is not None and self.join_tokens is not None
            self.join_tokens = (self.join_tokens or 0) + len(inserted or ()) if is_known else None

    def add_threads(self, threads: Sequence[ThreadProgress]) -> None:
        """Count the threads of one spawn, which have ended, and all that these have spawned."""
        self.spawns.append(len(threads))
        for thread in threads:
            self.spawns += thread.spawns
            self.thread_tokens += thread.num_own + thread.thread_tokens
            is_known = self.join_tokens is not None and thread.join_tokens is not None
            total = (self.join_tokens or 0) + (thread.join_tokens or 0)
            self.join_tokens = total if is_known else None
        self.longest_path += max(thread.longest_path for thread in threads)
