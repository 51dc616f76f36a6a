"""Fields of requests: each is honoured, or refused by the name that the client gave it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from forethought import AsyncLLM, methods
from forethought.config.drafters import NGramDecodingConfig
from forethought.scaffolding.sampling import is_set
from forethought.scaffolding.task import GenerationTask
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.protocol.chat_request import ChatRequest
from forethought.server.protocol.completion_request import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from forethought.server.protocol.responses_request import ResponseRequest
from forethought.server.settings import Settings
from http_servers import Answer, Served, scripted, served
from turns import by_turns

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
QUESTION = "Sam has 110 nuts. He uses 84. How many nuts does Sam have now?"
BODIES: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8},
    COMPLETIONS: {"prompt": "Sam has", "max_tokens": 8},
    RESPONSES: {"input": QUESTION, "max_output_tokens": 8},
    "/tokenize": {"prompt": "Sam has"},
    "/detokenize": {"tokens": [300]},
}
MODELS = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponseRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
UNSUPPORTED = ("suffix", "best_of", "functions", "function_call", "audio", "web_search_options")
"""Of OpenAI's API, and not here."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["answer"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
SHAPES: dict[str, dict[str, Any]] = {
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    },
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "forced call": {"tools": [TOOL], "tool_choice": "required"},
}
THOUGHTS: tuple[dict[str, Any], ...] = (
    {"thinking_budget": 20},
    {"thinking_token_budget": 20},
    {"reasoning_budget": 20},
    {"reasoning_budget": -1},
    {"thinking_budget": -1},
    {"thinking_token_budget": -1},
    {"thinking_soft": 10},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "xhigh"},
    {"chat_template_kwargs": {"enable_thinking": True}},
)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    fields: Any = {"speculative_config": NGramDecodingConfig(max_draft_len=3)}
    llm = AsyncLLM(**fields, dtype="float32", kv_cache_config={"max_tokens": 8192})
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Served]:
    with served(EngineBackend(llm, "reasoner")) as running:
        yield running


@pytest.fixture(scope="module")
def script() -> Iterator[Served]:
    with scripted(lambda prompt, index: "<think>hm</think>fine") as running:
        yield running


def ask(running: Served, path: str, **fields: Any) -> Answer:
    return running.send(path, {**BODIES[path], **fields})


# ---- precedence --------------------------------------------------------------------------------


@pytest.mark.parametrize(("thought", "shape"), by_turns(THOUGHTS, [*SHAPES]))
def test_a_thought_that_is_asked_for_stands_in_front_of_a_shape(
    server: Served, thought: dict[str, Any], shape: str
) -> None:
    answer = ask(server, CHAT, **SHAPES[shape], **thought, max_tokens=400, temperature=0).json
    [choice] = answer["choices"]
    message = choice["message"]
    assert message["reasoning"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    if 20 in thought.values():
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 20
    if "forced" in shape:
        [call] = message["tool_calls"]
        assert "answer" in json.loads(call["function"]["arguments"])
    else:
        assert set(json.loads(message["content"])) == {"answer"}


@pytest.mark.parametrize("method", [None, "majority_vote@2"])
@pytest.mark.parametrize("thought", [{"thinking_budget": 20}, {"reasoning": {"effort": "low"}}])
def test_a_response_thinks_in_front_of_its_format(
    server: Served, thought: dict[str, Any], method: str | None
) -> None:
    format = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    fields = {"text": {"format": format}, "max_output_tokens": 400, "temperature": 0, **thought}
    answer = ask(server, RESPONSES, **fields, method=method).json
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert set(json.loads(answer["output"][1]["content"][0]["text"])) == {"answer"}
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("none", [{"thinking_budget": 0}, {"reasoning_effort": "none"}, {}])
def test_a_shape_without_a_request_for_a_thought_begins_at_once(
    server: Served, none: dict[str, Any]
) -> None:
    answer = ask(server, CHAT, **SHAPES["response_format"], **none, max_tokens=60).json
    assert "reasoning" not in answer["choices"][0]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_within_the_content_is_left_out_on_request(
    stream: bool,
) -> None:
    settings = Settings(reasoning_in_content=True)
    with scripted(lambda prompt, index: "<think>hm</think>fine", settings) as running:
        texts = []
        for wanted in (True, False):
            answer = ask(running, CHAT, include_reasoning=wanted, max_tokens=80, stream=stream)
            if stream:
                chunks = [data for _, data in answer.events if data != "[DONE]"]
                deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
                texts.append("".join(delta.get("content") or "" for delta in deltas))
            else:
                texts.append(answer.json["choices"][0]["message"]["content"])
    assert texts == ["<think>hm</think>fine", "fine"]


# ---- null --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_null_is_a_field_that_is_not_given(script: Served, path: str) -> None:
    fields = [name for name in MODELS[path].model_fields if name not in BODIES[path]]
    for name in (*fields, *UNSUPPORTED, "json_schema"):
        answer = ask(script, path, **{name: None})
        assert answer.status == 200, (name, answer.text)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": None, "x": None}}),
        (CHAT, {"response_format": {"type": "text", "json_schema": None}}),
        (CHAT, {"speculation": {"drafter": None, "enabled": None, "max_draft_len": None}}),
        (CHAT, {"budget": {"tokens": None, "calls": None, "seconds": None}}),
        (CHAT, {"structured_outputs": {"regex": "[a-z]+", "json": None, "choice": None}}),
        (
            CHAT,
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": None, "strict": None},
                    }
                ]
            },
        ),
        (RESPONSES, {"text": {"format": None, "verbosity": None}}),
        (RESPONSES, {"reasoning": {"effort": None, "summary": None, "generate_summary": None}}),
        (RESPONSES, {"input": [{"type": None, "role": "user", "content": "x", "id": None}]}),
    ],
)
def test_null_is_a_nested_field_that_is_not_given(
    script: Served, path: str, fields: dict[str, Any]
) -> None:
    answer = ask(script, path, **fields)
    assert answer.status == 200, answer.text


def test_null_within_a_schema_is_a_value(server: Served) -> None:
    schema = {**SCHEMA, "properties": {"answer": {"enum": [None], "default": None}}}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = ask(server, CHAT, response_format=shape, max_tokens=40).json
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"answer": None}


# ---- numbers that clients send -----------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_any_seed_of_64_bits_is_taken_and_no_other(server: Served, path: str) -> None:
    for seed in (-1, -5, -(2**63), 0, 2**63 - 1, 2**64 - 1):
        assert ask(server, path, seed=seed).status == 200
    for seed in (-(2**63) - 1, 2**64):
        answer = ask(server, path, seed=seed)
        assert (answer.status, answer.error["param"]) == (400, "seed")


def test_a_negative_seed_repeats_and_minus_one_is_fresh(server: Served) -> None:
    def texts(seed: int) -> set[str]:
        body = {"prompt": "A", "max_tokens": 24, "temperature": 3.0, "seed": seed}
        return {server.send(COMPLETIONS, body).json["choices"][0]["text"] for _ in range(2)}

    assert len(texts(-5)) == 1
    assert len(texts(-1)) == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_top_k_of_minus_one_is_no_limit(server: Served, path: str) -> None:
    assert ask(server, path, top_k=-1, temperature=1.0).status == 200
    answer = ask(server, path, top_k=-2)
    assert (answer.status, answer.error["param"]) == (400, "top_k")


def test_no_alternatives_are_asked_for_without_log_probabilities(server: Served) -> None:
    answer = ask(server, CHAT, logprobs=False, top_logprobs=0)
    assert answer.status == 200
    assert answer.json["choices"][0]["logprobs"] is None


# ---- names in errors ---------------------------------------------------------------------------

BROKEN: dict[str, Any] = {"type": "string", "pattern": "(?=x)"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSES, {"reasoning": {"summary": 5}}, "reasoning.summary"),
        (RESPONSES, {"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        (RESPONSES, {"text": {"format": {"type": "x"}}}, "text.format.type"),
        (
            RESPONSES,
            {"input": [{"type": "reasoning", "summary": [], "x": 1}]},
            "input.0.x",
        ),
        (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input.0.content"),
        (RESPONSES, {"input": [{"role": "nobody", "content": ""}]}, "input.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": ""}, {"role": "tool", "content": "x"}]},
            "messages.1.tool_call_id",
        ),
        (CHAT, {"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
        (CHAT, {"speculation": {"max_draft_len": -1}}, "speculation.max_draft_len"),
        (CHAT, {"speculation": {"drafter": "nothing"}}, "speculation.drafter"),
        (CHAT, {"speculation": "nothing"}, "speculation"),
        (CHAT, {"logit_bias": {"5": "x"}}, "logit_bias.5"),
        (CHAT, {"logit_bias": {"99999999": 1}}, "logit_bias"),
        (CHAT, {"stop": ["a", 5]}, "stop.1"),
        (CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (CHAT, {"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 99}, "logprobs"),
        (COMPLETIONS, {"prompt": [300, "x"]}, "prompt.1"),
        (COMPLETIONS, {"prompt": [[300], "x"]}, "prompt.1"),
        (COMPLETIONS, {"prompt": ["x", [300]]}, "prompt.1"),
        (RESPONSES, {"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type"),
        (CHAT, {"thinking_budget": -2}, "thinking_budget"),
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget"),
        (CHAT, {"reasoning_budget": -2}, "reasoning_budget"),
        (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (COMPLETIONS, {"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        (CHAT, {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        (
            CHAT,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": BROKEN},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": BROKEN}}},
            "text.format.schema",
        ),
        (
            CHAT,
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": BROKEN}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", [None, "majority_vote@2"])
def test_an_error_names_the_field_of_the_client_and_its_whole_path(
    server: Served,
    path: str,
    fields: dict[str, Any],
    param: str,
    stream: bool,
    method: str | None,
) -> None:
    answer = ask(server, path, **fields, stream=stream, method=method)
    if answer.status == 200 and path != RESPONSES:  # a method had begun to stream
        error = next(data["error"] for _, data in answer.events if "error" in data)
        assert error["param"] == param
        message = error["message"]
    elif answer.status == 200:
        message = answer.events[-1][1]["response"]["error"]["message"]
    else:
        assert (answer.status, answer.error["param"]) == (400, param)
        message = answer.error["message"]
    assert "guided_decoding" not in message
    assert param.split(".")[-1] in message


def test_ids_outside_the_vocabulary_are_named(server: Served) -> None:
    answer = server.send("/detokenize", {"tokens": [10**8]})
    assert (answer.status, answer.error["param"]) == (400, "tokens")


@pytest.mark.parametrize("item", [5, "hi", None])
def test_an_item_that_is_no_object_is_refused_in_words_of_json(server: Served, item: Any) -> None:
    answer = server.send(RESPONSES, {"input": [item]})
    assert (answer.status, answer.error["param"]) == (400, "input.0")
    assert "InputMessage" not in answer.error["message"]


def test_requests_that_share_a_broken_grammar_are_told_their_own_fields(server: Served) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": BROKEN}}
    first = ask(server, CHAT, response_format=shape)
    second = ask(server, CHAT, structured_outputs={"json": BROKEN})
    assert "response_format.json_schema.schema" in first.error["message"]
    assert "structured_outputs.json" in second.error["message"]
    assert "response_format" not in second.error["message"]


# ---- echo without a token ----------------------------------------------------------------------


def test_an_echo_alone_scores_a_prompt_as_long_as_the_context(
    server: Served, llm: AsyncLLM
) -> None:
    decoded, most = llm.stats.decoded, llm.max_length
    for n, length in ((1, most - 1), (1, most), (2, 7)):
        body = {"prompt": [300] * length, "max_tokens": 0, "echo": True, "logprobs": 1, "n": n}
        answer = server.send(COMPLETIONS, body).json
        assert [len(each["logprobs"]["tokens"]) for each in answer["choices"]] == [length] * n
        assert [each["finish_reason"] for each in answer["choices"]] == ["length"] * n
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, 0)
    assert llm.stats.decoded == decoded
    answer = ask(server, COMPLETIONS, prompt=[300] * (most + 1), max_tokens=0, echo=True)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["server", "script"])
def test_an_echo_without_scores_computes_nothing(
    name: str, stream: bool, request: pytest.FixtureRequest
) -> None:
    running: Served = request.getfixturevalue(name)
    body = {"prompt": ["Sam has", "He"], "max_tokens": 0, "echo": True, "n": 2, "stream": stream}
    answer = running.send(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    if stream:
        chunks = [data for _, data in answer.events if data != "[DONE]"]
        choices, usage = [c for chunk in chunks for c in chunk["choices"]], chunks[-1]["usage"]
    else:
        choices, usage = answer.json["choices"], answer.json["usage"]
    assert [choice["text"] for choice in choices] == ["Sam has", "Sam has", "He", "He"]
    assert (usage["completion_tokens"], usage["prompt_tokens"] > 0) == (0, True)


def test_no_tokens_are_asked_of_an_echo_alone(server: Served) -> None:
    for fields in ({}, {"echo": False}, {"echo": True, "method": "majority_vote"}):
        answer = ask(server, COMPLETIONS, **fields, max_tokens=0)
        assert answer.status == 400
        assert answer.error["param"] == ("method" if "method" in fields else "max_tokens")


# ---- methods -----------------------------------------------------------------------------------

OF_METHODS: dict[str, Any] = {
    "temperature": 0.123,
    "top_p": 0.456,
    "top_k": 17,
    "min_p": 0.0123,
    "repetition_penalty": 1.23,
    "top_n_sigma": 2.5,
    "xtc_probability": 0.13,
    "xtc_threshold": 0.14,
    "dry_multiplier": 0.81,
    "dry_base": 1.82,
    "dry_allowed_length": 4,
    "dry_penalty_last_n": 83,
    "dry_sequence_breakers": ["!", "Sam:"],
    "min_tokens": 3,
    "ignore_eos": True,
    "stop_token_ids": [77],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "thinking_budget": 33,
    "thinking_soft": 22,
    "seed": 4242,
    "stop": ["zzz"],
    "presence_penalty": 0.11,
    "frequency_penalty": 0.12,
    "logit_bias": {"5": 1.5},
    "max_tokens": 150,
    "structured_outputs": {"regex": "[^q]*"},
    "speculation": "none",
}
DERIVED = {
    "seed": "each call has its own",
    "max_tokens": "a call has what is left of it",
    "logit_bias": "by token ids",
    "stop": "a method adds its own",
    "structured_outputs": "as guided_decoding",
    "speculation": "as its parameters",
}
"""Fields whose value in a task is made of that of the request."""
ANNEALED = "adaptive_compute"
"""Its temperatures rise to that of the request."""


def is_honoured(name: str, method: str, tasks: list[GenerationTask]) -> bool:
    """Whether a task has the request's value."""
    if name == "temperature" and method == ANNEALED:
        return all((task.temperature or 0.0) <= OF_METHODS[name] for task in tasks)
    field = {"structured_outputs": "guided_decoding"}.get(name, name)
    if name in DERIVED:
        return any(is_set(task, field) for task in tasks)
    return any(getattr(task, field) == OF_METHODS[name] for task in tasks)


def test_responses_take_the_sampling_fields_that_chats_have(script: Served) -> None:
    calls = script.backend.worker.calls
    for name in ("seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias"):
        calls.clear()
        answer = script.send("/v1/responses", {"input": "?", name: OF_METHODS[name]})
        if answer.status == 200:
            assert is_honoured(name, "plain", [call.task for call in list(calls)]), name
        else:
            assert name in answer.error["message"]


@pytest.mark.parametrize("method", sorted(set(methods.names()) - set(methods.REWARDS)))
def test_no_method_drops_a_sampling_field_of_its_request(script: Served, method: str) -> None:
    calls = script.backend.worker.calls
    plain = ask(script, CHAT, method=method, max_tokens=200)
    for name in OF_METHODS:
        calls.clear()
        answer = ask(script, CHAT, method=method, **{"max_tokens": 200, name: OF_METHODS[name]})
        tasks = [call.task for call in list(calls)]
        if answer.status != 200:  # by the field's name, or because of what the method lacks here
            is_named = name in answer.error["message"]
            assert is_named or answer.error == plain.json.get("error"), (name, answer.text)
        else:
            assert is_honoured(name, method, tasks), (name, method)


GETS = (
    *("/health", "/version", "/metrics", "/openapi.json", "/v1/models", "/v1/models/scripted"),
    *("/v1/methods", "/v1/drafters", "/v1/sampling", "/v1/tools", "/v1/examples", "/v1/load"),
    *("/v1/responses/resp_1", "/api/tags", "/api/version"),
)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *[("GET", path) for path in GETS],
        *[("POST", path) for path in (*BODIES, "/v1/messages", "/v1/responses/resp_1/cancel")],
        ("DELETE", "/v1/responses/resp_1"),
    ],
)
def test_a_query_parameter_that_no_one_reads_is_refused_by_name(
    script: Served, method: str, path: str
) -> None:
    answer = script.send(f"{path}?limit=3&%C3%BC", BODIES.get(path), method=method)
    assert answer.status == 400
    error = answer.json["error"]
    if path.startswith("/api/"):
        assert error == "the query parameter limit is not supported"
    else:
        assert (error["param"], error["code"]) == ("limit", "unsupported_parameter")


def test_query_parameters_are_read_or_refused_as_fields_are(script: Served) -> None:
    created = script.send(RESPONSES, BODIES[RESPONSES]).json
    path = f"{RESPONSES}/{created['id']}"
    assert (
        script.send(f"{path}?stream=false&include_obfuscation=false", method="GET").json == created
    )
    assert script.send(f"{path}?stream=true&starting_after=0", method="GET").status == 200
    for query, param in {
        "include[]=message.output_text.logprobs": "include[]",
        "stream=perhaps": "stream",
        "stream=true&starting_after=-1": "starting_after",
        "starting_after=1": "starting_after",
        "stream=true&include_obfuscation=true": "include_obfuscation",
    }.items():
        refused = script.send(f"{path}?{query}", method="GET")
        assert (refused.status, refused.json["error"]["param"]) == (400, param)


def test_a_page_and_a_client_that_names_a_beta_are_answered_with_their_query(
    script: Served,
) -> None:
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": QUESTION}]}
    assert script.send("/v1/messages?beta=true", body).status == 200
    assert (
        script.send("/v1/messages/count_tokens?beta=true", {**body, "max_tokens": None}).status
        == 200
    )
    assert script.send("/?chat=1", method="GET").status == 200
