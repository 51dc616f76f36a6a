"""Draft modules in C++ draft what their reference implementations in torch operations draft."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts import Seen, recording
from eagle_heads import new_directory, random_eagle, random_eagle3
from engines import GREEDY, drain, engine_over, expect_empty, load, outputs
from forethought.backends.cpu import library, module_forward
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    ReDrafterDecodingConfig,
)
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.errors import ModelError
from forethought.model import loader
from forethought.model.causal_lm import CausalLM
from forethought.speculative.heads import eagle3
from forethought.speculative.heads.module_parts import ModuleParts
from forethought.speculative.heads.mtp import MtpModule, save_modules
from medusa_heads import make_heads, shared_heads
from models import prompts, save_random, tiny
from mtp_modules import random_modules, saved
from redrafter_heads import make_head, random_head

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)

PROMPTS = prompts((9, 4, 33))
DYNAMIC: dict[str, Any] = {
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 3,
    "max_total_draft_tokens": 7,
}
CHAIN: dict[str, Any] = {}


def eagle(head: Any, **growth: Any) -> DecodingBaseConfig:
    """Drafts are accepted at random, so that many are, and unevenly."""
    directory = new_directory()
    head.save(directory)
    length = {} if "eagle_choices" in growth else {"max_draft_len": 4}
    settings = {"synthetic_acceptance": 0.7, **length, **growth}
    return EagleDecodingConfig(speculative_model=directory, **settings)


def mtp(architecture: str, layout: str = "deepseek", count: int = 1, **more: Any) -> Any:
    directory = saved(architecture, count, layout)
    settings = {"max_draft_len": 4, "synthetic_acceptance": 0.7, **more}
    return MTPDecodingConfig(speculative_model=directory, **settings)


def redrafter(**more: Any) -> DecodingBaseConfig:
    sizes = {"num_beams": 3, "draft_len_per_beam": 3, "synthetic_acceptance": 0.7}
    return ReDrafterDecodingConfig(speculative_model=random_head(), **sizes, **more)


def draft_model(architecture: str, path: Path, **more: Any) -> DecodingBaseConfig:
    config = loader.load(tiny(architecture)).config
    save_random(config, path / "draft", seed=5)
    settings = {"max_draft_len": 4, "synthetic_acceptance": 0.7, **more}
    return DraftTargetDecodingConfig(speculative_model=path / "draft", **settings)


VOCABULARY = torch.arange(3, 101, 4)


def with_vocabulary(kind: str, **more: Any) -> DecodingBaseConfig:
    """A drafter of some tokens only."""
    directory, more = new_directory(), {"synthetic_acceptance": 0.7, **more}
    if kind == "medusa":
        make_heads(vocab=len(VOCABULARY), token_map=VOCABULARY).save(directory, "vllm")
        return MedusaDecodingConfig(speculative_model=directory, **more)
    if kind == "redrafter":
        head = make_head(vocab=len(VOCABULARY))
        head.token_map = VOCABULARY
        head.save(directory)
        return ReDrafterDecodingConfig(speculative_model=directory, num_beams=3, **more)
    modules = random_modules("llama", 2 if kind == "mtp, one per place" else 1)
    for module in modules:
        module.token_map = VOCABULARY
    save_modules(modules, directory, first=load("llama").num_layers)
    return MTPDecodingConfig(speculative_model=directory, max_draft_len=4, **more)


KINDS: dict[str, tuple[str, Callable[[Path], DecodingBaseConfig]]] = {
    "eagle": ("llama", lambda _: eagle(random_eagle())),
    "eagle, without a bias": ("llama", lambda _: eagle(random_eagle(bias=False))),
    "eagle, own embedding": ("llama", lambda _: eagle(random_eagle(own_embedding=True))),
    "eagle, tree": ("llama", lambda _: eagle(random_eagle(), **DYNAMIC)),
    "eagle3": ("llama", lambda _: eagle(random_eagle3())),
    "eagle3, tied": ("llama_tied_biased", lambda _: eagle(random_eagle3())),
    "eagle3, whole vocabulary": ("llama", lambda _: eagle(random_eagle3(draft_vocab=101))),
    "eagle3, all norms": (
        "llama",
        lambda _: eagle(
            random_eagle3(
                norm_before_residual=True,
                norm_before_fc=True,
                norm_output=True,
                own_embedding=True,
                attention_bias=True,
            )
        ),
    ),
    "eagle3, tree": ("llama", lambda _: eagle(random_eagle3(), **DYNAMIC)),
    "eagle3, static tree": (
        "llama",
        lambda _: eagle(
            random_eagle3(), eagle_choices=[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
        ),
    ),
    "medusa": (
        "llama",
        lambda _: MedusaDecodingConfig(
            speculative_model=shared_heads(), medusa_choices=[[0], [1], [0, 0], [0, 0, 0]]
        ),
    ),
    "medusa, most probable": (
        "llama",
        lambda _: MedusaDecodingConfig(
            speculative_model=shared_heads(), tree="most_probable", max_total_draft_tokens=6
        ),
    ),
    "redrafter": ("llama", lambda _: redrafter()),
    "redrafter, beams": ("llama", lambda _: redrafter(tree="beams")),
    "mtp": ("llama", lambda _: mtp("llama")),
    "mtp, state unnormed": ("llama", lambda _: mtp("llama", fed_back_state="unnormed")),
    "mtp, another layout": ("qwen3", lambda _: mtp("qwen3", "qwen")),
    "mtp, window": ("mistral", lambda _: mtp("mistral")),
    "mtp, experts": ("qwen3_moe", lambda _: mtp("qwen3_moe")),
    "mtp, scaled embedding": ("gemma3", lambda _: mtp("gemma3")),
    "mtp, one per place": ("llama", lambda _: mtp("llama", count=2)),
    "mtp, gated attention": ("qwen3_5", lambda _: mtp("qwen3_5", "qwen")),
    "mtp, gated attention, other layout": ("qwen3_5", lambda _: mtp("qwen3_5", "mimo")),
    "mtp, gated attention, state unnormed": (
        "qwen3_5",
        lambda _: mtp("qwen3_5", "qwen", fed_back_state="unnormed"),
    ),
    "mtp, gated attention, one per place": ("qwen3_5", lambda _: mtp("qwen3_5", "qwen", count=2)),
    "mtp, gated attention, experts": ("qwen3_next", lambda _: mtp("qwen3_next", "qwen")),
    "mtp, latent attention": ("kimi_linear", lambda _: mtp("kimi_linear")),
    "medusa, draft vocabulary": ("llama", lambda _: with_vocabulary("medusa")),
    "redrafter, draft vocabulary": ("llama", lambda _: with_vocabulary("redrafter")),
    "mtp, draft vocabulary": ("llama", lambda _: with_vocabulary("mtp")),
    "mtp, one per place, draft vocabulary": (
        "llama",
        lambda _: with_vocabulary("mtp, one per place"),
    ),
    "draft model": ("llama", lambda path: draft_model("llama", path)),
    "draft model, window": ("mistral", lambda path: draft_model("mistral", path)),
}


@functools.cache
def loaded(architecture: str, forward: loader.Forward) -> CausalLM:
    return loader.load(tiny(architecture), dtype="float32", forward=forward)


def run(
    architecture: str, forward: loader.Forward, config: DecodingBaseConfig, page_size: int = 4
) -> tuple[Engine, list[Seen]]:
    """Three requests, one of which comes later, then two with prefix hits; and their drafts."""
    lm = loaded(architecture, forward)
    machine = engine_over(
        lm, pages=1024 // page_size, page_size=page_size, max_num_tokens=24, speculative=[config]
    )
    with recording(machine) as seen:
        for prompt in PROMPTS[:2]:
            machine.add(prompt, GREEDY)
        for _ in range(3):
            machine.step()
        machine.add(PROMPTS[2], GREEDY)
        drain(machine)
        for prompt in PROMPTS[1:]:
            machine.add([*prompt, 7], GREEDY)
        drain(machine)
    expect_empty(machine)
    return machine, seen


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_torch(kind: str, tmp_path: Path) -> None:
    """In a batch whose rows begin, end and accept at different places, behind long prefills."""
    architecture, configure = KINDS[kind]
    config = configure(tmp_path)
    natively, found = run(architecture, "auto", config)
    in_torch, expected = run(architecture, "torch", config)
    assert natively.stats.draft_failures == in_torch.stats.draft_failures == 0
    assert natively.stats.accepted > 8 or "medusa" in kind
    assert found == expected
    assert list(natively.stats.draft_paths.values()) == ["native"]
    assert list(in_torch.stats.draft_paths.values()) in (["torch"], ["fused"])


@pytest.mark.parametrize(
    "wrong", ["norm_residual", "feeds_normed", "state_first", "zero_first", "final_norm"]
)
def test_a_part_that_is_taken_wrongly_changes_drafts(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = eagle(random_eagle3())
    _, expected = run("llama", "torch", config)
    parts = eagle3.eagle3_parts

    def broken(head: Any, max_positions: int) -> ModuleParts:
        found = parts(head, max_positions)
        value = None if wrong == "final_norm" else True
        return ModuleParts(
            **{name: getattr(found, name) for name in found.__slots__} | {wrong: value}
        )

    monkeypatch.setattr(eagle3, "eagle3_parts", broken)
    _, found = run("llama", "native", config)
    assert found != expected


def test_a_module_that_computes_more_than_its_parts_stays_in_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one whose decoder has a factor for its inputs."""
    join = MtpModule.join
    monkeypatch.setattr(MtpModule, "join", lambda self, *inputs: 2 * join(self, *inputs))
    machine, _ = run("qwen3_5", "auto", mtp("qwen3_5", "qwen"))
    assert machine.stats.draft_paths == {"mtp": "torch"}
    assert machine.stats.draft_failures == 0


def test_drafts_go_on_at_positions_whose_rotation_no_token_has_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table of a module has those of a whole draft, however few it has computed before."""
    _, expected = run("qwen3_5", "auto", mtp("qwen3_5", "qwen"))
    monkeypatch.setattr(module_forward, "MIN_POSITIONS", 1)
    _, found = run("qwen3_5", "auto", mtp("qwen3_5", "qwen"))
    assert found == expected


@pytest.mark.parametrize("growth", [CHAIN, DYNAMIC], ids=["chain", "tree"])
def test_neither_pages_nor_threads_matter(growth: dict[str, Any]) -> None:
    config = eagle(random_eagle3(), **growth)
    before, found = torch.get_num_threads(), []
    try:
        for page_size, num_threads in ((16, 1), (1, 1), (16, 3)):
            torch.set_num_threads(num_threads)
            found.append(run("llama", "native", config, page_size)[1])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_tokens_are_those_of_plain_decoding() -> None:
    """Without synthetic acceptance: nothing but what the target says itself is accepted."""
    config = eagle(random_eagle3(), synthetic_acceptance=None)
    said = []
    for speculative in ([], [config], [mtp("llama", synthetic_acceptance=None)]):
        machine = engine_over(loaded("llama", "native"), pages=256, speculative=speculative)
        sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
        drain(machine)
        said.append(outputs(sequences))
        expect_empty(machine)
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("kind", ["medusa", "redrafter", "mtp", "mtp, one per place"])
def test_only_tokens_of_the_draft_vocabulary_are_drafted(kind: str) -> None:
    _, seen = run("llama", "native", with_vocabulary(kind))
    drafted = {token for step in seen for token in step.drafted}
    assert len(drafted) > 3
    assert drafted <= set(VOCABULARY.tolist())


@pytest.mark.parametrize("kind", ["redrafter", "mtp"])
def test_a_draft_vocabulary_beyond_the_targets_is_refused(kind: str) -> None:
    config = with_vocabulary(kind)
    assert config.speculative_model is not None
    file = Path(config.speculative_model) / "model.safetensors"
    save_file(load_file(file) | {"token_map": VOCABULARY + 2}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="token_map is no list of ids below 101"):
        run("llama", "native", config)


def test_modules_run_in_torch_operations_where_the_target_does() -> None:
    machine, _ = run("llama", "torch", eagle(random_eagle3()))
    assert machine.stats.draft_paths == {"eagle": "torch"}
