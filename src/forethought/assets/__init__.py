"""The embedded reasoner as installed: where its model directory lies, and its test problems.

Standard library only; knows nothing about how the model is loaded or was trained.
"""

import json
from pathlib import Path


def reasoner_dir() -> Path:
    """Directory of the embedded reasoner in the Hugging Face layout."""
    return Path(__file__).parent / "reasoner"


def problems() -> list[dict[str, str]]:
    """The shipped test problems, each with the keys ``question`` and ``answer`` (digits)."""
    with (reasoner_dir() / "problems.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
