"""``OpenaiWorker`` against a server on this machine, through the official client."""

import asyncio
import time

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from forethought.config.guided import GuidedDecodingParams
from forethought.errors import (
    ParameterError,
    RequestCancelled,
    TaskError,
    UsageError,
)
from forethought.methods import DynasorGenerationController
from forethought.methods.parts.probe import ANSWER_END, ANSWER_SUFFIX, PROBE_SUFFIX
from forethought.outputs import Logprob, ThinkingOutput, ThoughtEnd, TokenConfidence
from forethought.scaffolding import (
    AsCompleted,
    Budget,
    ChatTask,
    ComputeTask,
    Controller,
    FirstDone,
    GenerationTask,
    NativeChatController,
    NativeGenerationController,
    OpenAIToolDescription,
    OpenaiWorker,
    ParallelProcess,
    ScaffoldingLlm,
    StreamGenerationTask,
    TaskStatus,
    TRTOpenaiWorker,
)
from forethought.workers.openai import StreamedChoice
from openai_server import OpenaiServer, serving


@pytest.fixture
def server():
    with serving() as server:
        yield server


class Client(OpenaiWorker):
    """The worker under test, with a client that it closes."""

    def __init__(self, server, **options):
        client = AsyncOpenAI(base_url=server.url, api_key="none", max_retries=1, timeout=60)
        super().__init__(client, "tiny", **options)

    async def async_shutdown(self):
        await super().async_shutdown()
        await self.async_client.close()


def run(worker, *tasks):
    """Execute tasks one after another, outside of any request."""

    async def main():
        try:
            return [await worker.run_task(task) for task in tasks]
        finally:
            await worker.async_shutdown()

    return asyncio.run(main())


def answer(controller, worker, prompt="p", **options):
    llm = ScaffoldingLlm(controller, {"generation": worker, DYNASOR: worker})
    try:
        return llm.generate(prompt, **options)
    finally:
        llm.shutdown(shutdown_workers=True)


DYNASOR = DynasorGenerationController.WorkerTag.GENERATION


@pytest.mark.parametrize("as_function", [False, True])
def test_one_worker_serves_several_scaffolding_llms_one_after_another_and_at_once(
    server, as_function
):
    """Connections that a closed event loop has left must not be used on the next one."""

    def client():
        return AsyncOpenAI(base_url=server.url, api_key="key", max_retries=0, timeout=7)

    worker = OpenaiWorker(client if as_function else client(), "tiny")
    workers = {"generation": worker}
    for _ in range(3):
        with ScaffoldingLlm(NativeGenerationController(), workers) as llm:
            texts = [llm.generate("p").output.text for _ in range(3)]
        assert texts == ["Hello world"] * 3
    with (
        ScaffoldingLlm(NativeGenerationController(), workers) as one,
        ScaffoldingLlm(NativeChatController(), workers) as other,
    ):
        results = [llm.generate_async("p") for llm in (one, other) * 3]
        assert [result.result(60).output.text for result in results] == ["Hello world"] * 6


def test_every_loop_has_a_client_with_the_settings_of_the_one_given(server):
    given = AsyncOpenAI(base_url=server.url, api_key="key", max_retries=3, timeout=7)
    worker, used = OpenaiWorker(given, "tiny"), []

    async def use():
        await worker.run_task(GenerationTask(input_str="p"))
        used.append(worker._clients.of_this_loop())
        await worker.async_shutdown()

    for _ in range(2):
        asyncio.run(use())
    one, other = used
    assert one is not other
    assert not given.is_closed()
    for client in used:
        assert client.is_closed()
        for name in ("api_key", "base_url", "max_retries", "timeout"):
            assert getattr(client, name) == getattr(given, name)


def test_a_scaffolding_llm_that_ends_closes_its_connections_if_they_are_idle(server):
    server.says, server.seconds_per_piece = lambda body: ["x"] * 50, 0.01
    worker = OpenaiWorker(AsyncOpenAI(base_url=server.url, api_key="key", timeout=60), "tiny")
    workers = {"generation": worker}

    async def main():
        async with ScaffoldingLlm(NativeGenerationController(), workers) as one:
            async with ScaffoldingLlm(NativeGenerationController(), workers) as other:
                result = one.generate_async("p")
                await other.generate_async("p", sampling_params={"max_tokens": 1})
                client = worker._clients.of_this_loop()
            await result
            assert not client.is_closed()
        assert client.is_closed()
        return result.output.text

    assert asyncio.run(main()) == "x" * 50


def test_a_client_that_cannot_be_copied_is_refused_on_a_second_loop(server):
    http = DefaultAsyncHttpxClient(timeout=7)
    given = AsyncOpenAI(base_url=server.url, api_key="key", http_client=http)
    worker = OpenaiWorker(given, "tiny")

    async def use():
        for _ in range(2):
            assert await worker.run_task(GenerationTask(input_str="p")) is TaskStatus.SUCCESS
            await worker.async_shutdown()
            assert not given.is_closed()
        await given.close()

    asyncio.run(use())
    with pytest.raises(UsageError, match="a function that makes it"):
        asyncio.run(use())


def test_a_completion_has_text_usage_times_and_no_token_ids(server):
    task = GenerationTask(input_str="p")
    assert run(Client(server), task) == [TaskStatus.SUCCESS]
    assert (task.output_str, task.output_tokens, task.finish_reason) == (
        "Hello world",
        None,
        "stop",
    )
    assert (task.usage_prompt_tokens, task.usage_completion_tokens) == (7, 2)
    assert (task.usage.prompt_tokens, task.usage.completion_tokens) == (7, 2)
    assert 0 < task.ttft_s <= task.latency_s
    assert task.request_id == "request-1"


def test_what_a_task_does_not_set_is_not_sent(server):
    run(Client(server), GenerationTask(input_str="p"))
    assert server.requests[0] == {
        "model": "tiny",
        "prompt": "p",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_every_sampling_field_of_the_api_is_sent(server):
    fields = {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["x", "y"],
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "user": "me",
        "suffix": "end",
        "echo": True,
    }
    run(Client(server), GenerationTask(input_tokens=[1, 2], logit_bias={3: 1.0}, **fields))
    sent = server.requests[0]
    assert sent["prompt"] == [1, 2]
    assert sent["logit_bias"] == {"3": 1.0}
    assert {name: sent[name] for name in fields} == fields


SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("shape", "sent"),
    [
        (
            GuidedDecodingParams(json=SCHEMA),
            {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
            },
        ),
        ({"json_object": True}, {"type": "json_object"}),
    ],
)
def test_a_shape_in_json_is_a_response_format(server, shape, sent):
    chat = ChatTask.create_from_prompt("hi")
    chat.guided_decoding = shape
    completion = GenerationTask(input_str="p", guided_decoding=shape)
    run(Client(server, extensions=["guided_decoding"]), chat, completion)
    assert [request["response_format"] for request in server.requests] == [sent, sent]
    assert all("guided_decoding" not in request for request in server.requests)


def test_a_shape_that_the_api_has_no_field_for_is_refused_by_name(server):
    chat = ChatTask.create_from_prompt("hi")
    chat.guided_decoding = GuidedDecodingParams(regex="a+")
    with pytest.raises(ParameterError, match="cannot honour guided_decoding with regex"):
        run(Client(server), chat)
    completion = GenerationTask(input_str="p", guided_decoding={"json_object": True})
    with pytest.raises(ParameterError, match="in completions, cannot honour guided_decoding"):
        run(Client(server), completion)
    assert server.requests == []


def test_best_of_is_asked_for_without_a_stream_as_the_api_demands(server):
    task = GenerationTask(input_str="p", best_of=3)
    run(Client(server), task)
    assert server.requests[0]["best_of"] == 3
    assert not server.requests[0]["stream"]
    assert (task.output_str, task.usage_completion_tokens) == ("Hello world", 2)


@pytest.mark.parametrize(
    "name",
    [
        *("top_k", "min_p", "min_tokens", "repetition_penalty", "top_n_sigma"),
        *("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"),
        *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    ],
)
def test_fields_beyond_the_api_are_refused_unless_the_server_takes_them(server, name):
    def task():
        return GenerationTask(input_str="p", **{name: 3})

    with pytest.raises(ParameterError, match=f"OpenaiWorker cannot honour {name}"):
        run(Client(server), task())
    run(Client(server, extensions=[name], extra_body={"more": 1}), task())
    assert (server.requests[0][name], server.requests[0]["more"]) == (3, 1)


FIELDS_OF_ENGINES = (
    {"return_context_logits": True},
    {"skip_detokenizer": True},
    {"speculation": {"enabled": False}},
)


def test_what_no_server_can_do_is_refused_by_name(server):
    for field in FIELDS_OF_ENGINES:
        with pytest.raises(ParameterError):
            run(Client(server), GenerationTask(input_str="p", **field))
    with pytest.raises(ParameterError, match="no prompt"):
        run(Client(server), GenerationTask())
    with pytest.raises(ParameterError, match="echo and num_logprobs"):
        run(Client(server), GenerationTask(input_str="p", echo=True, num_logprobs=1))
    with pytest.raises(ParameterError, match="topk"):
        Client(server, extensions=["topk"])
    assert server.requests == []


def test_the_worker_for_tensorrt_servers_takes_top_k():
    assert TRTOpenaiWorker(None, "m").extensions == {"top_k"}


def test_kv_cache_hints_may_be_switched_off_by_name():
    assert OpenaiWorker(None, "m", False, {"more": 1}).extra_body == {"more": 1}
    with pytest.raises(ParameterError, match="kv_cache_hint_enabled"):
        OpenaiWorker(None, "m", kv_cache_hint_enabled=True)


def test_all_samples_come_back(server):
    task = GenerationTask(input_str="p", n=3)
    run(Client(server), task)
    assert [sample.text for sample in task.samples] == ["Hello world"] * 3
    assert task.usage_completion_tokens == 2
    assert task.usage.completion_tokens == 6


def test_log_probabilities_come_back_with_the_tokens_texts(server):
    task = GenerationTask(input_str="p", num_logprobs=2)
    run(Client(server), task)
    first = list(task.logprobs[0].values())
    assert [(e.token, e.logprob, e.rank) for e in first] == [
        ("Hello", -0.5, 1),
        ("other", -1.5, 2),
    ]
    assert task.cumulative_logprob == -1.0


def test_a_single_stop_string_is_taken_as_the_reason_unless_the_server_sends_one(server):
    task, told = GenerationTask(input_str="p", stop="}"), GenerationTask(input_str="p", stop="}")
    run(Client(server), task)
    assert (task.finish_reason, task.stop_reason) == ("stop", "}")
    server.extra_choice = {"stop_reason": None}
    run(Client(server), told)
    assert (told.finish_reason, told.stop_reason) == ("stop", None)


def test_tokens_are_streamed_through_a_method(server):
    server.says = lambda body: ["a", "b", "c"]
    server.seconds_per_piece = 0.0
    worker = Client(server)
    llm = ScaffoldingLlm(NativeGenerationController(streaming=True), {"generation": worker})
    try:
        texts = [partial.cur_output.text for partial in llm.generate_async("p")]
    finally:
        llm.shutdown(shutdown_workers=True)
    assert texts == ["a", "ab", "abc", "abc"]


def test_a_stream_runs_on_between_its_steps(server):
    class Sleeper(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask(input_str="p", worker_tag="generation", streaming_step=2)
            seen = []
            while not stream.end_flag:
                yield [stream]
                seen.append(stream.output_str)
                time.sleep(0.2)
                stream.streaming_step = 0
            tasks[0].output_str = repr(seen)

    server.says = lambda body: list("abcdef")
    server.seconds_per_piece = 0.01
    seen = eval(answer(Sleeper(), Client(server)).output.text)
    assert seen[0] == "ab"
    assert seen[-1] == "abcdef"
    assert len(server.requests) == 1


@pytest.mark.parametrize("fields", [{}, {"num_logprobs": 1}])
def test_a_stream_comes_back_with_exactly_its_step_however_far_the_server_is(server, fields):
    server.says = lambda body: list("abcdef")
    stream = StreamGenerationTask(input_str="p: ", streaming_step=2, **fields)
    seen = []

    async def main():
        worker = Client(server)
        while not stream.end_flag:
            await worker.run_task(stream)
            seen.append((stream.output_str, stream.num_generated, stream.finish_reason))
            assert stream.fork("?").input_str == "p: " + stream.output_str + "?"
            assert len(stream.logprobs or []) == (stream.num_generated if fields else 0)
            while not stream.request_handle.ended:
                await asyncio.sleep(0.001)
        await worker.async_shutdown()

    asyncio.run(main())
    assert seen == [("ab", 2, None), ("abcd", 4, None), ("abcdef", 6, "stop")]
    if fields:
        assert stream.cumulative_logprob == -0.5 * 6


def test_the_tokens_of_one_piece_are_separated_by_their_log_probabilities():
    def seen(texts, piece):
        choice = StreamedChoice()
        choice.add("x", [{-1: Logprob(-1.0, 1, "x")}])
        choice.add(piece, [{-1: Logprob(-1.0, 1, text)} for text in texts])
        return [choice.begin_of(count).text for count in range(5)]

    assert seen(["ab", "c", "d"], "abcd") == ["", "x", "xab", "xabc", "xabcd"]
    # Names that are no texts: then the piece comes with the last of its tokens.
    assert seen(["token_id:5", "token_id:6"], "ab") == ["", "x", "x", "xab", "xab"]


def test_a_thought_and_its_answer_can_be_cut_token_by_token():
    choice = StreamedChoice()
    for thought in ("a ", "b "):
        choice.add("", thought=thought)
    choice.add("c")
    seen = [(choice.begin_of(n).reasoning, choice.begin_of(n).text) for n in range(4)]
    assert seen == [("", ""), ("a ", ""), ("a b ", ""), ("a b ", "c")]


def test_a_stream_is_streamed_by_its_steps_as_far_as_they_show_it(server):
    class Streams(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask(input_str="p", worker_tag="generation", streaming_step=3)
            stream.streaming_output_flag = True
            yield [stream]
            yield [ComputeTask(time.sleep, 0.2)]
            yield [stream]
            stream.cancel_flag = True
            yield [stream]
            tasks[0].result = stream.result

    server.says = lambda body: list("abcdefghij")
    llm = ScaffoldingLlm(Streams(), {"generation": Client(server)})
    result = llm.generate_async("p")
    told = [event.output.text for event in result.events()]
    llm.shutdown(shutdown_workers=True)
    assert "".join(told) == result.output.text == "abcdef"
    assert result.output.finish_reason == "abort"


WORDS = [word if at else f" {word}" for word in ("one", "two", "three") for at in (0, 1)] * 20


def continuing(body):
    """The tokens of a text, from where the prompt has come to."""
    known, place = body["prompt"].removeprefix("p:"), 0
    while known:
        assert known.startswith(WORDS[place]), "only whole tokens are continued"
        known, place = known.removeprefix(WORDS[place]), place + 1
    return WORDS[place:]


def in_parts(server, step, **fields):
    """A stream in parts, as seen at its steps, and the tokens asked for until then."""
    server.says = continuing
    stream = StreamGenerationTask(
        input_str="p:", streaming_step=step, tokens_per_request=8, **fields
    )
    seen = []

    async def main():
        worker = Client(server)
        while not stream.end_flag:
            await worker.run_task(stream)
            seen.append((stream.output_str, stream.num_generated))
        await worker.async_shutdown()

    asyncio.run(main())
    return stream, seen


@pytest.mark.parametrize("step", [1, 3, 8, 20])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_stream_in_parts_says_what_it_says_in_one_piece(server, step, streamed):
    stream, seen = in_parts(server, step, streaming_output_flag=streamed)
    assert stream.output_str == "".join(WORDS)
    assert stream.finish_reason == "stop"
    counts = [*range(step, len(WORDS), step), len(WORDS)]
    assert seen[: len(counts)] == [("".join(WORDS[:count]), count) for count in counts]
    assert len(server.requests) >= len(WORDS) // 10
    # What is cut off behind the last word is generated again, and counted.
    assert stream.usage.completion_tokens == len(WORDS) + stream.usage.discarded
    assert 0 < stream.usage.discarded <= 2 * len(server.requests)


@pytest.mark.parametrize("tokens_per_chunk", [1, 4])
def test_a_server_is_never_a_request_ahead_of_the_steps(server, tokens_per_chunk):
    server.says, server.tokens_per_chunk = continuing, tokens_per_chunk
    stream = StreamGenerationTask(input_str="p:", streaming_step=8, tokens_per_request=8)

    async def main():
        worker = Client(server)
        for step in range(1, 5):
            await worker.run_task(stream)
            await asyncio.sleep(0.02)  # time to run ahead
            assert len(server.requests) == step
            assert stream.num_generated == 8 * step
            asked = len(WORDS) - len(continuing(server.requests[-1]))
            assert asked + server.requests[-1]["max_tokens"] <= 8 * step + 2
        stream.cancel_flag = True
        await worker.run_task(stream)
        await worker.async_shutdown()

    asyncio.run(main())
    assert (stream.finish_reason, stream.num_generated) == ("abort", 32)


@pytest.mark.parametrize("max_tokens", [5, 8, 9, 16, 21])
def test_a_stream_in_parts_ends_at_max_tokens(server, max_tokens):
    stream, _ = in_parts(server, 8, max_tokens=max_tokens)
    assert (stream.output_str, stream.finish_reason) == ("".join(WORDS[:max_tokens]), "length")
    assert stream.num_generated == max_tokens


def test_a_part_that_the_context_cuts_short_is_the_last(server):
    server.context = 7
    stream, _ = in_parts(server, 8)
    assert (stream.output_str, stream.finish_reason) == ("".join(WORDS[:7]), "length")
    assert len(server.requests) == 1


def test_each_part_draws_with_a_seed_of_its_own(server):
    in_parts(server, 8, seed=3)
    seeds = [request["seed"] for request in server.requests]
    assert seeds[0] == 3
    assert len(set(seeds)) == len(seeds) > 5


@pytest.mark.parametrize(
    "field", [{"stop": ["x"]}, {"presence_penalty": 0.5}, {"input_str": None, "input_tokens": [1]}]
)
def test_what_cannot_be_continued_is_generated_in_one_request(server, field):
    fields = {"input_str": "p:", "streaming_step": 8, "tokens_per_request": 1, **field}
    stream = StreamGenerationTask(**fields)
    server.says = lambda body: WORDS
    run(Client(server), stream)
    assert stream.num_generated == 8
    assert len(server.requests) == 1
    assert "max_tokens" not in server.requests[0]


def test_parts_of_no_tokens_are_refused(server):
    with pytest.raises(ParameterError, match="tokens_per_request"):
        run(Client(server), StreamGenerationTask(input_str="p:", tokens_per_request=0))


def test_a_stream_that_its_branch_has_left_has_ended(server):
    """It was ended with its branch; who asks for more of it gets what was seen."""
    stream = StreamGenerationTask(input_str="p", worker_tag="generation")

    class Once(Controller):
        def process(self, tasks, **kwargs):
            yield [stream]

    class Leaver(Controller):
        def process(self, tasks, **kwargs):
            yield ParallelProcess([Once()], [[]])
            yield [stream]
            tasks[0].result = stream.result

    server.says = lambda body: ["x" * 1000] * 5000
    server.seconds_per_piece = 0.01
    output = answer(Leaver(), Client(server)).output
    assert (output.finish_reason, stream.end_flag) == ("abort", True)


def test_a_stream_that_is_left_closes_its_connection(server):
    class Leaver(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask(input_str="p", worker_tag="generation")
            yield [stream]
            tasks[0].output_str = stream.output_str

    server.says = lambda body: ["x" * 1000] * 5000
    server.seconds_per_piece = 0.01
    answer(Leaver(), Client(server))
    wait_for_disconnection(server)
    assert server.disconnected == 1


def test_a_cancelled_stream_closes_its_connection_while_its_request_goes_on(server):
    class Leaver(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask(
                input_str="p", worker_tag="generation", streaming_step=1000
            )
            yield FirstDone([stream, ComputeTask(wait_for_request, server)])
            yield [ComputeTask(wait_for_disconnection, server)]
            tasks[0].output_str = str(server.disconnected)

    server.says = lambda body: ["x" * 1000] * 5000
    server.seconds_per_piece = 0.01
    assert answer(Leaver(), Client(server)).output.text == "1"


def wait_for_request(server):
    """Until one is being answered."""
    deadline = time.perf_counter() + 60
    while not server.most_seen and time.perf_counter() < deadline:
        time.sleep(0.01)


def wait_for_disconnection(server):
    deadline = time.perf_counter() + 60
    while not server.disconnected and time.perf_counter() < deadline:
        time.sleep(0.02)


def test_a_cancelled_generation_closes_its_connection(server):
    server.says = lambda body: ["x" * 1000] * 5000
    server.seconds_per_piece = 0.01
    llm = ScaffoldingLlm(NativeGenerationController(), {"generation": Client(server)})
    result = llm.generate_async("p")
    wait_for_request(server)
    result.abort()
    with pytest.raises(RequestCancelled):
        result.result(60)
    wait_for_disconnection(server)
    assert server.disconnected == 1
    llm.shutdown(shutdown_workers=True)


def test_cancel_flag_ends_a_stream(server):
    server.says = lambda body: ["x"] * 500
    server.seconds_per_piece = 0.01
    stream = StreamGenerationTask(input_str="p", streaming_step=1)

    async def main():
        worker = Client(server)
        await worker.run_task(stream)
        stream.cancel_flag = True
        await worker.run_task(stream)
        await worker.async_shutdown()

    asyncio.run(main())
    assert (stream.end_flag, stream.finish_reason) == (True, "abort")
    assert 1 <= len(stream.output_str) < 500


def test_the_official_client_retries_and_then_the_error_reaches_the_controller(server):
    server.fail_with = [500]
    assert answer(NativeGenerationController(), Client(server)).output.text == "Hello world"
    server.fail_with = [500, 500]
    with pytest.raises(TaskError, match="InternalServerError"):
        answer(NativeGenerationController(), Client(server))
    server.fail_with = [400]
    with pytest.raises(TaskError, match="BadRequestError"):
        answer(NativeGenerationController(), Client(server))


@pytest.mark.parametrize(
    "kind", [NativeGenerationController, NativeChatController, DynasorGenerationController]
)
def test_an_answer_that_breaks_off_is_a_failure(server, kind):
    server.breaks_off = True
    with pytest.raises(TaskError, match="broke off"):
        answer(kind(), Client(server))


class Dropping(OpenaiServer):
    """Closes the connection in the middle of an answer."""

    def chunks(self, path, body):
        yield next(super().chunks(path, body))
        raise ConnectionError


def test_a_connection_that_drops_is_named_with_its_address_and_reason():
    with serving(Dropping()) as server, pytest.raises(TaskError) as caught:
        answer(NativeGenerationController(), Client(server))
    assert server.url in str(caught.value)
    assert "incomplete chunked read" in str(caught.value)


def test_the_password_in_an_address_is_in_no_error():
    with serving(Dropping()) as server:
        url = server.url.replace("//", "//me:s3cret@")
        worker = OpenaiWorker(
            AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60), "m"
        )
        with pytest.raises(TaskError, match="was lost") as caught:
            answer(NativeGenerationController(), worker)
    assert "s3cret" not in str(caught.value)


class Sloppy(OpenaiServer):
    """Sends the given usage, and chunks without choices."""

    def __init__(self, usage):
        super().__init__()
        self.usage = usage

    def chunks(self, path, body):
        for chunk in super().chunks(path, body):
            yield {**self.base(False, body), "choices": None}
            yield self.base(False, body)
            yield {**chunk, "usage": self.usage} if "usage" in chunk else chunk


@pytest.mark.parametrize("count", [None, -3])
def test_a_usage_without_counts_and_chunks_without_choices_cost_no_answer(count):
    usage = {"prompt_tokens": count, "completion_tokens": count, "total_tokens": count}
    with serving(Sloppy(usage)) as server:
        result = answer(NativeGenerationController(), Client(server))
    assert result.output.text == "Hello world"
    assert result.usage.prompt_tokens == result.usage.prefilled == 0
    assert result.usage.completion_tokens >= 0


class CutsTheSecond(Controller):
    """Generates whole answers to some prompts, and then two tokens of another answer."""

    def __init__(self, prompt, *whole):
        super().__init__()
        self.prompt, self.whole = prompt, whole

    def process(self, tasks, **kwargs):
        yield [GenerationTask(input_str=each, worker_tag="generation") for each in self.whole]
        stream = StreamGenerationTask(worker_tag="generation", streaming_step=2, max_tokens=99)
        is_text = isinstance(self.prompt, str)
        stream.input_str, stream.input_tokens = (
            (self.prompt, None) if is_text else (None, self.prompt)
        )
        yield [stream]
        stream.cancel_flag = True
        yield [stream]
        tasks[0].result = stream.result


class NeverEnding(OpenaiServer):
    """Answers of at most 99 tokens end only when the client leaves."""

    def chunks(self, path, body):
        for chunk in super().chunks(path, body):
            while body.get("max_tokens") == 99 and self.is_last(chunk):
                time.sleep(0.001)
                yield None
            yield chunk

    def is_last(self, chunk):
        return chunk["choices"][0]["finish_reason"] is not None


class CountingAlong(NeverEnding):
    """Sends its usage so far with every chunk."""

    def chunks(self, path, body):
        for count, chunk in enumerate(super().chunks(path, body), start=1):
            usage = {"prompt_tokens": 9, "completion_tokens": count}
            yield chunk and {"usage": usage, **chunk}


@pytest.mark.parametrize(
    ("state", "prompt", "whole", "num_prompt_tokens"),
    [
        (CountingAlong(), "a prompt", (), 9),
        (NeverEnding(), "a prompt", ("another", "a prompt"), 7 + 7 + 7),
        (NeverEnding(), "a prompt", ("another",), 7 + 2),
        (NeverEnding(), [5, 6, 7], (), 3),
    ],
    ids=["told so far", "told of another answer", "about four characters each", "ids"],
)
def test_the_prompt_of_a_cut_answer_counts_as_exactly_as_it_is_known(
    state, prompt, whole, num_prompt_tokens
):
    state.says = lambda body: WORDS
    with serving(state) as server:
        result = answer(CutsTheSecond(prompt, *whole), Client(server))
        assert result.usage.prompt_tokens == result.usage.prefilled == num_prompt_tokens
        assert result.usage.completion_tokens >= 2


def test_the_prompts_of_a_request_that_is_over_are_forgotten():
    with serving(NeverEnding()) as server:
        server.says = lambda body: WORDS
        worker = Client(server)
        answer(CutsTheSecond("p", "p"), worker)
    assert not worker.prompt_lengths._known


class Ending(OpenaiServer):
    """Says eight tokens and then nothing more, always with ``length`` and without usage."""

    def chunks(self, path, body):
        base = self.base(False, body)
        for text in WORDS[:8] if len(self.requests) == 1 else ():
            yield {**base, "choices": [self.choice(False, 0, text, body)]}
        last = self.choice(False, 0, "", {}) | {"finish_reason": "length"}
        yield {**base, "choices": [last]}


def test_a_part_that_brings_nothing_new_is_the_last():
    with serving(Ending()) as server:
        worker = Client(server)
        stream = StreamGenerationTask(
            input_str="p:", streaming_step=100, tokens_per_request=8, max_tokens=200
        )
        run(worker, stream)
    assert (stream.finish_reason, stream.end_flag) == ("length", True)
    assert len(server.requests) <= 2


def test_the_budget_counts_and_stops_what_the_server_sends(server):
    server.says = lambda body: ["x"] * 300
    server.seconds_per_piece = 0.01
    result = answer(NativeGenerationController(), Client(server), budget=Budget(tokens=20))
    assert (result.output.text, result.output.finish_reason) == ("x" * 20, "length")

    class Two(Controller):
        def process(self, tasks, **kwargs):
            copies = [GenerationTask(input_str="p", worker_tag="generation") for _ in range(2)]
            yield copies

    result = answer(Two(), Client(server), budget=Budget(tokens=20))
    assert (result.usage.completion_tokens, result.spent_budget) == (20, "tokens")
    assert 10 <= len(result.output.text) < 20


# ---- chats -------------------------------------------------------------------------------------


def test_a_chat_turn_is_appended_and_counted(server):
    chat = ChatTask.create_from_prompt("hi")
    chat.enable_token_counting, chat.temperature = True, 0.5
    run(Client(server), chat, chat)
    assert chat.messages_to_dict_content() == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello world"},
        {"role": "assistant", "content": "Hello world"},
    ]
    assert (chat.prompt_tokens_num, chat.completion_tokens_num) == (14, 4)
    assert (chat.output_str, chat.finish_reason, chat.end_flag) == ("Hello world", "stop", True)
    assert server.requests[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert server.requests[0]["temperature"] == 0.5


def test_a_plain_task_can_be_answered_by_a_chat(server):
    controller = NativeChatController(sampling_params={"max_tokens": 1})
    result = answer(controller, Client(server), "hi")
    assert (result.output.text, result.output.finish_reason) == ("Hello", "length")
    assert server.requests[0]["max_tokens"] == 1


def test_tool_calls_are_put_together_from_their_pieces(server):
    server.says = lambda body: []
    server.tool_call = {"name": "add", "arguments": ['{"a":', " 1}"]}
    chat = ChatTask.create_from_prompt("1?", tools=[OpenAIToolDescription("add", "adds", {})])
    run(Client(server), chat)
    message = chat.messages[-1]
    assert message.content is None
    assert message.finish_reason == "tool_calls"
    call = message.tool_calls[0]
    assert (call.id, call.function.name, call.function.arguments) == ("call-1", "add", '{"a": 1}')
    assert server.requests[0]["tools"][0]["function"]["name"] == "add"


def test_a_server_is_asked_for_the_top_log_probabilities(server):
    plain = GenerationTask(input_str="p", confidence=2)
    both = GenerationTask(input_str="p", confidence=2, num_logprobs=1)
    run(Client(server), plain)
    run(Client(server), both)
    assert [request["logprobs"] for request in server.requests] == [2, 2]
    assert plain.confidences == both.confidences == [TokenConfidence(1.0, -0.5)] * 2
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)
    assert [len(entries) for entries in both.logprobs] == [1, 1], "as many as it asked for"


def test_a_stream_of_a_server_brings_confidences_with_its_tokens(server):
    server.says = lambda body: list("abcdef")
    stream = StreamGenerationTask(input_str="p: ", streaming_step=2, confidence=1)
    seen = []

    async def main():
        worker = Client(server)
        while not stream.end_flag:
            await worker.run_task(stream)
            seen.append(len(stream.confidences))
        await worker.async_shutdown()

    asyncio.run(main())
    assert seen == [2, 4, 6]


def test_an_echo_has_no_confidences(server):
    with pytest.raises(ParameterError, match="echo and confidence"):
        run(Client(server), GenerationTask(input_str="p", echo=True, confidence=1))


def test_chats_have_confidences_too(server):
    chat = ChatTask.create_from_prompt("hi")
    chat.confidence = 2
    run(Client(server), chat)
    assert server.requests[0]["top_logprobs"] == 2
    assert chat.confidences == [TokenConfidence(1.0, -0.5)] * 2


def test_chats_have_log_probabilities_too(server):
    chat = ChatTask.create_from_prompt("hi")
    chat.num_logprobs = 2
    run(Client(server), chat)
    assert (server.requests[0]["logprobs"], server.requests[0]["top_logprobs"]) == (True, 2)
    assert [entry.token for entry in chat.logprobs[1].values()] == [" world", "other"]


def test_what_a_chat_cannot_do_is_refused(server):
    for field in ({"echo": True}, {"n": 2}, {"best_of": 2}, {"suffix": "x"}):
        chat = ChatTask.create_from_prompt("hi")
        for name, value in field.items():
            setattr(chat, name, value)
        with pytest.raises(ParameterError):
            run(Client(server), chat)


# ---- methods -----------------------------------------------------------------------------------


def test_forks_go_out_as_text(server):
    class Forker(Controller):
        def process(self, tasks, **kwargs):
            main = StreamGenerationTask(input_str="p: ", worker_tag="generation", streaming_step=2)
            with AsCompleted([main]) as running:
                yield running
                probe = main.fork("?", max_tokens=1)
                yield [probe]
            tasks[0].output_str = probe.input_str

    server.says = lambda body: list("abcd")
    server.seconds_per_piece = 0.05
    text = answer(Forker(), Client(server)).output.text
    assert text.startswith("p: ab")
    assert text.endswith("?")
    assert server.requests[1]["prompt"] == text


def test_dynasor_runs_over_http(server):
    def says(body):
        chain = body["prompt"].removeprefix("p: ")
        return list("42") if PROBE_SUFFIX in chain else list(("thinking " * 30)[len(chain) :])

    server.says, server.seconds_per_piece = says, 0.002
    controller = DynasorGenerationController(certainty_threshold=2, chunk_size=16)
    result = answer(controller, Client(server), "p: ")
    kept, _, written = result.output.text.partition(ANSWER_SUFFIX)
    assert written == "42" + ANSWER_END
    assert kept == ("thinking " * 30)[:32]
    assert result.output.meta["dynasor"]["early_exit"]
    probes = [r["prompt"] for r in server.requests if r["prompt"].endswith(PROBE_SUFFIX)]
    assert probes[:2] == [f"p: {kept[:size]}{PROBE_SUFFIX}" for size in (16, 32)]
    parts = [r for r in server.requests if PROBE_SUFFIX not in r["prompt"]]
    assert [r["prompt"] for r in parts[:2]] == ["p: ", "p: thinking thinking"]
    assert [r["max_tokens"] for r in parts[:2]] == [16 + 4, 32 - 17 + 4]


# ---- thinking budgets ----------------------------------------------------------------------------

THOUGHT, ANSWER = ["one", " two", " three", " four"], ["So", " five"]
OPENED = "Q<think>\n"


def thinking(body):
    """Thinks four tokens and answers, from wherever the prompt ends; keeps to the stop strings."""
    said = body["prompt"].removeprefix(OPENED)
    if "</think>" in said:
        return ANSWER
    return THOUGHT if body.get("stop") else [*THOUGHT, "</think>", *ANSWER]


def think(server, worker=None, **fields):
    server.says = thinking
    task = GenerationTask(input_str=OPENED, **fields)
    run(worker or Client(server), task)
    return task


def test_a_thought_is_closed_at_its_cap_in_a_second_request(server):
    server.extra_choice = {"stop_reason": None}
    task = think(server, thinking_budget=2, max_tokens=50, seed=3, temperature=0.5)
    assert task.output_str == "one two</think>So five"
    assert task.thinking == ThinkingOutput(2, ThoughtEnd.BUDGET)
    first, second = server.requests
    assert (first["prompt"], first["max_tokens"]) == (OPENED, 2)
    assert first["stop"] == ["</think>"]
    assert (second["prompt"], second["max_tokens"]) == (OPENED + "one two</think>", 48)
    assert "stop" not in second
    assert second["temperature"] == 0.5
    assert second["seed"] != first["seed"] == 3
    assert task.usage.completion_tokens == 4
    assert (task.finish_reason, task.stop_reason) == ("stop", None)


def test_a_thought_that_ends_before_its_cap_is_answered_behind_its_own_marker(server):
    closing = "I stop.</think>"
    task = think(server, thinking_budget=20, thinking_end=closing)
    assert task.output_str == "one two three four</think>So five"
    assert task.thinking == ThinkingOutput(4, ThoughtEnd.NATURAL)
    assert task.stop_reason is None
    cut = think(server, thinking_budget=1, thinking_end=closing)
    assert cut.output_str == "oneI stop.</think>So five"


def test_without_a_thought_the_closing_text_ends_the_prompt_of_one_request(server):
    task = think(server, thinking_budget=0)
    assert [request["prompt"] for request in server.requests] == [OPENED + "</think>"]
    assert task.output_str == "</think>So five"
    assert task.thinking == ThinkingOutput(0, ThoughtEnd.BUDGET)


def test_a_thought_that_ends_with_the_generation_is_not_answered(server):
    task = think(server, thinking_budget=3, max_tokens=3)
    assert (task.output_str, task.finish_reason) == ("one two three", "length")
    assert task.thinking == ThinkingOutput(3, None)
    server.extra_choice = {"stop_reason": None}  # not the marker: end of sequence
    task = think(server, thinking_budget=30)
    assert (task.output_str, task.finish_reason) == ("one two three four", "stop")
    assert len(server.requests) == 2


def test_a_prompt_that_has_closed_its_thought_is_continued_as_it_is(server):
    task = GenerationTask(input_str="Q<think>\n\n</think>\n", thinking_budget=5, stop=["!"])
    run(Client(server), task)
    assert server.requests[0]["prompt"] == task.input_str
    assert task.output_str == "Hello world"


@pytest.mark.parametrize("step", [1, 3])
def test_a_stream_with_a_thinking_budget_says_the_same_step_by_step(server, step):
    server.says, texts = thinking, []

    class Steps(Controller):
        def process(self, tasks, **kwargs):
            stream = StreamGenerationTask(
                input_str=OPENED, worker_tag="generation", streaming_step=step, thinking_budget=2
            )
            while not stream.end_flag:
                yield [stream]
                texts.append(stream.output_str)
            tasks[0].result = stream.result

    output = answer(Steps(), Client(server)).output
    assert output.text == texts[-1] == "one two</think>So five"
    assert all(texts[-1].startswith(text) for text in texts)
    assert output.thinking == ThinkingOutput(2, ThoughtEnd.BUDGET)


def test_a_streamed_answer_has_the_closing_text_in_it(server):
    server.says = thinking
    params = {"thinking_budget": 2}
    controller = NativeGenerationController(streaming=True)
    llm = ScaffoldingLlm(controller, {"generation": Client(server)})
    try:
        result = llm.generate_async(OPENED, sampling_params=params)
        pieces = [event.output.text for event in result.events()]
    finally:
        llm.shutdown(shutdown_workers=True)
    assert "".join(pieces) == "one two</think>So five"


def test_a_servers_own_field_gets_the_budget(server):
    worker = Client(server, thinking_field="thinking_token_budget")
    chat = ChatTask.create_from_prompt("Q")
    chat.thinking_budget = 7
    run(worker, GenerationTask(input_str="p", thinking_budget=0), chat)
    assert [request["thinking_token_budget"] for request in server.requests] == [0, 7]
    task = GenerationTask(input_str="p", thinking_budget=4, thinking_end="</think>")
    with pytest.raises(ParameterError, match="thinking_end"):
        run(Client(server, thinking_field="reasoning_budget"), task)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 2}, "cannot honour n"),
        ({"stop": ["x"]}, "cannot honour stop"),
        ({"num_logprobs": 1}, "cannot honour num_logprobs"),
        ({"input_str": None, "input_tokens": [1, 2]}, "no <think>"),
        ({"input_str": "Q"}, "no <think>"),
        ({"thinking_soft": 2}, "cannot honour thinking_soft"),
        ({"thinking_end": "Stop."}, "thinking_end does not end the thought"),
    ],
)
def test_a_thinking_budget_that_two_requests_cannot_keep_is_refused(server, fields, says):
    task = GenerationTask(**{"input_str": OPENED, "thinking_budget": 4, **fields})
    with pytest.raises(ParameterError, match=says):
        run(Client(server), task)
    chat = ChatTask.create_from_prompt("Q")
    chat.thinking_budget = 4
    with pytest.raises(ParameterError, match="in chats, cannot honour thinking_budget"):
        run(Client(server), chat)
    assert server.requests == []


def test_markers_of_another_model_close_its_thoughts(server):
    server.says = lambda body: ["a", "b", "c"]
    worker = Client(server, thinking_markers=("[THINK]", "[/THINK]"))
    task = GenerationTask(input_str="Q[THINK]", thinking_budget=2)
    run(worker, task)
    assert task.output_str == "ab[/THINK]abc"
