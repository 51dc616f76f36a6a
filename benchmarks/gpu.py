"""The first half hour on a GPU: bandwidth, attention, kernels, and a model of 8 billion parameters.

    python -m benchmarks.gpu                      all parts, about ten minutes
    python -m benchmarks.gpu --parts kernel model

Needs no network and no checkpoint: weights are random and made on the device. Parts:

    bandwidth   a sum of 4 GiB, and a matrix-vector product: what a decode step can reach
    sdpa        torch's attention at batch 1 with cuDNN, and with the others: first call and later
    kernel      the Triton kernels: error against plain torch, share of the bandwidth, by context
    model       decode tokens/s of Llama 3 8B's shape at batch 1, 16, 64, and of each backend

``--device cpu --small`` runs the same code in seconds, to see that it works. Prints tables and,
last, one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.report import print_report
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

from forethought.config.sampling import SamplingParams
from forethought.engine.engine import Engine
from forethought.engine.scheduler import Limits
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.attention import create_backend
from forethought.model.attention.base import Scoring
from forethought.model.attention.interface import PROBE
from forethought.model.attention.paged import Operands, attend_rows
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM, ModelTraits, weight_sizes
from forethought.model.runner import ModelRunner

PAGE = 16
EIGHT_BILLION = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


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


def bandwidth(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """GB/s of reading memory once."""
    size, width = (2**20, 256) if small else (2**32, 16384)
    x = torch.ones(size // 4, device=device)
    matrix = torch.ones(width, width, dtype=torch.bfloat16, device=device)
    vector = torch.ones(width, 1, dtype=torch.bfloat16, device=device)
    cases = {"sum": (x.sum, x.nbytes), "gemv": (lambda: matrix @ vector, matrix.nbytes)}
    rows = []
    for name, (call, moved) in cases.items():
        call()
        rows.append({"what": name, "GB/s": round(moved / seconds(call, device, 10) / 1e9, 1)})
    return rows


def sdpa(device: torch.device, small: bool) -> list[dict[str, Any]]:
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


def kernel(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """The backend that is the device's default, one layer of 32 query and 8 key heads."""
    shape, rows_out = LayerShape(8, 128, 128), []
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    backend = create_backend("auto", device)
    for length in (64,) if small else (512, 2048, 8192, 32768):
        for batch_size in (1, 4) if small else (1, 16):
            for size in (1, 5):
                found = one_layer(backend, shape, dtype, device, (length, batch_size, size))
                rows_out.append(found)
    return rows_out


def one_layer(
    backend: Any,
    shape: LayerShape,
    dtype: torch.dtype,
    device: torch.device,
    case: tuple[int, int, int],
) -> dict[str, Any]:
    """Error and speed for (stored tokens, rows, new tokens of a row, as a chain)."""
    length, batch_size, size = case
    pages = batch_size * (-(-(length + size) // PAGE))
    storage, pool = KvStorage([shape], pages, PAGE, dtype, device), PagePool(pages, PAGE)
    storage.keys[0].normal_()
    storage.values[0].normal_()
    rows = []
    for _ in range(batch_size):
        table = PageTable(pool)
        table.append(length + size)
        rows.append(Row([1] * size, length, table))
    batch = Batch.build(rows, device)
    q = torch.randn(batch_size * size, 32, 128, dtype=dtype, device=device)
    scoring, plan = Scoring(128**-0.5), backend.plan(batch, storage, None)
    keys, values = storage.keys[0], storage.values[0]

    def call() -> Any:
        return backend.attend(q, keys, values, plan, scoring)

    # Plain torch on the host reads the same layout.
    here = Batch.build(rows)
    host_plan = create_backend("forethought.model.attention.paged:PagedAttention", "cpu").plan(
        here, KvStorage([shape], pages, PAGE), None
    )
    layout = host_plan.layout
    parts = [layout.rows, layout.tokens, layout.tiles, layout.pages, layout.words, layout.partials]
    exact = attend_rows(
        Operands(
            q.float().cpu(),
            keys.float().cpu(),
            values.float().cpu(),
            parts,
            sinks=None,
            sizes=[PAGE, layout.tile_tokens, layout.num_splits, 0],
            scores=[scoring.scale, 0.0],
        )
    )
    error = (call().float().cpu() - exact).abs().max().item()
    spent = seconds(call, device, 20)
    moved = batch_size * (length + size) * shape.elements * dtype.itemsize
    return {
        "backend": backend.name,
        "stored": length,
        "rows": batch_size,
        "new": size,
        "error": round(error, 6),
        "us": round(spent * 1e6, 1),
        "GB/s": round(moved / spent / 1e9, 1),
    }


def random_model(sizes: dict[str, int], device: torch.device, attention: str) -> CausalLM:
    """A Llama with random weights, made on the device; no files."""
    config = LlamaConfig(**sizes, max_position_embeddings=8192, eos_token_id=None)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PROBE)
    module = module.eval().requires_grad_(False)
    layers, vocab_size = loader._probe(module, Path("random"))
    traits = ModelTraits(
        config=config,
        layers=layers,
        vocab_size=vocab_size,
        max_positions=config.max_position_embeddings,
        eos_token_ids=frozenset(),
        dtype=module.dtype,
        device=module.device,
        weights=weight_sizes(module),
    )
    with torch.inference_mode():
        network = loader._network(module, True, traits)
    return CausalLM(network, create_backend(attention, device), traits)


def model(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Greedy decode tokens/s, the prompts apart."""
    sizes, tokens = (TINY, 8) if small else (EIGHT_BILLION, 128)
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    rows = []
    for attention in ("triton", "sdpa") if has_triton else ("sdpa",):
        lm = random_model(sizes, device, attention)
        for batch_size in (1, 2) if small else (1, 16, 64):
            rows.append({"attention": attention, **decode(lm, batch_size, tokens)})
        del lm
    return rows


def decode(lm: CausalLM, batch_size: int, tokens: int, prompt: int = 128) -> dict[str, Any]:
    """Steps of a full batch; the first ones warm up."""
    pages = batch_size * (-(-(prompt + tokens + 1) // PAGE))
    storage = KvStorage(lm.layer_shapes, pages, PAGE, lm.dtype, lm.device)
    limits = Limits(
        max_batch_size=batch_size,
        max_num_tokens=batch_size * prompt,
        max_length=prompt + tokens + 1,
        chunked_prefill=True,
    )
    engine = Engine(ModelRunner(lm, storage), limits, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for row in range(batch_size):
        engine.add([(7 * row + n) % lm.vocab_size for n in range(prompt)], params)
    for _ in range(4):
        engine.step()
    before, began = engine.stats.decoded, time.perf_counter()
    while engine.has_work:
        engine.step()
    spent = time.perf_counter() - began
    steps = (engine.stats.decoded - before) / batch_size
    return {
        "batch": batch_size,
        "tokens/s": round((engine.stats.decoded - before) / spent, 1),
        "ms/step": round(spent / steps * 1e3, 3),
    }


PARTS: dict[str, Callable[[torch.device, bool], list[dict[str, Any]]]] = {
    "bandwidth": bandwidth,
    "sdpa": sdpa,
    "kernel": kernel,
    "model": model,
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = list(rows[0])
    lines = [heads, *([str(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU manages in seconds")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    triton = importlib.util.find_spec("triton") is not None
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton}")
    found: list[dict[str, Any]] = []
    for part in args.parts:
        with torch.inference_mode(part != "model"):
            rows = PARTS[part](device, args.small)
        print(f"\n{part}\n{table(rows)}", flush=True)
        found += [{"part": part, **row} for row in rows]
    print_report("gpu", found, device_name=name)


if __name__ == "__main__":
    main()
