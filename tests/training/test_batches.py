"""Batches: every text once per epoch, similar lengths together, a function of seed and step."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from forethought.model.hidden_states import FINAL
from forethought.training import batches
from forethought.training.batches import Batches, TrainingBatches
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from models import prompts

LENGTHS = random.Random(3).choices(range(5, 200), k=60)
TEXTS = [Text([index] * length, 1) for index, length in enumerate(LENGTHS)]


def steps_of_an_epoch(shuffled: Batches) -> list[list[Text]]:
    found: list[list[Text]] = []
    while sum(map(len, found)) < len(TEXTS):
        found.append(shuffled(len(found)))
    return found


def test_an_epoch_has_every_text_once_whatever_the_lengths() -> None:
    shuffled = Batches(TEXTS, tokens=512, seed=0)
    epoch = steps_of_an_epoch(shuffled)
    shown = [text.token_ids[0] for texts in epoch for text in texts]
    assert sorted(shown) == list(range(60))
    assert [text.token_ids[0] for text in shuffled(len(epoch))] != shown[: len(epoch[0])]


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


class Reading(Teacher):
    """Keeps the first token of every text that it reads."""

    def __init__(self, teacher: Teacher) -> None:
        super().__init__(teacher.lm, teacher.tokenizer, teacher.directory)
        self.read: list[int] = []
        self.forwards: list[list[int]] = []

    def observe(self, texts, *args):
        self.forwards.append([ids[0] for ids in texts])
        self.read += self.forwards[-1]
        return super().observe(texts, *args)


FEW = [Text([number, *ids], 1) for number, ids in enumerate(prompts((6, 11, 9, 14, 7, 12)))]


def test_each_text_is_read_once_in_a_run_and_batches_are_as_if_read_each_time(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, again = Reading(teacher), Reading(teacher)
    kept = TrainingBatches(FEW, reading, (FINAL,), tokens=40, seed=0)
    monkeypatch.setattr(batches, "_KEPT_BYTES", 0)
    every_time = TrainingBatches(FEW, again, (FINAL,), tokens=40, seed=0)
    for step in (7, 0, 1, 2, 3, 4, 5, 6, 8):
        mine, other = kept(step), every_time(step)
        assert torch.equal(mine.tokens, other.tokens)
        assert torch.equal(mine.choices, other.choices)
        torch.testing.assert_close(mine.states[FINAL], other.states[FINAL])
        torch.testing.assert_close(mine.probs, other.probs)
    assert sorted(reading.read) == list(range(6))
    assert len(again.read) > 12


def test_kept_texts_are_read_in_the_same_groups_wherever_a_run_begins(teacher: Teacher) -> None:
    """A forward's composition may change its rounding; a resumed run ends with equal weights."""
    whole, resumed = Reading(teacher), Reading(teacher)
    for reading, steps in ((whole, range(12)), (resumed, range(7, 12))):
        some = TrainingBatches(FEW, reading, (FINAL,), tokens=40, seed=0)
        for step in steps:
            some(step)
    assert max(map(len, whole.forwards)) > 1
    assert sorted(resumed.forwards) == sorted(whole.forwards)


def test_texts_are_kept_up_to_a_number_of_bytes(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_KEPT_BYTES", 40 * (12 * 8 + 4 * teacher.hidden_size))
    reading = Reading(teacher)
    some = TrainingBatches(FEW, reading, (FINAL,), tokens=40, seed=0)
    for step in range(12):
        some(step)
    counts = Counter(reading.read)
    assert min(counts.values()) == 1
    assert max(counts.values()) > 1
