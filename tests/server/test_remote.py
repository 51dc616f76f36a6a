"""The server in front of another server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from forethought.assets import REASONER, embedded_dir
from forethought.llm.tokenizer import Tokenizer
from forethought.llm.tool_messages import as_text
from forethought.server.backends.remote_backend import RemoteBackend
from forethought.server.settings import Settings
from forethought.workers.openai_chunk import _chat_logprobs
from forethought.workers.scripted import Reply
from forethought.workers.upstream import Retries, UpstreamWorker
from http_servers import WAIT, Answer, Served, scripted, served
from openai_server import OpenaiServer
from openai_server import serving as serving_openai

CHAT = "/v1/chat/completions"
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def answers(prompt: str, index: int) -> str | Reply:
    table = {"call": as_text("add", {"a": 1}), "think": "<think>hm</think>the answer"}
    return table.get(prompt, f"you said {prompt}")


@pytest.fixture(scope="module")
def behind() -> Iterator[Served]:
    with scripted(answers) as running:
        yield running


@pytest.fixture(scope="module")
def server(behind: Served) -> Iterator[Served]:
    backend = RemoteBackend(UpstreamWorker([behind.url], "scripted"), "scripted")
    with served(backend) as running:
        yield running
    backend.close()


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def test_a_chat_is_answered_by_the_server_behind(server: Served) -> None:
    answer = server.send(CHAT, say("think")).json
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("the answer", "hm")
    assert answer["usage"]["prompt_tokens"] == len("think")


def test_a_thought_of_the_server_behind_streams_as_it_comes(server: Served) -> None:
    events = server.send(CHAT, say("think", stream=True, events=True)).events
    chunks = [data for name, data in events if name == "message" and data != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "the answer"
    told = [data for name, data in events if name == "forethought"]
    assert "".join(e["text"] for e in told if e["type"] == "delta") == "hmthe answer"


class Thinking(OpenaiServer):
    """Answers once it may, and thinks before."""

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        delta = {"index": 0, "finish_reason": None, "delta": {"reasoning_content": "hm"}}
        yield {**self.base(True, body), "choices": [delta]}
        assert self.may_answer.wait(WAIT)
        yield from super().chunks(path, body)

    may_answer = threading.Event()


def test_a_thought_comes_before_the_answer_has_begun() -> None:
    with serving_openai(Thinking()) as behind:
        backend = RemoteBackend(UpstreamWorker([behind.url], "m"), "m")
        with served(backend) as running:
            stream = running.client.chat.completions.create(**say("x"), model="m", stream=True)
            deltas = (chunk.choices[0].delta for chunk in stream)
            first = next(delta for delta in deltas if getattr(delta, "reasoning", None))
            assert first.reasoning == "hm"
            Thinking.may_answer.set()
            assert "".join(delta.content or "" for delta in deltas) == "Hello world"
        backend.close()


def test_a_thought_may_be_left_in_the_content(behind: Served) -> None:
    backend = RemoteBackend(UpstreamWorker([behind.url], "scripted"), "scripted")
    with served(backend, Settings(reasoning_in_content=True)) as running:
        whole = running.send(CHAT, say("think")).json["choices"][0]["message"]
        assert whole["content"] == "<think>hm</think>the answer"
        assert "reasoning" not in whole
        stream = running.client.chat.completions.create(
            **say("think"), model="scripted", stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole["content"]
    backend.close()


def test_a_stream_is_passed_on(server: Served) -> None:
    stream = server.client.chat.completions.create(**say("hello"), model="scripted", stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "you said hello"


def test_a_whole_conversation_is_sent(server: Served, behind: Served) -> None:
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    answer = server.send(CHAT, {"messages": messages}).json
    assert answer["choices"][0]["message"]["content"] == "you said three"
    assert answer["usage"]["prompt_tokens"] == len("three")


def test_tools_and_their_results_go_both_ways(server: Served) -> None:
    first = server.send(CHAT, say("call", tools=[ADD])).json["choices"][0]
    call = first["message"]["tool_calls"][0]
    assert (first["finish_reason"], call["function"]["name"]) == ("tool_calls", "add")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    messages = [*say("call")["messages"], first["message"], result]
    second = server.send(CHAT, {"messages": messages, "tools": [ADD]}).json
    assert second["choices"][0]["message"]["content"] == "you said 2"


@pytest.mark.parametrize("asked", ["none", {"enabled": False}, {"drafter": "none"}, {}])
def test_a_request_without_drafts_is_answered_where_nothing_is_drafted(
    server: Served, asked: Any
) -> None:
    for path, body in ((CHAT, say("x")), ("/v1/completions", {"prompt": "x"})):
        assert server.send(path, {**body, "speculation": asked}).status == 200
    refused = server.send(CHAT, say("x", speculation="ngram"))
    assert (refused.status, "speculation" in refused.error["message"]) == (400, True)


@contextmanager
def in_front_of(
    behind: OpenaiServer, tokenizer: Tokenizer | None = None, **options: Any
) -> Iterator[Served]:
    """A server in front of another one, whose worker has these options."""
    worker = UpstreamWorker([behind.url], "m", **options)
    backend = RemoteBackend(worker, "m", tokenizer=tokenizer)
    with served(backend) as running:
        yield running
    backend.close()


def test_a_reasoning_effort_goes_on_as_it_is() -> None:
    with serving_openai() as behind, in_front_of(behind) as running:
        assert running.send(CHAT, say("x", reasoning_effort="high")).status == 200
        body = {"input": "x", "reasoning": {"effort": "low"}}
        assert running.send("/v1/responses", body).status == 200
        assert running.send(CHAT, say("x")).status == 200
        assert [b.get("reasoning_effort") for b in behind.requests] == ["high", "low", None]


REFUSED: Any = [
    (CHAT, {"top_k": 5}, ["top_k", "--upstream-fields top_k"]),
    ("/v1/completions", {"min_p": 0.1}, ["min_p", "--upstream-fields min_p"]),
    (CHAT, {"xtc_probability": 0.5}, ["xtc_probability", "--upstream-fields xtc_probability"]),
    (CHAT, {"dry_sequence_breakers": ["x"]}, ["--upstream-fields dry_sequence_breakers"]),
    (CHAT, {"thinking_budget": 5}, ["thinking_budget", "--thinking-field"]),
    (CHAT, {"reasoning_budget": 5}, ["reasoning_budget", "--thinking-field"]),
    (CHAT, {"thinking_soft": 5, "thinking_budget": 9}, ["thinking"]),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}, ["prediction"]),
    (CHAT, {"structured_outputs": {"regex": "x"}}, ["structured_outputs", "regex"]),
    (
        "/v1/completions",
        {"structured_outputs": {"json": {"type": "object"}}},
        ["structured_outputs", "--upstream-fields response_format"],
    ),
]


@pytest.mark.parametrize(("path", "fields", "told"), REFUSED)
def test_a_field_that_the_server_behind_may_not_take_is_refused_by_its_name(
    server: Served, path: str, fields: dict[str, Any], told: list[str]
) -> None:
    body = say("x") if path == CHAT else {"prompt": "x"}
    refused = server.send(path, body | fields)
    assert refused.status == 400
    message = refused.error["message"]
    assert all(text in message for text in told)
    assert refused.error["param"].split(".")[0] in fields
    assert "OpenaiWorker" not in message


def test_fields_that_the_server_behind_takes_are_sent() -> None:
    options: Any = {
        "extensions": ["top_k", "guided_decoding"],
        "thinking_field": "thinking_token_budget",
    }
    with serving_openai() as behind, in_front_of(behind, **options) as running:
        assert running.send(CHAT, say("x", top_k=5, reasoning_budget=7)).status == 200
        shape = {"structured_outputs": {"json": {"type": "object"}}}
        assert running.send("/v1/completions", {"prompt": "x", **shape}).status == 200
        chat, completion = behind.requests
        assert (chat["top_k"], chat["thinking_token_budget"]) == (5, 7)
        assert completion["response_format"]["type"] == "json_schema"


def test_a_forced_call_is_forced_by_the_server_behind(server: Served) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("required", named):
        for streams in (False, True):
            body = say("call", tools=[ADD], tool_choice=choice, stream=streams)
            answer = server.send(CHAT, body)
            assert answer.status == 200, answer.text
            assert calls_of(answer) == [("add", '{"a": 1}')]
    tool = {"type": "function", **ADD["function"]}
    body = {"input": "call", "tools": [tool], "tool_choice": "required"}
    [item] = server.send("/v1/responses", body).json["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "add", '{"a": 1}')


def calls_of(answer: Answer) -> list[tuple[str, str]]:
    """Name and arguments of the calls in a chat's answer, at once or as a stream."""
    if not answer.text.startswith("data:"):
        calls = answer.json["choices"][0]["message"]["tool_calls"]
        return [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    chunks = [data for _, data in answer.events if data != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    name = "".join(piece.get("name") or "" for piece in pieces)
    return [(name, "".join(piece["arguments"] for piece in pieces))]


def test_a_vote_draws_its_samples_there(server: Served, behind: Served) -> None:
    before = len(behind.backend.worker.calls)
    answer = server.send(CHAT, say("vote", model="majority_vote@3-scripted")).json
    assert answer["choices"][0]["message"]["content"] == "you said vote"
    assert len(behind.backend.worker.calls) == before + 3


def test_a_method_that_continues_its_text_needs_a_completion(server: Served) -> None:
    refused = server.send(CHAT, say("x", method="dynasor"))
    assert (refused.status, "completions" in refused.error["message"]) == (400, True)
    answer = server.send("/v1/completions", {"prompt": "x", "method": "budget_forcing"})
    assert answer.status == 200


def test_what_needs_a_tokenizer_is_said_to_be_unavailable_without_one(server: Served) -> None:
    found = {each["name"]: each for each in server.send("/v1/methods").json["data"]}
    refused = {name for name, each in found.items() if "--tokenizer" in (each["reason"] or "")}
    assert {"dynasor", "budget_forcing", "hogwild_turns", "first_answer", "beam_search"} <= refused
    assert {"adaptive_compute", "no_thinking", "budget_vote"} <= refused
    assert found["majority_vote"]["available"]
    for name in refused - {"no_thinking", "budget_vote"}:
        assert "--tokenizer" in server.send(CHAT, say("x", method=name)).error["message"]


def test_thoughts_are_closed_here_only_where_the_chat_template_opens_them() -> None:
    def available(**options: Any) -> list[str]:
        methods = ("no_thinking", "budget_vote")
        with serving_openai() as behind, in_front_of(behind, **options) as running:
            return [name for name in methods if running.backend.missing(name) is None]

    opening, plain = (Tokenizer.load(embedded_dir(REASONER)) for _ in range(2))
    plain.hf.chat_template = plain.hf.chat_template.replace("<think>", "")
    assert available(tokenizer=opening) == ["no_thinking", "budget_vote"]
    assert available(tokenizer=opening, thinking_field="f") == ["budget_vote"]
    assert available(tokenizer=plain) == available() == []
    assert available(thinking_field="f") == ["no_thinking", "budget_vote"]


def test_with_a_tokenizer_a_completion_may_fill_the_context_and_no_more() -> None:
    tokenizer = Tokenizer.load(embedded_dir(REASONER))
    with serving_openai() as behind, in_front_of(behind, tokenizer) as running:
        running.backend.worker.upstream.max_lengths["m"] = 100
        for asked in ({}, {"max_tokens": 1000}, {"max_tokens": 3}):
            assert running.send(CHAT, say("x", **asked)).status == 200
        prompt = behind.requests[0]["prompt"]
        left = 100 - len(tokenizer.encode(prompt))
        assert [body["max_tokens"] for body in behind.requests] == [left, left, 3]


def test_what_only_the_server_behind_can_do_makes_a_chat_with_a_tokenizer_too() -> None:
    tokenizer = Tokenizer.load(embedded_dir(REASONER))
    with serving_openai() as behind, in_front_of(behind, tokenizer) as running:
        for asked in (
            {"reasoning_effort": "low"},
            {"response_format": {"type": "json_object"}},
            {"tools": [ADD], "tool_choice": "required"},
        ):
            assert running.send(CHAT, say("x", **asked)).status == 200
        assert all("messages" in body for body in behind.requests)


@pytest.mark.parametrize("fields", [{"n": 2}, {"method": "plain|plain"}])
def test_tokens_beyond_the_budget_are_in_no_text(fields: dict[str, Any]) -> None:
    state = OpenaiServer()
    state.says = lambda body: ["a ", "b ", "c "]
    with serving_openai(state) as behind, in_front_of(behind) as running:
        body = {"prompt": "x", "budget": {"tokens": 4}, **fields}
        answer = running.send("/v1/completions", body).json
        num_words = sum(len(choice["text"].split()) for choice in answer["choices"])
        usage = answer["usage"]
        assert num_words <= usage["completion_tokens"] == 4
        assert usage["completion_tokens_details"]["discarded_tokens"]


class Pondering(OpenaiServer):
    """Thinks for fifty tokens before it answers, and counts those of the answer alone."""

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        delta = {"index": 0, "finish_reason": None, "delta": {"reasoning_content": "hm "}}
        yield from [{**self.base(True, body), "choices": [delta]}] * 50
        yield from super().chunks(path, body)


@pytest.mark.parametrize(
    ("method", "num_samples"), [("plain", 1), ("majority_vote@1", 1), ("majority_vote@8", 8)]
)
def test_a_budget_that_ends_within_thoughts_ends_with_a_thought(
    method: str, num_samples: int
) -> None:
    with serving_openai(Pondering()) as behind, in_front_of(behind) as running:
        answer = running.send(CHAT, say("x", method=method, budget={"tokens": 6}))
        assert answer.status == 200, answer.text
        choice = answer.json["choices"][0]
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == ("", "length")
        assert message["reasoning"].split() == ["hm"] * message["reasoning"].count("hm")
        num_tokens = len(message["reasoning"].split())
        assert num_tokens == 6 if num_samples == 1 else 1 <= num_tokens <= 6
        usage = answer.json["usage"]
        assert usage["spent_budget"] == "tokens"
        assert 0 <= usage["completion_tokens"] <= 6
        assert usage["prompt_tokens"] > 0
        assert usage["completion_tokens_details"]["discarded_tokens"] >= 0


def test_no_more_tokens_are_a_thought_than_were_generated() -> None:
    state = OpenaiServer()
    state.says = lambda body: ["<think>", "a thought of many characters", "</think>", "the answer"]
    with serving_openai(state) as behind, in_front_of(behind) as running:
        usage = running.send(CHAT, say("x")).json["usage"]
        details = usage["completion_tokens_details"]
        assert details["reasoning_tokens"] == usage["completion_tokens"] == 4


def test_what_the_server_behind_refuses_is_told(server: Served) -> None:
    refused = server.send(CHAT, say("x", temperature=-1.0))
    assert refused.status == 400
    for body in (say("x", cache_salt="s"), say("x", chat_template_kwargs={"a": 1})):
        assert server.send(CHAT, body).status == 400
    assert server.send("/tokenize", {"prompt": "x"}).status == 400


def test_a_server_behind_that_is_gone_is_a_bad_gateway() -> None:
    with scripted(answers) as gone:
        retries = Retries(num_tries=2, pause=0.001)
        worker = UpstreamWorker([gone.url], "scripted", retries=retries)
    with served(RemoteBackend(worker, "scripted")) as running:
        answer = running.send(CHAT, say("x"))
        assert answer.status == 502
        assert running.send("/health").status == 200


def test_metrics_show_the_servers_behind(server: Served) -> None:
    assert "upstream_healthy" in server.send("/metrics").text


def test_the_bytes_of_a_token_of_the_server_behind_are_passed_on() -> None:
    chosen = SimpleNamespace(token="\ufffd", logprob=-1.0, bytes=[195], top_logprobs=[])
    plain = SimpleNamespace(token="a", logprob=-1.0, bytes=None, top_logprobs=[])
    found = _chat_logprobs(SimpleNamespace(content=[chosen, plain]))
    assert [next(iter(each.values())).raw for each in found] == [b"\xc3", None]


class Malformed(OpenaiServer):
    """Sends one chunk as it is, and the end of an ordinary answer."""

    def __init__(self, chunk: Any) -> None:
        super().__init__()
        self._chunk = chunk

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        yield self._chunk
        yield from super().chunks(path, body)


def one(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None, **fields}]}


def scored(**fields: Any) -> dict[str, Any]:
    entry = {"token": "a", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    return one(logprobs={"content": [{**entry, **fields}]})


NO_CHUNKS: dict[str, Any] = {
    "a number among the choices": {"choices": [5]},
    "an index that is a text": one(index="a"),
    "a negative index": one(index=-1),
    "a delta that is a list": one(delta=[1]),
    "a text that is a number": one(delta={"content": 5}),
    "a thought that is a list": one(delta={"reasoning": [1]}),
    "a refusal that is a number": one(delta={"refusal": 5}),
    "calls that are a mapping": one(delta={"tool_calls": {"a": 1}}),
    "a call that is a number": one(delta={"tool_calls": [5]}),
    "a call whose name is a number": one(
        delta={"tool_calls": [{"index": 0, "id": "a", "function": {"name": 5, "arguments": "{}"}}]}
    ),
    "a reason of the end that is a number": one(finish_reason=5),
    "log-probabilities that are a number": one(logprobs={"content": 5}),
    "a log-probability that is no number": scored(logprob=float("nan")),
    "bytes that are none": scored(bytes=[999]),
}


@pytest.mark.parametrize("kind", NO_CHUNKS)
def test_what_is_no_answer_of_the_api_is_a_bad_gateway(kind: str) -> None:
    with behind_another(Malformed(NO_CHUNKS[kind])) as server:
        answer = server.send(CHAT, say("a"))
    assert answer.status == 502, answer.text
    assert "no answer of OpenAI's API" in answer.error["message"]


def test_a_completion_in_the_form_of_a_chat_is_a_bad_gateway() -> None:
    with behind_another(Malformed(one())) as server:
        answer = server.send("/v1/completions", {"prompt": "a"})
    assert answer.status == 502, answer.text


READABLE: dict[str, Any] = {
    "a count of tokens that is a text": {"usage": {"prompt_tokens": "a", "completion_tokens": -1}},
    "a count of tokens beyond all": {"usage": {"prompt_tokens": 10**400, "completion_tokens": 1}},
    "an id that is a mapping": {"id": {"a": 1}},
    "half of a surrogate pair": one(delta={"content": "a\ud800"}),
}


@pytest.mark.parametrize("kind", READABLE)
def test_a_detail_that_is_wrong_spoils_no_answer(kind: str) -> None:
    with behind_another(Malformed({"choices": [], **READABLE[kind]})) as server:
        answer = server.send(CHAT, say("a"))
    assert answer.status == 200, answer.text


def test_a_status_that_is_none_of_http_is_a_bad_gateway() -> None:
    broken = OpenaiServer()
    broken.fail_with = [999] * 10
    with behind_another(broken) as server:
        assert server.send(CHAT, say("a")).status == 502


def test_a_redirection_of_the_server_behind_is_not_followed() -> None:
    with serving_openai(OpenaiServer()) as elsewhere:
        moved = OpenaiServer()
        moved.fail_with, moved.location = [307] * 10, f"{elsewhere.url}/chat/completions"
        with behind_another(moved) as server:
            answer = server.send(CHAT, say("a"))
    assert (answer.status, elsewhere.requests) == (502, [])


@contextmanager
def behind_another(other: OpenaiServer) -> Iterator[Served]:
    with serving_openai(other):
        backend = RemoteBackend(UpstreamWorker([other.url], "m", retries=Retries(pause=1e-3)), "m")
        with served(backend) as server:
            yield server
        backend.close()
