"""Tools: chats whose calls are run by MCP servers, on a script, on the engine and on a server."""

import asyncio
import copy
import json
import os
import socket
import sys
from pathlib import Path

import pytest

import mcp_server
from forethought import AsyncLLM
from forethought.config.guided import GuidedDecodingParams
from forethought.errors import ParameterError, RequestCancelled, UsageError, WorkerTagError
from forethought.llm.response import ResponseParser
from forethought.scaffolding import (
    AssistantMessage,
    ChatTask,
    ChatWithMCPController,
    EngineWorker,
    MCPCallTask,
    MCPWorker,
    NativeGenerationController,
    OpenaiWorker,
    ScaffoldingLlm,
    Stage,
    SystemMessage,
    TaskStatus,
    ToolMessage,
    Trace,
    Worker,
    replay,
)
from models import save_random
from openai_server import serving as serving_openai
from tokens import byte_level, speaking

SERVER = [sys.executable, str(Path(mcp_server.__file__))]


@pytest.fixture(scope="module")
def url():
    with mcp_server.serving() as url:
        yield url


class Calling(Worker):
    """Says what a script says: texts, or lists of (name, arguments) to call."""

    def __init__(self, *script):
        self.script, self.seen, self.tools = list(script), [], []

    async def chat(self, task):
        self.seen.append(task.messages_to_dict_content())
        self.tools.append(task.tools)
        said = self.script.pop(0)
        if isinstance(said, str):
            task.output_str = said
            task.add_message(AssistantMessage(said))
            return
        calls = [
            {"id": f"{number}", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(said)
        ]
        task.output_str = ""
        task.add_message(AssistantMessage(None, tool_calls=calls))

    task_handlers = {ChatTask: chat}  # noqa: RUF012


def led(chat, tool_worker, prompt="p", **settings):
    """The result of a chat between a worker for chats and one for tools."""
    controller = ChatWithMCPController(NativeGenerationController(), **settings)
    workers = {"generation": chat, "tool_call": tool_worker}
    with ScaffoldingLlm(controller, workers, trace=True) as llm:
        return llm.generate(prompt)


def told(chat):
    """The results of tools that the model has read last."""
    return [m["content"] for m in chat.seen[-1] if m["role"] == "tool"]


async def called(worker, name, args):
    task = MCPCallTask.create_mcptask("1", name, args, "tool_call")
    assert await worker.run_task(task) is TaskStatus.SUCCESS
    return task


# ---- the controller ----------------------------------------------------------------------------


def test_the_model_reads_what_its_tools_answer_in_the_order_of_its_calls(url):
    chat = Calling([("add", '{"a": 1, "b": 2}'), ("echo", '{"text": "hm"}')], "It is 3.")
    result = led(chat, MCPWorker([url]), system_prompts=[SystemMessage("be brief")])
    assert result.outputs[0].text == "It is 3."
    assert chat.seen[0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "p"},
    ]
    assert told(chat) == ["3", "hm"]
    names = [tool["function"]["name"] for tool in chat.tools[0]]
    assert names == [
        "add",
        "echo",
        "divide",
        "shell",
        "wait",
        "pause",
        "noise",
        "refuse",
        "long",
        "crash",
    ]
    assert result.output.meta["tools"] == {"rounds": 1, "calls": 2, "errors": 0}
    stages = [event.output for event in result.events(stages=True)]
    shown = [(stage.name, stage.why) for stage in stages if isinstance(stage, Stage)]
    assert shown == [("called", "add"), ("called", "echo")]


def test_errors_are_told_to_the_model_and_it_goes_on(url):
    wrong = [
        ("nope", "{}"),
        ("add", "{'a'"),
        ("add", "[1]"),
        ("add", '{"a": "x", "b": 1}'),
        ("divide", '{"a": 1, "b": 0}'),
    ]
    chat = Calling(wrong, "Never mind.")
    result = led(chat, MCPWorker([url]))
    assert result.output.text == "Never mind."
    assert result.output.meta["tools"]["errors"] == 5
    messages = told(chat)
    assert all(message.startswith("Error: ") for message in messages)
    assert "no tool 'nope'. Tools: add, crash" in messages[0]
    assert "no JSON" in messages[1]
    assert "no JSON object" in messages[2]


def test_a_tool_worker_that_raises_is_an_error_for_the_model():
    class Broken(Worker):
        async def call(self, task):
            raise TimeoutError("the line is dead")

        task_handlers = {MCPCallTask: call}  # noqa: RUF012

    chat = Calling([("add", "{}")], "I cannot.")
    assert led(chat, Broken(), tools=[{"type": "function"}]).output.text == "I cannot."
    assert told(chat) == ["Error: TimeoutError: the line is dead"]


def test_after_the_last_round_the_answer_is_asked_for_without_tools(url):
    chat = Calling(*[[("echo", '{"text": "x"}')]] * 2, "Enough.")
    result = led(chat, MCPWorker([url]), max_iterations=2)
    assert result.output.text == "Enough."
    assert [tools is None for tools in chat.tools] == [False, False, True]
    chat = Calling(*[[("echo", '{"text": "x"}')]] * 3)
    result = led(chat, MCPWorker([url]), max_iterations=2)
    assert result.output.meta["tools"] == {"rounds": 2, "calls": 2, "errors": 0}


def test_calls_beyond_the_limit_of_a_round_are_refused_one_by_one(url):
    chat = Calling([("add", '{"a": 1, "b": 1}')] * 3, "Fine.")
    assert led(chat, MCPWorker([url]), max_calls=2).output.meta["tools"]["calls"] == 2
    assert told(chat)[:2] == ["2", "2"]
    assert "only 2 calls" in told(chat)[2]


def test_several_chats_go_on_at_once_and_plain_tasks_get_the_answers(url):
    chat = Calling("one", "two")
    controller = ChatWithMCPController(NativeGenerationController(), tools=[])
    with ScaffoldingLlm(controller, {"generation": chat, "tool_call": MCPWorker([url])}) as llm:
        assert sorted(r.output.text for r in llm.generate(["a", "b"])) == ["one", "two"]


def test_a_tool_call_without_a_worker_is_the_users_mistake():
    controller = ChatWithMCPController(NativeGenerationController(), tools=[{}])
    with (
        ScaffoldingLlm(controller, {"generation": Calling([("add", "{}")], "x")}) as llm,
        pytest.raises(WorkerTagError, match="tool_call"),
    ):
        llm.generate("p")


@pytest.mark.parametrize(
    "settings",
    [{"max_iterations": 0}, {"max_calls": 0}, {"system_prompts": ["be kind"]}],
)
def test_a_setting_of_the_wrong_kind_is_refused(settings):
    with pytest.raises(ParameterError, match="invalid"):
        ChatWithMCPController(NativeGenerationController(), **settings)


def test_a_chat_of_token_ids_is_refused(url):
    with pytest.raises(ParameterError, match="a chat needs text"):
        led(Calling(), MCPWorker([url]), [1, 2])


def test_a_recorded_chat_runs_again_without_model_and_tools(url, tmp_path):
    chat = Calling([("add", '{"a": 1, "b": 2}')], "It is 3.")
    result = led(chat, MCPWorker([url]))
    result.trace.save(tmp_path / "trace.json")
    trace = Trace.load(tmp_path / "trace.json")
    again = replay(trace, ChatWithMCPController(NativeGenerationController()), timeout=60)
    assert again.outputs == result.outputs
    call = next(span for span in trace.spans if span.name == "MCPCallTask")
    assert call.request == {"tool": "add", "args": '{"a": 1, "b": 2}'}
    assert call.results["result_str"] == "3"


# ---- the worker --------------------------------------------------------------------------------


def test_limits_end_a_call_and_cut_a_result(url):
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            worker = MCPWorker([url], call_timeout=0.2, max_result_chars=10)
            port = listening.getsockname()[1]
            late = await called(worker, "wait", {"port": port})
            await worker.async_shutdown()
        worker = MCPWorker([url], max_result_chars=10)
        long = await called(worker, "echo", {"text": "x" * 25})
        await worker.async_shutdown()
        return late, long

    late, long = asyncio.run(main())
    assert (late.is_error, late.result_str) == (True, "Error: wait took more than 0.2 seconds.")
    assert long.result_str == "x" * 10 + "\n[15 more characters are left out]"


def test_a_connection_stays_while_a_call_of_another_scaffolding_llm_is_under_way(url):
    async def main():
        worker, loop = MCPWorker([url]), asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            hanging = asyncio.ensure_future(
                called(worker, "wait", {"port": listening.getsockname()[1]})
            )
            connection, _ = await asyncio.wait_for(loop.sock_accept(listening), 60)
            connection.close()
        await worker.on_loop_end()
        answered = await called(worker, "add", {"a": 1, "b": 1})
        still_runs = not hanging.done()
        hanging.cancel()
        await asyncio.wait([hanging])
        await worker.async_shutdown()
        return answered.result_str, still_runs

    assert asyncio.run(main()) == ("2", True)


def test_an_old_server_is_reached_over_sse():
    async def main(url):
        worker = MCPWorker.init_with_urls([url])
        await worker.init_in_asyncio_event_loop()
        task = await called(worker, "shell", {"line": "ls"})
        await worker.async_shutdown()
        return task

    with mcp_server.serving(sse=True) as url:
        task = asyncio.run(main(url))
    assert (task.result_stdout, task.result_stderr) == ("ran ls", "none")


def test_a_local_server_that_ends_is_started_again_and_none_is_left(tmp_path):
    """Also if the request is cancelled in the middle of a call."""
    pids = tmp_path / "pids"
    worker = MCPWorker([[*SERVER, str(pids)]])
    chat = Calling([("crash", "{}")], [("add", '{"a": 1, "b": 2}')], "It is 3.")
    controller = ChatWithMCPController(NativeGenerationController())
    with ScaffoldingLlm(controller, {"generation": chat, "tool_call": worker}) as llm:
        assert llm.generate("p").output.text == "It is 3."
        assert told(chat) == ["Error: crash failed: Connection closed", "3"]
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(60)
            port = listening.getsockname()[1]
            chat.script = [[("wait", json.dumps({"port": port}))], "never said"]
            result = llm.generate_async("p")
            listening.accept()[0].close()
            result.abort()
            with pytest.raises(RequestCancelled):
                result.result(60)
        chat.script = [[("add", '{"a": 2, "b": 2}')], "It is 4."]
        assert llm.generate("p").output.text == "It is 4."
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("server", ["http://127.0.0.1:9/mcp", ["/nonexistent/program"]])
def test_a_server_that_cannot_be_reached_is_named(server):
    with pytest.raises(UsageError, match="no MCP server answers at"):
        led(Calling(), MCPWorker([server]))


@pytest.mark.parametrize("urls", [[], [7], "", [[]]])
def test_what_is_no_server_is_refused(urls):
    with pytest.raises(ParameterError, match=r"MCP ?(server|Worker)"):
        MCPWorker(urls)


# ---- engine and server -------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }};{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:{{ c.function.arguments.a }}"
    "</call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
CALL = '<think>sum</think><call>{"name": "add", "arguments": {"a": 4, "b": 5}}</call>'


class Forced(NativeGenerationController):
    """Has the model write the given texts, one per turn."""

    clone_shares = ("texts",)

    def __init__(self, *texts):
        super().__init__({"max_tokens": 120, "temperature": 0.0})
        self.texts = list(texts)

    def process(self, tasks, **kwargs):
        import re

        tasks[0].guided_decoding = GuidedDecodingParams(regex=re.escape(self.texts.pop(0)))
        yield from super().process(tasks, **kwargs)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A tiny random Llama whose tokenizer says how tools are called."""
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("calling")
    config = json.loads((speaking() / "config.json").read_text())
    save_random(LlamaConfig(**{**config, "max_position_embeddings": 512}), path)
    hf = copy.deepcopy(byte_level())
    hf.chat_template, hf.response_template = TEMPLATE, RESPONSE
    hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(model_dir):
    worker = EngineWorker(AsyncLLM(model_dir, dtype="float32"))
    yield worker
    worker.llm.shutdown()


def on_engine(engine, url, *texts):
    controller = ChatWithMCPController(Forced(*texts))
    workers = {"generation": engine, "tool_call": MCPWorker([url])}
    with ScaffoldingLlm(controller, workers, trace=True) as llm:
        return llm.generate("4 + 5?")


def test_the_engine_calls_tools_and_reads_their_answers(engine, url):
    result = on_engine(engine, url, CALL, "It is 9.")
    assert result.output.text == "It is 9."
    assert result.output.meta["tools"] == {"rounds": 1, "calls": 1, "errors": 0}
    first, second = (s for s in result.trace.spans if s.name == "ChatTask")
    assert first.results["finish_reason"] == "tool_calls"
    call, answer = second.request["messages"][1:]
    assert (call["content"], answer["content"]) == (None, "9")
    assert call["tool_calls"][0]["id"] == answer["tool_call_id"] == "call-1"
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"a": 4, "b": 5}
    assert second.usage["cached"] > 0  # the question was in the prefix cache


def test_a_call_that_cannot_be_read_is_told_to_the_model(engine, url):
    result = on_engine(engine, url, '<call>{"name": }</call>', "Sorry, 9.")
    assert result.output.text == "Sorry, 9."
    assert result.output.meta["tools"] == {"rounds": 1, "calls": 0, "errors": 1}
    second = [s for s in result.trace.spans if s.name == "ChatTask"][1]
    assert "cannot be read" in second.request["messages"][-1]["content"]


def test_a_response_template_may_be_given_and_is_checked():
    with pytest.raises(ParameterError, match="invalid response_template"):
        ResponseParser(byte_level(), {"fields": {}})
    parser = ResponseParser(byte_level(), RESPONSE)
    prompt = byte_level()("<|user|>?<|assistant|><think>").input_ids
    parsed = parser.parse("two calls</think>Now.<call>{}</call>", prompt, None)
    assert "needs a name" in parsed.error
    parsed = parser.parse("hm</think>Done.", prompt, None)
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == ("Done.", "hm", ())


def test_the_calls_of_a_server_are_run_too(url):
    import openai

    with serving_openai() as server:
        server.tool_call = {"name": "add", "arguments": ['{"a": 1,', ' "b": 2}']}

        def says(body):
            if body["messages"][-1]["role"] == "tool":
                server.tool_call = None
                return [f"It is {body['messages'][-1]['content']}."]
            return []

        server.says = says
        client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
        result = led(OpenaiWorker(client, "m"), MCPWorker([url]), "1 + 2?")
    assert result.output.text == "It is 3."
    assert server.requests[0]["tools"][0]["function"]["name"] == "add"
    assert isinstance(server.requests[1]["messages"][1]["tool_calls"], list)


def test_a_tool_message_keeps_what_a_tool_printed_out_of_the_request():
    message = ToolMessage("3", "1", trace_stdout="log", trace_stderr="")
    assert message.to_dict() == {"role": "tool", "content": "3", "tool_call_id": "1"}
