"""``POST /v1/embeddings``, by OpenAI's own client and by hand."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from openai import BadRequestError, NotFoundError

import adapters
from forethought.llm.async_llm import AsyncLLM
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.endpoints import embeddings
from forethought.server.protocol.pooling_request import MAX_INPUTS
from forethought.server.settings import Settings
from http_servers import Served, eventually, scripted, served
from models import transformers_model
from tokens import speaking

PATH = "/v1/embeddings"
TEXTS = ["Hello world, how are you?", "thank you"]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    directory = adapters.adapter(adapters.new_directory() / "sql", speaking())
    fields: Any = {"dtype": "float32", "adapters": {"sql": directory}}
    llm = AsyncLLM(speaking(), **fields, kv_cache_config={"max_tokens": 2048})
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Served]:
    with served(EngineBackend(llm, "base")) as running:
        yield running


@pytest.fixture(autouse=True)
def _pages_are_given_back(llm: AsyncLLM) -> Iterator[None]:
    yield
    engine = llm._frontend.local_engine
    eventually(lambda: not engine.has_work and not engine.pool.in_use)
    llm._thread.call(engine.check_integrity).result()


def expected(llm: AsyncLLM, text: str) -> Any:
    decoder: Any = transformers_model(speaking()).get_decoder()
    with torch.inference_mode():
        states = decoder(torch.tensor([llm.encode(text)])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0).numpy()


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_openais_client_gets_the_mean_of_the_hidden_states(
    server: Served, llm: AsyncLLM, form: Any
) -> None:
    fields = {} if form is None else {"encoding_format": form}
    answer = server.client.embeddings.create(model="base", input=TEXTS, **fields)
    assert [entry.index for entry in answer.data] == [0, 1]
    for text, entry in zip(TEXTS, answer.data, strict=True):
        vector: Any = entry.embedding
        if isinstance(vector, str):
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        np.testing.assert_allclose(vector, expected(llm, text), atol=2e-5)
    num_tokens = sum(len(llm.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_texts_and_token_ids_are_taken_one_or_several(server: Served, llm: AsyncLLM) -> None:
    ids = [llm.encode(text) for text in TEXTS]
    several = [server.send(PATH, {"input": value}).json["data"] for value in (TEXTS, ids)]
    single = [server.send(PATH, {"input": value}).json["data"] for value in (TEXTS[0], ids[0])]
    for data in [*several, *single]:
        np.testing.assert_allclose(data[0]["embedding"], several[0][0]["embedding"], atol=1e-5)
    assert [len(data) for data in (*several, *single)] == [2, 2, 1, 1]


def test_dimensions_are_the_first_of_length_one(server: Served, llm: AsyncLLM) -> None:
    data = server.send(PATH, {"input": TEXTS[0], "dimensions": 3}).json["data"]
    first = expected(llm, TEXTS[0])[:3]
    np.testing.assert_allclose(data[0]["embedding"], first / np.linalg.norm(first), atol=2e-5)


def test_an_adapter_has_embeddings_of_its_own(server: Served) -> None:
    names = ("base", "base:sql")
    plain, adapted = (server.send(PATH, {"input": TEXTS[0], "model": name}).json for name in names)
    assert adapted["model"] == "base:sql"
    assert not np.allclose(
        plain["data"][0]["embedding"], adapted["data"][0]["embedding"], atol=1e-4
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": [[1], []]}, "input.1"),
        ({"input": ["a", 1]}, "input.1"),
        ({"input": [1, -1]}, "input.1"),
        ({"input": [100_000]}, "input.0"),
        ({"input": {"a": 1}}, "input"),
        ({"input": 1.5}, "input"),
        ({"input": [[[1]]]}, "input.0.0"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 33}, "dimensions"),
        ({"input": "a", "dimensions": 1.5}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "temperature": 1.0}, "temperature"),
        ({"input": "a", "model": "dynasor-base"}, "model"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": [[5] * 200] * 1501}, None),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(server: Served, body: Any, param: Any) -> None:
    answer = server.send(PATH, body)
    assert answer.status == 400, answer.text
    assert answer.error["param"] in (param, "input.0" if param == "input" else param)


def test_ids_beyond_the_limit_of_a_request_are_refused(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_TOKENS", 10)
    answer = server.send(PATH, {"input": [[5] * 5, [5] * 6]})
    assert (answer.status, answer.error["param"]) == (400, "input")
    assert "more than 10 tokens" in answer.error["message"]
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 64)
    assert server.send(PATH, {"input": ["a"] * 3}).status == 400
    assert server.send(PATH, {"input": ["a"] * 3, "dimensions": 2}).status == 200


@pytest.mark.parametrize("text", ["NaN", '"\\ud800"', '["a", "\\udfff"]', "[NaN]", "[1e400]"])
def test_numbers_that_are_none_and_lone_surrogates_are_refused(server: Served, text: str) -> None:
    assert server.send(PATH, f'{{"input": {text}}}'.encode()).status == 400


def test_errors_are_those_of_openais_client(server: Served) -> None:
    with pytest.raises(NotFoundError):
        server.client.embeddings.create(model="other", input="a")
    with pytest.raises(BadRequestError, match="context"):
        server.client.embeddings.create(model="base", input=[5] * 257)


def test_a_server_without_a_model_says_so() -> None:
    with scripted(["hello"]) as running:
        answer = running.send(PATH, {"input": "a"})
    assert answer.status == 400
    assert "this server has no embeddings" in answer.error["message"]


def test_a_request_that_takes_too_long_is_ended(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def embed(*args: Any, **fields: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(llm, "embed", embed)
    with served(EngineBackend(llm, "base"), Settings(timeout=0.05)) as running:
        answer = running.send(PATH, {"input": "a"})
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        assert running.send("/v1/load").json["requests_unfinished"] == 0


def test_embeddings_are_counted(server: Served) -> None:
    before = server.send("/v1/load").json["requests_unfinished"]
    server.send(PATH, {"input": TEXTS})
    text = server.send("/metrics").text
    assert 'method="embeddings"' in text
    assert before == server.send("/v1/load").json["requests_unfinished"] == 0


def test_the_body_is_json_for_any_name_of_a_model(server: Served) -> None:
    assert json.loads(server.send(PATH, {"input": "a"}).text)["model"] == "base"
