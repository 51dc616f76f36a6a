"""A client's end of a generation: who waits for what is told in time, however many wait."""

import asyncio

import pytest

from forethought.llm.engine_thread import OutputStream, deliver


class Generation:
    """A generation that has come as far as a test says."""

    def __init__(self):
        self.size, self.finished, self.failure = 0, False, None

    def grow(self, listener, size, finished=False):
        """One step of the engine; returns whether the client was told."""
        self.size, self.finished = size, finished
        callback = listener.hear(self)
        if callback is not None:
            deliver(listener.loop, [callback])
        return callback is not None


async def settled(*works):
    """The works as tasks, each as far as it gets without news."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.sleep(0.001)
    return tasks


def reader():
    return OutputStream(lambda generation: generation.size), Generation()


def test_one_waits_for_a_number_of_tokens_while_another_takes_whatever_comes():
    async def main():
        listener, generation = reader()
        far, near = await settled(listener.reach(10), listener.next())
        assert generation.grow(listener, 3)
        assert await near == 3
        await asyncio.sleep(0.001)
        assert not far.done()
        assert not generation.grow(listener, 5)  # nobody wants to know of it
        assert generation.grow(listener, 12)
        assert await far == 12
        assert await listener.next() == 12

    asyncio.run(main())


def test_a_wish_made_while_the_engine_writes_is_not_forgotten():
    async def main():
        listener, generation = reader()
        (near,) = await settled(listener.next())
        generation.size = 1
        callback = listener.hear(generation)
        (far,) = await settled(listener.reach(2))
        listener._wanted = float("inf")  # as the engine resets it, just after the wish was made
        deliver(listener.loop, [callback])
        assert await near == 1
        assert generation.grow(listener, 2)
        assert await far == 2

    asyncio.run(main())


def test_what_has_come_already_is_not_waited_for():
    async def main():
        listener, generation = reader()
        (near,) = await settled(listener.next())
        generation.grow(listener, 6)
        assert await near == 6
        assert await listener.reach(4) == 6

    asyncio.run(main())


@pytest.mark.parametrize("failure", [None, RuntimeError("gone")])
def test_the_end_is_told_to_all(failure):
    async def main():
        listener, generation = reader()
        waiters = await settled(listener.reach(99), listener.last(), listener.next())
        generation.failure = failure
        generation.grow(listener, 7, finished=True)
        ends = await asyncio.gather(*waiters, return_exceptions=True)
        assert ends == [failure or 7] * 3
        if failure is None:
            assert await listener.next() is None

    asyncio.run(main())
