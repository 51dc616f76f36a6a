"""Shards of a model: together they compute what the whole model does. Ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from forethought.backends.tensor_parallel.shard import Shard, refusal
from forethought.backends.tensor_parallel.sharded import connect
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM
from forethought.model.hidden_states import FINAL
from forethought.model.llama.network import FusedNetwork
from models import prompts, tiny

PROMPT = prompts((12,))[0]
TREE = (-1, 0, 1, 1, 0, 4)
CASES = [
    ("llama", 2),
    ("llama_mha", 4),
    ("llama_tied_biased", 2),
    ("mistral", 2),
    ("qwen2", 2),
    ("qwen3", 2),
]


class ThreadSums:
    """The sums of ranks that are threads, each with an object of its own.

    Args:
        parts: of all ranks, shared by them.
        rank: whose object it is.
        barrier: of all ranks.
    """

    def __init__(self, parts: list[Tensor], rank: int, barrier: threading.Barrier) -> None:
        self.parts, self.rank, self.barrier = parts, rank, barrier
        self.num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        self.parts[self.rank] = x
        self.barrier.wait()
        total = torch.stack(self.parts).sum(0)
        self.barrier.wait()
        return x.copy_(total)


def on_threads(size: int, compute: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(compute, range(size)))


def forwards(lm: CausalLM) -> list[Tensor]:
    """Logits and hidden states: a prefill with all and with no logits, then a tree."""
    storage = KvStorage(lm.layer_shapes, 16, 4, lm.dtype)
    table = PageTable(PagePool(16, 4))
    table.append(7)
    first = Row(PROMPT[:7], 0, table, logits_from=7)
    found = [lm.forward(Batch.build([first]), storage)]
    table.append(5)
    second = Row(PROMPT[7:], 7, table)
    layer_ids = frozenset({0, 1, lm.num_layers, FINAL})
    logits, states = lm.forward_with_hidden_states(Batch.build([second]), storage, layer_ids)
    found += [logits, *(states[layer_id] for layer_id in sorted(layer_ids))]
    table.append(len(TREE))
    tree = Row([5, 6, 7, 8, 9, 10], 12, table, TREE)
    return [*found, lm.forward(Batch.build([tree]), storage)]


@pytest.mark.parametrize(("architecture", "size"), CASES)
def test_the_shards_together_compute_what_the_whole_model_does(
    architecture: str, size: int
) -> None:
    path = tiny(architecture)
    whole = loader.load(path, dtype="float32")
    loaded = [loader.load(path, dtype="float32", shard=Shard(rank, size)) for rank in range(size)]
    parts, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    sums = [ThreadSums(parts, rank, barrier) for rank in range(size)]
    for lm, own in zip(loaded, sums, strict=True):
        assert isinstance(lm.network, FusedNetwork)
        assert [shape.kv_heads for shape in lm.layer_shapes] == [
            shape.kv_heads // size for shape in whole.layer_shapes
        ]
        connect(lm.network, own)
    expected = forwards(whole)
    for found in on_threads(size, lambda rank: forwards(loaded[rank])):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert {own.num_sums for own in sums} == {3 * 2 * whole.num_layers}


def test_a_shard_keeps_no_weight_of_the_others() -> None:
    path = tiny("qwen3")
    whole, part = loader.load(path), loader.load(path, shard=Shard(1, 2))
    embeddings = 101 * 32
    sizes = [sum(weight.num_elements for weight in lm.traits.weights) for lm in (whole, part)]
    assert (sizes[1] - embeddings) * 2 == sizes[0] - embeddings
    assert isinstance(part.network, FusedNetwork)
    out = part.network.layers[0][1].out
    assert out.weight.untyped_storage().nbytes() == out.weight.nbytes  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("architecture", "size", "why"),
    [
        ("llama", 4, "2 KV heads"),
        ("llama_mha", 8, "4 query heads"),
        ("llama_mqa", 2, "1 KV heads"),
        ("gemma3", 2, "no fused forward"),
        ("qwen3_moe", 2, "no fused forward"),
        ("llama", 2, None),
    ],
)
def test_what_cannot_be_cut_is_refused_by_its_config(
    architecture: str, size: int, why: str | None
) -> None:
    found = refusal(AutoConfig.from_pretrained(tiny(architecture)), size)
    assert found is None if why is None else why in str(found)


def test_an_inner_width_that_does_not_divide_is_refused() -> None:
    config = AutoConfig.from_pretrained(tiny("llama"))
    config.intermediate_size = 49
    assert "49 as the MLP's inner width" in str(refusal(config, 2))
