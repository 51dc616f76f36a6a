"""Responses over HTTP: streamed, in the background, resumed, ended and forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from forethought.llm.tool_messages import as_text
from forethought.server.settings import Settings
from forethought.workers.scripted import Reply
from http_servers import Served, eventually, scripted

ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def answers(prompt: str, index: int) -> str | Reply:
    table: dict[str, str | Reply] = {
        "think": "<think>\nhm\n</think>\n\nthe answer",
        "call": as_text("add", {"a": 1}),
        "think call": "<think>hm</think>so" + as_text("add", {"a": 1}),
        "json": '{"age": 7}',
        "slow": Reply("a" * 10_000, seconds_per_token=0.01),
        "steady": Reply("abcdefghij", seconds_per_token=0.01),
        "fail": Reply("", error=RuntimeError("secret")),
    }
    return table.get(prompt, f"you said {prompt}")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with scripted(answers) as running:
        yield running


def test_a_response_has_the_thought_and_the_message_as_items(server: Served) -> None:
    response = server.client.responses.create(model="scripted", input="think")
    assert response.status == "completed"
    assert response.output_text == "the answer"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.usage.input_tokens == 5


def test_a_stream_of_events_is_numbered_and_complete(server: Served) -> None:
    events = list(server.client.responses.create(model="scripted", input="think", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "the answer"
    opened = kinds.count("response.output_item.added")
    assert opened == kinds.count("response.output_item.done") == 2


def test_the_clients_own_stream_helper_reads_it(server: Served) -> None:
    with server.client.responses.stream(model="scripted", input="think") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "the answer"


def test_a_conversation_goes_on_from_the_response_before(server: Served) -> None:
    client = server.client
    first = client.responses.create(model="scripted", input="one", instructions="be short")
    second = client.responses.create(model="scripted", input="two", previous_response_id=first.id)
    assert second.output_text == "you said two"
    kept = server.service.store.find(second.id, "")
    said = [(each["role"], each["content"]) for each in kept.messages]
    assert said == [("user", "one"), ("assistant", "you said one"), ("user", "two")]


def test_functions_are_called_and_their_outputs_go_back(server: Served) -> None:
    first = server.client.responses.create(model="scripted", input="call", tools=[ADD])
    call = first.output[0]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    second = server.client.responses.create(
        model="scripted", input=[output], tools=[ADD], previous_response_id=first.id
    )
    assert second.output_text == "you said 2"
    whole: list[Any] = [{"role": "user", "content": "call"}, call, output]
    third = server.client.responses.create(model="scripted", input=whole, tools=[ADD])
    assert third.output_text == "you said 2"


class Age(BaseModel):
    age: int


def test_parse_returns_an_object(server: Served) -> None:
    parsed = server.client.responses.parse(model="scripted", input="json", text_format=Age)
    assert parsed.output_parsed == Age(age=7)


def test_a_response_in_the_background_is_fetched_later(server: Served) -> None:
    client = server.client
    begun = client.responses.create(model="scripted", input="steady", background=True)
    assert begun.status in ("queued", "in_progress")
    eventually(lambda: client.responses.retrieve(begun.id).status == "completed")
    assert client.responses.retrieve(begun.id).output_text == "abcdefghij"


def test_a_stream_is_resumed_behind_an_event(server: Served) -> None:
    client = server.client
    number, text, response_id = -1, "", ""
    with client.responses.create(
        model="scripted", input="steady", background=True, stream=True
    ) as stream:
        for event in stream:
            number = event.sequence_number
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                text += event.delta
                break  # the connection is lost
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=number))
    assert rest[0].sequence_number == number + 1
    for event in rest:
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == "abcdefghij"
    assert rest[-1].type == "response.completed"
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=10**6)) == []


def test_a_response_in_the_background_can_be_cancelled(server: Served) -> None:
    client = server.client
    before = sum(call.prompt == "slow" for call in server.backend.worker.calls)
    begun = client.responses.create(model="scripted", input="slow", background=True)
    eventually(
        lambda: sum(call.prompt == "slow" for call in list(server.backend.worker.calls)) > before
    )
    assert client.responses.cancel(begun.id).status == "cancelled"
    eventually(lambda: server.backend.worker.calls[-1].ended == "cancelled")
    assert client.responses.cancel(begun.id).status == "cancelled"


def test_a_response_that_is_deleted_is_gone(server: Served) -> None:
    client = server.client
    made = client.responses.create(model="scripted", input="x")
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_response_that_is_not_stored_is_not_found(server: Served) -> None:
    made = server.client.responses.create(model="scripted", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        server.client.responses.retrieve(made.id)


def test_a_client_that_leaves_ends_what_runs_for_it_alone(server: Served) -> None:
    with server.client.responses.create(model="scripted", input="slow", stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    eventually(lambda: server.backend.worker.calls[-1].ended == "cancelled")


def test_a_cut_response_is_incomplete(server: Served) -> None:
    made = server.client.responses.create(model="scripted", input="x", max_output_tokens=3)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output_text == "you"


def test_a_failure_has_a_status_and_in_a_stream_an_event(server: Served) -> None:
    answer = server.send("/v1/responses", {"input": "fail"})
    assert answer.status == 500
    assert "secret" not in answer.text
    events = server.send("/v1/responses", {"input": "fail", "stream": True}).events
    assert events[-1][0] == "response.failed"
    assert events[-1][1]["response"]["error"]["code"] == "server_error"


def test_a_method_answers_and_tells_its_events(server: Served) -> None:
    body = {"input": "hello", "method": "majority_vote@2", "events": True, "stream": True}
    events = server.send("/v1/responses", body).events
    told = [data["event"]["type"] for name, data in events if name == "forethought"]
    assert (told[0], told[-1]) == ("started", "finished")
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "you said hello"


def test_old_responses_make_room_and_pass_away() -> None:
    with scripted(answers, Settings(max_stored=2)) as running:
        made = [running.send("/v1/responses", {"input": "x"}).json["id"] for _ in range(3)]
        found = [running.send(f"/v1/responses/{each}").status for each in made]
        assert found == [404, 200, 200]
    with scripted(answers, Settings(store_seconds=1e-6)) as running:
        made_id = running.send("/v1/responses", {"input": "x"}).json["id"]
        assert running.send(f"/v1/responses/{made_id}").status == 404


def test_a_key_pushes_out_only_its_own_responses() -> None:
    keys = [{"authorization": f"Bearer {name}"} for name in ("one", "two")]
    with scripted(answers, Settings(max_stored=4, api_keys=("one", "two"))) as running:

        def make(key: dict[str, str]) -> str:
            made_id: str = running.send("/v1/responses", {"input": "x"}, headers=key).json["id"]
            return made_id

        def status(response_id: str, key: dict[str, str]) -> int:
            return running.send(f"/v1/responses/{response_id}", headers=key).status

        kept = make(keys[0])
        others = [make(keys[1]) for _ in range(6)]
        assert status(kept, keys[0]) == 200
        assert [status(each, keys[1]) for each in others] == [404] * 4 + [200] * 2
        assert status(others[-1], keys[0]) == 404


def test_a_key_at_its_share_is_rejected_and_others_are_served() -> None:
    keys = [{"authorization": f"Bearer {name}"} for name in ("one", "two")]
    body = {"input": "slow", "background": True}
    with scripted(answers, Settings(max_stored=2, api_keys=("one", "two"))) as running:
        made = running.send("/v1/responses", body, headers=keys[0])
        refused = running.send("/v1/responses", body, headers=keys[0])
        assert (made.status, refused.status) == (200, 429)
        assert running.send("/v1/responses", {"input": "x"}, headers=keys[1]).status == 200
        running.send(f"/v1/responses/{made.json['id']}/cancel", b"", headers=keys[0])


def test_responses_that_take_much_memory_make_room_earlier() -> None:
    with scripted(lambda prompt, index: "a" * 20_000, Settings(max_stored_bytes=10**6)) as running:
        made = [running.send("/v1/responses", {"input": "x"}).json["id"] for _ in range(20)]
        found = [running.send(f"/v1/responses/{each}").status for each in made]
        num_kept = found.count(200)
        assert 1 < num_kept < 20
        assert found == [404] * (20 - num_kept) + [200] * num_kept
        kept = [running.service.store.find(each, "") for each in made[-num_kept:]]
        assert sum(record.num_bytes for record in kept[:-1]) <= 10**6


@pytest.mark.parametrize(
    "change",
    [
        {"input": []},
        {"input": [{"type": "image"}]},
        {"background": True, "store": False},
        {"previous_response_id": "resp-nothing"},
        {"model": "plain|plain-scripted"},
        {"truncation": "always"},
        {"max_tool_calls": 1},
        {"input": [{"type": "item_reference", "id": "msg_nothing"}]},
        {"include": ["x"]},
        {"tools": [{"type": "web_search"}]},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
    ],
)
def test_what_cannot_be_is_refused(server: Served, change: dict[str, Any]) -> None:
    answer = server.send("/v1/responses", {"input": "x", **change})
    assert answer.status in (400, 404), answer.text
    assert answer.error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"include": []},
        {"include": ["reasoning.encrypted_content", "web_search_call.results"]},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s"},
        {"reasoning": {"summary": "auto"}},
        {"reasoning": {"generate_summary": "concise"}},
        {"text": {"verbosity": "low"}},
        {"truncation": "auto"},
        {"stream_options": {"include_obfuscation": False}},
    ],
    ids=str,
)
def test_what_changes_nothing_is_accepted(server: Served, fields: dict[str, Any]) -> None:
    plain, answer = (server.send("/v1/responses", {"input": "x", **f}) for f in ({}, fields))
    assert answer.status == 200, answer.text
    texts = [each.json["output"][0]["content"][0]["text"] for each in (plain, answer)]
    assert texts[0] == texts[1]


def test_an_unknown_response_is_named_by_the_field_of_the_client(server: Served) -> None:
    answer = server.send("/v1/responses", {"input": "x", "previous_response_id": "resp_nothing"})
    assert (answer.status, answer.error["param"]) == (404, "previous_response_id")


def said(server: Served, response_id: str) -> list[Any]:
    kept = server.service.store.find(response_id, "")
    return [(each["role"], each["content"], "tool_calls" in each) for each in kept.messages]


@pytest.mark.parametrize("form", ["reference", "short reference", "dump", "dump by alias", "dict"])
def test_the_items_of_a_response_are_the_input_of_the_next(server: Served, form: str) -> None:
    client = server.client
    first = client.responses.create(model="scripted", input="think call", tools=[ADD])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    forms: dict[str, Any] = {
        "reference": [{"type": "item_reference", "id": item.id} for item in first.output],
        "short reference": [{"id": item.id} for item in first.output],
        "dump": [item.model_dump() for item in first.output],
        "dump by alias": [item.model_dump(by_alias=True) for item in first.output],
        "dict": [item.to_dict() for item in first.output],
    }
    call: Any = first.output[2]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    again: list[Any] = [{"role": "user", "content": "think call"}, *forms[form], output]
    second = client.responses.create(model="scripted", input=again, tools=[ADD])
    assert second.output_text == "you said 2"
    assert said(server, second.id) == [
        ("user", "think call", False),
        ("assistant", "so", True),
        ("tool", "2", False),
    ]


def test_an_item_is_found_while_its_response_is_stored() -> None:
    keys = [{"authorization": f"Bearer {name}"} for name in ("one", "two")]
    with scripted(answers, Settings(api_keys=("one", "two"))) as running:
        made = running.send("/v1/responses", {"input": "x"}, headers=keys[0]).json
        item = {"type": "item_reference", "id": made["output"][0]["id"]}
        body = {"input": [item, {"role": "user", "content": "y"}]}
        assert running.send("/v1/responses", body, headers=keys[0]).status == 200
        refused = running.send("/v1/responses", body, headers=keys[1])
        assert (refused.status, refused.error["param"]) == (404, "input.0.id")
        running.send(f"/v1/responses/{made['id']}", method="DELETE", headers=keys[0])
        assert running.send("/v1/responses", body, headers=keys[0]).status == 404


def test_the_id_of_a_response_is_written_as_openais(server: Served) -> None:
    made = server.send("/v1/responses", {"input": "x"}).json
    assert made["id"].startswith("resp_")
    assert server.send(f"/v1/responses/{made['id']}").json == made
