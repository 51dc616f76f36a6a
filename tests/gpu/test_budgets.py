"""How many launches, copies and waits a step costs on a GPU, counted on a device that is not there.

The budgets are those of a network of three layers. What the engine generates there is compared with
what it generates on the CPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import mtp_modules as mtp
from eagle_heads import random_head
from engines import drain, engine_over, expect_empty, load, outputs
from fake_cuda import DEVICE, FakeCuda, FakeEvent, fake_cuda
from fake_graph import FakeGraph
from forethought.backends.cuda import graphs as cuda_graphs
from forethought.backends.cuda.graph_runner import GraphRunner
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
)
from forethought.config.engine import KvCacheConfig, LlmArgs
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence as LiveSequence
from forethought.errors import ParameterError
from forethought.kv.pool import PagePool
from forethought.kv.staging import upload
from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import PageCopy, PageTable
from forethought.model import loader
from forethought.model.attention.base import Scoring
from forethought.model.attention.paged_layout import PagedLayout
from forethought.model.attention.sdpa import softmax_attention
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM
from forethought.model.device import ForwardTimer
from forethought.model.graph_capturer import GraphCapturer
from forethought.model.quantization import Quantization
from models import prompts, save_random, tiny

PAGED = "forethought.backends.cuda.paged:PagedAttention"
PROMPTS = prompts((9, 4))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WARM_UP, STEPS = 2, 3
Budget = dict[str, float]
SAMPLED = GREEDY.replace(temperature=0.8, seed=3)
SCORED = SAMPLED.replace(logprobs=2, confidence=3)


@functools.cache
def on_device(attention: str) -> CausalLM:
    """The tiny model there; only used where there is a device, but that may be another one."""
    return loader.load(tiny("llama"), dtype="float32", device=DEVICE, attention=attention)


def started(
    machine: Engine, params: SamplingParams, prompt_ids: Sequence[Sequence[int]]
) -> list[LiveSequence]:
    sequences = [machine.add(prompt, params)[0] for prompt in prompt_ids]
    for _ in range(WARM_UP):
        machine.step()
    return sequences


def measured(device: FakeCuda, machine: Engine) -> dict[str, float]:
    """What a step costs."""
    device.reset()
    for _ in range(STEPS):
        machine.step()
    return {kind: number / STEPS for kind, number in device.counts.items()}


ALL_OPTIONS = SAMPLED.replace(
    top_p=0.9, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, min_tokens=3
)


def eagle3() -> list[DecodingBaseConfig]:
    return [EagleDecodingConfig(max_draft_len=4, speculative_model=random_head("eagle3"))]


PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def tree() -> list[DecodingBaseConfig]:
    return [EagleDecodingConfig(eagle_choices=PATHS, speculative_model=random_head("eagle3"))]


def dynamic_tree() -> list[DecodingBaseConfig]:
    fields = {"max_draft_len": 3, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}
    head = random_head("eagle3")
    return [EagleDecodingConfig(use_dynamic_tree=True, speculative_model=head, **fields)]


def draft_model() -> list[DecodingBaseConfig]:
    return [DraftTargetDecodingConfig(max_draft_len=4, speculative_model=tiny("llama", seed=2))]


def mtp_modules() -> list[DecodingBaseConfig]:
    saved = mtp.saved("llama", count=2)
    return [MTPDecodingConfig(num_nextn_predict_layers=2, max_draft_len=3, speculative_model=saved)]


def mtp_module() -> list[DecodingBaseConfig]:
    return [MTPDecodingConfig(max_draft_len=3, speculative_model=mtp.saved("llama"))]


def lossy() -> list[DecodingBaseConfig]:
    saved = mtp.saved("llama")
    return [MTPDecodingConfig(max_draft_len=3, speculative_model=saved, synthetic_acceptance=0.7)]


def relaxed() -> list[DecodingBaseConfig]:
    rule = {"relaxed_topk": 9, "relaxed_delta": 0.9, "relaxed_rule": "probability"}
    phase = {"begin_thinking_phase_token": 3, "end_thinking_phase_token": 4}
    saved = mtp.saved("llama")
    return [
        MTPDecodingConfig(
            max_draft_len=3,
            speculative_model=saved,
            use_relaxed_acceptance_for_thinking=True,
            **rule,
            **phase,
        )
    ]


def sampled_chain() -> list[DecodingBaseConfig]:
    fields = {"speculative_model": tiny("llama"), "draft_sampling": "sampled"}
    return [DraftTargetDecodingConfig(max_draft_len=3, **fields)]


def sampled_tree() -> list[DecodingBaseConfig]:
    fields = {"speculative_model": tiny("llama"), "draft_sampling": "sampled"}
    return [DraftTargetDecodingConfig(draft_choices=PATHS, **fields)]


# How it samples and drafts, the attention backend, and what a step may cost.
Case = tuple[SamplingParams, str, Callable[[], list[DecodingBaseConfig]], Budget]
CASES: dict[str, Case] = {
    "greedy": (GREEDY, PAGED, list, {"launches": 50, "staged": 1, "waits": 1}),
    "sampled": (SAMPLED, PAGED, list, {"launches": 67, "staged": 3, "waits": 1}),
    "all options": (ALL_OPTIONS, PAGED, list, {"launches": 119, "staged": 15, "waits": 1}),
    "eagle3": (GREEDY, PAGED, eagle3, {"launches": 164, "staged": 6, "waits": 1}),
    "eagle3 tree": (SAMPLED, PAGED, tree, {"launches": 177, "staged": 8, "waits": 1}),
    "penalties, tree": (ALL_OPTIONS, PAGED, tree, {"launches": 237, "staged": 22, "waits": 1}),
    "draft model": (GREEDY, PAGED, draft_model, {"launches": 273, "staged": 6, "waits": 1}),
    "mtp modules": (GREEDY, PAGED, mtp_modules, {"launches": 143, "staged": 10, "waits": 1}),
    "sampled drafts": (SAMPLED, PAGED, sampled_chain, {"launches": 322, "staged": 14, "waits": 1}),
    "sampled trees": (SAMPLED, PAGED, sampled_tree, {"launches": 340, "staged": 17, "waits": 1}),
    "scores": (SCORED, PAGED, list, {"launches": 114, "staged": 5, "waits": 1}),
    "scores, tree": (SCORED, PAGED, tree, {"launches": 227, "staged": 11, "waits": 1}),
    "scores, sampled drafts": (
        SCORED,
        PAGED,
        sampled_chain,
        {"launches": 239, "staged": 12, "waits": 1},
    ),
    "synthetic": (GREEDY, PAGED, lossy, {"launches": 162, "staged": 7, "waits": 1}),
    "relaxed": (GREEDY, PAGED, relaxed, {"launches": 175, "staged": 7, "waits": 1}),
    "scores, relaxed": (
        GREEDY.replace(logprobs=2),
        PAGED,
        relaxed,
        {"launches": 197, "staged": 10, "waits": 1},
    ),
    "no triton": (GREEDY, "sdpa", list, {"launches": 69, "staged": 4, "waits": 1}),
}
# The same with CUDA graphs: one launch for the whole network.
GRAPH_CASES: dict[str, Case] = {
    "greedy": (GREEDY, PAGED, list, {"launches": 5, "staged": 1, "waits": 1}),
    "sampled": (SAMPLED, PAGED, list, {"launches": 22, "staged": 3, "waits": 1}),
    "all options": (ALL_OPTIONS, PAGED, list, {"launches": 74, "staged": 15, "waits": 1}),
    "eagle3": (GREEDY, PAGED, eagle3, {"launches": 10, "staged": 5, "waits": 1}),
    "eagle3 tree": (SAMPLED, PAGED, tree, {"launches": 27, "staged": 6, "waits": 1}),
    "draft model": (GREEDY, PAGED, draft_model, {"launches": 10, "staged": 5, "waits": 1}),
    "mtp modules": (GREEDY, PAGED, mtp_modules, {"launches": 10, "staged": 4, "waits": 1}),
    "penalties, tree": (ALL_OPTIONS, PAGED, tree, {"launches": 87, "staged": 20, "waits": 1}),
    "scores, tree": (SCORED, PAGED, tree, {"launches": 77, "staged": 9, "waits": 1}),
    "dynamic tree": (GREEDY, PAGED, dynamic_tree, {"launches": 6, "staged": 4, "waits": 2}),
}


@pytest.mark.parametrize(
    ("case", "has_graphs"),
    [
        *(
            pytest.param(case, False, id=name, marks=[pytest.mark.slow] * (number % 2))
            for number, (name, case) in enumerate(CASES.items())
        ),
        *(pytest.param(case, True, id=f"{name}, graphs") for name, case in GRAPH_CASES.items()),
    ],
)
def test_a_step_keeps_to_its_budget_and_generates_what_the_cpu_does(
    case: Case, has_graphs: bool
) -> None:
    params, attention, configs, budget = case
    graphs = GraphCapturer(FakeGraph) if has_graphs else None
    drafters = configs()
    on_cpu = engine_over(load("llama"), speculative=drafters, page_size=16)
    expected = started(on_cpu, params, PROMPTS)
    drain(on_cpu)
    with fake_cuda() as device:
        machine = engine_over(
            on_device(attention), speculative=drafters, page_size=16, graphs=graphs
        )
        sequences = started(machine, params, PROMPTS)
        for _ in range(2 if has_graphs else 0):  # in which shapes are captured
            machine.step()
        spent = measured(device, machine)
        drain(machine)
    assert outputs(sequences) == outputs(expected)
    assert machine.stats.draft_failures == 0
    assert bool(machine.stats.drafted) == bool(drafters)
    over = {kind: number for kind, number in spent.items() if number > budget.get(kind, 0)}
    assert not over, f"{spent}, allowed {budget}: {device.sites.most_common()}"


@pytest.mark.parametrize(("has_graphs", "launches"), [(True, 5), (False, 50)])
@pytest.mark.parametrize("number", [1, 2])
def test_continuous_decode_steps_wait_once(has_graphs: bool, launches: int, number: int) -> None:
    """Each step reads the tokens of the one before on the device."""
    num_steps, params = 4, GREEDY.replace(max_tokens=2 * 4 + 1 + 4 + 2)
    each = [params, params.replace(max_tokens=2 * 4 + 1 + 2)][:number]
    graphs = GraphCapturer(FakeGraph) if has_graphs else None

    def run(lm: CausalLM, graphs: GraphCapturer | None = None) -> tuple[Engine, list[LiveSequence]]:
        machine = engine_over(lm, page_size=16, graphs=graphs)
        made = [machine.add(*pair)[0] for pair in zip(PROMPTS, each, strict=False)]
        machine.step()
        machine.num_decode_steps = num_steps
        return machine, made

    on_cpu, expected = run(load("llama"))
    on_cpu.num_decode_steps = 1
    drain(on_cpu)
    with fake_cuda() as device:
        machine, sequences = run(on_device(PAGED), graphs)
        machine.step()  # in which shapes are captured
        device.reset()
        machine.step()
        assert len(sequences[0].output) == 1 + 2 * num_steps
        spent = dict(device.counts)
        assert spent.pop("waits") == 1, device.sites
        assert spent.pop("staged") == num_steps
        assert spent.pop("launches") <= num_steps * launches, device.sites
        assert not spent
        replays = 0 if graphs is None else graphs.num_replays
        assert replays == (2 * num_steps if has_graphs else 0)
        device.reset()
        machine.step()  # the second one has two tokens left
        assert device.counts["waits"] == 1
        drain(machine)
    assert outputs(sequences) == outputs(expected)
    assert machine.stats.steps == on_cpu.stats.steps
    machine.check_integrity()


# Launches of a round, with and without graphs of them.
ROUNDS: dict[str, tuple[Callable[[], list[DecodingBaseConfig]], int, int]] = {
    "draft model": (draft_model, 2, 346),
    "eagle3": (eagle3, 2, 249),
    "mtp": (mtp_module, 2, 221),
}


QUICK_ROUNDS = {("draft model", 1, False), ("eagle3", 2, True), ("mtp", 1, True)}


@pytest.mark.parametrize(
    ("kind", "number", "has_graphs"),
    [
        pytest.param(*case, marks=() if case in QUICK_ROUNDS else pytest.mark.slow)
        for case in itertools.product(ROUNDS, (1, 2), (True, False))
    ],
)
def test_continuous_decode_steps_with_chain_drafts_wait_once(
    kind: str, number: int, has_graphs: bool
) -> None:
    """Drafts, what is accepted of them, and positions stay on the device between the steps."""
    configs, with_graphs, eager = ROUNDS[kind]
    num_steps, drafters = 4, configs()
    params = GREEDY.replace(max_tokens=60)
    each = [params, params.replace(max_tokens=52)][:number]

    def run(lm: CausalLM, graphs: GraphCapturer | None = None) -> tuple[Engine, list[LiveSequence]]:
        machine = engine_over(lm, page_size=16, graphs=graphs, speculative=drafters)
        made = [machine.add(*pair)[0] for pair in zip(prompts((9, 11)), each, strict=False)]
        machine.step()
        machine.num_decode_steps = num_steps
        return machine, made

    on_cpu, expected = run(load("llama"))
    on_cpu.num_decode_steps = 1
    drain(on_cpu)
    with fake_cuda() as device:
        graphs = GraphCapturer(FakeGraph, 64 if has_graphs else 0)
        machine, sequences = run(on_device(PAGED), graphs)
        machine.step()  # in which shapes are captured
        device.reset()
        before = machine.stats.steps
        machine.step()
        assert machine.stats.steps == before + num_steps
        spent = dict(device.counts)
        assert spent.pop("waits") == 1, device.sites
        assert spent.pop("staged") == 4, device.sites  # of a call: three batches, and the rows
        most = num_steps * (with_graphs if has_graphs else eager) + 1
        assert spent.pop("launches") <= most, device.sites
        assert not spent
        drain(machine)
    assert outputs(sequences) == outputs(expected)
    assert machine.stats.accepted == on_cpu.stats.accepted
    assert machine.stats.drafted == on_cpu.stats.drafted > 0
    assert machine.stats.failed_forwards == machine.stats.draft_failures == 0
    machine.check_integrity()


@pytest.mark.parametrize(("has_clients", "size"), [(True, 1), (False, 4)])
def test_an_engine_whose_clients_wait_for_ends_queues_no_steps(
    has_clients: bool, size: int
) -> None:
    """No end, and no request, reaches steps that are queued."""
    with fake_cuda():
        machine = engine_over(on_device(PAGED), page_size=16)
        machine.num_decode_steps, machine.ends_with_rows = 4, has_clients
        sequence = machine.add(PROMPTS[0], GREEDY)[0]
        machine.step()
        sizes = [len(event.tokens) for event in machine.step()]
        drain(machine)
    assert sizes == [size]
    assert len(sequence.output) == 12
    expect_empty(machine)


def test_the_indices_of_copied_pages_are_uploaded_once() -> None:
    with fake_cuda() as device:
        storage = KvStorage([LayerShape(2, 8, 8), LayerShape(1, 4, 4)], 4, 2, torch.float32, DEVICE)
        for stack in storage._stacks:
            stack.copy_(torch.arange(stack.numel()).view(stack.shape))
        before = [stack.cpu() for stack in storage._stacks]
        device.reset()
        storage.copy_pages([PageCopy(0, 2), PageCopy(1, 3)])
        assert device.counts["staged"] == 2
        after = [stack.cpu() for stack in storage._stacks]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, torch.cat([old[:, :4], old[:, :4]], dim=1))


def test_ends_are_noticed_at_the_end_of_continuous_decode_steps() -> None:
    with fake_cuda():
        machine = engine_over(on_device(PAGED), page_size=16, graphs=GraphCapturer(FakeGraph))
        machine.num_decode_steps = 4
        whole = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
        drain(machine)
        stop, steps = whole[0].output[2], machine.stats.steps
        ended = [
            machine.add(PROMPTS[0], GREEDY.replace(stop_token_ids=[stop]))[0],
            machine.add(PROMPTS[1], GREEDY.replace(max_tokens=2))[0],
        ]
        drain(machine)
    assert outputs(ended) == [whole[0].output[:3], whole[1].output[:2]]
    assert machine.stats.steps - steps == 5
    assert machine.pool.in_use == 0


@pytest.mark.parametrize(
    ("configs", "has_graphs"), [(eagle3, False), (tree, False), (eagle3, True)]
)
def test_drafts_of_unequal_depth_are_verified_without_a_further_wait(
    configs: Callable[[], list[DecodingBaseConfig]], has_graphs: bool
) -> None:
    drafters = configs()
    each = [
        GREEDY.replace(speculation=SpeculationParams(max_draft_len=length)) for length in (1, 3, 2)
    ]

    def run(lm: CausalLM, graphs: GraphCapturer | None = None) -> tuple[Engine, list[LiveSequence]]:
        machine = engine_over(lm, speculative=drafters, page_size=16, graphs=graphs)
        made = [
            machine.add(prompt, params)[0]
            for prompt, params in zip(prompts((5, 6, 7)), each, strict=True)
        ]
        for _ in range(WARM_UP):
            machine.step()
        return machine, made

    on_cpu, expected = run(load("llama"))
    drain(on_cpu)
    with fake_cuda() as device:
        machine, sequences = run(on_device(PAGED), GraphCapturer(FakeGraph) if has_graphs else None)
        machine.step()  # in which shapes are captured
        device.reset()
        machine.step()
        assert device.counts["waits"] == 1, device.sites
        assert device.counts["uploads"] == 0, device.sites
        drain(machine)
    assert outputs(sequences) == outputs(expected)
    assert machine.stats.draft_failures == 0
    assert machine.stats.accepted == on_cpu.stats.accepted
    assert machine.stats.drafted == on_cpu.stats.drafted > 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_run_on_a_gpu_by_graphs_too(
    quantization: Quantization, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny("qwen3"), hidden_size=64, intermediate_size=96)
    save_random(config, tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "quantization": quantization}
    on_cpu = engine_over(loader.load(tmp_path, attention=PAGED, **settings), page_size=16)
    expected = started(on_cpu, GREEDY, PROMPTS)
    drain(on_cpu)
    for has_graphs in (False, True):
        with fake_cuda() as device:
            lm = loader.load(tmp_path, device=DEVICE, attention=PAGED, **settings)
            graphs = GraphCapturer(FakeGraph) if has_graphs else None
            machine = engine_over(lm, page_size=16, graphs=graphs)
            sequences = started(machine, GREEDY, PROMPTS)
            spent = measured(device, machine)
            drain(machine)
        assert outputs(sequences) == outputs(expected)
        assert spent["waits"] == spent["staged"] == 1
        assert spent.get("uploads", 0) == 0
        assert not has_graphs or spent["launches"] == 5


def test_the_device_refuses_what_a_gpu_refuses_and_counts_what_it_waits_for() -> None:
    with fake_cuda() as device:
        x = torch.arange(6, device=DEVICE)
        assert (x + 1).tolist() == [1, 2, 3, 4, 5, 6]
        with pytest.raises(RuntimeError, match="expected all tensors to be on cuda"):
            x + torch.arange(6)
        with pytest.raises(RuntimeError, match="not supported"):
            x.numpy()
        device.reset()
        assert bool((x.view(2, 3)[1] > 2).all())  # a comparison, a reduction, a view
        assert device.counts == {"launches": 2, "waits": 1}
        device.reset()
        assert torch.tensor([1, 2], device=DEVICE).device == DEVICE
        assert upload([1, 2], DEVICE).tolist() == [1, 2]
        assert device.counts == {"uploads": 1, "staged": 1, "waits": 1}
        device.reset()
        assert x[x > 3].tolist() == [4, 5]
        assert device.counts == {"launches": 2, "waits": 2}


def test_attention_on_cuda_leaves_cudnn_out_and_the_setting_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN builds a plan for each new length of the mask."""
    during: list[bool] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        during.append(torch.backends.cuda.cudnn_sdp_enabled())
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    found = []
    with fake_cuda():
        for device in ("cpu", DEVICE):
            q = torch.ones(1, 2, 3, 8, device=device)
            for invariant in (True, False):
                softmax_attention(q, q, q, None, Scoring(1.0), batch_invariant=invariant)
            found.append(torch.backends.cuda.cudnn_sdp_enabled())
    assert during == [True, True, False, False]
    assert found == [True, True]


def test_attention_on_cuda_gets_a_mask_that_begins_at_a_multiple_of_16_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's memory-efficient kernel raises where it does not."""
    offsets: list[int] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, attn_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        offsets.append(attn_mask.storage_offset() * attn_mask.element_size() % 16)
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    with fake_cuda():
        q = torch.ones(1, 2, 3, 8, device=DEVICE)
        mask = torch.zeros(1, 1, 1, 8, device=DEVICE)[..., 5:]
        for invariant in (True, False):
            softmax_attention(q, q, q, mask, Scoring(1.0), batch_invariant=invariant)
    assert offsets == [0, 0]


def test_the_kv_cache_leaves_memory_for_steps_on_a_gpu() -> None:
    config = KvCacheConfig(free_gpu_memory_fraction=1.0)
    for free, kept in ((10 * 2**30, 2**30), (100 * 2**30, 2 * 2**30)):
        with fake_cuda(memory=free):
            assert resolve._cache_bytes(config, DEVICE) == free - kept


def built(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    """The engine of the tiny model on the device, whose graphs are fake ones."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda device: FakeGraph)
    fields = {"device": "cuda:0", "attention": PAGED, "dtype": "float32", **settings}
    return resolve.build(LlmArgs(**fields), tiny("llama"))


def test_cuda_graphs_are_on_by_default_and_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_cuda():
        for settings, expected in (
            ({}, True),
            ({"fuse": False}, False),
            ({"fuse": False, "cuda_graphs": True}, True),
            ({"attention": "sdpa"}, False),
            ({"cuda_graphs": False}, False),
        ):
            runner = built(monkeypatch, **settings).runner
            assert isinstance(runner, GraphRunner) == expected, settings
            assert runner.storage.has_scratch_page == expected
            assert not expected or runner.graphs.num_graphs == 1


def test_graphs_that_are_asked_for_and_impossible_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ParameterError, match="the model runs on cpu"):
        resolve.build(LlmArgs(device="cpu", cuda_graphs=True), tiny("llama"))

    def refuse(compute: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with fake_cuda():
        with pytest.raises(ParameterError, match="attention sdpa depends on the rows"):
            built(monkeypatch, attention="sdpa", cuda_graphs=True)
        monkeypatch.setattr(FakeGraph, "__init__", lambda self, compute: refuse(compute))
        with pytest.raises(ParameterError, match="cannot be captured: RuntimeError: operation"):
            built(monkeypatch, cuda_graphs=True)
        machine = built(monkeypatch)  # it was not asked for, so it does without
        machine.add([5, 6, 7], GREEDY)
        drain(machine)
        assert machine.stats.failures == machine.runner.graphs.num_graphs == 0


def test_the_kv_cache_leaves_memory_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = KvCacheConfig(free_gpu_memory_fraction=1.0)
    given: list[int] = []
    size_of = resolve._cache_bytes

    def watched(config: KvCacheConfig, device: torch.device, reserved: int) -> int:
        given.append(reserved)
        return size_of(config, device, reserved)

    monkeypatch.setattr(resolve, "_cache_bytes", watched)
    with fake_cuda(memory=10 * 2**30):
        assert size_of(config, DEVICE, 2**30) == 8 * 2**30
        assert size_of(config, DEVICE, 2**40) == 0
        small, large = (built(monkeypatch, max_batch_size=number).runner for number in (1, 64))
        built(monkeypatch, cuda_graphs=False)
    assert given == [small.reserved_bytes, large.reserved_bytes, 0]
    assert 2**28 < small.reserved_bytes < large.reserved_bytes


def test_a_forward_on_a_gpu_is_timed_by_completed_events() -> None:
    with fake_cuda():
        timer = ForwardTimer(DEVICE)
        with timer:
            FakeEvent.passed = False
        assert timer.take() == 0.0
        FakeEvent.passed = True
        with timer:
            pass
        assert timer.take() == pytest.approx(2e-3)  # both, a millisecond each
        assert timer.take() == 0.0


def test_the_rows_of_a_batch_reach_the_device_in_one_copy() -> None:
    pool = PagePool(40, 4)
    rows = []
    for start, parents in ((9, None), (70, (-1, 0, 0, 1)), (0, None)):
        table = PageTable(pool)
        size = 3 if parents is None else len(parents)
        table.append(start + size)
        rows.append(Row([5 + n for n in range(size)], start, table, parents))
    here = Batch.build(rows, offset=2)
    with fake_cuda() as device:
        there = Batch.build(rows, DEVICE, offset=2)
        assert device.counts == {"staged": 1}
        for name in ("token_ids", "positions", "slots", "logit_index"):
            assert getattr(there, name).tolist() == getattr(here, name).tolist(), name
        layout, expected = there.layout, PagedLayout.of(here.spans, "cpu")
        assert layout is not None
        for name in ("rows", "tokens", "tiles", "pages", "words", "partials"):
            assert getattr(layout, name).tolist() == getattr(expected, name).tolist(), name
        assert there.slot_numbers.tolist() == here.slot_numbers.tolist()
        assert [span.seen_from for span in there.spans] == [2, 2, 2]
