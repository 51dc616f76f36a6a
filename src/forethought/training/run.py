"""How far a drafter gets: the engine decodes held-out prompts with it, and counts.

Knows nothing about training.

[shift] How far an adapted model has moved from the original, on texts that it was not trained on.

Knows nothing about training or drafters.

[run] A whole training: texts from a file or from the target itself, the loop, trials on held-out
ones.

Where the recipe adapts the target, the adapted one is tried, and compared with the original. Knows
recipes by name only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.assets import reasoner_dir
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.errors import ParameterError, UsageError
from forethought.model.device import find_device
from forethought.model_dir import find_model_dir
from forethought.training.recipes.table import recipe
from forethought.training.teacher import Teacher
from forethought.training.texts import (
    DistillationSettings,
    Text,
    load_prompts,
    load_texts,
    read_records,
    self_distil,
)
from forethought.training.trainer import DRAFTER, MODEL, Progress, Trainer, load_checkpoint, seeded


class AcceptanceEvaluation:
    """Greedy answers to some prompts.

    Args:
        teacher: answers them.
        prompts: token ids; none of them trained on.
        max_tokens: of each answer.
    """

    def __init__(self, teacher: Teacher, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self._teacher, self._prompts = teacher, prompts
        self._params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def __call__(self, drafter: DecodingBaseConfig) -> dict[str, float]:
        """``acceptance_length``: tokens per step; ``accepted_1`` and so on: share of the steps
        that accepted so many drafted tokens at least.

        Raises:
            UsageError: the drafter cannot be loaded.
        """
        params = [self._params] * len(self._prompts)
        metrics = self._teacher.generate(self._prompts, params, drafter).metrics
        found = {"acceptance_length": metrics.mean_acceptance_length or 1.0}
        for place, count in enumerate(metrics.accepted_by_position, start=1):
            found[f"accepted_{place}"] = count / metrics.steps
        return found


class Divergence:
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
        pairs = zip(
            self._original.distributions(self._ids), adapted.distributions(self._ids), strict=True
        )
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


logger = logging.getLogger(__name__)

_DISTILLATION = ("temperatures", "max_tokens")


@dataclass(frozen=True, slots=True)
class Source:
    """Where texts come from: one of the two."""

    data: Path | None = None
    """Texts; see ``training.text``."""
    prompts: Path | None = None
    """What the target is to answer."""

    def count(self) -> int:
        """Texts, or prompts, that there will be at most.

        Raises:
            UsageError: the file cannot be read.
        """
        path, kind = (self.prompts, "prompts") if self.data is None else (self.data, "texts")
        assert path is not None, "one of the two is given"
        return len(read_records(path, kind))


@dataclass(frozen=True, slots=True)
class TargetModel:
    """What a drafter is trained for, and how it is loaded."""

    model: str | Path | None = None
    """Local Hugging Face directory, or Hub id; None: the embedded reasoner."""
    revision: str | None = None
    """Of a Hub id."""
    dtype: str = "auto"
    device: str = "auto"

    def load(self, fuse: bool) -> Teacher:
        """Find it, and load it."""
        directory = find_model_dir(self.model or reasoner_dir(), self.revision)
        return Teacher.load(directory, self.dtype, self.device, fuse)


class TrainingRun:
    """Trains a drafter for a target.

    Args:
        kind: name of the recipe.
        fields: of its settings, and ``temperatures`` and ``max_tokens`` of the target's answers.
        out: for texts, checkpoint and drafter.
        target: loaded when it is first needed; None: the embedded reasoner.

    Raises:
        UnknownNameError: there is no such recipe.
        ParameterError: an unknown field, or a bad value.
    """

    def __init__(
        self,
        kind: str,
        fields: Mapping[str, Any],
        out: Path,
        target: TargetModel | None = None,
    ) -> None:
        self._recipe = recipe(kind)
        mine = {name: value for name, value in fields.items() if name not in _DISTILLATION}
        self.settings = self._recipe.Settings(**mine)
        answers = {name: fields[name] for name in _DISTILLATION if name in fields}
        self._answers = DistillationSettings(seed=self.settings.seed, **answers)
        self._out, self._target = out, target or TargetModel()
        find_device(self._target.device)  # which says that there is no such device

    @cached_property
    def teacher(self) -> Teacher:
        """The target.

        Raises:
            ModelError: it cannot be loaded.
        """
        return self._target.load(fuse=not self.settings.adapts)

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

    def check(self, source: Source, held_out: int) -> None:
        """Refuse what can be told before the target is loaded.

        Raises:
            UsageError: there are too few texts, they cannot be read, the directory cannot be
                written, or holds a run that this one cannot go on from.
        """
        _check_held_out(held_out, source.count())
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            writable = os.access(self._out, os.W_OK)
        except OSError as error:
            raise _unwritable(self._out, str(error)) from error
        if not writable:
            raise _unwritable(self._out, "it may not be written")
        load_checkpoint(self._out, self.settings)

    def __call__(
        self,
        source: Source,
        held_out: int = 32,
        on_step: Callable[[Progress], None] | None = None,
    ) -> dict[str, float]:
        """Train to the end, from wherever an earlier run has got to.

        Args:
            source: of the texts.
            held_out: how many of them are not learned from, and tried.
            on_step: called after each step.

        Returns:
            What the last trial measured: see ``AcceptanceTrial``, and ``LawShift`` where the target
            is adapted.

        Raises:
            UsageError: as :meth:`check`, or the target cannot be loaded.
            KeyboardInterrupt: it was interrupted; what is done so far is saved.
            OSError: something cannot be written.
        """
        self.check(source, held_out)
        texts = self._texts(source)
        _check_held_out(held_out, len(texts))
        tried, learned = texts[:held_out], texts[held_out:]
        logger.info("%d texts, %d tokens", len(learned), sum(map(len, learned)))
        with seeded(self.settings.seed):
            chosen = self._recipe.build(self.settings, learned, self.teacher)
        trainer = Trainer(
            chosen,
            self.settings,
            self._out,
            lambda directory: self._tried(directory, tried),
            on_step,
        )
        return trainer.run()

    def _tried(self, drafter: Path, texts: Sequence[Text]) -> dict[str, float]:
        """What is measured of a drafter, and of the model that it drafts for."""
        target, found = self.teacher, dict[str, float]()
        if self.model is not None:
            target = Teacher.load(self.model, "auto", str(self.teacher.lm.device), fuse=False)
            found = Divergence(self.teacher, texts)(target)
        prompts = [text.prompt for text in texts]
        trial = AcceptanceEvaluation(target, prompts, self._answers.max_tokens)
        return trial(self._recipe.decoding(drafter)) | found

    def _texts(self, source: Source) -> list[Text]:
        longest = self.teacher.lm.max_positions
        if source.data is not None:
            return load_texts(source.data, self.teacher.tokenizer, longest)
        assert source.prompts is not None
        prompts = load_prompts(source.prompts, self.teacher.tokenizer)
        return self_distil(self.teacher, prompts, self._out / "texts.jsonl", self._answers)


def _check_held_out(held_out: int, count: int) -> None:
    if held_out < 1 or count < 2 * held_out:
        raise ParameterError(
            f"{held_out} held-out texts",
            f"there are {count} texts in all",
            "Hold out at least 1 and at most half of them",
        )


def _unwritable(folder: Path, why: str) -> UsageError:
    return UsageError(f"cannot write to {folder}", why, "Give another folder")
