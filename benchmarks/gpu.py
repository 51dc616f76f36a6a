"""The first half hour on a GPU: bandwidth, attention, kernels, and a model of 8 billion parameters.

    python -m benchmarks.gpu                      all parts, about fifteen minutes
    python -m benchmarks.gpu --parts kernel model

Needs no network and no checkpoint: weights are random and made on the device. Parts:

    bandwidth   a sum of 4 GiB, and a matrix-vector product: what a decode step can reach
    sdpa        torch's attention at batch 1 with cuDNN, and with the others: first call and later
    kernel      the Triton kernels: error against plain torch, share of the bandwidth, by context
    model       decode tokens/s of Llama 3 8B's shape at batch 1, 16, 64, and of each backend
    graphs      the same by CUDA graphs: first that they give the tokens of eager steps, then speed
                and share of the bandwidth
    waits       that neither a decode nor a draft waits inside a forward
    eagle       an EAGLE-3 chain of 2, 4, 8 with a random head and synthetic acceptance of 0.7 per
                level, eagerly and by graphs: tokens/s, and the share of a step that drafts

``--device cpu --small`` runs the same code in seconds, to see that it works. Prints tables and,
last, one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.report import print_report
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

from forethought.config.drafters import EagleDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.engine.resolve import build_drafter_entry
from forethought.engine.scheduler import Limits
from forethought.engine.sequence import Sequence as LiveSequence
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
from forethought.model.graph_runner import GraphRunner
from forethought.model.graphs import CudaCapture, GraphCapturer
from forethought.model.runner import ModelRunner
from forethought.speculative.heads.eagle3 import Eagle3Head, Eagle3Traits
from forethought.speculative.registry import Target

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
        network, path = loader._network(module, True, traits, "torch", "it is measured in torch")
    return CausalLM(network, create_backend(attention, device), traits, path)


def model(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Greedy decode tokens/s, the prompts apart."""
    sizes, (prompt, tokens) = TINY if small else EIGHT_BILLION, lengths(small)
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    rows = []
    for attention in ("triton", "sdpa") if has_triton else ("sdpa",):
        lm = random_model(sizes, device, attention)
        for batch_size in (1, 2) if small else (1, 16, 64):
            engine = engine_for(lm, batch_size, prompt + tokens + 1)
            rows.append({"attention": attention, **decode(engine, tokens, prompt)[0]})
        del lm
    return rows


class Repeated:
    """In place of a graph, to run this on a CPU: computes again."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute, self.output = compute, compute()

    def replay(self) -> None:
        """See ``model.graphs.Graph``."""
        with torch.inference_mode():
            self.output.copy_(self._compute())


def engine_for(
    lm: CausalLM,
    batch_size: int,
    length: int,
    *,
    has_graphs: bool = False,
    configs: Sequence[DecodingBaseConfig] = (),
) -> Engine:
    """With place for ``batch_size`` sequences of ``length`` tokens."""
    pages, on_gpu = batch_size * -(-length // PAGE), lm.device.type == "cuda"
    storage = KvStorage(
        lm.layer_shapes, pages, PAGE, lm.dtype, lm.device, has_scratch_page=has_graphs
    )
    runner = ModelRunner(lm, storage)
    if has_graphs:
        runner = GraphRunner(
            lm, storage, GraphCapturer(CudaCapture(lm.device) if on_gpu else Repeated)
        )
    limits = Limits(
        max_batch_size=batch_size,
        max_num_tokens=min(batch_size * length, 8192),
        max_length=length,
        chunked_prefill=True,
    )
    target = Target(runner, limits.max_num_tokens)
    drafters = [build_drafter_entry(config, target, batch_size) for config in configs]
    return Engine(runner, limits, seed=0, drafters=drafters)


def prefill(engine: Engine, prompt: int, tokens: int) -> list[LiveSequence]:
    """Fill the batch with prompts, and step until all decode and shapes have been seen."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    vocab_size, batch_size = engine.runner.lm.vocab_size, engine.limits.max_batch_size
    live = [
        engine.add([(7 * row + n) % vocab_size for n in range(prompt)], params)[0]
        for row in range(batch_size)
    ]
    while any(len(sequence.tokens) == prompt for sequence in live):
        engine.step()
    for _ in range(3):
        engine.step()
    return live


def decode(engine: Engine, tokens: int, prompt: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Steps of a full batch, the first ones apart; and what they generated."""
    live = prefill(engine, prompt, tokens)
    synchronize(engine.runner.lm.device)
    stats = engine.stats
    before, steps, drafting = stats.decoded, stats.steps, stats.draft_seconds
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    spent = time.perf_counter() - began
    found = {
        "batch": engine.limits.max_batch_size,
        "tokens/s": round((stats.decoded - before) / spent, 1),
        "ms/step": round(spent / (stats.steps - steps) * 1e3, 3),
        "drafting": round((stats.draft_seconds - drafting) / spent, 3),
    }
    return found, [list(sequence.output) for sequence in live]


def lengths(small: bool) -> tuple[int, int]:
    """Tokens of a prompt, and generated ones."""
    return (24, 32) if small else (512, 128)


def graphs(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Greedy decoding, eagerly and by graphs: equal tokens, tokens/s, GB/s of weights."""
    lm = random_model(TINY if small else EIGHT_BILLION, device, paged_attention(device))
    (prompt, tokens), rows = lengths(small), []
    weights = sum(weight.num_bytes for weight in lm.traits.weights)
    for batch_size in (1, 2) if small else (1, 4, 16, 64):
        eager, expected = decode(engine_for(lm, batch_size, prompt + tokens + 1), tokens, prompt)
        by_graphs = engine_for(lm, batch_size, prompt + tokens + 1, has_graphs=True)
        fast, generated = decode(by_graphs, tokens, prompt)
        same = sum(map(equal_prefix, generated, expected))
        rows.append(
            {
                "batch": batch_size,
                "equal tokens": f"{same}/{batch_size * tokens}",
                "eager tokens/s": eager["tokens/s"],
                "tokens/s": fast["tokens/s"],
                "ms/step": fast["ms/step"],
                "GB/s": round(weights / fast["ms/step"] / 1e6, 1),
            }
        )
    return rows


def equal_prefix(found: Sequence[int], expected: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(found, expected, strict=True))
    return next((at for at, (one, other) in pairs if one != other), len(expected))


def paged_attention(device: torch.device) -> str:
    """Attention over pages by the kernels, or in plain torch on a CPU."""
    return "triton" if device.type == "cuda" else "forethought.model.attention.paged:PagedAttention"


def waits(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Whether forwards and drafters wait, plain and with a chain: torch raises where they do."""
    rows = []
    lm = random_model(TINY if small else EIGHT_BILLION, device, paged_attention(device))
    prompt, tokens = lengths(small)
    with tempfile.TemporaryDirectory() as folder:
        for name, configs in {"plain": [], "eagle": [chain(lm, Path(folder), 4)]}.items():
            engine = engine_for(lm, 2, prompt + tokens + 8, has_graphs=True, configs=configs)
            prefill(engine, prompt, tokens)
            calls: list[tuple[Any, str]] = [(engine.runner, "forward")]
            calls += [
                (entry.drafter, "prepare_draft_tokens") for entry in engine.speculation.drafters
            ]
            for owner, method in calls:
                setattr(owner, method, without_waits(getattr(owner, method), device))
            stats = engine.stats
            drafted = stats.drafted
            for _ in range(3):
                engine.step()
            waited = stats.failed_forwards + stats.draft_failures
            rows.append({"steps": name, "drafted": stats.drafted - drafted, "waited": waited})
    return rows


def without_waits(call: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The same, in which torch raises where the host would wait for the GPU."""
    if device.type != "cuda":
        return call

    def strict(*args: Any) -> Any:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    return strict


def chain(lm: CausalLM, folder: Path, length: int) -> EagleDecodingConfig:
    """A chain of an EAGLE-3 head with random weights, saved once per folder."""
    if not (folder / "config.json").exists():
        config = lm.config
        layers = tuple(sorted({2, lm.num_layers // 2, lm.num_layers - 3} & set(range(1, 200))))
        sizes = {
            "vocab_size": lm.vocab_size,
            "hidden_size": lm.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "max_position_embeddings": config.max_position_embeddings,
        }
        traits = Eagle3Traits(
            min(lm.vocab_size, 32000), lm.hidden_size, captures=len(layers), layer_ids=layers
        )
        with torch.device(lm.device):
            head = Eagle3Head(LlamaConfig(**sizes), traits).to(lm.dtype)
        head.to("cpu").save(folder)
    return EagleDecodingConfig(
        max_draft_len=length, speculative_model=folder, synthetic_acceptance=0.7
    )


def eagle(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Decoding with chains, eagerly and by graphs."""
    lm = random_model(TINY if small else EIGHT_BILLION, device, paged_attention(device))
    (prompt, tokens), rows = lengths(small), []
    with tempfile.TemporaryDirectory() as folder:
        for length in (2,) if small else (2, 4, 8):
            for batch_size in (1, 2) if small else (1, 16):
                for has_graphs in (False, True):
                    engine = engine_for(
                        lm,
                        batch_size,
                        prompt + tokens + length + 1,
                        has_graphs=has_graphs,
                        configs=[chain(lm, Path(folder), length)],
                    )
                    found, _ = decode(engine, tokens, prompt)
                    rows.append({"length": length, "graphs": has_graphs, **found})
    return rows


PARTS: dict[str, Callable[[torch.device, bool], list[dict[str, Any]]]] = {
    "bandwidth": bandwidth,
    "sdpa": sdpa,
    "kernel": kernel,
    "model": model,
    "graphs": graphs,
    "waits": waits,
    "eagle": eagle,
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
        with torch.inference_mode(part not in ("model", "graphs", "waits", "eagle")):
            rows = PARTS[part](device, args.small)
        print(f"\n{part}\n{table(rows)}", flush=True)
        found += [{"part": part, **row} for row in rows]
    print_report("gpu", found, device_name=name)


if __name__ == "__main__":
    main()
