"""Prompts that the target writes itself, so that a drafter can be trained without any texts.

Magpie (Xu et al., 2024, arXiv 2406.08464, section 2): a chat model that is given only what its chat
template has in front of a user's words goes on with a user's words. They are sampled until the turn
ends; turns that are empty, too long or repeated are dropped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forethought.config.sampling import SamplingParams
from forethought.errors import UsageError
from forethought.llm.tokenizer import Tokenizer
from forethought.training.teacher import Teacher

logger = logging.getLogger(__name__)

OnTexts = Callable[[str, int, int], None]
"""Called while texts are written: what they are, how many are done, and of how many."""
MAX_TOKENS = 128
"""Of a prompt."""
_PART = 64
"""Number of prompts that are sampled and written together."""
_MAX_SAMPLES = 4
"""For each prompt that is wanted; a model of which more are dropped writes no prompts."""
_MARK = "\u241f"
"""Stands for a user's words in a rendered chat."""


def write_prompts(
    teacher: Teacher, count: int, path: Path, seed: int, on_texts: OnTexts | None = None
) -> None:
    """Extend the prompts in a file to ``count`` lines; each is a function of the ones before it and
    the seed.

    Raises UsageError if the target has no chat template, or writes too few different prompts.
    """
    records = _written(path)
    if len(records) >= count:
        return
    prompts = {record["prompt"] for record in records}
    sample = records[-1]["sample"] + 1 if records else 0
    prefix = _before_user(teacher.tokenizer)
    while True:
        if on_texts is not None:
            on_texts("prompts", len(prompts), count)
        if len(prompts) >= count:
            return
        if sample >= _MAX_SAMPLES * count:
            raise _cannot(f"of {sample} samples only {len(prompts)} are different prompts")
        turns = _sample(teacher, prefix, sample, seed)
        with path.open("a", encoding="utf-8") as stream:
            for number, text in enumerate(turns, start=sample):
                if text and text not in prompts and len(prompts) < count:
                    prompts.add(text)
                    stream.write(json.dumps({"prompt": text, "sample": number}) + "\n")
        sample += _PART
        logger.info("%d of %d prompts written", len(prompts), count)


def _written(path: Path) -> list[dict[str, Any]]:
    """The prompts of an earlier run; an incomplete last line is removed from the file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]), encoding="utf-8")
        lines.pop()
    try:
        records = [json.loads(line) for line in lines]
        return [{"prompt": str(x["prompt"]), "sample": int(x["sample"])} for x in records]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"cannot go on from the prompts in {path}",
            f"a line is broken ({type(error).__name__}: {error})",
            "Remove the file to have them written anew",
        ) from error


def _before_user(tokenizer: Tokenizer) -> list[int]:
    """What the chat template has in front of a user's words, as token ids."""
    if not tokenizer.hf.chat_template:
        raise _cannot("it has no chat template")
    rendered = tokenizer.render([{"role": "user", "content": _MARK}])
    prefix = tokenizer.encode_more(rendered.partition(_MARK)[0])
    if not prefix:
        raise _cannot("its chat template has nothing in front of a user's words")
    return prefix


def _sample(teacher: Teacher, prefix: list[int], first: int, seed: int) -> list[str]:
    """``_PART`` users' turns; empty ones where a turn did not end."""
    params = [
        SamplingParams(
            temperature=0.9, top_p=0.95, max_tokens=MAX_TOKENS, seed=(seed << 32) + first + number
        )
        for number in range(_PART)
    ]
    turns = teacher.generate([prefix] * _PART, params).token_ids
    ends = teacher.lm.eos_token_ids
    return [
        teacher.tokenizer.decode(turn[:-1]).strip() if turn and turn[-1] in ends else ""
        for turn in turns
    ]


def _cannot(why: str) -> UsageError:
    return UsageError(
        "the target writes no prompts itself", why, "Give prompts with --self-distill"
    )
