"""Lessons: texts in batches, with what the target thought while it read them.

The order of the texts is shuffled anew in each epoch; those of similar length share a batch. Lesson
``step`` is a function of seed and step alone. Knows nothing about what is learned.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forethought.training.teacher import Teacher
from forethought.training.text import Text


@dataclass(frozen=True, slots=True)
class Lesson:
    """R texts of at most W tokens, filled up with token 0."""

    tokens: Tensor
    """int64 [R, W]."""
    taught: Tensor
    """bool [R, W]: whether the token is one that the target chose; prompts and filling are not."""
    lengths: Tensor
    """int64 [R]: tokens of each text."""
    states: Mapping[int, Tensor]
    """By place (see ``model.taps``): [R, W, hidden] in the target's dtype, 0 in the filling."""
    choices: Tensor
    """int64 [R, W, K]: the likeliest tokens behind each place."""
    probs: Tensor
    """float32 [R, W, K]: their probabilities at temperature 1; 0 in the filling."""


class Lessons:
    """Lessons from texts.

    Args:
        texts: at least one.
        teacher: reads them.
        places: the states that are wanted.
        tokens: of a lesson, filling included; at least one text is in each.
        seed: of the shuffling.
        width: K.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        teacher: Teacher,
        places: Sequence[int],
        *,
        tokens: int,
        seed: int,
        width: int = 8,
    ) -> None:
        self._texts, self._teacher, self._places = texts, teacher, places
        self._tokens, self._seed, self._width = tokens, seed, width
        self._epoch = -1
        self._order: list[list[int]] = []
        self._begin = 0

    def __call__(self, step: int) -> Lesson:
        """The lesson of a step, counted from 0."""
        if step < self._begin:
            self._epoch, self._order, self._begin = -1, [], 0
        while step >= self._begin + len(self._order):
            self._begin += len(self._order)
            self._epoch += 1
            self._order = self._shuffled(self._epoch)
        return self._teach([self._texts[index] for index in self._order[step - self._begin]])

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """The texts in batches, each of neighbours in length."""
        rng = random.Random(f"{self._seed}:{epoch}")
        mixed = rng.sample(range(len(self._texts)), len(self._texts))
        mixed.sort(key=lambda index: len(self._texts[index]))  # stable: equals stay mixed
        batches: list[list[int]] = [[]]
        for index in mixed:  # rising, so that the newest one is the widest
            if batches[-1] and (len(batches[-1]) + 1) * len(self._texts[index]) > self._tokens:
                batches.append([])
            batches[-1].append(index)
        rng.shuffle(batches)
        return batches

    def _teach(self, texts: Sequence[Text]) -> Lesson:
        seen = self._teacher.observe([t.token_ids for t in texts], self._places, self._width)
        lengths = [len(text) for text in texts]
        tokens = [torch.tensor(text.token_ids, device=seen.probs.device) for text in texts]
        taught = [
            torch.arange(len(text), device=seen.probs.device) >= text.prompt_length
            for text in texts
        ]
        return Lesson(
            tokens=_padded(tokens),
            taught=_padded(taught),
            lengths=torch.tensor(lengths, device=seen.probs.device),
            states={place: _padded(all_.split(lengths)) for place, all_ in seen.states.items()},
            choices=_padded(seen.choices.split(lengths)),
            probs=_padded(seen.probs.split(lengths)),
        )


def _padded(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
