"""A small server of a reward model on this machine, with the endpoints of vLLM's pooling models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {"prompt_tokens": 9, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


class RewardServer:
    """Answers each path with what ``answers`` holds for it; others are not found.

    Attributes:
        requests: path and body of each POST.
        fail_with: status to refuse the next requests with.
    """

    def __init__(self, answers: dict[str, Any]) -> None:
        self.url = ""
        self.answers = answers
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.fail_with: list[int] = []

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer to a request."""
        self.requests.append((path, body))
        if self.fail_with:
            return self.fail_with.pop(0), {"error": {"message": "no"}}
        if path not in self.answers:
            return 404, {"detail": "Not Found"}
        data = self.answers[path]
        data = data(body) if callable(data) else data
        return 200, {"object": "list", "model": "rm", "data": [data], "usage": USAGE}


@contextmanager
def serving(answers: dict[str, Any]) -> Iterator[RewardServer]:
    """The server, running in threads of its own."""
    state = RewardServer(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, {"object": "list", "data": [{"id": "listed", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(*state.answer(self.path, body))

        def send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
