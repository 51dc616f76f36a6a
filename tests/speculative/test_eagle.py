"""EAGLE's drafts are those of the formulas, whatever happened to the pages before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from eagle_heads import (
    LAYER_IDS,
    SIZES,
    Oracle,
    Published,
    State,
    chain,
    dynamic_tree,
    new_directory,
    random_eagle,
    random_eagle3,
    static_tree,
)
from engines import drain, engine, expect_empty, load, outputs
from forethought.config.drafters import EagleDecodingConfig
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.engine.engine import Engine
from forethought.errors import ModelError, ParameterError
from forethought.kv.storage import KvStorage
from forethought.model import loader
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import Draft, ScheduledRequests, Target
from forethought.speculative.drafters.eagle import EagleDrafter
from models import ARCHITECTURES, greedy, prompts, tiny

PROMPTS = prompts((9, 4, 17))
PATHS = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [2, 0, 1]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, seed=1)
CHAIN: dict[str, Any] = {"max_draft_len": 3}
STATIC: dict[str, Any] = {"eagle_choices": PATHS}
DYNAMIC: dict[str, Any] = {
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 3,
    "max_draft_len": 3,
    "max_total_draft_tokens": 7,
}


@dataclass
class Seen:
    """What one request showed and was answered."""

    tokens: list[int]
    depth: int
    nodes: int
    draft: Draft


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Seen]]:
    """Every draft that is made."""
    seen: list[Seen] = []
    prepare = EagleDrafter.prepare_draft_tokens

    def record(self: EagleDrafter, batch: ScheduledRequests, resources: Any = None) -> None:
        prepare(self, batch, resources)
        for each in batch.generation_requests:
            seen.append(Seen(list(each.tokens), each.max_draft_len, each.max_nodes, each.draft))

    monkeypatch.setattr(EagleDrafter, "prepare_draft_tokens", record)
    return seen


def machine(head: Any, growth: dict[str, Any], **sizes: Any) -> Engine:
    directory = new_directory()
    head.save(directory)
    # Drafts are accepted at random, so that many are, and unevenly.
    config = EagleDecodingConfig(speculative_model=directory, synthetic_acceptance=0.7, **growth)
    return engine(speculative=[config], **{"pages": 256, **sizes})


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """Of each node the tokens from the root to it."""
    found: dict[int, tuple[int, ...]] = {-1: ()}
    for node, token in enumerate(draft.tokens):
        found[node] = (*found[draft.parent(node)], token)
    return [found[node] for node in range(len(draft))]


def unlike(seen: Sequence[Seen], oracle: Oracle, growth: dict[str, Any]) -> int:
    """How many of at least four drafts are not those of the formulas."""
    assert len(seen) > 3
    return sum(not _alike(each, oracle, growth) for each in seen)


def _alike(each: Seen, oracle: Oracle, growth: dict[str, Any]) -> bool:
    if "eagle_choices" in growth:
        fitting = [path for path in PATHS if len(path) <= each.depth]
        said = static_tree(oracle, each.tokens, fitting)
        wanted = [tuple(said[path[:end]] for end in range(1, len(path) + 1)) for path in said]
        return sorted(paths(each.draft)) == sorted(wanted)
    if "use_dynamic_tree" in growth:
        width = min(3, each.nodes // max(1, each.depth - 1))
        return set(paths(each.draft)) == dynamic_tree(oracle, each.tokens, width, each.depth, 7)
    return list(each.draft.tokens) == chain(oracle, each.tokens, each.depth)


GROWTHS = {"chain": CHAIN, "static": STATIC, "dynamic": DYNAMIC}


@pytest.mark.parametrize(
    ("kind", "growth", "page_size"),  # a kind and a growth have one of the page sizes, by turns
    [
        pytest.param(
            *(kind, growth, page_size),
            id=f"{page_size}-{kind}-{name}",
            marks=[pytest.mark.slow] if (number + other + (page_size == 16)) % 2 else [],
        )
        for page_size in (1, 16)
        for other, kind in enumerate(("eagle", "eagle3"))
        for number, (name, growth) in enumerate(GROWTHS.items())
    ],
)
def test_every_draft_of_a_batch_is_that_of_the_formulas(
    diary: list[Seen], kind: str, growth: dict[str, Any], page_size: int
) -> None:
    head = random_eagle3() if kind == "eagle3" else random_eagle()
    oracle = Oracle(head, LAYER_IDS if kind == "eagle3" else (-1,))
    running = machine(head, growth, page_size=page_size, pages=1024 // page_size)
    for prompt in PROMPTS[: 3 if growth is CHAIN else 2]:
        running.add(prompt, GREEDY)
    drain(running)
    assert running.stats.draft_failures == 0
    assert running.stats.accepted > 6
    assert not unlike(diary, oracle, growth)
    expect_empty(running)


@pytest.mark.parametrize("wrong", ["captured layers", "tokens", "sides", "draft vocabulary"])
def test_the_formulas_tell_when_anything_is_off_by_one(diary: list[Seen], wrong: str) -> None:
    head = random_eagle3()
    running = machine(head, CHAIN)
    running.add(PROMPTS[0], GREEDY)
    drain(running)
    oracle = {
        "captured layers": lambda: Oracle(head, (1, 2, 3)),
        "tokens": lambda: Oracle(head, offset=0),
        "sides": lambda: Oracle(head, swapped=True),
        "draft vocabulary": lambda: Oracle(head),
    }[wrong]()
    if wrong == "draft vocabulary":  # an offset, not an id
        oracle.weights["d2t"] -= torch.arange(60)
    assert unlike(diary, oracle, CHAIN) > len(diary) / 2
    assert not unlike(diary, Oracle(head), CHAIN)


def test_layers_to_capture_are_outputs_so_that_states_enter_the_next_one(
    diary: list[Seen],
) -> None:
    head = random_eagle3()
    running = machine(head, CHAIN | {"eagle3_layers_to_capture": {2, 0, 1}})
    running.add(PROMPTS[0], GREEDY)
    drain(running)
    assert not unlike(diary, Oracle(head, (1, 2, 3)), CHAIN)


def test_minus_one_captures_what_leaves_the_final_norm(diary: list[Seen]) -> None:
    head = random_eagle3()
    running = machine(head, CHAIN | {"eagle3_layers_to_capture": [-1, 0, 1]})
    running.add(PROMPTS[0], GREEDY)
    drain(running)
    assert not unlike(diary, Oracle(head, (1, 2, -1)), CHAIN)


@pytest.mark.parametrize("growth", [CHAIN, DYNAMIC], ids=["chain", "dynamic"])
def test_prefix_hits_forks_and_rewinds_leave_drafts_as_they_would_be(
    diary: list[Seen], growth: dict[str, Any]
) -> None:
    head = random_eagle3()
    running = machine(head, growth, page_size=4)
    [parent] = running.add(PROMPTS[2], GREEDY, keep=True)
    drain(running)
    [again] = running.add([*PROMPTS[2][:16], 5, 6, 7], GREEDY, keep=True)  # a prefix hit
    children = [running.fork(parent, length) for length in (8, 18, 21)]  # 8: a page's very end
    for token, child in enumerate(children, start=30):
        running.extend(child, [token])
        running.resume(child, GREEDY)
    drain(running)
    running.rewind(parent, 20)
    running.extend(parent, [77])
    running.resume(parent, GREEDY)
    drain(running)
    assert not unlike(diary, Oracle(head), growth)
    for each in [parent, again, *children]:
        running.close(each)
    expect_empty(running)


def test_long_prompts_are_caught_up_with_in_parts(diary: list[Seen]) -> None:
    head = random_eagle3()
    running = machine(head, CHAIN, max_num_tokens=10)
    for prompt in prompts((50, 33)):
        running.add(prompt, GREEDY)
    drain(running)
    assert running.stats.draft_failures == 0
    assert not unlike(diary, Oracle(head), CHAIN)


@pytest.mark.parametrize("traits", ["norm_before_residual", "norm_before_fc", "norm_output", "own"])
def test_the_variants_of_speculators_are_computed(diary: list[Seen], traits: str) -> None:
    head = random_eagle3(**{"own_embedding" if traits == "own" else traits: True})
    running = machine(head, CHAIN)
    running.add(PROMPTS[0], GREEDY)
    drain(running)
    assert not unlike(diary, Oracle(head), CHAIN)


def test_heads_may_be_narrower_than_their_target(diary: list[Seen]) -> None:
    head = random_eagle3(hidden_size=24, own_embedding=True)
    running = machine(head, CHAIN)
    running.add(PROMPTS[0], GREEDY)
    drain(running)
    assert not unlike(diary, Oracle(head), CHAIN)


def test_heads_run_in_float32_where_their_config_asks_for_it(diary: list[Seen]) -> None:
    directory = new_directory()
    random_eagle3().to(torch.bfloat16).save(directory, runs_in=torch.float32)
    lm = loader.load(tiny("llama"), dtype="bfloat16")
    storage = KvStorage(lm.layer_shapes, 64, 4, lm.dtype)
    config = EagleDecodingConfig(speculative_model=directory, **CHAIN)
    for said, dtype in (("float32", torch.float32), ("float16", torch.bfloat16)):
        text = (directory / "config.json").read_text().replace('"float32"', f'"{said}"')
        (directory / "config.json").write_text(text)
        drafter = EagleDrafter.build(config, Target(ModelRunner(lm, storage), 64))
        hidden_states, entries = drafter.draft_caches
        assert hidden_states.storage.dtype is torch.bfloat16
        assert entries.storage.dtype is dtype


def test_heads_with_more_or_fewer_captured_layers_and_biases(diary: list[Seen]) -> None:
    for layer_ids in ((2,), (0, 1, 2, 3)):
        head = random_eagle3(layer_ids=layer_ids, attention_bias=True)
        running = machine(head, CHAIN)
        running.add(PROMPTS[0], GREEDY)
        drain(running)
        assert not unlike(diary, Oracle(head, layer_ids), CHAIN)
        diary.clear()


@pytest.mark.parametrize(
    "growth",
    [
        pytest.param(CHAIN, id="chain", marks=pytest.mark.slow),
        pytest.param(STATIC, id="static", marks=pytest.mark.slow),
        pytest.param(DYNAMIC, id="dynamic"),
    ],
)
def test_requests_ask_for_shorter_drafts_each_for_itself(
    diary: list[Seen], growth: dict[str, Any]
) -> None:
    head = random_eagle3()
    running = machine(head, growth)
    for most, prompt in enumerate(PROMPTS, start=1):
        running.add(prompt, GREEDY.replace(speculation=SpeculationParams(max_draft_len=most)))
    drain(running)
    assert {each.depth for each in diary} == {1, 2, 3}
    assert running.stats.draft_failures == 0
    assert not unlike(diary, Oracle(head), growth)


def test_where_pages_are_short_dynamic_trees_are_narrower(diary: list[Seen]) -> None:
    head = random_eagle3()
    running = machine(head, DYNAMIC, pages=19, page_size=2, max_num_tokens=30)
    running.add(PROMPTS[0], GREEDY.replace(max_tokens=28))
    drain(running)
    assert running.stats.draft_failures == 0
    assert min(each.nodes for each in diary) < 7
    assert all(len(each.draft) <= each.nodes for each in diary)
    expect_empty(running)


def test_a_prompt_of_one_token_is_enough(diary: list[Seen]) -> None:
    running = machine(random_eagle3(), CHAIN)
    running.add([5], GREEDY)
    drain(running)
    assert running.stats.draft_failures == 0
    assert len(diary[0].tokens) == 2  # behind its prefill
    assert not unlike(diary, Oracle(random_eagle3()), CHAIN)


def test_ranks_beyond_the_draft_vocabulary_are_refused() -> None:
    assert machine(random_eagle3(), {"eagle_choices": [[59]]})
    with pytest.raises(ParameterError, match="the rank 60, and the drafter knows 60 tokens"):
        machine(random_eagle3(), {"eagle_choices": [[60]]})


def test_heads_of_another_target_are_refused() -> None:
    wide = random_eagle3(hidden_size=48, own_embedding=False)
    with pytest.raises(ModelError, match="embedding of its own width"):
        machine(wide, CHAIN)
    with pytest.raises(ParameterError, match="reads 3 of the target's states"):
        machine(random_eagle3(), CHAIN | {"eagle3_layers_to_capture": [0, 1]})
    with pytest.raises(ParameterError, match="lacks layers"):
        machine(random_eagle3(), CHAIN | {"eagle3_layers_to_capture": [0, 1, 3]})
    with pytest.raises(ParameterError, match="no meaning for this head"):
        machine(random_eagle(), CHAIN | {"eagle3_layers_to_capture": [0, 1, 2]})
    large = random_eagle3(vocab_size=120)
    with pytest.raises(ModelError, match="it has 120 tokens, the target 101"):
        machine(large, CHAIN)


@pytest.mark.parametrize("growth", [CHAIN, STATIC, DYNAMIC], ids=["chain", "static", "dynamic"])
@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "opt", "phi"])
def test_targets_that_name_their_layers_otherwise_are_drafted_for(
    architecture: str, growth: dict[str, Any]
) -> None:
    directory = new_directory()
    random_eagle3(layer_ids=(1, 2, 3)).save(directory)
    config = EagleDecodingConfig(speculative_model=directory, **growth)
    running = engine(architecture, speculative=[config], pages=256)
    off = GREEDY.replace(speculation=SpeculationParams(enabled=False))
    sequences = [running.add(prompt, params)[0] for prompt in PROMPTS for params in (GREEDY, off)]
    drain(running)
    plain = greedy(tiny(architecture), PROMPTS, 16)
    assert outputs(sequences) == [tokens for tokens in plain for _ in range(2)]
    assert running.stats.draft_failures == 0
    assert running.stats.drafted > 30
    for sequence in sequences:
        running.close(sequence)
    expect_empty(running)


def test_a_target_whose_layers_cannot_be_found_is_refused_when_the_head_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network: Any = load("gpt2", "cpu").network
    network._layers.clear()  # found by an earlier test
    decoder = network.module.transformer
    more = nn.ModuleList(nn.Identity() for _ in decoder.h)
    monkeypatch.setattr(decoder, "more", more, raising=False)
    directory = new_directory()
    random_eagle3().save(directory)
    config = EagleDecodingConfig(speculative_model=directory, **CHAIN)
    with pytest.raises(ModelError, match=r"states of a gpt2 model cannot be captured.*h, more"):
        engine("gpt2", speculative=[config])


# ---- which states a published head was trained with: 8 layers ------------------------------------

IDS = "eagle_aux_hidden_state_layer_ids"
LAYOUTS: dict[str, tuple[dict[str, Any], str, list[int]]] = {
    # config -> the side of the layers, and the layers, whose states the head was trained with
    "authors": ({}, "input", [2, 4, 5]),
    "speculators": ({IDS: [1, 3, 6]}, "input", [1, 3, 6]),
    "specforge": ({"eagle_config": {IDS: [1, 3, 6]}}, "output", [1, 3, 6]),
    "specforge, usual": ({"eagle_config": {IDS: [1, 3, 4]}}, "output", [1, 3, 4]),
    "specforge, unordered": ({"eagle_config": {IDS: [6, 1, 3]}}, "output", [1, 3, 6]),
    "embeddings": ({"eagle_config": {IDS: [-1, 3, 6]}}, "input", [0, 4, 7]),
    "authors' in eagle_config": ({"eagle_config": {IDS: [2, 4, 5]}}, "input", [2, 4, 5]),
    "both": ({IDS: [2, 4, 7], "eagle_config": {IDS: [1, 3, 6]}}, "input", [2, 4, 7]),
    "both alike": ({IDS: [1, 3, 6], "eagle_config": {IDS: [1, 3, 6]}}, "input", [1, 3, 6]),
}


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target of 8 layers, which ``engine`` knows as ``llama_8``."""
    monkeypatch.setitem(ARCHITECTURES, "llama_8", ("llama", {"num_hidden_layers": 8}))
    return tiny("llama_8")


def published(config: dict[str, Any]) -> Path:
    """A head whose files are written here, in the names of its layout."""
    directory = new_directory()
    directory.mkdir()
    tensors = {name: x.contiguous() for name, x in random_eagle3().state_dict().items()}
    if IDS in config:
        tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
        config = {"transformer_layer_config": {**SIZES, "model_type": "llama"}, **config}
    else:
        config = {**SIZES, "model_type": "llama", **config}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, "draft_vocab_size": 60}))
    return directory


def drafted_by(directory: Path, growth: dict[str, Any], architecture: str = "llama_8") -> Engine:
    config = EagleDecodingConfig(speculative_model=directory, synthetic_acceptance=0.7, **growth)
    running = engine(architecture, speculative=[config], pages=256)
    running.add(PROMPTS[0], GREEDY)
    drain(running)
    assert running.stats.draft_failures == 0
    return running


@pytest.mark.parametrize(
    ("layout", "growth"),  # how a draft grows does not depend on the layout: the first has both
    [
        pytest.param(
            *(layout, growth),
            id=f"{layout}-{name}",
            marks=[pytest.mark.slow] if number and growth is DYNAMIC else [],
        )
        for number, layout in enumerate(LAYOUTS)
        for name, growth in (("chain", CHAIN), ("dynamic", DYNAMIC))
    ],
)
def test_a_published_head_drafts_from_the_states_it_was_trained_with(
    diary: list[Seen], deep: Path, layout: str, growth: dict[str, Any]
) -> None:
    config, side, layers = LAYOUTS[layout]
    directory = published(config)
    drafted_by(directory, growth)
    states = [State(layer, side) for layer in layers]  # type: ignore[arg-type]
    assert not unlike(diary, Published(directory, states, deep), growth)
    one_too_low = [State(max(0, state.layer - 1), state.side) for state in states]
    assert unlike(diary, Published(directory, one_too_low, deep), growth) > len(diary) / 2


def test_an_id_that_is_no_layer_says_that_the_ids_count_what_enters_them(
    diary: list[Seen], deep: Path
) -> None:
    directory = published({"eagle_config": {IDS: [3, 5, 8]}})
    drafted_by(directory, CHAIN)
    states = [State(3, "input"), State(5, "input"), State(7, "output")]
    assert not unlike(diary, Published(directory, states, deep), CHAIN)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize("layer_ids", [(1, 3, 6), (3, 5, 6)])
def test_an_export_says_its_layers_in_the_convention_of_its_layout(
    diary: list[Seen], deep: Path, layout: Any, layer_ids: tuple[int, ...]
) -> None:
    """(3, 5, 6) as outputs are 2, 4, 5: the ids that would else be taken for the authors' own."""
    directory = new_directory()
    random_eagle3(layer_ids=layer_ids).save(directory, layout)
    config = json.loads((directory / "config.json").read_text())
    assert config[IDS] == list(layer_ids)
    if layout == "eagle3":
        assert config["eagle_config"][IDS] == [layer_id - 1 for layer_id in layer_ids]
    drafted_by(directory, CHAIN)
    states = [State(layer_id, "input") for layer_id in layer_ids]
    assert not unlike(diary, Published(directory, states, deep), CHAIN)


@pytest.mark.parametrize("layers", [4, 5, 6])
def test_small_targets_are_not_guessed_at_where_the_head_does_not_name_its_layers(
    monkeypatch: pytest.MonkeyPatch, diary: list[Seen], layers: int
) -> None:
    name = f"llama_{layers}"
    monkeypatch.setitem(ARCHITECTURES, name, ("llama", {"num_hidden_layers": layers}))
    directory = published({})
    with pytest.raises(ParameterError, match=rf"not three different ones of L = {layers}"):
        drafted_by(directory, CHAIN, name)
    drafted_by(directory, CHAIN | {"eagle3_layers_to_capture": [0, 1, 2]}, name)
    states = [State(layer, "output") for layer in range(3)]
    assert not unlike(diary, Published(directory, states, tiny(name)), CHAIN)
