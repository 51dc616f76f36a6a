"""No request imports, opens, compiles, starts or connects to anything, whatever it names."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from audit import Prevented, audited
from forethought import methods
from forethought.errors import UsageError
from forethought.llm.async_llm import AsyncLLM
from forethought.methods import Method, MethodTable
from forethought.scaffolding.controller import NativeGenerationController
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.composition import check_generations, compose
from forethought.server.method_settings import SettingsSchema, schema_of
from forethought.server.names import Composition, read_method
from forethought.server.protocol.chat_request import ChatRequest
from http_servers import scripted, served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
POLICY = {"num_probes": 1, "edges": [], "methods": ["plain"]}
NEEDED: dict[str, Any] = {
    "checker": "countdown",
    "context": "a text",
    "documents": ["a document"],
    "policy": POLICY,
    "reward_controller": "judge",
    "verifier": "countdown",
}
"""Values of settings without a default, so that the others come to their constructor."""
SEED = 20


def texts(folder: Path) -> list[str]:
    """What might be taken for the name of something."""
    fifo = folder / "fifo"
    if not fifo.exists():
        os.mkfifo(fifo)
    return [
        *("os:system", "subprocess:Popen", "builtins:eval", "builtins:open", "colorsys:hls_to_rgb"),
        *("colorsys", "colorsys.hls_to_rgb", "dynasor+os:system", "os:system@2", "plain&os:system"),
        *("/etc/passwd", "../../etc/passwd", "/dev/zero", "file:///etc/passwd", "~root", "-"),
        *(str(fifo), str(folder), str(folder / "policy.json"), "C:\\config.yaml", "a\0b"),
        *("http://127.0.0.1:9/x.json", "//127.0.0.1/share", "unix:///run/x.sock", "data:,1"),
        *("$(id)", "`id`", "; id", "__import__('os').system('id')", "!!python/name:os.system"),
        *(
            "{x.__class__.__init__.__globals__}",
            "{0}",
            "%s%n",
            "{{ self }}",
            "\ud800",
            "",
            "a" * 9999,
        ),
        *("judge", "plain", "majority_vote@8", "countdown", "math", "threadweaver"),
    ]


def shapes(text: str) -> Iterator[Any]:
    """A text at every kind of place, up to as deep as a body may be nested."""
    yield text
    yield [text]
    yield {text: text}
    yield {"method": text}
    yield {"method": text, "command": text, "path": text}
    yield {"method": "judge", "prompt": text, "sampling_params": {"stop": [text], "seed": text}}
    yield {"method": "best_of_n", "reward_controller": {"method": text, "command": text}}
    yield {"method": "compute_optimal", "policy": text}
    yield {"method": "compute_optimal", "policy": {**POLICY, "methods": [text]}}
    yield {**POLICY, "methods": [text, [text]], text: text}
    yield {**POLICY, "methods": [text]}
    yield {text: {"command": text}}
    yield {"plain": {"sampling_params": {text: text}}, "dynasor": {"generation_dir": text}}
    yield {"layers": [[{"type": text, "model": text}]]}
    yield {"layers": [[{"type": "generator", "model": text, "samples": text}]], "name": text}
    yield [[text, text], {"question": text, "answer": text, "steps": [[text, text]]}]
    deep: Any = text
    for level in range(50):
        deep = {"method": deep} if level % 2 else [deep]
    yield deep


def settings(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Methods and hostile settings: each method, each setting, each text, at many depths."""
    draw, named = random.Random(SEED), texts(folder)
    for name in methods.shipped().names():
        parameters = methods.describe(name).parameters
        needed = {key: NEEDED[key] for key in parameters if key in NEEDED}
        required = {key for key, default in parameters.items() if default is Method.REQUIRED}
        base = {key: value for key, value in needed.items() if key in required}
        for key in [*parameters, "command", "path"]:
            values = [*named, *(each for t in draw.sample(named, 4) for each in shapes(t))]
            for value in values:
                own = {**base, key: value}
                if name in methods.REWARDS:
                    yield "best_of_n", {"reward_controller": {"method": name, **own}}
                else:
                    yield name, own
    for text in named:
        for value in shapes(text):
            yield "compute_optimal", {"policy": POLICY, "settings": {"plain": value, text: value}}
            yield "compute_optimal", {"policy": POLICY, "settings": {text: {"command": text}}}
            yield text, {}


def as_body(method: str, own: dict[str, Any]) -> bytes:
    messages = [{"role": "user", "content": "Use 3 and 4 to make 7."}]
    return json.dumps({"messages": messages, "method": method, "method_params": own}).encode()


def compose_as_the_server_does(body: bytes, table: MethodTable) -> None:
    request = ChatRequest.model_validate(json.loads(body))
    composition = Composition() if request.method is None else read_method(request.method, table)
    controller = compose(
        composition,
        request.method_params or {},
        innermost=NativeGenerationController,
        reward=None,
        streaming=True,
        num_choices=1,
        pipeline=(lambda text: text, lambda text: text),
    )
    check_generations(controller, 1 << 16)


def recorded(function: Any, arguments: list[Any]) -> Any:
    def call(argument: Any, *args: Any, **kwargs: Any) -> Any:
        arguments.append(argument)
        return function(argument, *args, **kwargs)

    return call


def test_no_setting_of_a_request_reaches_anything_beyond_its_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema_of(methods.shipped())
    bodies = [as_body(*case) for case in settings(tmp_path)]
    looked_at, num_made, me = list[Any](), 0, threading.get_ident()
    for module, name in ((os, "stat"), (importlib, "import_module")):  # they raise no events
        monkeypatch.setattr(module, name, recorded(getattr(module, name), looked_at))
    with audited(lambda thread: thread == me) as events:
        for body in bodies:
            try:
                compose_as_the_server_does(body, methods.shipped())
                num_made += 1
            except (UsageError, ValidationError):
                pass
    monkeypatch.undo()
    assert not events, events[:10]
    assert not looked_at, looked_at[:10]
    assert len(bodies) > 10_000
    assert num_made > 1_000, "most of them were refused before they came to a constructor"


def test_names_that_resolve_as_in_python_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SettingsSchema, "check", lambda *args: None)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "somebodys_module.py").write_text("class Reward: pass")
    me, seen = threading.get_ident(), set[str]()
    for case in [
        ("best_of_n", {"reward_controller": {"method": "os:system", "command": "true"}}),
        ("best_of_n", {"reward_controller": "somebodys_module:Reward"}),
        ("archon", {"pipeline": "/etc/passwd"}),
    ]:
        with (
            audited(lambda thread: thread == me) as events,
            contextlib.suppress(UsageError, TypeError, Prevented),
        ):
            compose_as_the_server_does(as_body(*case), methods.open_table())
        seen |= {event.partition(" ")[0] for event in events}
    assert seen >= {"exec", "open"}
    assert "os.system" not in seen, "what is no controller is called"


HOSTILE_FIELDS: list[dict[str, Any]] = [
    {"model": "os:system"},
    {"model": "os:system-scripted"},
    {"model": "/etc/passwd"},
    {"method": "os:system|plain&builtins:eval"},
    {"speculation": "os:system"},
    {"speculation": {"drafter": "builtins:eval"}},
    {"structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}},
    {"structured_outputs": {"json": '{"$ref": "http://127.0.0.1:9/x"}'}},
    {"structured_outputs": {"grammar": '%import "/etc/passwd"\nstart: "a"'}},
    {"chat_template_kwargs": {"chat_template": "{{ ''.__class__ }}"}},
    {"chat_template_kwargs": {"cache_dir": "/etc", "conversations": "/etc/passwd"}},
    {"tools": [{"type": "function", "function": {"name": "os:system"}}], "tool_choice": "required"},
    {"tools": [{"type": "mcp", "server_url": "http://127.0.0.1:9"}]},
    {"prediction": {"type": "content", "content": "file:///etc/passwd"}},
    {"cache_salt": "../../etc/passwd", "user": "os:system", "metadata": {"x": "/etc/passwd"}},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///x"}]}]},
    {"messages": [{"role": "os:system", "content": "/etc/passwd"}]},
]


def test_no_request_to_the_server_reaches_anything_beyond_it(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    say = {"messages": [{"role": "user", "content": "Use 3 and 4 to make 7."}]}
    cases = [as_body(*case) for case in draw.sample(list(settings(tmp_path)), 400)]
    drawn = [json.loads(body) for body in cases[:60]]
    others = [{key: each[key] for key in ("method", "method_params")} for each in drawn]
    cases += [json.dumps({**say, **fields}).encode() for fields in HOSTILE_FIELDS]
    cases += [b'{"messages":' + b"[" * 100_000, b"\xff\xfe", b'{"method": "\\ud800"}']
    me = threading.get_ident()
    with scripted(lambda prompt, index: f"It is \\boxed{{{index % 3}}}.") as server:
        with audited(lambda thread: thread != me) as events:
            answers = [server.send(CHAT, body) for body in cases]
            answers += [server.send(COMPLETIONS, {**body, "prompt": "x"}) for body in others]
            answers += [server.send(RESPONSES, {**body, "input": "x"}) for body in others]
            for path in (
                "/../../etc/passwd",
                "/%2e%2e/etc/passwd",
                "/os:system",
                "/v1/models/os:x",
            ):
                answers.append(server.send(path))
                answers.append(server.send("/v1/responses" + path))
        statuses = [answer.status for answer in answers]
    assert not events, events[:10]
    assert not [answer.text for answer in answers if answer.status >= 500]
    assert statuses.count(200) > 20


ENGINE_FIELDS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"logprobs": True},
    {"method": "majority_vote@2", "temperature": 1.0},
    {"method": "beam_search", "method_params": {"reward_controller": "spct", "max_steps": 1}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[a-z]+"}},
    {"structured_outputs": {"json": {"$ref": "/etc/passwd"}}},
    {"structured_outputs": {"json": {"$id": "file:///etc/", "$ref": "passwd"}}},
    {"structured_outputs": {"grammar": "%import common.INT\nstart: INT"}},
    {"structured_outputs": {"grammar": 'start: %json {"$ref": "file:///etc/passwd"}'}},
    {"speculation": {"drafter": "ngram"}},
    *({"chat_template_kwargs": {name: "/etc/passwd"}} for name in ("messages", "conversations")),
    *({"chat_template_kwargs": {name: "/etc/passwd"}} for name in ("tools", "documents", "x")),
    *({"chat_template_kwargs": {name: "/etc/passwd"}} for name in ("tokenizer_file", "bos_token")),
    *({"chat_template_kwargs": {name: True}} for name in ("return_tensors", "self", "processor")),
]


def test_no_request_to_the_engine_reaches_anything_beyond_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = list[list[str]]()  # of grammars, in a process: the same program whatever is asked

    def tried(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        trials.append(command)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    say = {"messages": [{"role": "user", "content": "2 + 2 = ?"}], "max_tokens": 4}
    cases = [{**say, **fields} for fields in [*ENGINE_FIELDS, *HOSTILE_FIELDS]]
    fields: Any = {"kv_cache_config": {"max_tokens": 4096}}
    llm, me = AsyncLLM(**fields), threading.get_ident()
    monkeypatch.setattr(subprocess, "run", tried)
    with (
        closing(EngineBackend(llm, "reasoner")) as backend,
        served(backend) as server,
        audited(lambda thread: thread != me) as events,
    ):
        answers = [(case, server.send(CHAT, case)) for case in cases]
    assert not events, events[:10]
    assert len({*map(tuple, trials)}) == 1
    assert Path(trials[0][2]).name == "grammar_trial.py"
    failed = [(case, answer.text) for case, answer in answers if answer.status >= 500]
    assert not failed
    assert [answer.status for _, answer in answers].count(200) > 8
