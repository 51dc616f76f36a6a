"""``Link``: one replica as its ingress sees it, and what carries messages to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, Protocol

from forethought.cluster.messages import Command, Description, Updates
from forethought.cluster.prefixes import PrefixMemory
from forethought.outputs import EngineLoad, EngineStats

QUIET = 5.0
"""Seconds without an answer after which nothing new begins in a replica: a heartbeat is due twice a
second. Whether it hangs is decided later, by ``Fleet``.
"""


class Role(StrEnum):
    """What a replica does, by its name: all ingresses of it agree."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @classmethod
    def of(cls, name: str) -> Role:
        """That of the replica ``PREFIX-prefill-0``, ``PREFIX-decode-0`` or ``PREFIX-0``."""
        word = name.rpartition("-")[0].rpartition("-")[2]
        return cls(word) if word in (cls.PREFILL, cls.DECODE) else cls.BOTH


def model_of(name: str) -> str:
    """The beginning of the names of all replicas of a model, by that of one of them."""
    prefix = name.rpartition("-")[0]
    return prefix.removesuffix(f"-{Role.PREFILL}").removesuffix(f"-{Role.DECODE}")


class Channel(Protocol):
    """Carries messages to one replica. No method but ``leave`` waits; the answers, and what goes
    wrong, are given to the ``Reply`` that it was made with, from any thread.
    """

    def connect(self) -> None:
        """Ask for the ``Description``."""

    def tell(self, number: int, commands: Sequence[Command]) -> None:
        """Send commands; only a failure is answered."""

    def ask(self) -> None:
        """Ask for ``Updates``."""

    def copy(self, handle: int, target: Channel) -> None:
        """Bring the pages that a ``Copy`` names with this handle, sent before or after, to another
        replica. That one's reply gets ``Copied``, whatever happens.
        """

    def drain(self) -> None:
        """Have all ingresses of the replica leave it."""

    def kill(self) -> None:
        """End the replica, if it is still there."""

    def leave(self) -> None:
        """Tell it that nothing more comes, and end it if it has no other ingress."""


Reply = Callable[[Any], None]
"""Takes an answer; or a ``Connection``, on which further ones arrive; or an exception, after which
the replica and what it had are given up.
"""
Opener = Callable[[str, Reply], Channel]
"""Finds or starts the replica of a name; it may wait, and raise."""


class Link:
    """One replica of an ingress, a ``Place`` for generations.

    Args:
        name: of the replica; one that comes in its place has the same.
        num_failures: replicas of this name before it that were never up, one after the other.

    Attributes:
        role: whether it prefills for others, decodes what others have prefilled, or does both.
        prefixes: that sequences of this ingress have there, if it has a role.
        num_queued_tokens: of prompts of this ingress that it has yet to compute.
        channel: None until it is opened.
        description: None until it is up.
        num_open: sequences of this ingress there.
        num_generating: those of them that generate.
        num_begun: the same, of all time.
        num_arriving: sequences whose prompts are computed for it elsewhere.
        is_draining: nothing new begins there, its sequences move away, and it ends without them.
        is_dead: it is given up.
        has_forgotten: it was given up, as the replica has closed what this ingress had there; the
            replica lives.
        ended: when it is given up, for other threads.
        heard: when it has answered last, as of ``time.monotonic``.
    """

    def __init__(self, name: str, num_failures: int = 0) -> None:
        self.name, self.num_failures, self.role = name, num_failures, Role.of(name)
        self.prefixes, self.num_queued_tokens = PrefixMemory(), 0
        self.channel: Channel | None = None
        self.description: Description | None = None
        self.num_open = self.num_generating = self.num_begun = self.num_arriving = 0
        self.is_draining = self.is_dead = self.has_forgotten = False
        self.ended = Future[None]()
        self.heard, self.stalled = time.monotonic(), 0.0
        self.engine_load, self.stats = EngineLoad(0, 0, 0.0), EngineStats()
        self._num_elsewhere = self._num_messages = 0
        self._outbox: list[Command] = []

    def successor(self) -> Link:
        """The link to the replica that has the name next, or to the same one anew."""
        if self.has_forgotten:
            link = Link(self.name)
            link.stats = self.stats
            return link
        return Link(self.name, 0 if self.is_up else self.num_failures + 1)

    @property
    def is_up(self) -> bool:
        """Whether it takes commands."""
        return self.description is not None and not self.is_dead

    @property
    def takes(self) -> bool:
        """Whether new generations may begin there."""
        is_quiet = time.monotonic() - self.heard > QUIET
        return self.is_up and not self.is_draining and not is_quiet

    @property
    def decodes(self) -> bool:
        """Whether new generations may stay there."""
        return self.takes and self.role is not Role.PREFILL

    @property
    def capacity(self) -> int:
        """Generations that run there at once."""
        return 1 if self.description is None else self.description.limits.max_batch_size

    @property
    def load(self) -> int:
        """Generations that run or wait there or are on their way there; those of other ingresses as
        of its last answer.
        """
        return self.num_generating + self.num_arriving + self._num_elsewhere

    @property
    def num_free_tokens(self) -> int:
        """Tokens that its KV cache has free pages for, as of its last answer."""
        if self.description is None:
            return 0
        usage = self.engine_load.kv_cache_usage
        return int(self.description.capabilities.capacity * (1.0 - usage))

    @property
    def silence(self) -> float:
        """Seconds since it has answered, or since its engine has made a step that it should."""
        return max(time.monotonic() - self.heard, self.stalled)

    def send(self, command: Command) -> None:
        """Send a command with the next ``flush``."""
        self._outbox.append(command)

    def flush(self) -> None:
        """Send the commands in one message."""
        if self._outbox and self.channel is not None and not self.is_dead:
            self._outbox, commands = [], self._outbox
            self.channel.tell(self._num_messages, commands)
            self._num_messages += 1

    def came_up(self, description: Description) -> None:
        """It has described itself."""
        self.description, self.num_failures = description, 0
        self.heard = time.monotonic()

    def told(self, updates: Updates) -> None:
        """It has answered."""
        self.heard, self.stalled = time.monotonic(), updates.stalled
        self.engine_load, self.stats = updates.load, updates.stats
        self.is_draining |= updates.is_draining
        num_running = updates.load.running + updates.load.waiting
        self._num_elsewhere = max(0, num_running - self.num_generating)

    # ---- as the server's metrics show it ------------------------------------------------------

    @property
    def url(self) -> str:
        """Its name."""
        return self.name

    @property
    def is_healthy(self) -> bool:
        """Whether it takes new generations."""
        return self.takes

    @property
    def num_in_flight(self) -> int:
        """Generations of this ingress there."""
        return self.num_generating

    @property
    def num_requests(self) -> int:
        """Generations that have begun or gone on there."""
        return self.num_begun
