"""The pooling that a model's files name, and embeddings of ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import expect_empty
from forethought.config.sampling import SamplingParams
from forethought.engine import embedding
from forethought.engine.engine import Engine
from forethought.errors import ContextLengthError, ModelError, ParameterError, RequestError
from forethought.llm.async_llm import AsyncLLM
from forethought.llm.embedding import read_pooling
from models import transformers_model
from tokens import speaking

TEXTS = ["Hello world, how are you?", "thank you", "你好，世界 🙂 ok."]
PART = "sentence_transformers.models."
QWEN3 = {
    "word_embedding_dimension": 1024,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    fields: Any = {"dtype": "float32", "kv_cache_config": {"max_tokens": 1024}}
    llm = AsyncLLM(speaking(), **fields)
    yield llm
    engine = llm._frontend.local_engine
    llm._thread.call(expect_empty, engine).result()
    assert llm._embedding_turn._free == 1
    llm.shutdown()


def write(directory: Path, pooling: Any, modules: Any = None) -> Path:
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        parts = [{"idx": i, "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
        (directory / "modules.json").write_text(json.dumps(parts))
    return directory


@pytest.mark.parametrize(
    ("written", "pooling"),
    [
        (QWEN3, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "mean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "first"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 8}, "last"),
    ],
)
def test_the_pooling_is_that_of_sentence_transformers(
    tmp_path: Path, written: dict[str, Any], pooling: str
) -> None:
    assert read_pooling(tmp_path) == "mean"
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [(path, PART + kind) for path, kind in parts]
    assert read_pooling(write(tmp_path, written, modules)) == pooling


@pytest.mark.parametrize(
    ("written", "modules", "why"),
    [
        ({"pooling_mode_max_tokens": True}, None, "max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, None, "mean_tokens"),
        ({}, None, "none"),
        ([], None, "cannot load"),
        (QWEN3, [("2_Dense", PART + "Dense")], "Dense"),
        (QWEN3, [("../other", PART + "Pooling")], "outside of it"),
        (QWEN3, [("/etc", PART + "Pooling")], "outside of it"),
    ],
)
def test_a_pooling_that_is_not_computed_is_refused(
    tmp_path: Path, written: Any, modules: Any, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        read_pooling(write(tmp_path, written, modules))


@pytest.mark.parametrize("text", ["[", "{}", "[1]", "[" * 100_000])
def test_broken_lists_of_parts_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooling(tmp_path)


def test_a_model_with_a_pooling_of_its_own_embeds_by_it(tmp_path: Path) -> None:
    shutil.copytree(speaking(), tmp_path / "model")
    fields: Any = {"dtype": "float32", "kv_cache_config": {"max_tokens": 1024}}
    llm = AsyncLLM(write(tmp_path / "model", QWEN3), **fields)
    vectors = asyncio.run(llm.embed(TEXTS))
    decoder: Any = transformers_model(speaking()).get_decoder()
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.inference_mode():
            states = decoder(torch.tensor([llm.encode(text)])).last_hidden_state[0]
        last = torch.nn.functional.normalize(states[-1], dim=0)
        np.testing.assert_allclose(vector, last, atol=2e-5)
    llm.shutdown()


def test_texts_and_their_ids_have_the_same_embedding_in_any_company(llm: AsyncLLM) -> None:
    async def run() -> None:
        together = await llm.embed(TEXTS)
        assert together.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
        apart = await asyncio.gather(*[llm.embed([llm.encode(text)]) for text in TEXTS])
        np.testing.assert_allclose(np.concatenate(apart), together, atol=1e-5)
        assert (await llm.embed([])).shape == (0, 0)

    asyncio.run(run())


def test_an_input_that_is_refused_begins_nothing(llm: AsyncLLM) -> None:
    too_long: Any = [[5] * (llm.max_length + 1)]
    for inputs, kind in (([""], ParameterError), ([[]], ParameterError), (too_long, None)):
        with pytest.raises(kind or ContextLengthError):
            asyncio.run(llm.embed([*TEXTS, *inputs]))
    assert llm.stats.embedded == 0


def test_generations_step_between_the_forwards_of_embeddings(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()
    step, advance = Engine.step, Engine.advance

    def stepping(self: Engine, *args: Any) -> Any:
        order.append("step") if self.has_work else None
        return step(self, *args)

    def advancing(self: Engine, *args: Any) -> None:
        order.append("embed")
        advance(self, *args)

    monkeypatch.setattr(Engine, "step", stepping)
    monkeypatch.setattr(Engine, "advance", advancing)
    monkeypatch.setattr(embedding, "MAX_PASS_TOKENS", 8)

    async def run() -> None:
        greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        stream = llm.stream("Hello", greedy)
        await anext(stream)
        order.clear()
        await asyncio.gather(*[llm.embed(TEXTS) for _ in range(4)])
        await stream.aclose()

    text = ""
    for _ in range(20):  # again, if the generation has ended before the first forward
        asyncio.run(run())
        text = " ".join(order)
        if "step" in text.partition("embed")[2]:
            break
    while_generating = text[text.index("embed") : text.rindex("step")]
    assert order.count("embed") == 12
    assert while_generating.count("step") >= 2
    assert "embed embed" not in while_generating


def test_an_error_of_a_forward_fails_its_request_alone(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([MemoryError("out of memory")])
    advance = Engine.advance

    def advancing(self: Engine, *args: Any) -> None:
        for failure in failures:
            raise failure
        advance(self, *args)

    monkeypatch.setattr(Engine, "advance", advancing)
    with pytest.raises(RequestError, match="out of memory"):
        asyncio.run(llm.embed(TEXTS))
    assert asyncio.run(llm.embed(TEXTS)).shape[0] == len(TEXTS)


def test_a_request_that_is_cancelled_lets_others_go_on(llm: AsyncLLM) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(llm.embed(TEXTS)) for _ in range(5)]
        await asyncio.sleep(0)
        for task in tasks[:4]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert tasks[4].result().shape[0] == len(TEXTS)

    asyncio.run(run())
