"""Forwards by graphs generate what eager ones do, token for token, with whatever is in the padding.

The graph is one without CUDA (``fake_graph.py``); ``tests/gpu`` has the same with real ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

import adapters
import mtp_modules
from drafts import recording
from eagle_heads import random_head
from engines import GREEDY, drain, engine_over, outputs
from fake_graph import FakeGraph
from forethought.backends.cuda.draft_graph import DraftGraphs
from forethought.backends.cuda.graph_runner import GraphRunner
from forethought.backends.cuda.graphs import Bucket, capacity_of, padded_tokens
from forethought.backends.cuda.module_graphs import ModuleGraphs, drafted_sources
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
)
from forethought.config.sampling import SpeculationParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence
from forethought.kv.pool import PagePool
from forethought.kv.staging import StaticBuffer
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.adapter import read_adapter
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM
from forethought.model.graph_capturer import GraphCapturer
from models import prompts, save_random, tiny

PAGED = "forethought.backends.cuda.paged:PagedAttention"
PROMPTS = prompts((3, 17, 9, 30, 1))


@functools.cache
def paged(architecture: str = "llama") -> CausalLM:
    return loader.load(tiny(architecture), dtype="float32", attention=PAGED, forward="torch")


DRAFTERS: dict[str, Callable[[], list[DecodingBaseConfig]]] = {
    "plain": list,
    "ngram": lambda: [NGramDecodingConfig(max_draft_len=3)],
    "eagle3": lambda: [
        EagleDecodingConfig(max_draft_len=4, speculative_model=random_head("eagle3"))
    ],
    "mtp": lambda: [MTPDecodingConfig(max_draft_len=3, speculative_model=mtp_modules.saved())],
    "mtp modules": lambda: [
        MTPDecodingConfig(
            num_nextn_predict_layers=2,
            max_draft_len=4,
            speculative_model=mtp_modules.saved(count=2),
            synthetic_acceptance=0.7,  # entries of accepted tokens are read, too
        )
    ],
    "tree": lambda: [
        EagleDecodingConfig(eagle_choices=PATHS, speculative_model=random_head("eagle3"))
    ],
    "draft model": lambda: [
        DraftTargetDecodingConfig(
            max_draft_len=4, speculative_model=tiny("mistral", seed=2), synthetic_acceptance=0.7
        )
    ],
    "tree of a draft model": lambda: [
        DraftTargetDecodingConfig(draft_choices=PATHS, speculative_model=tiny("llama", seed=2))
    ],
    "dynamic tree": lambda: [dynamic_tree(3, 10)],
    "dynamic tree of 90 nodes": lambda: [
        dynamic_tree(24, 90)
    ],  # more than there are bits in a word
}


def dynamic_tree(width: int, num_nodes: int) -> EagleDecodingConfig:
    return EagleDecodingConfig(
        max_draft_len=4,
        use_dynamic_tree=True,
        dynamic_tree_max_topK=width,
        max_total_draft_tokens=num_nodes,
        speculative_model=random_head("eagle3"),
    )


PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 1, 0], [1, 0, 0], [2, 0, 0]]
PATHS += [[0, 1, 0, 0], [2, 0, 0, 0], [2, 0, 0, 1]]


def generated(machine: Engine, **changes: Any) -> list[Sequence]:
    """Five requests that come and go at different times, greedy ones and sampled ones."""
    sequences = []
    for number, prompt in enumerate(PROMPTS):
        params = GREEDY.replace(max_tokens=8 + 3 * number, **changes)
        if number % 2:
            params = params.replace(temperature=0.8, seed=number)
        sequences += machine.add(prompt, params)
        machine.step()
    drain(machine)
    return sequences


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step does not write into the inputs of a graph is nonsense, not that of the last."""
    fill = StaticBuffer.fill

    def poison(self: StaticBuffer, values: Any) -> None:
        self._device.fill_(10**12)
        fill(self, values)

    monkeypatch.setattr(StaticBuffer, "fill", poison)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("name", "architecture"),
    [*((name, "llama") for name in DRAFTERS), ("ngram", "mistral"), ("plain", "gpt_oss")],
)
def test_graphs_generate_what_eager_forwards_do(name: str, architecture: str) -> None:
    drafters = DRAFTERS[name]()
    eager = engine_over(paged(architecture), speculative=drafters, page_size=4)
    expected = generated(eager)
    graphs = GraphCapturer(FakeGraph)
    machine = engine_over(paged(architecture), speculative=drafters, page_size=4, graphs=graphs)
    found = generated(machine)
    assert outputs(found) == outputs(expected)
    assert machine.stats.accepted == eager.stats.accepted
    assert machine.stats.drafted == eager.stats.drafted
    assert machine.stats.draft_failures == machine.stats.failed_forwards == 0
    assert graphs.num_replays > machine.stats.steps / 2
    assert machine.pool.in_use == 0


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "dynamic tree of 90 nodes" else ())
        for name in DRAFTERS
        if name not in ("plain", "ngram")
    ],
)
def test_drafts_by_graphs_are_those_of_eager_forwards(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node for node, for requests with drafts of different lengths."""
    found, by_graphs = [], []
    kind = ModuleGraphs if name == "mtp modules" else DraftGraphs
    draft: Callable[..., torch.Tensor | None] = kind.draft

    def watched(*args: Any) -> torch.Tensor | None:
        by_graphs.append(draft(*args))
        return by_graphs[-1]

    monkeypatch.setattr(kind, "draft", watched)
    for graphs in (None, GraphCapturer(FakeGraph)):
        machine = engine_over(paged(), speculative=DRAFTERS[name](), page_size=4, graphs=graphs)
        with recording(machine) as drafts:
            for number, prompt in enumerate((PROMPTS[4], *PROMPTS[:3])):
                limit = SpeculationParams(max_draft_len=1 + (number + 3) % 4)
                machine.add(prompt, GREEDY.replace(speculation=limit))
                machine.step()
            drain(machine)
        found.append(drafts)
        assert machine.stats.draft_failures == 0
    assert found[0] == found[1]
    assert len({len(draft.drafted) for draft in found[0]}) > 1
    made = [each is not None for each in by_graphs]
    assert made.count(False) < len(PROMPTS) < made.count(True)


def test_a_row_with_fewer_tokens_than_levels_reads_those_drafted_last() -> None:
    """Of MTP modules: tokens are numbered level by level, 8 rows each; -1: a known one."""
    assert drafted_sources([1, 2, 4], 3, 8) == [16, 9, 17, -1, 2, 10, 18]
    assert drafted_sources([2], 1, 1) == [-1, 0]


@pytest.mark.usefixtures("poisoned")
def test_a_context_that_outgrows_its_bucket_moves_to_the_next_one(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny("llama"), max_position_embeddings=1024)
    save_random(config, tmp_path)
    lm = loader.load(tmp_path, dtype="float32", attention=PAGED, forward="torch")
    prompt, params = prompts((250,))[0], GREEDY.replace(max_tokens=20)
    found = []
    for graphs in (None, GraphCapturer(FakeGraph)):
        machine = engine_over(
            lm, pages=100, page_size=8, max_length=600, max_num_tokens=300, graphs=graphs
        )
        found.append(machine.add(prompt, params))
        drain(machine)
    assert outputs(found[0]) == outputs(found[1])
    assert graphs is not None
    assert graphs.num_graphs == 2
    assert graphs.num_replays == 19


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], Bucket(1, 1, 256)),
        ([1, 1, 1], Bucket(4, 1, 256)),
        ([5, 2], Bucket(8, 8, 256)),
        ([9, 9, 9], Bucket(32, 16, 256)),
        ([1] * 65, Bucket(80, 1, 256)),
        ([65], Bucket(80, 16, 256)),
        ([30] * 4, None),  # more than 100 tokens
    ],
)
def test_rows_are_padded_to_the_smallest_bucket_that_holds_them(
    sizes: list[int], expected: Bucket | None
) -> None:
    pool, rows = PagePool(100, 16), []
    for size in sizes:
        table = PageTable(pool)
        table.append(size)
        rows.append(Row([1] * size, 0, table))
    assert Bucket.of(rows, 100) == expected


def test_at_most_an_eighth_of_a_large_bucket_is_padding() -> None:
    for number in range(1, 300):
        padded = padded_tokens(number)
        assert number <= padded <= max(2 * number, 8)
        assert number < 64 or padded < number * 1.25
        assert padded_tokens(padded) == padded
    assert [capacity_of(n) for n in (1, 256, 257, 5000)] == [256, 256, 1024, 16384]


def test_where_nothing_can_be_captured_the_engine_goes_on_eagerly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(compute: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = generated(engine_over(paged()))
    graphs = GraphCapturer(refuse)
    machine = engine_over(paged(), graphs=graphs)
    assert outputs(generated(machine)) == outputs(expected)
    assert machine.stats.failed_forwards == graphs.num_replays == 0
    assert caplog.text.count("no CUDA graph could be captured") == 1


def test_shapes_beyond_the_number_of_graphs_are_computed_eagerly() -> None:
    expected = generated(engine_over(paged()))
    graphs = GraphCapturer(FakeGraph, max_graphs=1)
    assert outputs(generated(engine_over(paged(), graphs=graphs))) == outputs(expected)
    assert graphs.num_graphs == 1
    assert graphs.num_replays > 0


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "name", ["plain", "draft model", pytest.param("eagle3", marks=pytest.mark.slow)]
)
def test_rows_with_adapters_are_computed_eagerly_and_others_by_graphs(name: str) -> None:
    path = adapters.adapter(adapters.new_directory(), tiny("llama"))
    placed = paged().place(read_adapter("a", path))
    graphs, generations = GraphCapturer(FakeGraph), list[list[list[int]]]()
    for capturer in (None, graphs):
        machine = engine_over(paged(), speculative=DRAFTERS[name](), page_size=4, graphs=capturer)
        machine.num_decode_steps = 4
        machine.adapters.add(placed)
        generations.append(outputs(generated(machine, adapter="a")))
        num_replays = graphs.num_replays
        outputs(generated(machine))
    assert generations[0] == generations[1] != outputs(generated(engine_over(paged())))
    assert graphs.num_replays > num_replays
    assert machine.stats.failed_forwards == 0


def test_halves_of_a_forward_that_failed_keep_their_own_logits() -> None:
    """A graph would overwrite those of the half before."""
    expected = generated(engine_over(paged()))
    machine = engine_over(paged(), graphs=GraphCapturer(FakeGraph))
    forward, calls = machine.runner.forward, itertools.count()

    def failing(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        if next(calls) % 3 == 1:
            raise RuntimeError("once")
        return logits

    machine.runner.forward = failing  # type: ignore[method-assign]
    assert outputs(generated(machine)) == outputs(expected)
    assert machine.stats.failed_forwards > 3
    assert machine.stats.failures == 0


def test_a_capture_at_the_start_writes_to_no_page() -> None:
    lm = paged("llama_tied_biased")  # its keys are nowhere zero
    storage = KvStorage(lm.layer_shapes, 4, 4, lm.dtype, has_scratch_page=True)
    runner = GraphRunner(lm, storage, GraphCapturer(FakeGraph))
    runner.prepare()
    assert runner.graphs.num_graphs == 1
    for tensor in (*storage.keys, *storage.values):
        assert not tensor[: storage.scratch_slot].any()
        assert tensor[storage.scratch_slot].any()


def test_what_a_replay_does_not_write_keeps_no_value_of_the_capture() -> None:
    """The fake graph itself: frozen numbers, the same memory, poison in what it has made."""
    x, factor = torch.ones(3), 2.0

    def compute() -> torch.Tensor:
        return (x * factor).view(3, 1) + torch.arange(3.0)

    with torch.inference_mode():
        graph = FakeGraph(compute)
    factor = 100.0
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert graph.output.tolist() == [[2.0, 3.0, 4.0], [4.0, 5.0, 6.0], [6.0, 7.0, 8.0]]


def test_a_static_buffer_holds_its_defaults_behind_what_is_written() -> None:
    defaults = {"a": np.arange(3), "b": np.full((2, 2), 7), "c": np.zeros((3, 2), np.int64)}
    buffer = StaticBuffer(defaults, "cpu")
    tensors = buffer.tensors
    buffer.fill({"a": [9], "b": np.array([[1]]), "c": np.array([[4], [5]])})
    assert [tensors[name].tolist() for name in "abc"] == [
        [9, 1, 2],
        [[1, 7], [7, 7]],
        [[4, 0], [5, 0], [0, 0]],
    ]
    buffer.fill({})
    assert tensors["a"].tolist() == [0, 1, 2]
    assert tensors["b"].tolist() == [[7, 7], [7, 7]]
    with pytest.raises(AssertionError):
        buffer.fill({"a": [1, 2, 3, 4]})
