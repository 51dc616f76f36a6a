"""The same code on a CUDA device: equal to transformers there, and batch-invariant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import drafters
import mtp_modules
from attention_cases import CASES, attend, storage_for, tables
from eagle_heads import random_head
from engines import GREEDY, drain, engine, engine_over, expect_empty, load, outputs
from forethought.backends.cuda.graph_runner import GraphRunner
from forethought.backends.cuda.graphs import CudaCapture
from forethought.backends.cuda.paged import PagedAttention
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.config.engine import LlmArgs
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import resolve
from forethought.kv.pool import PagePool
from forethought.kv.staging import StaticBuffer
from forethought.kv.storage import KvStorage
from forethought.model.attention.base import PagedPass, Scoring
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import TransformersNetwork
from forethought.model.graph_capturer import GraphCapturer
from forethought.reference.engine import ReferenceAttention
from models import ARCHITECTURES, greedy, prompts, tiny

pytestmark = pytest.mark.gpu

PROMPTS = prompts((3, 17, 9, 30, 1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_on_cuda_equal_those_of_transformers_on_the_cpu(architecture: str) -> None:
    machine = engine(architecture, device="cuda", max_num_tokens=7, page_size=3)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(machine)
    assert outputs(sequences) == greedy(tiny(architecture), PROMPTS, 16)
    expect_empty(machine)


@pytest.mark.parametrize("architecture", ["qwen3_5", "kimi_linear", "bamba", "lfm2"])
def test_recurrent_layers_on_cuda_give_the_tokens_of_transformers(architecture: str) -> None:
    """By kernels, but for short convolutions; drafts are trees."""
    lm = load(architecture, "cuda")
    assert isinstance(lm.network, TransformersNetwork)
    assert lm.network.recurrent is not None
    assert (lm.network.recurrent._kernels is None) == (architecture == "lfm2")
    expected = greedy(tiny(architecture), PROMPTS, 16)
    answers = {tuple(text): answer for text, answer in zip(PROMPTS, expected, strict=True)}
    config = UserProvidedDecodingConfig(
        max_draft_len=4, max_total_draft_tokens=8, drafter=drafters.bush(answers)
    )
    machine = engine_over(lm, pages=80, max_num_tokens=23, speculative=[config])
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(machine)
    assert outputs(sequences) == expected
    assert machine.stats.accepted > 5
    expect_empty(machine)


def test_a_seeded_sample_on_cuda_is_the_same_in_any_company() -> None:
    params = GREEDY.replace(temperature=1.0, seed=11, n=2)
    alone = engine(device="cuda")
    samples = alone.add(PROMPTS[2], params)
    drain(alone)
    busy = engine(device="cuda", page_size=3, max_num_tokens=9, pages=40)
    for prompt in PROMPTS:
        busy.add(prompt, GREEDY.replace(temperature=0.7))
    same = busy.add(PROMPTS[2], params)
    drain(busy)
    assert outputs(same) == outputs(samples)
    expect_empty(busy)


def test_forks_on_cuda_share_pages_and_disturb_nothing() -> None:
    machine = engine(device="cuda", page_size=4)
    (main,) = machine.add(PROMPTS[1], GREEDY, keep=True)
    for _ in range(6):
        machine.step()
    probe = machine.fork(main)
    machine.extend(probe, [5, 6])
    machine.resume(probe, GREEDY)
    drain(machine)
    starts = [sequence.tokens[: sequence.prompt_length] for sequence in (main, probe)]
    assert outputs((main, probe)) == greedy(tiny("llama"), starts, 16)
    for sequence in (main, probe):
        machine.close(sequence)
    expect_empty(machine)


DRAFTERS: dict[str, Callable[[], list[DecodingBaseConfig]]] = {
    "plain": list,
    "ngram": lambda: [NGramDecodingConfig(max_draft_len=3)],
    "eagle3": lambda: [EagleDecodingConfig(max_draft_len=4, speculative_model=random_head())],
    "draft model": lambda: [
        DraftTargetDecodingConfig(max_draft_len=4, speculative_model=tiny("llama", seed=2))
    ],
    "mtp modules": lambda: [
        MTPDecodingConfig(
            num_nextn_predict_layers=2,
            max_draft_len=3,
            speculative_model=mtp_modules.saved(count=2),
        )
    ],
    "tree": lambda: [EagleDecodingConfig(eagle_choices=PATHS, speculative_model=random_head())],
    "dynamic tree": lambda: [
        EagleDecodingConfig(
            max_draft_len=3,
            use_dynamic_tree=True,
            dynamic_tree_max_topK=3,
            max_total_draft_tokens=8,
            speculative_model=random_head(),
        )
    ],
    "sampled tree": lambda: [
        DraftTargetDecodingConfig(
            draft_choices=PATHS, draft_sampling="sampled", speculative_model=tiny("llama")
        )
    ],
}
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def graphs_on_cuda() -> GraphCapturer:
    pytest.importorskip("triton")
    return GraphCapturer(CudaCapture(torch.device("cuda")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_graphs_generate_what_eager_forwards_do(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nonsense in what a step does not write; in bfloat16 only that it runs."""
    fill = StaticBuffer.fill

    def poison(self: StaticBuffer, values: Any) -> None:
        self._device.fill_(10**12)
        fill(self, values)

    monkeypatch.setattr(StaticBuffer, "fill", poison)
    drafters, lm = DRAFTERS[name](), load("llama", "cuda", dtype)
    runs = []
    for graphs in (None, graphs_on_cuda()):
        machine = engine_over(lm, speculative=drafters, page_size=16, graphs=graphs)
        sequences = []
        for number, prompt in enumerate(PROMPTS):
            params = GREEDY.replace(max_tokens=8 + 3 * number, temperature=0.8 * (number % 2))
            sequences += machine.add(prompt, params.replace(seed=number))
            machine.step()
        drain(machine)
        assert machine.stats.draft_failures == machine.stats.failed_forwards == 0
        assert bool(machine.stats.drafted) == bool(drafters)
        expect_empty(machine)
        runs.append(outputs(sequences))
    assert graphs is not None
    assert graphs.num_replays > 5
    assert dtype != "float32" or runs[0] == runs[1]


@pytest.mark.parametrize("name", ["eagle3", "draft model"])
def test_continuous_steps_with_chain_drafts_generate_what_single_ones_do(name: str) -> None:
    drafters, lm, runs = DRAFTERS[name](), load("llama", "cuda"), []
    for num_steps in (1, 8):
        machine = engine_over(lm, speculative=drafters, page_size=16, graphs=graphs_on_cuda())
        machine.num_decode_steps = num_steps
        sequences = [
            machine.add(prompt, GREEDY.replace(max_tokens=20 + 3 * number))[0]
            for number, prompt in enumerate(PROMPTS)
        ]
        drain(machine)
        assert machine.stats.draft_failures == machine.stats.failed_forwards == 0
        expect_empty(machine)
        runs.append((outputs(sequences), machine.stats.drafted, machine.stats.accepted))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "name", ["plain", "eagle3", "draft model", "mtp modules", "tree", "sampled tree"]
)
def test_neither_a_forward_nor_a_draft_waits_for_the_gpu(name: str) -> None:
    drafters = DRAFTERS[name]()
    machine = engine_over(
        load("llama", "cuda"), speculative=drafters, page_size=16, graphs=graphs_on_cuda()
    )
    for prompt in PROMPTS[:2]:
        machine.add(prompt, GREEDY.replace(temperature=0.8, max_tokens=40))
    for _ in range(5):
        machine.step()  # shapes are captured
    owners: list[Any] = [(machine.runner, "forward")]
    owners += [(entry.drafter, "prepare_draft_tokens") for entry in machine.speculation.drafters]
    for owner, method in owners:
        setattr(owner, method, without_waits(getattr(owner, method)))
    before = machine.stats.drafted
    for _ in range(2):
        machine.step()
    assert machine.stats.failed_forwards == machine.stats.draft_failures == 0
    assert (machine.stats.drafted > before) == bool(drafters)
    drain(machine)


def without_waits(call: Callable[..., Any]) -> Callable[..., Any]:
    def strict(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strict


def test_an_engine_on_cuda_captures_graphs_by_default() -> None:
    pytest.importorskip("triton")
    machine = resolve.build(
        LlmArgs(device="cuda", kv_cache_config={"max_tokens": 2048}), tiny("llama")
    )
    assert isinstance(machine.runner, GraphRunner)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(machine)
    assert machine.runner.graphs.num_replays > 10
    assert outputs(sequences) == greedy(tiny("llama"), PROMPTS, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernels_agree_with_the_reference(name: str, dtype: torch.dtype) -> None:
    """Decodes over split rows, a chunk of a prefill, a tree."""
    pytest.importorskip("triton")
    case, shapes = CASES[name], [(900, 1, None), (3, 1, None), (20, 40, None), (7, 3, (-1, 0, 0))]
    made = tables(PagePool(80, 16), [start + size for start, size, _ in shapes], scattered=True)
    rows = [
        Row([1] * size, start, table, parents)
        for (start, size, parents), table in zip(shapes, made, strict=True)
    ]
    stored = storage_for(case, 80, 16)
    exact = attend(ReferenceAttention(), case, Batch.build(rows), stored, seed=2)
    storage = KvStorage([case.shape], 80, 16, dtype, "cuda")
    for on_device, on_host in ((storage.keys, stored.keys), (storage.values, stored.values)):
        on_device[0].copy_(on_host[0])
    source = torch.Generator().manual_seed(2)
    total, shape = sum(size for _, size, _ in shapes), case.shape
    sizes = [
        (case.heads, shape.key_dim),
        (shape.kv_heads, shape.key_dim),
        (shape.kv_heads, shape.value_dim),
    ]
    q, k, v = (torch.randn(total, *each, generator=source).to("cuda", dtype) for each in sizes)
    sinks = torch.randn(case.heads, generator=source).cuda() if case.sinks else None
    forward_pass = PagedPass(Batch.build(rows, "cuda"), storage, PagedAttention(), [case.window])
    found = forward_pass.attend(0, q, k, v, Scoring(0.4, case.softcap, sinks))
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.float().cpu(), exact, rtol=limit, atol=limit)
