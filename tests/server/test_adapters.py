"""Adapters over HTTP: ``model="base:name"``, also inside methods."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import adapters
from forethought.config.sampling import SamplingParams
from forethought.llm.async_llm import AsyncLLM
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.settings import Settings
from http_servers import Served, eventually, served
from tokens import speaking

TEXT = "Hello world, how are you?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    directory = adapters.adapter(adapters.new_directory() / "sql", speaking())
    fields: Any = {"dtype": "float32", "adapters": {"sql": directory}}
    llm = AsyncLLM(speaking(), **fields, kv_cache_config={"max_tokens": 2048})
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Served]:
    settings = Settings(served_model_names=["base", "alias"])
    with served(EngineBackend(llm, "base"), settings) as running:
        yield running


@pytest.fixture(autouse=True)
def _pages_are_given_back(llm: AsyncLLM) -> Iterator[None]:
    yield
    engine = llm._frontend.engine
    eventually(lambda: not engine.has_work and not engine.pool.in_use)
    llm._thread.call(engine.check_integrity).result()


def complete(server: Served, model: str, **fields: Any) -> str:
    body = {"model": model, "prompt": TEXT, "temperature": 0, "max_tokens": 12, **fields}
    text: str = server.send(COMPLETIONS, body).json["choices"][0]["text"]
    return text


def test_the_list_of_models_has_each_adapter_under_each_name(server: Served) -> None:
    models = server.send("/v1/models").json["data"]
    assert [(model["id"], model.get("parent")) for model in models] == [
        ("base", None),
        ("alias", None),
        ("base:sql", "base"),
        ("alias:sql", "alias"),
    ]
    assert server.send("/v1/models/base:sql").json["parent"] == "base"
    assert server.send("/v1/models/plain-base:sql").status == 200


def test_the_name_of_the_model_chooses_the_adapter(server: Served) -> None:
    names = ("base", "base:sql", "alias:sql", "plain-base:sql")
    plain, adapted, alike, by_method = (complete(server, name) for name in names)
    assert plain != adapted == alike == by_method
    assert complete(server, "base:sql", stream=False, n=2, temperature=0) == adapted


@pytest.mark.parametrize("model", ["base:nope", "base:", "sql", ":sql", "base:sql:sql"])
def test_an_adapter_that_there_is_not_is_an_unknown_model(server: Served, model: str) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": TEXT}),
        (CHAT, {"messages": [{"role": "user", "content": TEXT}]}),
    ):
        answer = server.send(path, {"model": model, "max_tokens": 3, **body})
        assert answer.status == 404
        assert "unknown model" in answer.json["error"]["message"]


def test_adapters_that_come_while_it_serves_are_models_until_they_go(
    llm: AsyncLLM, server: Served
) -> None:
    directory = adapters.adapter(adapters.new_directory() / "late", speaking(), seed=9)
    asyncio.run(llm.add_adapter("late", directory))
    assert complete(server, "base:late") not in (
        complete(server, "base"),
        complete(server, "base:sql"),
    )
    names = [model["id"] for model in server.send("/v1/models").json["data"]]
    assert "alias:late" in names
    asyncio.run(llm.remove_adapter("late"))
    body = {"model": "base:late", "prompt": TEXT, "max_tokens": 2}
    assert server.send(COMPLETIONS, body).status == 404


def test_all_branches_of_a_method_have_the_adapter(llm: AsyncLLM, server: Served) -> None:
    chosen = list[str | None]()
    engine = llm._frontend.engine
    start = engine._start

    def watched(sequence: Any, *args: Any) -> None:
        chosen.append(sequence.adapter and sequence.adapter.name)
        start(sequence, *args)

    engine._start = watched  # type: ignore[method-assign]
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 6, "temperature": 1}
    try:
        for model in (
            "majority_vote@3-base:sql",
            "tree_of_thoughts-base:sql",
            "majority_vote@2-base",
        ):
            assert server.send(CHAT, {"model": model, **body}).status == 200
    finally:
        del engine._start
    assert chosen[-2:] == [None, None]
    assert chosen[:-2] == ["sql"] * (len(chosen) - 2)
    assert len(chosen) > 6


def test_a_request_names_no_files(server: Served) -> None:
    for field in ("adapter", "adapters", "lora_request", "lora_path"):
        answer = server.send(
            COMPLETIONS, {"model": "base", "prompt": TEXT, "max_tokens": 2, field: "/etc/passwd"}
        )
        assert answer.status == 400
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "x", "lora_path": "/tmp/x"}
        assert server.send(path, body).status == 404
