"""Sampling of requests that do not set it: as the model's ``generation_config.json`` says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forethought.llm.async_llm import AsyncLLM
from forethought.server.backends.engine_backend import EngineBackend
from http_servers import Served, served
from tokens import speaking

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 12}


def opened(path: Path, **generation: Any) -> AsyncLLM:
    """A random model with this ``generation_config.json``."""
    shutil.copytree(speaking(), path)
    (path / "generation_config.json").write_text(json.dumps(generation))
    return AsyncLLM(path, dtype="float32")


@pytest.fixture(scope="module")
def cutting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """Of one token at each place: draws are equal, whatever the seed."""
    llm = opened(tmp_path_factory.mktemp("cutting") / "m", do_sample=True, top_k=1)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    llm = opened(tmp_path_factory.mktemp("greedy") / "m", do_sample=False)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(cutting: AsyncLLM) -> Iterator[Served]:
    with served(EngineBackend(cutting, "tiny")) as running:
        yield running


def texts(server: Served, num: int = 3, **fields: Any) -> set[str]:
    """The answers under several seeds."""
    bodies = [{**ASK, "seed": seed, **fields} for seed in range(num)]
    choices = [c for body in bodies for c in server.send(CHAT, body).json["choices"]]
    return {choice["message"]["content"] for choice in choices}


def test_a_field_that_is_not_given_is_the_models(server: Served) -> None:
    assert len(texts(server)) == 1
    streamed = server.send(CHAT, {**ASK, "stream": True, "seed": 5}).events
    deltas = [data["choices"][0]["delta"] for _, data in streamed if data != "[DONE]"]
    assert {"".join(delta.get("content") or "" for delta in deltas)} == texts(server)
    completed = [
        server.send(COMPLETIONS, {"prompt": "Hello", "max_tokens": 8, "seed": seed}).json
        for seed in range(2)
    ]
    assert completed[0]["choices"] == completed[1]["choices"]
    responses = [
        server.send(RESPONSES, {"input": "Hello", "max_output_tokens": 8, "seed": seed}).json
        for seed in range(2)
    ]
    assert responses[0]["output"][0]["content"] == responses[1]["output"][0]["content"]


def test_what_a_client_gives_wins(server: Served) -> None:
    assert len(texts(server, top_k=0)) > 1
    assert len(texts(server, top_k=0, temperature=0)) == 1


@pytest.mark.parametrize("method", ["majority_vote@2", "plain"])
def test_methods_have_them_where_they_set_no_others(server: Served, method: str) -> None:
    assert len(texts(server, method=method, events=True, stream=False)) == 1
    assert len(texts(server, 4, method=method, top_k=0)) > 1


def test_neutral_defaults_can_be_chosen(cutting: AsyncLLM) -> None:
    backend = EngineBackend(cutting, "tiny", uses_model_sampling=False)
    with served(backend) as server:
        assert len(texts(server)) > 1


def test_a_model_that_does_not_sample_is_greedy_but_for_several_answers(greedy: AsyncLLM) -> None:
    with served(EngineBackend(greedy, "tiny")) as server:
        assert texts(server) == texts(server, temperature=0)
        assert len(texts(server, temperature=1)) > 1
        assert len(texts(server, 1, n=4)) > 1
        assert len(texts(server, 4, method="majority_vote@2")) > 1


def test_a_form_has_the_models_defaults_and_its_fields_are_taken(server: Served) -> None:
    fields = {field["name"]: field for field in server.send("/v1/sampling").json["data"]}
    assert fields["top_k"]["default"] == 1
    assert fields["min_p"]["schema"] == {"type": "number", "minimum": 0.0, "maximum": 1.0}
    assert "thinking_budget" not in fields, "the model does not think"
    given = {name: field["default"] for name, field in fields.items()}
    answer = server.send(CHAT, {**ASK, **given, "max_tokens": 12, "stop": ["a"]})
    assert answer.status == 200
