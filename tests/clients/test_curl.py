"""``curl``: what a shell sees, and bodies that no client library would send."""

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}


def curl(url, data=None, *options):
    """Status and body."""
    command = ["curl", "-sS", "-w", "\n%{http_code}", url, *options]
    if data is not None:
        command += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    done = subprocess.run(command, input=data or b"", capture_output=True, timeout=60, check=True)
    body, _, status = done.stdout.rpartition(b"\n")
    return int(status), body


def chat(scripted, body, *options):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return curl(f"{scripted}/v1/chat/completions", data, *options)


def test_a_chat_is_answered(scripted):
    status, body = chat(scripted, BODY)
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"]


def test_a_stream_ends_with_done(scripted):
    status, body = chat(scripted, {**BODY, "stream": True}, "-N")
    assert status == 200
    lines = [line for line in body.decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b'{"model": "scripted", "messages": "\xff\xfe"}', 400),
        (b'{"model": "scripted", "messages": []}', 400),
        (b'{"model": 3, "messages": [{"role": "user", "content": "x"}]}', 400),
        (b"[" * 100_000, 400),
        (json.dumps({**BODY, "n": 10**9}).encode(), 400),
        (json.dumps({**BODY, "temperature": "hot"}).encode(), 400),
        (b" " * (9 * 2**20), 413),
    ],
)
def test_bad_bodies_are_refused_in_the_usual_shape(scripted, data, expected):
    status, body = chat(scripted, data)
    assert status == expected
    assert json.loads(body)["error"]["message"]


def test_health_metrics_and_version(scripted):
    assert curl(f"{scripted}/health")[0] == 200
    assert json.loads(curl(f"{scripted}/version")[1])["version"]
    status, text = curl(f"{scripted}/metrics")
    assert status == 200
    assert b"vllm:num_requests_running" in text
