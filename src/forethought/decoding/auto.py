"""n-grams that are sized after the engine. Knows nothing about engines but their batch size."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.ngram import NGramDecodingConfig


class AutoDecodingConfig(DecodingBaseConfig):
    """An ``NGramDecodingConfig`` whose sizes follow the engine's. Other fields are handed on to it.

    n-grams of 3 and drafts of 5 up to 4 sequences at once, else n-grams of 5 and drafts of 3; none
    with more than 32 running: TensorRT-LLM's heuristic.
    """

    decoding_type: ClassVar[str] = "AUTO"

    name: str = Field(default="ngram", min_length=1)

    def resolve(self, max_batch_size: int) -> NGramDecodingConfig:
        """What it stands for.

        Args:
            max_batch_size: sequences that the engine runs at once.

        Raises:
            ParameterError: a field of this one cannot go with the sizes.
        """
        few = max_batch_size <= 4
        chosen: dict[str, Any] = {
            "max_draft_len": 5 if few else 3,
            "max_matching_ngram_size": 3 if few else 5,
        }
        if self.draft_len_schedule is None and self.length_control == "fixed":
            chosen["max_concurrency"] = 32
        fields = type(self).model_fields.items()
        given = {
            name: value
            for name, field in fields
            if (value := getattr(self, name)) != field.get_default()
        }
        return NGramDecodingConfig(**{**chosen, **given})

    def _settle_lengths(self) -> None:
        """``resolve`` will."""

    def _settle_schedule(self) -> None:
        """``resolve`` will."""
