"""``Fleet``: the replicas of an ingress. They are started, watched, replaced and drained."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from forethought.cluster.connection import Connection
from forethought.cluster.inbox import Inbox
from forethought.cluster.link import Link, Opener, Role
from forethought.cluster.messages import Copied, Description, IngressForgotten, Updates
from forethought.cluster.prefill import check_split
from forethought.errors import EngineStopped, ForethoughtError, ParameterError, UsageError

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds after which the replicas are looked at though none has answered."""
FIRST_DELAY, MAX_DELAY = 0.25, 30.0
"""Seconds before a replica that was never up is started again; they double each time."""
FIRST_TRIES = 3
"""Starts of each replica before the first of them is up."""
PATIENCE = 30.0
"""Seconds after which a wait for replicas is logged."""
HANG = 60.0
"""Seconds of silence after which a replica is given up: it hangs, or its machine is gone."""


class Fleet:
    """Links to replicas, used by one thread; ``wake`` may be called from any.

    Args:
        open_channel: finds or starts the replica of a name, in a thread.
        prefix: of their names.
        num_prefill: how many of them prefill for the others.
        hang_seconds: of silence, after which a replica is ended and replaced.

    Attributes:
        links: to all replicas, those that are not up yet, too.
        num_lost: replicas that were up and have died.
    """

    def __init__(
        self,
        open_channel: Opener,
        prefix: str,
        num_replicas: int,
        hang_seconds: float = HANG,
        num_prefill: int = 0,
    ) -> None:
        self._open_channel, self._prefix, self._hang_seconds = open_channel, prefix, hang_seconds
        self._inbox = Inbox[Link]()
        self._closed = threading.Event()
        self.links: list[Link] = []
        self.num_lost = 0
        self.failure: Exception | None = None
        """Of the last replica that was never up, until one is."""
        self.num_prefill = num_prefill
        self.scale(num_replicas)

    # ---- from any thread ----------------------------------------------------------------------

    def wake(self) -> None:
        """End the wait in ``receive``."""
        self._inbox.wake()

    # ---- from the thread that uses it ---------------------------------------------------------

    def scale(self, num_replicas: int) -> None:
        """Start replicas, or drain those that are too many; of those that prefill for others there
        are as many as before. Raises ParameterError if they would leave none to decode.
        """
        check_split(num_replicas, self.num_prefill)
        if not self.num_prefill:
            self._scale(Role.BOTH, self._prefix, num_replicas)
            return
        for role, count in (
            (Role.PREFILL, self.num_prefill),
            (Role.DECODE, num_replicas - self.num_prefill),
        ):
            self._scale(role, f"{self._prefix}-{role}", count)

    def _scale(self, role: Role, prefix: str, count: int) -> None:
        links = [link for link in self.links if link.role is role]
        staying = [link for link in links if not link.is_draining]
        for link in staying[count:]:
            log.info("%s is drained", link.name)
            link.is_draining = True
        in_use = {link.name for link in links}
        names = (f"{prefix}-{number}" for number in range(2 * count + len(in_use)))
        free = [name for name in names if name not in in_use]
        for name in free[: max(0, count - len(staying))]:
            self._start(Link(name))

    def drain(self, name: str) -> Link:
        """Have all ingresses of a replica leave it, with their sequences.

        Raises ParameterError for a name that no replica has, or the last one that takes anything.
        """
        link = next((link for link in self.links if link.name == name and link.is_up), None)
        if link is None or link.channel is None:
            names = ", ".join(link.name for link in self.links if link.is_up)
            raise ParameterError("no such replica", f"there is no {name!r}", f"There are: {names}")
        if not any(other.takes for other in self.links if other is not link):
            why = f"{name} is the only one that takes generations"
            raise ParameterError("the replica cannot be drained", why, "Start another one first")
        link.channel.drain()
        link.is_draining = True
        return link

    def wait(self, num_up: int = 1) -> None:
        """Wait until replicas are up.

        Raises what it failed with, where none is up: a UsageError at once, another error where each
        replica has failed ``FIRST_TRIES`` times, since one of before may just be ending.
        """
        warned = time.monotonic()
        while sum(link.is_up for link in self.links) < num_up:
            for _ in self.receive():
                pass
            if time.monotonic() - warned > PATIENCE:
                warned = time.monotonic()
                log.warning("no replica is up yet: it loads, or Ray has no room for it")
            failure = self.failure
            if failure is None or any(link.is_up for link in self.links):
                continue
            num_tries = min(link.num_failures for link in self.links)
            if isinstance(failure, UsageError) or num_tries >= FIRST_TRIES:
                self.close()
                raise failure

    def receive(self) -> Iterator[tuple[Link, Updates | Copied | None]]:
        """What replicas have answered, once there is something or it is time to look at them. None:
        the replica is gone, or all that it had of this ingress.
        """
        for link, answer in self._inbox.take(TICK):
            if link.is_dead:
                if isinstance(answer, Connection):
                    answer.close()
            elif isinstance(answer, Connection):
                self._inbox.add(link, answer)
            elif isinstance(answer, Updates):
                self._ask(link)
                link.told(answer)
                yield link, answer
            elif isinstance(answer, Copied):
                yield link, answer
            elif isinstance(answer, Description):
                log.info("%s is up", link.name)
                self.failure = None
                link.came_up(answer)
                self._ask(link)
            else:
                yield from self._lose(link, answer)
        yield from self._watch()

    def close(self) -> None:
        """Leave all replicas; those without another ingress end."""
        self._closed.set()
        channels = [link.channel for link in self.links if link.channel is not None]
        for link in self.links:
            link.is_dead = True
            link.ended.set_result(None)
        self._inbox.close()
        leaving = [threading.Thread(target=channel.leave, daemon=True) for channel in channels]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()

    # ---- the lives of replicas ----------------------------------------------------------------

    def _start(self, link: Link) -> None:
        self.links.append(link)
        name = f"forethought-start-{link.name}"
        threading.Thread(target=self._open, args=(link,), name=name, daemon=True).start()

    def _open(self, link: Link) -> None:
        delay = min(MAX_DELAY, FIRST_DELAY * 2**link.num_failures) if link.num_failures else 0.0
        if self._closed.wait(delay):
            return
        reply = partial(self._reply, link)
        try:
            channel = self._open_channel(link.name, reply)
            link.channel = channel
            channel.connect()
        except Exception as error:
            reply(error)

    def _reply(self, link: Link, answer: Any) -> None:
        if self._closed.is_set() and isinstance(answer, Connection):
            answer.close()
        else:
            self._inbox.put(link, answer)

    @staticmethod
    def _ask(link: Link) -> None:
        assert link.channel is not None, "it has answered"
        link.channel.ask()

    def _watch(self) -> Iterator[tuple[Link, None]]:
        for link in [*self.links]:
            if link.is_up and link.silence > self._hang_seconds:
                why = f"nothing has come from it for {link.silence:.0f} s"
                yield from self._lose(link, EngineStopped("the replica hangs", why))
            elif link.is_draining and not link.num_open:
                log.info("%s is left", link.name)
                link.flush()
                yield link, None
                self._end(link)
                if link.channel is not None:
                    threading.Thread(target=link.channel.leave, daemon=True).start()

    def _lose(self, link: Link, error: Any) -> Iterator[tuple[Link, None]]:
        """Give a replica up, and start one in its place; or connect again to one that lives: others
        may use it.
        """
        log.warning("%s is gone: %s", link.name, error)
        link.has_forgotten = isinstance(error, IngressForgotten)
        was_up, successor = link.is_up, link.successor()
        self._end(link)
        if link.channel is not None and not link.has_forgotten:
            link.channel.kill()
        if not was_up:
            self.failure = _as_failure(error)
        elif not link.has_forgotten:
            self.num_lost += 1
        if not link.is_draining and not self._closed.is_set():
            self._start(successor)
        yield link, None

    def _end(self, link: Link) -> None:
        link.is_dead = True
        self.links.remove(link)
        self._inbox.remove(link)
        link.ended.set_result(None)


def _as_failure(error: Any) -> Exception:
    if isinstance(error, ForethoughtError):
        return error
    return EngineStopped("a replica does not start", str(error), "See the log of its process")
