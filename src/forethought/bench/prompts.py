"""The prompts of a benchmark: those of the embedded reasoner, or of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.errors import UsageError
from forethought.evaluation import problems

if TYPE_CHECKING:
    from forethought.llm.tokenizer import Tokenizer

_FIELDS = ("prompt", "question", "problem")


def shipped_prompts() -> list[str]:
    """The questions that the embedded reasoner was not trained on, in their fixed order."""
    return [problem.question for problem in problems.shipped()]


def load_prompts(path: Path) -> list[str]:
    """One prompt per line: as text, or in the field ``prompt`` or ``question`` of an object.

    Blank lines and repetitions are left out: drafters would find the earlier answer of the latter.

    Raises UsageError if the file cannot be read, holds no prompt, or an object has none.
    """
    lines = problems.read_lines(path, "prompts", "Give a file with one per line")
    return list(dict.fromkeys(_prompt(line.strip(), where) for where, line in lines))


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file, see ``load_prompts``; None: the shipped ones."""
    return shipped_prompts() if path is None else load_prompts(path)


def as_user_turn(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text, as a user's turn where the model has a chat template."""
    if not tokenizer.hf.chat_template:
        return tokenizer.encode(text)
    return tokenizer.encode_more(tokenizer.render([{"role": "user", "content": text}]))


def _prompt(line: str, where: str) -> str:
    record: Any = None
    if line.startswith("{"):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            return line  # a text that begins with a brace
    if not isinstance(record, dict):
        return line
    text = next((record[name] for name in _FIELDS if record.get(name)), None)
    if not isinstance(text, str):
        raise UsageError(
            f"no prompt at {where}",
            f"the object has no text in {' or '.join(_FIELDS)}",
            'Write {"prompt": "..."}',
        )
    return text
