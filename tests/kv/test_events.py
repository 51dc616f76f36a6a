"""What the prefix index gains and loses, as subscribers get to know it."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines import drain, engine, expect_empty
from forethought import LLM, SamplingParams
from forethought.config.engine import KvEventsConfig, LlmArgs
from forethought.engine.engine import Engine
from forethought.errors import DependencyError, ParameterError
from forethought.kv.events import EventLog, KvEventPublisher, hash_of
from http_servers import eventually

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Mirror:
    """An index that is rebuilt from events: the tokens of all prefixes, by hash."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.num_cleared = self.num_removed = 0

    def take(self, events: Iterable[Any]) -> None:
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                self.num_cleared += 1
                self.prefixes.clear()
            elif kind == "BlockRemoved":
                for digest in fields[0]:
                    self.num_removed += 1
                    self.prefixes.pop(digest, None)
            else:
                self.store(*fields)

    def store(
        self, hashes: list[int], parent: int | None, tokens: list[int], size: int, *rest: Any
    ) -> None:
        assert rest == (None, "GPU", None)  # id of an adapter, medium, name of an adapter
        assert len(tokens) == size * len(hashes)
        for number, digest in enumerate(hashes):
            before = self.prefixes.get(parent, ()) if parent is not None else ()
            self.prefixes[digest] = (*before, *tokens[number * size : (number + 1) * size])
            parent = digest


def expect_same(mirror: Mirror, machine: Engine) -> None:
    assert mirror.prefixes.keys() == {hash_of(digest) for digest in machine.index._page_of}


def traffic(machine: Engine, rounds: int, seed: int = 0) -> Iterator[None]:
    """Random requests that share prefixes, forks and rewinds, in a cache too small for all."""
    draw = random.Random(seed)
    trunks = [[draw.randrange(3, 20) for _ in range(24)] for _ in range(4)]
    for number in range(rounds):
        trunk = draw.choice(trunks)[: draw.randrange(4, 24)]
        prompt = [*trunk, *(draw.randrange(3, 20) for _ in range(draw.randrange(1, 9)))]
        kept = machine.start(prompt, GREEDY, keep=True)[0]
        machine.start(prompt[: draw.randrange(1, len(prompt))], GREEDY)
        drain(machine)
        if number % 3 == 0:
            machine.rewind(kept, draw.randrange(1, len(prompt)))
            machine.resume(kept, GREEDY)
            drain(machine)
        machine.close(kept)
        yield


def test_an_index_that_is_rebuilt_from_events_is_that_of_the_engine() -> None:
    machine, mirror = engine(pages=24), Mirror()
    machine.index.recorder = log = EventLog(machine.pool.page_size, 10_000)
    prompts = []
    publish = machine.index.publish

    def noting(parent: bytes, tokens: Any, page: int, **fields: Any) -> bytes:
        prompts.append(tuple(tokens))
        return publish(parent, tokens, page, **fields)

    machine.index.publish = noting  # type: ignore[method-assign]
    for _ in traffic(machine, 40):
        while events := log.take():
            mirror.take(events)
        expect_same(mirror, machine)
    assert mirror.num_removed > 50
    assert mirror.num_cleared == 1
    assert mirror.prefixes
    for tokens in mirror.prefixes.values():  # chained from the first page on
        size = machine.pool.page_size
        assert {tokens[n : n + size] for n in range(0, len(tokens), size)} <= set(prompts)
    expect_empty(machine)


def test_neighbouring_pages_are_one_event() -> None:
    machine, log = engine(), EventLog(4, 100)
    machine.index.recorder = log
    machine.start(list(range(3, 16)), GREEDY)
    drain(machine)
    cleared, stored = log.take()
    assert cleared == ("AllBlocksCleared",)
    assert len(stored[1]) == len(stored[3]) / 4 >= 4
    assert stored[2] is None
    assert stored[3][:13] == list(range(3, 16))
    assert log.take() == []


def test_a_log_that_overflows_never_tells_of_pages_that_are_not_there() -> None:
    machine, mirror = engine(pages=24), Mirror()
    machine.index.recorder = log = EventLog(machine.pool.page_size, 7)
    for _ in traffic(machine, 30):
        pass
    mirror.take(log.take())
    assert mirror.num_cleared >= 1
    assert mirror.prefixes.keys() <= {hash_of(digest) for digest in machine.index._page_of}


def test_the_pages_of_an_adapter_have_its_name_and_number() -> None:
    log = EventLog(2, 10)
    log.stored(b"12345678", None, [1, 2], "first")
    log.stored(b"abcdefgh", b"12345678", [3, 4], "")
    log.stored(b"ABCDEFGH", None, [1, 2], "second")
    _, first, plain, second = log.take()
    assert (first[7], plain[7], second[7]) == ("first", None, "second")
    assert first[5] != second[5]
    assert plain[5] is None


def test_without_a_configuration_nothing_is_recorded() -> None:
    assert engine().index.recorder is None
    for fields in ({"enable_kv_cache_events": False}, {"publisher": "null"}):
        args = LlmArgs.from_dict({"kv_events_config": {"endpoint": "tcp://*:1", **fields}})
        assert args.published_kv_events is None


def test_missing_packages_are_named_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(DependencyError, match="kv-events"):
        LLM(kv_events_config={"endpoint": "tcp://*:5557"})


# ---- over ZMQ ------------------------------------------------------------------------------------


@contextmanager
def subscribed(endpoint: str, topic: bytes = b"") -> Iterator[Any]:
    zmq = pytest.importorskip("zmq", reason="the extra kv-events is not installed")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        (socket.bind if "*" in endpoint else socket.connect)(endpoint)
        yield socket


def replayed(endpoint: str, start: int, pause: float = 0.0) -> list[tuple[int, bytes]]:
    """The batches from a number on, of which a few at a time are read, after a pause."""
    import zmq

    batches = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.set_hwm(10)
        socket.connect(endpoint)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        time.sleep(pause)
        while True:
            _, number, payload = socket.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return batches
            batches.append((int.from_bytes(number, "big"), payload))


def test_a_subscriber_and_a_replay_rebuild_the_index_of_a_model(tmp_path: Path) -> None:
    msgpack = pytest.importorskip("msgpack")
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    mirror = Mirror()
    with subscribed(endpoint, b"kv") as socket:
        config = {"endpoint": endpoint, "replay_endpoint": replay, "topic": "kv@pod"}
        cache = {"max_tokens": 256, "page_size": 4}
        with LLM(dtype="float32", kv_events_config=config, kv_cache_config=cache) as llm:
            machine: Any = llm._frontend.engine  # type: ignore[union-attr]
            questions = [f"What is {n} * 17 + {n}?" for n in range(24)]
            llm.generate(questions, SamplingParams(temperature=0.0, max_tokens=12))
            eventually(lambda: not machine.index.recorder.arrived.is_set())
            batches = replayed(replay, 0)
            assert [number for number, _ in batches] == list(range(len(batches)))
            assert replayed(replay, len(batches) - 1) == batches[-1:]
            for _, payload in batches:
                seconds, events, rank = msgpack.unpackb(payload)
                assert seconds > 0
                assert rank == 0
                mirror.take(events)
            expect_same(mirror, machine)
            machine.check_integrity()
            assert mirror.num_removed > 0
            further = itertools.count(24)
            while not socket.poll(100):  # all batches so far may be older than the connection
                llm.generate(f"What is {next(further)} * 17?", SamplingParams(max_tokens=12))
            topic, raw, payload = socket.recv_multipart()
            assert topic == b"kv@pod"
            number = int.from_bytes(raw, "big")
            assert replayed(replay, number)[0] == (number, payload)


def test_a_replay_to_a_slow_subscriber_has_no_gap(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="the extra kv-events is not installed")
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KvEventsConfig(endpoint=endpoint, replay_endpoint=replay)
    log = EventLog(4, 100)
    publisher = KvEventPublisher(log, config)
    eventually(lambda: publisher._number == 1)
    batches = [(number, bytes(2000)) for number in range(1, 4000)]
    publisher._sent.extend((number.to_bytes(8, "big"), payload) for number, payload in batches)
    assert replayed(replay, 1, pause=0.5) == batches
    publisher.close()


def test_the_last_events_are_sent_before_the_publisher_ends(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="the extra kv-events is not installed")
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/events")
    log = EventLog(4, 100)
    publisher = KvEventPublisher(log, config)
    log.removed(b"12345678")
    publisher.close()
    assert log.take() == []
    assert publisher._number >= 1


def test_an_endpoint_that_is_taken_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="the extra kv-events is not installed")
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/nothing/events")
    with pytest.raises(ParameterError, match="nothing/events"):
        KvEventPublisher(EventLog(4, 100), config)
