"""A small OpenAI-compatible server on this machine, for tests of what talks to one.

It answers from a script, or with the engine.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from forethought import SamplingParams
from forethought.outputs import TokenLogprobs

if TYPE_CHECKING:
    from forethought import AsyncLLM

Pieces = Callable[[dict[str, Any]], list[str]]


class OpenaiServer:
    """Answers completions and chats piece by piece, one token each.

    Attributes:
        requests: the bodies received, in order.
        authorizations: their ``Authorization`` headers.
        disconnected: how many clients went away before their answer was complete.
        says: gives the pieces of the answer to a request.
        seconds_per_piece: pause before each piece.
        tokens_per_chunk: pieces that are sent together.
        context: pieces after which an answer ends with ``length`` in any case.
        extra_choice: further fields of the last chunk's choice.
        breaks_off: every answer ends before its last chunk.
        fail_with: status to refuse the next requests with.
        location: where such an answer points to, if it is a redirection.
        error_code: of the errors with which it does; None: they have none.
        most_at_once: requests beyond that many at once are refused with 429; None: none are.
        num_refused: requests refused for that.
        most_seen: the largest number of requests answered at once.
        drops: connections are closed without an answer, as by a server that has died.
        cut_after: chunks after which the connection of a stream is cut; None: none is.
        cuts_within: half of the next chunk is still sent then.
        ends_by_closing: streams have no length, and end with their connection.
        goes_on: cleared, every request waits before its answer.
        health: status of ``GET /health``.
        models: names of the listed models, with the further ``model_fields``; None: no list.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.disconnected = 0
        self.says: Pieces = lambda body: ["Hello", " world"]
        self.seconds_per_piece = 0.0
        self.tokens_per_chunk = 1
        self.context = 10**9
        self.extra_choice: dict[str, Any] = {}
        self.tool_call: dict[str, Any] | None = None
        self.breaks_off = False
        self.fail_with: list[int] = []
        self.location = ""
        self.error_code: str | None = None
        self.url = ""
        self.most_at_once: int | None = None
        self.num_refused = self.most_seen = self._num_open = 0
        self.drops, self.health = False, 200
        self.models: list[str] | None = ["m"]
        self.model_fields: dict[str, Any] = {}
        self.cut_after: int | None = None
        self.cuts_within = self.ends_by_closing = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Whether one more request is taken; ``end`` gives its place back."""
        with self._lock:
            if self.most_at_once is not None and self._num_open >= self.most_at_once:
                self.num_refused += 1
                return False
            self._num_open += 1
            self.most_seen = max(self.most_seen, self._num_open)
            return True

    def end(self) -> None:
        """A request that was taken is over."""
        with self._lock:
            self._num_open -= 1

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """The chunks of an answer; None now and then while there is none."""
        chat = path.endswith("/chat/completions")
        base = self.base(chat, body)
        count = 0
        for number in range(body.get("n") or 1):
            pieces = self.says(body)
            limit = min(body.get("max_tokens") or len(pieces), self.context)
            said, size = pieces[:limit], self.tokens_per_chunk
            for place in range(0, len(said), size):
                time.sleep(self.seconds_per_piece)
                together = said[place : place + size]
                count += len(together)
                yield {**base, "choices": [self.choice(chat, number, "".join(together), body)]}
            if self.breaks_off:
                return
            last = self.choice(chat, number, "", {}) | self.extra_choice
            last["finish_reason"] = "length" if limit < len(pieces) else "stop"
            if self.tool_call is not None:
                yield from ({**base, "choices": [c]} for c in self.calling(number))
                last["finish_reason"] = "tool_calls"
            yield {**base, "choices": [last]}
        usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        yield {**base, "choices": [], "usage": usage}

    def base(self, chat: bool, body: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chat else "text_completion"
        name = f"request-{len(self.requests)}"
        return {"id": name, "object": kind, "created": 1, "model": body["model"]}

    def choice(self, chat: bool, number: int, text: str, body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number, "finish_reason": None, "logprobs": None}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if body.get("logprobs") is not None:
            top = [{"token": text, "logprob": -0.5}, {"token": "other", "logprob": -1.5}]
            choice["logprobs"] = (
                {"content": [{**top[0], "bytes": None, "top_logprobs": top}]}
                if chat
                else {
                    "tokens": [text],
                    "token_logprobs": [-0.5],
                    "top_logprobs": [{text: -0.5, "other": -1.5}],
                    "text_offset": [0],
                }
            )
        return choice

    def calling(self, number: int) -> Iterator[dict[str, Any]]:
        call = self.tool_call or {}
        for arguments in call["arguments"]:
            name = call["name"] if arguments == call["arguments"][0] else None
            function = {"name": name, "arguments": arguments}
            piece = {"index": 0, "id": "call-1" if name else None, "function": function}
            yield {"index": number, "finish_reason": None, "delta": {"tool_calls": [piece]}}


class EngineServer(OpenaiServer):
    """Answers completions with the engine, all requests alike, first come first served.

    A chunk holds what has come since the last one, so now and then several tokens.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        super().__init__()
        self.llm = llm

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        names = ("max_tokens", "temperature", "top_p", "seed", "stop", "logprobs")
        fields = {name: body[name] for name in names if name in body}
        if "logit_bias" in body:
            fields["logit_bias"] = {int(key): bias for key, bias in body["logit_bias"].items()}
        stream = self.llm.stream(body["prompt"], SamplingParams(**fields))
        base, told, loop = self.base(False, body), 0, asyncio.new_event_loop()
        num_told = 0
        try:
            while True:
                waiting = loop.create_task(anext(stream, None))
                while not loop.run_until_complete(asyncio.wait([waiting], timeout=0.02))[0]:
                    yield None
                output = waiting.result()
                if output is None:
                    break
                first = output.outputs[0]
                choice = self.choice(False, 0, first.text[told:], {})
                choice["finish_reason"] = first.finish_reason and first.finish_reason.value
                is_stop_string = isinstance(first.stop_reason, str)
                choice["stop_reason"] = first.stop_reason if is_stop_string else None
                if first.logprobs is not None:
                    choice["logprobs"] = completion_logprobs(first.logprobs[num_told:])
                told, num_told = len(first.text), len(first.token_ids)
                yield {**base, "choices": [choice]}
                usage = {
                    "prompt_tokens": len(output.prompt_token_ids),
                    "completion_tokens": len(first.token_ids),
                    "total_tokens": len(output.prompt_token_ids) + len(first.token_ids),
                }
            yield {**base, "choices": [], "usage": usage}
        finally:
            waiting.cancel()
            loop.run_until_complete(asyncio.wait([waiting]))
            loop.run_until_complete(stream.aclose())
            loop.close()


def completion_logprobs(tokens: list[TokenLogprobs]) -> dict[str, Any]:
    """Log-probabilities as a completion has them, with ids in the place of the tokens' texts."""
    chosen = [next(iter(entries)) for entries in tokens]
    return {
        "tokens": [f"token_id:{token}" for token in chosen],
        "token_logprobs": [e[token].logprob for e, token in zip(tokens, chosen, strict=True)],
        "top_logprobs": [
            {f"token_id:{token}": entry.logprob for token, entry in entries.items() if entry.rank}
            for entries in tokens
        ],
        "text_offset": [0 for _ in tokens],
    }


@contextmanager
def serving(state: OpenaiServer | None = None) -> Iterator[OpenaiServer]:
    """The server, running in threads of its own."""
    state = state or OpenaiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as by real servers
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if state.drops:
                self.close_connection = True
                return None
            if self.path == "/health":
                return self.whole(state.health, {})
            if state.models is None:
                return self.whole(404, {"error": {"message": "no"}})
            models = [{"id": name, **state.model_fields} for name in state.models]
            return self.whole(200, {"object": "list", "data": models})

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            data = self.rfile.read(length)
            if len(data) < length:  # the client went away while it was asking
                self.close_connection = True
                return None
            body = json.loads(data)
            if state.drops:
                self.close_connection = True
                return None
            state.requests.append(body)
            state.authorizations.append(self.headers["Authorization"])
            state.goes_on.wait()
            if state.fail_with:
                error = {"message": "no", "code": state.error_code}
                return self.whole(state.fail_with.pop(0), {"error": error})
            if not state.begin():
                return self.whole(429, {"error": {"message": "too many at once"}})
            chunks = state.chunks(self.path, body)
            try:
                if body.get("stream"):
                    return self.stream(chunks)
                return self.whole(200, merged(chunks))
            finally:
                state.end()

        def stream(self, chunks: Iterator[dict[str, Any]]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            if state.ends_by_closing:
                self.close_connection = True
            else:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                with closing(chunks):
                    for number, chunk in enumerate(chunks):
                        data = f"data: {json.dumps(chunk)}\n\n".encode()
                        if number == state.cut_after:
                            if state.cuts_within:
                                self.send(data[: len(data) // 2])
                            raise ConnectionError
                        if chunk is not None:
                            self.send(data)
                        elif self.is_left():
                            raise ConnectionError
                self.send(b"data: [DONE]\n\n")
                if not state.ends_by_closing:
                    self.send(b"")
            except OSError:
                state.disconnected += 1
                self.close_connection = True

        def is_left(self) -> bool:
            """Whether the client has closed the connection."""
            readable = select.select([self.connection], [], [], 0)[0]
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

        def send(self, data: bytes) -> None:
            frame = data if state.ends_by_closing else b"%x\r\n%s\r\n" % (len(data), data)
            self.wfile.write(frame)
            self.wfile.flush()

        def whole(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if 300 <= status < 400:
                self.send_header("Location", state.location)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        state.goes_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def merged(chunks: Iterator[dict[str, Any] | None]) -> dict[str, Any]:
    """The chunks of an answer as one."""
    found = [chunk for chunk in chunks if chunk is not None]
    choices = [choice for chunk in found for choice in chunk["choices"]]
    if "delta" in choices[-1]:
        message = {"content": "".join(choice["delta"]["content"] for choice in choices)}
        return {**found[-1], "choices": [{**choices[-1], "message": message}]}
    text = "".join(choice["text"] for choice in choices)
    return {**found[-1], "choices": [{**choices[-1], "text": text}]}
