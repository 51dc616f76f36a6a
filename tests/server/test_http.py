"""Limits, keys and clients that misbehave."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from forethought.server.http import EventStream, LastEvents
from forethought.server.settings import Settings
from forethought.workers.scripted import Reply
from http_servers import WAIT, Served, eventually, scripted
from turns import by_turns

CHAT = "/v1/chat/completions"
BODY = "http.response.body"
SLOW = Reply("a" * 10_000, seconds_per_token=0.01)


def answers(prompt: str, index: int) -> str | Reply:
    return SLOW if prompt == "slow" else f"you said {prompt[:20]}"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with scripted(answers, Settings(max_body_bytes=10_000)) as running:
        yield running


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize(
    ("body", "path"),
    by_turns(
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'"text"',
            b"\xff\xfe",
            b'{"messages": [{"role": "user", "content": "\xff"}]}',
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            b'{"messages": NaN}',
            b"[" * 5000,
            b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
            b'{"seed": ' + b"9" * 400 + b', "messages": [{"role": "user", "content": "x"}]}',
        ],
        ["/tokenize", CHAT, "/v1/completions", "/v1/responses"],
    ),
)
def test_a_malformed_body_is_refused_and_the_server_lives(
    server: Served, body: bytes, path: str
) -> None:
    answer = server.send(path, body)
    assert 400 <= answer.status < 500, answer.text
    assert answer.error["message"]
    assert server.send("/health").status == 200


@pytest.mark.parametrize("name", ["text/plain", "", "application/x-www-form-urlencoded", "json"])
def test_a_body_that_is_not_called_json_is_refused(server: Served, name: str) -> None:
    """A page of another site may send such bodies without asking."""
    answer = server.send(CHAT, say("hello"), headers={"content-type": name})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_content_type")
    assert f"Content-Type is {name!r}" in answer.error["message"]


@pytest.mark.parametrize("name", ["application/json; charset=utf-8", "application/vnd.api+json"])
def test_a_body_may_be_called_any_kind_of_json(server: Served, name: str) -> None:
    assert server.send(CHAT, say("hello"), headers={"content-type": name}).status == 200


def test_requests_and_answers_have_ids_of_their_own(server: Served) -> None:
    answers = [server.send(CHAT, say("hello")) for _ in range(3)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    ids += [answer.json["id"].removeprefix("chatcmpl-") for answer in answers]
    assert len(set(ids)) == 6
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_a_large_body_is_refused(server: Served) -> None:
    answer = server.send(CHAT, say("x" * 20_000))
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_a_large_body_without_a_length_is_refused(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as opened:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        opened.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        opened.sendall(b"4000\r\n" + b"x" * 0x4000 + b"\r\n0\r\n\r\n")
        assert b" 413 " in opened.recv(4096)


def test_unknown_paths_and_methods_are_told(server: Served) -> None:
    assert server.send("/v1/nonsense").status == 404
    assert server.send(CHAT, method="GET").status == 405
    assert server.send("/style.css", b"{}", method="POST").status == 405
    for path in ("/completions", "/nothing", "/v1", "/a/b"):
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            assert server.send(path, b"{}", method=method).status == 404, (method, path)
    for path in ("/../pyproject.toml", "/%2e%2e/app.py", "/app.py", "/nothing.js"):
        answer = server.send(path)
        assert (answer.status, set(answer.json)) == (404, {"type", "error"})


def test_the_id_of_a_request_is_echoed_and_logged(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        answer = server.send("/version", headers={"X-Request-Id": "mine-7"})
        assert answer.headers["x-request-id"] == "mine-7"
        eventually(lambda: "mine-7" in caplog.text)
    other = server.send("/version", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]
    assert other != "a b\tc"


def test_a_forbidden_header_value_gets_an_id_of_our_own(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as opened:
        opened.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xe9\xff\r\n\r\n")
        answer = opened.recv(4096)
    assert b" 200 " in answer
    assert b"\xe9" not in answer


def test_other_origins_get_no_permission_unless_told() -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = "access-control-allow-origin"
    with scripted(answers) as running:
        answer = running.send(CHAT, method="OPTIONS", headers=preflight)
        assert allowed not in answer.headers
        assert allowed not in running.send("/version", headers=preflight).headers
    with scripted(answers, Settings(cors_origins=["https://a.example"])) as running:
        answer = running.send(CHAT, method="OPTIONS", headers=preflight)
        assert answer.headers[allowed] == "https://a.example"
        other = {**preflight, "Origin": "https://b.example"}
        assert allowed not in running.send(CHAT, method="OPTIONS", headers=other).headers


def test_with_keys_each_request_needs_one(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        scripted(answers, Settings(api_keys=["first-key", "second-key"])) as running,
    ):
        for shown in (None, "Bearer", "Bearer wrong", "Basic first-key", "Bearer first-ke"):
            headers = {} if shown is None else {"Authorization": shown}
            answer = running.send(CHAT, say("hello"), headers=headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert running.send("/metrics", headers=headers).status == 401
        for key in ("first-key", "second-key"):
            headers = {"Authorization": f"Bearer {key}"}
            assert running.send(CHAT, say("hello"), headers=headers).status == 200
        assert running.send("/health").status == 200
    assert "first-key" not in caplog.text
    assert "hello" not in caplog.text


def test_a_response_is_kept_for_its_tenant_alone() -> None:
    with scripted(answers, Settings(api_keys=["one", "two"])) as running:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        made = running.send("/v1/responses", {"input": "hello"}, headers=one).json["id"]
        path = f"/v1/responses/{made}"
        assert running.send(path, headers=one).status == 200
        assert running.send(path, headers=two).status == 404
        assert running.send(path, method="DELETE", headers=two).status == 404
        assert running.send(f"{path}/cancel", b"", method="POST", headers=two).status == 404
        assert running.send(f"{path}?stream=true", headers=two).status == 404
        item = running.send(path, headers=one).json["output"][0]["id"]
        refer = {
            "input": [{"type": "item_reference", "id": item}, {"role": "user", "content": "x"}]
        }
        assert running.send("/v1/responses", refer, headers=two).status == 404
        assert running.send("/v1/responses", refer, headers=one).status == 200
        follow = {"input": "more", "previous_response_id": made}
        assert running.send("/v1/responses", follow, headers=two).status == 404


# ---- the queue ----------------------------------------------------------------------------------


class Slow:
    """A client whose answer takes for ever, until it goes away."""

    def __init__(self, running: Served, *, stream: bool = True, waits: bool = True) -> None:
        body = json.dumps(say("slow", stream=stream)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._socket = socket.create_connection(("127.0.0.1", running.port), timeout=WAIT)
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if stream and waits:
            self._socket.recv(1)

    def leave(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_work(server: Served, stream: bool) -> None:
    before = len(server.backend.worker.calls)
    client = Slow(server, stream=stream)
    eventually(lambda: len(server.backend.worker.calls) > before)
    client.leave()
    eventually(lambda: server.backend.worker.calls[-1].ended == "cancelled")
    eventually(lambda: server.send("/v1/load").json["running"] == 0)


def test_a_client_that_goes_away_before_the_first_token_ends_its_work_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forethought.server.http.FIRST_SECONDS", 1e6)
    with scripted([Reply("late", delay=1e6)]) as running:
        calls = running.backend.worker.calls
        client = Slow(running, waits=False)
        eventually(lambda: calls)
        client.leave()
        eventually(lambda: calls[0].ended == "cancelled")
        eventually(lambda: running.send("/v1/load").json["running"] == 0)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_failure_after_the_status_line_is_an_event_of_the_stream(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forethought.server.http.FIRST_SECONDS", 0.01)
    late = Reply("", delay=0.1, error=ConnectionError("the machine is gone"))
    with scripted([late]) as server:
        body = {"prompt": "hello"} if path != CHAT else say("hello")
        answer = server.send(path, {**body, "stream": True})
    assert answer.status == 200
    (_, failure), (_, end) = answer.events
    assert (failure["error"]["code"], end) == ("upstream_error", "[DONE]")


def test_beyond_the_queue_requests_are_refused_for_a_while() -> None:
    with scripted(answers, Settings(max_running=1, max_waiting=1)) as running:
        first, second = Slow(running), Slow(running, stream=False)
        eventually(lambda: running.send("/v1/load").json["waiting"] == 1)
        answer = running.send(CHAT, say("hello"))
        assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
        assert 'requests_rejected_total{reason="queue_full"} 1.0' in running.send("/metrics").text
        first.leave()
        second.leave()
        eventually(lambda: running.send("/v1/load").json["running"] == 0)
        assert running.send(CHAT, say("hello")).status == 200


def test_a_deadline_ends_a_request() -> None:
    with scripted(answers, Settings(timeout=0.05)) as running:
        answer = running.send(CHAT, say("slow"))
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        calls = running.backend.worker.calls  # none, if the time was over before it began
        eventually(lambda: all(call.ended == "cancelled" for call in calls))


def brief(prompt: str, index: int) -> Reply:
    return SLOW if prompt == "slow" else Reply("ab", seconds_per_token=0.1)


def test_the_signal_to_end_lets_requests_finish_and_refuses_the_next() -> None:
    with scripted(brief) as running, ThreadPoolExecutor(1) as threads:
        slow, asked = Slow(running), threads.submit(running.send, CHAT, say("x"))
        eventually(lambda: len(running.backend.worker.calls) == 2)
        running.server.handle_exit(signal.SIGTERM, None)
        refused = running.send(CHAT, say("next"))
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert running.send("/health").status == 503
        answer = asked.result(WAIT)
        assert answer.json["choices"][0]["message"]["content"] == "ab"
        assert running.service.load()["requests_unfinished"] == 1
        slow.leave()
        running.thread.join(WAIT)
        assert not running.thread.is_alive()
    assert not running.server._captured_signals, "else the process would end by the signal"


def test_a_second_signal_ends_the_server_at_once() -> None:
    with scripted(brief) as running:
        slow = Slow(running)
        running.server.handle_exit(signal.SIGTERM, None)
        assert running.send("/health").status == 503
        running.server.handle_exit(signal.SIGTERM, None)
        running.thread.join(WAIT)
        assert not running.thread.is_alive()
        slow.leave()


def test_what_runs_when_the_time_to_finish_is_over_is_cancelled() -> None:
    with scripted(brief, Settings(drain_seconds=0.1), drain_seconds=0.1) as running:
        slow = Slow(running)
        running.server.handle_exit(signal.SIGTERM, None)
        running.thread.join(WAIT)
        assert not running.thread.is_alive()
        assert running.backend.worker.calls[0].ended == "cancelled"
        slow.leave()


@contextmanager
def process(port: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """``forethought serve`` on a script, and its port."""
    script = json.dumps({"*": "an answer"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.json"
        path.write_text(script)
        command = [sys.executable, "-m", "forethought", "serve", "--port", str(port)]
        command += ["--worker", "scripted", str(path)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
            try:
                assert running.stderr is not None
                told = next(line for line in running.stderr if "(the page)" in line)
                found = int(told.partition("127.0.0.1:")[2].partition(" ")[0])
                threading.Thread(target=running.stderr.read, daemon=True).start()
                yield running, found
            finally:
                running.kill()


def answer_of(port: int) -> int:
    """Status of a request to a server that has just announced itself."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)) as opened:
        body = json.dumps(say("x"))
        opened.request("POST", CHAT, body, {"content-type": "application/json"})
        return opened.getresponse().status


@pytest.mark.slow
def test_a_killed_server_starts_again_at_its_port_and_ends_well_when_told() -> None:
    with process(0) as (killed, port):
        assert answer_of(port) == 200
        killed.kill()
        killed.wait(WAIT)
    with process(port) as (running, again):
        assert (again, answer_of(again)) == (port, 200)
        running.terminate()
        assert running.wait(WAIT) == 0


# ---- what there is ------------------------------------------------------------------------------


def test_the_catalogue_of_methods_says_what_each_takes(server: Served) -> None:
    found = {each["name"]: each for each in server.send("/v1/methods").json["data"]}
    vote = found["majority_vote"]
    assert vote["available"]
    assert vote["paper"].startswith("Wang")
    samples = {each["name"]: each for each in vote["parameters"]}["default_sample_num"]
    assert samples["default"] == 8
    assert samples["description"]
    assert (samples["schema"]["type"], samples["schema"]["minimum"]) == ("integer", 1)
    assert not found["best_of_n"]["available"]
    assert "--reward-model" in found["best_of_n"]["reason"]
    assert found["best_of_n"]["needs"] == ["reward_controller"]
    assert (vote["needs"], vote["group"]) == ([], "Draw samples and vote")
    uses = ("no_thinking", "required"), ("dynasor", "adapts"), ("majority_vote", "unused")
    assert all(found[name]["thinking"] == use for name, use in uses)


def test_a_method_for_models_that_think_is_unavailable_on_others(server: Served) -> None:
    server.backend.thinks = False
    try:
        found = {each["name"]: each for each in server.send("/v1/methods").json["data"]}
    finally:
        server.backend.thinks = None
    for name in ("no_thinking", "budget_forcing"):
        assert not found[name]["available"]
        assert "models that think" in found[name]["reason"]
    assert found["dynasor"]["available"]


def test_models_are_listed_and_found_with_methods_in_front(server: Served) -> None:
    assert [each["id"] for each in server.send("/v1/models").json["data"]] == ["scripted"]
    assert server.client.models.retrieve("majority_vote@2-scripted").id
    assert server.send("/v1/models/nobody").status == 404


def test_a_model_may_be_served_under_several_names() -> None:
    with scripted(answers, Settings(served_model_names=["big", "org/big-model"])) as running:
        for name in ("big", "org/big-model", "majority_vote@2-org/big-model"):
            assert running.send(CHAT, say("hello", model=name)).status == 200
        assert running.send(CHAT, say("hello", model="scripted")).status == 404


def test_texts_become_tokens_and_back(server: Served) -> None:
    tokens = server.send("/tokenize", {"prompt": "héy", "return_token_strs": True}).json
    assert tokens["tokens"] == [104, 233, 121]
    assert (tokens["count"], tokens["token_strs"]) == (3, ["h", "é", "y"])
    assert server.send("/detokenize", {"tokens": [104, 233, 121]}).json == {"prompt": "héy"}
    assert server.send("/detokenize", {"tokens": [1 << 40]}).status == 400
    assert server.send("/tokenize", {}).status == 400
    messages = [{"role": "user", "content": "ab"}]
    assert server.send("/tokenize", {"messages": messages}).json["count"] == 2


def test_the_schema_of_the_api_can_be_read(server: Served) -> None:
    paths = server.send("/openapi.json").json["paths"]
    assert {CHAT, "/v1/completions", "/v1/responses", "/v1/models"} <= set(paths)


def test_the_schema_of_the_api_is_not_made_on_the_event_loop(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def openapi(app: FastAPI) -> dict[str, bool]:
        return {"on_loop": asyncio._get_running_loop() is not None}

    monkeypatch.setattr(FastAPI, "openapi", openapi)
    assert server.send("/openapi.json").json == {"on_loop": False}


def test_metrics_count_requests(server: Served) -> None:
    server.send(CHAT, say("hello"))
    text = server.send("/metrics").text
    assert 'forethought:request_success_total{finished_reason="stop"' in text
    assert "vllm:num_requests_running" in text


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_events_of_a_stream_end_the_body_of_its_response(fails: bool) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        if fails:
            raise ValueError("in the middle")
        yield LastEvents(b"data: 2\n\n")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(EventStream(events())({}, receive, send))
    assert [message["type"] for message in sent[:2]] == ["http.response.start", BODY]
    assert sent[1]["body"] == b"data: 1\n\n"
    assert [message["more_body"] for message in sent[1:]] == [True, False]
    last = sent[2]["body"]
    assert last.endswith(b"data: [DONE]\n\n") if fails else last == b"data: 2\n\n"


def test_a_method_that_would_begin_too_many_generations_is_refused_before_any_begins() -> None:
    with scripted(answers) as running:
        for spec in ("majority_vote@1024+" * 3)[:-1], "majority_vote@300+majority_vote@300":
            answer = running.send(CHAT, say("x", method=spec))
            assert (answer.status, answer.error["param"]) == (400, "method")
            assert "allows 65,536" in answer.error["message"]
        assert not running.backend.worker.calls
    with scripted(answers, Settings(max_generations=8)) as running:
        assert running.send(CHAT, say("x", method="majority_vote@8")).status == 200
        assert running.send(CHAT, say("x", method="majority_vote@8", n=2)).status == 400
