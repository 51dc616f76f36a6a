"""Replicas with a model and without Ray, in this process: each has an event loop of its own."""

from __future__ import annotations

import asyncio
import pickle
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from forethought.cluster.link import Reply
from forethought.cluster.messages import Command, Copied
from forethought.cluster.replica import Replica
from forethought.errors import EngineStopped, ForethoughtError


def _sent(value: Any) -> Any:
    """As another process has it."""
    return pickle.loads(pickle.dumps(value))


class LocalReplica:
    """A channel to a replica in this process."""

    def __init__(self, fields: dict[str, Any], name: str, reply: Reply) -> None:
        self.name, self._reply, self._ingress = name, reply, uuid.uuid4().hex
        self.replica = Replica(fields)
        self._loop = asyncio.new_event_loop()
        self.is_dead = False
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def connect(self) -> None:
        self._send(self.replica.connect(self._ingress))

    def tell(self, number: int, commands: Sequence[Command]) -> None:
        self._send(self.replica.tell(self._ingress, number, _sent(commands)))

    def ask(self) -> None:
        self._send(self.replica.updates(self._ingress))

    def copy(self, handle: int, target: LocalReplica) -> None:
        def bring(pages: Any) -> None:
            target._send(target.replica.receive(target._ingress, handle, _sent(pages)), failed)

        def failed(error: Exception) -> None:
            target._reply(Copied(handle, error=error))

        self._send(self.replica.pages(self._ingress, handle), failed, bring)

    def drain(self) -> None:
        self._send(self.replica.drain())

    def kill(self) -> None:
        self.die()

    def leave(self) -> None:
        self.die()

    def die(self) -> None:
        """As ``kill -9``: nothing more is heard of it."""
        if not self.is_dead:
            self.is_dead = True
            self._reply(EngineStopped("the replica died"))
            threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        if self.replica._loaded is not None:
            self.replica._loaded.shutdown()

    def num_left(self) -> int:
        """Sequences, once every page is where it belongs."""
        llm = self.replica._llm
        engine = llm._frontend.local_engine
        llm._thread.call(engine.check_integrity).result(60)
        return len(list(engine.scheduler))

    def _send(
        self,
        work: Coroutine[Any, Any, Any],
        failed: Callable[[Exception], None] | None = None,
        done: Callable[[Any], None] | None = None,
    ) -> None:
        """Run a method of the replica, whose result is the reply, if it has one."""
        failed, done = failed or self._reply, done or self._reply

        async def run() -> None:
            try:
                result = await work
            except ForethoughtError as error:
                failed(error if not self.is_dead else EngineStopped("the replica died"))
                return
            if self.is_dead:
                failed(EngineStopped("the replica died"))
            elif result is not None:
                done(_sent(result))

        if self.is_dead:
            work.close()
            failed(EngineStopped("the replica died"))
        else:
            asyncio.run_coroutine_threadsafe(run(), self._loop)
