"""``UpstreamWorker`` over servers on this machine that die, stall, refuse and recover."""

import asyncio
import socket
from base64 import b64encode
from contextlib import ExitStack

import pytest

from forethought.errors import ParameterError, TaskError
from forethought.methods import MajorityVoteController
from forethought.scaffolding import (
    ChatTask,
    GenerationTask,
    NativeGenerationController,
    ScaffoldingLlm,
    UserMessage,
)
from forethought.workers.openai_requests import prompt_text
from forethought.workers.upstream import Retries, UpstreamWorker
from openai_server import serving

PROMPTS = [f"{number} is the question, and its text is longer than a block" for number in range(8)]
QUICK = Retries(pause=0.001, check_seconds=600.0)


@pytest.fixture
def servers():
    with ExitStack() as stack:
        found = [stack.enter_context(serving()) for _ in range(2)]
        for number, server in enumerate(found):
            server.says = lambda body, number=number: ["from ", str(number)]
        yield found


def worker_of(servers, retries=QUICK, **options):
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return UpstreamWorker(urls, "m", retries=retries, **options)


def ask(worker, prompts, controller=None, at_once=8):
    controller = controller or NativeGenerationController({"max_tokens": 4})
    llm = ScaffoldingLlm(controller, {"generation": worker}, at_once)
    try:
        return [result.output.text for result in llm.generate(prompts)]
    finally:
        llm.shutdown(shutdown_workers=True)


@pytest.fixture
def closed_ports():
    """The URLs of two ports on which nobody listens."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        yield [f"http://127.0.0.1:{one.getsockname()[1]}/v1" for one in held]


def counts(servers):
    return [len(server.requests) for server in servers]


def test_requests_are_spread_over_the_servers_and_none_stays_in_flight(servers):
    worker = worker_of(servers)
    assert set(ask(worker, PROMPTS)) == {"from 0", "from 1"}
    assert sum(counts(servers)) == len(PROMPTS)
    assert [server.num_in_flight for server in worker.servers] == [0, 0]


def test_all_samples_of_a_method_request_go_to_one_server(servers):
    worker = worker_of(servers)
    vote = MajorityVoteController(
        NativeGenerationController({"max_tokens": 4}), default_sample_num=5
    )
    ask(worker, PROMPTS[:4], vote)
    by_prompt = [{body["prompt"] for body in server.requests} for server in servers]
    assert not by_prompt[0] & by_prompt[1]
    assert sum(counts(servers)) == 20
    assert not worker.upstream.router._sticky  # forgotten when the request is over


def test_a_later_turn_goes_where_the_conversation_was(servers):
    worker = worker_of(servers)
    conversations = [[UserMessage(prompt)] for prompt in PROMPTS[:4]]

    async def main():
        for turn in range(2):
            for messages in conversations:
                task = ChatTask(messages=[*messages])
                await worker.run_task(task)
                messages[:] = [*task.messages, UserMessage(f"and turn {turn}?")]
        await worker.async_shutdown()

    asyncio.run(main())
    first = [{body["messages"][0]["content"] for body in s.requests} for s in servers]
    assert first[0]
    assert first[1]
    assert not first[0] & first[1]


def test_a_server_that_is_not_there_costs_no_answer(servers, closed_ports):
    worker = worker_of([closed_ports[0], servers[1]])
    assert ask(worker, PROMPTS) == ["from 1"] * len(PROMPTS)
    assert [server.is_healthy for server in worker.servers] == [False, True]


def test_a_server_that_drops_connections_is_left_out_until_its_health_check_succeeds(servers):
    worker = worker_of(servers)
    servers[0].drops = True

    async def main():
        async def answers(prompts):
            tasks = [GenerationTask(input_str=prompt) for prompt in prompts]
            for task in tasks:
                await worker.run_task(task)
            return {task.output_str for task in tasks}

        assert await answers(PROMPTS[:4]) == {"from 1"}
        assert not worker.servers[0].is_healthy
        await worker.upstream.check_health()
        assert not worker.servers[0].is_healthy
        servers[0].drops = False
        await worker.upstream.check_health()
        assert worker.servers[0].is_healthy
        assert await answers(PROMPTS[4:]) == {"from 0"}  # its cache is empty
        await worker.async_shutdown()

    asyncio.run(main())


def test_a_server_that_stalls_is_given_up_before_its_answer_has_begun(servers):
    servers[0].goes_on.clear()
    retries = Retries(pause=0.001, timeout=1.0, check_seconds=600.0, num_tries=60)
    assert ask(worker_of(servers, retries), PROMPTS[:2]) == ["from 1"] * 2
    assert servers[0].requests


def test_an_overloaded_server_is_avoided_and_the_other_one_answers(servers):
    servers[0].fail_with = [429] * 100
    worker = worker_of(servers)
    assert ask(worker, PROMPTS) == ["from 1"] * len(PROMPTS)
    assert worker.servers[0].is_healthy  # it works, and said when to come back


def test_a_single_server_is_asked_again_after_server_errors(servers):
    servers[0].fail_with = [503, 500, 429]
    assert ask(worker_of(servers[:1]), PROMPTS[:1]) == ["from 0"]
    assert len(servers[0].requests) == 4


def test_an_error_of_the_caller_is_raised_at_once_and_takes_no_server_down(servers):
    servers[0].fail_with = [400]
    worker = worker_of(servers)
    with pytest.raises(TaskError):
        ask(worker, PROMPTS[:1])
    assert counts(servers) == [1, 0]
    assert all(server.is_healthy for server in worker.servers)


def test_an_answer_that_cannot_go_on_fails_its_request_with_the_address_and_no_other(servers):
    servers[0].cut_after = 1
    worker = worker_of(servers)
    plain = NativeGenerationController({"max_tokens": 4, "presence_penalty": 0.5})
    llm = ScaffoldingLlm(plain, {"generation": worker}, 8)
    try:
        results = [llm.generate_async(prompt) for prompt in PROMPTS[:4]]
        found = []
        for result in results:
            try:
                found.append(result.result().output.text)
            except TaskError as error:
                found.append(str(error))
    finally:
        llm.shutdown(shutdown_workers=True)
    num_lost, num_answered = counts(servers)
    assert num_lost >= 1
    assert found.count("from 1") == num_answered >= 1
    assert sum(servers[0].url in text and "was lost" in text for text in found) == num_lost
    assert [server.is_healthy for server in worker.servers] == [False, True]
    assert [server.num_in_flight for server in worker.servers] == [0, 0]


def test_when_no_server_can_be_reached_the_request_fails_and_says_so(closed_ports):
    worker = worker_of(closed_ports)
    with pytest.raises(TaskError, match=r"no answer from http.*the last of 2 servers"):
        ask(worker, PROMPTS[:1])


def test_credentials_in_a_url_are_sent_as_a_header_and_never_shown(servers):
    url = servers[0].url.replace("//", "//me:s3cret@")
    worker = worker_of([url], api_key="key")
    assert ask(worker, PROMPTS[:1]) == ["from 0"]
    assert servers[0].authorizations == ["Basic " + b64encode(b"me:s3cret").decode()]
    servers[0].cut_after = 1
    with pytest.raises(TaskError, match="was lost") as caught:
        ask(worker, PROMPTS[:1])  # in all its tries
    assert "s3cret" not in str(caught.value)
    servers[0].drops = True
    with pytest.raises(TaskError, match="no answer from") as caught:
        ask(worker, PROMPTS[:1])
    assert "s3cret" not in str(caught.value)


def test_a_limit_per_server_is_kept(servers):
    for server in servers:
        server.seconds_per_piece = 0.002
    worker = worker_of(servers, max_concurrency=2)
    assert len(ask(worker, PROMPTS * 3, at_once=24)) == 24
    assert [server.most_seen <= 2 for server in servers] == [True, True]


def test_the_models_of_all_servers_are_listed_once(servers, closed_ports):
    servers[0].models, servers[1].models = ["m", "small"], ["m", "large"]
    worker = worker_of([*servers, closed_ports[0]])

    async def main():
        names = await worker.upstream.models()
        await worker.async_shutdown()
        return names

    assert asyncio.run(main()) == ["m", "small", "large"]
    assert [server.is_healthy for server in worker.servers] == [True, True, False]


def test_the_lengths_of_contexts_are_learned_where_they_are_told(servers, closed_ports):
    def ask_lengths(*urls):
        worker = worker_of(urls)

        async def ask():
            try:
                return await worker.upstream.ask_lengths()
            finally:
                await worker.async_shutdown()

        return asyncio.run(ask()), worker.upstream.max_lengths

    servers[0].model_fields = {"max_model_len": 77}
    assert ask_lengths(servers[0]) == (True, {"m": 77})
    assert ask_lengths(servers[1]) == (True, {})
    servers[1].models = None  # a server without this page
    assert ask_lengths(servers[1]) == (True, {})
    assert ask_lengths(closed_ports[0]) == (False, {})


def test_a_server_without_a_health_page_is_asked_for_its_models(servers):
    servers[0].health, servers[1].health = 404, 503
    worker = worker_of(servers)

    async def main():
        for _ in range(3):
            await worker.upstream.check_health()
        await worker.async_shutdown()

    asyncio.run(main())
    assert [server.is_healthy for server in worker.servers] == [True, False]


def test_a_client_that_leaves_gives_its_place_back(servers):
    servers[0].seconds_per_piece = 0.01
    servers[0].says = lambda body: ["word "] * 10_000
    worker = worker_of(servers[:1])

    async def main():
        job = asyncio.create_task(worker.run_task(GenerationTask(input_str="p", max_tokens=10_000)))
        while not servers[0].requests or worker.servers[0].num_in_flight == 0:
            await asyncio.sleep(0.001)
        job.cancel()
        await asyncio.wait([job])
        await worker.async_shutdown()

    asyncio.run(main())
    assert worker.servers[0].num_in_flight == 0


def test_one_worker_serves_several_loops_one_after_another(servers):
    worker = worker_of(servers)
    assert len(ask(worker, PROMPTS)) == len(ask(worker, PROMPTS)) == len(PROMPTS)


def test_settings_that_cannot_be_are_refused(servers):
    with pytest.raises(ParameterError, match="num_tries"):
        Retries(num_tries=0)
    with pytest.raises(ParameterError, match="max_concurrency"):
        UpstreamWorker(["http://a"], "m", concurrency=4)


def test_a_growing_conversation_keeps_its_earlier_text_as_a_prefix():
    messages = [{"role": "user", "content": "Why?"}]
    earlier = prompt_text({"messages": messages, "tools": [{"name": "t"}]})
    later = prompt_text({"messages": [*messages, {"role": "user"}], "tools": [{"name": "t"}]})
    assert later.startswith(earlier)
    assert prompt_text({"prompt": [1, 2]}) == "\x01\x02"
