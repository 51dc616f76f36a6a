"""Steps with chain drafts in one call: in C++ what the reference and single steps give."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_heads import new_directory, random_eagle, random_eagle3
from engines import drain, engine_over
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
)
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import continuous
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence
from forethought.model import loader
from forethought.model.native import chain_steps as native
from forethought.model.native import library
from forethought.speculative import chain_steps
from generations import expect_same
from models import prompts, save_random, tiny
from mtp_modules import saved

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)

PROMPTS = prompts((9, 4, 33, 1))
LIKELY = torch.tensor([40, 100])
"""The tokens that targets and what drafts for them choose from, so that many are accepted."""
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=size, ignore_eos=True) for size in (30, 11, 24, 17)
]


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="few-tokens-")


@functools.cache
def few_tokens(architecture: str, seed: int = 1, vocab_size: int | None = None) -> Path:
    """A tiny model that says little but ``LIKELY``."""
    path = Path(_directory().name) / f"{architecture}-{seed}-{vocab_size}"
    config = loader.load(tiny(architecture)).config
    config.vocab_size = vocab_size or config.vocab_size
    save_random(config, path, seed)
    module = AutoModelForCausalLM.from_pretrained(path)
    head = module.lm_head.weight.data
    likely = [token for token in LIKELY.tolist() if token < len(head)]
    kept = head[likely].clone()
    head.zero_()
    head[likely] = kept
    module.save_pretrained(path)
    return path


def draft_model(architecture: str = "llama", vocab_size: int | None = None) -> DecodingBaseConfig:
    model = few_tokens(architecture, 9, vocab_size)
    return DraftTargetDecodingConfig(max_draft_len=4, speculative_model=model)


def eagle(head: Any) -> DecodingBaseConfig:
    directory = new_directory()
    head.save(directory)
    return EagleDecodingConfig(max_draft_len=4, speculative_model=directory)


def eagle3(**traits: Any) -> DecodingBaseConfig:
    head = random_eagle3(draft_vocab=len(LIKELY), **traits)
    head.set_vocabulary(LIKELY)
    return eagle(head)


def mtp(architecture: str = "llama", layout: str = "deepseek", **more: Any) -> DecodingBaseConfig:
    modules = saved(architecture, 1, layout)
    return MTPDecodingConfig(max_draft_len=4, speculative_model=modules, **more)


KINDS: dict[str, tuple[str, Callable[[], DecodingBaseConfig]]] = {
    "draft model": ("llama", draft_model),
    "draft model, window": ("mistral", lambda: draft_model("mistral")),
    "draft model, fewer tokens": ("llama", lambda: draft_model(vocab_size=99)),
    "draft model, more tokens": ("llama", lambda: draft_model(vocab_size=103)),
    "eagle": ("llama", lambda: eagle(random_eagle())),
    "eagle, own embedding": ("llama", lambda: eagle(random_eagle(own_embedding=True))),
    "eagle3": ("llama", eagle3),
    "eagle3, all norms": (
        "llama",
        lambda: eagle3(
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
            own_embedding=True,
            attention_bias=True,
        ),
    ),
    "mtp": ("llama", mtp),
    "mtp, state unnormed": ("llama", lambda: mtp(fed_back_state="unnormed")),
    "mtp, another layout": ("qwen3", lambda: mtp("qwen3", "qwen")),
    "mtp, window": ("mistral", lambda: mtp("mistral")),
}


def run(
    kind: str, num_steps: int, dtype: str = "float32", **limits: Any
) -> tuple[Engine, list[Sequence]]:
    """Requests of several lengths, which accept differently and end at different times."""
    architecture, configure = KINDS[kind]
    lm = loader.load(few_tokens(architecture), dtype=dtype, forward="native")
    settings = {"pages": 96, "page_size": 4, "max_num_tokens": 64, **limits}
    machine = engine_over(lm, speculative=[configure()], **settings)
    machine.num_decode_steps = num_steps
    begun = [
        machine.add(prompt, params, keep=True)[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    drain(machine)
    return machine, begun


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_counts_and_all_that_is_stored_are_those_of_single_steps_and_of_the_reference(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    call = native.ChainCall.run

    def counted(self: native.ChainCall, *args: Any) -> Any:
        calls.append(len(self.rows))
        return call(self, *args)

    monkeypatch.setattr(native.ChainCall, "run", counted)
    single, several = run(kind, 1, dtype), run(kind, 8, dtype)
    assert calls
    assert several[0].stats.failed_forwards == 0
    assert 8 < single[0].stats.accepted < single[0].stats.drafted - 8
    monkeypatch.setattr(continuous, "decode_chains", chain_steps.decode_by_forwards)
    reference = run(kind, 8, dtype)
    for other in (several, reference):
        machines, kept = zip(single, other, strict=True)
        expect_same(machines, kept)


@pytest.mark.parametrize("kind", ["draft model", "eagle3", "mtp"])
def test_neither_threads_nor_pages_nor_the_number_of_steps_matter(kind: str) -> None:
    before, expected = torch.get_num_threads(), run(kind, 8)
    try:
        for num_threads, page_size, num_steps in ((1, 1, 3), (3, 16, 50)):
            torch.set_num_threads(num_threads)
            limits = {"page_size": page_size, "pages": 512 // page_size}
            _, found = run(kind, num_steps, **limits)
            for sequence, other in zip(found, expected[1], strict=True):
                assert sequence.tokens == other.tokens
                assert sequence.drafted_steps == other.drafted_steps
                assert sequence.metrics == other.metrics
    finally:
        torch.set_num_threads(before)


def test_a_prompt_is_read_by_the_draft_network_in_parts() -> None:
    """What it has not read of a long prompt is more than one forward takes."""
    single, several = (run("eagle3", size, max_num_tokens=20) for size in (1, 8))
    expect_same(*zip(single, several, strict=True))


def test_a_token_outside_the_drafters_vocabulary_ends_its_drafts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> Any:
        raise IndexError("token id 100 is outside the vocabulary")

    expected = run("draft model", 8)
    monkeypatch.setattr(native.ChainCall, "run", refuse)
    machine, kept = run("draft model", 8)
    assert [each.tokens for each in kept] == [each.tokens for each in expected[1]]
    assert machine.stats.failed_forwards > 0
    assert machine.stats.draft_failures == 0
    assert not math.isnan(machine.stats.draft_seconds)
