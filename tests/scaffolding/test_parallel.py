"""How many branches begin, and branches that draw samples."""

import pytest

from forethought.answers.answers import AnswerPool
from forethought.scaffolding import GenerationTask, NativeGenerationController
from forethought.scaffolding.controller import sampled
from forethought.scaffolding.parallel import num_to_begin


@pytest.mark.parametrize(
    ("concurrency", "waiting", "running", "ended", "expected"),
    [
        (None, 5, 2, 0, 5),
        (3, 5, 2, 1, 1),
        (3, 5, 3, 0, 0),
        (3, 1, 0, 4, 1),
        ("doubling", 8, 0, 0, 2),
        ("doubling", 8, 1, 1, 0),
        ("doubling", 8, 0, 4, 4),
        ("doubling", 3, 0, 4, 3),
    ],
)
def test_branches_begin_as_far_as_there_is_room(concurrency, waiting, running, ended, expected):
    assert num_to_begin(concurrency, waiting, running, ended, first=2) == expected


def test_samples_differ_in_their_seeds_and_leave_the_task_alone():
    task = GenerationTask(input_str="Q", seed=1)
    branches = sampled(NativeGenerationController(), [task], 3)
    seeds = {branch.tasks[0].seed for branch in branches}
    assert len(seeds) == 3
    assert task.seed == 1
    assert len({id(branch.controller) for branch in branches}) == 3


def test_votes_wait_for_earlier_ones_where_the_order_of_answers_decides():
    def same(one, other):
        return one == other

    pool, votes = AnswerPool(same), {2: "7", 0: None}
    assert drained(pool.adding_in_order(votes, [1])) == {0: None}
    assert votes == {2: "7"}
    assert drained(pool.adding_in_order(votes, [])) == {2: "7"}
    assert pool.tally == {"7": 1}
    assert drained(AnswerPool().adding_in_order({2: "7"}, [1])) == {2: "7"}


def drained(process):
    """What a generator returns, the tasks that it yields run."""
    while True:
        try:
            for task in next(process):
                task.result = task.function(*task.args)
        except StopIteration as stop:
            return stop.value
