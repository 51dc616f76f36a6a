"""What to generate from while time is taken. Knows nothing about models."""

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
    """One prompt per line: as it stands, or in the field ``prompt`` or ``question`` of an object.

    Blank lines and repetitions are left out: what was said once already would be drafted at once.

    Raises:
        UsageError: the file cannot be read, holds no prompt, or an object has none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the prompts in {path}", str(error), "Give a file with one per line"
        ) from error
    found = dict.fromkeys(
        _prompt(line.strip(), f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not found:
        raise UsageError(f"no prompts in {path}", "the file is empty", "Write one per line")
    return list(found)


def as_asked(text: str, tokenizer: Tokenizer) -> list[int]:
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
