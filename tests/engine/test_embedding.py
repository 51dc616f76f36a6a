"""Embeddings by the engine's weights, compared with the hidden states of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import adapters
from engines import GREEDY, drain, engine, expect_empty, outputs
from forethought.engine.embedding import MAX_PASS_TOKENS, EmbeddingPass, Pooling, groups_of
from forethought.errors import (
    ContextLengthError,
    ModelError,
    ParameterError,
    UnknownNameError,
)
from forethought.kv.storage import KvStorage
from forethought.model.adapter import read_adapter
from models import ARCHITECTURES, RECURRENT, prompts, tiny, transformers_model

ROWS = prompts()
QUICK = ("llama", "mistral", "gpt2", "qwen2_moe", "qwen3_5")
FAMILIES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in (*ARCHITECTURES, *RECURRENT)
]


def pooled(architecture: str, rows: Sequence[Sequence[int]], pooling: Pooling) -> Tensor:
    """float32 [R, hidden], of length 1, as transformers computes them one by one."""
    decoder: Any = transformers_model(tiny(architecture)).get_decoder()
    vectors = []
    with torch.inference_mode():
        for row in rows:
            states = decoder(torch.tensor([row]), use_cache=False).last_hidden_state[0]
            vector = {"mean": states.mean(0), "last": states[-1], "first": states[0]}[pooling]
            vectors.append(vector)
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


def embedded(machine: Any, rows: Sequence[Sequence[int]], *how: Any, max_tokens: int) -> Tensor:
    embedding_pass = EmbeddingPass(machine.runner, rows, *how, max_tokens=max_tokens)
    sizes = []
    while not embedding_pass.has_ended:
        sizes.append(embedding_pass.advance())
    assert max(sizes) <= max_tokens
    assert sum(sizes) == sum(map(len, rows))
    return embedding_pass.result()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_embeddings_are_the_means_of_the_hidden_states_of_transformers(architecture: str) -> None:
    machine = engine(architecture)
    result = embedded(machine, ROWS, "mean", max_tokens=64)
    torch.testing.assert_close(result, pooled(architecture, ROWS, "mean"), atol=2e-5, rtol=1e-4)
    expect_empty(machine)


@pytest.mark.parametrize("max_tokens", [1, 3, 7, 30])
@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
@pytest.mark.parametrize("architecture", ["mistral", "qwen3_5"])
def test_rows_that_are_cut_into_several_forwards_have_the_same_embedding(
    architecture: str, pooling: Pooling, max_tokens: int
) -> None:
    result = embedded(engine(architecture), ROWS, pooling, max_tokens=max_tokens)
    torch.testing.assert_close(result, pooled(architecture, ROWS, pooling), atol=2e-5, rtol=1e-4)


def test_dimensions_are_the_first_numbers_and_are_normalised_again() -> None:
    machine = engine("llama")
    embedding_pass = machine.embedding_pass(ROWS, "last", None, 5)
    while not embedding_pass.has_ended:
        machine.advance(embedding_pass)
    first = pooled("llama", ROWS, "last")[:, :5]
    expected = torch.nn.functional.normalize(first, dim=-1)
    torch.testing.assert_close(embedding_pass.result(), expected, atol=2e-5, rtol=1e-4)
    assert machine.stats.embedded == sum(map(len, ROWS))
    for number in (0, machine.runner.lm.hidden_size + 1):
        with pytest.raises(ParameterError, match="invalid dimensions"):
            machine.embedding_pass(ROWS, "last", None, number)


def test_generations_between_the_forwards_of_a_pass_are_not_changed() -> None:
    machine = engine("llama", pages=12)
    alone = machine.add(ROWS[3], GREEDY)
    drain(machine)
    samples = machine.add(ROWS[3], GREEDY)
    embedding_pass = EmbeddingPass(machine.runner, ROWS, "mean", max_tokens=5)
    while machine.has_work or not embedding_pass.has_ended:
        machine.step()
        if not embedding_pass.has_ended:
            machine.advance(embedding_pass)
        machine.check_integrity()
    assert outputs(samples) == outputs(alone)
    expected = pooled("llama", ROWS, "mean")
    torch.testing.assert_close(embedding_pass.result(), expected, atol=2e-5, rtol=1e-4)
    expect_empty(machine)


def test_an_adapter_changes_the_embedding_of_all_rows() -> None:
    machine = engine("llama")
    directory = adapters.adapter(adapters.new_directory() / "sql", tiny("llama"))
    machine.add_adapter(machine.place_adapter(read_adapter("sql", directory)))
    plain, adapted = (
        embedded(machine, ROWS, "last", max_tokens=64),
        computed(machine, machine.embedding_pass(ROWS, "last", "sql")),
    )
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in zip(plain, adapted, strict=True))
    with pytest.raises(UnknownNameError, match="adapter"):
        machine.embedding_pass(ROWS, "last", "other")


def computed(machine: Any, embedding_pass: EmbeddingPass) -> Tensor:
    while not embedding_pass.has_ended:
        machine.advance(embedding_pass)
    return embedding_pass.result()


def test_what_cannot_be_embedded_is_refused() -> None:
    machine = engine("llama", max_length=20)
    machine.check_embedded([5] * 20)
    with pytest.raises(ParameterError, match="empty input"):
        machine.check_embedded([])
    with pytest.raises(ParameterError, match="token id 10000 in input"):
        machine.check_embedded([5, 10_000])
    with pytest.raises(ContextLengthError, match="21 tokens"):
        machine.check_embedded([5] * 21)


def test_a_model_over_several_ranks_is_refused_before_anything_is_computed() -> None:
    machine = engine("llama")

    def refuse(num_pages: int) -> KvStorage:
        raise ModelError("a model over several ranks computes in its KV cache alone")

    machine.runner.scratch_storage = refuse  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="several ranks"):
        machine.embedding_pass(ROWS, "mean")


def test_groups_of_rows_are_bounded_and_keep_the_order() -> None:
    rows = [[1] * size for size in (1000, 1000, 100, MAX_PASS_TOKENS + 1, 5, 6)]
    groups = groups_of(rows)
    assert [[len(row) for row in group] for group in groups] == [
        [1000, 1000],
        [100],
        [MAX_PASS_TOKENS + 1],
        [5, 6],
    ]
