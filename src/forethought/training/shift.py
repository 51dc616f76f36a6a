"""How far an adapted model has moved from the original, on texts that it was not trained on.

Knows nothing about training or drafters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.training.teacher import Teacher
from forethought.training.text import Text


class LawShift:
    """The laws of two models of one vocabulary, compared at every place of some answers.

    Args:
        original: what the other one was made from.
        texts: prompts with answers.
    """

    def __init__(self, original: Teacher, texts: Sequence[Text]) -> None:
        self._original, self._ids = original, [text.token_ids for text in texts]
        self._wanted = torch.cat([_before_answer(text) for text in texts])

    def __call__(self, adapted: Teacher) -> dict[str, float]:
        """``kl``: mean divergence KL(original || adapted) of the laws of the next token, in nats,
        at temperature 1; ``same_choice``: share of the places where both find the same token the
        likeliest.
        """
        divergence, same, begin = 0.0, 0, 0
        pairs = zip(self._original.laws(self._ids), adapted.laws(self._ids), strict=True)
        for mine, other in pairs:
            wanted = self._wanted[begin : begin + len(mine)].to(mine.device)
            begin += len(mine)
            mine, other = mine[wanted], other[wanted]  # [N, vocab]
            divergence += float(F.kl_div(other, mine, reduction="sum", log_target=True))
            same += int((mine.argmax(-1) == other.argmax(-1)).sum())
        count = int(self._wanted.sum())
        # Rounding takes a divergence of nothing below 0.
        return {"kl": max(0.0, divergence / count), "same_choice": same / count}


def _before_answer(text: Text) -> Tensor:
    """bool ``[T]``: the places behind which a token of the answer stands."""
    places = torch.arange(len(text))
    return (places >= text.prompt_length - 1) & (places < len(text) - 1)
