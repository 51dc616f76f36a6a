"""A connection of an ingress to a replica, past Ray: commands there, and what is new back.

A call of an actor takes about a millisecond to begin and another one to return. So Ray has what is
rare: it starts replicas, carries pages from one to another, drains and ends. What the first token
of a request waits for goes over TCP::

    ingress                                     replica
    -------                                     -------
    connect                  -- by Ray -->      Description, with an Entrance
    proofs of the secret    <--- TCP -->
    a message of commands    --- TCP -->        ``tell``
    a question               --- TCP -->        ``updates``
                            <--- TCP ---        Updates, or what went wrong

Messages are pickled: both sides have proved to know a secret, which is told through Ray alone,
before the first of them is read. The end of a connection is the end of the process on its other
side, or of its machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import struct
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from forethought.cluster.entrance import HELLO_SECONDS, Admission, Entrance, configure
from forethought.cluster.messages import Command, Updates
from forethought.errors import EngineStopped, ForethoughtError, RequestError

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""In which a machine that can be reached has answered."""
MAX_MESSAGE_BYTES = 1 << 32
"""Beyond any message: the other side is out of step."""
MAX_STRANGERS = 64
"""Connections that have not proved to know the secret; the oldest one makes room for another."""
_NAME_BYTES = 32
"""Of an ingress, before its first message."""
_LENGTH = struct.Struct("!Q")
"""Bytes of a message, before it."""
_UNREAD_SECONDS = 20.0
"""In which the other machine takes what is sent to it: probes find one that is idle in as many."""
_READ_BYTES = 1 << 18
"""That are read at once."""


def portable(error: Exception) -> Exception:
    """An error as another process can read it."""
    if isinstance(error, ForethoughtError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    return RequestError("the request failed in a replica", f"{type(error).__name__}: {error}")


def _bound(connected: Any) -> None:
    """Have TCP give a machine up that takes nothing any more."""
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # macOS has it not
        connected.setsockopt(socket.IPPROTO_TCP, option, int(1000 * _UNREAD_SECONDS))


class _Message(NamedTuple):
    """What an ingress sends; without commands it asks for updates."""

    number: int = 0
    commands: Sequence[Command] | None = None


def _packed(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def _size(length: bytes | bytearray) -> int:
    """Of the message after these bytes; raises EngineStopped if it cannot be."""
    size = int(_LENGTH.unpack_from(length)[0])
    if size > MAX_MESSAGE_BYTES:
        raise _unreadable(f"a message of {size} bytes")
    return size


def _unreadable(why: object) -> EngineStopped:
    return EngineStopped("what the other side of a connection has sent cannot be read", str(why))


def _unpacked(data: bytes | bytearray) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # as of other code there
        return _unreadable(error)


class Connection:
    """The end at an ingress, for one thread. No method waits but ``open``."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        _bound(connected)
        self._socket = connected
        self._received, self._unsent = bytearray(), bytearray()

    @classmethod
    def open(cls, entrance: Entrance, ingress: str) -> Connection:
        """Connect to a replica; it may take ``CONNECT_SECONDS``. Raises OSError."""
        return cls(entrance.connect(ingress.encode(), CONNECT_SECONDS))

    def fileno(self) -> int:
        """Of its socket."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether the socket has had no room for something that was sent."""
        return bool(self._unsent)

    def tell(self, number: int, commands: Sequence[Command]) -> None:
        """Send commands."""
        self._send(_Message(number, commands))

    def ask(self) -> None:
        """Ask for updates."""
        self._send(_Message())

    def receive(self) -> list[Any]:
        """The answers that have arrived; EngineStopped at the end of the connection, or for one
        that cannot be read.
        """
        ended = self._fill()
        answers = list[Any]()
        try:
            while (end := self._end_of_message()) is not None:
                answers.append(_unpacked(self._received[_LENGTH.size : end]))
                del self._received[:end]
        except EngineStopped as error:
            self._received.clear()
            return [*answers, error]
        return answers if ended is None else [*answers, EngineStopped("the replica died", ended)]

    def send_rest(self) -> None:
        """Send of that what the socket has room for now."""
        self._send_now()

    def close(self) -> None:
        """End it."""
        self._socket.close()

    def _send(self, message: _Message) -> None:
        was_empty = not self._unsent
        self._unsent += _packed(message)
        if was_empty:
            self._send_now()

    def _send_now(self) -> None:
        try:
            num_sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # it has ended, as ``receive`` is going to say
            num_sent = len(self._unsent)
        del self._unsent[:num_sent]

    def _fill(self) -> str | None:
        """Read what is there; why nothing more comes, if it is so."""
        try:
            while data := self._socket.recv(_READ_BYTES):
                self._received += data
                if len(data) < _READ_BYTES:
                    return None
        except BlockingIOError:
            return None
        except OSError as error:
            return str(error)
        return "it has ended the connection"

    def _end_of_message(self) -> int | None:
        """Where the first one that was received ends; None: it has not come as a whole."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _size(self._received)
        return end if len(self._received) >= end else None


class Served(Protocol):
    """What ingresses connect to."""

    async def tell(self, ingress: str, number: int, commands: Sequence[Command]) -> None:
        """Run commands."""

    async def updates(self, ingress: str) -> Updates:
        """What is new, as soon as there is something."""

    async def leave(self, ingress: str) -> int:
        """Nothing more comes from an ingress."""


class Listener:
    """The end at a replica, on its event loop."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._strangers = dict[asyncio.StreamWriter, None]()
        """In the order in which they have come."""
        self._opened: dict[str, tuple[Entrance, asyncio.Server]] = {}
        """By the address of this machine."""

    async def open(self, host: str) -> Entrance:
        """Take connections at an address of this machine, from now on. Raises OSError."""
        if host not in self._opened:
            listening = socket.create_server((host, 0))
            entrance = Entrance.of(listening)
            accept = partial(self._accept, entrance)
            self._opened[host] = entrance, await asyncio.start_server(accept, sock=listening)
        return self._opened[host][0]

    async def _accept(
        self, entrance: Entrance, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connected = writer.get_extra_info("socket")
        configure(connected)
        _bound(connected)
        asking = set[asyncio.Task[None]]()
        try:
            if (ingress := await self._admitted(entrance, reader, writer)) is None:
                return
            try:
                await self._serve(ingress, reader, writer, asking)
            finally:
                await self._served.leave(ingress)
        except (OSError, EOFError):  # its process has ended
            pass
        except EngineStopped as error:
            log.warning("a connection of an ingress ends: %s", error)
        finally:
            for task in asking:
                task.cancel()
            writer.close()

    async def _admitted(
        self, entrance: Entrance, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str | None:
        """The name of an ingress; None: it is none."""
        self._strangers[writer] = None
        if len(self._strangers) > MAX_STRANGERS:
            del self._strangers[oldest := next(iter(self._strangers))]
            oldest.transport.abort()
        try:
            return await _hello(entrance, reader, writer)
        finally:
            self._strangers.pop(writer, None)

    async def _serve(
        self,
        ingress: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        asking: set[asyncio.Task[None]],
    ) -> None:
        while True:
            size = _size(await reader.readexactly(_LENGTH.size))
            message = _unpacked(await reader.readexactly(size))
            if not isinstance(message, _Message):
                raise message if isinstance(message, EngineStopped) else _unreadable(type(message))
            if message.commands is None:
                answer = _answer(writer, self._served.updates(ingress))
                asking.add(task := asyncio.create_task(answer))
                task.add_done_callback(asking.discard)
            else:
                await _answer(writer, self._served.tell(ingress, message.number, message.commands))


async def _hello(
    entrance: Entrance, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> str | None:
    admission = Admission(entrance, _NAME_BYTES)
    writer.write(admission.challenge)
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            answer = await reader.readexactly(admission.num_expected)
    except TimeoutError:
        return None
    if (admitted := admission.admitted(answer)) is None:
        return None
    name, proof = admitted
    writer.write(proof)
    return name.decode("ascii")


async def _answer(writer: asyncio.StreamWriter, work: Awaitable[Updates | None]) -> None:
    """Send the result, if there is one, or the error."""
    answer: Updates | Exception | None
    try:
        answer = await work
    except Exception as error:
        answer = portable(error)
    if answer is not None:
        writer.write(_packed(answer))
        with contextlib.suppress(OSError):  # the ingress has ended
            await writer.drain()
