"""The draft vocabulary: the most frequent of the target's tokens, which alone are drafted.

Most tokens of a large vocabulary are rare. A drafter that projects its states to the frequent ones
only is trained and drafts several times faster, and never drafts the others, which the target
writes itself (Li et al., 2025, arXiv 2503.01840; Zhao et al., 2025, arXiv 2502.14856).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Self

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DrafterSettings

MAX_TOKENS = 8192
"""Size of a draft vocabulary that is not given, and of a vocabulary that is drafted from whole."""


class DraftVocabularySettings(DrafterSettings):
    """The settings of a drafter, and the size of its vocabulary."""

    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Maximum size of the draft vocabulary, the most frequent tokens of the answers; None: 8,192,
    or the whole vocabulary where the target has no more."""

    @pydantic.model_validator(mode="after")
    def _has_one_vocabulary(self) -> Self:
        if self.start is not None and self.draft_vocab_size is not None:
            raise ValueError("the drafter of start has its draft vocabulary: leave the size out")
        return self


class DraftVocabulary:
    """The tokens that a drafter drafts, and the rows of its projection.

    Args:
        vocab_size: of the target.
        ids: int64 ``[D]``, the target's id of each row; None: the whole vocabulary.
        device: of what is mapped.
    """

    def __init__(
        self, vocab_size: int, ids: Tensor | None, device: torch.device | str = "cpu"
    ) -> None:
        self.ids = None if ids is None else ids.to(device)
        self._size = vocab_size if ids is None else len(ids)
        self._rows: Tensor | None = None  # int64 [vocab], or -1
        if self.ids is not None:
            self._rows = torch.full((vocab_size,), -1, device=device)
            self._rows[self.ids] = torch.arange(len(self.ids), device=device)

    @classmethod
    def of(
        cls, settings: DraftVocabularySettings, texts: Sequence[Text], teacher: Teacher
    ) -> DraftVocabulary:
        """That of a new drafter that learns from ``texts``."""
        size, vocab_size = settings.draft_vocab_size, teacher.lm.vocab_size
        whole = vocab_size <= MAX_TOKENS if size is None else size >= vocab_size
        ids = None if whole else frequent_tokens(texts, size or MAX_TOKENS)
        return cls(vocab_size, ids, teacher.lm.device)

    def __len__(self) -> int:
        return self._size

    def restrict(self, choices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of tokens, int64 ``[..., K]``, and their probabilities, float32 ``[..., K]``: 0 for
        tokens that are not drafted.
        """
        if self._rows is None:
            return choices, probs
        rows = self._rows[choices]
        return rows.clamp_min(0), probs * (rows >= 0)


def frequent_tokens(texts: Sequence[Text], size: int) -> Tensor:
    """Ids of at most ``size`` tokens, the most frequent ones of the answers, int64, rising; of
    equally frequent ones the first.
    """
    counts = Counter(token for text in texts for token in text.token_ids[text.prompt_length :])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]), dtype=torch.int64)
