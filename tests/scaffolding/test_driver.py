"""What a controller may yield, and what it gets back: waiting, failing, cancelling."""

import asyncio
import concurrent.futures
import threading
import time

import pytest

from forethought.errors import (
    BudgetExceeded,
    ParameterError,
    RequestCancelled,
    RequestTimeout,
    TaskError,
    UsageError,
    WorkerTagError,
)
from forethought.scaffolding import (
    AsCompleted,
    Branch,
    Budget,
    ComputeTask,
    Controller,
    Delta,
    FirstDone,
    GenerationTask,
    NativeGenerationController,
    ParallelProcess,
    Reply,
    RewardTask,
    ScaffoldingLlm,
    ScriptedWorker,
    Stage,
    StreamGenerationTask,
    Task,
    TaskStatus,
    Worker,
)
from scripted import TAG, Together, answer, has_begun


def ask(prompt, **fields):
    return GenerationTask(input_str=prompt, worker_tag=TAG, **fields)


class Play(Controller):
    """Runs a generator function and keeps what it returns."""

    def __init__(self, play):
        super().__init__()
        self.play = play

    def process(self, tasks, **kwargs):
        tasks[0].output_str = repr((yield from self.play()))


def played(play, worker, **options):
    return eval(answer(Play(play), worker, **options).output.text)


def test_tasks_of_a_list_run_at_the_same_time_and_all_are_waited_for():
    def play():
        tasks = [ask(f"{i}") for i in range(5)]
        yield tasks
        return [task.output_str for task in tasks]

    assert played(play, Together(5)) == ["0", "1", "2", "3", "4"]


def test_an_empty_list_resumes_at_once():
    def play():
        yield []
        return "on"

    assert played(play, ScriptedWorker()) == "on"


@pytest.mark.parametrize("make", [list, lambda: Delta("on "), lambda: Stage("voted")])
@pytest.mark.parametrize(
    ("limit", "ended"),
    [({"timeout": 0.2}, RequestTimeout), ({"budget": Budget(seconds=0.2)}, BudgetExceeded)],
)
def test_a_controller_that_yields_nothing_to_run_holds_nothing_up(make, limit, ended):
    def play():
        latest = time.monotonic() + (20 if "timeout" in limit or make is list else 0.5)
        while time.monotonic() < latest:
            yield make()
        return "it was not ended"

    if ended is BudgetExceeded and make is not list:
        assert played(play, ScriptedWorker(), **limit) == "it was not ended", "it runs nothing"
    else:
        with pytest.raises(ended):
            played(play, ScriptedWorker(), **limit)


def test_a_task_that_is_twice_in_a_list_is_refused():
    def play():
        task = ask("p")
        with pytest.raises(UsageError, match="twice"):
            yield [task, task]
        yield [task]
        return task.output_str

    assert played(play, ScriptedWorker(["once"])) == "once"


def test_a_failure_is_raised_at_the_yield_with_task_status_and_cause():
    cause = OSError("gone")

    def play():
        task = ask("p")
        try:
            yield [task]
        except TaskError as error:
            return error.task is task, error.status is task.status, error.__cause__ is cause

    worker = ScriptedWorker([Reply("", error=cause)])
    assert played(play, worker) == (True, True, True)


def test_a_failure_that_no_one_catches_reaches_the_caller():
    worker = ScriptedWorker([Reply("", error=OSError("gone"))])
    with pytest.raises(TaskError, match=r"GenerationTask failed: OSError: gone") as caught:
        answer(NativeGenerationController(), worker)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_failure_cancels_the_tasks_beside_it():
    def play():
        slow, bad = ask("slow"), ask("bad")
        with pytest.raises(TaskError):
            yield [slow, bad]
        return [call.ended for call in worker.calls]  # already, not only at the end

    worker = ScriptedWorker(
        {"slow": Reply("x" * 1000, seconds_per_token=0.01), "bad": Reply("", error=OSError())}
    )
    assert played(play, worker) == ["cancelled", "failed"]


def test_a_task_may_say_that_its_failure_is_only_noted():
    def play():
        bad, good = ask("bad", on_failure="drop"), ask("good")
        yield [bad, good]
        return bad.status.name, type(bad.error).__name__, good.output_str

    worker = ScriptedWorker({"bad": Reply("", error=OSError()), "good": "fine"})
    assert played(play, worker) == ("WORKER_EXECEPTION", "TaskError", "fine")


def test_a_word_that_says_nothing_about_failures_is_refused():
    def play():
        yield [ask("p", on_failure="ignore")]

    worker = ScriptedWorker(["x"])
    with pytest.raises(ParameterError, match="on_failure"):
        played(play, worker)
    assert worker.calls == []
    with pytest.raises(ParameterError, match="on_failure"):
        Branch(NativeGenerationController(), [ask("p")], on_failure="ignore")


def test_a_status_other_than_success_is_a_failure():
    class Lazy(Worker):
        async def handle(self, task):
            return TaskStatus.WORKER_EXECEPTION

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    with pytest.raises(TaskError, match="Lazy reports worker_exception"):
        answer(NativeGenerationController(), Lazy())


def test_a_task_that_its_worker_does_not_know_is_a_failure_that_says_so():
    def play():
        yield [RewardTask(worker_tag=TAG)]

    with pytest.raises(TaskError, match="ScriptedWorker has no handler for it") as caught:
        answer(Play(play), ScriptedWorker())
    assert caught.value.status is TaskStatus.WORKER_NOT_SUPPORTED


def test_an_unknown_worker_tag_names_those_there_are():
    def play():
        yield [GenerationTask(input_str="p", worker_tag="judge")]

    with pytest.raises(WorkerTagError, match=r"no worker serves 'judge'.*'generation'"):
        answer(Play(play), ScriptedWorker())


def test_a_task_without_a_worker_tag_is_told_how_to_get_one():
    def play():
        yield [GenerationTask(input_str="p")]

    with pytest.raises(WorkerTagError, match=r"a task has no worker_tag.*Set task\.worker_tag"):
        answer(Play(play), ScriptedWorker())


def test_a_users_mistake_found_by_a_worker_is_raised_as_it_is():
    with pytest.raises(UsageError, match="the script has no answer"):
        answer(NativeGenerationController(), ScriptedWorker({"q": "a"}))


def test_something_that_cannot_be_run_is_refused_at_the_yield():
    def play():
        with pytest.raises(UsageError, match="a controller yielded int"):
            yield 3
        return "on"

    assert played(play, ScriptedWorker()) == "on"


def test_what_is_in_flight_is_met_in_the_order_in_which_it_finishes():
    def play():
        tasks = [ask("c"), ask("a"), ask("b")]
        seen = []
        with AsCompleted(tasks) as running:
            while running:
                seen.append((yield running).output_str)
        return seen

    delays = {"a": 0.0, "b": 0.1, "c": 0.2}
    worker = ScriptedWorker(lambda prompt, _: Reply(prompt, delay=delays[prompt]))
    assert played(play, worker) == ["a", "b", "c"]


def test_more_can_be_put_in_flight_while_the_rest_goes_on():
    def play():
        slow, seen = ask("slow"), []
        with AsCompleted([slow, ask("0")]) as running:
            while running:
                done = yield running
                seen.append(done.output_str)
                if done is not slow and len(seen) < 3:
                    running.add(ask(str(len(seen))))
        return seen

    worker = ScriptedWorker(lambda p, _: Reply(p, delay=1.0 if p == "slow" else 0.0))
    assert played(play, worker) == ["0", "1", "2", "slow"]


def test_leaving_the_block_cancels_what_is_left():
    def play():
        with AsCompleted([ask("slow"), ask("fast")]) as running:
            done = yield running
        return done.output_str

    worker = ScriptedWorker(lambda p, _: Reply(p, delay=60 if p == "slow" else 0.0))
    assert played(play, worker) == "fast"
    assert [call.ended for call in worker.calls] == ["cancelled", "done"]


def test_a_failure_in_flight_can_be_caught_and_the_rest_goes_on():
    def play():
        seen = []
        with AsCompleted([ask("bad"), ask("good")]) as running:
            while running:
                try:
                    seen.append((yield running).output_str)
                except TaskError:
                    seen.append("failed")
        return seen

    worker = ScriptedWorker({"bad": Reply("", error=OSError()), "good": Reply("good", delay=0.5)})
    assert played(play, worker) == ["failed", "good"]


def test_waiting_for_nothing_is_refused():
    def play():
        with pytest.raises(UsageError, match="nothing is in flight"):
            yield AsCompleted()
        return "on"

    assert played(play, ScriptedWorker()) == "on"


def test_the_same_task_cannot_be_in_flight_twice():
    task = ask("p")
    with pytest.raises(UsageError, match="in flight twice"):
        AsCompleted([task, task])


def test_the_first_done_wins_and_the_others_are_cancelled():
    def play():
        winner = yield FirstDone([ask("slow"), ask("fast")])
        return winner.output_str

    worker = ScriptedWorker(lambda p, _: Reply(p, delay=60 if p == "slow" else 0.0))
    assert played(play, worker) == "fast"
    assert worker.calls[0].ended == "cancelled"


def test_branches_run_at_the_same_time_and_return_what_their_process_returns():
    class Echo(Controller):
        def process(self, tasks, **kwargs):
            tasks[0].worker_tag = TAG
            yield tasks
            return tasks[0].output_str + kwargs.get("mark", "")

    def play():
        echo = Echo()
        first, second = Branch(echo, [ask("a")], {"mark": "!"}), Branch(echo, [ask("b")])
        seen = []
        with AsCompleted([first, second]) as running:
            while running:
                seen.append((yield running).result)
        return seen

    assert played(play, ScriptedWorker(lambda p, _: p)) == ["a!", "b"]


def test_a_failing_branch_cancels_the_branches_beside_it():
    native = NativeGenerationController()

    def play():
        with pytest.raises(TaskError):
            yield ParallelProcess([native] * 2, [[ask("slow")], [ask("bad")]], [{}, {}])
        return "on"

    worker = ScriptedWorker({"slow": Reply("x", delay=60), "bad": Reply("", error=OSError())})
    assert played(play, worker) == "on"
    assert worker.calls[0].ended == "cancelled"


def test_a_failing_branch_may_be_dropped():
    native = NativeGenerationController()

    def play():
        tasks = [ask("bad"), ask("good")]
        parallel = ParallelProcess([native] * 2, [[task] for task in tasks], None, "drop")
        yield parallel
        return tasks[1].output_str, [type(b.error).__name__ for b in parallel.branches]

    worker = ScriptedWorker({"bad": Reply("", error=OSError()), "good": "fine"})
    assert played(play, worker) == ("fine", ["TaskError", "NoneType"])


def test_branches_nest():
    class Twice(Controller):
        def __init__(self, inner):
            self.inner = inner  # without super().__init__(): allowed

        def process(self, tasks, **kwargs):
            copies = [[task.copy()] for task in tasks for _ in range(2)]
            yield ParallelProcess([self.inner] * len(copies), copies, [{}] * len(copies))
            tasks[0].output_str = "".join(copy[0].output_str for copy in copies)

    inner = NativeGenerationController()
    assert answer(Twice(Twice(inner)), ScriptedWorker(lambda p, i: f"{i}")).output.text == "0123"


def test_lists_of_branches_that_differ_in_length_are_refused():
    native = NativeGenerationController()
    with pytest.raises(UsageError, match="2 controllers, 1 task lists"):
        ParallelProcess([native] * 2, [[ask("a")]], [{}])


def test_slow_work_is_done_off_the_event_loop():
    said, all_three = threading.Event(), threading.Barrier(3)

    def slow(x, y=0):
        all_three.wait(60)  # at the same time as each other
        said.wait(60)  # and while the loop goes on
        return x + y, threading.current_thread().name

    def script(prompt, index):
        said.set()
        return "x"

    def play():
        sums = [ComputeTask(slow, i, y=1) for i in range(3)]
        with AsCompleted([*sums, ask("p")]) as running:
            while running:
                yield running
        return [task.result for task in sums]

    found = played(play, ScriptedWorker(script))
    assert [result for result, _ in found] == [1, 2, 3]
    assert all(thread.startswith("forethought-compute") for _, thread in found)


def test_what_slow_work_raises_is_raised_at_the_yield():
    def play():
        try:
            yield [ComputeTask(int, "x")]
        except ValueError as error:
            return str(error)

    assert "invalid literal" in played(play, ScriptedWorker())


def test_a_stream_comes_back_after_each_step_until_its_end():
    def play():
        task = StreamGenerationTask(input_str="p", worker_tag=TAG, streaming_step=4)
        seen = []
        while not task.end_flag:
            yield [task]
            seen.append((task.output_str, task.finish_reason))
        return seen

    worker = ScriptedWorker(["abcdefghij"])
    assert played(play, worker) == [
        ("abcd", None),
        ("abcdefgh", None),
        ("abcdefghij", "stop"),
    ]
    assert len(worker.calls) == 1


def test_a_stream_ends_when_its_cancel_flag_is_set():
    def play():
        task = StreamGenerationTask(input_str="p", worker_tag=TAG, streaming_step=4)
        yield [task]
        task.cancel_flag = True
        yield [task]
        return task.end_flag, task.finish_reason, task.output_str

    worker = ScriptedWorker(["abcdefghij"])
    assert played(play, worker) == (True, "abort", "abcd")
    assert worker.calls[0].ended == "cancelled"


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_is_left_between_two_steps_is_ended_all_the_same(begun):
    """Between two steps: not waited for yet, or finished with a result that was not taken."""

    def play():
        stream = StreamGenerationTask(input_str="p", worker_tag=TAG, streaming_step=1)
        with AsCompleted([stream]) as running:
            yield running
            running.add(stream)
            if begun:
                running.add(ComputeTask(int, "5"))
                while (yield running) is stream:
                    running.add(stream)
        yield [ComputeTask(time.sleep, 0.01)]
        yield [ComputeTask(time.sleep, 0.01)]
        return stream.end_flag, worker.calls[0].ended

    worker = ScriptedWorker(["abcdefghij" * 500])
    assert played(play, worker) == (True, "cancelled")


def test_a_stream_that_is_taken_back_into_its_race_goes_on():
    def play():
        stream = StreamGenerationTask(input_str="p", worker_tag=TAG, streaming_step=4)
        with AsCompleted([stream]) as running:
            yield running
            running.add(stream)
            running.cancel(stream)
            running.add(stream)
            yield running
        return stream.output_str

    assert played(play, ScriptedWorker(["abcdefghij"])) == "abcdefgh"


def test_the_generator_is_closed_when_the_request_is_cancelled():
    closed = threading.Event()

    def play():
        try:
            yield [ask("p")]
        finally:
            closed.set()

    worker = ScriptedWorker([Reply("x", delay=60)])
    with ScaffoldingLlm(Play(play), {"generation": worker}) as llm:
        result = llm.generate_async("p")
        assert has_begun(worker)
        with pytest.raises(TimeoutError):
            result.result(timeout=0.1)
        assert closed.wait(60)
    assert worker.calls[0].ended == "cancelled"


def test_a_task_class_without_init_of_its_base_runs():
    class Plain(Task):
        def __init__(self, number):
            self.number = number
            self.worker_tag = TAG

    class Doubler(Worker):
        async def handle(self, task):
            task.number *= 2
            return TaskStatus.SUCCESS

        task_handlers = {Plain: handle}  # noqa: RUF012

    def play():
        task = Plain(4)
        yield [task]
        return task.number, task.status.name

    assert played(play, Doubler()) == (8, "SUCCESS")


# ---- what ends more than a task ------------------------------------------------------------------


class Ends(Worker):
    """A worker whose every task, but "good", is ended by something that is no ``Exception``."""

    def __init__(self, end):
        self.end = end

    async def handle(self, task):
        task.output_str = task.input_str
        if task.input_str != "good":
            await self.end()

    task_handlers = {GenerationTask: handle}  # noqa: RUF012


async def a_cancelled_inner_task():
    inner = asyncio.create_task(asyncio.sleep(60))
    inner.cancel()
    await inner


async def cancelled_by_itself():
    raise asyncio.CancelledError


async def cancels_its_own_task():
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(60)


async def cancels_its_own_task_and_returns():
    current = asyncio.current_task()
    assert current is not None
    current.cancel()


def raises(kind):
    async def end():
        await asyncio.sleep(0)
        raise kind("on purpose")

    return end


ENDS = [
    a_cancelled_inner_task,
    cancelled_by_itself,
    cancels_its_own_task,
    cancels_its_own_task_and_returns,
    *map(raises, [KeyboardInterrupt, SystemExit, GeneratorExit, BaseException]),
]


@pytest.mark.parametrize("end", ENDS)
def test_a_worker_that_is_ended_fails_its_task_and_no_more(end):
    def play():
        with pytest.raises(TaskError, match="GenerationTask failed") as caught:
            yield [ask("bad"), ask("good")]
        bad, good = ask("bad", on_failure="drop"), ask("good")
        yield [bad, good]
        again = ask("bad")
        with AsCompleted([again]) as running, pytest.raises(TaskError):
            yield running
        native = NativeGenerationController()
        parallel = ParallelProcess([native] * 2, [[ask("bad")], [ask("good")]], None, "drop")
        yield parallel
        return (
            caught.value.task.input_str,
            bad.status.name,
            type(bad.error).__name__,
            good.output_str,
            [type(branch.error).__name__ for branch in parallel.branches],
        )

    failed = "WORKER_EXECEPTION", "TaskError"
    assert played(play, Ends(end)) == ("bad", *failed, "good", ["TaskError", "NoneType"])


def gives_up(kind):
    def work():
        raise kind("on purpose")

    return work


@pytest.mark.parametrize(
    "work",
    [
        *map(gives_up, [asyncio.CancelledError, KeyboardInterrupt, SystemExit, StopIteration]),
    ],
)
def test_slow_work_that_is_ended_fails_its_task_and_no_more(work):
    def play():
        with pytest.raises(TaskError, match="ComputeTask failed"):
            yield [ComputeTask(work)]
        dropped = ComputeTask(work)
        dropped.on_failure = "drop"
        yield [dropped]
        return type(dropped.error).__name__

    assert played(play, ScriptedWorker()) == "TaskError"


def test_slow_work_that_waits_for_its_cancelled_work_fails():
    future = concurrent.futures.Future()
    future.cancel()

    def play():
        with pytest.raises(concurrent.futures.CancelledError):
            yield [ComputeTask(future.result)]
        return "on"

    assert played(play, ScriptedWorker()) == "on"


def test_a_failure_on_the_way_out_of_a_scope_fails_nothing_else(caplog):
    class Untidy(Worker):
        async def handle(self, task):
            task.output_str = "fine"

        async def on_scope_end(self, scope_id):
            raise asyncio.CancelledError if ":" in scope_id else KeyboardInterrupt

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    def play():
        task, native = ask("p"), NativeGenerationController()
        yield ParallelProcess([native], [[task]])
        return task.output_str

    assert played(play, Untidy()) == "fine"
    assert caplog.text.count("failed to end") == 2


def test_workers_hear_of_the_end_of_a_request_that_is_aborted_while_it_ends():
    """The handler of its last task takes long to be cancelled, and the abort comes meanwhile."""
    cancelled, aborted, ended = threading.Event(), threading.Event(), []

    class Slow(Worker):
        async def handle(self, task):
            if task.input_str == "fast":
                return
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()
                while not aborted.is_set():
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.01)

        async def on_scope_end(self, scope_id):
            ended.append(scope_id)

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    def play():
        with AsCompleted([ask("slow"), ask("fast")]) as running:
            yield running
            return "on"

    with ScaffoldingLlm(Play(play), {TAG: Slow()}) as llm:
        result = llm.generate_async("")
        assert cancelled.wait(60)
        result.abort()
        aborted.set()
        with pytest.raises(RequestCancelled):
            result.result(timeout=60)
    assert len(ended) == 1
