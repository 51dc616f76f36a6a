"""A whole training: texts from a file or from the target itself, the loop, trials on held-out ones.

Where the recipe adapts the target, the adapted one is tried, and compared with the original. Knows
recipes by name only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forethought.assets import reasoner_dir
from forethought.decoding import DecodingBaseConfig
from forethought.errors import ParameterError
from forethought.training.corpus import DistillationSettings, self_distil
from forethought.training.recipes.table import recipe
from forethought.training.shift import LawShift
from forethought.training.teacher import Teacher
from forethought.training.text import Text, load_prompts, load_texts
from forethought.training.trainer import DRAFTER, MODEL, Trainer, seeded
from forethought.training.trial import AcceptanceTrial

logger = logging.getLogger(__name__)

_DISTILLATION = ("temperatures", "max_tokens")


@dataclass(frozen=True, slots=True)
class Source:
    """Where texts come from: one of the two."""

    data: Path | None = None
    """Texts; see ``training.text``."""
    prompts: Path | None = None
    """What the target is to answer."""


class TrainingRun:
    """Trains a drafter for a target.

    Args:
        kind: name of the recipe.
        fields: of its settings, and ``temperatures`` and ``max_tokens`` of the target's answers.
        out: for texts, checkpoint and drafter.
        target: local Hugging Face directory; None: the embedded reasoner.
        dtype, device: of the target.

    Raises:
        UnknownNameError: there is no such recipe.
        ParameterError: an unknown field, or a bad value.
        ModelError: the target cannot be loaded.
    """

    def __init__(
        self,
        kind: str,
        fields: Mapping[str, Any],
        out: Path,
        *,
        target: Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
    ) -> None:
        self._recipe = recipe(kind)
        mine = {name: value for name, value in fields.items() if name not in _DISTILLATION}
        self.settings = self._recipe.Settings(**mine)
        answers = {name: fields[name] for name in _DISTILLATION if name in fields}
        self._answers = DistillationSettings(seed=self.settings.seed, **answers)
        self._out = out
        self.teacher = Teacher.load(
            target or reasoner_dir(), dtype, device, fuse=not self.settings.adapts
        )

    @property
    def drafter(self) -> Path:
        """Where the drafter is written."""
        return self._out / DRAFTER

    @property
    def model(self) -> Path | None:
        """Where the adapted target is written, which the drafter is for; None: none is."""
        return self._out / MODEL if self.settings.adapts else None

    @property
    def decoding(self) -> DecodingBaseConfig:
        """How to decode with the drafter."""
        return self._recipe.decoding(self.drafter)

    def __call__(self, source: Source, held_out: int = 32) -> dict[str, float]:
        """Train to the end, from wherever an earlier run has got to.

        Args:
            source: of the texts.
            held_out: how many of them are not learned from, and tried.

        Returns:
            What the last trial measured: see ``AcceptanceTrial``, and ``LawShift`` where the target
            is adapted.

        Raises:
            UsageError: there are too few texts, or they cannot be read.
        """
        self._out.mkdir(parents=True, exist_ok=True)
        texts = self._texts(source)
        if held_out < 1 or len(texts) < 2 * held_out:
            raise ParameterError(
                f"{held_out} held-out texts",
                f"there are {len(texts)} texts in all",
                "Hold out at least 1 and at most half of them",
            )
        tried, learned = texts[:held_out], texts[held_out:]
        logger.info("%d texts, %d tokens", len(learned), sum(map(len, learned)))
        with seeded(self.settings.seed):
            chosen = self._recipe.build(self.settings, learned, self.teacher)
        trainer = Trainer(
            chosen, self.settings, self._out, lambda directory: self._tried(directory, tried)
        )
        return trainer.run()

    def _tried(self, drafter: Path, texts: Sequence[Text]) -> dict[str, float]:
        """What is measured of a drafter, and of the model that it drafts for."""
        target, found = self.teacher, dict[str, float]()
        if self.model is not None:
            target = Teacher.load(self.model, "auto", str(self.teacher.lm.device), fuse=False)
            found = LawShift(self.teacher, texts)(target)
        prompts = [text.prompt for text in texts]
        trial = AcceptanceTrial(target, prompts, self._answers.max_tokens)
        return trial(self._recipe.decoding(drafter)) | found

    def _texts(self, source: Source) -> list[Text]:
        longest = self.teacher.lm.max_positions
        if source.data is not None:
            return load_texts(source.data, self.teacher.tokenizer, longest)
        assert source.prompts is not None
        prompts = load_prompts(source.prompts, self.teacher.tokenizer)
        return self_distil(self.teacher, prompts, self._out / "texts.jsonl", self._answers)
