"""Parts of ``benchmarks.gpu`` without a model: bandwidth, attention kernels, matrix products.

What a kernel takes is measured in a CUDA graph of many launches, so that the time in which the host
launches is left out. Shapes are those of a layer of Llama 3 8B.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle, islice, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forethought.backends.cuda.graphs import CudaCapture
from forethought.backends.cuda.paged import Operands, attend_rows
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import PageTable
from forethought.model.attention import create_backend
from forethought.model.attention.base import Scoring
from forethought.model.attention.paged_layout import PagedLayout, Splitting, split_of
from forethought.model.batch import Batch, Row, Span

Found = list[dict[str, Any]]
"""Rows of a table."""

PAGE = 16
SHAPE, HEADS = LayerShape(8, 128, 128), 32
CACHE_BYTES = 2**28
"""More than the L2 cache of any GPU: weights of this many bytes are multiplied in turn."""


def seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Of one call, in a row of ``repeats`` of them."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(calls: Sequence[Callable[[], Tensor]], device: torch.device) -> float:
    """Of one of some calls, without the host's time to launch it where there are graphs."""

    def run() -> Tensor:
        return [call() for call in calls][-1]

    run()  # compiles, and allocates workspaces
    if device.type != "cuda":
        return seconds(run, device, 1) / len(calls)
    graph = CudaCapture(device)(run)
    graph.replay()
    return seconds(graph.replay, device, 5) / len(calls)


def has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run: on CUDA, or interpreted on a CPU."""
    is_found = importlib.util.find_spec("triton") is not None
    return is_found and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


# ---- bandwidth, torch's attention -----------------------------------------------------------


def bandwidth(device: torch.device, small: bool) -> Found:
    """GB/s of reading memory once."""
    size, width = (2**20, 256) if small else (2**32, 16384)
    x = torch.ones(size // 4, device=device)
    matrix = torch.ones(width, width, dtype=torch.bfloat16, device=device)
    vector = torch.ones(width, 1, dtype=torch.bfloat16, device=device)
    cases = {"sum": (x.sum, x.nbytes), "gemv": (lambda: matrix @ vector, matrix.nbytes)}
    return [
        {"what": name, "GB/s": round(moved / device_seconds([call] * 10, device) / 1e9, 1)}
        for name, (call, moved) in cases.items()
    ]


def read_bandwidth(device: torch.device, small: bool) -> float:
    """Bytes per second of the faster way to read memory once."""
    return 1e9 * max(float(row["GB/s"]) for row in bandwidth(device, small))


def sdpa(device: torch.device, small: bool) -> Found:
    """Milliseconds of a decode's masked attention, the first time and later."""
    kinds: dict[str, Any] = {"chosen by torch": None}
    if device.type == "cuda":
        kinds |= {
            "cuDNN": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
        }
    rows = []
    for length in (64, 128) if small else (512, 2048, 8192):
        q = torch.randn(1, 8, 4, 128, dtype=torch.bfloat16, device=device)
        k = torch.randn(1, 8, length, 128, dtype=torch.bfloat16, device=device)
        mask = torch.zeros(1, 1, 1, length, dtype=torch.bfloat16, device=device)
        for name, kind in kinds.items():
            with nullcontext() if kind is None else sdpa_kernel(kind):

                def call(q: Any = q, k: Any = k, mask: Any = mask) -> Any:
                    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

                first = seconds(call, device, 1)
                later = seconds(call, device, 20)
            row = {"length": length, "kernel": name, "first ms": round(first * 1e3, 3)}
            rows.append({**row, "later ms": round(later * 1e3, 4)})
    return rows


# ---- attention over pages -------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCase:
    """What one layer attends to: rows of new tokens, a chain or a tree, after stored ones."""

    stored: int
    num_rows: int
    new: int = 1
    is_tree: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        kind = "tree" if self.is_tree else "chain"
        return f"{kind} of {self.new}" if self.new > 1 else "decode"

    @property
    def num_bytes(self) -> int:
        """Of keys and values that are read."""
        return self.num_rows * (self.stored + self.new) * SHAPE.elements * self.dtype.itemsize


class LayerInputs:
    """Pages, queries and layouts of a case."""

    def __init__(self, case: LayerCase, device: torch.device) -> None:
        length = case.stored + case.new
        pages = case.num_rows * -(-length // PAGE)
        pool = PagePool(pages, PAGE)
        self.storage = KvStorage([SHAPE], pages, PAGE, case.dtype, device)
        self.keys, self.values = self.storage.keys[0].normal_(), self.storage.values[0].normal_()
        rows = []
        for _ in range(case.num_rows):
            table = PageTable(pool)
            table.append(length)
            parents = tuple((node - 1) // 3 for node in range(case.new)) if case.is_tree else None
            rows.append(Row([1] * case.new, case.stored, table, parents))
        self.batch = Batch.build(rows, device)
        self.case, self.device, self.scoring = case, device, Scoring(128**-0.5)
        size = case.num_rows * case.new
        self.q = torch.randn(size, HEADS, 128, dtype=case.dtype, device=device)

    def operands(self, split: Splitting = split_of) -> Operands:
        """With rows split so."""
        layout = PagedLayout.of(self.batch.spans, self.device, split)
        return self._operands(self.q, self.keys, self.values, layout)

    def error(self, output: Tensor) -> float:
        """Greatest distance of the first row from ``exact``."""
        return (output[: self.case.new].float().cpu() - self.exact).abs().max().item()

    @cached_property
    def exact(self) -> Tensor:
        """The first row by plain torch, in float32 on the host."""
        spans: list[Span] = list(self.batch.spans[:1])
        end = (max(spans[0].pages) + 1) * PAGE
        read = self.q[: self.case.new], self.keys[:end], self.values[:end]
        host = [x.float().cpu() for x in read]
        return attend_rows(self._operands(*host, PagedLayout.of(spans, "cpu")))

    def _operands(self, q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Operands:
        of = layout
        return Operands(
            q,
            keys,
            values,
            [of.rows, of.tokens, of.tiles, of.pages, of.words, of.partials],
            sinks=None,
            sizes=[PAGE, of.tile_tokens, of.num_splits, 0],
            scores=[self.scoring.scale, 0.0],
        )


def kernel(device: torch.device, small: bool) -> Found:
    """The backend that is the device's default: error, time and share of what a read reaches."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    backend, reached = create_backend("auto", device), read_bandwidth(device, small)
    figures = []
    for stored in (64,) if small else (512, 2048, 8192, 32768):
        for num_rows, new in product((1, 4) if small else (1, 16), (1, 5)):
            inputs = LayerInputs(LayerCase(stored, num_rows, new, dtype=dtype), device)
            plan = backend.plan(inputs.batch, inputs.storage, None)

            def call(inputs: LayerInputs = inputs, plan: Any = plan) -> Tensor:
                return backend.attend(inputs.q, inputs.keys, inputs.values, plan, inputs.scoring)

            spent = device_seconds([call] * 20, device)
            figures.append(
                {
                    "backend": backend.name,
                    "stored": stored,
                    "rows": num_rows,
                    "new": new,
                    "error": round(inputs.error(call()), 6),
                    "us": round(spent * 1e6, 1),
                    "GB/s": round(inputs.case.num_bytes / spent / 1e9, 1),
                    "share": round(inputs.case.num_bytes / spent / reached, 3),
                }
            )
    return figures


SWEPT_SPLITS, SWEPT_WARPS = (1, 4, 8, 16, 32, 64), (2, 4, 8)


def sweep_cases(small: bool) -> list[LayerCase]:
    if small:
        return [LayerCase(64, 2, *new, torch.float32) for new in ((1, False), (5, True))]
    cases = [
        LayerCase(stored, num_rows, *new, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for stored in (512, 2048, 8192, 32768)
        for num_rows in (1, 16)
        for new in ((1, False), (5, False), (20, True))
    ]
    return [case for case in cases if case.num_rows == 1 or case.dtype == torch.bfloat16]


def sweep(device: torch.device, small: bool) -> Found:
    """Splits and warps of the Triton kernels: the kernels' own choice beside the fastest.

    The greatest error is that of all settings. Without Triton plain torch is measured, which has
    none.
    """
    reached = read_bandwidth(device, small)
    return [_swept(LayerInputs(case, device), reached, small) for case in sweep_cases(small)]


def _swept(inputs: LayerInputs, reached: float, small: bool) -> dict[str, Any]:
    case, device = inputs.case, inputs.device
    default_splits = split_of(case.new, case.stored + case.new)[1]
    times, errors = dict[tuple[int, int | None], float](), [0.0]
    for splits, warps in _swept_settings(default_splits, case, small):
        call = _attention(inputs, splits, warps)
        errors.append(inputs.error(call()))
        times[splits, warps] = device_seconds([call] * (2 if small else 20), device)
    best = min(times, key=lambda key: times[key])
    return {
        "dtype": str(case.dtype).removeprefix("torch."),
        "stored": case.stored,
        "rows": case.num_rows,
        "new": case.name,
        "own splits": default_splits,
        "us": round(times[default_splits, None] * 1e6, 1),
        "share": round(case.num_bytes / times[default_splits, None] / reached, 3),
        "splits x warps": "{} x {}".format(*best),
        "best us": round(times[best] * 1e6, 1),
        "best share": round(case.num_bytes / times[best] / reached, 3),
        "error": round(max(errors), 6),
    }


def _swept_settings(
    default_splits: int, case: LayerCase, small: bool
) -> Iterator[tuple[int, int | None]]:
    """Numbers of splits, and of warps; None: the kernels' own choice of both."""
    yield default_splits, None
    for splits in (1, 2) if small else SWEPT_SPLITS:
        # A split has at least a block of keys; a GPU is full without splits of many rows.
        if case.stored // splits >= (16 if small else 64) and splits * case.num_rows <= 256:
            yield from ((splits, warps) for warps in ((4,) if small else SWEPT_WARPS))


def _attention(inputs: LayerInputs, splits: int, warps: int | None) -> Callable[[], Tensor]:
    """A launch of the kernels; see ``_swept_settings``."""

    def split(size: int, length: int) -> tuple[int, int]:
        tokens = -(-length // splits)
        return tokens, -(-length // tokens)

    operands = inputs.operands(split_of if warps is None else split)
    if not has_triton(inputs.device):
        return lambda: attend_rows(operands)
    from forethought.backends.cuda.paged_triton import launch, settings_of

    settings = settings_of(operands)
    settings = settings._replace(warps=warps or settings.warps)
    return lambda: launch(operands, settings)


# ---- matrix products ------------------------------------------------------------------------

WEIGHTS = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""Outputs and inputs of the matrices of Llama 3 8B, as the fused network merges them."""


def gemv(device: torch.device, small: bool) -> Found:
    """Products of few tokens: cuBLAS, and a Triton kernel with the best of some settings."""
    shapes = {"tiny": (96, 64)} if small else WEIGHTS
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    reached, figures = read_bandwidth(device, small), []
    for name, (outputs, inputs) in shapes.items():
        num_bytes = outputs * inputs * dtype.itemsize
        count = 1 if small else max(2, -(-CACHE_BYTES // num_bytes))
        weights = [
            torch.randn(outputs, inputs, dtype=dtype, device=device) / inputs**0.5
            for _ in range(count)
        ]
        for num_rows in (1, 5, 16):
            x = torch.randn(num_rows, inputs, dtype=dtype, device=device)
            row = {"weight": name, "rows": num_rows, **_products(x, weights, small)}
            for one in ("cuBLAS", "Triton"):
                if (spent := row.get(f"{one} us")) is not None:
                    row[f"{one} share"] = round(num_bytes / spent * 1e6 / reached, 3)
            figures.append(row)
    return figures


def _products(x: Tensor, weights: Sequence[Tensor], small: bool) -> dict[str, Any]:
    """Microseconds of one product, and how far the kernel's is from torch's."""
    turns = list(islice(cycle(weights), 2 if small else 20))
    calls = [partial(F.linear, x, weight) for weight in turns]
    torch_us = device_seconds(calls, x.device) * 1e6
    row: dict[str, Any] = {"cuBLAS us": round(torch_us, 1), "Triton us": None}
    row |= {"block": None, "error": None, "cuBLAS share": None, "Triton share": None}
    if not has_triton(x.device):
        return row
    from benchmarks.gemv_triton import BLOCKS, multiply

    exact = F.linear(x.float(), weights[0].float())
    for block in BLOCKS[-1:] if small else BLOCKS:
        calls = [partial(multiply, x, weight, block) for weight in turns]
        spent = device_seconds(calls, x.device) * 1e6
        if row["Triton us"] is None or spent < row["Triton us"]:
            error = (multiply(x, weights[0], block).float() - exact).abs().max().item()
            row |= {"Triton us": round(spent, 1), "error": round(error, 5)}
            row["block"] = " x ".join(map(str, block))
    return row
