"""Laws of gate and turns: never more inside than there are places, and no place is ever lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forethought.llm.llm import ConcurrencyLimit, Turns


def test_no_more_are_inside_than_there_are_places_and_all_get_in_by_turn():
    async def main():
        gate, inside, order, most = ConcurrencyLimit(2), 0, [], 0

        async def visit(name):
            nonlocal inside, most
            async with gate:
                inside += 1
                most = max(most, inside)
                order.append(name)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*[visit(name) for name in range(9)])
        assert most == 2
        assert order == list(range(9))
        assert gate._free == 2

    asyncio.run(main())


def test_who_is_cancelled_when_the_place_is_given_passes_it_on():
    async def main():
        gate, order = ConcurrencyLimit(1), []

        async def visit(name, stay):
            async with gate:
                order.append(name)
                await stay.wait()

        first_leaves, others = asyncio.Event(), asyncio.Event()
        others.set()
        first = asyncio.create_task(visit("first", first_leaves))
        second = asyncio.create_task(visit("second", others))
        third = asyncio.create_task(visit("third", others))
        await asyncio.sleep(0)
        first_leaves.set()
        await asyncio.sleep(0)  # the first one is on its way out, and has given its place away
        second.cancel()
        await asyncio.wait([first, second, third], timeout=10)
        assert second.cancelled()
        assert order == ["first", "third"]
        assert gate._free == 1

    asyncio.run(main())


def test_a_waiting_client_whose_loop_is_gone_is_passed_over():
    gate = ConcurrencyLimit(1)

    async def leave_waiting():
        turn = asyncio.get_running_loop().create_future()
        gate._waiting.append(turn)  # as a loop that was closed in the middle of waiting leaves it

    async def main():
        async with gate:
            thread = threading.Thread(target=lambda: asyncio.run(leave_waiting()))
            thread.start()
            thread.join()
        async with asyncio.timeout(10), gate:
            assert gate._free == 0

    asyncio.run(main())
    assert gate._free == 1


def test_threads_enter_by_turn_and_one_that_comes_back_goes_to_the_end():
    turns, order, count = Turns(), [], 4

    def visit(name):
        with turns:
            order.append(name)

    with turns:
        assert turns.owner == threading.get_ident()
        assert not turns.enter_at_once()
        threads = []
        for name in range(count):
            threads.append(threading.Thread(target=visit, args=(name,)))
            threads[-1].start()
            while len(turns._waiting) <= name:
                threads[-1].join(0.001)
    visit("again")
    for thread in threads:
        thread.join(20)
    assert order == [*range(count), "again"]
    assert turns.owner is None
    assert turns.enter_at_once()
    turns.leave()
    assert not turns._taken


def test_who_is_interrupted_while_waiting_takes_no_turn(monkeypatch):
    turns, real = Turns(), threading.Lock

    class Interrupted:
        def __init__(self):
            self.asked = 0

        def acquire(self):
            self.asked += 1
            if self.asked == 2:
                raise KeyboardInterrupt

    with turns:
        monkeypatch.setattr("forethought.llm.llm.threading.Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt), turns:
            pass
        monkeypatch.setattr("forethought.llm.llm.threading.Lock", real)
        assert not turns._waiting
        turns.owner = threading.get_ident()
    with turns:
        pass
