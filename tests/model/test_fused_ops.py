"""The small fused operations agree with plain torch, and an engine over them with transformers."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought.model import fused_ops, loader
from forethought.model.attention import base
from forethought.model.llama import layers
from models import greedy, prompts, tiny

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICES = [
    pytest.param("cpu", id="interpreted" if IS_INTERPRETED else "reference"),
    pytest.param("cuda", id="compiled", marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source).to(device, dtype)


def assert_close(result: Tensor, expected: Tensor) -> None:
    limit = 1e-5 if result.dtype == torch.float32 else 2e-2
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (1, 4096), (3, 6, 24)])
def test_rms_norm_agrees_with_plain_torch(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Of a weight for all heads, and of one for each."""
    x = random(*shape, device=device, dtype=dtype)
    weight = random(*shape[1:], device=device, dtype=dtype, seed=1)
    normal = torch.nn.functional.rms_norm(x.float(), shape[-1:], None, 1e-5)
    assert_close(fused_ops.rms_norm(x, weight, 1e-5), (normal * weight.float()).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 60), (1, 4098)])
def test_silu_and_mul_agrees_with_plain_torch(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    x = random(*shape, device=device, dtype=dtype)
    gate, up = x.chunk(2, -1)
    assert_close(fused_ops.silu_and_mul(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24])
def test_rotation_and_storing_agree_with_plain_torch(
    dim: int, dtype: torch.dtype, device: str
) -> None:
    """Of views of one product, as a layer has them; other slots are left alone."""
    kind = {"device": device, "dtype": dtype}
    qkv = random(5, 10, dim, **kind)  # type: ignore[arg-type]
    qk, v = qkv[:, :8], qkv[:, 8:]
    table = random(5, 2, 1, dim, **kind, seed=1)  # type: ignore[arg-type]
    cos, sin = table.unbind(1)
    slots = torch.tensor([7, 0, 3, 9, 4], device=device)
    keys, values = (random(12, 2, dim, **kind, seed=2) for _ in "kv")  # type: ignore[arg-type]
    expected_keys, expected_values = keys.clone(), values.clone()
    rotated = fused_ops.rotate(qk, cos, sin)
    expected_keys[slots], expected_values[slots] = rotated[:, 6:], v
    q = fused_ops.rotate_and_store(qk, v, [cos, sin], slots, keys, values)
    assert q.is_contiguous()
    assert_close(q, rotated[:, :6])
    assert_close(keys, expected_keys)
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_an_engine_over_the_operations_generates_what_transformers_does(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for module, name in (
        (layers, "rms_norm"),
        (layers, "silu_and_mul"),
        (base, "rotate_and_store"),
    ):
        operation = getattr(fused_ops, name)

        def counted(*operands: object, operation: object = operation, name: str = name) -> Tensor:
            calls.append(name)
            return operation(*operands)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(module, name, counted)
    for module in (layers, base):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(layers.Norm, "__call__", layers.Norm.plain)
    lm = loader.load(tiny(architecture), dtype="float32", forward="torch")
    machine = engine_over(lm)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in prompts((3, 17, 9))]
    drain(machine)
    assert outputs(sequences) == greedy(tiny(architecture), prompts((3, 17, 9)), 16)
    assert set(calls) == {"rms_norm", "silu_and_mul", "rotate_and_store"}
    expect_empty(machine)
