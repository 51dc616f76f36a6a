"""The first half hour on a GPU: tests, bandwidth, kernels, and a model of 8 billion parameters.

    python -m benchmarks.gpu                      all parts, in at most half an hour
    python -m benchmarks.gpu --parts kernel model

Needs no network and no checkpoint: weights are random and made on the device. Parts:

    tests       the tests marked gpu
    bandwidth   a sum of 4 GiB, and a matrix-vector product: what a decode step can reach
    sdpa        torch's attention at batch 1 with cuDNN, and with the others: first call and later
    kernel      the Triton kernels: error against plain torch, share of the bandwidth, by context
    sweep       the same by splits and warps, in bf16 and fp32: the kernels' choice and the fastest
    gemv        products of 1, 5 and 16 tokens with the model's weights: cuBLAS and a Triton kernel
    model       decode tokens/s of Llama 3 8B's shape at batch 1, 16, 64, and of each backend
    graphs      the same by CUDA graphs: first that they give the tokens of eager steps, then speed
                and share of the bandwidth, step by step and with steps that overlap
    profile     which kernels take the time of a step by graphs, at batch 1 and 16
    compiled    the same where Inductor compiles each layer inside the graph, with its first norm
    waits       that neither a decode nor a draft waits inside a forward
    eagle       an EAGLE-3 chain of 2, 4, 8 with a random head and synthetic acceptance of 0.7 per
                level, eagerly and by graphs: tokens/s, and the share of a step that drafts
    tree        rounds of a dynamic tree of 16, 64 and 128 nodes of such a head by graphs

Each part has a process and a time limit of its own: one that fails, hangs or loses the device is
reported, and the others follow. Prints tables and, last, one JSON line; the exit status is 1 if a
part has failed. ``--device cpu --small`` runs the same code in seconds, to see that it works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.gpu_kernels import (
    PAGE,
    Found,
    bandwidth,
    gemv,
    has_triton,
    kernel,
    sdpa,
    sweep,
    synchronize,
)
from benchmarks.report import print_report
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from forethought.backends.cuda.graph_runner import GraphRunner
from forethought.backends.cuda.graphs import CudaCapture
from forethought.config.drafters import EagleDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.engine.resolve import build_drafter_entry
from forethought.engine.scheduler import Limits
from forethought.engine.sequence import Sequence as LiveSequence
from forethought.kv.storage import KvStorage
from forethought.model.attention import create_backend
from forethought.model.attention.base import ForwardPass, PagedPass
from forethought.model.attention.interface import PROBE
from forethought.model.causal_lm import CausalLM, ForwardPath, ModelTraits, weight_sizes
from forethought.model.graph_capturer import GraphCapturer
from forethought.model.llama.layers import FusedLayer, Norm
from forethought.model.llama.network import FusedNetwork
from forethought.model.runner import ModelRunner
from forethought.model.transformers_module import probe
from forethought.speculative.drafter import Target
from forethought.speculative.heads.eagle3 import Eagle3Head, Eagle3Traits

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


def random_model(sizes: dict[str, int], device: torch.device, attention: str) -> CausalLM:
    """A Llama with random weights, made on the device; no files."""
    config = LlamaConfig(**sizes, max_position_embeddings=8192, eos_token_id=None)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PROBE)
    module = module.eval().requires_grad_(False)
    layers, vocab_size = probe(module, Path("random"))
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
        network = FusedNetwork(module, traits.max_positions)
    return CausalLM(network, create_backend(attention, device), traits, ForwardPath(kind="fused"))


def model(device: torch.device, small: bool) -> Found:
    """Greedy decode tokens/s, the prompts apart."""
    sizes, (prompt, tokens) = TINY if small else EIGHT_BILLION, lengths(small)
    rows = []
    for attention in ("triton", "sdpa") if has_triton(device) else ("sdpa",):
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
        """See ``backends.cuda.graphs.Graph``."""
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
        for event in engine.step():
            if event.error is not None:
                raise event.error
    for _ in range(3):
        engine.step()
    return live


def decode(
    engine: Engine, tokens: int, prompt: int, num_steps: int = 1
) -> tuple[dict[str, Any], list[list[int]]]:
    """Steps of a full batch, ``num_steps`` in a call, the first ones apart; and what they
    generated.
    """
    live = prefill(engine, prompt, tokens)
    engine.num_decode_steps = num_steps
    synchronize(engine.runner.lm.device)
    stats = engine.stats
    before, steps, drafting = stats.decoded, stats.steps, stats.draft_seconds
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    synchronize(engine.runner.lm.device)
    spent = time.perf_counter() - began
    figures = {
        "batch": engine.limits.max_batch_size,
        "tokens/s": round((stats.decoded - before) / spent, 1),
        "ms/step": round(spent / (stats.steps - steps) * 1e3, 3),
        "drafting": round((stats.draft_seconds - drafting) / spent, 3),
    }
    return figures, [list(sequence.output) for sequence in live]


def lengths(small: bool) -> tuple[int, int]:
    """Tokens of a prompt, and generated ones."""
    return (24, 32) if small else (512, 128)


OVERLAPPED_STEPS = 16


def graphs(device: torch.device, small: bool) -> Found:
    """Greedy decoding, eagerly and by graphs: equal tokens, tokens/s, GB/s of weights."""
    lm = random_model(TINY if small else EIGHT_BILLION, device, paged_attention(device))
    (prompt, tokens), rows = lengths(small), []
    weights = sum(weight.num_bytes for weight in lm.traits.weights)
    for batch_size in (1, 2) if small else (1, 4, 16, 64):
        eager, expected = decode(engine_for(lm, batch_size, prompt + tokens + 1), tokens, prompt)
        by_graphs = engine_for(lm, batch_size, prompt + tokens + 1, has_graphs=True)
        fast, generated = decode(by_graphs, tokens, prompt)
        overlapped, _ = decode(by_graphs, tokens, prompt, OVERLAPPED_STEPS)
        same = sum(map(equal_prefix, generated, expected))
        rows.append(
            {
                "batch": batch_size,
                "equal tokens": f"{same}/{batch_size * tokens}",
                "eager tokens/s": eager["tokens/s"],
                "tokens/s": fast["tokens/s"],
                "ms/step": fast["ms/step"],
                "GB/s": round(weights / fast["ms/step"] / 1e6, 1),
                "overlapped tokens/s": overlapped["tokens/s"],
                "overlapped GB/s": round(weights / overlapped["ms/step"] / 1e6, 1),
            }
        )
    return rows


PROFILED_STEPS = 8


def profile(device: torch.device, small: bool) -> Found:
    """Kernels of a step by graphs: launches and microseconds per step, those of most time first."""
    lm = random_model(TINY if small else EIGHT_BILLION, device, paged_attention(device))
    (prompt, tokens), rows = lengths(small), []
    for batch_size in (1,) if small else (1, 16):
        engine = engine_for(lm, batch_size, prompt + tokens + 1, has_graphs=True)
        prefill(engine, prompt, tokens)
        synchronize(device)
        with torch.profiler.profile() as trace:
            for _ in range(PROFILED_STEPS):
                engine.step()
            synchronize(device)
        rows += [{"batch": batch_size, **row} for row in kernel_times(trace, device)]
    return rows


def kernel_times(trace: torch.profiler.profile, device: torch.device) -> Found:
    """The 24 kernels of most time (on a CPU: operations), and the sum of all."""
    spent = dict[str, tuple[int, float]]()
    for event in trace.key_averages():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        time_us = event.self_device_time_total if is_kernel else event.self_cpu_time_total
        if is_kernel == (device.type == "cuda") and time_us:
            spent[event.key] = event.count, time_us
    spent["all"] = tuple(map(sum, zip(*spent.values(), strict=True)))  # type: ignore[assignment]
    rows = sorted(spent.items(), key=lambda item: -item[1][1])[:25]
    return [
        {
            "kernel": name[:90],
            "launches": round(count / PROFILED_STEPS, 2),
            "us": round(time_us / PROFILED_STEPS, 1),
        }
        for name, (count, time_us) in rows
    ]


class CompiledLayer:
    """In place of a layer and its first norm: both as one compiled function, for few tokens.

    Args:
        norm, layer: of the fused network.
        compiled: what ``run_layer`` was compiled to.
    """

    def __init__(self, norm: Norm, layer: FusedLayer, compiled: Callable[..., Tensor]) -> None:
        self._norm, self._layer, self._compiled = norm, layer, compiled

    def __call__(
        self,
        index: int,
        x: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        forward_pass: ForwardPass,
        output_index: Tensor | None = None,
    ) -> Tensor:
        """See ``FusedLayer``; ``x`` is the residual itself."""
        if output_index is not None or len(x) > 64:  # a prefill
            return self._layer(index, self._norm(x), residual, rotation, forward_pass, output_index)
        assert isinstance(forward_pass, PagedPass)
        assert forward_pass._plans, "made here: a cached property has a lock, which is not traced"
        return self._compiled(self._norm, self._layer, index, x, rotation, forward_pass)


def run_layer(
    norm: Norm,
    layer: FusedLayer,
    index: int,
    x: Tensor,
    rotation: tuple[Tensor, Tensor],
    forward_pass: ForwardPass,
) -> Tensor:
    """A layer with its first norm: x ``[T, hidden]`` -> ``[T, hidden]``."""
    return layer(index, norm(x), x, rotation, forward_pass)


def compile_layers(network: FusedNetwork) -> None:
    """Have Inductor compile each layer; on a CPU it is only traced.

    The graph is captured by the engine, so the mode is one without graphs of Inductor's own.
    """
    on_gpu = network.embedding.device.type == "cuda"
    compiled = torch.compile(
        run_layer,
        fullgraph=True,
        dynamic=False,
        backend="inductor" if on_gpu else "aot_eager",
        **({"mode": "max-autotune-no-cudagraphs"} if on_gpu else {}),
    )
    network.layers = [
        (lambda x: x, CompiledLayer(*pair, compiled))  # type: ignore[misc]
        for pair in network.layers
    ]


def compiled(device: torch.device, small: bool) -> Found:
    """Greedy decoding by graphs, plainly and with compiled layers."""
    lm = random_model(TINY if small else EIGHT_BILLION, device, paged_attention(device))
    assert isinstance(lm.network, FusedNetwork)
    (prompt, tokens), plain = lengths(small), dict[int, tuple[dict[str, Any], list[list[int]]]]()
    sizes = (1, 2) if small else (1, 16)

    def measured(batch_size: int) -> tuple[dict[str, Any], list[list[int]]]:
        engine = engine_for(lm, batch_size, prompt + tokens + 1, has_graphs=True)
        return decode(engine, tokens, prompt)

    for batch_size in sizes:
        plain[batch_size] = measured(batch_size)
    compile_layers(lm.network)
    rows = []
    # Each layer is a variant of the function for each batch size.
    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        for batch_size in sizes:
            before, expected = plain[batch_size]
            began = time.perf_counter()
            fast, generated = measured(batch_size)
            same = sum(map(equal_prefix, generated, expected))
            row = {"batch": batch_size, "equal tokens": f"{same}/{batch_size * tokens}"}
            row |= {"plain ms/step": before["ms/step"], "ms/step": fast["ms/step"]}
            row |= {"tokens/s": fast["tokens/s"]}
            rows.append({**row, "s in all": round(time.perf_counter() - began, 1)})
    return rows


def equal_prefix(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(tokens, expected, strict=True))
    return next((at for at, (one, other) in pairs if one != other), len(expected))


def paged_attention(device: torch.device) -> str:
    """Attention over pages by the kernels, or in plain torch on a CPU."""
    return "triton" if device.type == "cuda" else "forethought.backends.cuda.paged:PagedAttention"


def waits(device: torch.device, small: bool) -> Found:
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
    """A chain of a random head, of synthetic acceptance."""
    head = random_head(lm, folder)
    return EagleDecodingConfig(
        max_draft_len=length, speculative_model=head, synthetic_acceptance=0.7
    )


def dynamic_tree(lm: CausalLM, folder: Path, num_nodes: int) -> EagleDecodingConfig:
    """A tree of a random head, of six levels."""
    return EagleDecodingConfig(
        max_draft_len=6,
        max_total_draft_tokens=num_nodes,
        use_dynamic_tree=True,
        dynamic_tree_max_topK=min(num_nodes, 22),
        speculative_model=random_head(lm, folder),
    )


def random_head(lm: CausalLM, folder: Path) -> Path:
    """An EAGLE-3 head with random weights, saved once per folder."""
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
    return folder


def eagle(device: torch.device, small: bool) -> Found:
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
                    figures, _ = decode(engine, tokens, prompt)
                    rows.append({"length": length, "graphs": has_graphs, **figures})
    return rows


def tree(device: torch.device, small: bool) -> Found:
    """Rounds of a dynamic tree by graphs: what drafting and verifying its nodes costs."""
    lm = random_model(TINY if small else EIGHT_BILLION, device, paged_attention(device))
    (prompt, tokens), rows = lengths(small), []
    with tempfile.TemporaryDirectory() as folder:
        for num_nodes in (8,) if small else (16, 64, 128):
            config = dynamic_tree(lm, Path(folder), num_nodes)
            length = prompt + tokens + num_nodes + 1
            engine = engine_for(lm, 1, length, has_graphs=True, configs=[config])
            figures, _ = decode(engine, tokens // 2, prompt)
            drafting_ms = figures["ms/step"] * figures["drafting"]
            rows.append({"nodes": num_nodes, **figures, "draft ms": round(drafting_ms, 3)})
    return rows


def tests(device: torch.device, small: bool) -> Found:
    """The tests marked gpu; ``small`` only collects them.

    Only their files are collected: others import packages that a CUDA image does not have. A
    warning of the image's own versions of packages fails none.
    """
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rf", "-W", "default"]
    command += map(str, sorted(files))
    command += ["--collect-only"] if small else []
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))))
    if done.returncode:
        raise RuntimeError(f"pytest: {lines[-1] if lines else done.stderr[-200:]}")
    counts = {kind: number for number, kind in re.findall(r"(\d+) (\w+)", lines[-1])}
    return [{**counts, "s": round(time.perf_counter() - began, 1)}]


class Part(NamedTuple):
    """A part of the benchmark."""

    run: Callable[[torch.device, bool], Found]
    limit: int
    """Seconds that it may take on a GPU."""


ROOT = Path(__file__).parents[1]
PARTS = {
    "tests": Part(tests, 300),
    "bandwidth": Part(bandwidth, 60),
    "sdpa": Part(sdpa, 40),
    "kernel": Part(kernel, 120),
    "sweep": Part(sweep, 240),
    "gemv": Part(gemv, 120),
    "model": Part(model, 160),
    "graphs": Part(graphs, 140),
    "profile": Part(profile, 60),
    "compiled": Part(compiled, 240),
    "waits": Part(waits, 80),
    "eagle": Part(eagle, 180),
    "tree": Part(tree, 60),
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [heads, *([str(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def run_here(part: str, device: torch.device, small: bool) -> Found:
    """Run a part and print its table; an error is its only row."""
    has_engine = part in ("model", "graphs", "profile", "compiled", "waits", "eagle", "tree")
    try:
        with torch.inference_mode(not has_engine):
            rows = PARTS[part].run(device, small)
    except Exception as error:
        traceback.print_exc()
        rows = [{"failed": f"{type(error).__name__}: {error}"[:300]}]
    print(f"\n{part}\n{table(rows)}", flush=True)
    return [{"part": part, **row} for row in rows]


def run_apart(part: str, args: argparse.Namespace) -> Found:
    """The same in a process of its own, which a part that loses the device takes with it."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--in-process", "--parts", part]
    command += ["--device", args.device, *(["--small"] if args.small else [])]
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PARTS[part].limit
        )
        *shown, report = done.stdout.splitlines() or [""]
        rows: Found = json.loads(report)["rows"]
    except subprocess.TimeoutExpired:
        shown, rows = [], [{"part": part, "failed": f"more than {PARTS[part].limit} s"}]
    except (ValueError, LookupError):  # no report
        shown, rows = [], [{"part": part, "failed": f"exit status {done.returncode}"}]
    print("\n".join(shown or ["", *(f"{part}: {row['failed']}" for row in rows)]), flush=True)
    return rows


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU manages in seconds")
    parser.add_argument("--in-process", action="store_true", help="all parts in this process")
    args = parser.parse_args()
    device, figures = torch.device(args.device), Found()
    if not args.in_process:
        triton = importlib.util.find_spec("triton") is not None
        print(f"{device}, torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton}")
    for part in args.parts:
        figures += run_here(part, device, args.small) if args.in_process else run_apart(part, args)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print_report("gpu", figures, device_name=name)
    return int(any("failed" in row for row in figures))


if __name__ == "__main__":
    sys.exit(main())
