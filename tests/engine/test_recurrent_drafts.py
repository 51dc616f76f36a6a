"""Several steps with drafts of models with recurrent layers in one call of C++ leave what single
steps leave: tokens, scores, keys, and the states of the layers, to the last bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clocked_policy import Clocked
from eagle_heads import new_directory, random_eagle, random_head
from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought.backends.cpu.module_steps import ModuleSteps
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
)
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.kv.pool import PagePool
from forethought.kv.recurrent import RecurrentStorage
from forethought.kv.table import PageTable
from forethought.llm.snapshot import SnapshotStore
from forethought.model import loader
from forethought.model.causal_lm import CausalLM, TransformersNetwork
from forethought.speculative.step_runner import SingleSteps
from generations import expect_same
from models import bigram, greedy
from mtp_modules import bigram_module
from recurrent_generations import PROMPTS, count_calls, kept_states, mixed, run, states_of

SAMPLED = GREEDY.replace(temperature=0.5, seed=5)
FEW = ["qwen3_5", "bamba", "lfm2", "olmo_hybrid", "kimi_linear", "zamba2"]


@functools.cache
def loaded(architecture: str, dtype: str, quantization: loader.Quantization | None) -> CausalLM:
    path = bigram(architecture)
    return loader.load(path, dtype=dtype, quantization=quantization, forward="auto")


@functools.cache
def bigram_head() -> Path:
    """Of EAGLE-1: its states are mostly the embedding of the token, as those of ``bigram`` are."""
    head = random_eagle(bias=False)
    hidden = head.config.hidden_size
    head.fc.weight.data = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    for name, weight in head.layers.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.data *= 0.003
    path = new_directory()
    head.save(path)
    return path


DRAFTERS: dict[str, Callable[[int, str], DecodingBaseConfig]] = {
    "draft model": lambda size, _: DraftTargetDecodingConfig(
        max_draft_len=size, speculative_model=bigram("llama")
    ),
    "eagle": lambda size, _: EagleDecodingConfig(
        max_draft_len=size, speculative_model=bigram_head()
    ),
    "eagle3": lambda size, _: EagleDecodingConfig(
        max_draft_len=size, speculative_model=random_head("eagle3")
    ),
    "mtp": lambda size, name: MTPDecodingConfig(
        max_draft_len=size, speculative_model=bigram_module(name)
    ),
    "mtp, state unnormed": lambda size, name: MTPDecodingConfig(
        max_draft_len=size, speculative_model=bigram_module(name), fed_back_state="unnormed"
    ),
    "mtp, goodput": lambda size, name: MTPDecodingConfig(
        max_draft_len=size, speculative_model=bigram_module(name), length_control="goodput"
    ),
}
WITH_MODULES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear"]
"""Targets whose MTP modules are found in checkpoints, and one whose layers have no rotation."""


def made(
    num_steps: int,
    architecture: str,
    draft_len: int = 4,
    dtype: str = "float32",
    quantization: loader.Quantization | None = None,
    drafter: str = "draft model",
    **settings: Any,
) -> Engine:
    lm = loaded(architecture, dtype, quantization)
    limits = {"pages": 400, "max_num_tokens": 200, **settings}
    config = DRAFTERS[drafter](draft_len, architecture)
    machine = engine_over(lm, speculative=[config], **limits)
    machine.num_decode_steps = num_steps
    states_of(machine).max_states = 1000  # single steps also keep those of rejected drafts
    return machine


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The forwards of each call of C++ with drafts."""
    return count_calls(monkeypatch, drafting=True)


KINDS = [
    pytest.param(*kind, marks=[] if number % 3 == 0 else pytest.mark.slow)
    for number, kind in enumerate(itertools.product(FEW, ["float32", "bfloat16"], [None, "w8a8"]))
]


@pytest.mark.parametrize("draft_len", [4, pytest.param(1, marks=pytest.mark.slow), 9])
@pytest.mark.parametrize(("architecture", "dtype", "quantization"), KINDS)
def test_tokens_scores_keys_and_states_are_those_of_single_steps(
    architecture: str,
    dtype: str,
    quantization: loader.Quantization | None,
    draft_len: int,
    calls: list[int],
) -> None:
    kind = architecture, draft_len, dtype, quantization
    expected = run(made(1, *kind), PROMPTS, mixed(bigram(architecture), SAMPLED, 140))
    assert not calls
    machine = made(7, *kind)
    assert run(machine, PROMPTS, mixed(bigram(architecture), SAMPLED, 140)) == expected
    assert sum(calls) > 10
    assert max(calls) == 7
    assert 0 < machine.stats.accepted < machine.stats.drafted


READERS = [
    *itertools.product(FEW, ["eagle", "eagle3"]),
    *itertools.product(WITH_MODULES, ["mtp"]),
    ("qwen3_5", "mtp, state unnormed"),
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("architecture", "drafter"), READERS)
def test_chains_that_read_hidden_states_are_those_of_single_steps(
    architecture: str, drafter: str, dtype: str, calls: list[int]
) -> None:
    """Also what is stored for the drafts to come."""
    machines, kept, states = [], [], []
    for num_steps in (1, 7):
        machine = made(num_steps, architecture, dtype=dtype, drafter=drafter)
        sequences = [
            machine.add(prompt, params, keep=True)[0]
            for prompt, params in zip(
                PROMPTS, mixed(bigram(architecture), SAMPLED, 140), strict=True
            )
        ]
        drain(machine)
        machines.append(machine)
        kept.append(sequences)
        states.append([kept_states(machine, sequence) for sequence in sequences])
    expect_same(machines, kept)
    assert states[0] == states[1]
    assert max(calls) == 7
    assert machines[1].stats.accepted > 5 or drafter == "eagle3"


@pytest.mark.parametrize("architecture", FEW)
def test_hidden_states_of_plain_steps_are_stored_within_their_call(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests without drafts, for those of a drafter that may be asked later."""
    made_calls, original = list[int](), ModuleSteps.advance

    def advance(self: ModuleSteps, *arguments: Any) -> Any:
        result = original(self, *arguments)
        assert self.drafting is None
        assert self.cache is not None
        made_calls.append(result.num_forwards)
        return result

    monkeypatch.setattr(ModuleSteps, "advance", advance)
    machines, kept = [], []
    for num_steps in (1, 7):
        machine = made(num_steps, architecture, drafter="eagle")
        params = GREEDY.replace(max_tokens=40, speculation=SpeculationParams(enabled=False))
        kept.append([machine.add(prompt, params, keep=True)[0] for prompt in PROMPTS])
        drain(machine)
        machines.append(machine)
    expect_same(machines, kept)
    assert max(made_calls) == 7


OF_ALL_KINDS = [
    *itertools.product(FEW, ["draft model"]),
    *itertools.product(WITH_MODULES, ["mtp"]),
]


@pytest.mark.parametrize(("architecture", "drafter"), OF_ALL_KINDS)
def test_greedy_tokens_are_those_of_transformers(
    architecture: str, drafter: str, calls: list[int]
) -> None:
    machine = made(8, architecture, drafter=drafter)
    sequences = [machine.add(prompt, GREEDY.replace(max_tokens=50))[0] for prompt in PROMPTS]
    drain(machine)
    assert outputs(sequences) == greedy(bigram(architecture), PROMPTS, 50)
    assert calls
    expect_empty(machine)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    ("architecture", "drafter"),
    [
        *itertools.product(["qwen3_5", "zamba2"], ["draft model"]),
        *itertools.product(["qwen3_5", "qwen3_next"], ["mtp"]),
    ],
)
def test_what_was_generated_with_drafts_is_forked_rewound_extended_and_resumed_alike(
    architecture: str, drafter: str, params: SamplingParams, calls: list[int]
) -> None:
    """Also a sequence that is closed while the others go on, and lengths within the last draft."""
    results = []
    for num_steps in (1, 8):
        machine = made(num_steps, architecture, draft_len=6, drafter=drafter)
        kept = [
            machine.add(prompt, params.replace(max_tokens=40), keep=True)[0]
            for prompt in PROMPTS[:3]
        ]
        machine.step()
        machine.step()
        machine.close(kept.pop())
        drain(machine)
        first, second = kept
        kept += [machine.fork(first, len(first.tokens) - back) for back in (0, 1, 2, 5, 9)]
        machine.rewind(second, len(second.tokens) - 2)
        machine.extend(second, [7, 8, 9])
        machine.check_integrity()
        for sequence in kept:
            machine.resume(sequence, params.replace(max_tokens=30))
        drain(machine)
        results.append(outputs(kept))
        for sequence in kept:
            machine.close(sequence)
        expect_empty(machine)
    assert results[0] == results[1]
    assert calls


@pytest.mark.parametrize(
    ("architecture", "drafter"),
    [("qwen3_5", "draft model"), ("kimi_linear", "draft model"), ("qwen3_next", "mtp")],
)
def test_a_small_pool_preempts_rows_with_drafts_and_changes_no_token(
    architecture: str, drafter: str, calls: list[int]
) -> None:
    expected = greedy(bigram(architecture), PROMPTS, 40)
    limits = {"pages": 36, "max_batch_size": 4, "max_num_tokens": 60}
    machine = made(8, architecture, drafter=drafter, **limits)
    sequences = [machine.add(prompt, GREEDY.replace(max_tokens=40))[0] for prompt in PROMPTS]
    drain(machine)
    assert outputs(sequences) == expected
    assert machine.stats.preemptions > 0
    assert calls
    expect_empty(machine)


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next"])
def test_a_snapshot_after_steps_with_drafts_goes_on_as_its_sequence(
    architecture: str, tmp_path: Path, calls: list[int]
) -> None:
    """Restored in an engine that has read nothing of its text, with drafts from there on."""
    machine = made(8, architecture, drafter="mtp")
    [sequence] = machine.add(PROMPTS[3], GREEDY.replace(max_tokens=37), keep=True)
    drain(machine)
    store = SnapshotStore(tmp_path, bigram(architecture), machine.runner.storage)
    store.save("one", machine.capture(sequence, sequence.tokens))
    machine.close(sequence)
    expect_empty(machine)
    other = made(8, architecture, drafter="mtp")
    restored = other.restore(store.load("one"))
    before = len(calls)
    other.resume(restored, GREEDY.replace(max_tokens=30))
    drain(other)
    assert restored.output == greedy(bigram(architecture), [sequence.tokens], 30)[0]
    assert restored.usage.prefilled == 1
    assert len(calls) > before


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next"])
def test_under_goodput_control_steps_with_drafts_of_a_module_are_one_call(
    architecture: str, calls: list[int]
) -> None:
    """Told that a step takes as long however large it is, it finds that drafts pay."""
    machine = made(8, architecture, drafter="mtp, goodput", max_batch_size=2)
    entry = machine.speculation.drafters[0]
    entry.policy = Clocked(entry.policy, [])
    for _ in range(6):
        sequences = [machine.add(prompt, GREEDY.replace(max_tokens=40))[0] for prompt in PROMPTS]
        drain(machine)
        assert outputs(sequences) == greedy(bigram(architecture), PROMPTS, 40)
    assert max(calls) > 4
    assert machine.stats.accepted > 0
    expect_empty(machine)


@pytest.mark.parametrize("architecture", ["qwen3_5", "zamba2"])
def test_a_step_that_fails_in_the_midst_of_a_call_takes_no_step_before_it_back(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose states are the ones from which rows go on."""
    config = NGramDecodingConfig(max_draft_len=3, max_matching_ngram_size=1)
    lm = loaded(architecture, "float32", None)
    machine = engine_over(lm, pages=400, max_num_tokens=200, speculative=[config])
    machine.num_decode_steps = 8
    draft, numbers = SingleSteps._draft, itertools.count()

    def failing(steps: SingleSteps, rows: Any) -> float:
        if next(numbers) % 4 == 3:
            raise RuntimeError("these drafts fail")
        return draft(steps, rows)

    monkeypatch.setattr(SingleSteps, "_draft", failing)
    sequences = [machine.add(prompt, GREEDY.replace(max_tokens=50))[0] for prompt in PROMPTS]
    drain(machine)
    assert outputs(sequences) == greedy(bigram(architecture), PROMPTS, 50)
    assert next(numbers) > 8
    assert machine.stats.failures == 0
    expect_empty(machine)


@pytest.mark.parametrize("draft_len", [0, 1, 4, 9])
def test_states_that_drafts_write_share_no_memory_with_those_that_are_kept(draft_len: int) -> None:
    """A step may accept all of its draft, and one more, whose logits are not finite, has written
    as many states and gives no token.
    """
    lm = loaded("qwen3_5", "float32", None)
    assert isinstance(lm.network, TransformersNetwork)
    assert lm.network.recurrent is not None
    assert lm.network.recurrent.native is not None
    storage = lm.storage(100, 4)
    assert isinstance(storage, RecurrentStorage)
    table = PageTable(PagePool(100, 4))
    table.append(200)
    decoded = storage.new_decoded(
        table, range(40, 200), lm.network.recurrent.native.new_state, draft_len
    )
    size = 1 + draft_len
    for stop in range(size, 160 - size):
        last = decoded.states[max(0, stop - size - 2) : stop + size]
        assert len({id(state) for state in last}) == len(last)
