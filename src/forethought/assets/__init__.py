"""The embedded models as installed: where their directories lie, and the reasoner's test problems.

Standard library only.
"""

import json
from pathlib import Path


def reasoner_dir() -> Path:
    """Directory of the embedded reasoner in the Hugging Face layout."""
    return Path(__file__).parent / "reasoner"


def drafter_dir() -> Path:
    """Directory of the reasoner's draft model, in the same layout and with the same tokenizer."""
    return Path(__file__).parent / "drafter"


def heads_dir(kind: str) -> Path:
    """Directory of the weights that draft for the reasoner, such as ``"medusa"``."""
    return Path(__file__).parent / kind


def problems() -> list[dict[str, str]]:
    """The shipped test problems, each with the keys ``question`` and ``answer`` (digits)."""
    with (reasoner_dir() / "problems.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
