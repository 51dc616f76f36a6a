"""Greedy decoding over pages equals transformers' ``generate``, token for token, in float32."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch

import models
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.attention import sdpa
from forethought.model.batch import Row
from forethought.model.llama.network import FusedNetwork
from forethought.model.loader import load
from forethought.model.runner import ModelRunner
from turns import by_turns

NEW_TOKENS = 16
SLOTS = 960
FUSED = ["llama", "llama_mha", "llama_mqa", "llama_tied_biased", "mistral", "qwen2", "qwen3"]


@dataclass
class Sequence:
    """The least that decodes: tokens, a page table, and the step at which it joins the others."""

    prompt: list[int]
    table: PageTable
    arrival: int = 0
    output: list[int] = field(default_factory=list)

    def row(self, runner: ModelRunner, limit: int) -> Row:
        tokens, start = self.prompt + self.output, self.table.length
        chunk = tokens[start : start + limit]
        runner.storage.copy_pages(self.table.append(len(chunk)))
        done = start + len(chunk) == len(tokens)
        return Row(chunk, start, self.table, logits_from=len(chunk) - done)

    def fork(self, arrival: int) -> Sequence:
        """Another sequence with the same tokens, on the same pages."""
        return Sequence(self.prompt, self.table.fork(), arrival, list(self.output))


def step(runner: ModelRunner, sequences: list[Sequence], chunk: int) -> None:
    """One forward of all sequences; prompts enter in pieces of ``chunk`` tokens."""
    rows = [sequence.row(runner, chunk) for sequence in sequences]
    chosen = iter(runner.forward(rows).argmax(-1).tolist())
    for sequence, row in zip(sequences, rows, strict=True):
        if row.logits_from < len(row.tokens):
            sequence.output.append(next(chosen))


def decode(runner: ModelRunner, sequences: list[Sequence], chunk: int) -> None:
    """Greedy decoding until each sequence has its new tokens."""
    time = 0
    while unfinished := [s for s in sequences if len(s.output) < NEW_TOKENS]:
        step(runner, [s for s in unfinished if s.arrival <= time], chunk)
        time += 1


def new_runner(
    architecture: str, page_size: int, attention: str = "sdpa", fuse: bool = True
) -> tuple[ModelRunner, PagePool]:
    lm = load(models.tiny(architecture), attention=attention, fuse=fuse)
    pool = PagePool(SLOTS // page_size, page_size)
    return ModelRunner(lm, KvStorage(lm.layer_shapes, pool.num_pages, page_size, lm.dtype)), pool


def expected(architecture: str, prompts: list[list[int]]) -> list[list[int]]:
    return models.greedy(models.tiny(architecture), prompts, NEW_TOKENS)


@pytest.mark.parametrize(
    ("architecture", "sizes"), by_turns([*models.ARCHITECTURES], [(3, 5), (16, 1000)])
)
def test_greedy_equals_generate(architecture: str, sizes: tuple[int, int]) -> None:
    page_size, chunk = sizes
    runner, pool = new_runner(architecture, page_size)
    prompts = models.prompts()
    sequences = [Sequence(prompt, PageTable(pool)) for prompt in prompts]
    decode(runner, sequences, chunk)
    assert [s.output for s in sequences] == expected(architecture, prompts)


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_greedy_equals_generate_with_late_arrivals_shared_prefixes_and_scattered_pages(
    architecture: str,
) -> None:
    """Prefill chunks run beside decodes; a fork made in the middle decodes on shared pages."""
    runner, pool = new_runner(architecture, page_size=3)
    taken = [pool.take() for _ in range(pool.num_pages)]
    random.Random(0).shuffle(taken)
    for page in taken[: 2 * len(taken) // 3]:  # what is left free has holes everywhere
        pool.release(page)
    prompts = models.prompts()
    sequences = [Sequence(p, PageTable(pool), arrival=2 * i) for i, p in enumerate(prompts)]
    parent = sequences[-1]
    for _ in range(9):  # the longest prompt and five tokens more
        step(runner, [parent], chunk=7)
    sequences += [parent.fork(arrival=4), parent.fork(arrival=5)]
    decode(runner, sequences, chunk=7)
    outputs = expected(architecture, prompts)
    assert [s.output for s in sequences] == [*outputs, outputs[-1], outputs[-1]]
    assert any(s.table.first_slot() is None for s in sequences)


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mistral", "llama4"]
)
def test_the_reference_backend_equals_generate(architecture: str) -> None:
    runner, pool = new_runner(architecture, 3, attention="reference")
    prompts = models.prompts((2, 9))
    sequences = [Sequence(prompt, PageTable(pool)) for prompt in prompts]
    decode(runner, sequences, chunk=4)
    assert [s.output for s in sequences] == expected(architecture, prompts)


@pytest.mark.parametrize("architecture", FUSED)
def test_the_plain_forward_of_fused_families_equals_generate(architecture: str) -> None:
    runner, pool = new_runner(architecture, 3, fuse=False)
    prompts = models.prompts()
    sequences = [Sequence(prompt, PageTable(pool)) for prompt in prompts]
    decode(runner, sequences, chunk=5)
    assert [s.output for s in sequences] == expected(architecture, prompts)


KV_HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
ROUTED = {"qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3"}


def half_precision_matrix() -> list[Any]:
    """(architecture, whether the forward is fused, layout of the key-value heads, dtype).

    Each architecture has one layout with one dtype among the quick tests for each way that computes
    it, by turns, so that layouts and ways have both dtypes there."""
    kinds = [
        (architecture, fuse)
        for architecture in models.ARCHITECTURES
        if architecture not in ("llama_mha", "llama_mqa")  # which are layouts of another one
        for fuse in ((True, False) if architecture in FUSED else (False,))
    ]
    cases = []
    for turn, (architecture, fuse) in enumerate(kinds):
        layouts = ["MHA"] if architecture in ("gpt2", "deepseek_v3") else list(KV_HEADS)
        rest = list(product(("bfloat16", "float16"), layouts))
        for number, (dtype, layout) in enumerate(rest):
            marks = () if number == (turn + turn // 6) % len(rest) else (pytest.mark.slow,)
            cases.append(pytest.param(architecture, fuse, layout, dtype, marks=marks))
    return cases


@pytest.mark.parametrize(("architecture", "fuse", "layout", "dtype"), half_precision_matrix())
def test_in_half_precision_each_token_is_the_most_probable_but_for_rounding(
    architecture: str, fuse: bool, layout: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At batch 1 and 2, on the code path of CPUs with AMX and on that of CPUs without it."""
    path = models.tiny(architecture, kv_heads=KV_HEADS[layout])
    lm = load(path, dtype=dtype, fuse=fuse)
    assert isinstance(lm.network, FusedNetwork) == fuse
    for fewest in (sdpa.MIN_QUERIES_WITH_AMX, sdpa.MIN_QUERIES_WITHOUT_AMX):
        monkeypatch.setattr(sdpa, "MIN_QUERIES", fewest)
        for lengths in ((9,), (9, 17)):
            pool = PagePool(SLOTS // 16, 16)
            runner = ModelRunner(lm, KvStorage(lm.layer_shapes, pool.num_pages, 16, lm.dtype))
            sequences = [Sequence(prompt, PageTable(pool)) for prompt in models.prompts(lengths)]
            decode(runner, sequences, chunk=1000)
            for sequence in sequences:
                lost = models.logits_lost(path, lm.dtype, sequence.prompt, sequence.output)
                # Rounding may choose another expert, which changes all logits of a token.
                allowed = 2 if architecture in ROUTED else 0
                assert int((lost > 0.2).sum()) <= allowed, lost


def test_tokens_one_position_late_lose_logits() -> None:
    """Negative control."""
    path, prompt = models.tiny("llama"), models.prompts((9,))[0]
    [best] = models.greedy(path, [prompt], NEW_TOKENS)
    found = [
        models.logits_lost(path, torch.float32, prompt, tokens)
        for tokens in (best, best[-1:] + best[:-1])
    ]
    assert float(found[0].max()) == 0.0
    assert int((found[1] > 0.2).sum()) > NEW_TOKENS // 2


def test_the_greedy_outputs_of_the_matrix_are_varied() -> None:
    """Negative control: a model that repeats one token would make the matrix prove nothing."""
    for architecture in models.ARCHITECTURES:
        outputs = expected(architecture, models.prompts())
        assert min(len(set(output)) for output in outputs) >= 2, architecture
        assert len({tuple(output) for output in outputs}) == len(outputs), architecture


def test_two_models_in_one_process_do_not_disturb_each_other() -> None:
    prompts = models.prompts((9, 17))
    names = ["llama", "gemma2"]
    running = []
    for name in names:
        runner, pool = new_runner(name, 3)
        running.append((runner, [Sequence(prompt, PageTable(pool)) for prompt in prompts]))
    for _ in range(NEW_TOKENS):
        for runner, sequences in running:
            step(runner, sequences, chunk=1000)
    for name, (_, sequences) in zip(names, running, strict=True):
        assert [s.output for s in sequences] == expected(name, prompts)
