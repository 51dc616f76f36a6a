"""A token of a model with recurrent layers does not depend on what is computed beside it.

Where C++ computes the layers its logits are the same to the last bit, whatever the batch, in
float32 and bfloat16, in 8 bits and not. Runs of more than 32 new tokens are left out: attention
rounds these in another order (docs/determinism.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought.backends.cpu import library
from forethought.backends.cpu.router import NativeRouter
from forethought.config.drafters import NGramDecodingConfig
from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM, TransformersNetwork
from forethought.model.runner import ModelRunner
from models import (
    ALL_RECURRENT,
    new_module,
    prompts,
    save_random,
    tiny,
    transformers_model,
)
from turns import by_turns

[TEXT] = prompts((60,), seed=5)
OTHERS = prompts((37, 5, 61, 8, 23), seed=9)
STEPS = (20, 13, 1, 1, 1, 4, 1, 1, 18)
"""Tokens of ``TEXT`` that are new in each forward; the last ones are drafts."""

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)


class Rows:
    """Rows of new tokens over one runner."""

    def __init__(self, lm: CausalLM) -> None:
        self._pool = PagePool(160, 4)
        self._runner = ModelRunner(lm, lm.storage(self._pool.num_pages, self._pool.page_size))

    def table(self) -> PageTable:
        return PageTable(self._pool)

    def row(self, table: PageTable, tokens: Sequence[int], num_nodes: int = 0) -> Row:
        start = table.length
        table.append(len(tokens))
        return Row(list(tokens), start, table, num_nodes=num_nodes)

    def logits(self, rows: Sequence[Row], of: int) -> Tensor:
        """Of the tokens of a row."""
        begin = sum(len(row.tokens) for row in rows[:of])
        logits = self._runner.forward(rows)
        return logits[begin : begin + len(rows[of].tokens)].clone()


def alone(lm: CausalLM, steps: Sequence[int]) -> Tensor:
    """The logits of ``TEXT``, of which so many tokens are new in each step."""
    rows, found, done = Rows(lm), list[Tensor](), 0
    table = rows.table()
    for count in steps:
        found.append(rows.logits([rows.row(table, TEXT[done : done + count])], 0))
        done += count
    return torch.cat(found)


def beside_others(lm: CausalLM) -> Tensor:
    """The same, in batches with prompts, decodes and drafts."""
    rows, found, done = Rows(lm), list[Tensor](), 0
    table, tables = rows.table(), [rows.table() for _ in OTHERS]
    for step, count in enumerate(STEPS):
        if step < len(OTHERS):
            others = [rows.row(tables[step], OTHERS[step])]
            others += [rows.row(other, [7 + step]) for other in tables[:step]]
        else:
            others = [rows.row(other, [9, 4, step], num_nodes=2) for other in tables[: step % 4]]
        new, middle = TEXT[done : done + count], len(others) // 2
        own = rows.row(table, new, num_nodes=count if count > 3 and step > 3 else 0)
        found.append(rows.logits([*others[:middle], own, *others[middle:]], middle))
        done += count
    return torch.cat(found)


def check_invariance(lm: CausalLM) -> None:
    expected = alone(lm, [1] * len(TEXT))
    assert torch.equal(alone(lm, STEPS), expected)
    assert torch.equal(beside_others(lm), expected)


@pytest.mark.parametrize("architecture", ALL_RECURRENT)
def test_a_token_has_the_same_logits_to_the_last_bit_in_every_batch(architecture: str) -> None:
    check_invariance(loader.load(tiny(architecture), dtype="float32", forward="auto"))


QUICK = {
    ("jamba", "bfloat16", "w8a8"),
    ("kimi_linear", "float32", "w8a8"),
    ("qwen3_5_moe", "float32", "int8"),
    ("falcon_h1", "bfloat16", "int8"),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for architecture in ALL_RECURRENT
    for case in (
        (architecture, "float32", "w8a8"),
        (architecture, "float32", "int8"),
        (architecture, "bfloat16", None),
        (architecture, "bfloat16", "w8a8"),
        (architecture, "bfloat16", "int8"),
    )
]


@pytest.mark.parametrize(("architecture", "dtype", "quantization"), CASES)
def test_rounded_weights_and_states_change_nothing_of_that(
    architecture: str, dtype: str, quantization: loader.Quantization | None
) -> None:
    lm = loader.load(tiny(architecture), dtype=dtype, quantization=quantization, forward="auto")
    check_invariance(lm)


@pytest.mark.parametrize("architecture", ["jamba", "olmo_hybrid", "nemotron_h_moe"])
def test_layers_in_8_bits_and_bfloat16_run_in_cpp(architecture: str) -> None:
    """Rounding between the products of a layer is no reason to leave it to torch."""
    lm = loader.load(tiny(architecture), dtype="bfloat16", quantization="w8a8", forward="auto")
    assert isinstance(lm.network, TransformersNetwork)
    assert lm.network.recurrent is not None
    assert lm.network.recurrent.is_native


@functools.cache
def with_wide_steps(architecture: str) -> Path:
    """A tiny model, most of whose step widths are at their lower limit."""
    path = tiny(architecture).with_name(f"{architecture}-steps")
    save_random(AutoConfig.from_pretrained(tiny(architecture), time_step_min=2.0), path, seed=1)
    return path


@pytest.mark.parametrize(
    ("steps", "architecture", "forward"),
    by_turns(
        [(60,), (1,) * 60, (59, 1), (17, 1, 2, 40)], ["nemotron_h", "zamba2"], ["torch", "auto"]
    ),
)
def test_steps_are_limited_alike_however_a_prompt_is_cut(
    architecture: str, forward: loader.Forward, steps: tuple[int, ...]
) -> None:
    path = with_wide_steps(architecture)
    lm = loader.load(path, dtype="float32", forward=forward)
    with torch.inference_mode():
        expected = transformers_model(path)(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(alone(lm, steps), expected, rtol=1e-4, atol=1e-3)


def routers_of(module: Any) -> list[Any]:
    return [part for part in module.modules() if isinstance(part.forward, NativeRouter)]


@pytest.mark.parametrize(
    "architecture", ["lfm2_moe", "kimi_linear", "jamba", "granite_hybrid_moe", "nemotron_h_moe"]
)
def test_routers_choose_in_cpp(architecture: str) -> None:
    lm = loader.load(tiny(architecture), dtype="float32", forward="auto")
    assert isinstance(lm.network, TransformersNetwork)
    assert routers_of(lm.network.module)


def test_experts_are_chosen_among_the_best_groups_by_biased_scores() -> None:
    from forethought.backends.cpu.backend import CpuBackend

    changes = {"num_local_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
    module = new_module("kimi_linear", **changes, routed_scaling_factor=2.5)
    gates = [part for part in module.modules() if hasattr(part, "e_score_correction_bias")]
    for seed, gate in enumerate(gates):
        generator = torch.Generator().manual_seed(seed)
        gate.e_score_correction_bias.copy_(torch.randn(12, generator=generator) / 4)
    x = torch.randn(40, module.config.hidden_size, generator=torch.Generator().manual_seed(7))
    expected = [gate(x) for gate in gates]
    CpuBackend.use_native_parts(module, ())
    assert routers_of(module) == gates
    for gate, (_, weights, chosen) in zip(gates, expected, strict=True):
        _, own_weights, own_chosen = gate(x)
        order, own_order = chosen.argsort(1), own_chosen.argsort(1)
        assert torch.equal(own_chosen.gather(1, own_order), chosen.gather(1, order))
        torch.testing.assert_close(own_weights.gather(1, own_order), weights.gather(1, order))


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("architecture", ["qwen3_5", "kimi_linear", "nemotron_h_moe"])
def test_threads_change_no_token_of_requests_that_come_and_go(
    architecture: str, num_threads: int
) -> None:
    lm = loader.load(tiny(architecture), dtype="float32", forward="auto")
    drafting = [NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=1)]
    plain = generated(lm, 1)
    assert generated(lm, num_threads) == plain
    assert generated(lm, num_threads, speculative=drafting, max_num_tokens=23) == plain


def generated(lm: CausalLM, num_threads: int, **settings: Any) -> list[list[int]]:
    machine, before = engine_over(lm, pages=120, **settings), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        sequences = []
        for prompt in [*OTHERS, TEXT]:
            sequences += machine.add(prompt, GREEDY)
            machine.step()
        drain(machine)
    finally:
        torch.set_num_threads(before)
    expect_empty(machine)
    return outputs(sequences)
