"""The engine with adapters: each sequence as if its model were merged, and no page shared amiss."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import adapters
from eagle_heads import random_head as random_eagle
from engines import drain, engine_over, expect_empty, outputs
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    ReDrafterDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.engine import LlmArgs
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.errors import ModelError, ParameterError, UnknownNameError, UsageError
from forethought.model import loader
from forethought.model.adapter import read_adapter
from forethought.model.causal_lm import CausalLM
from medusa_heads import shared_heads
from models import greedy, prompts, tiny
from mtp_modules import saved
from redrafter_heads import random_head
from turns import by_turns

MODEL, TOKENS = "llama", 24
SEEDS = {"first": 1, "second": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=0.9, seed=3)
PROMPTS = prompts((9, 4, 17, 5, 12))
CHOSEN = ("first", None, "second", "first", None)


@functools.cache
def directory() -> Path:
    """With a merged model and an adapter for each name."""
    path = adapters.new_directory()
    for name, seed in SEEDS.items():
        matrices = adapters.random_tensors(tiny(MODEL), seed=seed)
        adapters.save(path / name, matrices)
        adapters.merged(tiny(MODEL), matrices).save_pretrained(path / f"{name}-merged")
    return path


@functools.cache
def load(forward: loader.Forward) -> CausalLM:
    return loader.load(tiny(MODEL), dtype="float32", forward=forward)


def machine(forward: loader.Forward = "native", num_steps: int = 1, **options: Any) -> Engine:
    """An engine with both adapters."""
    engine = engine_over(load(forward), **{"pages": 160, **options})
    engine.num_decode_steps = engine.num_streamed_decode_steps = num_steps
    for name in SEEDS:
        adapter = read_adapter(name, directory() / name)
        engine.adapters.add(engine.runner.lm.place(adapter))
    return engine


def expected(chosen: Iterable[str | None] = CHOSEN, num_tokens: int = TOKENS) -> list[list[int]]:
    """What transformers generates with merged models."""
    merged = [directory() / f"{name}-merged" if name else tiny(MODEL) for name in chosen]
    pairs = zip(merged, PROMPTS, strict=False)
    return [greedy(model, [prompt], num_tokens)[0] for model, prompt in pairs]


def run(
    engine: Engine, params: SamplingParams = GREEDY, chosen: Sequence[str | None] = CHOSEN
) -> list[list[int]]:
    """What all prompts become in the same batches."""
    started = [
        engine.add(prompt, params.replace(adapter=name))[0]
        for name, prompt in zip(chosen, PROMPTS, strict=False)
    ]
    drain(engine)
    return outputs(started)


@pytest.mark.parametrize("num_steps", [1, 16])
@pytest.mark.parametrize("forward", ["native", "torch"])
def test_a_mixed_batch_is_that_of_merged_models(forward: loader.Forward, num_steps: int) -> None:
    engine = machine(forward, num_steps)
    assert run(engine) == expected()
    expect_empty(engine)


@pytest.mark.parametrize("num_steps", [1, 16])
def test_sampled_tokens_do_not_depend_on_what_runs_beside(num_steps: int) -> None:
    engine = machine("native", num_steps)
    together = run(engine, SAMPLED)
    for name, prompt, tokens in zip(CHOSEN, PROMPTS, together, strict=True):
        apart = machine("native", num_steps)
        [alone] = apart.add(prompt, SAMPLED.replace(adapter=name))
        drain(apart)
        assert alone.output == tokens
    expect_empty(engine)


@pytest.mark.parametrize("forward", ["native", "torch"])
def test_steps_of_adapters_are_made_several_in_one_call(forward: loader.Forward) -> None:
    engine, calls = machine(forward, 16), 0
    for name, prompt in zip(CHOSEN, PROMPTS, strict=True):
        engine.add(prompt, GREEDY.replace(adapter=name))
    while engine.has_work:
        engine.step()
        calls += 1
    assert calls < TOKENS / 4
    expect_empty(engine)


def test_chunks_of_prefills_and_preempted_sequences_keep_their_adapter() -> None:
    engine = machine("native", pages=22, max_num_tokens=5, max_batch_size=4)
    assert run(engine) == expected()
    assert engine.stats.preemptions > 0
    expect_empty(engine)


def test_all_samples_of_a_prompt_have_its_adapter() -> None:
    engine = machine()
    several = engine.add(PROMPTS[0], SAMPLED.replace(adapter="first", n=3))
    drain(engine)
    plain = engine.add(PROMPTS[0], SAMPLED.replace(n=3))
    drain(engine)
    merged = engine_over(loader.load(directory() / "first-merged", dtype="float32"))
    alike = merged.add(PROMPTS[0], SAMPLED.replace(n=3))
    drain(merged)
    assert outputs(several) == outputs(alike)
    assert outputs(several) != outputs(plain)
    expect_empty(engine)


# ---- prefixes ---------------------------------------------------------------------------------


def cached(engine: Engine, prompt: Sequence[int], adapter: str | None) -> int:
    """Tokens of a prompt that were found in the prefix cache."""
    [started] = engine.add(prompt, GREEDY.replace(adapter=adapter, max_tokens=2))
    drain(engine)
    return started.usage.cached


def test_prefixes_are_shared_within_an_adapter_and_with_no_other() -> None:
    engine, prompt = machine(), PROMPTS[2]
    for adapter in (None, "first", "second"):
        assert cached(engine, prompt, adapter) == 0
        assert cached(engine, prompt, adapter) == 16
    expect_empty(engine)


def test_a_prompt_waits_for_no_prefill_of_another_adapter() -> None:
    engine = machine(max_num_tokens=8)
    prompt = prompts((40,))[0]
    started = [
        engine.add(prompt, GREEDY.replace(adapter=name, max_tokens=4))[0]
        for name in ("first", "first", None, "second")
    ]
    drain(engine)
    assert [each.usage.cached > 0 for each in started] == [False, True, False, False]
    assert started[0].output == started[1].output != started[2].output
    expect_empty(engine)


def test_an_adapter_that_takes_a_name_anew_does_not_find_the_prefixes_of_the_former() -> None:
    engine, prompt = machine(), PROMPTS[2]
    cached(engine, prompt, "first")
    engine.adapters.remove("first", engine.scheduler)
    other = read_adapter("first", directory() / "second")
    engine.adapters.add(engine.runner.lm.place(other))
    assert cached(engine, prompt, "first") == 0
    engine.adapters.remove("first", engine.scheduler)
    engine.adapters.add(engine.runner.lm.place(read_adapter("first", directory() / "first")))
    assert cached(engine, prompt, "first") == 16
    expect_empty(engine)


# ---- live sequences ---------------------------------------------------------------------------


@pytest.mark.parametrize("running", [True, False])
def test_a_fork_has_the_adapter_of_its_parent(running: bool) -> None:
    engine, prompt = machine(), PROMPTS[0]
    [whole] = expected(["first"])
    [parent] = engine.add(prompt, GREEDY.replace(adapter="first", max_tokens=12), keep=True)
    for _ in range(6):
        engine.step()
    if not running:
        drain(engine)
    child = engine.fork(parent, len(prompt) + 4)
    engine.resume(child, GREEDY.replace(max_tokens=TOKENS - 4))
    drain(engine)
    assert child.output == whole[4:]
    assert child.usage.prefilled <= 1
    for each in (parent, child):
        engine.close(each)
    expect_empty(engine)


def test_a_sequence_that_goes_on_with_another_adapter_is_computed_again() -> None:
    engine, prompt = machine(), PROMPTS[0]
    [parent] = engine.add(prompt, GREEDY.replace(adapter="first", max_tokens=8), keep=True)
    drain(engine)
    waiting = engine.fork(parent)  # shares what the parent has, whatever becomes of it
    text = list(parent.tokens)
    for name in ("second", "", "first"):
        child = engine.fork(parent, len(text))
        engine.resume(child, GREEDY.replace(adapter=name, max_tokens=8))
        drain(engine)
        fresh = machine()
        [alone] = fresh.add(text, GREEDY.replace(adapter=name, max_tokens=8))
        drain(fresh)
        assert child.output == alone.output
        engine.close(child)
    engine.resume(parent, GREEDY.replace(adapter="", max_tokens=8))
    engine.resume(waiting, GREEDY.replace(max_tokens=8))
    drain(engine)
    assert parent.output != waiting.output
    assert waiting.usage.prefilled <= 1
    engine.close(parent)
    engine.close(waiting)
    expect_empty(engine)


def test_a_fork_that_waits_for_its_parent_may_go_on_with_another_adapter() -> None:
    engine, prompt = machine(max_num_tokens=8), prompts((30,))[0]
    [parent] = engine.add(prompt, GREEDY.replace(adapter="first"), keep=True)
    engine.step()
    child = engine.fork(parent, len(prompt))
    assert child.parent is parent
    engine.resume(child, GREEDY.replace(adapter="second"))
    drain(engine)
    fresh = machine()
    [alone] = fresh.add(prompt, GREEDY.replace(adapter="second"))
    drain(fresh)
    assert child.output == alone.output
    assert child.usage.prefilled == len(prompt)
    for each in (parent, child):
        engine.close(each)
    expect_empty(engine)


def test_an_adapter_in_use_is_not_removed() -> None:
    engine = machine()
    [running] = engine.add(PROMPTS[0], GREEDY.replace(adapter="first"), keep=True)
    engine.step()
    with pytest.raises(UsageError, match="'first' is in use: 1 sequence"):
        engine.adapters.remove("first", engine.scheduler)
    engine.adapters.remove("second", engine.scheduler)
    drain(engine)
    with pytest.raises(UsageError, match="in use"):  # it is parked, and may go on
        engine.adapters.remove("first", engine.scheduler)
    engine.close(running)
    engine.adapters.remove("first", engine.scheduler)
    assert engine.adapters.names == []
    with pytest.raises(UnknownNameError, match="adapter 'first'"):
        engine.add(PROMPTS[0], GREEDY.replace(adapter="first"))
    expect_empty(engine)


def test_names_of_adapters_are_known_and_unique() -> None:
    engine = machine()
    with pytest.raises(UnknownNameError, match="adapter 'nope'"):
        engine.check_prompt([1], GREEDY.replace(adapter="nope"))
    [parked] = engine.add(PROMPTS[0], GREEDY, keep=True)
    drain(engine)
    with pytest.raises(UnknownNameError):
        engine.check_resume(parked, GREEDY.replace(adapter="nope"))
    engine.close(parked)
    with pytest.raises(ParameterError, match="there is an adapter 'first' already"):
        engine.adapters.add(engine.runner.lm.place(read_adapter("first", directory() / "first")))
    expect_empty(engine)


def test_sequences_that_read_each_other_share_no_prefix_of_another_adapter() -> None:
    engine, prompt = machine(), PROMPTS[2]
    pair = [engine.open(prompt) for _ in range(2)]
    for writer, token in zip(pair, (5, 6), strict=True):
        engine.extend(writer, [token])
    engine.attend_to(pair[0], {pair[1]: len(prompt)})
    engine.attend_to(pair[1], {pair[0]: len(prompt)})
    for writer, name in zip(pair, ("first", "second"), strict=True):
        engine.resume(writer, GREEDY.replace(adapter=name))
    drain(engine)
    assert [writer.usage.cached for writer in pair] == [0, 0]
    assert [writer.usage.prefilled for writer in pair] == [len(prompt) + 1] * 2
    for writer in pair:
        engine.close(writer)
    expect_empty(engine)


# ---- drafters ---------------------------------------------------------------------------------

SAME = {"max_draft_len": 4}
DRAFTERS: dict[str, Any] = {
    "ngram": lambda: NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=3),
    "suffix": lambda: SuffixDecodingConfig(max_draft_len=8),
    "draft model": lambda: DraftTargetDecodingConfig(speculative_model=tiny(MODEL), **SAME),
    "draft model, merged": lambda: DraftTargetDecodingConfig(
        speculative_model=directory() / "first-merged", **SAME
    ),
    "pearl": lambda: PearlDecodingConfig(speculative_model=directory() / "first-merged", **SAME),
    "medusa": lambda: MedusaDecodingConfig(speculative_model=shared_heads()),
    "mtp": lambda: MTPDecodingConfig(speculative_model=saved(MODEL), **SAME),
    "redrafter": lambda: ReDrafterDecodingConfig(speculative_model=random_head()),
    "eagle 3": lambda: EagleDecodingConfig(speculative_model=random_eagle(), **SAME),
    "eagle 3, dynamic tree": lambda: EagleDecodingConfig(
        use_dynamic_tree=True, dynamic_tree_max_topK=3, speculative_model=random_eagle(), **SAME
    ),
}


@pytest.mark.parametrize(("name", "forward"), by_turns([*DRAFTERS], ["native", "torch"]))
def test_every_drafter_leaves_the_tokens_of_adapters_as_they_are(
    name: str, forward: loader.Forward
) -> None:
    config: DecodingBaseConfig = DRAFTERS[name]()
    engine = machine(forward, 16, speculative=[config])
    assert run(engine) == expected()
    again = run(engine)  # prefixes are found, with the draft KV of their adapter
    assert again == expected()
    assert engine.stats.drafted > 0
    if "merged" in name:
        assert engine.stats.accepted > 0
    expect_empty(engine)


def test_drafts_from_the_texts_of_one_adapter_are_not_those_of_another() -> None:
    def drafted(engine: Engine, adapter: str | None) -> int:
        before = engine.stats.drafted
        engine.add(PROMPTS[0], GREEDY.replace(adapter=adapter))
        drain(engine)
        expect_empty(engine)
        return engine.stats.drafted - before

    config = SuffixDecodingConfig(max_draft_len=8)
    engine, alone = (machine("native", speculative=[config]) for _ in range(2))
    first = drafted(engine, "first")
    assert drafted(engine, "second") == drafted(alone, "second")
    assert drafted(engine, "first") > first


# ---- other ways to compute ----------------------------------------------------------------------


def test_adapters_and_tensor_parallelism_exclude_each_other() -> None:
    args = LlmArgs.from_dict({"adapters": {"a": directory() / "first"}, "tensor_parallel_size": 2})
    with pytest.raises(ParameterError, match="exclude each other"):
        resolve.build(args, tiny(MODEL))


def test_an_adapter_is_read_before_the_model_is_loaded(tmp_path: Path) -> None:
    args = LlmArgs.from_dict({"adapters": {"a": tmp_path / "missing"}})
    with pytest.raises(ModelError, match="adapter_config"):
        resolve.build(args, tmp_path / "no model")
