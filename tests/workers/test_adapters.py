"""Adapters of requests to methods: every branch, fork and probe has that of its request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI

import adapters
from engines import expect_empty
from forethought import LLM, SamplingParams
from forethought.errors import ParameterError, UnknownNameError
from forethought.scaffolding import (
    Controller,
    EngineWorker,
    GenerationTask,
    OpenaiWorker,
    ScaffoldingLlm,
)
from openai_server import serving
from tokens import speaking

PROMPT = "Hello world, how are you?"
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    directory = adapters.new_directory()
    files = {
        name: adapters.adapter(directory / name, speaking(), seed=seed)
        for seed, name in enumerate(("first", "second"))
    }
    fields: Any = {"dtype": "float32", "kv_cache_config": {"max_tokens": 2048, "page_size": 4}}
    with LLM(speaking(), adapters=files, **fields) as llm:
        yield llm
        expect_empty(llm._frontend.engine)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def tokens(llm: LLM) -> dict[str | None, list[int]]:
    """What is generated with each adapter."""
    return {
        name: llm.generate(PROMPT, SamplingParams(adapter=name, **GREEDY)).outputs[0].token_ids  # type: ignore[arg-type]
        for name in (None, "first", "second")
    }


class Play(Controller):
    """Runs a generator function; what it returns is the output's ``meta``."""

    def __init__(self, play: Callable[..., Any]) -> None:
        super().__init__()
        self.play = play

    def process(self, tasks: Any, **kwargs: Any) -> Any:
        result = yield from self.play()
        tasks[0].output_str, tasks[0].customized_result_fields["result"] = "", result


def played(llm: LLM, play: Callable[..., Any], adapter: str | None = None, **options: Any) -> Any:
    """What a play returns, on a worker with an adapter."""
    with (
        EngineWorker(llm, adapter=adapter) as worker,
        ScaffoldingLlm(Play(play), {"generation": worker}) as scaffolding,
    ):
        return scaffolding.generate(PROMPT, **options).output.meta["result"]


def ask(prompt: str | None = PROMPT, **fields: Any) -> GenerationTask:
    return GenerationTask(input_str=prompt, worker_tag="generation", **{**GREEDY, **fields})


def generate(**fields: Any) -> Any:
    task = ask(**fields)
    yield [task]
    return task.output_tokens


def branches() -> Any:
    first = ask(max_tokens=6)
    yield [first]
    fork = first.fork("", max_tokens=6)
    text = ask(PROMPT + first.output_str, max_tokens=6)
    several = ask(n=2)
    yield [fork, text, several]
    begun = first.output_tokens
    samples = [sample.token_ids for sample in several.samples]
    return [begun + fork.output_tokens, begun + text.output_tokens, *samples]


def test_a_request_has_its_adapter_and_else_that_of_the_worker(
    llm: LLM, tokens: dict[str | None, list[int]]
) -> None:
    def choosing(name: str | None) -> Any:
        return lambda scaffolding: scaffolding.generate(PROMPT, adapter=name)

    assert played(llm, generate) == tokens[None]
    assert played(llm, generate, "second") == tokens["second"]
    for name, worker in (("first", None), ("first", "second"), ("", "second")):
        with (
            EngineWorker(llm, adapter=worker) as chosen,
            ScaffoldingLlm(Play(generate), {"generation": chosen}) as scaffolding,
        ):
            output = choosing(name)(scaffolding).output
        assert output.meta["result"] == tokens[name or None]


def test_samples_forks_and_continued_texts_have_the_adapter_of_the_request(
    llm: LLM, tokens: dict[str | None, list[int]]
) -> None:
    with (
        EngineWorker(llm) as worker,
        ScaffoldingLlm(Play(branches), {"generation": worker}) as scaffolding,
    ):
        for result, name in [
            (scaffolding.generate_async(PROMPT, adapter=name), name)
            for name in ("first", None, "second")
        ]:
            assert result.result().output.meta["result"] == [tokens[name]] * 4


def test_an_adapter_that_there_is_not_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(UnknownNameError, match="unknown adapter 'nope'"):
        EngineWorker(llm, adapter="nope")
    with (
        EngineWorker(llm) as worker,
        ScaffoldingLlm(Play(generate), {"generation": worker}) as scaffolding,
    ):
        with pytest.raises(UnknownNameError, match="unknown adapter 'nope'"):
            scaffolding.generate(PROMPT, adapter="nope")
        with pytest.raises(ParameterError, match="adapter"):
            scaffolding.generate(PROMPT, adapter=3)
        with pytest.raises(ParameterError, match="adapter"):
            scaffolding.generate(PROMPT, sampling_params={"adapter": "first"})


def test_a_server_is_asked_for_no_adapter() -> None:
    play = Play(partial(generate, ignore_eos=False))
    with serving() as server:
        worker = OpenaiWorker(AsyncOpenAI(base_url=server.url, api_key="key", timeout=60), "model")
        with (
            ScaffoldingLlm(play, {"generation": worker}) as scaffolding,
            pytest.raises(ParameterError, match="cannot honour adapter"),
        ):
            scaffolding.generate(PROMPT, adapter="first")
