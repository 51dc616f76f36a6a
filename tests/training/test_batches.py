"""Batches: every text once per epoch, similar lengths together, a function of seed and step."""

from __future__ import annotations

import random

import pytest
import torch

from engines import load
from forethought.assets import reasoner_dir
from forethought.llm.tokenizer import Tokenizer
from forethought.training.batches import Batches, TrainingBatches
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from models import prompts, tiny

LENGTHS = random.Random(3).choices(range(5, 200), k=60)
TEXTS = [Text([index] * length, 1) for index, length in enumerate(LENGTHS)]


def steps_of_an_epoch(batches: Batches) -> list[list[Text]]:
    found: list[list[Text]] = []
    while sum(map(len, found)) < len(TEXTS):
        found.append(batches(len(found)))
    return found


def test_an_epoch_has_every_text_once_whatever_the_lengths() -> None:
    batches = Batches(TEXTS, tokens=512, seed=0)
    epoch = steps_of_an_epoch(batches)
    shown = [text.token_ids[0] for texts in epoch for text in texts]
    assert sorted(shown) == list(range(60))
    assert [text.token_ids[0] for text in batches(len(epoch))] != shown[: len(epoch[0])]


def test_a_batch_has_at_most_its_tokens_padding_included_and_little_padding() -> None:
    epoch = steps_of_an_epoch(Batches(TEXTS, tokens=512, seed=0))
    padded = [len(texts) * max(map(len, texts)) for texts in epoch]
    assert max(padded) <= 512
    assert sum(padded) < 1.15 * sum(LENGTHS)
    [alone] = Batches([Text([1] * 90, 1)], tokens=64, seed=0)(0)
    assert len(alone) == 90


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    straight = Batches(TEXTS, 256, seed=0)
    shown = [straight(step) for step in range(50)]
    assert Batches(TEXTS, 256, seed=0)(33) == shown[33]
    assert straight(4) == shown[4]  # of an earlier epoch
    other = Batches(TEXTS, 256, seed=1)
    assert [other(step) for step in range(50)] != shown


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(load("llama"), Tokenizer.load(reasoner_dir()), tiny("llama"))


def test_prompts_and_padding_are_not_taught_and_padding_has_no_distribution(
    teacher: Teacher,
) -> None:
    short, long = prompts((6, 11))
    batch = TrainingBatches([Text(short, 2), Text(long, 5)], teacher, (), tokens=64, seed=0)(0)
    assert batch.lengths.tolist() == [6, 11]
    assert batch.taught.int().sum(1).tolist() == [4, 6]
    assert not batch.taught[0, :2].any()
    assert not batch.taught[0, 6:].any()
    assert batch.probs[0, 6:].sum() == 0
    assert (batch.probs[0, :6].sum(-1) > 0).all()


def test_the_distributions_are_the_targets_top_k_at_temperature_1(teacher: Teacher) -> None:
    [tokens] = prompts((12,))
    batch = TrainingBatches([Text(tokens, 2)], teacher, (), tokens=64, seed=0, width=5)(0)
    [log_probs] = teacher.distributions([tokens])
    expected = log_probs.exp().topk(5)
    assert torch.equal(batch.choices[0], expected.indices)
    torch.testing.assert_close(batch.probs[0], expected.values)
