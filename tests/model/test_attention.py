"""The fast backend agrees with the reference, and that with attention over plain tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_cases import CASES, attend, storage_for, tables
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.model.attention import sdpa
from forethought.model.attention.base import PagedPass, Scoring
from forethought.model.attention.sdpa import SdpaAttention
from forethought.model.batch import Batch, Row
from forethought.reference.engine import ReferenceAttention

# (stored before, new tokens, parents): decodes, a whole prefill, chunks, trees.
ROWS: list[tuple[int, int, tuple[int, ...] | None]] = [
    (0, 7, None),
    (11, 1, None),
    (0, 1, None),
    (9, 4, None),
    (30, 1, None),
    (6, 5, (-1, 0, 0, 1, 2)),
    (0, 4, (-1, -1, 0, 1)),
    (12, 1, None),
]


@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", CASES)
def test_sdpa_agrees_with_the_reference(name: str, page_size: int, scattered: bool) -> None:
    case, num_pages = CASES[name], 160 // page_size
    made = tables(PagePool(num_pages, page_size), [s + n for s, n, _ in ROWS], scattered)
    rows = [
        Row(list(range(n)), start, table, parents)
        for (start, n, parents), table in zip(ROWS, made, strict=True)
    ]
    for chosen in (rows, [rows[4], rows[1], rows[7]]):
        batch = Batch.build(chosen)
        exact = attend(
            ReferenceAttention(), case, batch, storage_for(case, num_pages, page_size), 2
        )
        for grouping in ("auto", "always", "never"):
            storage = storage_for(case, num_pages, page_size)
            result = attend(SdpaAttention(grouping), case, batch, storage, 2)
            torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grouping", ["always", "never"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_what_a_backend_returns_is_contiguous_for_any_number_of_rows(
    name: str, dtype: torch.dtype, grouping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fewest queries of CPUs with AMX and of those without it."""
    case = CASES[name]
    source = torch.Generator().manual_seed(4)
    for fewest in (sdpa.MIN_QUERIES_WITH_AMX, sdpa.MIN_QUERIES_WITHOUT_AMX):
        monkeypatch.setattr(sdpa, "MIN_QUERIES", fewest)
        for sizes in ([1], [1, 1], [3], [1, 3], [40]):
            made = tables(PagePool(40, 4), [size + 9 for size in sizes], scattered=False)
            batch = Batch.build([Row([0] * n, 9, t) for n, t in zip(sizes, made, strict=True)])
            storage = KvStorage([case.shape], 40, 4, dtype)
            shapes = [(case.heads, case.shape.key_dim), (case.shape.kv_heads, case.shape.key_dim)]
            shapes.append((case.shape.kv_heads, case.shape.value_dim))
            q, k, v = (torch.randn(sum(sizes), *x, generator=source).to(dtype) for x in shapes)
            forward_pass = PagedPass(batch, storage, SdpaAttention(grouping), [case.window])
            sinks = torch.zeros(case.heads) if case.sinks else None
            found = forward_pass.attend(0, q, k, v, Scoring(0.4, case.softcap, sinks))
            assert found.shape == (sum(sizes), case.heads, case.shape.value_dim)
            assert found.dtype == dtype
            assert found.is_contiguous()


@pytest.mark.parametrize("name", CASES)
def test_folding_the_heads_of_a_few_queries_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, made = CASES[name], tables(PagePool(53, 3), [s + n for s, n, _ in ROWS], False)
    rows = [
        Row(list(range(n)), start, table, parents)
        for (start, n, parents), table in zip(ROWS, made, strict=True)
    ]
    results = []
    monkeypatch.setattr(sdpa, "BATCH_INVARIANT_QUERIES", 0)
    for folded_from in (0, 10**9):
        monkeypatch.setattr(sdpa, "FOLDED_FROM", folded_from)
        storage = storage_for(case, 53, 3)
        results.append(attend(SdpaAttention("never"), case, Batch.build(rows), storage, 2))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_where_groups_are_cut_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    case, made = CASES["window"], tables(PagePool(60, 3), [30, 4, 17, 18, 9], scattered=True)
    batch = Batch.build([Row([1], table.length - 1, table) for table in made])
    results = []
    for group_bytes in (1, 3000, 10**9):
        monkeypatch.setattr(sdpa, "MAX_GROUP_BYTES", group_bytes)
        results.append(attend(SdpaAttention(), case, batch, storage_for(case, 60, 3), 2))
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[1], results[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["grouped", "window", "softcap, sinks and window", "chunks", "softcap, sinks and chunks"],
)
def test_the_reference_is_softmax_attention_over_the_row_s_own_tokens(name: str) -> None:
    """One row, written to the cache in three steps, against dense attention with a mask."""
    case, page_size, total = CASES[name], 3, 13
    (table,) = tables(PagePool(8, page_size), [total], scattered=True)
    storage = storage_for(case, 8, page_size)
    source = torch.Generator().manual_seed(5)
    heads, shape = case.heads, case.shape
    q = torch.randn(total, heads, shape.key_dim, generator=source)
    k = torch.randn(total, shape.kv_heads, shape.key_dim, generator=source)
    v = torch.randn(total, shape.kv_heads, shape.value_dim, generator=source)
    sinks = torch.randn(heads, generator=source) if case.sinks else None
    scoring = Scoring(0.4, case.softcap, sinks)
    steps = []
    for start, stop in ((0, 6), (6, 7), (7, total)):
        batch = Batch.build([Row([0] * (stop - start), start, table.fork(stop))])
        forward_pass = PagedPass(batch, storage, ReferenceAttention(), [case.window])
        steps.append(forward_pass.attend(0, *(x[start:stop] for x in (q, k, v)), scoring))
    group = heads // shape.kv_heads
    dense_k, dense_v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ dense_k.transpose(1, 2) * 0.4
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    distance = torch.arange(total)[:, None] - torch.arange(total)
    hidden = distance < 0
    if case.window is not None and case.window > 0:
        hidden |= distance >= case.window
    elif case.window is not None:
        chunks = torch.arange(total) // -case.window
        hidden |= chunks[:, None] != chunks
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, total, 1)], -1)
    dense = (scores.softmax(-1)[..., :total] @ dense_v).transpose(0, 1)
    torch.testing.assert_close(torch.cat(steps), dense, rtol=1e-4, atol=1e-5)


def test_rows_do_not_see_each_other() -> None:
    """Changing everything that belongs to one row leaves the other row's result alone."""
    case, made = CASES["grouped"], tables(PagePool(20, 4), [9, 9], scattered=False)
    results = []
    for changed in (False, True):
        storage = storage_for(case, 20, 4)
        if changed:
            storage.keys[0][made[1].slots(0, 9)] += 1
        batch = Batch.build([Row([1], 8, made[0]), Row([2], 8, made[1])])
        results.append(attend(SdpaAttention("always"), case, batch, storage, seed=3))
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[1][1])


def test_half_precision_stays_near_float32() -> None:
    case, made = CASES["grouped"], tables(PagePool(20, 4), [30, 17], scattered=True)
    batch = Batch.build([Row([1], 29, made[0]), Row([1, 2, 3], 14, made[1])])
    exact = attend(ReferenceAttention(), case, batch, storage_for(case, 20, 4), seed=4)
    for dtype in (torch.bfloat16, torch.float16):
        storage = KvStorage([case.shape], 20, 4, dtype)
        full = storage_for(case, 20, 4)
        storage.keys[0].copy_(full.keys[0])
        storage.values[0].copy_(full.values[0])
        source = torch.Generator().manual_seed(4)
        q, k, v = (torch.randn(4, h, 8, generator=source).to(dtype) for h in (4, 2, 2))
        forward_pass = PagedPass(batch, storage, SdpaAttention(), [None])
        result = forward_pass.attend(0, q, k, v, Scoring(0.4))
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("scattered", [False, True], ids=["together", "scattered"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].window is None])
def test_positions_before_the_first_one_seen_are_not_attended_to(
    name: str, page_size: int, scattered: bool
) -> None:
    case, num_pages = CASES[name], 160 // page_size
    # (stored before, new tokens, parents, first position seen)
    shapes: list[tuple[int, int, tuple[int, ...] | None, int]]
    shapes = [(9, 3, (-1, 0, 0), 1), (7, 2, (-1, -1), 2), (9, 1, (-1,), 1), (0, 1, None, 0)]
    shapes += [(11, 1, None, 1), (1, 5, None, 1), (12, 1, None, 4), (20, 1, None, 3)]
    made = tables(PagePool(num_pages, page_size), [s + n for s, n, _, _ in shapes], scattered)
    rows = [
        Row(list(range(n)), start, table, parents)
        for (start, n, parents, _), table in zip(shapes, made, strict=True)
    ]
    batch = Batch.build(rows)
    spans = [
        replace(span, seen_from=first)
        for span, (_, _, _, first) in zip(batch.spans, shapes, strict=True)
    ]
    batch = replace(batch, spans=tuple(spans))
    exact = attend(ReferenceAttention(), case, batch, storage_for(case, num_pages, page_size), 2)
    plain = attend(
        ReferenceAttention(),
        case,
        Batch.build(rows),
        storage_for(case, num_pages, page_size),
        2,
    )
    assert not torch.allclose(exact, plain)
    for grouping in ("auto", "always", "never"):
        storage = storage_for(case, num_pages, page_size)
        result = attend(SdpaAttention(grouping), case, batch, storage, 2)
        torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [48, 224])
def test_few_queries_are_rounded_alike_whether_their_heads_are_folded_or_not(
    dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 16 queries of a key; with more of them the two would differ."""
    torch.manual_seed(0)
    k, v = (torch.randn(length, 2, 64).to(dtype) for _ in range(2))
    folds: list[int] = []
    grouped, limit = sdpa._attend_group, sdpa.BATCH_INVARIANT_QUERIES

    def watched(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        folds.append(q.shape[1])
        return grouped(q, *rest)

    monkeypatch.setattr(sdpa, "_attend_group", watched)
    for size in range(2, 13):
        q = torch.randn(size, 4, 64).to(dtype)
        seen = torch.rand(size, length) < 0.8
        mask = sdpa.FoldedMask(sdpa.additive(seen, dtype)[None, None])
        found = []
        for exact in (limit, 0):
            monkeypatch.setattr(sdpa, "BATCH_INVARIANT_QUERIES", exact)
            found.append(sdpa._attend_row(q, k, v, mask, Scoring(0.125)))
        assert torch.equal(*found)
    assert folds == list(range(2, 9))


def test_a_mask_is_folded_for_each_number_of_heads_and_kept() -> None:
    mask = sdpa.FoldedMask(torch.arange(6.0).view(1, 1, 2, 3))
    for shared in (3, 1, 2):
        assert torch.equal(mask.fold(shared), mask.fold(1).repeat(1, 1, shared, 1))
        assert mask.fold(shared) is mask.fold(shared)


def test_caches_of_one_model_may_have_pages_of_different_sizes() -> None:
    """Each has 96 slots with the page behind them, which masks of decode rows are cut from."""
    backend, case = SdpaAttention("never"), CASES["one kv head"]
    for num_pages, page_size in ((95, 1), (5, 16)):
        (table,) = tables(PagePool(num_pages, page_size), [18], False)
        batch = Batch.build([Row([0], 17, table)])
        exact = attend(
            ReferenceAttention(), case, batch, storage_for(case, num_pages, page_size), 2
        )
        result = attend(backend, case, batch, storage_for(case, num_pages, page_size), 2)
        torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-5)
