"""Properties of every recipe: weights are a function of the seed, pauses change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forethought.assets import heads_dir, reasoner_dir
from forethought.errors import ModelError, ParameterError, UnknownNameError
from forethought.llm.tokenizer import Tokenizer
from forethought.model import loader
from forethought.training.recipes.table import recipe
from forethought.training.run import Source, TrainingRun
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DrafterSettings, Trainer, seeded
from models import prompts, tiny

PROMPTS = prompts((4, 7, 9, 5))
LOOP: dict[str, Any] = {"steps": 4, "rate": 0.01, "batch_tokens": 100}
_SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    "draft-model": _SIZES,
    "draft-model, muon": {**_SIZES, "optimizer": "muon", "weight_decay": 0.05},
    "eagle3": {"ttt_length": 3, "ttt_share": 0.5, "export_dtype": "float32"},
    "mtp": {"depths": 2, "export_dtype": "float32"},
    "redrafter": {"draft_len": 3, "blocks": 1, "export_dtype": "float32"},
}

BEGUN: dict[str, dict[str, Any]] = {"medusa": {"num_heads": 2}}
"""Whose weights begin as the target's, whatever the seed."""


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    answers = prompts((30, 26, 34, 22), seed=7)
    return [
        Text(prompt + answer, len(prompt)) for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]


class Runs:
    """Short runs of one recipe, each of which begins anew from what lies in its directory."""

    def __init__(self, kind: str, teacher: Teacher, texts: list[Text], directory: Path) -> None:
        self.recipe, self.teacher, self.texts = recipe(kind.partition(",")[0]), teacher, texts
        self.fields, self.directory = {**LOOP, **(KINDS | BEGUN)[kind]}, directory

    def trainer(self, name: str, seed: int = 0) -> Trainer:
        settings = self.recipe.Settings(**self.fields, seed=seed)
        with seeded(seed):
            built = self.recipe.build(settings, self.texts, self.teacher)
        return Trainer(built, settings, self.directory / name)

    def weights(self, name: str, until: int, seed: int = 0) -> dict[str, Tensor]:
        trainer = self.trainer(name, seed)
        trainer.run(until=until)
        return dict(trainer.recipe.module.state_dict())


@pytest.fixture(params=KINDS)
def runs(request: Any, teacher: Teacher, texts: list[Text], tmp_path: Path) -> Runs:
    return Runs(request.param, teacher, texts, tmp_path)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_weights_are_a_function_of_the_seed_whatever_was_drawn_before(runs: Runs) -> None:
    first = runs.weights("first", until=2)
    torch.rand(5)
    assert same(first, runs.weights("again", until=2))
    assert not same(first, runs.weights("other", until=2, seed=1))


def test_a_run_that_was_interrupted_ends_with_the_weights_of_one_that_was_not(runs: Runs) -> None:
    whole = runs.weights("whole", until=4)
    for until in (1, 3, 4):
        paused = runs.weights("paused", until=until)
    assert same(whole, paused)
    assert not same(whole, runs.weights("short", until=3))


def test_a_step_lowers_the_loss(runs: Runs) -> None:
    trainer = runs.trainer("run")
    with seeded(0, 1):
        batch = trainer.recipe.batch(0)
        before = float(trainer.recipe.loss(batch).detach())
    trainer.run(until=1)
    with seeded(0, 1):
        trainer.recipe.batch(0)
        assert float(trainer.recipe.loss(batch).detach()) < before


def test_a_run_that_begins_with_a_drafter_has_its_weights(runs: Runs) -> None:
    trainer = runs.trainer("first")
    trainer.run(until=2)
    trainer.recipe.save(runs.directory / "drafter")
    runs.fields["start"] = runs.directory / "drafter"
    begun = runs.trainer("second", seed=1).recipe.module.state_dict()
    for name, weight in trainer.recipe.module.state_dict().items():
        if weight.shape[0] > 1:  # an MTP module's own vocabulary is one token that nothing reads
            assert torch.allclose(begun[name], weight, rtol=0.01)  # some were saved in bf16


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("draft-model", {"hidden_size": 48}),
        ("eagle3", {"intermediate_size": 8}),
        ("medusa", {"num_heads": 3}),
        ("mtp", {"modules": 2}),
        ("redrafter", {"blocks": 2}),
    ],
)
def test_a_drafter_of_other_sizes_is_refused_as_a_beginning_before_texts_are_written(
    kind: str, changed: dict[str, Any], teacher: Teacher, texts: list[Text], tmp_path: Path
) -> None:
    runs = Runs(kind, teacher, texts, tmp_path)
    runs.trainer("first").recipe.save(tmp_path / "drafter")
    (tmp_path / "prompts.txt").write_text("a\n" * 8)
    source = Source(prompts=tmp_path / "prompts.txt")
    for fields, error in ((changed, ModelError), ({}, Reached)):
        start = {**runs.fields, **fields, "start": tmp_path / "drafter"}
        run = TrainingRun(kind, start, tmp_path / "second")
        run.__dict__["teacher"] = teacher
        with pytest.raises(error, match=r"cannot begin with|texts"):
            run(source, 2, on_texts=reached)


class Reached(Exception):
    """Texts would be written."""


def reached(*progress: object) -> None:
    raise Reached("texts")


def test_a_run_of_another_kind_of_drafter_is_not_gone_on_with(
    teacher: Teacher, texts: list[Text], tmp_path: Path
) -> None:
    Runs("redrafter", teacher, texts, tmp_path).weights("run", until=1)
    with pytest.raises(ParameterError, match="ReDrafterSettings, and not MtpSettings"):
        Runs("mtp", teacher, texts, tmp_path).weights("run", until=1)


def test_a_run_may_begin_with_embedded_heads_by_their_name() -> None:
    settings = DrafterSettings(start="forethought/medusa")  # type: ignore[arg-type]
    assert settings.start == heads_dir("medusa")
    with pytest.raises(UnknownNameError, match="forethought/medusa"):
        DrafterSettings(start="forethought/medsua")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        ("mtp", "lfm2", "its Lfm2Model has no 'norm' after the layers"),
        ("mtp", "gpt2", "its GPT2Model has no 'norm' after the layers"),
        ("mtp", "gemma2", "softcap"),
        ("medusa-2", "qwen3_5", "Qwen3_5ForCausalLM has recurrent layers"),
        ("medusa-2", "lfm2", "Lfm2ForCausalLM has recurrent layers"),
    ],
)
def test_a_target_that_can_have_no_such_drafter_is_refused_before_texts_are_written(
    kind: str, architecture: str, words: str, tmp_path: Path
) -> None:
    run = TrainingRun(kind, {}, tmp_path)
    lm = loader.load(tiny(architecture), dtype="float32", fuse=not run.settings.adapts)
    run.teacher = Teacher(lm, Tokenizer.load(reasoner_dir()), tiny(architecture))
    with pytest.raises(ModelError, match=words):
        run(Source(num_prompts=200))
    assert [*tmp_path.iterdir()] == []
