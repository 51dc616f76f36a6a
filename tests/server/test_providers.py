"""What providers of OpenAI's API send in ways of their own, through the server in front of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forethought.server.backends.remote_backend import RemoteBackend
from forethought.workers.upstream import Retries, UpstreamWorker
from http_servers import Served, served
from openai_server import OpenaiServer, serving

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
Chunk = dict[str, Any]


class Provider(OpenaiServer):
    """Answers chats with the chunks of a function, which gets the number of the request."""

    def __init__(self, answer: Callable[[int], list[Chunk]]) -> None:
        super().__init__()
        self.answer, self._numbers = answer, itertools.count()

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        for chunk in self.answer(next(self._numbers)):
            yield {**self.base(True, body), **chunk}


def chunk(delta: dict[str, Any], reason: str | None = None, **fields: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **fields}


def saying(text: str) -> list[Chunk]:
    return [chunk({"role": "assistant", "content": text}), chunk({}, "stop")]


def calling(*pieces: dict[str, Any], reason: str = "tool_calls") -> list[Chunk]:
    return [*(chunk({"tool_calls": [piece]}) for piece in pieces), chunk({}, reason)]


def piece(arguments: str, name: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


@contextmanager
def in_front_of(answer: Callable[[int], list[Chunk]]) -> Iterator[tuple[Served, Provider]]:
    with serving(Provider(answer)) as provider:
        assert isinstance(provider, Provider)
        worker = UpstreamWorker([provider.url], "m", retries=Retries(num_tries=2, pause=0.001))
        backend = RemoteBackend(worker, "m")
        with served(backend) as running:
            yield running, provider
        backend.close()


ERRORS: dict[str, Chunk] = {
    "object": chunk({"content": ""}, "error", error={"code": 502, "message": "disconnected"}),
    "text": {"choices": [], "error": "disconnected"},
    "alone": {"error": {"message": "disconnected", "type": "server_error"}},
    "vllm": {"object": "error", "message": "disconnected", "code": 400},
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("begins", [True, False])
def test_an_error_within_a_stream_is_told_as_the_provider_says_it(kind: str, begins: bool) -> None:
    before = [chunk({"role": "assistant", "content": "par"})] if begins else []
    with in_front_of(lambda _: [*before, ERRORS[kind]]) as (server, _):
        whole = server.send(CHAT, ASK)
        assert (whole.status, whole.error["code"]) == (502, "upstream_error")
        assert "disconnected" in whole.error["message"]
        stream = server.send(CHAT, {**ASK, "stream": True})
        if begins:
            events = [data for _, data in stream.events if data != "[DONE]"]
            assert "disconnected" in events[-1]["error"]["message"]
        else:
            assert "disconnected" in stream.error["message"]


def test_an_end_for_an_error_is_one_without_a_message_too() -> None:
    with in_front_of(lambda _: [chunk({"content": "a"}), chunk({}, "error")]) as (server, _):
        assert server.send(CHAT, ASK).status == 502


def test_another_try_is_made_where_the_answer_has_not_begun() -> None:
    error = ERRORS["object"]
    with in_front_of(lambda number: saying("yes") if number else [error]) as (server, provider):
        assert server.send(CHAT, ASK).status == 200
        assert len(provider.requests) == 2


@pytest.mark.parametrize("method", ["majority_vote@3", "deepconf@3"])
def test_one_sample_that_fails_does_not_fail_a_vote(method: str) -> None:
    def answer(number: int) -> list[Chunk]:
        if number == 1:
            return [chunk({"content": "par"}), ERRORS["object"]]
        entry = {"token": "x", "logprob": -0.1, "top_logprobs": [{"token": "x", "logprob": -0.1}]}
        logprobs = {"content": [entry]}
        said = chunk({"content": "\\boxed{6}"})
        said["choices"][0]["logprobs"] = logprobs
        return [said, chunk({}, "stop")]

    with in_front_of(answer) as (server, _):
        whole = server.send(CHAT, {**ASK, "method": method, "temperature": 1})
        assert whole.status == 200, whole.text
        assert whole.json["choices"][0]["message"]["content"] == "\\boxed{6}"


def test_a_vote_of_which_all_samples_fail_tells_why() -> None:
    with in_front_of(lambda _: [chunk({"content": "a"}), ERRORS["object"]]) as (server, _):
        whole = server.send(CHAT, {**ASK, "method": "majority_vote@3", "temperature": 1})
        assert whole.status == 502
        assert "disconnected" in whole.error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("method", [None, "majority_vote@2", "self_refine", "archon"])
def test_the_limit_of_tokens_goes_out_under_its_name(name: str, method: str | None) -> None:
    with in_front_of(lambda _: saying("\\boxed{6}")) as (server, provider):
        body = {**ASK, name: 50, "temperature": 1}
        assert server.send(CHAT, body | ({"method": method} if method else {})).status == 200
        names = {key for sent in provider.requests for key in sent if key.startswith("max_")}
        assert names == {name}


TWO = [("add", '{"a": 1}'), ("add", '{"a": 2}')]
STREAMS: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str]]]] = {
    "without an index": (
        [piece('{"a": 1}', "add", id="x"), piece('{"a": 2}', "add", id="y")],
        TWO,
    ),
    "without an index, in fragments": (
        [
            piece("", "add", id="x"),
            piece('{"a":', id="x"),
            piece(" 1}"),
            piece("", "add", id="y"),
            piece('{"a": 2}'),
        ],
        TWO,
    ),
    "without an index and ids": ([piece('{"a": 1}', "add"), piece('{"a": 2}', "add")], TWO),
    "one index and several ids": (
        [
            piece('{"a": ', "add", id="x", index=0),
            piece("1}", index=0),
            piece('{"a": ', "add", id="y", index=0),
            piece("2}", index=0),
        ],
        TWO,
    ),
    "one index, told apart by ids alone": (
        [
            piece("", "add", id="x", index=0),
            piece("", "add", id="y", index=0),
            piece('{"a": 1}', id="x", index=0),
            piece('{"a": 2}', id="y", index=0),
        ],
        TWO,
    ),
    "id and name in each piece": (
        [piece('{"a":', "add", id="x", index=0), piece(" 1}", "add", id="x", index=0)],
        TWO[:1],
    ),
    "a new id in each piece": (
        [piece('{"a":', "add", id="x", index=0), piece(" 1}", id="y", index=0)],
        TWO[:1],
    ),
    "a name in fragments": (
        [piece("", "a", id="x", index=0), piece('{"a": 1}', "dd", index=0)],
        TWO[:1],
    ),
    "interleaved": (
        [
            piece('{"a":', "add", id="x", index=0),
            piece('{"a":', "add", id="y", index=1),
            piece(" 1}", index=0),
            piece(" 2}", index=1),
        ],
        TWO,
    ),
    "an index beyond all bounds": ([piece('{"a": 1}', "add", id="x", index=10**12)], TWO[:1]),
    "arguments that are null": (
        [{"index": 0, "id": "x", "function": {"name": "add", "arguments": None}}],
        [("add", "{}")],
    ),
    "arguments that are empty": ([piece("", "add", id="x", index=0)], [("add", "{}")]),
    "arguments as an object": (
        [{"index": 0, "id": "x", "function": {"name": "add", "arguments": {"a": 1}}}],
        TWO[:1],
    ),
}


def calls_in(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    items = [item for item in output if item["type"] == "function_call"]
    return [(item["name"], item["arguments"]) for item in items]


@pytest.mark.parametrize("kind", STREAMS)
def test_calls_are_put_together(kind: str) -> None:
    pieces, wanted = STREAMS[kind]
    with in_front_of(lambda _: calling(*pieces)) as (server, _):
        choice = server.send(CHAT, {**ASK, "tools": [ADD]}).json["choices"][0]
        called = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [(each["name"], each["arguments"]) for each in called] == wanted
        ids = [call["id"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == len(wanted)
        assert choice["finish_reason"] == "tool_calls"
        output = server.send(RESPONSES, {"input": "hi"}).json["output"]
        assert calls_in(output) == wanted
        events = server.send(RESPONSES, {"input": "hi", "stream": True}).events
        assert calls_in(events[-1][1]["response"]["output"]) == wanted
        stream = server.send(CHAT, {**ASK, "tools": [ADD], "stream": True}).events
        deltas = [data["choices"][0]["delta"] for _, data in stream if data != "[DONE]"]
        found = [call for delta in deltas for call in delta.get("tool_calls", ())]
        for number, (_, arguments) in enumerate(wanted):
            mine = [call["function"]["arguments"] for call in found if call["index"] == number]
            assert "".join(mine) == arguments


def test_the_arguments_of_a_call_stream_as_the_provider_streams_them() -> None:
    pieces = [
        piece("", "add", id="x", index=0),
        piece('{"a": ', index=0),
        piece("1}", index=0),
        piece('{"a": 2}', "add", id="y", index=1),
    ]
    with in_front_of(lambda _: calling(*pieces)) as (server, _):
        answer = server.send(CHAT, {**ASK, "tools": [ADD], "stream": True})
        chunks = [data for _, data in answer.events if data != "[DONE]"]
        found = [e for c in chunks for e in c["choices"][0]["delta"].get("tool_calls", ())]
        told = [(each["index"], each["function"]["arguments"]) for each in found]
        assert told == [(0, ""), (0, '{"a": '), (0, "1}"), (1, ""), (1, '{"a": 2}')]
        assert [each["id"] for each in found if "id" in each] == ["x", "y"]
        events = server.send(RESPONSES, {"input": "hi", "stream": True}).events
        deltas = [e["delta"] for _, e in events if "arguments.delta" in str(e)[:80]]
        assert deltas == ['{"a": ', "1}", '{"a": 2}']


def test_a_call_that_was_cut_is_a_call_that_ended_at_its_length() -> None:
    answer = calling(piece('{"a": ', "add", id="x", index=0), reason="length")
    with in_front_of(lambda _: answer) as (server, _):
        choice = server.send(CHAT, {**ASK, "tools": [ADD]}).json["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_one_call_at_a_time_is_asked_of_the_server_behind() -> None:
    with in_front_of(lambda _: saying("no")) as (server, provider):
        server.send(CHAT, {**ASK, "tools": [ADD], "parallel_tool_calls": False})
        assert provider.requests[0]["parallel_tool_calls"] is False


def test_a_filtered_answer_ends_as_one() -> None:
    with in_front_of(lambda _: [chunk({"content": "a"}), chunk({}, "content_filter")]) as (
        server,
        _,
    ):
        assert server.send(CHAT, ASK).json["choices"][0]["finish_reason"] == "content_filter"
        last = [data for _, data in server.send(CHAT, {**ASK, "stream": True}).events][-2]
        assert last["choices"][0]["finish_reason"] == "content_filter"
        response = server.send(RESPONSES, {"input": "hi"}).json
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "content_filter"}


def test_a_refusal_is_one() -> None:
    said = [chunk({"refusal": "I "}), chunk({"refusal": "must not."}), chunk({}, "stop")]
    with in_front_of(lambda _: said) as (server, _):
        message = server.send(CHAT, ASK).json["choices"][0]["message"]
        assert (message["content"], message["refusal"]) == (None, "I must not.")
        events = [data for _, data in server.send(CHAT, {**ASK, "stream": True}).events][:-1]
        deltas = [each["choices"][0]["delta"] for each in events]
        assert "".join(delta.get("refusal") or "" for delta in deltas) == "I must not."
        assert not any(delta.get("content") for delta in deltas)
        stream = server.client.responses.create(input="hi", model="m", stream=True)
        kinds = [event.type for event in stream]
        assert "response.refusal.delta" in kinds
        assert "response.refusal.done" in kinds
        first = server.send(RESPONSES, {"input": "hi"}).json
        [item] = first["output"]
        assert item["content"] == [{"type": "refusal", "refusal": "I must not."}]


def test_a_refusal_may_be_sent_back() -> None:
    with in_front_of(lambda _: saying("yes")) as (server, provider):
        refused = {"role": "assistant", "content": None, "refusal": "I must not."}
        talk = [*ASK["messages"], refused, *ASK["messages"]]
        assert server.send(CHAT, {"messages": talk}).status == 200
        assert provider.requests[0]["messages"][1]["content"] == "I must not."


def test_a_refusal_is_part_of_a_conversation_of_responses() -> None:
    answers = [[chunk({"refusal": "I must not."}), chunk({}, "stop")], saying("yes")]
    with in_front_of(lambda number: answers[number]) as (server, provider):
        first = server.send(RESPONSES, {"input": "hi"}).json
        again = {"input": "Why?", "previous_response_id": first["id"]}
        assert server.send(RESPONSES, again).status == 200
        assert provider.requests[1]["messages"][1]["content"] == "I must not."


def test_a_chunk_without_a_delta_adds_nothing() -> None:
    empty: Chunk = {"choices": [{"index": 0, "delta": None, "finish_reason": None}]}
    with in_front_of(lambda _: [empty, {"choices": None}, *saying("yes"), empty]) as (server, _):
        assert server.send(CHAT, ASK).json["choices"][0]["message"]["content"] == "yes"


def test_content_in_parts_is_text_and_thought() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    parts = [chunk({"content": [thought]}), chunk({"content": [{"type": "text", "text": "yes"}]})]
    with in_front_of(lambda _: [*parts, chunk({}, "stop")]) as (server, _):
        message = server.send(CHAT, ASK).json["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "yes")


def test_alternatives_have_their_own_bytes() -> None:
    def scored(raw: list[int], logprob: float) -> dict[str, Any]:
        return {"token": "\ufffd", "logprob": logprob, "bytes": raw}

    first, second = scored([0xE2, 0x98], -0.1), scored([0xF0, 0x9F], -2.0)
    entry = {**first, "top_logprobs": [first, second]}
    last = {**scored([0x83], -0.2), "top_logprobs": None}
    star = chunk({"content": "\u2603"})
    star["choices"][0]["logprobs"] = {"content": [entry, last]}
    with in_front_of(lambda _: [star, chunk({}, "stop")]) as (server, _):
        body = {**ASK, "logprobs": True, "top_logprobs": 2}
        tokens = server.send(CHAT, body).json["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in tokens] == [[0xE2, 0x98], [0x83]]
    assert [each["bytes"] for each in tokens[0]["top_logprobs"]] == [[0xE2, 0x98], [0xF0, 0x9F]]


def test_a_call_costs_tokens_where_the_provider_tells_no_usage() -> None:
    answers = [calling(piece("{", "add", index=0), piece("}", index=0))]
    with in_front_of(lambda _: answers[0]) as (server, _):
        usage = server.send(CHAT, {**ASK, "tools": [ADD]}).json["usage"]
        assert usage["completion_tokens"] == 2


NAMED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "point"}, {"name": "point"}),
    (
        {"name": "point", "strict": False, "description": "of a plane"},
        {"name": "point", "strict": False, "description": "of a plane"},
    ),
    ({"name": "point", "strict": True}, {"name": "point", "strict": True}),
]


@pytest.mark.parametrize(("fields", "sent"), NAMED)
@pytest.mark.parametrize("method", [None, "majority_vote"])
def test_a_schema_goes_out_as_the_client_names_it(
    fields: dict[str, Any], sent: dict[str, Any], method: str | None
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chosen = {} if method is None else {"method": method}
    with in_front_of(lambda _: saying("{}")) as (server, provider):
        shape = {"type": "json_schema", "json_schema": {**fields, "schema": schema}}
        assert server.send(CHAT, {**ASK, **chosen, "response_format": shape}).status == 200
        text = {"format": {"type": "json_schema", **fields, "schema": schema}}
        assert server.send(RESPONSES, {"input": "hi", **chosen, "text": text}).status == 200
        shapes = [request["response_format"]["json_schema"] for request in provider.requests]
    assert shapes == [{**sent, "schema": schema}] * len(shapes)


def test_tools_go_out_as_strict_as_the_client_has_them() -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    with in_front_of(lambda _: saying("yes")) as (server, provider):
        assert server.send(CHAT, {**ASK, "tools": [strict]}).status == 200
        flat = {"type": "function", **strict["function"]}
        assert server.send(RESPONSES, {"input": "hi", "tools": [flat]}).status == 200
        assert [request["tools"] for request in provider.requests] == [[strict]] * 2


def test_refusals_in_parts_may_be_sent_back() -> None:
    refused = [chunk({"refusal": "I must not."}), chunk({}, "stop")]
    with in_front_of(lambda n: saying("yes") if n else refused) as (server, provider):
        [item] = server.send(RESPONSES, {"input": "hi"}).json["output"]
        question = {"role": "user", "content": "Why?"}
        reference = {"type": "item_reference", "id": item["id"]}
        for earlier in (item, reference, {"role": "assistant", "content": item["content"]}):
            body = {"input": [question, earlier, question]}
            assert server.send(RESPONSES, body).status == 200
        parts = {"role": "assistant", "content": item["content"]}
        assert server.send(CHAT, {"messages": [question, parts, question]}).status == 200
        sent = [request["messages"][1]["content"] for request in provider.requests[1:]]
        assert sent == ["I must not."] * 4


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}])
def test_a_call_of_before_without_arguments_has_none(arguments: dict[str, Any]) -> None:
    with in_front_of(lambda _: saying("yes")) as (server, provider):
        called = {"id": "c", "type": "function", "function": {"name": "add", **arguments}}
        result = {"role": "tool", "tool_call_id": "c", "content": "3"}
        talk = [*ASK["messages"], {"role": "assistant", "tool_calls": [called]}, result]
        assert server.send(CHAT, {"messages": talk}).status == 200
        item = {"type": "function_call", "call_id": "c", "name": "add", **arguments}
        output = {"type": "function_call_output", "call_id": "c", "output": "3"}
        assert server.send(RESPONSES, {"input": [*ASK["messages"], item, output]}).status == 200
        for request in provider.requests:
            [call] = request["messages"][1]["tool_calls"]
            assert call["function"]["arguments"] == "{}"


def test_a_refused_request_keeps_its_status_and_code() -> None:
    with in_front_of(lambda _: saying("yes")) as (server, provider):
        for status in (400, 422):
            provider.fail_with = [status]
            provider.error_code = "context_length_exceeded"
            answer = server.send(CHAT, ASK)
            assert (answer.status, answer.error["code"]) == (status, "context_length_exceeded")


def test_values_that_change_nothing_are_no_fields_that_another_server_must_take() -> None:
    """As vLLM's clients send them with every request."""
    neutral = {"top_k": -1, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0}
    neutral |= {"top_n_sigma": -1, "xtc_probability": 0, "xtc_threshold": 0.1}
    neutral |= {"dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2}
    neutral |= {"dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", ":", '"', "*"]}
    with in_front_of(lambda number: saying("hello")) as (server, provider):
        answer = server.send(CHAT, {**ASK, **neutral})
        refused = [
            server.send(CHAT, {**ASK, name: 0.5}).status for name in ("min_p", "dry_multiplier")
        ]
        assert (answer.status, refused) == (200, [400, 400])
        assert not provider.requests[0].keys() & neutral.keys()
