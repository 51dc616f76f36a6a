"""A stand-in for the server: the page's files, and its API answered from scripts.

Streams are lists of events. ``PAUSE`` holds a stream until the test releases it, so that a test
sees a run in its middle without waiting for time to pass. A recorded stream has the seconds between
its events, too. As on the server, a stream goes on without its client, and can be read again.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Self

from forethought.server.markdown import blocks

PAUSE = "pause"
Item = dict[str, Any] | str | float
"""An event of the run, ``answer`` or ``thought`` with a ``text`` for a piece of either, one of a
response, PAUSE, or seconds to wait.
"""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}

METHODS = [
    {
        "name": "plain",
        "title": "plain",
        "group": "Plain decoding",
        "paper": "",
        "summary": "One generation.",
        "parameters": [],
    },
    {
        "name": "dynasor",
        "title": "dynasor",
        "group": "Shorten the thought",
        "paper": "Fu et al., 2025",
        "summary": "Ends a chain of thought once probes agree.",
        "parameters": [
            {
                "name": "chunk_size",
                "default": 64,
                "description": "tokens between probes",
                "schema": {"type": "integer", "minimum": 1, "maximum": 131072},
            },
            {"name": "streaming", "default": False, "description": "stream the output"},
            {"name": "effort", "default": None, "description": "a name for both"},
        ],
    },
    {
        "name": "majority_vote",
        "title": "majority_vote",
        "group": "Draw samples and vote",
        "paper": "",
        "summary": "Samples vote.",
        "parameters": [
            {"name": "default_sample_num", "default": 8, "description": "samples"},
            {
                "name": "answer",
                "default": "auto",
                "schema": {"enum": ["auto", "boxed"], "type": "string"},
            },
        ],
    },
    {
        "name": "specreason",
        "title": "SpecReason",
        "group": "Shorten the thought",
        "available": False,
        "reason": "it needs a second, smaller model",
        "parameters": [],
    },
    {
        "name": "best_of_n",
        "title": "Best of n",
        "group": "Draw samples and take the best",
        "available": False,
        "reason": "it needs a reward model",
        "needs": ["reward_controller"],
        "parameters": [
            {
                "name": "reward_controller",
                "default": None,
                "required": True,
                "description": "Scores the samples.",
                "schema": {"type": ["string", "object"]},
            },
        ],
    },
]
JSON: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "reasoner", "object": "model"}]},
    "/v1/methods": {"data": METHODS},
    "/v1/drafters": {
        "data": [
            {"name": "ngram", "active": True, "reason": None},
            {"name": "eagle3", "active": False, "reason": "the server was started without it"},
            {"name": "none", "active": True, "reason": None},
        ]
    },
    "/v1/tools": {"data": []},
    "/v1/sampling": {
        "data": [
            {
                "name": "temperature",
                "default": 0.7,
                "description": "0 takes the most probable token.",
                "is_usual": True,
                "schema": {"type": "number", "minimum": 0.0, "maximum": 100.0},
            },
            {
                "name": "seed",
                "default": None,
                "description": "The same seed draws the same tokens.",
                "is_usual": True,
                "schema": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            {
                "name": "stop",
                "default": None,
                "is_usual": True,
                "schema": {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
                },
            },
            {
                "name": "dry_multiplier",
                "default": 0.0,
                "description": "DRY",
                "is_usual": False,
                "schema": {"type": "number", "minimum": 0.0},
            },
        ]
    },
    "/v1/examples": {
        "data": [{"title": "Nuts", "prompt": "Sam has 110 nuts.", "method": "dynasor"}],
    },
    "/v1/load": {
        "running": 1,
        "waiting": 0,
        "kv_cache_usage": 0.25,
        "prefix_cache_hit_rate": 0.5,
        "num_generated_tokens": 1000,
        "drafted": 200,
        "accepted": 120,
        "accepted_by_position": [50, 40, 30],
        "uptime": 60.0,
    },
}


def finished(text: str, *, at: float = 1.0, tokens: int = 10, **more: Any) -> dict[str, Any]:
    """The last event of a run."""
    usage = {
        "prompt_tokens": 20,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    speculation = {"steps": 0, "drafted": 0, "accepted": 0, "accepted_by_position": []}
    event = {"type": "finished", "at": at, "usage": usage, "speculation": speculation}
    return {**event, "seconds": at, "text": text, "finish_reason": "stop", **more}


def started(method: str = "plain", drafter: str = "none", reason: str = "") -> dict[str, Any]:
    """The first event of a run."""
    told = {"drafter": drafter, "reason": reason or None}
    return {"type": "started", "at": 0.0, "id": "r", "method": method, "speculation": told}


class Kept:
    """A response that is generated whether or not somebody reads it."""

    def __init__(self, number: int, items: list[Item], released: threading.Event) -> None:
        self.id, self.events = f"resp_{number}", list[dict[str, Any]]()
        self.is_over, self.is_deleted = threading.Event(), threading.Event()
        self._items, self._released = items, released
        self._add({"type": "response.created", "response": {"id": self.id}})
        threading.Thread(target=self._generate, daemon=True).start()

    def _add(self, event: dict[str, Any]) -> None:
        self.events.append({**event, "sequence_number": len(self.events)})

    def _generate(self) -> None:
        last: dict[str, Any] = {}
        for item in self._items:
            if isinstance(item, float):
                self.is_deleted.wait(item)
            elif isinstance(item, dict):
                self._add(_event_of(item))
                last = item if item["type"] == "finished" else last
            while item == PAUSE and not self._released.wait(0.02) and not self.is_deleted.is_set():
                pass
            if self.is_deleted.is_set():
                return
        if "response" not in self.events[-1]:
            self._add(_end(last))
        self.is_over.set()


def _event_of(item: dict[str, Any]) -> dict[str, Any]:
    """The event of a response."""
    if item["type"].startswith("response."):
        return item
    if item["type"] == "answer":
        return {"type": "response.output_text.delta", "delta": item["text"]}
    if item["type"] == "thought":
        return {"type": "response.reasoning_text.delta", "delta": item["text"]}
    if item["type"] == "error":
        return {"type": "response.failed", "response": {"error": {"message": item["message"]}}}
    return {"type": "forethought", "event": item}


def _end(last: dict[str, Any]) -> dict[str, Any]:
    """The last event of a response, whose run has ended with ``last``."""
    reason, usage = last.get("finish_reason"), last.get("usage")
    response: dict[str, Any] = {"status": "completed", "output": [], "incomplete_details": None}
    if reason == "length":
        response |= {
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
        }
    if usage:
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
        }
    return {"type": f"response.{response['status']}", "response": response}


class StandIn:
    """The server.

    Args:
        answer: the stream for a request's body; an exception is answered with status 400.
        catalog: the answers to other paths.
        port: 0: a free one.

    Attributes:
        requests: the bodies of all requests for an answer.
        called: those of calls of tools, which wait as paused streams do.
        rendered: the texts that were to be read as Markdown.
        released: set by the test to let paused streams go on.
        left: set when a response that goes on has been deleted.
        kept: the responses by their ids.
        cut: while it is set, connections that stream end.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], Iterable[Item]],
        catalog: Mapping[str, Any] = MappingProxyType(JSON),
        port: int = 0,
    ) -> None:
        self.answer, self.catalog = answer, catalog
        self.requests: list[dict[str, Any]] = []
        self.called: list[dict[str, Any]] = []
        self.rendered: list[str] = []
        self.released, self.left = threading.Event(), threading.Event()
        self.cut = threading.Event()
        self.kept: dict[str, Kept] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.server.daemon_threads = True
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path in stand_in.catalog:
                    values = stand_in.catalog[self.path]
                    self._send("application/json", json.dumps(values).encode())
                    return
                if self.path.startswith("/v1/responses/"):
                    name, _, query = self.path.removeprefix("/v1/responses/").partition("?")
                    if name in stand_in.kept:
                        after = int(query.rpartition("=")[2])
                        self._follow(stand_in.kept[name], after + 1)
                    else:
                        self.send_error(404)
                    return
                name = self.path.removeprefix("/") or "index.html"
                found = files("forethought.server") / "page" / name
                if "/" in name or not found.is_file():
                    self.send_error(404)
                    return
                kind = TYPES[name.rpartition(".")[2]]
                self._send(f"{kind}; charset=utf-8", found.read_bytes())

            def do_DELETE(self) -> None:
                kept = stand_in.kept.pop(self.path.removeprefix("/v1/responses/"), None)
                if kept is not None and not kept.is_over.is_set():
                    kept.is_deleted.set()
                    stand_in.left.set()
                self._send("application/json", b"{}", 200 if kept else 404)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/page/render":
                    stand_in.rendered.append(body["text"])
                    nodes, lines = blocks(body["text"])
                    self._send(
                        "application/json", json.dumps({"nodes": nodes, "lines": lines}).encode()
                    )
                    return
                if self.path == "/v1/messages/count_tokens":
                    told = [body.get("system", ""), *(m["content"] for m in body["messages"])]
                    count = {"input_tokens": sum(map(len, told))}
                    self._send("application/json", json.dumps(count).encode())
                    return
                if self.path == "/v1/tools/call":
                    stand_in.called.append(body)
                    result = {"result": "31", "is_error": False, "seconds": 0.25}
                    if body["name"] == "echo":
                        result["result"] = body["arguments"]
                    elif body["name"] != "add":
                        result = {"result": "Error: no tool", "is_error": True, "seconds": 0.1}
                    stand_in.released.wait(60)
                    self._send("application/json", json.dumps(result).encode())
                    return
                stand_in.requests.append(body)
                try:
                    items = list(stand_in.answer(body))
                except ValueError as error:
                    refusal = {"error": {"message": str(error), "type": "invalid_request_error"}}
                    self._send("application/json", json.dumps(refusal).encode(), 400)
                    return
                kept = Kept(len(stand_in.requests), items, stand_in.released)
                stand_in.kept[kept.id] = kept
                self._follow(kept, 0)

            def _follow(self, kept: Kept, number: int) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    while not kept.is_deleted.is_set():
                        is_over, events = kept.is_over.is_set(), kept.events[number:]
                        for event in events:
                            self._write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n")
                        number += len(events)
                        if is_over or stand_in.cut.is_set():
                            return
                        kept.is_over.wait(0.01)
                        self._write(": alive\n\n")  # fails once the client has left

            def _write(self, text: str) -> None:
                self.wfile.write(text.encode())
                self.wfile.flush()

            def _send(self, kind: str, data: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing: tests are quiet."""

        return Handler
