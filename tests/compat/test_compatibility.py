"""The ways in which code written for ``tensorrt_llm.scaffolding`` calls it; only imports differ."""

import asyncio
from enum import Enum

import pytest

from forethought.compat.tensorrt_llm.math_utils import get_digit_majority_vote_result
from forethought.compat.tensorrt_llm.task_collection import (
    GenerationTokenCounter,
    TaskCollection,
    with_task_collection,
)
from forethought.errors import ParameterError
from forethought.methods import MajorityVoteController as FromMethods
from forethought.scaffolding import BestOfNController, MajorityVoteController, ScaffoldingOutput
from forethought.scaffolding.base_task import RewardTask, Task, TaskStatus
from forethought.scaffolding.controller import (
    BestOfNController as FromController,
)
from forethought.scaffolding.controller import (
    Controller,
    NativeChatController,
    NativeGenerationController,
    NativeRewardController,
    ParallelProcess,
)
from forethought.scaffolding.result import ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.task import GenerationTask, StreamGenerationTask
from forethought.scaffolding.worker import Worker
from forethought.workers.scripted import Reply, ScriptedWorker


def test_names_are_the_same_wherever_they_are_imported_from():
    assert MajorityVoteController is FromMethods
    assert BestOfNController is FromController
    import forethought.scaffolding.controller as controllers

    with pytest.raises(AttributeError, match="Nonsense"):
        _ = controllers.Nonsense


class DummyTask(Task):
    """Without ``super().__init__`` and without dataclass fields."""

    def __init__(self, turn):
        self.worker_tag = DummyController.WorkerTag.DUMMY
        self.turn, self.number = turn, None

    @staticmethod
    def create_from_prompt(prompt):
        return DummyTask(0)

    def create_scaffolding_output(self):
        return None


class DummyWorker(Worker):
    def __init__(self):
        self.number = 0

    async def dummy_handler(self, task: DummyTask):
        await asyncio.sleep(0.01)
        task.number = self.number
        self.number += 1
        return TaskStatus.SUCCESS

    task_handlers = {DummyTask: dummy_handler}  # noqa: RUF012


class DummyController(Controller):
    class WorkerTag(Enum):
        DUMMY = "dummy"

    def process(self, tasks, **kwargs):
        yield [DummyTask(1)]
        yield [DummyTask(2), DummyTask(2)]


class DummyParallelController(Controller):
    """Without ``super().__init__``; the same controller may stand several times."""

    def __init__(self, controllers):
        self.sub_controllers = controllers

    def process(self, tasks, **kwargs):
        count = len(self.sub_controllers)
        yield ParallelProcess(self.sub_controllers, [tasks] * count, [{}] * count)

    def clone(self):
        return DummyParallelController([c.clone() for c in self.sub_controllers])


def test_parallel_processes_nest_and_a_method_without_an_output_succeeds():
    worker = DummyWorker()
    inner = DummyParallelController([DummyController()] * 3)
    outer = DummyParallelController([inner, inner, DummyController()])
    llm = ScaffoldingLlm(outer, {DummyController.WorkerTag.DUMMY: worker})
    result = llm.generate("prompt")
    llm.shutdown(shutdown_workers=True)
    assert isinstance(result, ScaffoldingResult)
    assert result.finished
    assert worker.number == 7 * 3


def test_two_stacked_collections_count_before_and_after_and_are_read_in_process():
    class Counter(TaskCollection):
        def __init__(self):
            super().__init__()
            self.before = self.after = 0

        def before_yield(self, tasks):
            self.before += len(tasks)

        def after_yield(self, tasks):
            self.after += len(tasks)

    @with_task_collection("first", Counter)
    @with_task_collection("second", Counter)
    class Watched(DummyController):
        def process(self, tasks, **kwargs):
            yield from super().process(tasks, **kwargs)
            self.seen = self.task_collections["second"].after

    with ScaffoldingLlm(
        prototype_controller=Watched(), workers={DummyController.WorkerTag.DUMMY: DummyWorker()}
    ) as llm:
        result = llm.generate("p")
    for name in ("first", "second"):
        counter = result.task_collections[name]
        assert (counter.before, counter.after) == (3, 3)


def test_a_token_budget_is_spent_in_rounds_and_then_voted_on():
    @with_task_collection("token_counter", GenerationTokenCounter)
    class TokenBudgetMajorityVoteController(Controller):
        def __init__(self, generation_controller, token_budget, sample_num_per_turn):
            super().__init__()
            self.generation_controller = generation_controller
            self.token_budget, self.per_turn = token_budget, sample_num_per_turn

        def process(self, tasks, **kwargs):
            candidates = []
            while self.task_collections["token_counter"].generation_token_count < self.token_budget:
                copies = [[tasks[0].copy()] for _ in range(self.per_turn)]
                controllers = [self.generation_controller.clone() for _ in copies]
                yield ParallelProcess(controllers, copies, [{}] * self.per_turn)
                candidates += [copy[0].output_str for copy in copies]
            index, _ = get_digit_majority_vote_result(candidates)
            tasks[0].output_str = candidates[index]

    worker = ScriptedWorker(lambda p, i: rf"\boxed{{{[7, 3, 3][i % 3]}}}")
    controller = TokenBudgetMajorityVoteController(NativeGenerationController(), 50, 3)
    with ScaffoldingLlm(
        controller, {NativeGenerationController.WorkerTag.GENERATION: worker}
    ) as llm:
        assert llm.generate("p").outputs[0].text == r"\boxed{3}"
    assert len(worker.calls) == 6


def test_handlers_are_registered_on_one_worker_and_reach_subclasses():
    class Special(GenerationTask):
        pass

    async def shout(worker, task):
        task.output_str = task.input_str.upper()
        return TaskStatus.SUCCESS

    loud, quiet = ScriptedWorker(lambda p, i: p), ScriptedWorker(lambda p, i: p)
    loud.register_task_handler(GenerationTask, shout)

    async def say(worker, task):
        status = await worker.run_task(task)
        return status, getattr(task, "output_str", None)

    assert asyncio.run(say(loud, GenerationTask(input_str="a"))) == (TaskStatus.SUCCESS, "A")
    assert asyncio.run(say(loud, Special(input_str="a")))[1] == "A"
    assert asyncio.run(say(quiet, GenerationTask(input_str="a")))[1] == "a"
    assert asyncio.run(say(quiet, Special(input_str="a")))[1] == "a"
    assert asyncio.run(say(loud, StreamGenerationTask(input_str="a")))[1] == "a"
    assert GenerationTask in ScriptedWorker.task_handlers
    lacking = asyncio.run(say(quiet, RewardTask()))[0]
    assert lacking is TaskStatus.WORKER_NOT_SUPPORTED


def test_streams_advance_in_lock_step_and_long_ones_are_cancelled():
    class NativeStreamGenerationController(NativeGenerationController):
        def set_stream_step(self, step):
            self.step = step

        def set_output_threshold(self, threshold):
            self.threshold = threshold

        def process(self, tasks, **kwargs):
            streams = []
            for task in tasks:
                task.worker_tag = self.WorkerTag.GENERATION
                stream = StreamGenerationTask.create_from_generation_task(task, self.step)
                streams.append(stream)
            left = streams
            while left:
                yield left
                left = [stream for stream in left if not stream.end_flag]
                for stream in left:
                    stream.cancel_flag = len(stream.output_tokens) > self.threshold
            tasks[0].result = streams[0].result

    controller = NativeStreamGenerationController()
    controller.set_stream_step(20)
    controller.set_output_threshold(60)
    worker = ScriptedWorker(lambda p, i: "x" * (30 if p == "short" else 500))
    with ScaffoldingLlm(
        controller, {NativeStreamGenerationController.WorkerTag.GENERATION: worker}
    ) as llm:
        short, long = llm.generate(["short", "long"])
    assert (short.output.finish_reason, len(short.output.text)) == ("stop", 30)
    assert (long.output.finish_reason, len(long.output.text)) == ("abort", 80)


def test_sampling_params_that_are_not_none_by_default_are_honoured():
    params = {"stop": ["\n"], "n": 2, "frequency_penalty": 0.5, "ignore_eos": True}
    worker = ScriptedWorker(lambda p, i: "ab\ncd")
    with ScaffoldingLlm(NativeGenerationController(params), {"generation": worker}) as llm:
        result = llm.generate("p")
    assert [output.text for output in result.outputs] == ["ab", "ab"]
    task = worker.calls[0].task
    assert (task.frequency_penalty, task.ignore_eos) == (0.5, True)
    assert params == {"stop": ["\n"], "n": 2, "frequency_penalty": 0.5, "ignore_eos": True}


def test_unknown_sampling_params_are_refused():
    with pytest.raises(ParameterError, match=r"'custom'.*Allowed"):
        NativeGenerationController(sampling_params={"custom": 1})


def test_a_reward_controller_judges_finished_tasks_and_keeps_the_scores():
    class Judged(Controller):
        def __init__(self):
            super().__init__()
            self.reward = NativeRewardController()

        def process(self, tasks, **kwargs):
            tasks[0].output_str = "an answer"
            yield from self.reward.process([tasks[0], RewardTask(output_str="other one")])
            tasks[0].customized_result_fields["scores"] = self.reward.scores

    worker = ScriptedWorker(score=lambda question, text: float(len(text)))
    with ScaffoldingLlm(Judged(), {NativeRewardController.WorkerTag.REWARD: worker}) as llm:
        assert llm.generate("p").output.meta == {"scores": [9.0, 9.0]}


def test_a_task_of_ones_own_with_a_generate_of_ones_own():
    class CoderTask(Task):
        @staticmethod
        def create_from_prompt(prompt):
            task = CoderTask()
            task.input_str, task.output_str = prompt, None
            return task

        def create_scaffolding_output(self):
            return ScaffoldingOutput(self.output_str, None, {"kind": "code"})

    class Coder(Controller):
        def generate(self, prompt, **kwargs):
            task = CoderTask.create_from_prompt(prompt)
            yield from self.process([task], **kwargs)
            return task.create_scaffolding_output()

        def process(self, tasks, **kwargs):
            inner = GenerationTask.create_from_prompt(tasks[0].input_str)
            yield from NativeGenerationController().process([inner])
            tasks[0].output_str = inner.output_str + "!"

    with ScaffoldingLlm(Coder(), {"generation": ScriptedWorker(lambda p, i: p)}) as llm:
        output = llm.generate("x = 1").outputs[0]
    assert (output.text, output.meta) == ("x = 1!", {"kind": "code"})


def test_a_benchmark_of_a_hundred_requests_reaches_its_collections():
    watched = with_task_collection("n", GenerationTokenCounter)(NativeGenerationController)

    async def main():
        worker = ScriptedWorker(lambda p, i: p)
        async with ScaffoldingLlm(watched(), {"generation": worker}, 10) as llm:
            llm.enable_output_task_collection()
            return await asyncio.gather(
                *[llm.generate_async(f"{i:03}").aresult() for i in range(100)]
            )

    results = asyncio.run(main())
    assert [r.output.output_str for r in results] == [f"{i:03}" for i in range(100)]
    assert {r.task_collections["n"].generation_token_count for r in results} == {3}


def test_a_chat_refuses_token_ids_instead_of_sending_an_empty_message():
    worker = ScriptedWorker(lambda prompt, index: "x")
    with (
        ScaffoldingLlm(NativeChatController(), {"generation": worker}) as llm,
        pytest.raises(ParameterError, match="chat needs text"),
    ):
        llm.generate([1, 2, 3])
    assert worker.calls == []


def test_a_plain_task_takes_over_how_its_chat_fared():
    class Asks(Controller):
        def process(self, tasks, **kwargs):
            tasks[0].on_failure, tasks[0].streaming_output_flag = "drop", True
            yield from NativeChatController().process(tasks)
            tasks[0].output_str = f"{tasks[0].status}: {tasks[0].error}"

    worker = ScriptedWorker([Reply("", error=OSError("gone"))])
    with ScaffoldingLlm(Asks(), {"generation": worker}) as llm:
        text = llm.generate("hi").output.text
    assert "WORKER_EXECEPTION" in text
    assert "gone" in text
    assert worker.calls[0].task.streaming_output_flag
