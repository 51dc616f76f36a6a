"""``Inbox``: what replicas answer, for the one thread that waits for it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from forethought.cluster.connection import Connection

Sender = TypeVar("Sender")


class Inbox(Generic[Sender]):
    """Answers that arrive on connections, which are read here without a thread in between, and
    those that other threads put in. Used by one thread, but for ``put`` and ``wake``.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._answers = deque[tuple[Sender, Any]]()
        self._connections: dict[Sender, Connection] = {}
        self._sockets = self._wakeups, self._waker = socket.socketpair()
        for end in self._sockets:
            end.setblocking(False)
        self._selector.register(self._wakeups, selectors.EVENT_READ)
        self._finalizer = weakref.finalize(
            self, _close, self._selector, self._connections, self._answers, self._sockets
        )

    def put(self, sender: Sender, answer: Any) -> None:
        """Add an answer. From any thread."""
        self._answers.append((sender, answer))
        self.wake()

    def wake(self) -> None:
        """End the wait in ``take``. From any thread; it takes no lock."""
        with contextlib.suppress(OSError):  # it is about to wake up, or nobody waits any more
            self._waker.send(b"\0")

    def add(self, sender: Sender, connection: Connection) -> None:
        """Wait for the answers on a connection, too."""
        self._connections[sender] = connection
        self._selector.register(connection, selectors.EVENT_READ, sender)

    def remove(self, sender: Sender) -> None:
        """Close the connection of a sender, if it has one."""
        if (connection := self._connections.pop(sender, None)) is not None:
            self._selector.unregister(connection)
            connection.close()

    def close(self) -> None:
        """Close all connections; nothing is taken any more."""
        self._finalizer()

    def take(self, seconds: float) -> list[tuple[Sender, Any]]:
        """What has been answered, once there is something, or it was woken up, or after these
        seconds.
        """
        self._watch_for_room()
        answers = list[tuple[Sender, Any]]()
        for key, events in self._selector.select(0.0 if self._answers else seconds):
            if key.fileobj is self._wakeups:
                self._wakeups.recv(4096)
                continue
            connection = self._connections[key.data]
            if events & selectors.EVENT_WRITE:
                connection.send_rest()
            if events & selectors.EVENT_READ:
                answers += [(key.data, answer) for answer in connection.receive()]
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def _watch_for_room(self) -> None:
        """Wait for room for what connections have to send, where they have."""
        for sender, connection in self._connections.items():
            events = selectors.EVENT_READ
            if connection.has_unsent:
                events |= selectors.EVENT_WRITE
            if self._selector.get_key(connection).events != events:
                self._selector.modify(connection, events, sender)


def _close(
    selector: selectors.BaseSelector,
    connections: dict[Any, Connection],
    answers: deque[tuple[Any, Any]],
    sockets: Iterable[socket.socket],
) -> None:
    selector.close()
    late = [answer for _, answer in answers if isinstance(answer, Connection)]
    for connection in (*connections.values(), *late):
        connection.close()
    for end in sockets:
        end.close()
    connections.clear()
    answers.clear()
