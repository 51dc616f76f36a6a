"""``forethought serve`` in a process of its own, for what looks at its page."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[str]:
    """The address of a server of its own process."""
    command = [sys.executable, "-m", "forethought", "serve", "--port", "0", *arguments]
    source = str(Path(__file__).parents[2] / "src")
    with log.open("w") as written:
        server = subprocess.Popen(
            command, stderr=written, stdout=written, env={**os.environ, "PYTHONPATH": source}
        )
    try:
        yield address(server, log)
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where a server listens, once it answers."""
    end = time.monotonic() + 240
    while time.monotonic() < end and server.poll() is None:
        told = log.read_text().partition(": http://")[2].split(" ", 1)
        if len(told) > 1:
            found = f"http://{told[0]}/"
            with urllib.request.urlopen(found + "health", timeout=60):
                return found
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-2000:]}")
