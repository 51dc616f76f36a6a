"""``Workers``: threads for the work of a request that would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from forethought.llm.fair_queue import FairQueue

NUM_WORKERS = 2
SMALL = 1 << 14
"""Bytes of a request that is read, rendered and tokenised on the event loop: in a thread it would
take longer."""

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Job:
    tenant: str
    size: int
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class Workers:
    """Runs work in ``num_workers`` threads, in fair turns (``FairQueue``). Used on one event
    loop.
    """

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self._pool = ThreadPoolExecutor(num_workers, "forethought-request")
        self._num_free = num_workers
        self._queue = FairQueue[_Job](lambda job: job.tenant, lambda job: job.size)

    async def run(self, work: Callable[[], Result], tenant: str, size: int) -> Result:
        """What ``work`` returns or raises; it is called here at once if ``size``, in bytes, is
        small.

        Work that has begun goes on where this is cancelled; its result is dropped.
        """
        if size <= SMALL:
            return work()
        job = _Job(tenant, size, work, asyncio.get_running_loop().create_future())
        self._queue.push(job)
        self._start()
        try:
            result: Result = await job.result
            return result
        finally:
            if job in self._queue:  # the client has gone
                self._queue.remove(job)

    def close(self) -> None:
        """Begin nothing further; what runs goes on to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._num_free and len(self._queue):
            job = self._queue.take()
            self._num_free -= 1
            running = loop.run_in_executor(self._pool, job.work)
            running.add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, done: asyncio.Future[Any]) -> None:
        self._num_free += 1
        self._queue.ended(job)
        error = None if done.cancelled() else done.exception()
        if not job.result.done():
            if done.cancelled():
                job.result.cancel()
            elif error is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(done.result())
        self._start()
