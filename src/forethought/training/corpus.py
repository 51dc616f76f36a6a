"""Self-distillation: the target answers prompts, and its answers are the texts to learn from.

A file grows by a part at a time; an interrupted run goes on behind the last whole part. Knows
nothing about what is learned from them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from forethought.errors import ParameterError, UsageError
from forethought.params import SamplingParams
from forethought.strict_model import StrictModel
from forethought.training.teacher import Teacher
from forethought.training.text import Text, load_texts, save_texts

logger = logging.getLogger(__name__)

PART = 64
"""Prompts that are answered and written together."""


class DistillationSettings(StrictModel):
    """How the target answers."""

    seed: int = Field(default=0, ge=0)
    temperatures: tuple[float, ...] = Field(default=(0.0, 0.8), min_length=1)
    """In turn. A drafter serves greedy requests and sampled ones."""
    max_tokens: int = Field(default=512, ge=1)
    """Of an answer."""


def self_distil(
    teacher: Teacher, prompts: Sequence[list[int]], path: Path, settings: DistillationSettings
) -> list[Text]:
    """Have every prompt answered, as far as ``path`` does not hold the answers already.

    Raises:
        ParameterError: it holds answers to other prompts.
        UsageError: it is broken.
    """
    done = _resume(prompts, path) if path.exists() else 0
    while done < len(prompts):
        part = prompts[done : done + PART]
        answers = teacher.generate(part, [_params(settings, done + n) for n in range(len(part))])
        pairs = zip(part, answers.token_ids, strict=True)
        save_texts([Text(prompt + answer, len(prompt)) for prompt, answer in pairs], path)
        done += len(part)
        logger.info("%d of %d prompts answered", done, len(prompts))
    return load_texts(path, teacher.tokenizer, teacher.lm.max_positions)


def _resume(prompts: Sequence[list[int]], path: Path) -> int:
    """How many prompts are answered; a part that was not finished is taken back."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):  # an interrupted write
        lines.pop()
    if len(lines) < len(prompts):
        lines = lines[: len(lines) // PART * PART]
        path.write_text("".join(lines), encoding="utf-8")
    for prompt, line in zip(prompts, lines, strict=False):
        try:
            record = json.loads(line)
            answered = record["token_ids"][: record["prompt_length"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"cannot go on from the texts in {path}",
                f"a line is broken ({type(error).__name__}: {error})",
                "Remove the file to have the prompts answered anew",
            ) from error
        if answered != prompt:
            raise ParameterError(
                f"the texts in {path} are answers to other prompts",
                "a run in the same directory had others",
                "Give the same prompts, or another directory",
            )
    return len(lines)


def _params(settings: DistillationSettings, number: int) -> SamplingParams:
    return SamplingParams(
        temperature=settings.temperatures[number % len(settings.temperatures)],
        max_tokens=settings.max_tokens,
        seed=(settings.seed << 32) + number,
    )
