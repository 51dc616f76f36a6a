"""The scripts and tests of ``tensorrt_llm.scaffolding`` that stand in no other file here.

Code as users have it; only imports and models are changed.
"""

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest

import mcp_server
from forethought.compat.tensorrt_llm.benchmark import (
    ConcurrentStrategy,
    ConstantRateStrategy,
    PoissonRateStrategy,
    ScaffoldingBenchRequest,
    SynchronousStrategy,
    ThroughputStrategy,
    async_scaffolding_benchmark,
)
from forethought.compat.tensorrt_llm.contrib.Dynasor import DynasorGenerationController
from forethought.compat.tensorrt_llm.math_utils import (
    extract_answer_from_boxed,
    get_digit_majority_vote_result,
)
from forethought.compat.tensorrt_llm.task_collection import TaskCollection, with_task_collection
from forethought.errors import ParameterError
from forethought.scaffolding.base_task import MCPCallTask, TaskStatus
from forethought.scaffolding.controller import (
    BestOfNController,
    ChatWithMCPController,
    Controller,
    MajorityVoteController,
    NativeGenerationController,
    NativeRewardController,
    ParallelProcess,
)
from forethought.scaffolding.messages import AssistantMessage, SystemMessage
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.task import ChatTask, GenerationTask
from forethought.scaffolding.worker import MCPWorker, Worker
from forethought.workers.scripted import ScriptedWorker

GENERATION = NativeGenerationController.WorkerTag.GENERATION
PROMPTS = ["Natalia sold 48 clips.", "There is a line.", "Find the largest."]


def boxed(prompt, index):
    return rf"so it is \boxed{{{[7, 3, 3][index % 3]}}}"


@pytest.mark.parametrize("run_async", [False, True])
def test_run_basic_generation(run_async, capsys):
    llm_worker = ScriptedWorker(lambda prompt, index: prompt.upper())
    prototype_controller = NativeGenerationController(sampling_params={"temperature": 0.9})
    if run_async:

        async def main():
            llm = ScaffoldingLlm(prototype_controller, {GENERATION: llm_worker})
            results = [(await llm.generate_async(p).aresult()) for p in PROMPTS]
            llm.shutdown()
            return results

        results = asyncio.run(main())
    else:
        llm = ScaffoldingLlm(prototype_controller, {GENERATION: llm_worker})
        results = llm.generate(PROMPTS)
        llm.shutdown()
    llm_worker.shutdown()
    assert [result.outputs[0].text for result in results] == [p.upper() for p in PROMPTS]
    assert [result.output.output_str for result in results] == [p.upper() for p in PROMPTS]


def test_run_best_of_n_with_reward():
    worker = ScriptedWorker(boxed, score=lambda question, answer: float("3" in answer))
    workers = {GENERATION: worker, NativeRewardController.WorkerTag.REWARD: worker}
    prototype_generation_controller = NativeGenerationController(
        sampling_params={"max_tokens": 4096, "temperature": 0.6}
    )
    controller = BestOfNController(
        generation_controller=prototype_generation_controller,
        reward_controller=NativeRewardController(),
        default_sample_num=2,
    )
    llm = ScaffoldingLlm(controller, workers=workers)
    results = llm.generate(PROMPTS[:1])
    assert "3" in results[0].outputs[0].text
    assert len(worker.calls) == 2
    llm.shutdown(shutdown_workers=True)


def test_run_majority_vote_aime24(tmp_path):
    lines = [{"problem": p, "answer": a} for p, a in zip(PROMPTS, ["3", "3", "9"], strict=True)]
    jsonl_file = tmp_path / "test.jsonl"
    jsonl_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    controller = MajorityVoteController(
        generation_controller=NativeGenerationController({"max_tokens": 64, "top_p": 0.9}),
        default_sample_num=3,
    )
    llm = ScaffoldingLlm(controller, {GENERATION: ScriptedWorker(boxed)})
    prompts, reference_answers = [], []
    with open(jsonl_file) as f:
        for line in f:
            problem = json.loads(line)
            prompts.append(problem["problem"])
            reference_answers.append(int(problem["answer"]))
    correct_count = 0
    results = llm.generate(prompts)
    for i, result in enumerate(results):
        result.result()
        extracted_answer = extract_answer_from_boxed(result.outputs[0].text)
        correct_count += int(extracted_answer) == reference_answers[i]
    assert correct_count == 2
    llm.shutdown(shutdown_workers=True)


def test_run_dynasor_under_majority_vote():
    from scripted import chain

    generation = DynasorGenerationController(generation_dir=None, chunk_size=4)
    controller = MajorityVoteController(generation_controller=generation, default_sample_num=3)
    worker = ScriptedWorker(chain("p", "thinking for a while", lambda known: "42} "))
    llm = ScaffoldingLlm(
        prototype_controller=controller,
        workers={DynasorGenerationController.WorkerTag.GENERATION: worker},
    )
    results = llm.generate(["p"])
    assert extract_answer_from_boxed(results[0].outputs[0].text) == "42"
    llm.shutdown(shutdown_wokers=True)


# ---- test_parallel_process.py, test_task_collection.py, test_bench.py ---------------------------


class DummyTaskCollection(TaskCollection):
    def __init__(self):
        super().__init__()
        self.before, self.after = 0, 0

    def before_yield(self, tasks):
        self.before += len(tasks)

    def after_yield(self, tasks):
        self.after += len(tasks)


class DummyWorker(Worker):
    def __init__(self):
        self.num_running = self.most_running = 0

    async def dummy_handler(self, task: GenerationTask):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.num_running -= 1
        task.output_str = task.input_str
        return TaskStatus.SUCCESS

    task_handlers = {GenerationTask: dummy_handler}  # noqa: RUF012


def bench(num, worker, prototype=None, **options):
    async def main():
        llm = ScaffoldingLlm(prototype or NativeGenerationController(), {GENERATION: worker}, 1000)
        requests = [ScaffoldingBenchRequest(prompt=f"{i}") for i in range(num)]
        types = {"bench_dummy_collection": DummyTaskCollection}
        found = await async_scaffolding_benchmark(llm, types, requests, **options)
        await llm.ashutdown()
        return found

    return asyncio.run(main())


def test_a_benchmark_of_a_hundred_requests_ten_at_once():
    worker = DummyWorker()
    results, start_times, execution_times, total_time = bench(100, worker, concurrency=10)
    assert [result.outputs[0].text for result in results] == [f"{i}" for i in range(100)]
    assert len(start_times) == len(execution_times) == 100
    assert total_time >= max(execution_times)
    assert worker.most_running <= 10
    for result in results:
        collection = result.task_collections["bench_dummy_collection"]
        assert (collection.before, collection.after) == (1, 1)


@pytest.mark.parametrize(
    ("strategy", "most"),
    [
        (SynchronousStrategy(), 1),
        (ConcurrentStrategy(3), 3),
        (ThroughputStrategy(), 20),
        (ThroughputStrategy(max_concurrency=4), 4),
        (ConstantRateStrategy(1e6, max_concurrency=2), 2),
        (PoissonRateStrategy(1e6, initial_burst=True, max_concurrency=5), 5),
    ],
)
def test_strategies_limit_what_runs_at_once(strategy, most):
    worker = DummyWorker()
    results, *_ = bench(20, worker, strategy=strategy)
    assert len(results) == 20
    assert worker.most_running <= most


def test_rates_say_when_requests_begin():
    assert ConstantRateStrategy(2.0).start_times(4) == [0.0, 0.5, 1.0, 1.5]
    assert ConstantRateStrategy(2.0, initial_burst=True).start_times(4) == [0.0, 0.0, 0.5, 1.0]
    source = random.Random(42)
    gaps = [source.expovariate(2.0) for _ in range(2)]
    expected = [0.0, gaps[0], gaps[0] + gaps[1]]
    assert PoissonRateStrategy(2.0).start_times(3) == pytest.approx(expected)
    with pytest.raises(ParameterError, match="rate"):
        ConstantRateStrategy(0.0)


def test_collections_of_the_prototype_stay_and_limits_are_given_once():
    prototype = with_task_collection("own", DummyTaskCollection)(NativeGenerationController)()
    results, *_ = bench(2, DummyWorker(), prototype)
    assert [sorted(r.task_collections) for r in results] == [["bench_dummy_collection", "own"]] * 2
    assert [r.task_collections["own"].before for r in results] == [1, 1]
    with pytest.raises(ParameterError, match="exclude each other"):
        bench(1, DummyWorker(), concurrency=1, strategy=SynchronousStrategy())


def test_scope_params_go_to_workers_that_take_them():
    class Scoped(DummyWorker):
        params: dict = {}  # noqa: RUF012

        def set_scope_params(self, request_id, **params):
            self.params = {**self.params, request_id: params}

    async def main(worker):
        llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker})
        request = ScaffoldingBenchRequest("p", {"image": "x"})
        try:
            return await async_scaffolding_benchmark(llm, None, [request])
        finally:
            await llm.ashutdown()

    worker = Scoped()
    results, *_ = asyncio.run(main(worker))
    assert worker.params == {results[0].id: {"image": "x"}}
    with pytest.raises(ParameterError, match="scope_params"):
        asyncio.run(main(DummyWorker()))


def test_tasks_of_parallel_controllers_are_seen_by_a_collection_around_them():
    @with_task_collection("seen", DummyTaskCollection)
    class DummyParallelController(Controller):
        def __init__(self):
            super().__init__()
            self.inner = NativeGenerationController()

        def process(self, tasks, **kwargs):
            copies = [[GenerationTask.create_from_prompt("x")] for _ in range(2)]
            yield ParallelProcess([self.inner, self.inner], copies, [{}, {}])
            tasks[0].output_str = "done"

    with ScaffoldingLlm(DummyParallelController(), {GENERATION: DummyWorker()}) as llm:
        result = llm.generate("p")
    assert result.task_collections["seen"].after == 2


# ---- test_math_utils.py ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (["\\boxed{-3}", "\\boxed{-3}", "\\boxed{4}"], "-3"),
        (["\\boxed{0}", "\\boxed{0}"], "0"),
        (["\\boxed{2.5}", "\\boxed{7}"], "7"),
        (["\\boxed{x}", "nothing"], None),
    ],
)
def test_the_digits_that_most_results_have(results, expected):
    index, answer = get_digit_majority_vote_result(results)
    assert answer == expected
    assert index == 0 if expected is None else expected in results[index]


# ---- test_mcp_worker.py ------------------------------------------------------------------------


class DummyChatWorker(Worker):
    async def chat_handler(self, task: ChatTask):
        if len(task.messages) == 2:
            call = {"id": "call_1", "function": {"name": "add", "arguments": '{"a": 5, "b": 3}'}}
            task.add_message(AssistantMessage("", tool_calls=[call]))
        else:
            task.output_str = f"The result is {task.messages[-1].content}"
            task.add_message(AssistantMessage(task.output_str))
        return TaskStatus.SUCCESS

    task_handlers = {ChatTask: chat_handler}  # noqa: RUF012


def test_an_mcp_worker_runs_tasks_and_a_whole_dialogue():
    async def test_async(url):
        worker = MCPWorker.init_with_urls([url])
        await worker.init_in_asyncio_event_loop()
        task = MCPCallTask.create_mcptask(
            "call_1", "add", json.dumps({"a": 5, "b": 3}), ChatWithMCPController.WorkerTag.TOOLCALL
        )
        status = await worker.run_task(task)
        assert status == TaskStatus.SUCCESS
        assert task.result_str == "8"
        controller = ChatWithMCPController(
            NativeGenerationController(),
            system_prompts=[SystemMessage("You are a calculator.")],
            tools=await worker.list_tools(),
        )
        workers = {
            GENERATION: DummyChatWorker(),
            ChatWithMCPController.WorkerTag.TOOLCALL: worker,
        }
        llm = ScaffoldingLlm(controller, workers)
        result = await llm.generate_async("What is 5 + 3?").aresult()
        assert result.outputs[0].text == "The result is 8"
        await worker.async_shutdown()
        llm.shutdown()

    with mcp_server.serving(sse=True) as url:
        asyncio.run(test_async(url))


def test_a_command_is_a_server_too():
    worker = MCPWorker([f"{sys.executable} {Path(mcp_server.__file__)}"])
    assert worker.urls
