"""User code of ``tensorrt_llm.scaffolding``, as it was published; only its imports are changed."""

import asyncio
import importlib
from enum import Enum
from types import SimpleNamespace

import pytest

from forethought.compat.tensorrt_llm.contrib.AsyncGeneration import (
    StreamGenerationTask,
    stream_generation_handler,
)
from forethought.compat.tensorrt_llm.contrib.Dynasor import DynasorGenerationController
from forethought.errors import ParameterError, TaskError, UsageError
from forethought.scaffolding import (
    AssistantMessage,
    BestOfNController,
    ChatTask,
    ExecutionScope,
    GenerationTask,
    NativeChatController,
    OpenAIToolDescription,
    PRMController,
    RewardTask,
    ScaffoldingOutput,
    SystemMessage,
    Task,
    TaskStatus,
    ToolMessage,
)
from forethought.scaffolding.controller import (
    Controller,
    NativeGenerationController,
    NativeRewardController,
    ParallelProcess,
)
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.messages import ToolCall, ToolFunction
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.worker import RewardWorker, TRTLLMWorker, Worker
from forethought.workers.scripted import ScriptedWorker
from reward_models import save, tokenizer
from scripted import answer, chain
from tokens import speaking

GENERATION = NativeGenerationController.WorkerTag.GENERATION


def says(prompt, index):
    return prompt.upper()


# ---- controllers -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NativeGenerationController, NativeChatController])
def test_sampling_params_may_have_their_older_name(kind):
    worker = ScriptedWorker(says)
    output = answer(
        kind(custom_sampling_params={"max_tokens": 2, "temperature": 0.9}), worker
    ).output
    assert (output.text, worker.calls[0].task.temperature) == ("P", 0.9)
    with pytest.raises(ParameterError, match="twice"):
        kind({"max_tokens": 2}, custom_sampling_params={})
    with pytest.raises(ParameterError, match="'maxtokens'"):
        kind(custom_sampling_params={"maxtokens": 2})


def test_an_output_is_made_empty_and_filled_under_the_older_names():
    class AnswerTask(Task):
        @staticmethod
        def create_from_prompt(prompt):
            task = AnswerTask()
            task.input_str = prompt
            return task

        def create_scaffolding_output(self):
            output = ScaffoldingOutput()
            output.output_str, output.output_tokens = self.output_str, [1]
            return output

    class Answers(Controller):
        def generate(self, prompt, **kwargs):
            task = AnswerTask.create_from_prompt(prompt)
            yield from self.process([task], **kwargs)
            return task.create_scaffolding_output()

        def process(self, tasks, **kwargs):
            generation = GenerationTask.create_from_prompt(tasks[0].input_str)
            yield from NativeGenerationController().process([generation])
            tasks[0].output_str = generation.output_str

    output = answer(Answers(), ScriptedWorker(says)).outputs[0]
    assert (output.text, output.tokens, ScaffoldingOutput().text) == ("P", [1], None)


def test_the_result_of_a_task_may_be_text_or_what_an_engine_gives():
    class TextResult(Controller):
        def process(self, tasks, **kwargs):
            yield []
            tasks[0].result = "text"

    class EngineResult(Controller):
        def process(self, tasks, **kwargs):
            yield []
            best = SimpleNamespace(text="best", token_ids=[3], finish_reason="stop")
            tasks[0].result = SimpleNamespace(outputs=[best])

    worker = ScriptedWorker(says)
    assert answer(TextResult(), worker).outputs[0].text == "text"
    output = answer(EngineResult(), worker).output
    assert (output.text, output.token_ids, output.finish_reason) == ("best", [3], "stop")
    with pytest.raises(ParameterError, match="invalid result"):
        GenerationTask().result = 5


def test_a_stream_is_read_through_the_current_output_of_each_result():
    """``scaffolding_dynasor_run.py --streaming``."""
    controller = DynasorGenerationController(chunk_size=4, certainty_threshold=2, streaming=True)
    worker = ScriptedWorker(chain("p", "thinking for a while", lambda known: "42} "))
    llm = ScaffoldingLlm(
        prototype_controller=controller,
        workers={DynasorGenerationController.WorkerTag.GENERATION: worker},
    )
    seen = []

    async def task(prompt: str):
        i = 0
        async for result in llm.generate_async(prompt):
            i += 1
            async for output in result.cur_output:
                seen.append((len(output.outputs[0].token_ids), output.outputs[0].text))
        return result.outputs[0].text

    final = asyncio.run_coroutine_threadsafe(task("p"), llm.loop).result()
    llm.shutdown()
    assert len(seen) > 2
    assert all(final.startswith(text) for _, text in seen)
    assert [count for count, _ in seen] == sorted(count for count, _ in seen)
    assert seen[-1][1] == final


def test_a_stream_handler_is_registered_and_long_streams_are_cancelled():
    """``stream_generation_run.py --run_type cancel``."""

    class NativeStreamGenerationController(Controller):
        class WorkerTag(Enum):
            STREAM = "stream"

        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask.create_from_generation_task(tasks[0], 20)
            stream.worker_tag = self.WorkerTag.STREAM
            while not stream.end_flag:
                yield [stream]
                stream.cancel_flag = len(stream.output_tokens) > 50
            tasks[0].result = stream.result

    class BareWorker(Worker):
        pass

    worker = ScriptedWorker(lambda prompt, index: "x" * 500)
    worker.register_task_handler(StreamGenerationTask, stream_generation_handler)
    controller = NativeStreamGenerationController()
    with ScaffoldingLlm(controller, {controller.WorkerTag.STREAM: worker}) as llm:
        assert len(llm.generate("p").output.text) == 60
    unsupported = asyncio.run(stream_generation_handler(BareWorker(), StreamGenerationTask()))
    assert unsupported is TaskStatus.WORKER_NOT_SUPPORTED


def test_the_scope_of_a_request_is_read_as_a_context_variable():
    """``ApiaryMCPWorker`` keeps one connection per scope."""

    class ScopedWorker(Worker):
        def __init__(self):
            self.seen, self.ended = [], []

        async def handle(self, task):
            scope = current_scope.get()
            assert isinstance(scope, ExecutionScope)
            self.seen.append(scope.scope_id)
            task.output_str = "done"

        async def on_scope_end(self, scope_id):
            self.ended.append(scope_id)

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    class Two(Controller):
        def process(self, tasks, **kwargs):
            native = NativeGenerationController()
            yield ParallelProcess([native, native], [[tasks[0]], [GenerationTask()]], [{}, {}])

    worker = ScopedWorker()
    result = answer(Two(), worker)
    assert sorted(worker.seen) == [f"{result.id}:0", f"{result.id}:1"]
    assert set(worker.ended) == {*worker.seen, result.id}
    assert current_scope.get() is current_scope() is None


# ---- chats and tools ---------------------------------------------------------------------------


def test_a_chat_without_a_user_message_has_none():
    chat = ChatTask.create_from_prompt(None, [SystemMessage("be kind")], tools=None)
    assert chat.messages_to_dict_content() == [{"role": "system", "content": "be kind"}]
    assert ChatTask.create_from_prompt("").messages[0].content == ""


class MCPCallTask(Task):
    def __init__(self, tool_call_id, tool_name, args, worker_tag):
        super().__init__(worker_tag=worker_tag)
        self.tool_call_id, self.tool_name, self.args = tool_call_id, tool_name, args
        self.result_str = None


class ChatWithMCPController(Controller):
    class WorkerTag(Enum):
        TOOLCALL = "tool_call"

    def __init__(self, generation_controller, system_prompts=None, max_iterations=3, tools=None):
        super().__init__()
        self.generation_controller = generation_controller
        self.system_prompts, self.tools = system_prompts or [], tools
        self.max_iterations = max_iterations

    def process(self, tasks, **kwargs):
        chat_task = tasks[0]
        for _ in range(self.max_iterations):
            yield from self.generation_controller.process([chat_task])
            message = chat_task.messages[-1]
            if not message.tool_calls:
                return
            mcp_call_tasks = [
                MCPCallTask(
                    tool_call.id,
                    tool_call.function.name,
                    tool_call.function.arguments,
                    self.WorkerTag.TOOLCALL,
                )
                for tool_call in message.tool_calls
            ]
            yield mcp_call_tasks
            for call in mcp_call_tasks:
                chat_task.add_message(ToolMessage(call.result_str, call.tool_call_id))

    def generate(self, prompt, **kwargs):
        task = ChatTask.create_from_prompt(prompt, self.system_prompts, tools=self.tools)
        yield from self.process([task], **kwargs)
        return task.create_scaffolding_output()


class CallingWorker(Worker):
    """Asks for one addition, then repeats what the tool said."""

    async def chat(self, task):
        last = task.messages[-1]
        if isinstance(last, ToolMessage):
            task.output_str = f"It is {last.content}."
            task.add_message(AssistantMessage(task.output_str))
            return
        function = {"name": "add", "arguments": "[1, 2]"}
        call = {"id": "call-1", "type": "function", "function": function}
        task.add_message(AssistantMessage(None, tool_calls=[call]))

    task_handlers = {ChatTask: chat}  # noqa: RUF012


class ToolWorker(Worker):
    async def call(self, task):
        assert (task.tool_name, task.tool_call_id) == ("add", "call-1")
        task.result_str = str(sum(eval(task.args)))
        return TaskStatus.SUCCESS

    task_handlers = {MCPCallTask: call}  # noqa: RUF012


def test_a_dialogue_with_tools_reads_calls_as_objects():
    tools = [OpenAIToolDescription("add", "adds", {})]
    controller = ChatWithMCPController(NativeGenerationController(), tools=tools)
    workers = {GENERATION: CallingWorker(), controller.WorkerTag.TOOLCALL: ToolWorker()}
    with ScaffoldingLlm(controller, workers) as llm:
        assert llm.generate("1 + 2?").outputs[0].text == "It is 3."


def test_tool_calls_of_every_input_form_leave_alike():
    plain = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    foreign = SimpleNamespace(id="1", function=SimpleNamespace(name="f", arguments="{}"))
    call = ToolCall("1", ToolFunction("f", "{}"))
    message = AssistantMessage(None, tool_calls=[plain, foreign, call])
    assert message.tool_calls == [call] * 3
    assert message.to_dict()["tool_calls"] == [plain] * 3
    with pytest.raises(ParameterError, match="invalid tool call"):
        AssistantMessage(None, tool_calls=["f"])


# ---- workers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_model_dir(tmp_path_factory):
    from transformers import Qwen2ForTokenClassification

    return save(tmp_path_factory.mktemp("reward") / "prm", Qwen2ForTokenClassification, tokenizer())


@pytest.mark.parametrize("kind", [TRTLLMWorker, RewardWorker])
def test_best_of_n_with_a_reward_model(reward_model_dir, kind):
    """``run_best_of_n_with_reward.py``."""
    workers = {GENERATION: ScriptedWorker(["one\n\ntwo", "three", "four"])}
    reward_worker = kind.init_with_new_llm(
        reward_model_dir,
        backend="pytorch",
        max_batch_size=1,
        max_num_tokens=4096,
        kv_cache_free_gpu_memory_fraction=0.2,
        disable_overlap_scheduler=True,
    )
    workers[PRMController.WorkerTag.REWARD] = reward_worker
    controller = BestOfNController(
        generation_controller=NativeGenerationController({"temperature": 0.9}),
        reward_controller=PRMController(tokenizer=reward_worker.tokenizer),
        default_sample_num=3,
    )
    llm = ScaffoldingLlm(controller, workers=workers)
    results = llm.generate(["a question"])
    llm.shutdown(shutdown_workers=True)
    meta = results[0].output.meta["best_of_n"]
    texts = ["one\n\ntwo", "three", "four"]
    assert results[0].outputs[0].text == texts[meta["scores"].index(max(meta["scores"]))]
    assert reward_worker.by_step


def test_a_reward_worker_refuses_what_it_cannot_honour(reward_model_dir):
    with pytest.raises(ParameterError, match="backend"):
        RewardWorker.init_with_new_llm(reward_model_dir, "tensorrt")
    for name in ("scheduler_config", "temperature"):
        with pytest.raises(ParameterError, match=name):
            RewardWorker.init_with_new_llm(reward_model_dir, **{name: 1})


def test_a_worker_has_a_temperature_for_tasks_that_set_none():
    """``init_with_new_llm(..., temperature=0.9)`` of the older examples; here 0, to compare."""
    with pytest.raises(ParameterError, match="temperature"):
        TRTLLMWorker.init_with_new_llm("no/such/model", temperature=-1)
    worker = TRTLLMWorker.init_with_new_llm(
        speaking(), backend="pytorch", max_batch_size=4, max_num_tokens=64, temperature=0.0
    )
    greedy = NativeGenerationController({"max_tokens": 8, "temperature": 0.0})
    with worker, ScaffoldingLlm(greedy, {GENERATION: worker}) as llm:
        expected = llm.generate("the").output.text
        llm.prototype_controller.sampling_params = {"max_tokens": 8}
        seeds = ({"seed": number} for number in range(4))
        texts = [llm.generate("the", sampling_params=params).output.text for params in seeds]
        params = {"seed": 1, "temperature": 8.0}
        hot = llm.generate("the", sampling_params=params).output.text
    assert texts == [expected] * 4
    assert hot != expected


def test_workers_are_imported_from_the_module_of_workers():
    module = importlib.import_module("forethought.scaffolding.worker")
    for name in ("OpenaiWorker", "TRTOpenaiWorker", "TRTLLMWorker"):
        assert issubclass(getattr(module, name), Worker)
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = module.Nonsense
    module = importlib.import_module("forethought.compat.tensorrt_llm.contrib.Dynasor")
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = module.Nonsense


# ---- clear errors ------------------------------------------------------------------------------


def refusal(controller, **options):
    with pytest.raises(UsageError) as caught:
        answer(controller, ScriptedWorker(says), **options)
    return str(caught.value)


@pytest.mark.parametrize("stop", [5, [1, 2], {"a": 1}, b"x", ["a", None]])
def test_a_stop_that_is_no_text_is_refused_wherever_it_comes_from(stop):
    class Stops(Controller):
        def process(self, tasks, **kwargs):
            tasks[0].stop, tasks[0].worker_tag = stop, GENERATION
            yield tasks

    assert "invalid stop" in refusal(Stops())
    assert "invalid stop" in refusal(NativeGenerationController(), sampling_params={"stop": stop})
    with pytest.raises(ParameterError, match="invalid stop"):
        NativeGenerationController({"stop": stop})


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [text]])
def test_a_generate_that_returns_text_gets_an_error_with_the_fix(wrap):
    class Returns(Controller):
        def generate(self, prompt, **kwargs):
            yield []
            return wrap("text")

    message = refusal(Returns())
    assert "Returns.generate returned str" in message
    assert "ScaffoldingOutput(text)" in message


def test_a_bare_task_that_is_yielded_must_be_in_a_list():
    class Bare(Controller):
        def process(self, tasks, **kwargs):
            yield tasks[0]

    assert "yield [task]" in refusal(Bare())


@pytest.mark.parametrize("name", ["process", "generate"])
def test_a_controller_that_is_a_coroutine_is_refused_where_it_is_written(name):
    async def coroutine(self, tasks, **kwargs):
        return None

    async def generator(self, tasks, **kwargs):
        yield tasks

    for function in (coroutine, generator):
        with pytest.raises(ParameterError, match=rf"Mine.{name} is an async def"):
            type("Mine", (Controller,), {name: function})


def test_rewards_of_a_task_with_a_text_result_are_scored():
    class Judged(Controller):
        def process(self, tasks, **kwargs):
            tasks[0].result = "abc"
            reward = NativeRewardController()
            yield from reward.process([tasks[0], RewardTask(output_str="d")])
            tasks[0].customized_result_fields["scores"] = reward.scores

    worker = ScriptedWorker(score=lambda question, text: float(len(text)))
    with ScaffoldingLlm(Judged(), {NativeRewardController.WorkerTag.REWARD: worker}) as llm:
        assert llm.generate("p").output.meta == {"scores": [3.0, 1.0]}


def test_a_process_that_yields_nothing_is_refused_with_the_fix():
    class Forgets(Controller):
        def process(self, tasks, **kwargs):
            return None

    class Branches(Controller):
        def process(self, tasks, **kwargs):
            yield ParallelProcess([Forgets()], [[tasks[0]]])

    class Generates(Controller):
        def generate(self, prompt, **kwargs):
            return None

    for controller in (Forgets(), Branches()):
        assert "Forgets.process is no generator: it returned None" in refusal(controller)
    assert "Generates.generate is no generator: it returned None" in refusal(Generates())


@pytest.mark.parametrize("value", [{"text": "a"}, 7, [1, 2], ("a",), object()])
def test_a_generate_that_returns_no_output_is_refused(value):
    class Returns(Controller):
        def generate(self, prompt, **kwargs):
            yield []
            return value

    assert "Returns.generate returned" in refusal(Returns())


def test_a_status_that_is_none_of_task_status_is_a_task_error():
    class Wrong(Worker):
        async def handle(self, task):
            return "ok"

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    with pytest.raises(TaskError, match=r"Wrong returned 'ok'.*TaskStatus"):
        answer(NativeGenerationController(), Wrong())


def test_a_handler_can_be_registered_on_a_class_and_on_an_instance():
    class Base(Worker):
        pass

    class Derived(Base):
        pass

    async def handler(worker, task):
        task.output_str = "handled"

    async def another(worker, task):
        task.output_str = "by the instance"

    Base.register_task_handler(GenerationTask, handler)
    assert answer(NativeGenerationController(), Derived()).output.text == "handled"
    own = Base()
    own.register_task_handler(GenerationTask, another)
    assert answer(NativeGenerationController(), own).output.text == "by the instance"
    assert answer(NativeGenerationController(), Base()).output.text == "handled"
    assert GenerationTask not in Worker.task_handlers


def test_the_stream_handler_can_be_registered_on_a_class_that_handles_streams():
    class Mine(ScriptedWorker):
        pass

    class Streams(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask(input_str="p", worker_tag="generation", streaming_step=9)
            yield [stream]
            tasks[0].result = stream.result

    Mine.register_task_handler(StreamGenerationTask, stream_generation_handler)
    with ScaffoldingLlm(Streams(), {"generation": Mine(["abc"])}) as llm:
        assert llm.generate("p").output.text == "abc"


@pytest.mark.parametrize("name", ["ToolMessage", "ToolDescription", "OpenAIToolDescription"])
def test_the_messages_of_chats_are_in_the_module_of_tasks(name):
    assert hasattr(importlib.import_module("forethought.scaffolding.task"), name)
