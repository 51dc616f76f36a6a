"""An OpenAI-compatible server on this machine that answers from a function, for ``check_method``.

Completions and chats, streamed; each character is a token, and comes in a chunk of its own. Where a
completion asks for log-probabilities, they are those of ``sample_logprobs``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from forethought.outputs import TokenLogprobs
from forethought.scaffolding.sampling import derived_seed
from forethought.testing.samples import Respond, sample_logprobs


class AnswerServer:
    """The function ``respond``, which gives the text after a prompt by the request's seed, and the
    requests in progress. It listens at ``url``.
    """

    def __init__(self, respond: Respond) -> None:
        self._respond, self._lock = respond, threading.Lock()
        self.url, self._num_open = "", 0

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return self._num_open

    def count(self, change: int) -> None:
        """A request begins (1) or ends (-1)."""
        with self._lock:
            self._num_open += change

    def chunks(self, is_chat: bool, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of an answer."""
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        base = {"id": "answer", "created": 1, "model": body["model"]}
        base["object"] = "chat.completion.chunk" if is_chat else "text_completion"
        num_tokens, seed = 0, body.get("seed") or 0
        for number in range(body.get("n") or 1):
            own_seed = derived_seed(seed, -number) if number else seed
            text, reason, stop = _cut(self._respond(prompt, own_seed), body)
            scored = body.get("logprobs") is not None and not is_chat
            scores = sample_logprobs(text) if scored else [None] * len(text)
            for token, entries in zip(text, scores, strict=True):
                num_tokens += 1
                choice = _choice(is_chat, number, token)
                choice["logprobs"] = None if entries is None else _completion_logprobs(entries)
                yield {**base, "choices": [choice]}
            last = _choice(is_chat, number, "") | {"finish_reason": reason, "stop_reason": stop}
            yield {**base, "choices": [last]}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        usage["total_tokens"] = len(prompt) + num_tokens
        yield {**base, "choices": [], "usage": usage}


@contextmanager
def answering(respond: Respond) -> Iterator[AnswerServer]:
    """The server, running in threads of its own."""
    state = AnswerServer(respond)

    class Handler(_Handler):
        answers = state

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128

        def handle_error(self, *_: Any) -> None:
            """A client that has left is no error."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    answers: AnswerServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answers.count(1)
        try:
            chunks = self.answers.chunks(self.path.endswith("/chat/completions"), body)
            self._stream(chunks)
        except OSError:
            self.close_connection = True
        finally:
            self.answers.count(-1)

    def _stream(self, chunks: Iterator[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self._send(f"data: {json.dumps(chunk)}\n\n".encode())
        self._send(b"data: [DONE]\n\n")
        self._send(b"")

    def _send(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _cut(text: str, body: dict[str, Any]) -> tuple[str, str, str | None]:
    """The text up to its first stop string and ``max_tokens``, why it ends, and at which string."""
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    match = min(((text.find(stop), stop) for stop in stops if stop in text), default=None)
    answer = text if match is None else text[: match[0]]
    limit = body.get("max_tokens")
    if limit is not None and len(answer) > limit:
        return answer[:limit], "length", None
    return answer, "stop", None if match is None else match[1]


def _completion_logprobs(entries: TokenLogprobs) -> dict[str, Any]:
    """The log-probabilities of one token as completions give them; the chosen one comes first."""
    by_token = {entry.token or "": entry.logprob for entry in entries.values()}
    chosen = next(iter(by_token))
    return {"tokens": [chosen], "token_logprobs": [by_token[chosen]], "top_logprobs": [by_token]}


def _choice(is_chat: bool, number: int, text: str) -> dict[str, Any]:
    content = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"index": number, "finish_reason": None, "logprobs": None, **content}
