"""The output stream of a client: every waiting coroutine gets its output as soon as it is there."""

import asyncio

import pytest

from forethought.llm.engine_thread import OutputStream, schedule


class Generation:
    """A generation with as many tokens as a test says."""

    def __init__(self):
        self.size, self.finished, self.failure = 0, False, None

    @property
    def first_token_time(self):
        return 1.0 if self.size else None

    @property
    def num_events(self):
        return self.size + self.finished

    def grow(self, stream, size, finished=False):
        """One step of the engine; returns whether an output was delivered."""
        self.size, self.finished = size, finished
        callback = stream.on_step(self)
        if callback is not None:
            schedule(stream.loop, [callback])
        return callback is not None


async def settled(*works):
    """The coroutines as tasks, each run until it waits."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.sleep(0.001)
    return tasks


def reader():
    return OutputStream(lambda generation: generation.size), Generation()


def test_one_coroutine_waits_for_a_number_of_tokens_while_another_takes_every_output():
    async def main():
        stream, generation = reader()
        far, near = await settled(stream.reach(10), stream.next())
        assert generation.grow(stream, 3)
        assert await near == 3
        await asyncio.sleep(0.001)
        assert not far.done()
        assert not generation.grow(stream, 5)  # no coroutine waits for it
        assert generation.grow(stream, 12)
        assert await far == 12
        assert await stream.next() == 12

    asyncio.run(main())


def test_no_output_is_made_before_the_first_token_unless_it_ends():
    async def main():
        stream, generation = reader()
        (near,) = await settled(stream.next())
        assert not generation.grow(stream, 0)
        assert generation.grow(stream, 1)
        assert await near == 1
        assert generation.grow(stream, 1, finished=True)
        assert await stream.next() == 1
        stream, generation = reader()
        (near,) = await settled(stream.next())
        assert generation.grow(stream, 0, finished=True)
        assert await near == 0

    asyncio.run(main())


def test_a_wait_that_begins_while_an_output_is_made_is_not_lost():
    async def main():
        stream, generation = reader()
        (near,) = await settled(stream.next())
        generation.size = 1
        callback = stream.on_step(generation)
        (far,) = await settled(stream.reach(2))
        stream._min_tokens = float("inf")  # as the engine thread resets it, just after
        schedule(stream.loop, [callback])
        assert await near == 1
        assert generation.grow(stream, 2)
        assert await far == 2

    asyncio.run(main())


def test_tokens_that_are_there_are_not_waited_for():
    async def main():
        stream, generation = reader()
        (near,) = await settled(stream.next())
        generation.grow(stream, 6)
        assert await near == 6
        assert await stream.reach(4) == 6

    asyncio.run(main())


@pytest.mark.parametrize("failure", [None, RuntimeError("gone")])
def test_the_end_reaches_every_waiting_coroutine(failure):
    async def main():
        stream, generation = reader()
        waiters = await settled(stream.reach(99), stream.last(), stream.next())
        generation.failure = failure
        generation.grow(stream, 7, finished=True)
        ends = await asyncio.gather(*waiters, return_exceptions=True)
        assert ends == [failure or 7] * 3
        if failure is None:
            assert await stream.next() is None

    asyncio.run(main())


def test_pauses_of_a_loop_end_at_the_same_tick():
    class Clock:
        """The loop at times that the test says."""

        def __init__(self, *times):
            self.loop, self.time, self.ticks = asyncio.get_running_loop(), iter(times).__next__, []
            self.create_future = self.loop.create_future

        def call_at(self, tick, *call):
            self.ticks.append(tick)
            return self.loop.call_soon(*call)

    async def main():
        clock = Clock(100.1, 105.9, 109.99, 110.0)
        for _ in range(4):
            stream, _generation = reader()
            stream.loop = clock
            await stream.pause(10.0)
        return clock.ticks

    assert asyncio.run(main()) == [110.0, 110.0, 110.0, 120.0]


def test_a_pause_ends_with_the_generation():
    async def main():
        stream, generation = reader()
        (pausing,) = await settled(stream.pause(1e6))
        assert not generation.grow(stream, 3)  # nothing is wanted before the tick
        assert generation.grow(stream, 4, finished=True)
        await pausing
        await stream.pause(1e6)  # nor does one begin afterwards
        assert not stream._waiters

    asyncio.run(main())


def test_an_output_that_has_been_returned_does_not_come_again():
    async def main():
        stream, generation = reader()
        (near,) = await settled(stream.next())
        assert generation.grow(stream, 3)
        assert await near == 3
        (near,) = await settled(stream.next())
        assert not generation.grow(stream, 3)  # as where a waiting coroutine wakes the thread up
        assert generation.grow(stream, 4)
        assert await near == 4

    asyncio.run(main())
