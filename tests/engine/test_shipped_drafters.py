"""Trained drafters on the embedded reasoner: its own tokens, in far fewer steps.

In float32. Random heads, which are hardly ever right, are in ``test_speculation``: here most of
what is drafted is accepted, so that keys, values and states of accepted tokens are used again.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from engines import drain, expect_empty, outputs
from forethought.assets import reasoner_dir
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.engine.resolve import build_drafter_entry
from forethought.engine.scheduler import Limits
from forethought.engine.sequence import Sequence
from forethought.kv.storage import KvStorage
from forethought.llm.tokenizer import Tokenizer
from forethought.model import loader
from forethought.model.causal_lm import CausalLM
from forethought.model.loader import Forward
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import Target
from models import greedy
from shipped import POINTS, QUESTIONS, SHIPPED, shipped
from turns import by_turns

TOKENS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=TOKENS, ignore_eos=True)
PENALISED = SAMPLED.replace(seed=6, repetition_penalty=1.1, frequency_penalty=0.1)
DRAWN = {"sampled": SAMPLED, "penalised": PENALISED}


@functools.cache
def reasoner(forward: Forward = "torch") -> CausalLM:
    return loader.load(reasoner_dir(), dtype="float32", forward=forward)


@functools.cache
def asked() -> list[list[int]]:
    tokenizer = Tokenizer.load(reasoner_dir())
    return [tokenizer.encode_more(question) for question in QUESTIONS[:7]]


@functools.cache
def said() -> list[list[int]]:
    """What transformers says, greedily."""
    return greedy(reasoner_dir(), asked(), TOKENS)


@functools.cache
def drawn(params: SamplingParams) -> list[list[int]]:
    """What the engine says without a drafter, one prompt after the other."""
    engine = machine(None)
    answers = []
    for prompt in asked():
        [sequence] = engine.add(prompt, params)
        drain(engine)
        answers.append(sequence.output)
    return answers


def machine(
    config: DecodingBaseConfig | None,
    reuse: bool = True,
    forward: Forward = "torch",
    **limits: Any,
) -> Engine:
    settings = {"max_batch_size": 8, "max_num_tokens": 512, "max_length": 256, **limits}
    lm = reasoner(forward)
    runner = ModelRunner(lm, KvStorage(lm.layer_shapes, 160, 16, lm.dtype))
    target = Target(runner, settings["max_num_tokens"])
    drafters = [build_drafter_entry(config, target, settings["max_batch_size"])] if config else []
    return Engine(runner, Limits(**settings), reuse=reuse, seed=0, drafters=drafters)


def run(engine: Engine, count: int, params: SamplingParams = GREEDY) -> list[Sequence]:
    sequences = [engine.add(prompt, params)[0] for prompt in asked()[:count]]
    drain(engine)
    return sequences


def per_step(sequences: list[Sequence]) -> float:
    """Tokens, of all of them together."""
    steps = sum(sequence.metrics.steps for sequence in sequences)
    return 1 + sum(sequence.metrics.accepted for sequence in sequences) / steps


SETTINGS = {  # batch, chunked, reuse: every pair of values occurs
    "chunked, cache": (1, True, True),
    "alone": (1, False, False),
    "batch, chunked": (7, True, False),
    "batch, cache": (7, False, True),
}


@pytest.mark.parametrize(("name", "setting"), by_turns(SHIPPED, [*SETTINGS]))
def test_greedy_tokens_are_those_of_plain_decoding_in_far_fewer_steps(
    name: str, setting: str
) -> None:
    batch, chunked, reuse = SETTINGS[setting]
    config, floor = shipped(name)
    budget = {1: 24, 7: 160}[batch] if chunked else 512  # a prompt is of 30 to 41 tokens
    engine = machine(config, reuse, chunked_prefill=chunked, max_num_tokens=budget)
    for _ in range(2 if reuse else 1):  # the second time prompts and outputs are in the cache
        sequences = run(engine, batch)
        assert outputs(sequences) == said()[:batch]
        assert per_step(sequences) > floor
    assert (engine.stats.cached > 0) == reuse
    assert engine.stats.draft_failures == 0
    expect_empty(engine)


@pytest.mark.parametrize(("name", "kind"), by_turns(POINTS, [*DRAWN], every=3))
def test_sampled_tokens_are_those_of_plain_decoding_token_for_token(name: str, kind: str) -> None:
    engine, params = machine(shipped(name)[0]), DRAWN[kind]
    sequences = run(engine, 7, params)
    assert outputs(sequences) == drawn(params)
    assert per_step(sequences) > 1.5
    expect_empty(engine)


def test_drawn_drafts_of_the_trained_draft_model_say_the_same_alone_and_together() -> None:
    config, floor = shipped("draft model, drawn")
    together, alone = machine(config), machine(config)
    sequences = run(together, 7, SAMPLED)
    assert outputs(sequences[:1]) == outputs(run(alone, 1, SAMPLED))
    assert per_step(sequences) > floor - 0.5
    expect_empty(together)
    expect_empty(alone)


@pytest.mark.parametrize("name", [None, *SHIPPED])
def test_a_model_that_is_loaded_meanwhile_changes_nothing(name: str | None) -> None:
    """Loading one in 16 bits sets torch's default dtype for a while, in the whole process."""
    engine = machine(None if name is None else shipped(name)[0], forward="auto")
    before = [outputs(run(engine, 2, params)) for params in (GREEDY, SAMPLED)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert [outputs(run(engine, 2, params)) for params in (GREEDY, SAMPLED)] == before
    finally:
        torch.set_default_dtype(torch.float32)
    assert before[0] == said()[:2]
    assert engine.stats.failed_forwards == engine.stats.draft_failures == 0
    expect_empty(engine)
