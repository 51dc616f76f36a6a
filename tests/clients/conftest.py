"""The servers that clients are pointed at, each a process of its own.

``make test-clients`` runs this folder in an environment of its own; ``FORETHOUGHT_PYTHON`` is the
interpreter that has forethought.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = {
    "*": "Hello there. This is an answer.",
    "What is the value of magic_function(3)? Use the tool.": {
        "tool_calls": [{"name": "magic_function", "arguments": {"input": 3}}]
    },
    "What is 2 + 3?": {
        "text": "<think>I add them.</think>",
        "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}],
    },
    "5": "It is 5.",
    "And 10 more?": {"tool_calls": [{"name": "add", "arguments": {"a": 5, "b": 10}}]},
    "15": "It is 15.",
    "Thanks": "You are welcome.",
    "What is the value of magic_function_no_args()? Use the tool.": {
        "tool_calls": [{"name": "magic_function_no_args", "arguments": {}}]
    },
}
"""What the scripted server answers."""


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """The base URL of a server, without ``/v1``; it must end by itself when it is told to."""
    python = os.environ.get("FORETHOUGHT_PYTHON", "python3")
    command = [python, "-m", "forethought", "serve", *options, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    drain = None
    try:
        assert server.stderr is not None
        for line in server.stderr:
            log.append(line)
            if found := re.search(r"(http://\S+) \(the page\)", line):
                break
        else:
            pytest.exit("the server did not start:\n" + "".join(log), 1)
        # Its log goes on, and must not fill the pipe.
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        yield found.group(1)
    finally:
        server.terminate()
        status = server.wait(timeout=60)
        if drain is not None:
            drain.wait(timeout=60)
    assert status == 0, f"the server ended with status {status}"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A server of the embedded reasoner."""
    with serving("--max-running", "16") as url:
        yield url


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that answers from a script."""
    path: Path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps(SCRIPT))
    with serving("--worker", "scripted", str(path)) as url:
        yield url


@pytest.fixture(scope="session")
def model() -> str:
    """The name of the embedded model."""
    return "reasoner"
