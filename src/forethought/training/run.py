"""A training run: texts from a file or from the target itself, the training loop, evaluations.

::

    Source -> texts -> held out | learned -> recipe.build -> Trainer
                           |                                    | every check_every steps
                           +--> AcceptanceEvaluation, Divergence <-- drafter (and adapted target)

Where the recipe adapts the target, the adapted model is evaluated and compared with the original.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.assets import reasoner_dir
from forethought.config.speculation import DecodingBaseConfig
from forethought.errors import ParameterError, UsageError
from forethought.model.device import find_device
from forethought.model_dir import find_model_dir
from forethought.saved_file import check_folder
from forethought.training.acceptance import AcceptanceEvaluation
from forethought.training.prompts import OnTexts, write_prompts
from forethought.training.recipes.table import recipe
from forethought.training.teacher import Teacher
from forethought.training.texts import (
    DistillationSettings,
    Text,
    load_prompts,
    load_texts,
    probe_prompts,
    read_records,
    self_distil,
)
from forethought.training.trainer import (
    DRAFTER,
    MODEL,
    Progress,
    Trainer,
    TrainingRecipe,
    load_checkpoint,
    seeded,
)

logger = logging.getLogger(__name__)

_DISTILLATION = ("temperatures", "max_tokens", "probe_share")
"""Fields of ``DistillationSettings`` that are given with those of the recipe."""


class Divergence:
    """Compares the next-token distributions of an adapted model with those of its original, at
    every position of some answers.
    """

    def __init__(self, original: Teacher, texts: Sequence[Text]) -> None:
        self._original, self._ids = original, [text.token_ids for text in texts]
        self._in_answer = torch.cat([_before_answer(text) for text in texts])

    def __call__(self, adapted: Teacher) -> dict[str, float]:
        """``kl``: mean KL(original || adapted) in nats, at temperature 1; ``same_choice``: share of
        the positions where the two agree on the most probable token.
        """
        divergence, same, begin = 0.0, 0, 0
        both = zip(
            self._original.distributions(self._ids), adapted.distributions(self._ids), strict=True
        )
        for original, other in both:
            in_answer = self._in_answer[begin : begin + len(original)].to(original.device)
            begin += len(original)
            original, other = original[in_answer], other[in_answer]  # [N, vocab]
            divergence += float(F.kl_div(other, original, reduction="sum", log_target=True))
            same += int((original.argmax(-1) == other.argmax(-1)).sum())
        count = int(self._in_answer.sum())
        # Rounding may make the sum of a divergence of 0 negative.
        return {"kl": max(0.0, divergence / count), "same_choice": same / count}


def _before_answer(text: Text) -> Tensor:
    """bool ``[T]``: positions whose next token belongs to the answer."""
    positions = torch.arange(len(text))
    return (positions >= text.prompt_length - 1) & (positions < len(text) - 1)


@dataclass(frozen=True, slots=True)
class Source:
    """Where texts come from; one of the three is given."""

    data: Path | None = None
    """File of texts; see ``training.texts``."""
    prompts: Path | None = None
    """File of prompts that the target answers."""
    num_prompts: int | None = None
    """Number of prompts that the target writes itself and answers; see ``training.prompts``."""

    def count(self) -> int:
        """Number of texts or prompts: an upper bound of the number of texts. Raises UsageError if
        the file cannot be read.
        """
        if self.num_prompts is not None:
            return self.num_prompts
        path, kind = (self.prompts, "prompts") if self.data is None else (self.data, "texts")
        assert path is not None, "one of the three is given"
        return len(read_records(path, kind))


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that a drafter is trained for, and how it is loaded."""

    model: str | Path | None = None
    """Local Hugging Face directory, or Hub id; None: the embedded reasoner."""
    revision: str | None = None
    """Revision of a Hub id."""
    dtype: str = "auto"
    device: str = "auto"

    def load(self, fuse: bool) -> Teacher:
        """Find the model's directory and load it; see ``Teacher.load``."""
        directory = find_model_dir(self.model or reasoner_dir(), self.revision)
        return Teacher.load(directory, self.dtype, self.device, fuse)


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """What a run cost."""

    num_steps: int
    training_seconds: float
    """Wall time of the steps, those before an interruption included."""
    text_seconds: float
    """Wall time in which the target wrote texts; 0 if they were there."""
    processor_seconds: float
    """Processor time of all threads since the run was started or resumed, with evaluations."""


class TrainingRun:
    """Trains a drafter for a target.

    Args:
        kind: name of the recipe.
        fields: of its settings and of ``DistillationSettings``.
        out: directory of texts, checkpoint and drafter.
        target: loaded on first use; None: the embedded reasoner.

    Raises:
        UnknownNameError: there is no such recipe.
        ParameterError: an unknown field, or a bad value.

    Attributes:
        cost: of a run that has ended; None: none has.
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
        self.cost: TrainingCost | None = None
        find_device(self._target.device)  # raises if there is no such device

    @cached_property
    def teacher(self) -> Teacher:
        """The target; raises ModelError if it cannot be loaded."""
        return self._target.load(fuse=not self.settings.adapts)

    @property
    def drafter(self) -> Path:
        """Directory of the drafter."""
        return self._out / DRAFTER

    @property
    def model(self) -> Path | None:
        """Directory of the adapted target, which the drafter is for; None: it is not adapted."""
        return self._out / MODEL if self.settings.adapts else None

    @property
    def decoding(self) -> DecodingBaseConfig:
        """Configuration that decodes with the drafter."""
        return self._recipe.decoding(self.drafter)

    def check(self, source: Source, held_out: int) -> None:
        """Check everything that needs no target.

        Raises UsageError if there are too few texts, they cannot be read, the directory cannot be
        written, or its checkpoint cannot be resumed from.
        """
        _check_held_out(held_out, source.count())
        check_folder(self._out)
        try:
            self._out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self._out, str(error)) from error
        load_checkpoint(self._out, self.settings)

    def __call__(
        self,
        source: Source,
        held_out: int = 32,
        on_step: Callable[[Progress], None] | None = None,
        on_texts: OnTexts | None = None,
    ) -> dict[str, float]:
        """Train to the end, resuming an earlier run in the same directory.

        The first ``held_out`` texts are evaluated on and not trained on. Returns the results of the
        last evaluation: see ``AcceptanceEvaluation``, and ``Divergence`` where the target is
        adapted.

        Raises:
            UsageError: as :meth:`check`, or the target cannot be loaded.
            KeyboardInterrupt: it was interrupted, after a checkpoint was written.
            OSError: a file cannot be written.
        """
        self.check(source, held_out)
        self.settings.check_target(self.teacher)
        self._check_start()
        began, processor = time.perf_counter(), time.process_time()
        texts = self._texts(source, on_texts)
        _check_held_out(held_out, len(texts))
        evaluated, learned = texts[:held_out], texts[held_out:]
        learned += self._probes(learned)
        text_seconds = time.perf_counter() - began
        logger.info("%d texts, %d tokens", len(learned), sum(map(len, learned)))
        chosen = self._built(learned)
        trainer = Trainer(
            chosen,
            self.settings,
            self._out,
            lambda directory: self._evaluate(directory, evaluated),
            on_step,
        )
        metrics = trainer.run()
        self.cost = TrainingCost(
            num_steps=trainer.step,
            training_seconds=trainer.seconds,
            text_seconds=text_seconds,
            processor_seconds=time.process_time() - processor,
        )
        return metrics

    def _check_start(self) -> None:
        """Raises ModelError for weights to begin with that do not fit, before texts are written."""
        begins = (getattr(self.settings, name, None) for name in ("start", "initial_heads"))
        if any(directory is not None for directory in begins):
            self._built([Text([0] * 16, 8)] * 8)

    def _built(self, texts: Sequence[Text]) -> TrainingRecipe:
        with seeded(self.settings.seed):
            return self._recipe.build(self.settings, texts, self.teacher)

    def _evaluate(self, drafter: Path, texts: Sequence[Text]) -> dict[str, float]:
        """Acceptance of the drafter, and divergence of the adapted target."""
        target, divergence = self.teacher, dict[str, float]()
        if self.model is not None:
            target = Teacher.load(self.model, "auto", str(self.teacher.lm.device), fuse=False)
            divergence = Divergence(self.teacher, texts)(target)
        prompts = [text.prompt for text in texts]
        evaluation = AcceptanceEvaluation(target, prompts, self._answers.max_tokens)
        return evaluation(self._recipe.decoding(drafter)) | divergence

    def _texts(self, source: Source, on_texts: OnTexts | None) -> list[Text]:
        max_len = self.teacher.lm.max_positions
        if source.data is not None:
            return load_texts(source.data, self.teacher.tokenizer, max_len)
        path, count = source.prompts, source.num_prompts
        if count is not None:
            path = self._out / "prompts.jsonl"
            write_prompts(self.teacher, count, path, self.settings.seed, on_texts)
        assert path is not None
        prompts = load_prompts(path, self.teacher.tokenizer)[:count]
        return self_distil(
            self.teacher, prompts, self._out / "texts.jsonl", self._answers, on_texts
        )

    def _probes(self, texts: Sequence[Text]) -> list[Text]:
        """The target's answers to probes among some texts."""
        prompts = probe_prompts(texts, self.teacher, self._answers)
        if not prompts:
            return []
        return self_distil(
            self.teacher, prompts, self._out / "probes.jsonl", self._answers.for_probes()
        )


def _check_held_out(held_out: int, count: int) -> None:
    if held_out < 1 or count < 2 * held_out:
        raise ParameterError(
            f"{held_out} held-out texts",
            f"there are {count} texts in all",
            "Hold out at least 1 and at most half of them (--held-out), or give more texts",
        )


def _unwritable(folder: Path, why: str) -> UsageError:
    return UsageError(f"cannot write to {folder}", why, "Give another folder")
