"""Experts in a file: a network computes with them what it computes with all of them in memory."""

from __future__ import annotations

import os
from typing import Any

import pytest

import drafters
from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought.backends.cpu.expert_store import ExpertStore
from forethought.backends.cpu.network import NativeNetwork
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.engine.engine import Engine
from forethought.errors import LogitsError, ModelError
from forethought.model import loader
from models import prompts, tiny

PROMPTS = prompts((3, 17, 1, 30, 90))
NEW = 16
LAYERS = 3


def machine(
    architecture: str = "qwen3_moe", expert_bytes: int | None = None, **fields: Any
) -> Engine:
    """Of three layers with 4 experts each."""
    speculative = fields.pop("speculative", ())
    lm = loader.load(tiny(architecture), forward="native", expert_bytes=expert_bytes, **fields)
    return engine_over(lm, pages=80, max_num_tokens=40, speculative=speculative)


def store_of(engine: Engine) -> ExpertStore:
    network = engine.runner.lm.network
    assert isinstance(network, NativeNetwork)
    assert network.experts is not None
    return network.experts


def generated(engine: Engine) -> list[list[int]]:
    """Requests that come one after the other."""
    sequences = []
    for prompt in PROMPTS:
        sequences += engine.add(prompt, GREEDY.replace(max_tokens=NEW))
        engine.step()
    drain(engine)
    expect_empty(engine)
    return outputs(sequences)


def two_layers(**fields: Any) -> int:
    """Bytes of the experts of two layers, the least that is possible."""
    with pytest.raises(ModelError, match="is too little") as caught:
        machine(expert_bytes=1, **fields)
    gib = float(str(caught.value).rpartition("Give at least ")[2].split()[0])
    return int(gib * 2**30 * 1.01)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "w8a8", "dtype": "float32"},
    ],
    ids=["float32", "bfloat16", "int8", "w8a8"],
)
def test_tokens_are_those_with_all_experts_in_memory(
    architecture: str, fields: dict[str, Any]
) -> None:
    few = machine(architecture, two_layers(architecture=architecture, **fields), **fields)
    assert generated(few) == generated(machine(architecture, **fields))
    counts = store_of(few).counts
    assert counts.num_used > counts.num_present > 0


def test_experts_of_the_next_layer_are_read_ahead() -> None:
    """By a thread of their own, which a step of so small a model may leave behind."""
    engine = machine(expert_bytes=two_layers(dtype="float32"), dtype="float32")
    rounds = (generated(engine) for _ in range(100))
    assert any(store_of(engine).counts.num_read_ahead for _ in rounds)


def test_drafts_are_exact_with_experts_in_a_file() -> None:
    fields: dict[str, Any] = {"dtype": "float32"}
    plain = generated(machine(**fields))
    answers = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain, strict=True)}
    config = UserProvidedDecodingConfig(
        max_draft_len=4, max_total_draft_tokens=8, drafter=drafters.bush(answers)
    )
    engine = machine(expert_bytes=two_layers(**fields), speculative=[config], **fields)
    assert generated(engine) == plain
    assert engine.stats.accepted > 0


def test_with_memory_for_all_of_them_each_expert_is_read_once() -> None:
    engine = machine(expert_bytes=2**30, dtype="float32")
    generated(engine)
    counts, num_experts = store_of(engine).counts, 4 * LAYERS
    assert len(store_of(engine)) == num_experts
    num_waits = counts.num_used - counts.num_present  # for a read of the layer, or one ahead
    assert 0 < max(num_waits, counts.num_read_ahead) <= num_experts


def test_experts_that_cannot_be_read_fail_the_requests_that_choose_them() -> None:
    engine = machine(expert_bytes=two_layers(dtype="bfloat16"), dtype="bfloat16")
    [before] = engine.add(PROMPTS[1], GREEDY.replace(max_tokens=2))
    drain(engine)
    os.ftruncate(store_of(engine).descriptor, 0)
    [after] = engine.add(PROMPTS[4], GREEDY.replace(max_tokens=NEW))
    failures = [event.error for event in drain(engine) if event.sequence is after and event.error]
    assert isinstance(failures[0], LogitsError)
    assert len(before.output) == 2
    expect_empty(engine)


@pytest.mark.parametrize(
    ("architecture", "why"), [("llama", "it has none"), ("qwen3_5_moe", "does not run natively")]
)
def test_models_without_experts_that_run_natively_are_refused(architecture: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        loader.load(tiny(architecture), forward="auto", expert_bytes=2**20)
