"""ollama's API: requests as its clients send them; tests/clients has its own Python client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from forethought.llm.async_llm import AsyncLLM
from forethought.llm.tool_messages import as_text
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.settings import Settings
from forethought.workers.scripted import Reply
from http_servers import Answer, Served, scripted, served

CHAT, GENERATE = "/api/chat", "/api/generate"
THOUGHT = "<think>\nfirst this\n</think>\n\nthe answer"
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def answers(prompt: str, index: int) -> str | Reply:
    table = {
        "think": THOUGHT,
        "call": "Let me see. " + as_text("add", {"a": 1}),
        "stop": "one. two. three.",
        "fail": Reply("never", error=RuntimeError("a secret of the server")),
    }
    return table.get(prompt, f"you said {prompt}")


@pytest.fixture(scope="module")
def script() -> Iterator[Served]:
    with scripted(answers, Settings(lists_methods=True)) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    backend = EngineBackend(AsyncLLM(kv_cache_config={"max_tokens": 4096}), "reasoner")
    with served(backend) as running:
        yield running
        assert backend.llm is not None
        engine = backend.llm._frontend.local_engine
        backend.llm._thread.call(engine.check_integrity).result()
    backend.close()


def say(text: str, model: str = "scripted", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize("text", ["think", "call", "hello"])
def test_a_stream_adds_up_to_the_whole_answer(script: Served, text: str) -> None:
    fields: dict[str, Any] = {"tools": [ADD]} if text == "call" else {}
    whole = script.send(CHAT, say(text, stream=False, **fields)).json
    parts = lines(script.send(CHAT, say(text, **fields)))
    for name in ("content", "thinking"):
        joined = "".join(part["message"].get(name, "") for part in parts)
        assert joined == whole["message"].get(name, "")
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["message"].get("tool_calls") == whole["message"].get("tool_calls")
    assert whole["message"]["role"] == "assistant"


def test_thoughts_and_calls_are_in_fields_of_their_own(script: Served) -> None:
    thinking = script.send(CHAT, say("think", stream=False)).json["message"]
    assert (thinking["thinking"], thinking["content"]) == ("first this", "the answer")
    call = script.send(CHAT, say("call", stream=False, tools=[ADD])).json["message"]
    assert call["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]


def test_counts_and_times_are_those_of_ollama(script: Served) -> None:
    end = script.send(CHAT, say("hello", stream=False)).json
    assert (end["prompt_eval_count"], end["eval_count"]) == (5, len("you said hello"))
    assert all(isinstance(end[name], int) and end[name] >= 0 for name in TIMES)
    assert end["total_duration"] >= end["prompt_eval_duration"] + end["eval_duration"] - 2
    assert (end["done_reason"], end["created_at"][-1]) == ("stop", "Z")


def test_options_are_honoured(script: Served, server: Served) -> None:
    cut = script.send(CHAT, say("stop", stream=False, options={"stop": ["two"]})).json
    assert cut["message"]["content"] == "one. "
    for limit in (-1, -2):
        options = {"num_predict": limit, "num_ctx": 512, "repeat_last_n": -1}
        whole = script.send(CHAT, say("stop", stream=False, options=options)).json
        assert whole["message"]["content"] == "one. two. three."
    body = say("What is 3 + 4?", "reasoner", stream=False)
    short = server.send(CHAT, {**body, "options": {"num_predict": 3}}).json
    assert (short["eval_count"], short["done_reason"]) == (3, "length")
    drawn = {"temperature": 1.5, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    texts = {server.send(CHAT, {**body, "options": drawn}).json["message"]["content"] for _ in "ab"}
    assert len(texts) == 1
    raised = {"temperature": 0, "repeat_penalty": 1.8, "num_predict": 30}
    plain = {**raised, "repeat_penalty": 1.0}
    outputs = [server.send(CHAT, {**body, "options": o}).json["message"] for o in (raised, plain)]
    assert outputs[0] != outputs[1]


def test_the_format_is_enforced(server: Served) -> None:
    shape = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    options = {"num_predict": 200}
    body = say("What is 3 + 4?", "reasoner", stream=False, options=options)
    answer = server.send(CHAT, {**body, "format": shape}).json
    assert json.loads(answer["message"]["content"])["n"] in (1, 2)
    anything = server.send(GENERATE, {**asking("a", "reasoner"), "format": "json"}).json
    assert anything["response"].startswith("{")
    invalid = server.send(CHAT, {**body, "format": {"type": 3}})
    assert invalid.status == 400
    assert "format" in invalid.json["error"]
    assert "json_schema" not in invalid.json["error"]


def asking(text: str, model: str = "scripted", **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": text,
        "stream": False,
        "options": {"num_predict": 40},
    } | fields


def test_thinking_can_be_switched_off(server: Served) -> None:
    body = say("What is 3 + 4?", "reasoner", stream=False, options={"temperature": 0})
    assert server.send(CHAT, {**body, "think": True}).json["message"]["thinking"]
    assert "thinking" not in server.send(CHAT, {**body, "think": False}).json["message"]
    assert server.send(CHAT, {**body, "think": "low"}).json["message"]["thinking"]


def test_a_prompt_is_answered_by_the_template_or_continued_raw(server: Served) -> None:
    question, options = "What is 3 + 4?", {"temperature": 0, "num_predict": 40}
    chat = server.send(CHAT, say(question, "reasoner", stream=False, options=options)).json
    answer = server.send(GENERATE, asking(question, "reasoner", options=options)).json
    assert answer["response"] == chat["message"]["content"]
    assert answer["thinking"] == chat["message"]["thinking"]
    raw = server.send(GENERATE, asking(question, "reasoner", options=options, raw=True)).json
    body = {"prompt": question, "temperature": 0, "max_tokens": 40}
    completion = server.send("/v1/completions", body).json["choices"][0]["text"]
    assert raw["response"] == completion
    refused = server.send(GENERATE, asking(question, "reasoner", raw=True, system="Be brief."))
    assert (refused.status, "system" in refused.json["error"]) == (400, True)
    parts = lines(server.send(GENERATE, asking(question, "reasoner", options=options, stream=True)))
    assert "".join(part["response"] for part in parts) == answer["response"]


def test_a_system_prompt_is_part_of_the_conversation(server: Served) -> None:
    body = asking("What is 3 + 4?", "reasoner")
    alone = server.send(GENERATE, body).json["prompt_eval_count"]
    told = server.send(GENERATE, {**body, "system": "Be brief."}).json["prompt_eval_count"]
    assert told > alone


def test_results_belong_to_the_calls_before_them(script: Served) -> None:
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}}}

    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call("add"), call("sub")]},
        {"role": "tool", "content": "0", "tool_name": "sub"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "thanks"},
    ]
    answer = script.send(CHAT, {"model": "scripted", "messages": messages, "stream": False})
    assert answer.json["message"]["content"] == "you said thanks"
    stray = [messages[0], messages[2]]
    refused = script.send(CHAT, {"model": "scripted", "messages": stray, "stream": False})
    assert refused.status == 400
    assert "tool_call_id" in refused.json["error"]


def test_models_are_those_of_the_other_apis(script: Served) -> None:
    names = [model["name"] for model in script.send("/api/tags").json["models"]]
    assert names == [model["id"] for model in script.send("/v1/models").json["data"]]
    assert "majority_vote-scripted" in names
    assert all(len(m["digest"]) == 64 for m in script.send("/api/tags").json["models"])
    shown = script.send("/api/show", {"model": "scripted:latest"}).json
    assert shown["capabilities"][:2] == ["completion", "tools"]
    assert script.send("/api/show", {"model": "other"}).status == 404
    assert script.send("/api/version").json == script.send("/version").json


def test_methods_and_the_tag_latest_are_names_of_models(script: Served) -> None:
    for name in ("majority_vote@3-scripted", "scripted:latest"):
        answer = script.send(CHAT, say("hello", name, stream=False)).json
        assert (answer["model"], answer["message"]["content"]) == (name, "you said hello")


def test_nothing_to_answer_says_that_the_model_is_loaded(script: Served) -> None:
    for path, body in ((CHAT, {"messages": []}), (GENERATE, {})):
        answer = script.send(path, {"model": "scripted", "keep_alive": "5m", **body}).json
        assert (answer["done"], answer["done_reason"]) == (True, "load")


def test_a_stream_that_fails_ends_with_an_error(script: Served) -> None:
    answer = script.send(CHAT, say("fail"))
    assert answer.status == 500
    assert "secret" not in answer.text
    assert set(answer.json) == {"error"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"num_ctx": 1 << 20}}, "options.num_ctx"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"temperature": -1.0}}, "temperature"),
        ({"options": {"repeat_penalty": 0.0}}, "options.repeat_penalty"),
        ({"options": []}, "options"),
        ({"format": "xml"}, "format"),
        ({"format": {"a": [[]] * 70_000}}, "format"),
        ({"think": "much"}, "think"),
        ({"messages": [{}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages.0.images"),
        ({"messages": "a"}, "messages"),
        ({"model": None}, "model"),
        ({"template": "x"}, "template"),
        ({"tools": [{}]}, "tools.0.type"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    server: Served, fields: dict[str, Any], named: str
) -> None:
    answer = server.send(CHAT, {**say("a", "reasoner", stream=False), **fields})
    assert answer.status == 400, answer.text
    assert named in answer.json["error"]


def test_other_models_and_other_methods_of_http_have_errors_as_texts(script: Served) -> None:
    for path, body, status in (
        (CHAT, say("a", "other"), 404),
        (CHAT, b"{", 400),
        (CHAT, b'{"model": "\\ud800"}', 400),
        ("/api/pull", {"model": "a"}, 404),
        (CHAT, None, 405),
    ):
        answer = script.send(path, body)
        assert (answer.status, type(answer.json["error"])) == (status, str)
    with scripted(answers, Settings(api_keys=["key"])) as running:
        assert isinstance(running.send("/api/tags").json["error"], str)


def test_a_body_needs_no_content_type_unless_a_browser_may_have_sent_it(script: Served) -> None:
    body, untyped = json.dumps(say("hello", stream=False)).encode(), {"content-type": ""}
    page = {**untyped, "origin": "http://evil.example"}
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert script.send(CHAT, body, headers=untyped).status == 200
    assert script.send(CHAT, body, headers=page).status == 415
    assert script.send(CHAT, body, headers=form).status == 415
    assert script.send("/v1/chat/completions", body, headers=untyped).status == 415
