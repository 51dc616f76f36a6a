"""Whose turn it is where work waits for a few workers."""

import pytest

from forethought.llm.fair_queue import FairQueue


@pytest.fixture
def queue():
    return FairQueue(lambda item: item[0], lambda item: item[1])


def test_the_smallest_item_and_the_oldest_come_by_turns(queue):
    for size in (90, 80, 70, 3, 60, 2):
        queue.push(("a", size))
    assert [queue.take()[1] for _ in range(6)] == [2, 90, 3, 80, 60, 70]


def test_the_tenant_of_which_the_fewest_run_comes_first(queue):
    for number in range(4):
        queue.push(("a", number))
    first = queue.take()
    queue.push(("b", 1000))
    assert queue.take() == ("b", 1000)
    queue.ended(first)
    assert queue.take()[0] == "a"


def test_an_item_that_is_taken_out_does_not_run(queue):
    queue.push(("a", 1))
    queue.push(("a", 2))
    queue.remove(("a", 1))
    assert ("a", 1) not in queue
    assert queue.take() == ("a", 2)
    assert not queue
