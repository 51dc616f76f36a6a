"""The same code on a CUDA device: equal to transformers there, and batch-invariant."""

from __future__ import annotations

import pytest
import torch

from attention_cases import CASES, attend, storage_for, tables
from engines import GREEDY, drain, engine, expect_empty, outputs
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.model.attention.base import PagedPass, Scoring
from forethought.model.attention.paged import PagedAttention
from forethought.model.attention.reference import ReferenceAttention
from forethought.model.batch import Batch, Row
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
