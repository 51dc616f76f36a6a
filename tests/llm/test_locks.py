"""Concurrency limit and FIFO lock: no more inside than allowed, in order of arrival."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forethought import LLM, SamplingParams
from forethought.llm.async_llm import ConcurrencyLimit
from forethought.llm.fifo_lock import FifoLock
from tokens import speaking


def test_no_more_run_than_the_limit_and_all_run_in_order():
    async def main():
        limit, inside, order, peak = ConcurrencyLimit(2), 0, [], 0

        async def visit(name):
            nonlocal inside, peak
            async with limit:
                inside += 1
                peak = max(peak, inside)
                order.append(name)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*[visit(name) for name in range(9)])
        assert peak == 2
        assert order == list(range(9))
        assert limit._free == 2

    asyncio.run(main())


def test_a_task_cancelled_when_it_is_admitted_lets_the_next_one_in():
    async def main():
        limit, order = ConcurrencyLimit(1), []

        async def visit(name, stay):
            async with limit:
                order.append(name)
                await stay.wait()

        first_leaves, others = asyncio.Event(), asyncio.Event()
        others.set()
        first = asyncio.create_task(visit("first", first_leaves))
        second = asyncio.create_task(visit("second", others))
        third = asyncio.create_task(visit("third", others))
        await asyncio.sleep(0)
        first_leaves.set()
        await asyncio.sleep(0)  # the first one has left and admitted the second
        second.cancel()
        await asyncio.wait([first, second, third], timeout=60)
        assert second.cancelled()
        assert order == ["first", "third"]
        assert limit._free == 1

    asyncio.run(main())


def test_a_waiting_task_whose_loop_is_closed_is_skipped():
    limit = ConcurrencyLimit(1)

    async def leave_waiting():
        waiter = asyncio.get_running_loop().create_future()
        limit._waiting.append(
            waiter
        )  # as a loop that was closed in the middle of waiting leaves it

    async def main():
        async with limit:
            thread = threading.Thread(target=lambda: asyncio.run(leave_waiting()))
            thread.start()
            thread.join()
        async with asyncio.timeout(60), limit:
            assert limit._free == 0

    asyncio.run(main())
    assert limit._free == 1


def test_threads_get_the_lock_in_order_of_arrival():
    lock, order, count = FifoLock(), [], 4

    def visit(name):
        with lock:
            order.append(name)

    with lock:
        assert lock.owner == threading.get_ident()
        assert not lock.try_acquire()
        threads = []
        for name in range(count):
            threads.append(threading.Thread(target=visit, args=(name,)))
            threads[-1].start()
            while len(lock._waiting) <= name:
                threads[-1].join(0.001)
    visit("again")
    for thread in threads:
        thread.join(60)
    assert order == [*range(count), "again"]
    assert lock.owner is None
    assert lock.try_acquire()
    lock.release()
    assert not lock._locked


def test_a_thread_that_asks_for_the_engine_gets_it_between_two_steps_of_another(monkeypatch):
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    with LLM(speaking("byte_level"), num_continuous_decode_steps=1) as llm:
        frontend, threads, sizes = llm._frontend, [], []
        step, submit = frontend.step, frontend.submit

        def stepped():
            if not threads and llm.stats.steps == 5:
                threads.append(threading.Thread(target=llm.generate, args=("b", params)))
                threads[0].start()
                while not llm._lock.is_wanted:
                    threads[0].join(0.001)
            return step()

        def submitted(*request):
            sizes.append(llm.stats.steps)
            return submit(*request)

        monkeypatch.setattr(frontend, "step", stepped)
        monkeypatch.setattr(frontend, "submit", submitted)
        llm.generate("a", params)
        threads[0].join(60)
    assert sizes == [0, 6]


def test_a_thread_interrupted_while_waiting_does_not_get_the_lock(monkeypatch):
    lock, real = FifoLock(), threading.Lock

    class Interrupted:
        def __init__(self):
            self.asked = 0

        def acquire(self):
            self.asked += 1
            if self.asked == 2:
                raise KeyboardInterrupt

    with lock:
        monkeypatch.setattr("forethought.llm.llm.threading.Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt), lock:
            pass
        monkeypatch.setattr("forethought.llm.llm.threading.Lock", real)
        assert not lock._waiting
        lock.owner = threading.get_ident()
    with lock:
        pass
