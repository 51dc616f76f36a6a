"""Which texts are read in which step.

Their order is shuffled anew in each epoch; those of similar length share a batch. Batch ``step`` is
a function of seed and step alone. Knows nothing about what is learned from them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from forethought.training.text import Text


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
