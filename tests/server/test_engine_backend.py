"""The server on the embedded reasoner: what only an engine can show."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest

from forethought.assets import REASONER, embedded_dir, problems
from forethought.config.drafters import NGramDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.llm.async_llm import AsyncLLM
from forethought.llm.tokenizer import Tokenizer
from forethought.scaffolding.base_task import RewardTask, TaskStatus
from forethought.scaffolding.worker import Worker
from forethought.server.app import create_app
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.backends.remote_backend import RemoteBackend
from forethought.server.settings import Settings
from forethought.workers.upstream import UpstreamWorker
from http_servers import WAIT, Served, eventually, served

if TYPE_CHECKING:
    from forethought.workers.reward import RewardWorker

QUESTION = problems()[0]["question"]
CHAT = "/v1/chat/completions"
KEYS = {name: {"Authorization": f"Bearer {name}"} for name in ("one", "two")}


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    fields: Any = {"speculative_config": NGramDecodingConfig(max_draft_len=3)}
    llm = AsyncLLM(**fields, kv_cache_config={"max_tokens": 8192})
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Served]:
    examples = [{"title": "one", "prompt": QUESTION, "method": "plain"}]
    with served(EngineBackend(llm, "reasoner", examples=examples)) as running:
        yield running


@pytest.fixture(autouse=True)
def _pages_are_given_back(llm: AsyncLLM) -> Iterator[None]:
    yield
    engine = llm._frontend.engine
    eventually(lambda: not engine.has_work and not engine.pool.in_use)
    llm._thread.call(engine.check_integrity).result()


def ask(text: str = QUESTION, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def test_a_stream_is_the_text_of_the_whole_answer(server: Served) -> None:
    whole = server.send(CHAT, ask(max_tokens=40)).json
    events = server.send(CHAT, ask(max_tokens=40, stream=True, events=True)).events
    deltas = [
        data["choices"][0]["delta"]
        for name, data in events
        if name == "message" and data != "[DONE]" and data["choices"]
    ]
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 40
    told = [data for name, data in events if name == "forethought"]
    assert sum(each["num_tokens"] for each in told if each["type"] == "delta") == 40
    assert told[0]["speculation"]["drafter"] == "ngram"
    assert told[-1]["speculation"]["steps"] > 0


def test_a_deadline_ends_a_stream_behind_its_first_token_too(llm: AsyncLLM) -> None:
    goes_on, most = threading.Event(), llm.stats.decoded + 2
    settings = Settings(timeout=1.0, stream_interval=0.0)
    with served(EngineBackend(llm, "reasoner"), settings) as running:
        llm.set_step_barrier(lambda: llm.stats.decoded > most and goes_on.wait(WAIT))
        try:
            answer = running.send(CHAT, ask(max_tokens=400, ignore_eos=True, stream=True))
        finally:
            goes_on.set()
            llm.set_step_barrier(None)
    if answer.status == 200:  # else the machine is too slow for a token in the time
        assert answer.events[0][1]["choices"][0]["delta"]["role"] == "assistant"
        failure = answer.events[-2][1]
        assert failure["error"]["code"] == "timeout"
    else:
        assert (answer.status, answer.error["code"]) == (504, "timeout")


def test_a_prompt_is_scored(server: Served) -> None:
    ids = server.send("/tokenize", {"prompt": QUESTION}).json["tokens"]
    body = {"prompt": QUESTION, "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = server.send("/v1/completions", body).json["choices"][0]
    assert choice["text"] == QUESTION
    scores = choice["logprobs"]
    assert len(scores["tokens"]) == len(ids)
    assert "".join(scores["tokens"]) == QUESTION
    assert scores["token_logprobs"][0] is None
    assert all(value <= 0 and math.isfinite(value) for value in scores["token_logprobs"][1:])
    first_place = QUESTION.index(scores["tokens"][3], scores["text_offset"][3])
    assert scores["text_offset"][3] == first_place
    one_more = server.send("/v1/completions", {**body, "max_tokens": 1}).json["choices"][0]
    assert len(one_more["logprobs"]["tokens"]) == len(ids) + 1


def test_a_seed_draws_the_same_again_and_each_choice_its_own(server: Served) -> None:
    body = ask(max_tokens=24, temperature=1.0, seed=7, n=3)
    texts = [
        [choice["message"]["reasoning"] for choice in server.send(CHAT, body).json["choices"]]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_a_thought_counts_the_tokens_that_were_generated_before_its_end(
    server: Served, llm: AsyncLLM
) -> None:
    """Its text, which has lost the space around the markers, has others; cut off, it has no end."""
    details = server.send(CHAT, ask(max_tokens=400)).json["usage"]
    params = SamplingParams(temperature=0, max_tokens=400)
    output = asyncio.run(llm.generate(llm.chat_prompt(ask()["messages"]), params))
    generated = output.outputs[0].token_ids
    [end] = llm.encode("</think>", special=False)
    counted = details["completion_tokens_details"]["reasoning_tokens"]
    assert counted == list(generated).index(end) > 0
    for length in range(2, 12):
        usage = server.send(CHAT, ask(max_tokens=length)).json["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == length


def test_a_thinking_budget_closes_the_thought(server: Served) -> None:
    for name in ("thinking_budget", "thinking_token_budget", "reasoning_budget"):
        answer = server.send(CHAT, ask(max_tokens=20, **{name: 4})).json
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == 4
        assert answer["choices"][0]["message"]["content"]
    none = server.send(CHAT, ask(max_tokens=16, reasoning_effort="none")).json
    assert "reasoning" not in none["choices"][0]["message"]


def test_a_schema_shapes_the_content_behind_the_thought(server: Served) -> None:
    pytest.importorskip("llguidance")
    shape = {
        "type": "json_schema",
        "json_schema": {
            "name": "result",
            "schema": {
                "type": "object",
                "properties": {"result": {"type": "boolean"}},
                "required": ["result"],
                "additionalProperties": False,
                "x-guidance": {"whitespace_flexible": False},  # it may write blanks for ever
            },
        },
    }
    body = ask(max_tokens=60, response_format=shape, reasoning_budget=0)
    content = server.send(CHAT, body).json["choices"][0]["message"]["content"]
    assert set(json.loads(content)) == {"result"}


def test_a_forced_call_is_one_by_grammar(server: Served) -> None:
    pytest.importorskip("llguidance")
    parameters = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "decide", "parameters": parameters}}]
    body = ask(max_tokens=100, tools=tools, tool_choice="required", reasoning_budget=0)
    choice = server.send(CHAT, body).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]["function"]
    assert call["name"] == "decide"
    assert set(json.loads(call["arguments"])) == {"yes"}
    assert server.send(CHAT, ask(tools=tools, max_tokens=20)).status == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"method_params": {"nonsense": 1}}, "method_params.nonsense"),
        ({"speculation": "nonsense"}, "speculation"),
    ],
)
def test_what_an_engine_cannot_honour_is_named(
    server: Served, change: dict[str, Any], param: str
) -> None:
    answer = server.send(CHAT, ask(**change))
    assert (answer.status, answer.error["param"]) == (400, param)


def test_drafts_can_be_chosen_and_switched_off(server: Served) -> None:
    assert [each["name"] for each in server.send("/v1/drafters").json["data"]] == ["ngram", "none"]
    for given, drafts in (
        ({"drafter": "ngram"}, True),
        ("none", False),
        ({"enabled": False}, False),
    ):
        answer = server.send(CHAT, ask(max_tokens=60, speculation=given)).json
        assert (answer["usage"]["completion_tokens_details"]["drafted_tokens"] > 0) == drafts
    assert server.send(CHAT, ask(speculation="nobody")).status == 400


def test_a_method_streams_its_answer_as_it_becomes_certain(server: Served) -> None:
    body = ask(max_tokens=48, method="dynasor", method_params={"chunk_size": 16})
    whole = server.send(CHAT, body).json["choices"][0]["message"]
    events = server.send(CHAT, {**body, "stream": True}).events
    deltas = [data["choices"][0]["delta"] for _, data in events if data != "[DONE]"]
    assert len([delta for delta in deltas if delta.get("reasoning")]) > 1
    for name in ("reasoning", "content"):
        text = "".join(delta.get(name) or "" for delta in deltas)
        assert text == (whole.get(name) or "")


@pytest.mark.parametrize("method", ["plain", "majority_vote@2"])
def test_tenants_share_no_cached_prefix(llm: AsyncLLM, method: str) -> None:
    question = f"{problems()[3]['question']} {method}"

    def cached(running: Served, tenant: str, **fields: Any) -> int:
        body = ask(question, max_tokens=2, method=method, **fields)
        answer = running.send(CHAT, body, headers=KEYS[tenant]).json
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    with served(EngineBackend(llm, "reasoner"), Settings(api_keys=[*KEYS])) as running:
        first, again = cached(running, "one"), cached(running, "one")
        assert again > first
        assert cached(running, "two") == first
        assert cached(running, "one", cache_salt="mine") == first
        assert cached(running, "two") == again


def test_a_prompt_that_is_too_long_is_refused_with_its_code(server: Served) -> None:
    answer = server.send(CHAT, ask("nuts " * 2000))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_a_client_that_leaves_gives_back_its_pages(server: Served, llm: AsyncLLM) -> None:
    for fields in ({}, {"method": "majority_vote@4"}):
        before = llm.stats.steps
        body = ask(ignore_eos=True, max_tokens=900, **fields)
        stream: Any = server.client.chat.completions.create(
            model="reasoner",
            messages=body.pop("messages"),
            stream=True,
            extra_body={**body, "events": True},
        )
        with stream:
            eventually(lambda before=before: llm.stats.steps > before)
        eventually(lambda: server.send("/v1/load").json["requests_unfinished"] == 0)


def test_the_health_check_fails_once_the_engine_has_died() -> None:
    def broken() -> Any:
        raise ZeroDivisionError

    with served(EngineBackend(AsyncLLM(kv_cache_config={"max_tokens": 512}), "reasoner")) as server:
        assert server.send("/health").json == {"status": "ok"}
        server.backend._engine._frontend.engine.step = broken
        assert server.send(CHAT, ask(max_tokens=4)).status == 503
        health = server.send("/health")
        assert (health.status, health.json) == (503, {"status": "stopped"})


def test_plain_requests_and_methods_share_the_places_of_running_requests(llm: AsyncLLM) -> None:
    """One is held by a stream that has not ended; what comes then waits for its end."""
    frontend = llm._frontend
    with served(EngineBackend(llm, "reasoner"), Settings(max_running=1)) as server:
        long = ask(max_tokens=900, stream=True, extra_body={"ignore_eos": True})
        with server.client.chat.completions.create(model="reasoner", **long) as first:
            next(iter(first))
            with ThreadPoolExecutor() as pool:
                others = [
                    pool.submit(server.send, CHAT, ask(max_tokens=4, method=method))
                    for method in (None, "majority_vote@2", None)
                ]
                eventually(lambda: len(server.service.llm._waiting) == 3)
                sequences = llm._thread.call(lambda: len(list(frontend.engine.scheduler))).result()
                assert sequences <= 1
                first.close()
                answers = [each.result() for each in others]
        assert [answer.status for answer in answers] == [200, 200, 200]
        waited = server.send("/metrics").text
    assert 'forethought:request_queue_time_seconds_count{method="none"' in waited


def test_load_and_examples_are_told(server: Served) -> None:
    load = server.send("/v1/load").json
    assert load["num_generated_tokens"] > 0
    assert 0 <= load["kv_cache_usage"] <= 1
    assert load["running"] == load["waiting"] == 0
    assert server.send("/v1/examples").json["data"][0]["prompt"] == QUESTION
    assert "forethought:num_requests_running" in server.send("/metrics").text


# ---- methods ------------------------------------------------------------------------------------


def catalogue(server: Served) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in server.send("/v1/methods").json["data"]}


def test_methods_that_cannot_run_here_are_said_to_be_unavailable(server: Served) -> None:
    found = catalogue(server)
    assert "context of 4096" in found["archon"]["reason"]
    assert not {"spct", "genrm", "checker"} & found.keys()  # they answer nothing by themselves
    refused = server.send(CHAT, ask(method="spct"))
    assert (refused.status, "reward_controller" in refused.error["message"]) == (400, True)


def test_a_method_that_puts_texts_together_answers_a_chat(server: Served) -> None:
    body = ask(method="hogwild_turns", method_params={"max_turns": 1}, max_tokens=8)
    answer = server.send(CHAT, body)
    assert answer.status == 200, answer.text
    assert answer.json["usage"]["completion_tokens"] > 8


def failures(server: Served) -> dict[str, str]:
    """By method that is said to be available: what it fails with."""
    failed = {}
    for name in available(server):
        limit: dict[str, Any] = {"max_tokens": 12}
        if name == "budget_vote":  # it has limits of its own
            limit = {"method_params": {"total_tokens": 512, "answer_tokens": 16}}
        answer = server.send(CHAT, ask("2 + 3 = ?", temperature=0.7, method=name, **limit))
        if answer.status != 200:
            failed[name] = answer.text
    return failed


def test_every_method_that_is_said_to_be_available_answers(server: Served) -> None:
    assert {"dynasor", "hogwild_turns"} <= available(server)
    assert failures(server) == {}


class Lengths(Worker):
    """A reward model that likes long answers."""

    by_step = False
    scores_are_logits = False

    async def score(self, task: RewardTask) -> TaskStatus:
        task.score = float(len(task.output_str or ""))
        return TaskStatus.SUCCESS

    task_handlers = {RewardTask: score}  # noqa: RUF012


@pytest.mark.parametrize("inner", [None, {"method": "spct", "num_critiques": 1}])
def test_beside_a_reward_model_the_model_itself_can_be_the_judge(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, inner: Any
) -> None:
    backend = EngineBackend(llm, "reasoner", judge=cast("RewardWorker", Lengths()))
    monkeypatch.setattr(llm, "shutdown", lambda: None)  # it belongs to the module
    settings: dict[str, Any] = {"default_sample_num": 2}
    if inner is not None:
        shape = {"regex": r"Scores: \[[1-9], [1-9]\]"}
        params = {"max_tokens": 64, "guided_decoding": shape}
        settings |= {"reward_controller": {**inner, "sampling_params": params}}
    with served(backend) as running:
        body = ask("1 + 1 = ?", method="best_of_n", method_params=settings, max_tokens=8)
        answer = running.send(CHAT, {**body, "temperature": 0.7})
    assert answer.status == 200, answer.text


def settings_that_are_needed(server: Served, name: str) -> list[str]:
    parameters = catalogue(server)[name]["parameters"]
    return [each["name"] for each in parameters if each["required"]]


def test_a_reward_model_of_the_server_is_no_setting_that_a_request_has_to_give(
    server: Served, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings_that_are_needed(server, "best_of_n") == ["reward_controller"]
    backend = EngineBackend(llm, "reasoner", judge=cast("RewardWorker", Lengths()))
    monkeypatch.setattr(llm, "shutdown", lambda: None)  # it belongs to the module
    with served(backend) as running:
        assert settings_that_are_needed(running, "best_of_n") == []
        assert settings_that_are_needed(running, "repeated_sampling") == ["verifier"]
        policy = {"num_probes": 2, "edges": [0.0], "methods": ["probes", "majority_vote@2"]}
        settings = {"policy": policy}  # fitted on how probes agree: no reward belongs to it
        body = ask(method="compute_optimal", method_params=settings, temperature=1, max_tokens=8)
        assert "choices" in running.send(CHAT, body).json


@pytest.mark.parametrize("method", ["hogwild", "hogwild_turns"])
def test_workers_that_read_each_other_stream_as_events_and_the_text_is_the_answer(
    server: Served, method: str
) -> None:
    settings = {"max_turns": 2, "turn_tokens": 8}
    body = ask(method=method, method_params=settings, max_tokens=8, stream=True, events=True)
    events = server.send(CHAT, body).events
    told = [data for name, data in events if name == "forethought"]
    written = {(each.get("fields") or {}).get("name") for each in told if each["type"] == "delta"}
    assert written == {"Alice", "Bob", None}
    chunks = [data for name, data in events if name == "message" and data != "[DONE]"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    text = "".join(delta.get("reasoning", "") + delta.get("content", "") for delta in deltas)
    whole = server.send(CHAT, {**body, "stream": False, "events": False}).json
    message = whole["choices"][0]["message"]
    assert text == (message.get("reasoning") or "") + (message.get("content") or "") != ""


def available(server: Served) -> set[str]:
    return {name for name, each in catalogue(server).items() if each["available"]}


# ---- in front of it -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_front(server: Served) -> Iterator[Served]:
    """Another server in front of this one, with the tokenizer of its model."""
    tokenizer = Tokenizer.load(embedded_dir(REASONER))
    backend = RemoteBackend(
        UpstreamWorker([server.url], "reasoner"), "reasoner", tokenizer=tokenizer
    )
    with served(backend) as running:
        yield running
    backend.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "plain"},
        {"method": "budget_forcing"},
        {"method": "budget_forcing", "stop": ["ZZZ"]},
        {"method": "beam_search", "temperature": 0.7, "seed": 1, "max_tokens": 300},
        {"method": "mcts", "temperature": 0.7, "seed": 1, "max_tokens": 300},
    ],
)
def test_with_a_tokenizer_a_server_in_front_gives_the_same_answer(
    server: Served, in_front: Served, fields: dict[str, Any]
) -> None:
    body = ask(**{"max_tokens": 120, **fields})
    own, other = (each.send(CHAT, body).json for each in (server, in_front))
    assert other["choices"] == own["choices"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_choice_tells_which_stop_string_ended_it(server: Served, path: str) -> None:
    asked = {"prompt": QUESTION, "temperature": 0} if path != CHAT else ask()
    body = {**asked, "max_tokens": 90, "ignore_eos": True}
    text = whole_text(server.send(path, body).json["choices"][0])
    stop = [text[30:34], "never said"]
    for fields, expected in ({"stop": stop}, stop[0]), ({"max_tokens": 3}, None):
        whole = server.send(path, {**body, **fields}).json["choices"][0]
        assert whole["stop_reason"] == expected
        events = server.send(path, {**body, **fields, "stream": True}).events
        last = [data for _, data in events if data != "[DONE]" and data["choices"]][-1]
        assert last["choices"][0]["stop_reason"] == expected


def whole_text(choice: dict[str, Any]) -> str:
    message = choice.get("message") or {"content": choice["text"]}
    return (message.get("reasoning") or "") + (message["content"] or "")


def test_a_method_that_puts_texts_together_continues_a_text(server: Served) -> None:
    body = {"prompt": QUESTION, "method": "sleep_time", "temperature": 0, "max_tokens": 20}
    settings = {"context": "Sam has 110 nuts.", "num_thoughts": 1}
    answer = server.send("/v1/completions", {**body, "method_params": settings})
    assert answer.json["choices"][0]["text"], answer.json


def test_with_a_tokenizer_dynasor_answers_in_front_of_a_server(
    server: Served, in_front: Served
) -> None:
    """Where it stops, what probes cost and which of them agree depends on how fast they are
    answered; on a busy machine the model may close its thinking first."""
    body = ask(method="dynasor", max_tokens=2000)
    answers = [each.send(CHAT, body).json["choices"][0] for each in (server, in_front)]
    assert [each["finish_reason"] for each in answers] == ["stop", "stop"]
    assert all("boxed{" in each["message"]["content"] for each in answers)


def test_with_a_tokenizer_a_server_in_front_counts_as_the_one_behind(
    server: Served, in_front: Served
) -> None:
    own, other = (each.send(CHAT, ask(max_tokens=9)).json["usage"] for each in (server, in_front))
    assert other["prompt_tokens"] == own["prompt_tokens"]
    assert other["completion_tokens"] == own["completion_tokens"] == 9
    assert in_front.backend.max_length == server.backend.max_length
    given = {"messages": ask()["messages"]}
    assert in_front.send("/tokenize", given).json == server.send("/tokenize", given).json


def test_with_a_tokenizer_methods_continue_their_text_on_another_server(
    server: Served, in_front: Served
) -> None:
    in_front.send(CHAT, ask(max_tokens=1))  # then it knows the length of the context
    assert available(in_front) == available(server) - {"hogwild"}
    assert failures(in_front) == {}


def test_without_a_tokenizer_what_is_said_to_be_available_answers_in_chats(server: Served) -> None:
    backend = RemoteBackend(UpstreamWorker([server.url], "reasoner"), "reasoner")
    with served(backend) as in_front:
        assert "majority_vote" in available(in_front)
        assert failures(in_front) == {}
    backend.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, ask(max_tokens=4)), ("/v1/completions", {"prompt": QUESTION, "max_tokens": 4})],
)
def test_the_last_text_of_a_stream_comes_with_its_end_in_one_message(
    llm: AsyncLLM, path: str, body: dict[str, Any]
) -> None:
    app = create_app(EngineBackend(llm, "reasoner"), Settings(stream_interval=1.0))
    content = json.dumps({**body, "stream": True}).encode()
    sent: list[bytes] = []

    async def receive() -> Any:
        if received:
            await asyncio.Event().wait()
        received.append(True)
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def main() -> None:
        async with app.router.lifespan_context(app):
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
            await app({**scope, "app": app, "query_string": b""}, receive, send)

    received: list[bool] = []
    asyncio.run(main())
    *_, last = sent
    assert b'"finish_reason":null' in last
    assert b'"finish_reason":"length"' in last
    assert last.endswith(b"data: [DONE]\n\n")


DEEP = "[" * 50_000
REFUSED: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 1 << 63},
    "messages.0.tool_calls.0.function.arguments": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": DEEP}}
                ],
            }
        ]
    },
    "a type of a schema that is a number": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
        "tool_choice": "required",
    },
    "a grammar with more items than its limit": {
        "structured_outputs": {"grammar": 'start: "a"{1000000000}'}
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_cannot_do_is_a_mistake_of_the_request(name: str, server: Served) -> None:
    answer = server.send(CHAT, ask() | REFUSED[name])
    assert answer.status == 400, answer.text
    if " " not in name:
        assert answer.error["param"] == name


def test_an_answer_goes_on_with_the_last_message(server: Served) -> None:
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "<think>\nSo"},
    ]
    last = {"messages": messages, "continue_final_message": True}
    prompt = server.send("/apply-template", last).json["prompt"]
    assert prompt.endswith("<think>\nSo")
    tokens = server.send("/tokenize", last).json["tokens"]
    assert server.send("/detokenize", {"tokens": tokens}).json["prompt"] == prompt
    chat = server.send(CHAT, {**last, "temperature": 0, "max_tokens": 8}).json
    body = {"prompt": tokens, "temperature": 0, "max_tokens": 8, "skip_special_tokens": False}
    plain = server.send("/v1/completions", body).json
    thought = chat["choices"][0]["message"]["reasoning"]
    assert thought == plain["choices"][0]["text"].strip()
    again = {"input": messages, "continue_final_message": True, "temperature": 0}
    response = server.send("/v1/responses", {**again, "max_output_tokens": 8}).json
    assert response["output"][0]["content"][0]["text"] == thought
    nothing = {"messages": messages[:1], "add_generation_prompt": False}
    shorter = server.send("/apply-template", nothing).json["prompt"]
    whole = server.send("/apply-template", {"messages": messages[:1]}).json["prompt"]
    assert whole.startswith(shorter)
    assert len(whole) > len(shorter)
    both = {**last, "add_generation_prompt": True}
    assert "exclude each other" in server.send(CHAT, both).error["message"]


def test_preempted_sequences_count_no_more_cached_tokens_than_the_prompt_has() -> None:
    llm = AsyncLLM(dtype="float32", kv_cache_config={"max_tokens": 128})
    body = {"prompt": "Three and four are", "n": 6, "max_tokens": 60, "ignore_eos": True}
    with served(EngineBackend(llm, "reasoner")) as running:
        usage = running.send("/v1/completions", body).json["usage"]
        lines = running.send("/metrics", method="GET").text.splitlines()
    assert llm.stats.preemptions > 0
    assert llm.stats.cached > usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    (counted,) = [
        line for line in lines if line.startswith("forethought:prompt_tokens_cached_total")
    ]
    assert float(counted.split()[-1]) == usage["prompt_tokens"]
    llm._thread.call(llm._frontend.local_engine.check_integrity).result()
    llm.shutdown()
