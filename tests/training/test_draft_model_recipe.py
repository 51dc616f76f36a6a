"""A draft model learns what its target says, from prompts alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forethought.assets import problems, reasoner_dir
from forethought.cli.main import main
from forethought.errors import ParameterError
from forethought.model import loader
from forethought.training.recipes.draft_model import DraftModelRecipe, DraftModelSettings
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import seeded
from models import prompts

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 1}


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher.load(reasoner_dir(), "float32")


def build(teacher: Teacher, **fields: object) -> DraftModelRecipe:
    texts = [
        Text(ids, length) for ids, length in zip(prompts((12, 30, 21)), (4, 9, 20), strict=True)
    ]
    settings = DraftModelSettings(**SIZES, **fields)  # type: ignore[arg-type]
    with seeded(0):
        return DraftModelRecipe.build(settings, texts, teacher)


def test_the_loss_is_cross_entropy_with_the_target_s_top_k(
    teacher: Teacher,
) -> None:
    recipe = build(teacher)
    batch = recipe.batch(0)
    log_probs = recipe.module(batch.tokens).log_softmax(-1).detach()
    total = mass = 0.0
    for row, (length, prompt_length) in enumerate(zip((12, 21, 30), (4, 20, 9), strict=True)):
        for position in range(prompt_length - 1, length - 1):
            choices, probs = batch.choices[row, position], batch.probs[row, position]
            total -= float((probs * log_probs[row, position, choices]).sum())
            mass += float(probs.sum())
    assert recipe.loss(batch).item() == pytest.approx(total / mass, rel=1e-4)


@pytest.mark.parametrize("runs_in_float32", [False, True])
def test_a_saved_model_has_bf16_weights_runs_as_asked_and_shares_the_targets_files(
    teacher: Teacher, tmp_path: Path, runs_in_float32: bool
) -> None:
    recipe = build(teacher, runs_in_float32=runs_in_float32)
    recipe.save(tmp_path)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (reasoner_dir() / name).read_bytes()
    stored = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == (torch.float32 if runs_in_float32 else torch.bfloat16)
    assert loaded.config.max_position_embeddings == teacher.lm.max_positions


def test_a_tiny_run_learns_to_be_accepted_and_leaves_a_model_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 steps on 24 short answers: more than 1.1 tokens per step on 4 others."""
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt": p["question"]}) + "\n" for p in problems()[:28]))
    config = tmp_path / "config.yaml"
    config.write_text(
        "{hidden_size: 48, intermediate_size: 64, num_layers: 1, batch_tokens: 1024, rate: 0.01, "
        "check_every: 200, max_tokens: 48}"
    )
    out = tmp_path / "out"
    options = ["--self-distill", str(asked), "--out", str(out), "--config", str(config)]
    options += ["--steps", "100", "--held-out", "4", "--device", "cpu", "--dtype", "float32"]
    assert main(["train", "draft-model", *options]) == 0
    shown = capsys.readouterr().out
    assert f"--speculative draft_target --draft-model {out / 'drafter'}" in shown
    assert float(shown.split(": ")[1].split(" tokens")[0]) > 1.1
    model = loader.load(out / "drafter", dtype="float32")
    assert (model.vocab_size, model.max_positions) == (512, 1024)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": 50, "num_heads": 4, "num_kv_heads": 1}, "multiple of num_heads"),
        ({"hidden_size": 48, "num_heads": 3, "num_kv_heads": 2}, "multiple of num_kv_heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        DraftModelSettings(**sizes)  # type: ignore[arg-type]
