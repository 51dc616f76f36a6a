"""Collections see every task of their request, and of no other one."""

import json
import logging
import time

import pytest

from forethought.methods import BestOfNController, MajorityVoteController
from forethought.scaffolding import (
    AsCompleted,
    Branch,
    ChatTask,
    ChatTokenCounter,
    ComputeTask,
    Controller,
    FirstDone,
    GenerationTask,
    GenerationTokenCounter,
    NativeChatController,
    NativeGenerationController,
    NativeRewardController,
    ParallelProcess,
    QueryCollector,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
    StreamGenerationTask,
    TaskCollection,
    TaskMetricsCollector,
    TaskTimer,
    Worker,
    with_task_collection,
)
from scripted import TAG, answer


class Witness(TaskCollection):
    def __init__(self, name="w"):
        self.name, self.seen = name, []

    def before_yield(self, tasks):
        self.seen += [f"before {task.input_str}" for task in tasks]

    def after_yield(self, tasks):
        self.seen += [f"after {task.output_str}" for task in tasks]

    def on_parallel_start(self, count):
        self.seen.append(f"start {count}")

    def on_parallel_end(self, count):
        self.seen.append(f"end {count}")


def test_stacked_collections_all_see_what_happens():
    @with_task_collection("one", Witness, name="first")
    @with_task_collection("two", Witness)
    class Watched(NativeGenerationController):
        """Its docstring."""

    assert (Watched.__name__, Watched.__doc__) == ("Watched", "Its docstring.")
    result = answer(Watched(), ScriptedWorker(["a"]), "p")
    assert result.task_collections["one"].name == "first"
    for name in ("one", "two"):
        assert result.task_collections[name].seen == ["before p", "after a"]


def test_tasks_of_parallel_branches_are_seen_from_outside():
    @with_task_collection("w", Witness)
    class Two(Controller):
        def process(self, tasks, **kwargs):
            native = NativeGenerationController()
            copies = [[GenerationTask(input_str=p)] for p in "ab"]
            yield ParallelProcess([native] * 2, copies, [{}, {}])

    seen = answer(Two(), ScriptedWorker(lambda p, i: p.upper())).task_collections["w"].seen
    assert (seen[0], seen[-1]) == ("start 2", "end 2")
    assert sorted(seen[1:-1]) == ["after A", "after B", "before a", "before b"]


def test_what_is_met_as_it_completes_is_seen_too():
    @with_task_collection("w", Witness)
    class Racer(Controller):
        def process(self, tasks, **kwargs):
            task = GenerationTask(input_str="a", worker_tag=TAG)
            branch = Branch(NativeGenerationController(), [GenerationTask(input_str="b")])
            with AsCompleted([task, branch]) as running:
                while running:
                    yield running

    seen = answer(Racer(), ScriptedWorker(lambda p, i: p.upper())).task_collections["w"].seen
    assert sorted(seen) == ["after A", "after B", "before a", "before b"]


def test_failures_pass_through_and_can_be_caught():
    @with_task_collection("w", Witness)
    class Catcher(Controller):
        def process(self, tasks, **kwargs):
            try:
                yield [GenerationTask(input_str="a", worker_tag=TAG)]
            except Exception:
                tasks[0].output_str = "caught"

    result = answer(Catcher(), ScriptedWorker([Reply("", error=OSError())]))
    assert result.output.text == "caught"


def test_the_return_value_of_process_is_kept():
    @with_task_collection("w", Witness)
    class Returning(Controller):
        def process(self, tasks, **kwargs):
            yield []
            return 5

    class Outer(Controller):
        def process(self, tasks, **kwargs):
            tasks[0].output_str = str((yield from Returning().process(tasks)))

    assert answer(Outer(), ScriptedWorker()).output.text == "5"


def test_each_request_has_collections_of_its_own():
    watched = with_task_collection("n", GenerationTokenCounter)(NativeGenerationController)
    with ScaffoldingLlm(watched(), {TAG: ScriptedWorker(lambda p, i: p)}) as llm:
        llm.enable_output_task_collection()
        results = llm.generate(["a", "bb", "ccc"])
    counts = [r.task_collections["n"].generation_token_count for r in results]
    assert counts == [1, 2, 3]


@pytest.mark.parametrize("controller", [NativeRewardController, BestOfNController])
def test_every_controller_can_be_watched(controller):
    watched = with_task_collection("w", Witness)(controller)
    native = NativeGenerationController()
    made = watched() if controller is NativeRewardController else watched(native, native)
    assert made.task_collections["w"].seen == []


def test_tokens_of_parallel_streams_are_counted_once_each():
    @with_task_collection("n", GenerationTokenCounter)
    class Streams(Controller):
        def process(self, tasks, **kwargs):
            copies = [[tasks[0].copy()] for _ in range(3)]
            yield ParallelProcess([Stepper()] * 3, copies, [{}] * 3)
            self.after = self.task_collections["n"].generation_token_count
            tasks[0].output_str = str(self.after)

    class Stepper(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask.create_from_generation_task(tasks[0], 3)
            stream.worker_tag = TAG
            while not stream.end_flag:
                yield [stream]

    worker = ScriptedWorker(lambda p, i: Reply("x" * (5 + i), seconds_per_token=0.002))
    assert answer(Streams(), worker).output.text == str(5 + 6 + 7)


def test_a_task_that_runs_again_is_counted_again():
    @with_task_collection("n", GenerationTokenCounter)
    class Again(Controller):
        def process(self, tasks, **kwargs):
            task = GenerationTask(input_str="p", worker_tag=TAG)
            for _ in range(3):
                yield [task]

    result = answer(Again(), ScriptedWorker(["abcde", "abc", "abcd"]))
    assert result.task_collections["n"].generation_token_count == 12


def has_grown(stream):
    """Wait until a stream has more tokens than its first step."""
    latest = time.monotonic() + 60
    while stream.usage.decoded < 10 and time.monotonic() < latest:
        time.sleep(0.001)


def test_tokens_of_cancelled_streams_are_counted_as_in_the_usage_of_the_request():
    @with_task_collection("n", GenerationTokenCounter)
    class Leaves(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask(input_str="p", worker_tag=TAG, streaming_step=4)
            yield [stream]
            stream.streaming_step = 1000
            yield FirstDone([stream, ComputeTask(has_grown, stream)])
            yield [GenerationTask(input_str="q", worker_tag=TAG)]
            tasks[0].output_str = stream.output_str

    replies = {"p": Reply("x" * 1000, seconds_per_token=0.002), "q": "abc"}
    result = answer(Leaves(), ScriptedWorker(replies))
    count = result.task_collections["n"].generation_token_count
    assert count == result.usage.completion_tokens > 4 + 3


def test_streams_of_a_worker_that_does_not_count_are_counted_by_what_they_bring():
    class Counting(Worker):
        async def stream(self, task):
            task.request_handle, task.output_tokens = self, [*(task.output_tokens or ()), 1, 2]
            task.end_flag = len(task.output_tokens) == 6

        task_handlers = {StreamGenerationTask: stream}  # noqa: RUF012

    @with_task_collection("n", GenerationTokenCounter)
    class Steps(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask(input_str="p", worker_tag=TAG)
            while not stream.end_flag:
                yield [stream]

    result = answer(Steps(), Counting())
    assert result.task_collections["n"].generation_token_count == 6
    assert result.usage.completion_tokens == 6


def test_samples_of_a_vote_are_counted_from_outside():
    watched = with_task_collection("n", GenerationTokenCounter)(MajorityVoteController)
    result = answer(watched(NativeGenerationController(), 3), ScriptedWorker(["a", "bb", "ccc"]))
    assert result.task_collections["n"].generation_token_count == 6


def test_chat_turns_queries_and_times_are_collected():
    @with_task_collection("chat", ChatTokenCounter, statistics_name="turns")
    @with_task_collection("queries", QueryCollector)
    @with_task_collection("times", TaskTimer, task_types=[ChatTask])
    class Chat(NativeChatController):
        pass

    worker = ScriptedWorker([Reply("hello", delay=0.02)])
    result = answer(Chat(), worker, "hi")
    found = result.task_collections
    assert (found["chat"].turns, found["chat"].completion_tokens) == (1, 5)
    assert found["queries"].queries == [[{"role": "user", "content": "hi"}]]
    assert found["times"].total_seconds > 0.01
    assert list(found["times"].durations) == ["ChatTask"]


def test_metrics_are_records_with_statistics(tmp_path, caplog):
    watched = with_task_collection(
        "m", TaskMetricsCollector, controller_name="chat", capture_messages=True
    )(NativeChatController)
    with caplog.at_level(logging.INFO):
        result = answer(watched(), ScriptedWorker(["hello"]), "hi")
        metrics = result.task_collections["m"]
        metrics.print_summary()
    assert "TaskRecord" in caplog.text
    assert "completion_tokens" in caplog.text
    (record,) = metrics.get_all_records()
    assert (record.task_type, record.status, record.completion_tokens) == ("ChatTask", "success", 5)
    assert record.messages[-1]["content"] == "hello"
    assert metrics.get_statistics()["ChatTask"]["count"] == 1
    metrics.export_to_json(tmp_path / "m.json")
    assert json.loads((tmp_path / "m.json").read_text())[0]["controller_name"] == "chat"
    metrics.reset()
    assert metrics.get_all_records() == []


def test_a_collection_may_look_at_some_tasks_only():
    watched = with_task_collection(
        "m", TaskMetricsCollector, controller_name="x", task_types=[ChatTask], enable_print=False
    )(NativeGenerationController)
    result = answer(watched(), ScriptedWorker(["a"]))
    assert result.task_collections["m"].get_all_records() == []
