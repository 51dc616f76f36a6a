"""A generation that has begun in one engine goes on in another one, with the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from forethought.config.sampling import SamplingParams
from forethought.engine.base import Begun
from forethought.llm.async_llm import AsyncLLM
from forethought.outputs import CompletionOutput

PROMPT = "Question: What is 17 + 25?\n"
SHAPE = {"regex": "[a-z ]{30,60}"}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "penalties": {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.7, "presence_penalty": 0.5},
    "min_tokens": {"temperature": 1.2, "seed": 3, "min_tokens": 30},
    "stop": {"temperature": 1.0, "seed": 11, "stop": ["er", "= 4"], "min_tokens": 12},
    "grammar": {"temperature": 1.0, "seed": 2, "guided_decoding": SHAPE},
    "thinking": {"temperature": 0.0, "thinking_budget": 12},
    "thinking and grammar": {
        "temperature": 1.0,
        "seed": 4,
        "thinking_budget": 9,
        "guided_decoding": SHAPE,
    },
    "to the end of the context": {
        "temperature": 1.0,
        "seed": 8,
        "max_tokens": None,
        "ignore_eos": True,
    },
    "logprobs": {"temperature": 1.0, "seed": 9, "logprobs": 1},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(dtype="float32", num_threads=1, max_seq_len=120)
    yield llm
    engine = llm._frontend.local_engine
    llm._thread.call(engine.check_integrity).result()
    llm.shutdown()


async def _whole(llm: AsyncLLM, params: SamplingParams) -> CompletionOutput:
    async with llm.start(PROMPT) as session:
        return await session.generate(params)


async def _resumed(
    llm: AsyncLLM, params: SamplingParams, begun: CompletionOutput, count: int
) -> CompletionOutput:
    tokens = begun.token_ids[:count]
    async with llm.start([*llm.encode(PROMPT), *tokens]) as session:
        return await session.stream(params, begun=Begun(count)).finish()


@pytest.mark.parametrize("name", PARAMS)
def test_what_has_begun_elsewhere_ends_as_it_would_have_there(llm: AsyncLLM, name: str) -> None:
    params = SamplingParams(**{"max_tokens": 60, **PARAMS[name]})

    async def check() -> None:
        whole = await _whole(llm, params)
        size = len(whole.token_ids)
        assert size > 8
        for count in {1, 2, size // 3, size // 2, size - 2, size - 1}:
            resumed = await _resumed(llm, params, whole, count)
            assert resumed.token_ids == whole.token_ids
            assert (resumed.text, resumed.finish_reason) == (whole.text, whole.finish_reason)
            assert (resumed.stop_reason, resumed.thinking) == (whole.stop_reason, whole.thinking)

    asyncio.run(check())


def test_each_sample_goes_on_with_its_own_random_numbers(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1)

    async def check() -> None:
        samples = (await llm.generate(PROMPT, params.replace(n=3))).outputs
        assert len({tuple(sample.token_ids) for sample in samples}) == 3
        for sample in samples:
            tokens = sample.token_ids[:7]
            async with llm.start([*llm.encode(PROMPT), *tokens]) as session:
                begun = Begun(len(tokens), sample.index)
                resumed = await session.stream(params, begun=begun).finish()
            assert resumed.token_ids == sample.token_ids

    asyncio.run(check())
