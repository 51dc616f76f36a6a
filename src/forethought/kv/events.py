"""What the prefix index gains and loses, published for routers in vLLM's form, over ZMQ.

::

    engine's thread   PrefixIndex --> EventLog       a bounded deque
    another thread    EventLog --> batches --> PUB   [topic, number, msgpack of the batch]
                      last batches --> ROUTER        those from a number on, for who missed them

A batch is ``[seconds, events, rank]``; an event is one of these arrays, whose fields are vLLM's::

    ["BlockStored", hashes, parent hash or nil, token ids, block size, LoRA id, medium, LoRA name]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

A hash is the last 64 bits of the page's hash in the index, which depends on the tenant's salt and
the adapter, too. The first event is ``AllBlocksCleared``. Where the log overflows it is emptied,
and another ``AllBlocksCleared`` follows: a subscriber may then miss pages that are there, and never
believes in pages that are not.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from forethought.errors import DependencyError, ParameterError

if TYPE_CHECKING:
    from forethought.config.engine import KvEventsConfig

log = logging.getLogger(__name__)

_MEDIUM = "GPU"
"""Of pages that attention reads, on whatever device: the name that routers know."""
_CLEARED = ("AllBlocksCleared",)
_POLL_SECONDS = 0.05
"""After which requests for a replay are seen, at most."""
_LINGER_MILLISECONDS = 1000
"""In which the last batches may still be sent at the end."""
_MAX_BATCH = 4096
"""Events in one batch."""
_END = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""

Event = tuple[Any, ...]


class EventLog:
    """The events that are not published yet; one thread appends, another one takes.

    Args:
        page_size: tokens in a page.
        max_events: beyond which the log is emptied.
    """

    def __init__(self, page_size: int, max_events: int) -> None:
        self._page_size, self._max_events = page_size, max_events
        self._events: deque[Event] = deque([_CLEARED])
        self._lock = threading.Lock()
        self.arrived = threading.Event()
        """Set while there are events."""

    def stored(self, digest: bytes, parent: bytes | None, tokens: Sequence[int], lora: str) -> None:
        """A full page has been published.

        Args:
            digest: its hash.
            parent: that of the page before; None: it is the first one.
            tokens: in the page.
            lora: name of the adapter; empty: none.
        """
        before = None if parent is None else hash_of(parent)
        lora_id = hash_of(blake2b(lora.encode()).digest()) % 2**31 if lora else None
        page = ([hash_of(digest)], before, list(tokens), self._page_size)
        self._append(("BlockStored", *page, lora_id, _MEDIUM, lora or None))

    def removed(self, digest: bytes) -> None:
        """A page has been evicted, or its content is about to change."""
        self._append(("BlockRemoved", [hash_of(digest)], _MEDIUM))

    def take(self) -> list[Event]:
        """The oldest events, which are removed; neighbours of a kind are one."""
        merged: list[Event] = []
        with self._lock:
            for _ in range(min(_MAX_BATCH, len(self._events))):
                _add(merged, self._events.popleft())
            if not self._events:
                self.arrived.clear()
        return merged

    def _append(self, event: Event) -> None:
        with self._lock:
            if len(self._events) >= self._max_events:
                log.warning("KV events come faster than they are sent: subscribers begin anew")
                self._events.clear()
                self._events.append(_CLEARED)
            self._events.append(event)
            self.arrived.set()


def hash_of(digest: bytes) -> int:
    """The last 64 bits, without a sign."""
    return int.from_bytes(digest[-8:], "big")


def _add(events: list[Event], event: Event) -> None:
    """Append an event, or extend the last one by it: removed pages, and the next page of a row."""
    if events and event[0] == events[-1][0] == "BlockRemoved":
        events[-1][1].extend(event[1])
    elif (
        events
        and event[0] == events[-1][0] == "BlockStored"
        and (event[2], *event[4:]) == (events[-1][1][-1], *events[-1][4:])
    ):
        events[-1][1].extend(event[1])
        events[-1][3].extend(event[3])
    else:
        events.append(event)


class KvEventPublisher:
    """Publishes the events of a log in a thread of its own, until ``close``.

    Raises:
        DependencyError: the packages of the extra ``kv-events`` are not installed.
        ParameterError: an endpoint that cannot be opened.
    """

    def __init__(self, events: EventLog, config: KvEventsConfig) -> None:
        self._zmq, self._pack = event_packages()
        self._log, self._config = events, config
        self._topic = config.topic.encode()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        """Numbers and payloads of the last batches."""
        self._number, self._is_closed = 0, False
        self._context = self._zmq.Context()
        try:
            self._pub, self._replay = self._open()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what is left, and end the thread."""
        self._is_closed = True
        self._log.arrived.set()
        self._thread.join()
        self._context.destroy(linger=_LINGER_MILLISECONDS)

    def _open(self) -> tuple[Any, Any]:
        """The socket of the batches, and that of replays if there is one."""
        config, zmq = self._config, self._zmq
        endpoint = config.endpoint
        try:
            pub = self._context.socket(zmq.PUB)
            pub.set_hwm(config.hwm)
            (pub.bind if config.is_bound else pub.connect)(endpoint)
            if config.replay_endpoint is None:
                return pub, None
            endpoint = config.replay_endpoint
            replay = self._context.socket(zmq.ROUTER)
            replay.set_hwm(config.buffer_steps + 1)  # a whole replay may wait for its subscriber
            replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            replay.bind(endpoint)
        except zmq.ZMQError as error:
            raise ParameterError(
                f"KV events cannot be published at {endpoint}",
                str(error),
                "Write it as in tcp://*:5557, with a free port",
            ) from error
        return pub, replay

    def _run(self) -> None:
        while True:
            is_last = self._is_closed
            if not is_last:
                self._log.arrived.wait(None if self._replay is None else _POLL_SECONDS)
            try:
                while events := self._log.take():
                    self._publish(events)
                self._answer_replays()
            except Exception:
                log.exception("KV events could not be published")
            if is_last:
                return

    def _publish(self, events: list[Event]) -> None:
        number = self._number.to_bytes(8, "big")
        payload = self._pack([time.time(), events, 0])
        self._pub.send_multipart((self._topic, number, payload))
        self._sent.append((number, payload))
        self._number += 1

    def _answer_replays(self) -> None:
        """Send the batches from a number on to each subscriber that has requested them."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # no request for a replay
            client, _, start = frames
            missed = [batch for batch in self._sent if batch[0] >= start]
            try:
                for batch in (*missed, (_END, b"")):
                    self._replay.send_multipart((client, b"", *batch), self._zmq.NOBLOCK)
            except self._zmq.ZMQError as error:
                # It has gone, or does not read: a replay with a gap must not seem to be whole.
                log.debug("a replay of KV events ends early: %s", error)


def event_packages() -> tuple[Any, Any]:
    """ZMQ, and the packer of msgpack; raises DependencyError if they are not installed."""
    modules = []
    for module, package in (("zmq", "pyzmq"), ("msgpack", "msgpack")):
        try:
            modules.append(importlib.import_module(module))
        except ModuleNotFoundError as error:
            raise DependencyError.missing(package, "kv_events_config", "kv-events") from error
    zmq, msgpack = modules
    return zmq, msgpack.packb
