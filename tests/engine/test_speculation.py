"""The engine with drafters: the same tokens as without, in fewer steps, and no page left behind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

import drafters
from engines import drain, engine, expect_empty, outputs
from forethought.decoding import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SuffixDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.engine.engine import Engine
from forethought.params import SamplingParams, SpeculationParams
from forethought.speculative.draft import Draft
from forethought.speculative.drafter import Drafter, DraftRequest, ResourceManager
from models import greedy, prompts, tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPTS = prompts((1, 4, 9, 17, 30, 5, 12))
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def plain(count: int = 7, tokens: int = 64) -> dict[tuple[int, ...], list[int]]:
    """What transformers says, greedily."""
    return {
        tuple(prompt): answer
        for prompt, answer in zip(
            PROMPTS[:count], greedy(tiny("llama"), PROMPTS[:count], tokens), strict=True
        )
    }


def provided(drafter: Drafter, length: int = 4, nodes: int | None = None) -> DecodingBaseConfig:
    return UserProvidedDecodingConfig(
        max_draft_len=length, max_total_draft_tokens=nodes or length, drafter=drafter
    )


def drafting(name: str) -> list[DecodingBaseConfig]:
    model = {"max_draft_len": 4, "speculative_model": tiny("llama", seed=7)}
    same = {"max_draft_len": 4, "speculative_model": tiny("llama")}
    tree = {"draft_choices": PATHS, "speculative_model": tiny("llama")}
    return {
        "none": lambda: [],
        "ngram": lambda: [NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=3)],
        "suffix": lambda: [SuffixDecodingConfig(max_draft_len=8)],
        "draft model, random": lambda: [DraftTargetDecodingConfig(**model)],
        "draft model = target": lambda: [DraftTargetDecodingConfig(**same)],
        "draft model, tree": lambda: [DraftTargetDecodingConfig(**tree)],
        "oracle": lambda: [provided(drafters.oracle(plain()))],
        "adversary": lambda: [provided(drafters.adversary(plain()))],
        "static tree": lambda: [provided(drafters.bush(plain(), 3), 4, 12)],
    }[name]()


NAMES = "none ngram suffix oracle adversary".split() + [
    "draft model, random",
    "draft model = target",
    "draft model, tree",
    "static tree",
]


def run(machine: Engine, count: int, params: SamplingParams = GREEDY) -> list[list[int]]:
    sequences = [machine.add(prompt, params)[0] for prompt in PROMPTS[:count]]
    drain(machine)
    return outputs(sequences)


@pytest.mark.parametrize("reuse", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole prompts"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    name: str, batch: int, page_size: int, chunked: bool, reuse: bool
) -> None:
    machine = engine(
        pages=1024 // page_size,
        page_size=page_size,
        reuse=reuse,
        speculative=drafting(name),
        chunked_prefill=chunked,
        max_num_tokens=24 if chunked else 96,
    )
    expected = list(plain().values())[:batch]
    assert run(machine, batch) == expected
    assert run(machine, batch) == expected  # with whatever the first round has left behind
    expect_empty(machine)
