"""The connection of an ingress to a replica: what goes over it, who may, and how it ends."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from forethought.cluster import connection as connection_module
from forethought.cluster.connection import MAX_STRANGERS, Connection, Listener, _packed
from forethought.cluster.entrance import CHALLENGE_BYTES, LOOPBACK, PROOF_BYTES, Entrance
from forethought.cluster.inbox import Inbox
from forethought.cluster.messages import Command, Generate, Progress, Stop, Updates
from forethought.config.sampling import SamplingParams
from forethought.engine.base import FRESH
from forethought.errors import EngineStopped
from forethought.outputs import EngineLoad, EngineStats

NAME = "0123456789abcdef" * 2


class Served:
    """Answers a question with the numbers of the messages since the last one."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, list[Command]]] = []
        self.news = defaultdict[str, list[int]](list)
        self.has_news = defaultdict[str, asyncio.Event](asyncio.Event)
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.left: list[str] = []
        self.size = 0
        """Tokens in each answer."""

    async def tell(self, ingress: str, number: int, commands: Sequence[Command]) -> None:
        await self.goes_on.wait()
        if Stop(666) in commands:
            raise EngineStopped("messages of the ingress were lost")
        self.told.append((ingress, number, list(commands)))
        self.news[ingress].append(number)
        self.has_news[ingress].set()

    async def updates(self, ingress: str) -> Updates:
        await self.has_news[ingress].wait()
        self.has_news[ingress].clear()
        news = self.news.pop(ingress, [])
        progress = [Progress(number, [5] * self.size) for number in news]
        return Updates(progress, EngineLoad(0, 0, 0.0), EngineStats(), 0.0)

    async def leave(self, ingress: str) -> int:
        self.left.append(ingress)
        return 0


class Server:
    """A listener on an event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.served = self.run(self._served())
        self.listener = Listener(self.served)
        self.entrance: Entrance = self.run(self.listener.open(LOOPBACK))

    async def _served(self) -> Served:
        return Served()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def call(self, function: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        self.run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _end(self) -> None:
        for _, server in self.listener._opened.values():
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def inbox() -> Iterator[Inbox[str]]:
    inbox = Inbox[str]()
    yield inbox
    inbox.close()


@pytest.fixture
def connection(server: Server, inbox: Inbox[str]) -> Connection:
    connection = Connection.open(server.entrance, NAME)
    inbox.add("replica", connection)
    return connection


def taken(inbox: Inbox[str], count: int = 1) -> list[Any]:
    """The next answers."""
    answers: list[Any] = []
    deadline = time.monotonic() + 60
    while len(answers) < count:
        assert time.monotonic() < deadline, "no answer comes"
        answers += [answer for _, answer in inbox.take(0.1)]
    return answers


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)


class Silent(socket.socket):
    """A connection that has not answered the ``challenge``."""

    challenge = b""


def silent(server: Server) -> Silent:
    stranger = Silent()
    stranger.settimeout(60)
    stranger.connect((LOOPBACK, server.entrance.port))
    stranger.challenge = stranger.recv(CHALLENGE_BYTES)
    return stranger


def connected_to(inbox: Inbox[str]) -> socket.socket:
    """The other end of a connection in the inbox."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    inbox.add("replica", Connection(near))
    return far


def generate(num_tokens: int) -> Generate:
    params = SamplingParams(temperature=0.0, seed=3, max_tokens=5)
    return Generate(1, 2, 0, list(range(num_tokens)), params, FRESH)


def test_commands_arrive_in_their_order_and_a_question_is_answered_when_there_is_something(
    server: Server, inbox: Inbox[str], connection: Connection
) -> None:
    connection.ask()
    assert inbox.take(0.05) == []
    for number in range(3):
        connection.tell(number, [generate(number), Stop(number)])
    numbers: list[int] = []
    while len(numbers) < 3:
        (updates,) = taken(inbox)
        numbers += [progress.generation for progress in updates.progress]
        connection.ask()
    assert numbers == [0, 1, 2]
    assert server.served.told == [(NAME, n, [generate(n), Stop(n)]) for n in range(3)]


def test_a_replica_that_reads_nothing_holds_no_sender_up_and_gets_everything_later(
    server: Server, inbox: Inbox[str], connection: Connection
) -> None:
    server.call(server.served.goes_on.clear)
    long, count = generate(400_000), 20
    for number in range(count):
        connection.tell(number, [long])
    assert connection.has_unsent
    connection.ask()
    server.call(server.served.goes_on.set)
    numbers: list[int] = []
    while len(numbers) < count:
        (updates,) = taken(inbox)
        numbers += [progress.generation for progress in updates.progress]
        connection.ask()
    assert numbers == [*range(count)]
    assert [commands for _, _, commands in server.served.told] == [[long]] * count
    assert not connection.has_unsent


def test_the_end_of_either_side_is_told_to_the_other_one(
    server: Server, inbox: Inbox[str], connection: Connection
) -> None:
    other = Connection.open(server.entrance, NAME[::-1])
    inbox.add("other", other)
    other.ask()
    inbox.remove("other")
    wait_until(lambda: server.served.left == [NAME[::-1]])
    server.run(server._end())
    (error,) = taken(inbox)
    assert isinstance(error, EngineStopped)
    connection.tell(0, [Stop(1)])  # nobody is there: it is said once
    connection.ask()
    inbox.remove("replica")
    assert inbox.take(0.0) == []


def test_an_error_of_a_message_is_its_answer(inbox: Inbox[str], connection: Connection) -> None:
    connection.tell(0, [Stop(666)])
    (error,) = taken(inbox)
    assert isinstance(error, EngineStopped)
    assert "were lost" in str(error)


def test_an_answer_that_cannot_be_read_ends_its_replica_alone(inbox: Inbox[str]) -> None:
    far = connected_to(inbox)
    with far:
        for data in (b"nonsense", pickle.dumps("sense")):
            far.sendall(len(data).to_bytes(8) + data)
        error, answer = taken(inbox, 2)
    assert isinstance(error, EngineStopped)
    assert answer == "sense"


def test_a_client_without_the_secret_is_not_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HELLO_SECONDS", 0.1)
    with pytest.raises(ConnectionError):
        server.entrance._replace(secret=b"s" * 32).connect(NAME.encode(), 5.0)
    with silent(server) as stranger:
        assert stranger.recv(1) == b"", "it is kept"
    assert not server.served.told
    assert not server.served.left


def test_who_has_read_a_connection_cannot_repeat_it(server: Server) -> None:
    own = b"c" * CHALLENGE_BYTES
    with silent(server) as first, silent(server) as second:
        proof = server.entrance.proof(b"enter", first.challenge, own, NAME.encode())
        for stranger in (first, second):
            stranger.sendall(own + proof + NAME.encode())
        assert first.recv(PROOF_BYTES) == server.entrance.proof(b"admit", own, first.challenge)
        assert second.recv(1) == b""


def test_another_process_at_the_address_of_a_replica_is_not_listened_to() -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:
        entrance = Entrance.of(listening)

        def pretend() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.sendall(bytes(CHALLENGE_BYTES))
                accepted.recv(4096)
                accepted.sendall(bytes(PROOF_BYTES) + pickle.dumps("an answer"))

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(ConnectionRefusedError, match="another process"):
            entrance.connect(NAME.encode(), 20.0)
        pretending.join()


def test_strangers_that_say_nothing_make_room_for_an_ingress(server: Server) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(silent(server)) for _ in range(MAX_STRANGERS + 3)]
        assert [stranger.recv(1) for stranger in strangers[:3]] == [b""] * 3
        Connection.open(server.entrance, NAME).close()
        assert strangers[3].recv(1) == b""
        wait_until(lambda: len(server.listener._strangers) == MAX_STRANGERS - 1)


@pytest.mark.parametrize("data", [b"\xff" * 8, (8).to_bytes(8) + b"nonsense", _packed("sense")])
def test_what_is_no_message_ends_its_connection_before_it_is_waited_for(
    server: Server, connection: Connection, inbox: Inbox[str], data: bytes
) -> None:
    other = Connection.open(server.entrance, NAME[::-1])
    other._socket.sendall(data)
    wait_until(lambda: server.served.left == [NAME[::-1]])
    other.close()
    connection.tell(0, [Stop(1)])
    connection.ask()
    assert [type(answer) for answer in taken(inbox)] == [Updates]


def test_an_answer_that_is_too_long_is_not_waited_for(inbox: Inbox[str]) -> None:
    far = connected_to(inbox)
    with far:
        far.sendall(b"\xff" * 8)
        (error,) = taken(inbox)
    assert isinstance(error, EngineStopped)


def test_an_ingress_that_does_not_read_holds_no_other_one_up(
    server: Server, connection: Connection, inbox: Inbox[str]
) -> None:
    stalled = Connection.open(server.entrance, NAME[::-1])
    stalled._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    server.served.size = 300_000
    for number in range(20):
        stalled.ask()
        stalled.tell(number, [Stop(1)])
    wait_until(lambda: len(server.served.told) == 20)
    server.served.size = 1
    connection.tell(0, [Stop(1)])
    connection.ask()
    assert [type(answer) for answer in taken(inbox)] == [Updates]
    stalled.close()


def test_a_connection_that_comes_late_is_closed_with_the_inbox(server: Server) -> None:
    inbox = Inbox[str]()
    inbox.put("replica", Connection.open(server.entrance, NAME))
    inbox.close()
    wait_until(lambda: server.served.left == [NAME])


def test_a_wait_for_answers_is_ended_from_other_threads(inbox: Inbox[str]) -> None:
    waker = threading.Timer(0.05, inbox.put, ["replica", "answer"])
    waker.start()
    assert inbox.take(60.0) == [("replica", "answer")]
    waker.join()
    threading.Timer(0.05, inbox.wake).start()
    assert inbox.take(60.0) == []
