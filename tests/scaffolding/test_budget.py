"""One ledger for everything that a method does inside."""

import pytest

from forethought.errors import BudgetExceeded, ParameterError
from forethought.methods import MajorityVoteController
from forethought.outputs import Usage
from forethought.scaffolding import (
    Budget,
    Controller,
    GenerationTask,
    NativeGenerationController,
    ParallelProcess,
    Reply,
    ScriptedWorker,
    StreamGenerationTask,
    TaskStatus,
    Worker,
    current_scope,
)
from forethought.scaffolding.budget import Ledger
from scripted import TAG, answer


def test_a_single_generation_ends_exactly_at_the_budget():
    worker = ScriptedWorker(["x" * 100])
    result = answer(NativeGenerationController(), worker, budget=Budget(tokens=30))
    assert (len(result.output.text), result.output.finish_reason) == (30, "length")
    assert result.usage.completion_tokens == 30


def test_the_smaller_of_budget_and_max_tokens_counts():
    for most, expected in ((100, 30), (10, 10)):
        worker = ScriptedWorker(["x" * 200])
        controller = NativeGenerationController({"max_tokens": most})
        result = answer(controller, worker, budget=Budget(tokens=30))
        assert len(result.output.text) == expected


def test_what_comes_after_the_budget_is_spent_is_refused():
    class Twice(Controller):
        def process(self, tasks, **kwargs):
            native = NativeGenerationController()
            yield from native.process(tasks)
            yield from native.process(tasks)

    worker = ScriptedWorker(lambda p, i: "x" * 20)
    with pytest.raises(BudgetExceeded, match="budget of 20 tokens is spent"):
        answer(Twice(), worker, budget=Budget(tokens=20))
    assert len(worker.calls) == 1


def test_samples_in_flight_are_stopped_when_together_they_overspend():
    worker = ScriptedWorker(lambda p, i: Reply("x" * 1000, seconds_per_token=0.001))
    controller = MajorityVoteController(NativeGenerationController(), 4)
    result = None
    with pytest.raises(BudgetExceeded):
        result = answer(controller, worker, budget=Budget(tokens=100))
    assert result is None
    assert all(call.ended == "cancelled" for call in worker.calls)
    assert 100 < sum(call.task.usage.completion_tokens for call in worker.calls) <= 104


def test_a_branch_that_may_fail_does_not_hide_that_the_budget_is_spent():
    class Two(Controller):
        def process(self, tasks, **kwargs):
            copies = [[tasks[0].copy()] for _ in range(2)]
            yield ParallelProcess([NativeGenerationController()] * 2, copies, None, "drop")
            tasks[0].output_str = "as if nothing had happened"

    worker = ScriptedWorker(lambda p, i: Reply("x" * 1000, seconds_per_token=0.001))
    with pytest.raises(BudgetExceeded):
        answer(Two(), worker, budget=Budget(tokens=50))


def test_a_method_may_catch_it_and_answer_with_what_it_has():
    def script(prompt, index):
        text = r"\boxed{7}" if index == 0 else "x" * 1000
        return Reply(text, seconds_per_token=0.001)

    controller = MajorityVoteController(NativeGenerationController(), 4)
    result = answer(controller, ScriptedWorker(script), budget=Budget(tokens=200))
    assert result.output.text == r"\boxed{7}"


def test_calls_are_counted_over_all_nested_methods():
    controller = MajorityVoteController(NativeGenerationController(), 4)
    worker = ScriptedWorker(lambda p, i: Reply("no answer", delay=0.05))
    with pytest.raises(BudgetExceeded, match="budget of 3 calls"):
        answer(controller, worker, budget=Budget(calls=3))
    assert len(worker.calls) == 3


def test_a_stream_is_one_call_however_many_steps_it_takes():
    class Stepper(Controller):
        def process(self, tasks, **kwargs):
            task = StreamGenerationTask(input_str="p", worker_tag=TAG, streaming_step=1)
            while not task.end_flag:
                yield [task]
            tasks[0].result = task.result

    worker = ScriptedWorker(["abcd"])
    assert answer(Stepper(), worker, budget=Budget(calls=1, tokens=4)).output.text == "abcd"


def test_seconds_end_what_is_in_flight():
    worker = ScriptedWorker([Reply("x", delay=60)])
    with pytest.raises(BudgetExceeded, match="seconds"):
        answer(NativeGenerationController(), worker, budget=Budget(seconds=0.1))
    assert worker.calls[0].ended == "cancelled"


def test_controllers_can_read_what_is_left():
    class Curious(Controller):
        def process(self, tasks, **kwargs):
            task = GenerationTask(input_str="p", worker_tag=TAG)
            yield [task]
            tasks[0].output_str = str(current_scope().ledger.tokens_left)

    assert answer(Curious(), ScriptedWorker(["abc"]), budget=Budget(tokens=10)).output.text == "7"


def test_a_worker_that_does_not_count_is_counted_by_its_output():
    class Plain(Worker):
        async def handle(self, task):
            task.output_str, task.output_tokens = "abc", [1, 2, 3]
            return TaskStatus.SUCCESS

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    result = answer(NativeGenerationController(), Plain())
    assert result.usage.completion_tokens == 3


def test_recording_the_same_usage_again_counts_only_what_was_added():
    ledger, usage = Ledger(Budget()), Usage()
    for total in (3, 3, 5):
        usage.completion_tokens = total
        ledger.record(usage)
    ledger.record(Usage(completion_tokens=1))
    assert ledger.usage.completion_tokens == 6


@pytest.mark.parametrize("field", ["tokens", "calls", "seconds"])
def test_a_limit_below_one_is_refused(field):
    with pytest.raises(ParameterError, match=f"invalid budget of {field}"):
        Budget(**{field: 0})


@pytest.mark.parametrize("limit", [{"tokens": 2.5}, {"calls": 1.0}, {"tokens": "9"}])
def test_tokens_and_calls_are_whole_numbers(limit):
    with pytest.raises(ParameterError, match=f"invalid budget of {next(iter(limit))}"):
        Budget(**limit)
