"""Many branches: made when they begin, a few in each turn of the loop, and so many at once."""

import asyncio
import itertools

import pytest

from forethought.errors import TaskError
from forethought.methods.stack import stack
from forethought.scaffolding import (
    AsCompleted,
    Branch,
    Controller,
    GenerationTask,
    NativeGenerationController,
    ParallelProcess,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
    Worker,
)
from forethought.scaffolding.branch_limit import MAX_BRANCHES
from forethought.scaffolding.controller import sampled
from scripted import TAG, answer


class Counted(NativeGenerationController):
    """Counts its clones."""

    num_clones = 0

    def clone(self):
        type(self).num_clones += 1
        return super().clone()


def counted():
    return type("Fresh", (Counted,), {"num_clones": 0})()


def test_samples_are_cloned_when_they_begin():
    controller, task = counted(), GenerationTask(input_str="p")
    branches = sampled(controller, [task], 1000)
    assert controller.num_clones == 0
    assert branches[7].tasks[0] is branches[7].tasks[0] is not task
    assert branches[7].controller is branches[7].controller is not controller
    assert controller.num_clones == 1


def test_a_vote_that_is_decided_makes_no_further_samples():
    controller = counted()
    vote = stack("majority_vote@1000", innermost=controller, concurrency=2)
    worker = ScriptedWorker(lambda prompt, index: r"\boxed{1}")
    assert answer(vote, worker).outputs[0].text == r"\boxed{1}"
    assert controller.num_clones < 600


class Nested(Controller):
    """Branches within branches."""

    def __init__(self, *widths):
        super().__init__()
        self.widths = widths

    def process(self, tasks, **kwargs):
        tasks[0].worker_tag = TAG
        if not self.widths:
            yield tasks
            return
        copies = [[task.copy() for task in tasks] for _ in range(self.widths[0])]
        yield ParallelProcess([Nested(*self.widths[1:])] * self.widths[0], copies)
        tasks[0].output_str = "".join(each[0].output_str for each in copies)


class Crowd(Worker):
    """Counts the tasks that it has at once."""

    num_now = num_most = 0

    async def generation_handler(self, task):
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        for _ in range(20):
            await asyncio.sleep(0)
        self.num_now -= 1
        task.output_str = "x"

    task_handlers = {GenerationTask: generation_handler}  # noqa: RUF012


def test_branches_within_branches_all_run_and_not_all_at_once(monkeypatch):
    monkeypatch.setattr("forethought.scaffolding.branch_limit.MAX_BRANCHES", 10)
    monkeypatch.setattr("forethought.scaffolding.branch_limit.MIN_BRANCHES", 2)
    worker = Crowd()
    assert answer(Nested(4, 4, 4), worker).outputs[0].text == "x" * 64
    assert 1 < worker.num_most <= 14


def test_requests_share_the_branches(monkeypatch):
    monkeypatch.setattr("forethought.scaffolding.branch_limit.MAX_BRANCHES", 40)
    monkeypatch.setattr("forethought.scaffolding.branch_limit.MIN_BRANCHES", 2)
    worker = Crowd()

    async def results_of_requests_that_begin_together():
        async with ScaffoldingLlm(Nested(30), {TAG: worker}) as llm:
            return await asyncio.gather(*[llm.generate_async("p") for _ in range(8)])

    results = asyncio.run(results_of_requests_that_begin_together())
    assert all(result.outputs[0].text == "x" * 30 for result in results)
    assert worker.num_most <= 40


def test_a_race_begins_further_branches_as_others_end(monkeypatch):
    monkeypatch.setattr("forethought.scaffolding.branch_limit.MAX_BRANCHES", 3)
    monkeypatch.setattr("forethought.scaffolding.branch_limit.MIN_BRANCHES", 2)

    class Race(Controller):
        def process(self, tasks, **kwargs):
            copies = [task.copy() for task in tasks * 10]
            inner = NativeGenerationController()
            with AsCompleted([Branch(inner, [copy]) for copy in copies]) as running:
                while running:
                    yield running
            tasks[0].output_str = "".join(copy.output_str for copy in copies)

    worker = ScriptedWorker(lambda prompt, index: "x")
    assert answer(Race(), worker).outputs[0].text == "x" * 10


def test_a_failure_among_many_branches_stops_the_making_of_the_rest():
    controller = counted()
    vote = stack(f"majority_vote@{MAX_BRANCHES}", innermost=controller)

    def failing(prompt, index):
        return Reply("", error=ConnectionError("no"))

    with pytest.raises(TaskError, match="no"):
        answer(vote, ScriptedWorker(failing))
    assert controller.num_clones < MAX_BRANCHES // 2


async def turns_of(vote, worker):
    """The most samples that began within one turn of the event loop."""
    began = [0]

    async def watch():
        while True:
            await asyncio.sleep(0)
            began.append(len(worker.calls))

    llm = ScaffoldingLlm(vote, {TAG: worker})
    watching = asyncio.create_task(watch())
    await llm.generate_async("p")
    watching.cancel()
    await llm.ashutdown()
    return max(after - before for before, after in itertools.pairwise(began))


def test_the_event_loop_turns_while_samples_are_made():
    worker = ScriptedWorker(lambda prompt, index: r"\boxed{1}")
    vote = stack("majority_vote@12+majority_vote@12")
    assert asyncio.run(turns_of(vote, worker)) <= 32


def test_a_request_that_is_aborted_makes_no_further_samples():
    controller = counted()
    worker = ScriptedWorker(lambda prompt, index: Reply("x", delay=1e6))

    async def run():
        llm = ScaffoldingLlm(stack("majority_vote@1000", innermost=controller), {TAG: worker})
        result = llm.generate_async("p")
        while not worker.calls:
            await asyncio.sleep(0)
        result.abort()
        while not result.finished:
            await asyncio.sleep(0)
        await llm.ashutdown()

    asyncio.run(run())
    assert controller.num_clones < 500
