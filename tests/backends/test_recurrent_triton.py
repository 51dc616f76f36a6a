"""Recurrent layers by Triton's kernels, interpreted; transformers' modules are the reference."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import drafters
from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.model import loader
from forethought.model.causal_lm import TransformersNetwork
from forethought.model.recurrent_layers import RecurrentLayers, find_recurrent_layers
from models import greedy, new_module, prompts, tiny

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(
        not IS_INTERPRETED, reason="needs triton and TRITON_INTERPRET=1: see CONTRIBUTING.md"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_key_head_dim": 20, "linear_value_head_dim": 72},
    "qwen3_next": {},
    "olmo_hybrid": {"linear_key_head_dim": 12, "linear_value_head_dim": 24},
    "kimi_linear": {"linear_head_dim": 12, "linear_num_heads": 3},
    "bamba": {"mamba_d_state": 40},
    "nemotron_h": {"time_step_min": 3.0},
    "falcon_h1": {},
    "zamba2": {},
}


def kernels_of(part: RecurrentLayers | None) -> Any:
    assert part is not None
    return part._kernels


@pytest.mark.parametrize("architecture", SIZES)
def test_layers_of_any_size_compute_what_their_modules_do(architecture: str) -> None:
    """Those that did not would not be computed by kernels."""
    module = new_module(architecture, **SIZES[architecture])
    assert kernels_of(RecurrentLayers.of(module, has_kernels=True)) is not None


def test_a_layer_that_computes_something_else_stays_in_torch() -> None:
    module = new_module("qwen3_5")
    part: Any = find_recurrent_layers(module)[-1]
    original = part.forward
    part.forward = functools.wraps(original)(lambda x, **cache: 1.01 * original(x, **cache))
    assert kernels_of(RecurrentLayers.of(module, has_kernels=True)) is None


@pytest.mark.parametrize("architecture", ["jamba", "lfm2"])
def test_other_kinds_of_layers_have_no_kernels(architecture: str) -> None:
    module = new_module(architecture)
    assert kernels_of(RecurrentLayers.of(module, has_kernels=True)) is None


def run(layers: Any, x: Tensor, runs: list[tuple[list[int], int | None]]) -> tuple[Tensor, Any]:
    """The outputs of the first layer, and the states after the runs of one row."""
    table = layers.table(len(x), [0, len(x)])
    after = {tokens[-1]: layers.new_state() for tokens, _ in runs}
    for tokens, before in runs:
        table.add(tokens, None if before is None else after[before], after[tokens[-1]])
    return layers.compute(0, x[None], table)[0], after


@pytest.mark.parametrize("architecture", ["qwen3_5", "kimi_linear", "bamba"])
def test_a_path_of_a_tree_is_a_chain(architecture: str) -> None:
    """The tokens of a sequence in one run, one by one, and beside other nodes."""
    module = new_module(architecture)
    layers = kernels_of(RecurrentLayers.of(module, has_kernels=True))
    source = torch.Generator().manual_seed(0)
    x, others = torch.randn(2, 8, module.config.hidden_size, generator=source)
    with torch.inference_mode():
        y, after = run(layers, x, [([*range(8)], None)])
        alone, single = run(layers, x, [([n], n - 1 if n else None) for n in range(8)])
        both = torch.stack([others, x], 1).flatten(0, 1)
        path = [([2 * n + 1], 2 * n - 1 if n else None) for n in range(8)]
        aside = [([2 * n], max(2 * n - 3, 1) if n > 1 else None) for n in range(8)]
        runs = [node for pair in zip(aside, path, strict=True) for node in pair]
        mixed, nodes = run(layers, both, runs)
    floats = after[7].floats[: layers._layers[0].state_size]
    for outputs_of_path, state in ((alone, single[7]), (mixed[1::2], nodes[15])):
        torch.testing.assert_close(outputs_of_path, y, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.floats[: len(floats)], floats, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3_5", "bamba"])
def test_an_engine_over_them_generates_what_transformers_does(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts beside decodes and trees of which paths are accepted."""
    monkeypatch.setattr(loader, "has_kernels", lambda device: True)
    lm = loader.load(tiny(architecture), dtype="float32", forward="torch")
    assert isinstance(lm.network, TransformersNetwork)
    assert kernels_of(lm.network.recurrent) is not None
    texts, new = prompts((3, 17, 70)), 8
    expected = greedy(tiny(architecture), texts, new)
    answers = {tuple(text): answer for text, answer in zip(texts, expected, strict=True)}
    config = UserProvidedDecodingConfig(
        max_draft_len=4, max_total_draft_tokens=8, drafter=drafters.bush(answers)
    )
    machine = engine_over(lm, pages=80, max_num_tokens=23, speculative=[config])
    sequences = [machine.add(text, GREEDY.replace(max_tokens=new))[0] for text in texts]
    drain(machine)
    assert outputs(sequences) == expected
    assert machine.stats.accepted > 5
    expect_empty(machine)
