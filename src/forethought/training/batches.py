"""Training batches: padded texts with the target's hidden states and top-k probabilities.

Texts are shuffled in each epoch, and texts of similar length share a batch. The batch of a step is
a function of seed and step alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from forethought.training.teacher import Teacher
from forethought.training.texts import Text

_Text = TypeVar("_Text", bound=Sized)


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
    """Batches of texts, each read by the target when it is asked for.

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
        self._teacher, self._layer_ids, self._width = teacher, layer_ids, width
        self._batches = Batches(texts, tokens, seed)

    def __call__(self, step: int) -> TrainingBatch:
        """The batch of a step, counted from 0."""
        texts = self._batches(step)
        observed = self._teacher.observe([t.token_ids for t in texts], self._layer_ids, self._width)
        tokens, taught = pad_texts(texts, observed.probs.device)
        lengths = [len(text) for text in texts]
        return TrainingBatch(
            tokens=tokens,
            taught=taught,
            lengths=torch.tensor(lengths, device=observed.probs.device),
            states={
                layer_id: _padded(all_.split(lengths)) for layer_id, all_ in observed.states.items()
            },
            choices=_padded(observed.choices.split(lengths)),
            probs=_padded(observed.probs.split(lengths)),
        )


def pad_texts(texts: Sequence[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """``tokens`` and ``taught`` of a batch: int64 and bool ``[R, W]``, one text per row."""
    tokens = [torch.tensor(text.token_ids, device=device) for text in texts]
    taught = [torch.arange(len(text), device=device) >= text.prompt_length for text in texts]
    return _padded(tokens), _padded(taught)


def _padded(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def cross_entropy_terms(logits: Tensor, choices: Tensor, probs: Tensor) -> Tensor:
    """Terms ``-p log q`` of the cross entropy, in nats: float32 ``[..., K]``.

    ``logits`` ``[..., vocab]`` are those of q; ``choices`` (int64) and ``probs`` (float32), both
    ``[..., K]``, are the most probable tokens of p, whose rest is left out.
    """
    logits = logits.float()
    return probs * (logits.logsumexp(-1, keepdim=True) - logits.gather(-1, choices))


class Batches(Generic[_Text]):
    """Texts in batches of ``tokens``, padding included; a longer text has a batch to itself."""

    def __init__(self, texts: Sequence[_Text], tokens: int, seed: int) -> None:
        self._texts, self._tokens, self._seed = texts, tokens, seed
        self._epoch = -1
        self._order: list[list[int]] = []
        self._begin = 0

    def __call__(self, step: int) -> list[_Text]:
        """The texts of a step, counted from 0."""
        if step < self._begin:
            self._epoch, self._order, self._begin = -1, [], 0
        while step >= self._begin + len(self._order):
            self._begin += len(self._order)
            self._epoch += 1
            self._order = self._shuffled(self._epoch)
        return [self._texts[index] for index in self._order[step - self._begin]]

    def _shuffled(self, epoch: int) -> list[list[int]]:
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
