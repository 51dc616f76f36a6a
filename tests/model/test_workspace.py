"""Attention in a workspace equals attention over pages; what is stored is what was asked for."""

from __future__ import annotations

import pytest
import torch

from attention_cases import CASES, Case, storage_for, tables
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import PageTable
from forethought.model.attention.base import PagedPass, Scoring
from forethought.model.attention.workspace import MAX_CATCH_UP, KvWorkspace, catch_up_start
from forethought.model.batch import Batch, Row
from forethought.reference.engine import ReferenceAttention

# Behind each prefix two known tokens, then a tree: three children of the last one, and behind them
# a child of the first and one of the third.
PARENTS = (-1, 0, 1, 1, 1, 2, 4)
LEVELS = [slice(0, 2), slice(2, 5), slice(5, 7)]
SEEN = [
    torch.eye(3, dtype=torch.bool),
    torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 0, 1]], dtype=torch.bool),
]
SIZE = len(PARENTS)


def drawn(case: Case, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of SIZE tokens of each row, ``[rows, SIZE, ...]``."""
    source = torch.Generator().manual_seed(3)
    shape = case.shape
    sizes = [(case.heads, shape.key_dim), (shape.kv_heads, shape.key_dim)]
    sizes.append((shape.kv_heads, shape.value_dim))
    q, k, v = (torch.randn(rows, SIZE, *size, generator=source) for size in sizes)
    return q, k, v


def scoring(case: Case) -> Scoring:
    sinks = torch.linspace(-1, 1, case.heads) if case.sinks else None
    return Scoring(0.4, case.softcap, sinks)


def over_pages(case: Case, storage: KvStorage, made: list[PageTable]) -> torch.Tensor:
    """``[rows, SIZE, heads, dim]`` by the reference, all levels at once."""
    q, k, v = (x.flatten(0, 1) for x in drawn(case, len(made)))
    rows = [Row([0] * SIZE, table.length - SIZE, table, PARENTS) for table in made]
    forward_pass = PagedPass(Batch.build(rows), storage, ReferenceAttention(), [case.window])
    found = forward_pass.attend(0, q, k, v, scoring(case))
    return found.view(len(made), SIZE, *found.shape[1:])


def in_workspace(case: Case, workspace: KvWorkspace, rows: int) -> torch.Tensor:
    """The same, level by level."""
    found = []
    for number, level in enumerate(LEVELS):
        q, k, v = (x[:, level].flatten(0, 1) for x in drawn(case, rows))
        ids = torch.zeros(len(q), dtype=torch.int64)
        if number == 0:
            forward_pass = workspace.chain(ids, ids)
        else:
            seen = SEEN[number - 1].expand(rows, -1, -1)
            forward_pass = workspace.level(ids, ids, number + 1, seen)
        part = forward_pass.attend(0, q, k, v, scoring(case))
        found.append(part.view(rows, -1, *part.shape[1:]))
    return torch.cat(found, 1)


@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("lengths", [[11], [16], [9, 30, 2], [5, 5]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_tree_attends_in_a_workspace_as_over_pages(
    name: str, lengths: list[int], page_size: int, scattered: bool
) -> None:
    case, num_pages = CASES[name], 160 // page_size
    made = tables(PagePool(num_pages, page_size), [n + SIZE for n in lengths], scattered)
    exact = over_pages(case, storage_for(case, num_pages, page_size), made)
    storage = storage_for(case, num_pages, page_size)
    workspace = KvWorkspace(storage, made, lengths, SIZE, [case.window])
    found = in_workspace(case, workspace, len(made))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_a_pass_over_a_chain_wants_the_logits_of_the_last_tokens_only() -> None:
    storage = storage_for(CASES["plain"], 20, 3)
    made = tables(PagePool(20, 3), [9, 12], scattered=False)
    workspace = KvWorkspace(storage, made, [4, 6], 5)
    ids = torch.arange(6)
    assert workspace.chain(ids, ids).batch.logit_index.tolist() == [2, 5]
    assert workspace.level(ids[:4], ids[:4], 3).batch.logit_index.tolist() == [0, 1, 2, 3]


def test_stored_tokens_are_in_the_slots_behind_the_prefixes_and_nothing_else_changes() -> None:
    case = CASES["grouped"]
    storage, before = storage_for(case, 20, 3), storage_for(case, 20, 3)
    made = tables(PagePool(20, 3), [9, 12, 8], scattered=True)
    workspace = KvWorkspace(storage, made, [4, 6, 5], SIZE)
    in_workspace(case, workspace, 3)
    assert torch.equal(storage.keys[0], before.keys[0]), "nothing is stored unasked"
    workspace.store([2, 4, 1])
    _, k, v = drawn(case, 3)
    for row, (table, start, count) in enumerate(zip(made, [4, 6, 5], [2, 4, 1], strict=True)):
        slots = table.slots(start, start + count)
        for stored, given, old in (
            (storage.keys[0], k, before.keys[0]),
            (storage.values[0], v, before.values[0]),
        ):
            assert torch.equal(stored[slots], given[row, :count])
            old[slots] = stored[slots]
    assert torch.equal(storage.keys[0], before.keys[0])
    assert torch.equal(storage.values[0], before.values[0])


def test_sequences_that_are_left_out_do_not_change_the_others() -> None:
    case = CASES["window"]
    made = tables(PagePool(20, 3), [9, 12, 8], scattered=True)
    storage = storage_for(case, 20, 3)
    ids = torch.zeros(3, dtype=torch.int64)
    found = []
    for rows in (3, 2):
        workspace = KvWorkspace(storage, made, [4, 6, 5], 2, [case.window])
        q, k, v = (x[:, 0] for x in drawn(case, 3))
        workspace.chain(ids, ids).attend(0, q, k, v, scoring(case))
        workspace.keep(rows)
        q, k, v = (x[:rows, 1] for x in drawn(case, 3))
        found.append(workspace.chain(ids[:rows], ids[:rows]).attend(0, q, k, v, scoring(case)))
    torch.testing.assert_close(found[0][:2], found[1])


@pytest.mark.parametrize("lengths", [[7], [7, 4]], ids=str)
def test_positions_before_the_first_one_seen_do_not_matter(lengths: list[int]) -> None:
    case = CASES["grouped"]
    made = tables(PagePool(20, 3), [length + SIZE for length in lengths], scattered=False)
    found = []
    for noise in (0.0, 9.0):
        storage = storage_for(case, 20, 3)
        for table in made:
            storage.keys[0][table.slots(0, 2)] += noise
        workspace = KvWorkspace(storage, made, lengths, SIZE, seen_from=2)
        found.append(in_workspace(case, workspace, len(made)))
    assert torch.equal(*found)


def test_layers_of_different_shapes_are_gathered_in_order() -> None:
    shapes = [LayerShape(2, 4, 4), LayerShape(1, 8, 2), LayerShape(2, 4, 4)]
    storage = KvStorage(shapes, 10, 3)
    for stored in (*storage.keys, *storage.values):
        stored.copy_(torch.randn(stored.shape))
    keys, values = storage.gather(torch.tensor([4, 1]))
    slots = [12, 13, 14, 3, 4, 5]
    for layer in range(3):
        assert torch.equal(keys[layer], storage.keys[layer][slots])
        assert torch.equal(values[layer], storage.values[layer][slots])


@pytest.mark.parametrize(
    ("starts", "stops", "first", "same"),
    [
        ([7], [9], 0, [7]),
        ([7, 20], [9, 25], 1, [4, 20]),
        ([7, 20], [9, 36], 0, None),  # the shorter one has not so many
        ([0], [MAX_CATCH_UP], 0, [0]),
        ([0], [MAX_CATCH_UP + 1], 0, None),
        ([1], [9], 1, [1]),
        ([0], [9], 1, None),
    ],
)
def test_sequences_catch_up_by_the_same_number_of_tokens(
    starts: list[int], stops: list[int], first: int, same: list[int] | None
) -> None:
    assert catch_up_start(starts, stops, first) == same
