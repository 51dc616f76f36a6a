"""Attention over pages in place agrees with the reference, in plain torch and in Triton."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from attention_cases import CASES, Case, attend, storage_for, tables
from forethought.backends.cuda.graphs import Bucket, StaticBatch
from forethought.backends.cuda.paged import PagedAttention
from forethought.errors import ParameterError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage, LayerShape
from forethought.model.attention import create_backend, default_backend, paged_layout
from forethought.model.attention.base import PagedPass, Scoring
from forethought.model.attention.paged_layout import CHAIN, DIRECT, PagedLayout, split_of
from forethought.model.batch import Batch, PackedRows, Row, ancestors
from forethought.reference.engine import ReferenceAttention

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
triton_only = pytest.mark.skipif(
    not IS_INTERPRETED, reason="needs triton and TRITON_INTERPRET=1: see CONTRIBUTING.md"
)

RANDOM_TREE = tuple(random.Random(3).randrange(-1, max(node, 1)) for node in range(70))
# (stored before, new tokens, parents): decodes, chunks and trees.
ROWS: list[tuple[int, int, tuple[int, ...] | None]] = [
    (0, 7, None),
    (31, 1, None),
    (9, 20, None),
    (40, 1, None),
    (26, 5, (-1, 0, 0, 1, 2)),
    (0, 4, (-1, -1, 0, 1)),
]
LARGE_TREE = (12, 70, (-1, *RANDOM_TREE[1:]))  # more nodes than a word has bits
LATER = [(9, 3, (-1, 0, 0)), (20, 1, None)]  # of a draft network, which reads an offset later


def batch_of(
    shapes: Sequence[tuple[int, int, tuple[int, ...] | None]], page_size: int, offset: int = 0
) -> tuple[Batch, int]:
    """Rows over scattered pages, and the number of pages."""
    num_pages = 1000 // page_size
    made = tables(PagePool(num_pages, page_size), [s + n for s, n, _ in shapes], scattered=True)
    rows = [
        Row(list(range(n)), start, table, parents)
        for (start, n, parents), table in zip(shapes, made, strict=True)
    ]
    return Batch.build(rows, offset=offset), num_pages


def compare(case: Case, batch: Batch, num_pages: int, page_size: int) -> None:
    storages = [storage_for(case, num_pages, page_size) for _ in range(2)]
    exact = attend(ReferenceAttention(), case, batch, storages[0], 2)
    found = attend(PagedAttention(), case, batch, storages[1], 2)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    assert found.is_contiguous()


@pytest.mark.skipif(IS_INTERPRETED, reason="Triton's kernels take the place of plain torch")
@pytest.mark.parametrize("name", CASES)
def test_plain_torch_over_the_layout_agrees_with_the_reference(name: str) -> None:
    for rows, page_size, offset in ((ROWS, 3, 0), (LATER, 16, 2)):
        batch, num_pages = batch_of(rows, page_size, offset)
        compare(CASES[name], batch, num_pages, page_size)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("name", ["grouped", "window"])
def test_a_tree_may_have_more_nodes_than_a_word_has_bits(name: str) -> None:
    batch, num_pages = batch_of([LARGE_TREE, (3, 1, None)], 16)
    compare(CASES[name], batch, num_pages, 16)


@triton_only
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("split", [256, 16], ids=["whole", "split"])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_the_reference(
    name: str, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_layout, "SPLIT_TOKENS", split)
    batch, num_pages = batch_of(ROWS, 3)
    assert (PagedLayout.of(batch.spans, "cpu").num_splits > 1) == (split == 16)
    compare(CASES[name], batch, num_pages, 3)
    later, num_pages = batch_of(LATER, 16, offset=2)
    compare(CASES[name], later, num_pages, 16)


@triton_only
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_the_kernels_in_half_precision_stay_near_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six query heads per key head and widths that are no powers of two.

    In float16: Triton's interpreter multiplies the bits of bfloat16 as integers.
    """
    dtype = torch.float16
    monkeypatch.setattr(paged_layout, "SPLIT_TOKENS", 16)
    case = Case(heads=12, shape=LayerShape(2, 24, 20))
    batch, num_pages = batch_of([(40, 1, None), (30, 3, (-1, 0, 0))], 4)
    storages = [storage_for(case, num_pages, 4)]
    storages.append(KvStorage([case.shape], num_pages, 4, dtype))
    for name in ("keys", "values"):
        rounded, exact = getattr(storages[1], name)[0], getattr(storages[0], name)[0]
        rounded.copy_(exact)
        exact.copy_(rounded)
    exact = attend(ReferenceAttention(), case, batch, storages[0], 2)
    found = attend(PagedAttention(), case, batch, storages[1], 2, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), exact, rtol=0.03, atol=0.03)


@triton_only
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_what_lies_in_masked_slots_does_not_matter_to_the_kernels() -> None:
    case = CASES["grouped"]
    batch, num_pages = batch_of([(5, 1, None), (6, 3, (-1, 0, 0))], 4)
    found = []
    for poison in (0.0, float("nan")):
        storage = storage_for(case, num_pages, 4)
        held = [p * 4 + o for span in batch.spans for p in span.pages for o in range(4)]
        used = [
            span.pages[at // 4] * 4 + at % 4 for span in batch.spans for at in range(span.kv_length)
        ]
        free = sorted(set(held) - set(used))
        assert free
        storage.keys[0][free] = storage.values[0][free] = poison
        found.append(attend(PagedAttention(), case, batch, storage, 2))
    assert torch.equal(found[0], found[1])


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("name", ["grouped", "softcap, sinks and window"])
def test_what_pads_the_batch_of_a_graph_changes_nothing(name: str) -> None:
    """A row over several splits, one over one, a tree, a chain; the padding is NaN."""
    case, pool = CASES[name], PagePool(60, 16)
    storage = KvStorage([case.shape], 60, 16, has_scratch_page=True)
    for stored in (storage.keys[0], storage.values[0]):
        stored.copy_(torch.randn(stored.shape, generator=torch.Generator().manual_seed(1)))
    shapes = [(700, 1, None), (20, 1, None), (30, 5, (-1, 0, 0, 1, 2)), (9, 3, None)]
    made = tables(pool, [start + size for start, size, _ in shapes], scattered=True)
    rows = [
        Row([1] * size, start, table, parents)
        for (start, size, parents), table in zip(shapes, made, strict=True)
    ]
    bucket = Bucket.of(rows, 64)
    assert bucket == Bucket(16, 8, 1024)
    static = StaticBatch(bucket, storage)
    for tensor in static.tensors.values():
        tensor.fill_(10**12)
    static.fill(PackedRows.of(rows))
    source, total = torch.Generator().manual_seed(2), 10
    q, k, v = (
        torch.cat([torch.randn(total, *size, generator=source), torch.full((6, *size), torch.nan)])
        for size in ((case.heads, 8), (2, 8), (2, 8))
    )
    scoring = Scoring(0.4, case.softcap, torch.ones(case.heads) if case.sinks else None)
    by_graph = PagedPass(static.batch, storage, PagedAttention(), [case.window])
    found = by_graph.attend(0, q, k, v, scoring)[:total]
    storage.keys[0][storage.scratch_slot :] = storage.values[0][storage.scratch_slot :] = 0
    exact = PagedPass(Batch.build(rows), storage, ReferenceAttention(), [case.window])
    expected = exact.attend(0, q[:total], k[:total], v[:total], scoring)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    static.fill(PackedRows.of(rows[1:2]))  # what is left of the rows before is padding now
    assert static.tensors["slots"].tolist()[1:] == [storage.scratch_slot] * 15
    assert static.tensors["rows"][1:, 2].tolist() == [0] * 16
    assert static.tensors["partials"][:, 1].tolist() == [0] * 16


def test_a_split_depends_on_the_length_of_its_row_alone() -> None:
    assert split_of(1, 1) == (256, 1)
    assert split_of(1, 257) == (256, 2)
    assert split_of(5, 32 * 256) == (256, 32)
    assert split_of(5, 32 * 256 + 1) == (512, 17)
    assert split_of(33, 9000) == (9000, 1)  # many new tokens: by tiles
    assert all(split_of(1, length)[1] <= 32 for length in range(1, 300_000, 997))


def test_a_layout_says_where_rows_tiles_and_partial_results_lie() -> None:
    batch, _ = batch_of([(600, 2, (-1, -1)), (3, 20, None)], 16)
    layout = PagedLayout.of(batch.spans, "cpu")
    assert layout.rows.tolist() == [[0, 2, 602, 0, 256, 0], [2, 20, 23, 0, 256, CHAIN]]
    assert layout.tokens[:2].tolist() == [[600, 0], [600, 1]]  # siblings are at one position
    assert layout.tokens[2:].tolist() == [[3 + n, DIRECT] for n in range(20)]
    assert layout.tiles.tolist() == [[0, 0], [1, 0], [1, 16]]
    assert layout.partials.tolist() == [[0, 3], [1, 3]]
    assert (layout.tile_tokens, layout.num_splits) == (16, 3)
    assert layout.pages[0, :38].tolist() == list(batch.spans[0].pages)
    assert layout.words.tolist() == [1, 2]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 130])
def test_ancestor_words_hold_the_tree_s_bits(size: int) -> None:
    tree = ancestors([-1] + [random.Random(size).randrange(-1, n) for n in range(1, size)]).numpy()
    words = paged_layout.ancestor_words(tree).view(np.uint64)
    for node in range(size):
        bits = sum(int(word) << 64 * at for at, word in enumerate(words[node]))
        assert bits == sum(1 << other for other in range(size) if tree[node, other])


def test_the_default_backend_is_that_of_the_device() -> None:
    assert default_backend("cpu") == "sdpa"
    assert default_backend("cuda:1") == ("sdpa" if find_spec("triton") is None else "triton")
    assert create_backend("auto", "cpu").name == "sdpa"
    if not IS_INTERPRETED:
        with pytest.raises(ParameterError, match="triton"):
            create_backend("triton", "cpu")
