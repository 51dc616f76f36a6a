"""MTP modules against a reference implementation without pages, batches or state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import drain, engine, expect_empty, load, outputs
from forethought.config.drafters import MTPDecodingConfig
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.errors import ModelError, ParameterError
from forethought.kv.pool import PagePool
from forethought.kv.storage import DraftKvCache, KvStorage
from forethought.kv.table import PageTable
from forethought.model.batch import Batch
from forethought.model.hidden_states import FINAL, HiddenStateCache
from forethought.model.runner import ModelRunner
from forethought.speculative.draft_module import DraftModuleRunner, ModuleOutput
from forethought.speculative.drafter import DraftRequest, ScheduledRequests, Target
from forethought.speculative.drafters.mtp import MTPDrafter
from models import greedy, prompts, tiny
from mtp_modules import random_modules, saved
from mtp_reference import Watch, replayed, vanilla

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPTS = prompts((4, 9, 17, 1))


def mtp(architecture: str = "llama", count: int = 1, length: int = 4, **more: Any) -> Any:
    model = more.pop("speculative_model", None) or saved(architecture, count)
    return MTPDecodingConfig(max_draft_len=length, speculative_model=model, **more)


CASES = {"replay": (1, {}), "one per place": (1, {"use_mtp_vanilla": True}), "two": (2, {})}


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "deepseek_v3", "gemma3"])
@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_the_reference_implementation(case: str, architecture: str) -> None:
    count, more = CASES[case]
    machine = engine(architecture, pages=128, speculative=[mtp(architecture, count, **more)])
    watch = Watch(machine)
    sequences = [machine.add(p, GREEDY.replace(max_tokens=8))[0] for p in PROMPTS]
    drain(machine)
    assert outputs(sequences) == greedy(tiny(architecture), PROMPTS, 8)
    assert len(watch.seen) > 20
    modules = random_modules(architecture, count)
    for tokens, draft, depth in watch.seen[::3]:
        if case == "replay":
            assert draft == replayed(tiny(architecture), modules[0], tokens, depth)
        else:
            assert draft == vanilla(tiny(architecture), modules, tokens, depth)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [1, 3])
def test_what_is_stored_is_worth_what_its_tokens_are(case: str, page_size: int) -> None:
    """Forks, rewinds, prefix hits and drafts of changing length, over any page size."""
    count, more = CASES[case]
    config = mtp(count=count, **more)
    machine = engine(pages=384 // page_size, page_size=page_size, speculative=[config])
    watch = Watch(machine)
    [parent] = machine.add(PROMPTS[2], GREEDY.replace(max_tokens=12), keep=True)
    drain(machine)
    child = machine.fork(parent, len(PROMPTS[2]) + 3)
    machine.extend(child, [7, 8])  # other tokens behind the same state
    shorter = GREEDY.replace(max_tokens=6, speculation=SpeculationParams(max_draft_len=2))
    machine.resume(child, shorter)
    drain(machine)
    machine.resume(child, GREEDY.replace(max_tokens=6))
    machine.rewind(parent, len(PROMPTS[2]) + 5)
    machine.extend(parent, [9])
    machine.resume(parent, GREEDY.replace(max_tokens=6))
    machine.add([*PROMPTS[2], 5, 5], GREEDY.replace(max_tokens=6))  # a prefix hit
    drain(machine)
    modules = random_modules("llama", count)
    for tokens, draft, depth in watch.seen:
        if case == "replay":
            assert draft == replayed(tiny("llama"), modules[0], tokens, depth)
        else:
            assert draft == vanilla(tiny("llama"), modules, tokens, depth)
    machine.close(parent)
    machine.close(child)
    expect_empty(machine)


@pytest.mark.parametrize("case", CASES)
def test_long_texts_are_caught_up_with_in_parts_of_a_step(case: str) -> None:
    count, more = CASES[case]
    machine = engine(
        pages=128, max_num_tokens=12, chunked_prefill=True, speculative=[mtp(count=count, **more)]
    )
    watch = Watch(machine)
    sizes: list[int] = []
    for runner in watch.drafter._runners:

        def counted(batch: Batch, inner: Any = runner.paged_pass) -> Any:
            sizes.append(len(batch.token_ids))
            return inner(batch)

        runner.paged_pass = counted
    texts = prompts((40, 33), seed=3)
    for text in texts:
        machine.add(text, GREEDY.replace(max_tokens=8))
    drain(machine)
    assert max(sizes) <= 12
    modules = random_modules("llama", count)
    for tokens, draft, depth in watch.seen:
        if case == "replay":
            assert draft == replayed(tiny("llama"), modules[0], tokens, depth)
        else:
            assert draft == vanilla(tiny("llama"), modules, tokens, depth)


def test_without_the_fused_network_drafts_are_the_same() -> None:
    from forethought.model import loader

    drafts = []
    for fuse in (True, False):
        lm = loader.load(tiny("llama"), dtype="float32", fuse=fuse)
        runner = ModelRunner(lm, KvStorage(lm.layer_shapes, 32, 4))
        drafter = MTPDrafter.build(mtp(), Target(runner, 64))
        drafts.append(_one_draft(drafter, runner, PROMPTS[1]))
    assert drafts[0] == drafts[1]


# ---- which module reads what: a golden case ------------------------------------------------------


class Diary:
    """A network that records its inputs, and answers with the next letter."""

    windows = (None,)
    draft_chains = draft_trees = None

    def __init__(self, name: int, like: Any, entries: list[str]) -> None:
        self.name, self.entries, self.shape = name, entries, like
        self.vocab_size, self.ids = 32, None

    def read(self, states: Tensor, forward_pass: Any) -> Any:
        from forethought.speculative.heads.mtp import ModuleStates

        batch = forward_pass.batch
        callbacks = [chr(65 + token) for token in batch.token_ids.tolist()]
        self.entries.append(
            f"{self.name}: "
            + " ".join(f"{_state(s)}{t}" for s, t in zip(states, callbacks, strict=True))
        )
        index = batch.logit_index
        coded = states.clone()
        coded[:, 0] = self.name
        return ModuleStates(coded[index], batch.token_ids[index, None].float())

    def enter(self, states: Tensor) -> Tensor:
        return states

    def __call__(self, states: Tensor, forward_pass: Any) -> ModuleOutput:
        left = self.read(states, forward_pass)
        logits = torch.nn.functional.one_hot(self.most_probable(left.normed), 32).float()
        return ModuleOutput(left.states, logits)

    def most_probable(self, normed: Tensor) -> Tensor:
        return normed[:, 0].long() + 1


def _state(state: Tensor) -> str:
    source, callback = state.long().tolist()
    return f"({'H' if source == 0 else source}{chr(65 + callback)})"


def _golden(num_modules: int, depth: int) -> tuple[list[str], list[int]]:
    """Prompt ABCD, of which the target has made states, and E, which it drew."""
    from forethought.kv.storage import LayerShape

    lm, entries = load("llama"), list[str]()
    like = KvStorage([LayerShape(1, 2, 2)], 4, 4)
    networks = [Diary(1 + level, LayerShape(1, 2, 2), entries) for level in range(num_modules)]
    hidden_states = HiddenStateCache([FINAL], 2, like)
    runners = [
        DraftModuleRunner(
            network,
            DraftKvCache(KvStorage([LayerShape(1, 2, 2)], 4, 4)),
            hidden_states,
            lm.backend,
            max_num_tokens=64,
            offset=1 + n,
        )
        for n, network in enumerate(networks)
    ]
    drafter = MTPDrafter(runners, hidden_states, max_num_tokens=64, max_draft_len=depth)
    table = PageTable(PagePool(4, 4))
    table.append(5 + depth)
    hidden_states = drafter.draft_caches[0]
    states = torch.tensor([[0.0, callback] for callback in range(4)])
    slots = torch.tensor(table.slots(0, 4))
    hidden_states.write(slots, {FINAL: states})
    hidden_states.mark_stored(slots.numpy())
    request = _request([0, 1, 2, 3, 4], table, depth)
    drafter.prepare_draft_tokens(ScheduledRequests([request]))
    return entries, list(request.draft.tokens)


def test_modules_of_an_example_read_shifted_tokens_and_each_others_states() -> None:
    """The worked example of TensorRT-LLM: ABCD and E become F, G, H, one from each module."""
    entries, drafted = _golden(num_modules=3, depth=3)
    assert entries == [
        "1: (HA)B (HB)C (HC)D (HD)E",
        "2: (1A)C (1B)D (1C)E (1D)F",
        "3: (2A)D (2B)E (2C)F (2D)G",
    ]
    assert [chr(65 + token) for token in drafted] == ["F", "G", "H"]


def test_a_replayed_module_goes_on_from_its_own_state() -> None:
    entries, drafted = _golden(num_modules=1, depth=3)
    assert entries == ["1: (HA)B (HB)C (HC)D (HD)E", "1: (1D)F", "1: (1D)G"]
    assert [chr(65 + token) for token in drafted] == ["F", "G", "H"]


def _request(tokens: list[int], table: PageTable, depth: int) -> DraftRequest:
    return DraftRequest(
        request_id=0,
        tokens=tokens,
        prompt_length=len(tokens) - 1,
        params=GREEDY,
        group=0,
        index=0,
        seed=0,
        max_draft_len=depth,
        max_nodes=depth,
        table=table,
    )


def _one_draft(drafter: MTPDrafter, runner: ModelRunner, tokens: list[int]) -> list[int]:
    from forethought.model.batch import Row

    storage = runner.storage
    for draft_cache in drafter.draft_caches:
        assert isinstance(draft_cache, DraftKvCache)
        draft_cache.resize(storage.num_pages)
    table = PageTable(PagePool(storage.num_pages, storage.page_size))
    table.append(len(tokens) - 1)
    [hidden_states, *_] = drafter.draft_caches
    runner.forward([Row(tokens[:-1], 0, table)], [hidden_states])
    table.append(1 + 4)
    request = _request(tokens, table, 4)
    drafter.prepare_draft_tokens(ScheduledRequests([request]))
    return list(request.draft.tokens)


# ---- configuration ------------------------------------------------------------------------------


def test_modules_lie_in_the_targets_own_directory_unless_said_otherwise(tmp_path: Path) -> None:
    import shutil

    from forethought.model import loader

    target = tmp_path / "target"
    shutil.copytree(tiny("llama"), target)
    drafts = []
    for model in (None, saved("llama", 1)):
        lm = loader.load(target, dtype="float32")
        runner = ModelRunner(lm, KvStorage(lm.layer_shapes, 32, 4))
        config = MTPDecodingConfig(max_draft_len=4, speculative_model=model)
        if model is None:
            with pytest.raises(ModelError, match=r"holds no MTP modules.*forethought train mtp"):
                MTPDrafter.build(config, Target(runner, 64))
            shutil.copy(saved("llama", 1) / "model.safetensors", target / "mtp.safetensors")
        drafts.append(_one_draft(MTPDrafter.build(config, Target(runner, 64)), runner, PROMPTS[1]))
    assert drafts[0] == drafts[1]


def test_fewer_modules_than_there_are_can_be_used() -> None:
    machine = engine(speculative=[mtp(count=2, num_nextn_predict_layers=1)])
    watch = Watch(machine)
    machine.add(PROMPTS[1], GREEDY.replace(max_tokens=6))
    drain(machine)
    first = random_modules("llama", 2)[0]
    for tokens, draft, depth in watch.seen:
        assert draft == replayed(tiny("llama"), first, tokens, depth)


def test_the_fed_back_state_can_be_the_blocks_own_output() -> None:
    machine = engine(speculative=[mtp(fed_back_state="unnormed")])
    watch = Watch(machine)
    machine.add(PROMPTS[1], GREEDY.replace(max_tokens=6))
    drain(machine)
    [module] = random_modules("llama")
    other = [replayed(tiny("llama"), module, tokens, depth) for tokens, _, depth in watch.seen]
    module.fed_back = "unnormed"
    same = [replayed(tiny("llama"), module, tokens, depth) for tokens, _, depth in watch.seen]
    assert [draft for _, draft, _ in watch.seen] == same
    assert same != other


def test_thinking_tokens_must_be_in_the_vocabulary() -> None:
    with pytest.raises(ParameterError, match=r"begin_thinking_phase_token.*101"):
        engine(
            speculative=[mtp(use_relaxed_acceptance_for_thinking=True, relaxed_rule="probability")]
        )
