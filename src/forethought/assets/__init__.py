"""The embedded models as installed: their names, directories and test problems.

Standard library only.
"""

import json
from pathlib import Path
from typing import Any

from forethought.errors import UnknownNameError

PREFIX = "forethought/"
"""Of the names under which the embedded models are found, such as ``forethought/countdown``."""
MODELS = ("reasoner", "countdown", "instruct")
"""The models that answer questions; the directories beside them hold what drafts for these."""
REWARD_MODELS = ("prm",)
"""The models that judge answers: ``RewardWorker("forethought/prm")`` those of the reasoner."""
HEADS = ("eagle3", "mtp", "medusa", "redrafter")
"""The heads that draft for the reasoner from its hidden states, each with a drafter's name."""
DRAFTERS = ("drafter", *HEADS)
"""What drafts for the reasoner: its draft model, and the heads."""
REASONER = PREFIX + "reasoner"
"""The model where none is named."""


def names() -> list[str]:
    """The names of the models that answer, each as ``LLM`` and ``--model`` take it."""
    return [PREFIX + name for name in MODELS]


def is_embedded(model: object) -> bool:
    """Whether a model's name has the prefix of embedded models; the model may not exist."""
    return str(model).startswith(PREFIX)


def is_embedded_dir(path: Path) -> bool:
    """Whether a directory is that of an embedded model or its heads."""
    return path.parent == Path(__file__).parent


def is_reasoner(model: object) -> bool:
    """Whether this is the embedded reasoner, by its name, its directory or by default."""
    return str(model or REASONER) in (REASONER, str(reasoner_dir()))


def embedded_dir(name: str) -> Path:
    """Directory of an embedded model, or of embedded heads, in the Hugging Face layout.

    ``name`` is as in ``"forethought/countdown"``, ``"countdown"``, ``"forethought/medusa"``.

    Raises UnknownNameError if there is no such model.
    """
    short, names = name.removeprefix(PREFIX), (*MODELS, *REWARD_MODELS, *DRAFTERS)
    if short not in names:
        raise UnknownNameError("embedded model", name, [PREFIX + model for model in names])
    return Path(__file__).parent / short


def reasoner_dir() -> Path:
    """Directory of the embedded reasoner, the model where none is named."""
    return embedded_dir("reasoner")


def drafter_dir() -> Path:
    """Directory of the reasoner's draft model, in the same layout and with the same tokenizer."""
    return embedded_dir("drafter")


def heads_dir(kind: str) -> Path:
    """Directory of the weights that draft for the reasoner, such as ``"medusa"``."""
    return Path(__file__).parent / kind


def problems(name: str = "reasoner") -> list[dict[str, Any]]:
    """The shipped test problems of an embedded model, none of which it was trained on, in order.

    Each has ``question`` and ``answer``. Those of ``countdown``, which ``instruct`` is asked, too,
    also have ``numbers`` and ``target``; their ``answer`` is one of many, which the verifier
    ``countdown`` checks.

    Raises UnknownNameError if there is no such model.
    """
    directory_name = "countdown" if name.removeprefix(PREFIX) == "instruct" else name
    with (embedded_dir(directory_name) / "problems.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
