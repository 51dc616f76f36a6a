"""Training batches: padded texts with the target's hidden states and top-k probabilities.

Texts are shuffled in each epoch, and texts of similar length share a batch. The batch of a step is
a function of seed and step alone. What the target computes at a text is kept for later epochs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from forethought.training.teacher import Observed, Teacher
from forethought.training.texts import Text

_Text = TypeVar("_Text", bound=Sized)
_KEPT_BYTES = 2 * 2**30
"""Of states and probabilities that are kept: some 1.7 million tokens of one layer of width 576."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """R texts of at most W tokens, padded with token 0."""

    tokens: Tensor
    """int64 [R, W]."""
    taught: Tensor
    """bool [R, W]: tokens of answers; not those of prompts, nor padding."""
    lengths: Tensor
    """int64 [R]: tokens of each text."""
    states: Mapping[int, Tensor]
    """By layer index (see ``model.hidden_states``): [R, W, hidden], 0 in the padding."""
    choices: Tensor
    """int64 [R, W, K]: the most probable next tokens at each position."""
    probs: Tensor
    """float32 [R, W, K]: their probabilities at temperature 1; 0 in the padding."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the texts, without padding."""
        return int(self.lengths.sum())


class TrainingBatches:
    """Batches of texts, which the target reads when they are asked for.

    Args:
        layer_ids: indices of the hidden states to take.
        tokens: of a batch, padding included; a longer text has a batch to itself.
        seed: of the shuffling.
        width: K, number of probabilities per position.
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
        self._texts, self._layer_ids = texts, layer_ids
        self._batches = Batches(texts, tokens, seed)
        self._observed = _ObservedTexts(texts, teacher, layer_ids, width)
        self._observed.keep(self._batches.epoch(0))

    def __call__(self, step: int) -> TrainingBatch:
        """The batch of a step, counted from 0."""
        numbers = self._batches.numbers(step)
        texts, observed = [self._texts[number] for number in numbers], self._observed(numbers)
        device = observed[0].probs.device
        tokens, taught = pad_texts(texts, device)
        return TrainingBatch(
            tokens=tokens,
            taught=taught,
            lengths=torch.tensor([len(text) for text in texts], device=device),
            states={
                layer_id: _padded([text.states[layer_id] for text in observed])
                for layer_id in self._layer_ids
            },
            choices=_padded([text.choices for text in observed]),
            probs=_padded([text.probs for text in observed]),
        )


class _ObservedTexts:
    """What the target computes at the tokens of each text, for most texts once in a run.

    A forward's composition may change its rounding, and an interrupted run is to end with the
    weights of an uninterrupted one: texts that are kept are always read in the same groups.
    """

    def __init__(
        self, texts: Sequence[Text], teacher: Teacher, layer_ids: Sequence[int], width: int
    ) -> None:
        self._texts, self._teacher = texts, teacher
        self._layer_ids, self._width = layer_ids, width
        self._groups: dict[int, Sequence[int]] = {}  # of the numbers of texts that are kept
        self._kept: dict[int, Observed] = {}

    def keep(self, groups: Sequence[Sequence[int]]) -> None:
        """Keep the texts with these numbers, group by group, up to ``_KEPT_BYTES``."""
        lm = self._teacher.lm
        token_bytes = 12 * self._width + len(self._layer_ids) * lm.hidden_size * lm.dtype.itemsize
        num_tokens = 0
        for group in groups:
            num_tokens += sum(len(self._texts[number]) for number in group)
            if num_tokens * token_bytes > _KEPT_BYTES:
                return
            self._groups |= dict.fromkeys(group, group)

    def __call__(self, numbers: Sequence[int]) -> list[Observed]:
        """Of the texts with these numbers, one after the other."""
        for number in numbers:
            if number in self._groups and number not in self._kept:
                self._kept |= self._read(self._groups[number])
        others = self._read([number for number in numbers if number not in self._kept])
        return [self._kept.get(number) or others[number] for number in numbers]

    def _read(self, numbers: Sequence[int]) -> dict[int, Observed]:
        if not numbers:
            return {}
        ids = [self._texts[number].token_ids for number in numbers]
        observed = self._teacher.observe(ids, self._layer_ids, self._width)
        return dict(zip(numbers, observed.split(list(map(len, ids))), strict=True))


def pad_texts(texts: Sequence[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """``tokens`` and ``taught`` of a batch: int64 and bool ``[R, W]``, one text per row."""
    tokens = [torch.tensor(text.token_ids, device=device) for text in texts]
    taught = [torch.arange(len(text), device=device) >= text.prompt_length for text in texts]
    return _padded(tokens), _padded(taught)


def _padded(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


class Batches(Generic[_Text]):
    """Texts in batches of ``tokens``, padding included; a longer text has a batch to itself."""

    def __init__(self, texts: Sequence[_Text], tokens: int, seed: int) -> None:
        self._texts, self._tokens, self._seed = texts, tokens, seed
        self._epoch = -1
        self._order: list[list[int]] = []
        self._begin = 0

    def __call__(self, step: int) -> list[_Text]:
        """The texts of a step, counted from 0."""
        return [self._texts[number] for number in self.numbers(step)]

    def numbers(self, step: int) -> list[int]:
        """The numbers of these texts."""
        if step < self._begin:
            self._epoch, self._order, self._begin = -1, [], 0
        while step >= self._begin + len(self._order):
            self._begin += len(self._order)
            self._epoch += 1
            self._order = self.epoch(self._epoch)
        return self._order[step - self._begin]

    def epoch(self, epoch: int) -> list[list[int]]:
        """Batches of an epoch, as indices of texts of similar length."""
        rng = random.Random(f"{self._seed}:{epoch}")
        mixed = rng.sample(range(len(self._texts)), len(self._texts))
        mixed.sort(
            key=lambda index: len(self._texts[index])
        )  # stable: texts of equal length stay shuffled
        batches: list[list[int]] = [[]]
        for index in mixed:  # in rising length, so that the last one decides the width
            if batches[-1] and (len(batches[-1]) + 1) * len(self._texts[index]) > self._tokens:
                batches.append([])
            batches[-1].append(index)
        rng.shuffle(batches)
        return batches
