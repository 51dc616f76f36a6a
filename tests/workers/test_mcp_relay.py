"""Messages of a local MCP server, which have a limit."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from forethought.workers import mcp_relay
from forethought.workers.mcp_relay import Unanswerable, bounded

LIMIT = 1000


def lines(*messages: bytes) -> list[bytes]:
    return [*bounded(io.BytesIO(b"".join(message + b"\n" for message in messages)), LIMIT)]


def test_messages_within_the_limit_pass_as_they_are() -> None:
    longest = b"x" * LIMIT
    assert lines(b"{}", b"\xff", longest) == [b"{}\n", b"\xff\n", longest + b"\n"]
    assert [*bounded(io.BytesIO(b"no end"), LIMIT)] == [b"no end"]


@pytest.mark.parametrize("size", [LIMIT, 200_000])
@pytest.mark.parametrize(
    ("message", "call"),
    [
        ('{"jsonrpc":"2.0","id":5,"result":{"text":"%s"}}', 5),
        ('{"jsonrpc": "2.0", "id": "a-1", "result": {"text": "%s"}}', "a-1"),
        ('{"result":{"id":7,"text":"%s"},"jsonrpc":"2.0","id":5}', 5),
        ('{"result":{"text":"%s"},"id":5,"jsonrpc":"2.0"}', 5),
    ],
)
def test_a_longer_message_becomes_an_error_of_the_call_that_it_answers(
    message: str, call: int | str, size: int
) -> None:
    answer, after = lines((message % ("x" * size)).encode(), b"{}")
    found = json.loads(answer)
    assert (found["id"], found["error"]["code"]) == (call, -32603)
    assert "larger than 1,000 bytes" in found["error"]["message"]
    assert after == b"{}\n"


@pytest.mark.parametrize(
    "message",
    [
        '{"jsonrpc":"2.0","method":"notifications/message","params":{"id":5,"data":"%s"}}',
        '{"jsonrpc":"2.0","method":"ping","params":{"data":"%s","id":5}}',
        "%s",
    ],
)
def test_a_longer_message_that_answers_no_call_ends_the_server(message: str) -> None:
    with pytest.raises(Unanswerable, match="larger than"):
        lines((message % ("x" * 2 * LIMIT)).encode())


def test_the_relay_ends_with_its_command_and_has_its_status() -> None:
    script = "import sys; print(sys.stdin.read().upper(), flush=True); sys.exit(7)"
    command = [sys.executable, "-I", mcp_relay.__file__, "100", sys.executable, "-c", script]
    done = subprocess.run(command, input="said", capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("SAID\n", 7)
    endless = "import time; print('x' * 200, flush=True); time.sleep(1000)"
    done = subprocess.run([*command[:-1], endless], capture_output=True, text=True, check=False)
    assert "larger than 100 bytes" in done.stderr
    assert done.stdout == ""
