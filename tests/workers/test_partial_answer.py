"""Answers whose server dies while they are streamed: another one goes on with them."""

import asyncio
import itertools
import re
import threading
from contextlib import ExitStack

import pytest

from engines import expect_empty
from forethought import AsyncLLM
from forethought.errors import UpstreamError
from forethought.methods import DynasorGenerationController, MajorityVoteController, worker_tags
from forethought.methods.parts.probe import ANSWER_END, ANSWER_SUFFIX, PROBE_SUFFIX
from forethought.scaffolding import (
    ChatTask,
    GenerationTask,
    NativeGenerationController,
    ScaffoldingLlm,
    StreamGenerationTask,
    UserMessage,
)
from forethought.workers.partial_answer import PartialAnswer
from forethought.workers.upstream import Retries, UpstreamWorker
from openai_server import EngineServer, OpenaiServer, serving

QUICK = Retries(pause=0.001, check_seconds=600.0)
PROMPT = "Say it: "
WORDS = ["One", " two", " three", ",", " four", "  \n", " five", " é", " and", " seven", "."]
ANSWER = "".join(WORDS)


class WordServer(OpenaiServer):
    """Goes on with the answer to ``PROMPT`` from wherever a prompt ends; a word is a token.

    Its chat template leaves out the blanks at the end of a message, as most do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.says = lambda body: words(ANSWER[len(self.text_in(body)) :])

    def text_in(self, body):
        """What the prompt has of the answer."""
        if "messages" not in body:
            return "" if isinstance(body["prompt"], list) else body["prompt"].removeprefix(PROMPT)
        last = body["messages"][-1]
        text = last["content"].rstrip() if last["role"] == "assistant" else ""
        return text.removeprefix("A\n")

    def chunks(self, path, body):
        for chunk in super().chunks(path, body):
            if chunk is not None and chunk.get("usage"):
                text = self.text_in(body)
                is_counted = "messages" in body and body["messages"][-1]["content"][:2] == "A\n"
                chunk["usage"]["prompt_tokens"] = 7 + len(words(text)) + 2 * is_counted
            yield chunk


def words(text):
    return re.findall(r"\s*\n| ?\w+|\S|\s", text)


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(serving(WordServer())) for _ in range(2)]


def worker_of(servers, **options):
    return UpstreamWorker([server.url for server in servers], "m", retries=QUICK, **options)


def run(worker, *tasks):
    async def main():
        for task in tasks:
            await worker.run_task(task)
        await worker.async_shutdown()

    asyncio.run(main())
    assert [server.num_in_flight for server in worker.servers] == [0] * len(worker.servers)


def completion(**fields):
    defaults = {"input_str": PROMPT, "max_tokens": 20, "temperature": 0.0}
    return GenerationTask(**{**defaults, **fields})


def chat(**fields):
    return ChatTask(messages=[UserMessage("Say it")], **fields)


NUM_CHUNKS = len(WORDS) + 2  # the end, and the usage


class HangingServer(WordServer):
    """Sends nothing more after ``hangs_after`` chunks, but keeps its connections."""

    def __init__(self, hangs_after: int | None = None) -> None:
        super().__init__()
        self.hangs_after, self.ends = hangs_after, threading.Event()

    def chunks(self, path, body):
        for number, chunk in enumerate(super().chunks(path, body)):
            if number == self.hangs_after:
                self.health = 500
                self.ends.wait(60)
                return
            yield chunk


@pytest.mark.parametrize("position", [0, 4])
def test_an_answer_goes_on_elsewhere_once_health_checks_have_taken_its_server_down(position):
    with serving(HangingServer(position)) as hanging, serving(WordServer()) as other:
        retries = Retries(pause=0.001, check_seconds=0.2)
        task = completion()
        run(UpstreamWorker([hanging.url, other.url], "m", retries=retries), task)
        hanging.ends.set()
    assert hanging.requests
    assert task.output_str == ANSWER
    assert task.usage_completion_tokens == len(WORDS)


class PausingServer(WordServer):
    """Waits in the middle of an answer; its health checks fail."""

    def __init__(self) -> None:
        super().__init__()
        self.health, self.waits, self.is_let_go = 500, threading.Event(), threading.Event()

    def chunks(self, path, body):
        for number, chunk in enumerate(super().chunks(path, body)):
            if number == 4:
                self.waits.set()
                self.is_let_go.wait(60)
            yield chunk


def test_an_answer_whose_chunks_come_is_not_taken_from_a_server_that_answers_no_health_check():
    async def answered(worker, task):
        job = asyncio.create_task(worker.run_task(task))
        assert await asyncio.to_thread(busy.waits.wait, 60)
        for _ in range(3):
            await worker.upstream.check_health()
        assert not worker.servers[0].is_healthy
        busy.is_let_go.set()
        await job
        await worker.async_shutdown()

    with serving(PausingServer()) as busy, serving(WordServer()) as other:
        task, retries = completion(), Retries(pause=0.001, check_seconds=60.0)
        worker = UpstreamWorker([busy.url, other.url], "m", retries=retries)
        asyncio.run(answered(worker, task))
    assert task.output_str == ANSWER
    assert not other.requests


@pytest.mark.parametrize("kind", ["between chunks", "within a chunk", "closed", "closed within"])
@pytest.mark.parametrize("position", range(NUM_CHUNKS + 1))
def test_a_completion_outlives_its_server(servers, position, kind):
    servers[0].cut_after = position
    servers[0].cuts_within = "within" in kind
    servers[0].ends_by_closing = "closed" in kind
    worker, task = worker_of(servers), completion()
    run(worker, task)
    assert task.output_str == ANSWER
    assert task.result.finish_reason == "stop"
    assert task.usage_completion_tokens == len(WORDS)
    if position != len(WORDS) + 1:  # else the usage is lost with the server
        assert task.usage_prompt_tokens == 7
    rests = [body for body in servers[1].requests if body.get("stream")]
    if position > len(WORDS):
        assert rests == []
    else:
        text = "".join(WORDS[:position])
        assert [body["prompt"] for body in rests] == [PROMPT + text]
        assert rests[0]["max_tokens"] == 20 - position


@pytest.mark.parametrize("position", range(1, NUM_CHUNKS))
def test_a_stream_that_outlives_its_server_shows_each_token_once(servers, position):
    servers[0].cut_after = position
    worker = worker_of(servers)
    task = StreamGenerationTask(input_str=PROMPT, streaming_step=3, max_tokens=20)
    shown = []

    async def main():
        while not task.end_flag:
            await worker.run_task(task)
            shown.append(task.output_str)
        await worker.async_shutdown()

    asyncio.run(main())
    assert shown[-1] == ANSWER
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
    assert shown[:2] == ["".join(WORDS[:3]), "".join(WORDS[:6])]


@pytest.mark.parametrize("max_tokens", [4, 5, 6])
def test_the_rest_is_no_longer_than_the_answer_may_be(servers, max_tokens):
    for server, position in zip(servers, (4, None), strict=True):
        server.cut_after = position
    task = completion(max_tokens=max_tokens)
    run(worker_of(servers), task)
    assert task.output_str == "".join(WORDS[:max_tokens])
    assert task.result.finish_reason == "length"
    assert task.usage_completion_tokens == max_tokens


def test_tokens_that_come_together_are_counted_by_the_server_that_goes_on(servers):
    servers[0].tokens_per_chunk, servers[0].cut_after = 3, 2
    task = completion(max_tokens=8)
    run(worker_of(servers), task)
    assert task.output_str == "".join(WORDS[:8])
    assert servers[1].requests[-1]["max_tokens"] == 2


def test_log_probabilities_count_the_tokens_and_go_on(servers):
    servers[0].cut_after = 4
    task = completion(num_logprobs=1)
    run(worker_of(servers), task)
    assert task.output_str == ANSWER
    assert [next(iter(entries.values())).token for entries in task.result.logprobs] == WORDS
    assert len(servers[1].requests) == 1  # none is for counting


def test_a_server_that_ends_as_told_hands_its_answers_over(servers):
    class Draining(WordServer):
        def chunks(self, path, body):
            yield from itertools.islice(super().chunks(path, body), 5)
            yield {"error": {"message": "the server has ended", "code": "draining"}}

    with serving(Draining()) as draining:
        worker, task = worker_of([draining, servers[1]]), completion()
        run(worker, task)
    assert task.output_str == ANSWER
    assert [server.is_healthy for server in worker.servers] == [True, True]


def test_an_answer_outlives_several_servers_and_the_one_that_comes_back(servers):
    for server in servers:
        server.cut_after = 3
    task = completion()
    run(worker_of(servers), task)
    assert task.output_str == ANSWER


def test_an_answer_that_breaks_off_everywhere_fails_in_the_end(servers):
    for server in servers:
        server.cut_after = 1
    with pytest.raises(ConnectionError, match="broken off 5 times"):
        run(worker_of(servers), completion())


def test_a_seeded_answer_goes_on_with_another_seed(servers):
    servers[0].cut_after = 4
    run(worker_of(servers), completion(seed=5, temperature=0.8))
    seeds = [body["seed"] for server in servers for body in server.requests if "seed" in body]
    assert seeds[0] == 5
    assert len(set(seeds)) == 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "one of several"),
        ({"frequency_penalty": 0.5}, "frequency_penalty would mean something else"),
        ({"suffix": "."}, "suffix would"),
        ({"stop": "three,!"}, "beginning of a stop string"),
        ({"max_tokens": None}, "max_tokens is not set"),
        ({"input_str": None, "input_tokens": [1, 2]}, "prompt is token ids"),
    ],
)
def test_what_no_other_server_can_go_on_with_fails_and_says_why(servers, fields, why):
    servers[0].cut_after = 4
    with pytest.raises(ConnectionError, match=f"{servers[0].url} was lost.*{why}"):
        run(worker_of(servers), completion(**fields))
    assert servers[1].requests == []


@pytest.mark.parametrize("fields", [{"n": 2}, {"frequency_penalty": 0.5}, {"max_tokens": None}])
def test_what_has_not_begun_is_asked_again_from_its_beginning(servers, fields):
    servers[0].cut_after = 0
    task = completion(**fields)
    run(worker_of(servers), task)
    assert [sample.text for sample in task.samples] == [ANSWER] * (fields.get("n") or 1)


def test_fields_of_a_server_that_are_not_known_here_are_not_continued(servers):
    partial = PartialAnswer({"prompt": "", "extra_body": {"ignore_eos": True}}, chat=False)
    assert "ignore_eos would" in partial.refusal()  # the text is without the ends of sequences
    servers[0].cut_after = 4
    worker = worker_of(servers, extra_body={"method": "dynasor"})
    with pytest.raises(ConnectionError, match="method would mean something else"):
        run(worker, completion())


@pytest.mark.parametrize("position", range(NUM_CHUNKS))
def test_a_chat_goes_on_where_servers_continue_a_message(servers, position):
    servers[0].cut_after = position
    task = chat(max_tokens=20)
    run(worker_of(servers, continues_chats=True), task)
    message = task.messages[-1]
    assert message.content == ANSWER
    if position != len(WORDS) + 1:
        assert task.usage_completion_tokens == len(WORDS)
    rests = [body for body in servers[1].requests if body.get("stream")]
    if 0 < position <= len(WORDS):
        assert rests[0]["continue_final_message"] is True
        assert rests[0]["add_generation_prompt"] is False
        text = "".join(WORDS[:position]).rstrip()
        assert rests[0]["messages"][-1] == {"role": "assistant", "content": text}
        assert rests[0]["max_tokens"] == 20 - len(words(text))


def test_a_chat_that_has_begun_with_blanks_is_asked_again_without_them(servers):
    for server in servers:
        server.says = lambda body: ["\n", *words(ANSWER)]
    servers[0].cut_after = 1
    task = chat(max_tokens=20)
    run(worker_of(servers, continues_chats=True), task)
    assert task.messages[-1].content == "\n" + ANSWER
    rest = servers[1].requests[-1]
    assert len(rest["messages"]) == 1
    assert rest["max_tokens"] == 20


def test_a_chat_with_log_probabilities_goes_on_only_after_a_word(servers):
    servers[0].cut_after = 4
    task = chat(num_logprobs=1)
    run(worker_of(servers, continues_chats=True), task)
    assert [next(iter(entries.values())).token for entries in task.result.logprobs] == WORDS
    servers[0].cut_after = WORDS.index("  \n") + 1
    with pytest.raises(ConnectionError, match="would come twice"):
        run(worker_of(servers, continues_chats=True), chat(num_logprobs=1))


def test_a_chat_whose_blanks_come_back_otherwise_fails(servers):
    servers[0].cut_after = WORDS.index("  \n") + 1
    servers[1].says = lambda body: [" and", " so", " on"]
    with pytest.raises(UpstreamError, match="in another way"):
        run(worker_of(servers, continues_chats=True), chat())


@pytest.mark.parametrize("is_known", [False, True])
def test_a_chat_that_cannot_go_on_fails_and_says_why(servers, is_known):
    servers[0].cut_after = 4
    fields = {"tools": [{"type": "function", "function": {"name": "f"}}]} if is_known else {}
    why = "tools would mean" if is_known else "continue_final_message"
    with pytest.raises(ConnectionError, match=why):
        run(worker_of(servers, continues_chats=is_known), chat(**fields))


def test_a_thought_or_a_call_that_has_come_is_not_continued():
    class Delta:
        content, role = "", "assistant"

        def __init__(self, **fields):
            self.__dict__ |= fields

    for name in ("reasoning_content", "tool_calls", "refusal"):
        partial = PartialAnswer({"messages": []}, chat=True, continues_chats=True)
        choice = Delta(index=0, finish_reason=None, logprobs=None, delta=Delta(**{name: "x"}))
        partial.take(Delta(choices=[choice], usage=None))
        assert partial.has_begun
        assert "no request continues" in partial.refusal()


def test_all_branches_of_a_vote_outlive_their_server(servers):
    servers[0].cut_after = 6
    worker = worker_of(servers)
    inner = NativeGenerationController({"max_tokens": 20})
    vote = MajorityVoteController(inner, default_sample_num=8)
    tags = dict.fromkeys(worker_tags(vote), worker)
    with ScaffoldingLlm(vote, tags) as llm:
        output = llm.generate(PROMPT).output
    assert output.text == ANSWER
    rests = [body for body in servers[1].requests if body.get("stream")]
    assert len(rests) >= len(servers[0].requests) >= 1


def test_dynasor_probes_on_after_its_server_has_died(servers):
    def says(body):
        chain = body["prompt"].removeprefix(PROMPT)
        return list("42") if PROBE_SUFFIX in chain else list(("thinking " * 30)[len(chain) :])

    for server in servers:
        server.says, server.text_in = says, lambda body: body["prompt"].removeprefix(PROMPT)
    servers[0].cut_after = 6
    method = DynasorGenerationController(certainty_threshold=2, chunk_size=16)
    tags = dict.fromkeys(worker_tags(method), worker_of(servers))
    with ScaffoldingLlm(method, tags) as llm:
        output = llm.generate(PROMPT).output
    assert output.text == ("thinking " * 30)[:32] + ANSWER_SUFFIX + "42" + ANSWER_END
    assert output.meta["dynasor"]["early_exit"]


@pytest.fixture(scope="module")
def engine():
    llm = AsyncLLM(dtype="float32", max_batch_size=4)
    yield llm
    expect_empty(llm._frontend.engine)
    llm.shutdown()


def test_greedy_text_of_an_engine_is_the_one_without_the_death(engine):
    """Of a text whose beginnings are tokenised as they were generated; where they are not (the
    token " is " at an end), the text that goes on may be another one.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(EngineServer(engine))) for _ in range(2)]
        texts = []
        for position in (None, 1, 2):
            servers[0].cut_after = position
            servers[0].cuts_within = position == 2
            task = GenerationTask(
                input_str="What is 17 * 23?\n</think>\n",
                max_tokens=40,
                temperature=0.0,
                stop="\n\n\n",
            )
            run(worker_of(servers), task)
            texts.append((task.output_str, task.result.finish_reason))
    assert texts == texts[:1] * len(texts)
    assert len(texts[0][0]) > 20
    assert servers[0].disconnected == 2
