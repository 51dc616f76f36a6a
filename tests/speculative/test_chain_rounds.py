"""Steps with chain drafts that a GPU makes without a wait: they give what single steps do.

Attention is the reference of the kernels, and graphs are fake ones (``fake_graph.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chain_drafters import KINDS, few_tokens
from engines import drain, engine_over
from fake_graph import FakeGraph
from forethought.backends.cuda.chain_rounds import (
    ChainRounds,
    PlacedBatch,
    Places,
    next_known,
)
from forethought.backends.cuda.graphs import Bucket, StaticBatch, capacity_of
from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import continuous
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence
from forethought.kv.pool import PagePool
from forethought.kv.staging import StaticBuffer
from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.batch import PackedRows, Row
from forethought.model.causal_lm import CausalLM
from forethought.model.graph_capturer import GraphCapturer
from forethought.model.sampling import NO_TOKEN
from forethought.speculative.drafters.eagle import EagleDrafter
from forethought.speculative.step_runner import SingleSteps
from forethought.speculative.verify.accept import num_accepted
from generations import COUNTS
from generations import facts as all_facts
from models import prompts
from turns import by_turns

PAGED = "forethought.backends.cuda.paged:PagedAttention"
PROMPTS = prompts((9, 7, 33, 6, 12))
LENGTHS = (30, 11, 24, 17, 3)
NUMBERS = ("keys", "draft keys")
"""Facts that are equal up to rounding: forwards of other shapes sum in another order."""


def itself() -> DecodingBaseConfig:
    """The target as its own draft model: all drafted tokens are accepted."""
    return DraftTargetDecodingConfig(max_draft_len=4, speculative_model=few_tokens("llama"))


ALL_KINDS: dict[str, tuple[str, Callable[[], DecodingBaseConfig]]] = {
    **KINDS,
    "all accepted": ("llama", itself),
}


@functools.cache
def paged(architecture: str) -> CausalLM:
    path = few_tokens(architecture)
    return loader.load(path, dtype="float32", attention=PAGED, forward="torch")


def engine_with(
    kind: str, num_steps: int, max_graphs: int = 99, **limits: Any
) -> tuple[Engine, GraphCapturer]:
    """An engine whose rounds are graphs if there may be as many."""
    architecture, configure = ALL_KINDS[kind]
    settings = {"pages": 96, "page_size": 4, "max_num_tokens": 64, **limits}
    graphs = GraphCapturer(FakeGraph, max_graphs)
    machine = engine_over(paged(architecture), speculative=[configure()], graphs=graphs, **settings)
    machine.num_decode_steps = num_steps
    for storage in (machine.runner.storage, *(x.storage for x in machine.speculation.draft_caches)):
        for layer in (*storage.keys, *storage.values):  # which nothing may read
            layer[storage.scratch_slot :] = torch.nan
    return machine, graphs


def run(
    kind: str, num_steps: int, *, params: SamplingParams | None = None, **limits: Any
) -> tuple[Engine, list[Sequence]]:
    """Requests of several lengths, which accept differently and end at different times."""
    machine, _ = engine_with(kind, num_steps, **limits)
    params = params or SamplingParams(temperature=0.0, ignore_eos=True)
    begun = [
        machine.add(prompt, params.replace(max_tokens=size), keep=True)[0]
        for prompt, size in zip(PROMPTS, LENGTHS, strict=True)
    ]
    drain(machine)
    assert machine.stats.failed_forwards == machine.stats.draft_failures == 0
    return machine, begun


Run = tuple[Engine, list[Sequence]]


def expect_same(single: Run, several: Run) -> None:
    """The same tokens, counts and entries; steps behind the last end are made, too."""
    for pair in zip(single[1], several[1], strict=True):
        expected, found = (
            all_facts(machine, each)
            for machine, each in zip((single[0], several[0]), pair, strict=True)
        )
        for name in expected.keys() - {"computed"}:
            if name in NUMBERS:
                for layer, other in zip(found[name], expected[name], strict=True):
                    own = torch.tensor(layer), torch.tensor(other)
                    torch.testing.assert_close(*own, rtol=1e-4, atol=1e-4)
            else:
                assert found[name] == expected[name], name
    for name in set(COUNTS) - {"steps"}:
        assert getattr(several[0].stats, name) == getattr(single[0].stats, name), name
    for machine in (single[0], several[0]):
        machine.check_integrity()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and rounds of each call."""
    made, original = list[tuple[int, int]](), ChainRounds._run

    def counted(self: ChainRounds, rows: Any, num_rounds: int) -> Any:
        made.append((len(rows), num_rounds))
        return original(self, rows, num_rounds)

    monkeypatch.setattr(ChainRounds, "_run", counted)
    return made


@pytest.mark.parametrize("kind", by_turns([*ALL_KINDS], every=3))
def test_rounds_generate_and_store_what_single_steps_and_the_reference_do(
    kind: str, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    single = run(kind, 1)
    assert not calls
    several = run(kind, 8)
    assert calls[0] == (5, 8)
    assert single[0].stats.accepted > 8
    assert (single[0].stats.accepted < single[0].stats.drafted) == (kind != "all accepted")
    expect_same(single, several)
    monkeypatch.setattr(continuous, "step_runners", lambda has_graphs: (SingleSteps,))
    expect_same(several, run(kind, 8))


@pytest.mark.parametrize("kind", by_turns(["draft model", "eagle3", "all accepted"], every=2))
def test_neither_pages_nor_graphs_nor_padding_nor_the_number_of_rounds_matter(
    kind: str, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = StaticBuffer.fill

    def poisoned(self: StaticBuffer, values: Any) -> None:
        self._device.fill_(10**12)
        fill(self, values)

    single = run(kind, 1)
    monkeypatch.setattr(StaticBuffer, "fill", poisoned)
    for page_size, num_steps, max_graphs in ((1, 3, 99), (16, 50, 0), (16, 2, 99)):
        limits = {"page_size": page_size, "pages": 512 // page_size, "max_graphs": max_graphs}
        found = run(kind, num_steps, **limits)
        for sequence, other in zip(single[1], found[1], strict=True):
            assert other.tokens == sequence.tokens
            assert other.drafted_steps == sequence.drafted_steps
        assert found[0].stats.accepted == single[0].stats.accepted
        found[0].check_integrity()
    assert calls


@pytest.mark.parametrize("kind", ["draft model", "eagle3"])
def test_a_row_is_decoded_to_the_end_of_the_context(
    kind: str, calls: list[tuple[int, int]]
) -> None:
    """Drafts that reach behind it are computed, too, at its last position."""
    found = []
    for num_steps in (1, 8):
        limits = {"pages": 80, "page_size": 16, "max_length": 256, "max_num_tokens": 512}
        machine, _ = engine_with(kind, num_steps, **limits)
        params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        rows = [machine.add(each, params)[0] for each in prompts((220, 9))]
        drain(machine)
        machine.check_integrity()
        assert machine.stats.failed_forwards == 0
        found.append([each.tokens for each in rows])
    assert max(num_rounds for _, num_rounds in calls) == 8
    assert list(map(len, found[0])) == [256, 59]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["draft model", "eagle3"])
def test_a_row_ends_behind_a_token_that_says_so_and_others_go_on(
    kind: str, calls: list[tuple[int, int]]
) -> None:
    stop = run(kind, 1)[1][0].output[9]
    params = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=[stop])
    single = run(kind, 1, params=params)
    assert len({len(each.output) for each in single[1]}) > 2
    expect_same(single, run(kind, 8, params=params))
    assert calls


@pytest.mark.parametrize("kind", ["all accepted", "draft model", "eagle3"])
def test_drafts_of_unequal_lengths_and_rows_without_any_share_a_round(
    kind: str, calls: list[tuple[int, int]]
) -> None:
    lengths = (2, 4, 3 if kind == "eagle3" else 0, 1)
    found = []
    for num_steps in (1, 8):
        machine, _ = engine_with(kind, num_steps)
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        own = [
            SpeculationParams(max_draft_len=size) if size else SpeculationParams(enabled=False)
            for size in lengths
        ]
        rows = [
            machine.add(prompt, params.replace(speculation=each), keep=True)[0]
            for prompt, each in zip(PROMPTS, own, strict=False)
        ]
        drain(machine)
        assert machine.stats.failed_forwards == machine.stats.draft_failures == 0
        found.append((machine, rows))
    assert calls[0][0] == 4
    expect_same(*found)


def test_a_round_is_one_replay() -> None:
    machine, graphs = engine_with("eagle3", 8)
    own: list[GraphCapturer] = []
    split = graphs.split
    graphs.split = lambda size: own.append(split(size)) or own[-1]  # type: ignore[method-assign]
    machine.add(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    machine.step()
    before = graphs.num_replays
    machine.step()
    assert (own[-1].num_graphs, own[-1].num_replays) == (1, 8)
    assert graphs.num_replays == before
    drain(machine)
    machine.check_integrity()


def test_a_very_short_prompt_begins_with_single_steps(
    calls: list[tuple[int, int]],
) -> None:
    found = []
    for num_steps in (1, 8):
        machine, _ = engine_with("eagle3", num_steps)
        assert isinstance(machine.speculation.drafters[0].drafter, EagleDrafter)
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        row = machine.add(PROMPTS[0][:2], params)[0]
        machine.step()
        machine.step()
        assert not calls
        drain(machine)
        machine.check_integrity()
        found.append((row.tokens, row.drafted_steps))
    assert calls
    assert found[0] == found[1]


def test_accepted_tokens_and_those_that_are_read_next_are_those_of_plain_python() -> None:
    generator = torch.Generator().manual_seed(3)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randint(0, 2, size, generator=generator)

    for size, width in ((1, 2), (4, 2), (4, 5)):
        drafted, decoded, known = drawn(64, size), drawn(64, size + 1), drawn(64, width)
        decoded[::4, :size] = drafted[::4]
        decoded[::9, size // 2] = NO_TOKEN
        lens = torch.randint(0, size + 1, (64,), generator=generator)
        found = num_accepted(drafted, decoded, lens)
        following = next_known(known, decoded, found).tolist()
        for row, most in enumerate(lens.tolist()):
            count = 0
            while count < most and drafted[row, count] == decoded[row, count]:
                count += 1
            assert found[row] == count
            tokens = [*known[row].tolist(), *decoded[row, : count + 1].clamp(min=0).tolist()]
            assert following[row] == tokens[-width:]
        assert len(set(found.tolist())) == size + 1


@pytest.mark.parametrize("size", [1, 5])
def test_a_batch_placed_on_the_device_equals_the_host_s(size: int) -> None:
    """But for its tables, which reach further, and splits that a row may come to have."""
    pool, offset, num_rows, starts = PagePool(80, 16), 1, 4, (600, 9, 255)
    storage = KvStorage([LayerShape(1, 2, 2)], 80, 16, has_scratch_page=True)
    tables = [PageTable(pool) for _ in starts]
    for table, start in zip(tables, starts, strict=True):
        table.append(start + 90)
    capacity = capacity_of(max(starts) + 100)
    placed = PlacedBatch(num_rows, size, capacity, storage, offset=offset)
    placed.lay_out(tables, num_further=size + 1)
    limits = torch.tensor([*(table.length for table in tables), 0])
    roots, tokens = torch.tensor([*starts, 0]), torch.arange(num_rows * size).view(num_rows, size)
    for _ in range(3):  # of tables that do not change
        at = Places.of(roots, limits, torch.arange(size), placed.pages, 16)
        placed.place(tokens, at, limits > 0)
        rows = [
            Row(row.tolist(), start, table.prefix(start + size))
            for row, start, table in zip(tokens[:3], roots.tolist(), tables, strict=False)
        ]
        expected = StaticBatch(Bucket(num_rows * size, Bucket.tile_of(size), capacity), storage)
        expected.fill(PackedRows.of(rows, offset))
        for name in ("token_ids", "positions", "slots"):
            found, wanted = (each.tensors[name] for each in (placed.static, expected))
            assert found[: 3 * size].tolist() == wanted[: 3 * size].tolist(), name
        assert placed.static.tensors["slots"][3 * size :].eq(storage.scratch_slot).all()
        for name in ("rows", "tiles"):
            found, wanted = (each.tensors[name] for each in (placed.static, expected))
            assert found.tolist() == wanted.tolist(), name
        assert _splits(placed.static) == _splits(expected)
        roots[:3] += 7


def _splits(batch: StaticBatch) -> dict[int, int]:
    """Of each token: how many parts of its result are merged; 1 where there is one."""
    positions = batch.tensors["tokens"][:, 0].tolist()
    found = dict.fromkeys((token for token in range(len(positions))), 1)
    for token, count in batch.tensors["partials"].tolist():
        if count:
            found[token] = count
    return found


def test_tokens_after_the_end_of_a_row_are_not_stored() -> None:
    pages = torch.tensor([[7, 3], [2, 5], [1, 9]])
    roots, limits = torch.tensor([4, 8, 6]), torch.tensor([6, 6, 6])
    found = Places.of(roots, limits, torch.arange(-1, 3), pages, 4)
    assert found.exists.tolist() == [[True, True, True, False], [False] * 4, [False] * 4]
    assert found.slots[0].tolist() == [31, 12, 13, 13]
    assert found.inside[1].tolist() == [5, 5, 5, 5]
    assert found.positions[1].tolist() == [5, 6, 7, 8]
