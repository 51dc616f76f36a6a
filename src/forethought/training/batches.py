"""Lessons: texts in batches, with what the target thought while it read them.

Lesson ``step`` is a function of seed and step alone. Knows nothing about what is learned.

[batches] Which texts are read in which step.

Their order is shuffled anew in each epoch; those of similar length share a batch. Batch ``step`` is
a function of seed and step alone. Knows nothing about what is learned from them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forethought.training.teacher import Teacher
from forethought.training.texts import Text


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """R texts of at most W tokens, filled up with token 0."""

    tokens: Tensor
    """int64 [R, W]."""
    taught: Tensor
    """bool [R, W]: whether the token is one that the target chose; prompts and filling are not."""
    lengths: Tensor
    """int64 [R]: tokens of each text."""
    states: Mapping[int, Tensor]
    """By layer index (see ``model.causal_lm``): [R, W, hidden] in its dtype, padded with 0."""
    choices: Tensor
    """int64 [R, W, K]: the likeliest tokens behind each place."""
    probs: Tensor
    """float32 [R, W, K]: their probabilities at temperature 1; 0 in the filling."""

    @property
    def num_tokens(self) -> int:
        """Of the texts, without the filling."""
        return int(self.lengths.sum())


class TrainingBatches:
    """Lessons from texts.

    Args:
        texts: at least one.
        teacher: reads them.
        layer_ids: the states that are wanted.
        tokens: of a lesson, filling included; at least one text is in each.
        seed: of the shuffling.
        width: K.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        teacher: Teacher,
        layer_ids: Sequence[int],
        *,
        tokens: int,
        seed: int,
        width: int = 8,
    ) -> None:
        self._teacher, self._layer_ids, self._width = teacher, layer_ids, width
        self._batches = Batches(texts, tokens, seed)

    def __call__(self, step: int) -> TrainingBatch:
        """The lesson of a step, counted from 0."""
        texts = self._batches(step)
        seen = self._teacher.observe([t.token_ids for t in texts], self._layer_ids, self._width)
        tokens, taught = laid_out(texts, seen.probs.device)
        lengths = [len(text) for text in texts]
        return TrainingBatch(
            tokens=tokens,
            taught=taught,
            lengths=torch.tensor(lengths, device=seen.probs.device),
            states={
                layer_id: _padded(all_.split(lengths)) for layer_id, all_ in seen.states.items()
            },
            choices=_padded(seen.choices.split(lengths)),
            probs=_padded(seen.probs.split(lengths)),
        )


def laid_out(texts: Sequence[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """``tokens`` and ``taught`` of a lesson: int64 and bool ``[R, W]``, a text in each row."""
    tokens = [torch.tensor(text.token_ids, device=device) for text in texts]
    taught = [torch.arange(len(text), device=device) >= text.prompt_length for text in texts]
    return _padded(tokens), _padded(taught)


def _padded(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


class Batches:
    """Texts in batches.

    Args:
        texts: at least one.
        tokens: of a batch, filling included; at least one text is in each.
        seed: of the shuffling.
    """

    def __init__(self, texts: Sequence[Text], tokens: int, seed: int) -> None:
        self._texts, self._tokens, self._seed = texts, tokens, seed
        self._epoch = -1
        self._order: list[list[int]] = []
        self._begin = 0

    def __call__(self, step: int) -> list[Text]:
        """The texts of a step, counted from 0."""
        if step < self._begin:
            self._epoch, self._order, self._begin = -1, [], 0
        while step >= self._begin + len(self._order):
            self._begin += len(self._order)
            self._epoch += 1
            self._order = self._shuffled(self._epoch)
        return [self._texts[index] for index in self._order[step - self._begin]]

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
