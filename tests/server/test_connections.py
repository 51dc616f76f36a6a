"""Names, slow and vanishing connections, ends, and metrics that clients would make."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forethought.cli import serve
from forethought.server.settings import Settings
from forethought.workers.scripted import Reply
from http_servers import WAIT, Served, eventually, scripted

CHAT = "/v1/chat/completions"
SLOW = Reply("a" * 10_000, seconds_per_token=0.01)


def answers(prompt: str, index: int) -> str | Reply:
    return SLOW if prompt == "slow" else "an answer"


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with scripted(answers, Settings(receive_seconds=0.2)) as running:
        yield running


def connected(running: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=WAIT)


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


# ---- names --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def named() -> Iterator[Served]:
    settings = Settings(allowed_hosts=["127.0.0.1", "api.example.com", "*.proxy.example"])
    with scripted(answers, settings) as running:
        yield running


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LocalHost:80", 200),
        ("me.localhost:1", 200),
        ("[::1]:8000", 200),
        ("127.1.2.3", 200),
        ("api.example.com", 200),
        ("a.b.proxy.example:443", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("proxy.example", 421),
        ("evilproxy.example", 421),
        ("localhost:80@evil.example", 421),
        ("127.0.0.1, evil.example", 421),
        ("", 421),
    ],
)
def test_a_request_to_another_name_is_refused(named: Served, host: str, status: int) -> None:
    for path in ("/health", "/v1/models", "/", "/metrics"):
        answer = named.send(path, headers={"Host": host})
        assert answer.status == status, answer.text
    if status == 421:
        assert answer.error["code"] == "host_not_allowed"
        assert "--allowed-host" in answer.error["message"]


def test_a_request_with_two_names_or_none_is_refused() -> None:
    with scripted(answers, Settings(allowed_hosts=["localhost"])) as running:
        for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
            with connected(running) as client:
                client.sendall(b"GET /v1/models HTTP/1.0\r\n" + hosts + b"\r\n")
                status = rest_of(client).split()[1]
                assert status in (b"421", b"400")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["127.0.0.1"]),
        (["--host", "localhost"], ["localhost"]),
        (["--host", "::1"], ["::1"]),
        (["--host", "0.0.0.0"], []),
        (["--allowed-host", "a.example", "--allowed-host", "b"], ["a.example", "b"]),
        (["--host", "0.0.0.0", "--allowed-host", "a.example"], ["a.example"]),
    ],
)
def test_names_are_checked_where_the_server_is_for_this_machine_alone(
    given: list[str], expected: list[str]
) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    serve.configure(parser)
    assert list(serve.settings_of(parser.parse_args(given)).allowed_hosts) == expected


# ---- slow clients -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begun", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b\r\n"]
)
def test_a_client_whose_headers_do_not_come_is_left(server: Served, begun: bytes) -> None:
    with connected(server) as client:
        client.sendall(begun)
        assert rest_of(client) == b""


def test_a_client_whose_second_request_does_not_come_is_left(server: Served) -> None:
    with connected(server) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in client.recv(1 << 16)
        client.sendall(b"GET /version HTTP/1.1\r\nHost:")
        assert rest_of(client) == b""


def test_a_client_whose_headers_have_no_end_is_left() -> None:
    with scripted(answers) as running, connected(running) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n")
            for number in range(2000):
                client.sendall(b"X-%d: " % number + b"x" * 1000 + b"\r\n")
            assert rest_of(client) == b""
        assert running.send("/version").status == 200


def test_a_client_whose_body_does_not_come_is_told(server: Served) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with connected(server) as client:
        client.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        answer = rest_of(client)
    assert b" 408 " in answer
    assert b"did not come within 0.2 seconds" in answer


def test_an_answer_may_take_longer_than_a_request() -> None:
    late = Reply("late", delay=1.0)
    with scripted([late], Settings(receive_seconds=0.05)) as running:
        assert running.send(CHAT, say("x")).status == 200


def test_clients_that_vanish_leave_nothing() -> None:
    with scripted(answers) as running:
        body = json.dumps(say("slow", stream=True, method="majority_vote@16")).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for sent in (0, 20, len(body)):
            for _ in range(5):
                with connected(running) as client:
                    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:sent]
                    client.sendall(whole)
        eventually(lambda: running.send("/v1/load").json["requests_unfinished"] == 0)
        eventually(lambda: len(running.service.calls) <= 1)


def test_an_upgrade_to_a_websocket_is_an_ordinary_request(server: Served) -> None:
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    assert server.send("/version", headers=upgrade).status == 200
    assert server.send("/v1/realtime", headers=upgrade).status == 404
    assert server.send("/health").status == 200


@pytest.mark.parametrize("size", [1, 100_000], ids=["byte by byte", "at once"])
def test_a_body_is_read_where_a_client_offers_another_protocol(size: int) -> None:
    body = json.dumps(say("a")).encode()
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    first = f"{head}{offer}Content-Length: {len(body)}\r\n\r\n".encode() + body
    last = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with scripted(answers) as server, connected(server) as connection:
        sent = first + last
        for start in range(0, len(sent), size):
            connection.sendall(sent[start : start + size])
        answer = rest_of(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"an answer") == 2, answer


# ---- the end ------------------------------------------------------------------------------------


def end(running: Served) -> None:
    running.server.handle_exit(signal.SIGTERM, None)
    running.thread.join(WAIT)
    assert not running.thread.is_alive()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_a_stream_that_the_end_of_the_server_cuts_ends_with_an_error(path: str) -> None:
    bodies = {CHAT: say("slow"), "/v1/completions": {"prompt": "slow"}}
    body = {**bodies.get(path, {"input": "slow"}), "stream": True}
    with (
        scripted(answers, Settings(drain_seconds=0.1), drain_seconds=0.1) as running,
        ThreadPoolExecutor(1) as threads,
    ):
        asked = threads.submit(running.send, path, body)
        eventually(lambda: running.backend.worker.calls)
        eventually(lambda: running.service.metrics.render().count(b"_first_token_seconds_count"))
        end(running)
        answer = asked.result(WAIT)
    *_, (_, failure), (_, last) = answer.events
    assert (failure["error"]["code"], last) == ("draining", "[DONE]")
    assert running.backend.worker.calls[0].ended == "cancelled"


def test_an_answer_cut_by_a_closing_server_is_a_server_error() -> None:
    with (
        scripted(answers, Settings(drain_seconds=0.1), drain_seconds=0.1) as running,
        ThreadPoolExecutor(1) as threads,
    ):
        asked = threads.submit(running.send, CHAT, say("slow"))
        eventually(lambda: running.backend.worker.calls)
        end(running)
        answer = asked.result(WAIT)
    assert (answer.status, answer.error["code"]) == (503, "draining")
    assert "retry-after" in answer.headers


# ---- metrics ------------------------------------------------------------------------------------


def test_clients_make_no_series_of_metrics() -> None:
    def series(running: Served) -> int:
        lines = running.send("/metrics").text.splitlines()
        return len([line for line in lines if line.startswith("forethought")])

    with scripted(answers) as running:
        for method in ("majority_vote@2", "plain"):
            assert running.send(CHAT, say("x", method=method)).status == 200
        running.send(CHAT, say("x", method="self_refine+majority_vote@2"))
        before = series(running)
        for number in range(30):
            name = f"majority_vote@{number + 2}"
            running.send(CHAT, say("x", method=name))
            running.send(CHAT, say("x", model=f"{name}-scripted"))
            running.send(CHAT, say("x", model=f"model-{number}"))
            running.send(CHAT, say("x", method=f"method_{number}"))
            running.send(f"/path/{number}")
            running.send("/health", headers={"X-Request-Id": f"id-{number}", "User-Agent": "x"})
        assert series(running) == before


def test_bodies_that_would_take_too_much_memory_together_are_refused() -> None:
    body = json.dumps(say("x" * 9_000)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    unfinished = f"{head}Content-Length: {len(body) + 1}\r\n\r\n".encode() + body
    with scripted(answers, Settings(max_body_bytes=10_000, max_running=1)) as running:
        clients = [connected(running) for _ in range(8)]
        for client in clients:
            client.sendall(unfinished)
        eventually(lambda: running.service.body_bytes._num_free < 10_000)
        answer = running.send(CHAT, say("y" * 9_000))
        assert (answer.status, answer.error["code"]) == (429, "overloaded")
        for client in clients:
            client.close()
        eventually(lambda: running.send(CHAT, say("y" * 9_000)).status == 200)
