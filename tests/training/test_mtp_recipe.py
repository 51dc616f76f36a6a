"""MTP's recipe: modules are trained as they are used, and their drafts get accepted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines import load
from forethought.assets import reasoner_dir
from forethought.config.drafters import MTPDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.errors import ModelError
from forethought.llm.tokenizer import Tokenizer
from forethought.model.hidden_states import FINAL
from forethought.speculative.heads.mtp import MtpModule, load_modules
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.recipes.mtp import (
    ATTENTION,
    KEYWORD,
    MtpRecipe,
    MtpSettings,
    TrainingTimeTestKeys,
)
from forethought.training.recipes.table import recipe
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DRAFTER, Trainer, seeded
from models import prompts, tiny
from mtp_modules import random_modules

PROMPTS = prompts((4, 7, 9, 5, 6, 8))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SETTINGS = MtpSettings(
    steps=6, rate=0.01, batch_tokens=256, depths=3, check_every=1000, export_dtype="float32"
)


def teacher_of(architecture: str) -> Teacher:
    """A tiny random model; nothing here is text."""
    return Teacher(load(architecture), Tokenizer.load(reasoner_dir()), tiny(architecture))


def made(settings: MtpSettings, texts: list[Text], teacher: Teacher) -> MtpRecipe:
    with seeded(settings.seed):
        return MtpRecipe.build(settings, texts, teacher)


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "qwen3_moe"])
def test_depths_of_the_training_time_test_see_what_a_replayed_module_sees(
    architecture: str,
) -> None:
    """Row t of depth k is what leaves behind t + 1 true pairs and k - 1 of the module's own."""
    [module] = random_modules(architecture)
    hidden, width = module.eh_proj.out_features, 6
    source = torch.Generator().manual_seed(1)
    target = torch.randn(1, width, hidden, generator=source)
    tokens = torch.randn(1, width + 3, hidden, generator=source)  # their embeddings

    module.model.set_attn_implementation(ATTENTION)
    keys, states, by_depth = TrainingTimeTestKeys(), target, list[Tensor]()
    for depth in range(1, 4):
        positions = torch.arange(width)[None] + depth - 1
        left = module(tokens[:, depth : depth + width], states, positions, **{KEYWORD: keys})
        states = left.states
        by_depth.append(left.normed)

    module.model.set_attn_implementation("eager")
    for row in range(width):
        read = target[:, : row + 1]
        for depth in range(1, 4):
            positions = torch.arange(row + depth)[None]
            left = module(tokens[:, 1 : row + depth + 1], read, positions)
            assert torch.allclose(left.normed[0, -1], by_depth[depth - 1][0, row], atol=1e-4)
            read = torch.cat([read, left.states[:, -1:]], 1)


class Stub(nn.Module):
    """Answers every pair with a fixed state, and keeps what it was given."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer, self.given = answer, list[Any]()

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, **kwargs: Any) -> Any:
        from forethought.speculative.heads.mtp import ModuleStates

        self.given.append((embedded, states, positions, kwargs[KEYWORD]))
        answer = self.answer.expand(*states.shape)
        return ModuleStates(answer, answer)


def stubbed(teacher: Teacher, stubs: list[Stub], **settings: Any) -> MtpRecipe:
    batches = TrainingBatches([Text([1, 2], 1)], teacher, [FINAL], tokens=64, seed=0)
    chosen = SETTINGS.model_copy(update=settings)
    return MtpRecipe(chosen, batches, nn.ModuleList(stubs), teacher)


def made_batch(width: int, taught_from: int) -> TrainingBatch:
    """One text in which the token after position t is t + 1 with probability 1."""
    tokens = torch.arange(width)[None]
    return TrainingBatch(
        tokens=tokens,
        taught=tokens >= taught_from,
        lengths=torch.tensor([width]),
        states={FINAL: torch.randn(1, width, 32)},
        choices=tokens[..., None] + 1,
        probs=torch.ones(1, width, 1),
    )


@pytest.mark.parametrize("replayed", [True, False])
def test_each_depth_reads_the_token_one_further_on(teacher: Teacher, replayed: bool) -> None:
    stubs = [Stub(torch.zeros(32)) for _ in range(1 if replayed else 3)]
    batch = made_batch(10, 3)
    stubbed(teacher, stubs).loss(batch)
    given = [entry for stub in stubs for entry in stub.given]
    assert len(given) == 3
    for depth, (embedded, states, positions, _) in enumerate(given, start=1):
        assert torch.equal(embedded[0], teacher.lm.embed(torch.arange(depth, 9)))
        assert states.shape[1] == 9 - depth
        first = depth - 1 if replayed else 0  # a replayed module moves on along the text
        assert positions[0].tolist() == list(range(first, first + 9 - depth))
    assert torch.equal(given[0][1], batch.states[FINAL][:, :8])
    assert len({id(keys) for *_, keys in given}) == (1 if replayed else 3)


@pytest.mark.parametrize("labels", ["distributions", "tokens"])
def test_the_loss_is_that_of_the_token_behind_and_of_taught_ones_only(
    teacher: Teacher, labels: str
) -> None:
    recipe_ = stubbed(teacher, [Stub(torch.zeros(32))], labels=labels)
    assert recipe_.loss(made_batch(10, 3)).item() == pytest.approx(math.log(101), abs=1e-4)
    # Certain of token 7, it is right at one of the labelled positions 5 to 9 at each depth.
    recipe_._projection = torch.zeros(101, 32)
    recipe_._projection[7, 0] = 1.0
    recipe_.module[0].answer = torch.zeros(32).index_fill(0, torch.tensor(0), 20.0)
    assert recipe_.loss(made_batch(10, 5)).item() == pytest.approx(20.0 * 4 / 5, abs=1e-4)
    assert recipe_.loss(made_batch(8, 7)).item() == pytest.approx(0.0, abs=1e-4)


def test_depths_weigh_as_published(teacher: Teacher) -> None:
    found = stubbed(teacher, [Stub(torch.zeros(32))])._weights
    assert [round(weight, 2) for weight in found] == [0.51, 0.31, 0.18]
    assert sum(found) == pytest.approx(1.0)


def test_a_step_lowers_the_loss(teacher: Teacher, texts: list[Text], tmp_path: Path) -> None:
    chosen = made(SETTINGS, texts, teacher)
    batch = chosen.batch(0)
    before = chosen.loss(batch).item()
    Trainer(chosen, SETTINGS, tmp_path).run(until=1)
    assert chosen.loss(batch).item() < before


def test_a_run_that_was_interrupted_ends_with_the_weights_of_one_that_was_not(
    teacher: Teacher, texts: list[Text], tmp_path: Path
) -> None:
    for name, stops in (("whole", [None]), ("parts", [2, 5, None])):
        for stop in stops:
            Trainer(made(SETTINGS, texts, teacher), SETTINGS, tmp_path / name).run(until=stop)
    found: list[list[MtpModule]] = [
        load_modules(tmp_path / name / DRAFTER, teacher.lm) for name in ("whole", "parts")
    ]
    whole, parts = (modules[0].state_dict() for modules in found)
    for name in whole:
        assert torch.equal(whole[name], parts[name])


@pytest.mark.parametrize("modules", [1, 2])
def test_after_a_tiny_run_more_than_one_drafted_token_per_step_is_accepted(
    teacher: Teacher, texts: list[Text], tmp_path: Path, modules: int
) -> None:
    """Overfitted answers; new weights have none accepted."""
    settings = SETTINGS.model_copy(update={"steps": 100, "modules": modules})

    def accepted(directory: Path) -> float:
        config = MTPDecodingConfig(max_draft_len=1 + modules, speculative_model=directory)
        metrics = teacher.generate(PROMPTS, [GREEDY] * len(PROMPTS), config).metrics
        return metrics.accepted / metrics.steps

    chosen = made(settings, texts, teacher)
    chosen.save(tmp_path / "new")
    assert accepted(tmp_path / "new") < 0.2
    Trainer(chosen, settings, tmp_path).run()
    assert accepted(tmp_path / DRAFTER) > 1.0


def test_attention_that_the_training_time_test_lacks_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="its attention has attention sinks"):
        MtpRecipe.build(SETTINGS, [Text([1, 2], 1)], teacher_of("gpt_oss"))


def test_the_recipe_is_found_by_its_name(tmp_path: Path) -> None:
    found = recipe("mtp")
    assert found.Settings is MtpSettings
    config = found.decoding(tmp_path)
    assert isinstance(config, MTPDecodingConfig)
    assert config.speculative_model == tmp_path
