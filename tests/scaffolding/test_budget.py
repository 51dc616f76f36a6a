"""One budget for everything that a request runs."""

import asyncio
import contextlib
import threading

import pytest

from forethought.errors import BudgetExceeded, ParameterError
from forethought.methods import MajorityVoteController
from forethought.outputs import Usage
from forethought.scaffolding import (
    AsCompleted,
    Budget,
    ComputeTask,
    Controller,
    ExecutionScope,
    GenerationTask,
    NativeGenerationController,
    ParallelProcess,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
    StreamGenerationTask,
    TaskStatus,
    Worker,
    current_scope,
    replay,
)
from forethought.scaffolding.budget import BudgetAccount
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
    result = answer(Twice(), worker, budget=Budget(tokens=20))
    assert (len(worker.calls), result.spent_budget) == (1, "tokens")
    assert (result.output.text, result.output.finish_reason) == ("x" * 20, "stop")


def test_samples_in_flight_are_stopped_when_together_they_overspend():
    worker = ScriptedWorker(lambda p, i: Reply("x" * 1000, seconds_per_token=0.001))
    controller = MajorityVoteController(NativeGenerationController(), 4)
    result = answer(controller, worker, budget=Budget(tokens=100))
    assert all(call.ended == "cancelled" for call in worker.calls)
    assert sum(len(text or "") for text in result.output.candidates) == 100
    assert (result.usage.completion_tokens, result.usage.discarded) == (100, 1)
    assert (result.output.finish_reason, result.spent_budget) == ("length", "tokens")


def test_a_vote_counts_truncated_samples_where_none_is_complete():
    texts = [r"\boxed{6}", r"\boxed{7}", r"\boxed{7}"]
    worker = ScriptedWorker(
        [Reply(f"{text} {'x' * 999}", seconds_per_token=0.001) for text in texts]
    )
    controller = MajorityVoteController(NativeGenerationController(), 3)
    output = answer(controller, worker, budget=Budget(tokens=90)).output
    assert output.meta["majority_vote"]["answer"] == "7"
    assert output.text.startswith(texts[1])


def test_a_fork_that_the_budget_cuts_is_answered_together_with_what_it_continues():
    class Continues(Controller):
        def process(self, tasks, **kwargs):
            first = tasks[0].copy()
            first.worker_tag = TAG
            yield [first]
            yield [first.fork(" and ", max_tokens=100)]
            yield [first.fork(" more")]

    worker = ScriptedWorker({"p": "one", "pone and ": "x" * 50})
    output = answer(Continues(), worker, budget=Budget(tokens=10)).output
    assert (output.text, output.finish_reason) == ("one and xxxxxxx", "length")


def test_a_judge_s_text_is_never_the_answer_of_a_spent_budget():
    class Judged(Controller):
        def process(self, tasks, **kwargs):
            sample = tasks[0].copy()
            sample.worker_tag = TAG
            yield [sample]
            yield [GenerationTask(input_str="Judge it: p", worker_tag=TAG)]
            yield [GenerationTask(input_str="Once more: p", worker_tag=TAG)]

    worker = ScriptedWorker({"p": "one", "Judge it: p": "x" * 50})
    assert answer(Judged(), worker, budget=Budget(tokens=10)).output.text == "one"


def test_an_aside_is_never_the_answer_of_a_request_whose_budget_is_spent():
    class Asks(Controller):
        def process(self, tasks, **kwargs):
            sample = tasks[0].copy()
            sample.worker_tag = TAG
            yield [sample]
            yield [sample.fork(" Is it right?", is_aside=True)]
            yield [sample.fork(" more")]

    worker = ScriptedWorker({"p": "one", "pone Is it right?": "x" * 50})
    assert answer(Asks(), worker, budget=Budget(tokens=10)).output.text == "one"


def test_a_branch_that_may_fail_does_not_hide_that_the_budget_is_spent():
    class Two(Controller):
        def process(self, tasks, **kwargs):
            copies = [[tasks[0].copy()] for _ in range(2)]
            yield ParallelProcess([NativeGenerationController()] * 2, copies, None, "drop")
            tasks[0].output_str = "as if nothing had happened"

    worker = ScriptedWorker(lambda p, i: Reply("x" * 1000, seconds_per_token=0.001))
    result = answer(Two(), worker, budget=Budget(tokens=50))
    assert (result.output.text, result.spent_budget) == ("x" * 25, "tokens")


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
    result = answer(controller, worker, budget=Budget(calls=3))
    assert (len(worker.calls), result.spent_budget) == (3, "calls")
    assert result.output.meta["majority_vote"]["finished"] == 3


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
    # No call, if the machine has stood still for so long.
    assert all(call.ended == "cancelled" for call in worker.calls)


def test_controllers_can_read_what_is_left():
    class Curious(Controller):
        def process(self, tasks, **kwargs):
            task = GenerationTask(input_str="p", worker_tag=TAG)
            yield [task]
            tasks[0].output_str = str(current_scope().account.tokens_left)

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
    account, usage = BudgetAccount(Budget()), Usage()
    for total in (3, 3, 5):
        usage.completion_tokens = total
        account.record(usage)
    account.record(Usage(completion_tokens=1))
    assert account.usage.completion_tokens == 6


def test_tokens_that_were_counted_too_many_are_taken_from_those_beyond_the_budget():
    account, usage, other = BudgetAccount(Budget(tokens=6)), Usage(), Usage()
    usage.completion_tokens = usage.decoded = 50
    assert account.record(usage) == 44
    other.completion_tokens = other.decoded = 5
    assert account.record(other) == 5
    assert (account.usage.completion_tokens, account.usage.discarded) == (6, 49)
    usage.completion_tokens = usage.decoded = 2
    assert account.record(usage) == 0
    assert (account.usage.completion_tokens, account.usage.discarded) == (6, 1)
    other.completion_tokens = other.decoded = 1
    assert account.record(other) == 0
    assert (account.usage.completion_tokens, account.usage.discarded) == (3, 0)
    assert (account.usage.decoded, account.spent) == (3, "tokens")


def test_the_account_of_a_scope_also_has_its_former_name():
    account = BudgetAccount(Budget())
    assert ExecutionScope("request", "", account).ledger is account


@pytest.mark.parametrize("field", ["tokens", "calls", "seconds"])
def test_a_limit_below_one_is_refused(field):
    with pytest.raises(ParameterError, match=f"invalid budget of {field}"):
        Budget(**{field: 0})


@pytest.mark.parametrize("limit", [{"tokens": 2.5}, {"calls": 1.0}, {"tokens": "9"}])
def test_tokens_and_calls_are_whole_numbers(limit):
    with pytest.raises(ParameterError, match=f"invalid budget of {next(iter(limit))}"):
        Budget(**limit)


# ---- running out, however the workers end --------------------------------------------------------


ENDS = ["returns", "waits", "swallows", "fails", "cancels itself"]


class Counting(Worker):
    """Records tokens; once they exceed the budget, it ends as ``end`` names."""

    def __init__(self, end=None, spend=30):
        self.end, self.spend = end, spend

    async def handle(self, task):
        task.output_str, task.output_tokens = "x", [1] * self.spend
        task.usage.completion_tokens += self.spend
        if self.end != "books at its end":
            current_scope().account.record(task.usage)
        if current_scope().account.exhausted is None:
            return
        if self.end == "waits":
            await asyncio.sleep(60)
        if self.end == "swallows":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        if self.end == "fails":
            try:
                await asyncio.sleep(60)
            finally:
                raise OSError("gone")
        if self.end == "cancels itself":
            asyncio.current_task().cancel()
            await asyncio.sleep(60)

    task_handlers = {GenerationTask: handle}  # noqa: RUF012


class Improver(Controller):
    """Answers with the last draft that the budget allowed."""

    def __init__(self, on_failure="raise"):
        super().__init__()
        self.on_failure = on_failure

    def process(self, tasks, **kwargs):
        best = None
        try:
            for _ in range(9):
                draft = GenerationTask("generation", on_failure=self.on_failure)
                yield [draft]
                best = draft
        except BudgetExceeded as error:
            tasks[0].output_str = f"{best and best.output_str}: {error.what}"


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize("end", [*ENDS, "books at its end"])
def test_an_exhausted_budget_reaches_the_controller_however_its_worker_ends(end, on_failure):
    result = answer(Improver(on_failure), Counting(end), budget=Budget(tokens=40))
    assert result.output.text == "x: the budget of 40 tokens is spent"


@pytest.mark.parametrize("end", ENDS)
def test_branches_beside_the_one_that_overspends_get_its_error_too(end):
    class Three(Controller):
        def process(self, tasks, **kwargs):
            native = NativeGenerationController()
            three = [GenerationTask(input_str=str(i), on_failure="drop") for i in range(3)]
            parallel = ParallelProcess([native] * 3, [[t] for t in three], None, "drop")
            with pytest.raises(BudgetExceeded):
                yield parallel
            tasks[0].output_str = " ".join(type(b.error).__name__ for b in parallel.branches)

    result = answer(Three(), Counting(end), budget=Budget(tokens=40))
    assert "BudgetExceeded" in result.output.text


def test_a_stream_ends_once_the_budget_is_spent():
    class Stubborn(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask(input_str="s", worker_tag=TAG, streaming_step=1)
            yield [stream]
            with pytest.raises(BudgetExceeded):
                yield [GenerationTask(input_str="a", worker_tag=TAG), stream]
            with pytest.raises(BudgetExceeded):
                yield [stream]
            stream.cancel_flag = True
            yield [stream]
            tasks[0].result = stream.result

    worker = ScriptedWorker({"s": "abcdefgh" * 9, "a": "x" * 8})
    result = answer(Stubborn(), worker, budget=Budget(tokens=8))
    assert (result.output.finish_reason, len(result.output.text)) == ("abort", 2)
    assert (result.usage.completion_tokens, result.usage.decoded) == (8, 9)


def test_what_a_worker_has_when_the_seconds_run_out_is_the_answer():
    class Late(Worker):
        async def handle(self, task):
            current_scope().account.expire()
            task.output_str = "in time"

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    with ScaffoldingLlm(NativeGenerationController(), Late(), trace=True) as llm:
        result = llm.generate("?", budget=Budget(seconds=60))
    assert (result.output.text, result.spent_budget) == ("in time", "seconds")
    repeated = replay(result.trace, NativeGenerationController())
    assert (repeated.output.text, repeated.spent_budget) == ("in time", "seconds")


def test_a_task_that_the_budget_stops_ends_the_slow_work_beside_it():
    done = threading.Event()

    class Mixed(Controller):
        def process(self, tasks, **kwargs):
            slow, stopped = ComputeTask(done.wait, 60), GenerationTask("generation")
            with pytest.raises(BudgetExceeded):
                yield [slow, stopped]
            done.set()
            tasks[0].output_str = f"{stopped.status.name} {type(stopped.error).__name__}"

    result = answer(Mixed(), Counting("waits"), budget=Budget(tokens=20))
    assert result.output.text == "WORKER_EXECEPTION BudgetExceeded"


def test_a_stream_that_is_being_ended_when_the_budget_runs_out_is_ended():
    class Ender(Worker):
        ended = False

        async def handle(self, task):
            task.request_handle = self
            if task.cancel_flag:
                await asyncio.sleep(0.02)
                task.end_flag = self.ended = True

        async def spend(self, task):
            task.usage.completion_tokens += 9
            await asyncio.sleep(0)
            current_scope().account.record(task.usage)
            await asyncio.sleep(60)

        task_handlers = {StreamGenerationTask: handle, GenerationTask: spend}  # noqa: RUF012

    class Leaver(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask("generation")
            yield [stream]
            stream.cancel_flag = True
            with AsCompleted([stream, GenerationTask("generation")]) as running:
                with pytest.raises(BudgetExceeded):
                    yield running
                yield running
            tasks[0].output_str = f"{stream.end_flag} {stream.error}"

    assert answer(Leaver(), Ender(), budget=Budget(tokens=5)).output.text == "True None"


def blocking(done):
    done.wait(120)


async def forever(done):
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("function", [blocking, forever])
def test_the_seconds_of_a_budget_end_a_compute_task_too(function):
    class Computes(Controller):
        def process(self, tasks, **kwargs):
            slow = ComputeTask(function, done)
            with pytest.raises(BudgetExceeded, match="seconds"):
                yield [slow]
            assert isinstance(slow.error, BudgetExceeded)
            with pytest.raises(BudgetExceeded, match="seconds"):
                yield [ComputeTask(len, "no time is left for it")]
            tasks[0].output_str = "in time"

    done = threading.Event()
    result = answer(Computes(), ScriptedWorker(), budget=Budget(seconds=0.05), timeout=60)
    done.set()
    assert result.output.text == "in time"
