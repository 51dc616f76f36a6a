"""EAGLE-3's recipe: the head learns where and what it will be asked, and gets better by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_heads import Oracle, scatter
from engines import load
from forethought.assets import reasoner_dir
from forethought.errors import ParameterError
from forethought.llm.tokenizer import Tokenizer
from forethought.speculative.heads.eagle3 import Eagle3Head
from forethought.training.draft_vocabulary import DraftVocabulary
from forethought.training.recipes.eagle3 import (
    Eagle3Recipe,
    Eagle3Settings,
    restricted,
)
from forethought.training.recipes.table import recipe
from forethought.training.run import AcceptanceEvaluation
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DRAFTER, Trainer
from models import VOCAB, prompts, tiny, transformers_model

PROMPTS = prompts((4, 7, 9, 5, 6, 8))
LAYER_IDS = (1, 2, 3)
SETTINGS = Eagle3Settings(
    steps=6,
    rate=0.01,
    batch_tokens=256,
    ttt_length=3,
    distribution_width=VOCAB,
    export_dtype="float32",
)


def made(teacher: Teacher, texts: list[Text], **changes: Any) -> Eagle3Recipe:
    return Eagle3Recipe.build(SETTINGS.model_copy(update=changes), texts, teacher)


def test_what_is_drafted_in_training_is_what_is_drafted_in_use(teacher: Teacher) -> None:
    texts = [Text(prompts((11,), seed=3)[0], 4), Text(prompts((8,), seed=4)[0], 3)]
    for share, hidden in ((1.0, None), (0.5, None), (1.0, 24)):
        teaching = made(teacher, texts, ttt_share=share, hidden_size=hidden)
        scatter(teaching.module)
        batch = teaching.batch(0)
        oracle = Oracle(teaching.module, LAYER_IDS)
        with torch.no_grad():
            steps = [
                (positions, teaching.module.lm_head(exits))
                for positions, exits in teaching.predictions(batch)
            ]
        assert len(steps[1][0]) == (9 if share == 1.0 else 4)
        for step, (pairs, logits) in enumerate(steps):
            for column, pair in enumerate(pairs.tolist()):
                for row in range(2):
                    tokens = batch.tokens[row, : int(batch.lengths[row])].tolist()
                    read = tokens[pair + 2 : pair + 2 + step]
                    if len(read) < step or pair + 2 > len(tokens):
                        continue  # beyond the end
                    expected = oracle.logits(tokens[: pair + 2], read)[teaching.module.ids]
                    torch.testing.assert_close(
                        logits[row, column].double(), expected, rtol=1e-3, atol=1e-3
                    )


def test_the_loss_is_the_distance_from_the_targets_distributions_within_the_draft_vocabulary(
    teacher: Teacher, texts: list[Text]
) -> None:
    short = [Text(text.token_ids[: 9 + n], text.prompt_length) for n, text in enumerate(texts[:2])]
    teaching = made(teacher, short, draft_vocab_size=4)
    head, oracle = teaching.module, Oracle(teaching.module, LAYER_IDS)
    module, ids = transformers_model(tiny("llama")), head.ids
    expected, left_out = 0.0, 0
    for step in range(3):
        losses = []
        for text in short:
            tokens = text.token_ids
            with torch.inference_mode():
                distributions = module(torch.tensor([tokens])).logits[0].double().softmax(-1)
            for pair in range(len(tokens) - 2 - step):
                label_at = pair + 2 + step
                if label_at < text.prompt_length:
                    continue
                distribution = distributions[label_at - 1]
                if int(distribution.argmax()) not in ids.tolist():
                    left_out += 1
                    continue
                kept = distribution[ids] / distribution[ids].sum()
                scores = oracle.logits(tokens[: pair + 2], tokens[pair + 2 : label_at])[ids]
                losses.append(-(kept * scores.log_softmax(0)).sum())
        expected += 0.8**step * float(sum(losses) / len(losses))
    assert left_out > 2
    assert float(teaching.loss(teaching.batch(0)).detach()) == pytest.approx(expected, rel=1e-3)


def test_distributions_are_restricted_to_the_draft_vocabulary() -> None:
    distribution = restricted(
        torch.tensor([[1, 0, 3], [0, 3, 1], [0, 2, 0]]),
        torch.tensor([[0.6, 0.2, 0.2], [0.5, 0.4, 0.1], [0.9, 0.1, 0.0]]),
        DraftVocabulary(4, torch.tensor([1, 3])),
    )
    assert distribution.has_label.tolist() == [True, False, False]
    torch.testing.assert_close(
        distribution.probs, torch.tensor([[0.75, 0.0, 0.25], [0.0, 0.8, 0.2], [0.0, 0.0, 0.0]])
    )


def test_a_step_lowers_the_loss(teacher: Teacher, texts: list[Text], tmp_path: Path) -> None:
    teaching = made(teacher, texts)
    batch = teaching.batch(0)
    before = float(teaching.loss(batch).detach())
    Trainer(teaching, SETTINGS, tmp_path).run(until=1)
    assert float(teaching.loss(batch).detach()) < before


def test_resuming_gives_the_weights_of_a_run_without_a_pause(
    teacher: Teacher, texts: list[Text], tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"ttt_share": 0.4, "batch_tokens": 100})
    for name, pauses in (("whole", [6]), ("paused", [2, 5, 6])):
        for until in pauses:
            teaching = Eagle3Recipe.build(settings, texts, teacher)
            Trainer(teaching, settings, tmp_path / name).run(until=until)
    whole, paused = (Eagle3Head.load(tmp_path / name / DRAFTER) for name in ("whole", "paused"))
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, paused.state_dict()[name]), name


def test_a_tiny_run_drafts_what_it_has_read(
    teacher: Teacher, texts: list[Text], tmp_path: Path
) -> None:
    fields = {"steps": 140, "rate": 0.01, "layout": "speculators", "check_every": 140}
    settings = SETTINGS.model_copy(update=fields)
    kind = recipe("eagle3")
    evaluation = AcceptanceEvaluation(teacher, PROMPTS, max_tokens=40)
    trainer = Trainer(
        kind.build(settings, texts, teacher),
        settings,
        tmp_path,
        check=lambda directory: evaluation(kind.decoding(directory)),
    )
    assert trainer.run()["acceptance_length"] > 2.5
    assert Eagle3Head.load(tmp_path / DRAFTER).traits.layer_ids == LAYER_IDS


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "opt", "phi"])
def test_targets_of_other_families_are_learned_from(architecture: str) -> None:
    other = Teacher(load(architecture), Tokenizer.load(reasoner_dir()), tiny(architecture))
    texts = [Text(prompts((11,), seed=3)[0], 4), Text(prompts((8,), seed=4)[0], 3)]
    teaching = made(other, texts)
    loss = teaching.loss(teaching.batch(0))
    loss.backward()
    assert loss.isfinite()
    assert all(weight.grad is not None for weight in teaching.module.parameters())
    assert teaching.module.config.num_key_value_heads in (2, 4)


def test_layers_are_captured_in_rising_order_however_they_are_given() -> None:
    assert Eagle3Settings(layer_ids=(3, -1, 1)).layer_ids == (1, 3, -1)
    assert Eagle3Settings.model_validate({"places": (3, 1)}).layer_ids == (1, 3)  # the old name
    with pytest.raises(ParameterError, match="one or more different layers"):
        Eagle3Settings(layer_ids=(1, 1))
