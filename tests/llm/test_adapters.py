"""LLM and AsyncLLM with adapters, which come and go while they serve."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import adapters
from engines import expect_empty, held_back
from forethought import LLM, AsyncLLM, SamplingParams
from forethought.errors import (
    ModelError,
    ParameterError,
    SnapshotError,
    UnknownNameError,
    UsageError,
)
from tokens import speaking

TEXT = "Hello world, how are you?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ADAPTED = GREEDY.replace(adapter="sql")
FIELDS = {"dtype": "float32", "kv_cache_config": {"max_tokens": 1024, "page_size": 4}}


@functools.cache
def directory(name: str = "sql", seed: int = 0) -> Path:
    return adapters.adapter(adapters.new_directory() / name, speaking(), seed=seed)


@functools.cache
def expected(seed: int | None = 0, num_tokens: int = 12) -> list[int]:
    """What the model says with an adapter, merged; None: without one."""
    matrices = {} if seed is None else adapters.random_tensors(speaking(), seed=seed)
    module = adapters.merged(speaking(), matrices)
    with LLM(speaking(), **FIELDS) as llm:
        prompt = llm.generate(TEXT, GREEDY).prompt_token_ids
    return adapters.greedy(module, prompt, num_tokens)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(
        speaking(), **FIELDS, adapters={"sql": directory()}, snapshot_dir=tmp_path / "saved"
    ) as llm:
        yield llm
        expect_empty(llm._frontend.engine)


def tokens(output) -> list[int]:
    return output.outputs[0].token_ids


def test_each_prompt_of_a_batch_has_its_adapter(llm):
    llm.add_adapter("other", directory("other", 5))
    params = [ADAPTED, GREEDY, GREEDY.replace(adapter="other"), GREEDY.replace(adapter="")]
    outputs = list(map(tokens, llm.generate([TEXT] * 4, params)))
    assert outputs == [expected(), expected(None), expected(5), expected(None)]
    assert llm.adapters == ["sql", "other"]


def test_an_unknown_adapter_is_refused_before_anything_runs(llm):
    with pytest.raises(UnknownNameError, match="prompt 1: unknown adapter 'nope'"):
        llm.generate([TEXT, TEXT], [GREEDY, GREEDY.replace(adapter="nope")])
    assert llm.stats.steps == 0


def test_a_session_and_its_forks_keep_their_adapter(llm):
    with llm.start(TEXT) as session:
        first = session.generate(ADAPTED.replace(max_tokens=5))
        with session.fork() as fork:
            rest = fork.generate(GREEDY.replace(max_tokens=7))
        assert first.token_ids + rest.token_ids == expected()
        with pytest.raises(UsageError, match="'sql' is in use"):
            llm.remove_adapter("sql")
    llm.remove_adapter("sql")
    assert llm.adapters == []
    with pytest.raises(UnknownNameError):
        llm.remove_adapter("sql")


def test_a_snapshot_names_its_adapter_and_is_restored_with_the_same_weights_alone(llm, tmp_path):
    with llm.start(TEXT) as session:
        session.generate(ADAPTED.replace(max_tokens=5))
        path = session.save("chat")
    with safe_open(path, "pt") as file:
        assert file.metadata()["adapter"] == "sql"
    with llm.restore("chat") as restored:
        before = llm.stats
        assert restored.generate(GREEDY.replace(max_tokens=7)).token_ids == expected()[5:]
        assert llm.stats.prefilled - before.prefilled == 1
    llm.remove_adapter("sql")
    with pytest.raises(SnapshotError, match="computed with the adapter 'sql'"):
        llm.restore("chat")
    llm.add_adapter("sql", directory("other", 5))
    with pytest.raises(SnapshotError, match="no adapter with its weights"):
        llm.restore("chat")
    llm.add_adapter("again", directory())
    with llm.restore("chat") as restored:
        assert restored.generate(GREEDY.replace(max_tokens=7)).token_ids == expected()[5:]


def test_a_snapshot_whose_adapter_cannot_be_read_is_damaged(llm):
    with llm.start(TEXT) as session:
        session.generate(ADAPTED.replace(max_tokens=5))
        path = session.save("chat")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, {**metadata, "adapter_digest": "no digest"})
    with pytest.raises(SnapshotError, match="damaged"):
        llm.restore("chat")


def test_adapters_come_and_go_while_others_generate():
    async def run() -> None:
        async with AsyncLLM(speaking(), **FIELDS) as llm:
            stream = llm.stream(TEXT, GREEDY.replace(max_tokens=60))
            begun = await anext(stream)
            await llm.add_adapter("sql", directory())
            adapted = await llm.generate(TEXT, ADAPTED)
            assert tokens(adapted) == expected()
            assert llm.adapters == ["sql"]
            await llm.remove_adapter("sql")
            with pytest.raises(UnknownNameError):
                await llm.generate(TEXT, ADAPTED)
            with pytest.raises(ModelError):
                await llm.add_adapter("sql", directory() / "missing")
            last = begun
            async for output in stream:
                last = output
            assert tokens(last)[:12] == expected(None)
            llm._thread.call(expect_empty, llm._frontend.engine).result()

    asyncio.run(run())


def test_a_branch_of_a_closed_session_is_computed_again_with_its_adapter():
    async def run() -> None:
        async with AsyncLLM(speaking(), **FIELDS, adapters={"sql": directory()}) as llm:
            session = llm.start(TEXT)
            await session.generate(ADAPTED.replace(max_tokens=5))
            length = len(session.tokens)
            await session.close()
            async with await session.branch(length) as branch:
                rest = await branch.generate(GREEDY.replace(max_tokens=7))
            assert rest.token_ids == expected()[5:]

    asyncio.run(run())


def test_an_adapter_is_not_removed_while_a_request_of_another_client_runs():
    async def run() -> None:
        fields = {**FIELDS, "num_continuous_decode_steps": 1, "adapters": {"sql": directory()}}
        async with AsyncLLM(speaking(), **fields) as llm:
            stream = llm.stream(TEXT, ADAPTED.replace(max_tokens=80))
            with held_back(llm, after=2):
                await anext(stream)
                with pytest.raises(UsageError, match="in use"):
                    await llm.remove_adapter("sql")
            await stream.aclose()

    asyncio.run(run())


def test_names_and_directories_of_adapters_are_checked(tmp_path):
    for name in ("a:b", "../a", ""):
        with pytest.raises(ParameterError, match="invalid name of an adapter"):
            LLM(speaking(), adapters={name: directory()})
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        LLM(speaking(), adapters={"a": tmp_path})
    other = adapters.adapter(tmp_path / "other", speaking())
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ModelError, match="use_dora"):
        LLM(speaking(), adapters={"a": other})


def test_what_the_model_says_is_that_of_transformers(llm):
    """The reference of these tests is not what they test."""
    prompt = llm.generate(TEXT, ADAPTED).prompt_token_ids
    plain = AutoModelForCausalLM.from_pretrained(speaking(), dtype=torch.float32)
    assert adapters.greedy(plain, prompt, 12) == expected(None) != expected()
