"""Medusa's heads learn: which label belongs to which head, and that a tiny run gets somewhere."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import load
from forethought.assets import heads_dir, problems, reasoner_dir
from forethought.cli.main import main
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.model.hidden_states import FINAL
from forethought.speculative.heads.medusa import WEIGHTS, MedusaHeads
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.draft_vocabulary import DraftVocabulary
from forethought.training.recipes.medusa import (
    MedusaRecipe,
    MedusaSettings,
    head_loss,
    labels_ahead,
)
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import Trainer, seeded
from models import VOCAB, prompts, tiny, transformers_model
from tokens import speaking


@functools.cache
def teacher() -> Teacher:
    return Teacher.load(reasoner_dir(), dtype="float32", device="cpu")


@functools.cache
def texts(count: int = 12) -> tuple[Text, ...]:
    """What the reasoner says to some of its problems."""
    asked = [
        teacher().tokenizer.encode_more(
            teacher().tokenizer.render([{"role": "user", "content": each["question"]}])
        )
        for each in problems()[:count]
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=60)] * count
    answers = teacher().generate(asked, params).token_ids
    return tuple(
        Text(prompt + answer, len(prompt)) for prompt, answer in zip(asked, answers, strict=True)
    )


def made_batch(tokens: list[list[int]], prompt: int) -> TrainingBatch:
    """A batch whose states encode the token of their position, with one-hot distributions."""
    ids = torch.tensor(tokens)
    rows, width = ids.shape
    following = torch.cat([ids[:, 1:], torch.zeros(rows, 1, dtype=torch.int64)], 1)
    return TrainingBatch(
        tokens=ids,
        taught=(torch.arange(width) >= prompt).expand(rows, -1),
        lengths=torch.full((rows,), width),
        states={FINAL: torch.nn.functional.one_hot(ids, VOCAB).float()},
        choices=following[..., None],
        probs=torch.ones(rows, width, 1),
    )


def loss_ahead(
    head: Callable[[torch.Tensor], torch.Tensor], batch: TrainingBatch, ahead: int, labels: str
) -> float:
    """Of a head whose projection is the identity."""
    ahead_labels = labels_ahead(batch, ahead, labels, DraftVocabulary(VOCAB, None))
    return float(head_loss(head, torch.eye(VOCAB), batch.states[FINAL], ahead_labels))


@pytest.mark.parametrize("labels", ["tokens", "distributions"])
@pytest.mark.parametrize("ahead", [2, 3, 5])
def test_a_head_learns_the_token_that_many_places_further_on(ahead: int, labels: str) -> None:
    """A head that adds ``ahead`` to its position's token is right at that offset alone."""
    taught = made_batch([list(range(10, 40)), list(range(50, 80))], 6)

    def knowing(states: torch.Tensor) -> torch.Tensor:
        return 50.0 * states.roll(ahead, dims=-1)

    def loss(ahead: int) -> float:
        return loss_ahead(knowing, taught, ahead, labels)

    assert loss(ahead) < 1e-3
    for other in (ahead - 1, ahead + 1):
        assert loss(other) > 10


def test_only_what_the_target_has_chosen_is_learned() -> None:
    rows: list[int] = []

    def head(states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return states

    taught = made_batch([list(range(10, 40))], 6)
    loss_ahead(head, taught, 2, "tokens")
    assert rows == [24]
    assert loss_ahead(head, made_batch([[5, 6, 7]], 2), 4, "distributions") == 0.0


def test_a_batch_has_the_targets_own_states_and_distributions() -> None:
    reader = Teacher(load("llama"), teacher().tokenizer, tiny("llama"))
    given = [Text(ids, 2) for ids in prompts((9, 4, 17))]
    found = TrainingBatches(given, reader, [FINAL, 1], tokens=1000, seed=0, width=3)(0)
    order = [next(t for t in given if t.token_ids[0] == int(row[0])) for row in found.tokens]
    module = transformers_model(tiny("llama"))
    for row, text in enumerate(order):
        size = len(text)
        with torch.no_grad():
            output = module(torch.tensor([text.token_ids]), output_hidden_states=True)
        close = {"atol": 1e-4, "rtol": 1e-4}
        states = found.states[FINAL][row, :size]
        assert torch.allclose(states, output.hidden_states[-1][0], **close)
        assert torch.allclose(found.states[1][row, :size], output.hidden_states[1][0], **close)
        top = output.logits[0].softmax(-1).topk(3)
        assert torch.equal(found.choices[row, :size], top.indices)
        assert torch.allclose(found.probs[row, :size], top.values, **close)
        assert found.taught[row].tolist() == [
            2 <= position < size for position in range(found.tokens.shape[1])
        ]
        assert not found.probs[row, size:].any()


def test_batches_are_a_function_of_seed_and_step() -> None:
    def order(seed: int, steps: list[int]) -> list[list[int]]:
        batches = TrainingBatches(texts(), teacher(), [], tokens=200, seed=seed)
        return [batches(step).tokens.flatten().tolist() for step in steps]

    forwards = order(0, list(range(12)))
    assert order(0, [11, 3, 0, 7]) == [forwards[step] for step in (11, 3, 0, 7)]
    assert order(1, list(range(12))) != forwards


def make(settings: MedusaSettings) -> MedusaRecipe:
    with seeded(settings.seed):
        return MedusaRecipe.build(settings, texts(), teacher())


def test_new_heads_say_what_the_target_says() -> None:
    recipe = make(MedusaSettings())
    states = recipe.batch(0).states[FINAL][0, :5]
    with torch.no_grad():
        assert torch.allclose(
            recipe.module(states),
            teacher().lm.unembed(states)[:, None].expand(-1, 4, -1),
            atol=1e-4,
        )


def test_a_tiny_run_lowers_the_loss_and_its_heads_are_accepted(tmp_path: Path) -> None:
    """From 1.3 tokens per step to more than 2 on the very texts that are learned."""
    settings = MedusaSettings(steps=40, rate=3e-3, batch_tokens=1024, num_heads=3, check_every=40)
    recipe = make(settings)
    before = recipe.loss(recipe.batch(0)).item()

    def check(directory: Path) -> dict[str, float]:
        config = MedusaRecipe.decoding(directory)
        params = [SamplingParams(temperature=0.0, max_tokens=60)] * len(texts())
        found = teacher().generate([text.prompt for text in texts()], params, config)
        assert found.token_ids == [t.token_ids[t.prompt_length :] for t in texts()]
        return {"acceptance_length": found.metrics.mean_acceptance_length or 0.0}

    untrained = Trainer(recipe, settings, tmp_path, check)._evaluate()["acceptance_length"]
    found = Trainer(recipe, settings, tmp_path, check).run()
    assert recipe.loss(recipe.batch(0)).item() < before / 4
    assert untrained < 1.6
    assert found["acceptance_length"] > 2.0


def test_the_command_trains_from_prompts_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "prompts.txt"
    asked.write_text("".join(f"Hello {word} world\n" for word in "abcdefgh"), encoding="utf-8")
    config = tmp_path / "medusa.yaml"
    config.write_text("{num_heads: 2, batch_tokens: 64, check_every: 2, max_tokens: 12}")
    out, target = tmp_path / "out", speaking("byte_level")
    options = ["--target", str(target), "--self-distill", str(asked), "--out", str(out)]
    options += ["--config", str(config), "--steps", "3", "--held-out", "2", "--dtype", "float32"]
    assert main(["train", "medusa", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["acceptance_length"] >= 1.0
    assert len((out / "texts.jsonl").read_text().splitlines()) == 8
    weights = (out / "drafter" / WEIGHTS).read_bytes()
    stamp = (out / "texts.jsonl").read_text()
    assert main(["train", "medusa", *options]) == 0
    shown = capsys.readouterr().out
    assert "tokens per step on held-out prompts" in shown
    assert f"--speculative medusa --draft-model {out / 'drafter'}" in shown
    assert ((out / "drafter" / WEIGHTS).read_bytes(), (out / "texts.jsonl").read_text()) == (
        weights,
        stamp,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give either --data or --self-distill"),
        (["--data", "a", "--self-distill", "b"], "give either"),
        (["--data", "nowhere.jsonl"], "cannot read the texts"),
    ],
)
def test_the_command_refuses_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["train", "medusa", "--out", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err


def test_settings_that_a_recipe_does_not_have_are_refused() -> None:
    with pytest.raises(ParameterError, match="MedusaSettings has no parameter 'heads'"):
        MedusaSettings(heads=3)  # type: ignore[call-arg]


def test_the_shipped_heads_make_more_than_two_and_a_half_tokens_per_step() -> None:
    """Eight shipped problems at temperature 0 in float32, up to 250 tokens of each."""
    directory = heads_dir("medusa")
    assert sum(each.stat().st_size for each in directory.iterdir()) < 3 * 2**20
    assert len(MedusaHeads.load(directory, 256, 512)) == 5
    asked = [
        teacher().tokenizer.encode_more(
            teacher().tokenizer.render([{"role": "user", "content": each["question"]}])
        )
        for each in problems()[:8]
    ]
    params: list[Any] = [SamplingParams(temperature=0.0, max_tokens=250)] * 8
    config = MedusaDecodingConfig(speculative_model=directory)
    found = teacher().generate(asked, params, config)
    assert found.token_ids == teacher().generate(asked, params).token_ids
    assert (found.metrics.mean_acceptance_length or 0.0) > 2.5
    assert not found.metrics.lossy
