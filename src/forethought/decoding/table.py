"""Which class a ``decoding_type`` names. Imports none before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forethought.errors import ParameterError, UnknownNameError

if TYPE_CHECKING:
    from forethought.decoding.base import DecodingBaseConfig

CONFIGS: Mapping[str, str] = {
    "AUTO": "auto:AutoDecodingConfig",
    "Draft_Target": "draft_target:DraftTargetDecodingConfig",
    "Eagle": "eagle:EagleDecodingConfig",
    "Medusa": "medusa:MedusaDecodingConfig",
    "MTP": "mtp:MTPDecodingConfig",
    "NGram": "ngram:NGramDecodingConfig",
    "Pearl": "pearl:PearlDecodingConfig",
    "ReDrafter": "redrafter:ReDrafterDecodingConfig",
    "Suffix": "suffix:SuffixDecodingConfig",
    "User_Provided": "user_provided:UserProvidedDecodingConfig",
}
"""``decoding_type`` -> file in this package and class."""

ALIASES: Mapping[str, str] = {"Eagle3": "Eagle"}
"""Other strings that ``decoding_type`` may be."""


def find(kind: Any) -> type[DecodingBaseConfig]:
    """The class that a ``decoding_type`` names; case, ``_`` and ``-`` do not matter.

    Raises:
        UnknownNameError: there is no such ``decoding_type``.
    """
    spelled = _plain(str(kind))
    known = {_plain(name): name for name in CONFIGS}
    known |= {_plain(alias): name for alias, name in ALIASES.items()}
    if spelled not in known:
        raise UnknownNameError("decoding_type", str(kind), CONFIGS)
    file, _, name = CONFIGS[known[spelled]].partition(":")
    found: type[DecodingBaseConfig] = getattr(
        importlib.import_module(f"forethought.decoding.{file}"), name
    )
    return found


def undecided() -> ParameterError:
    """What to raise where nothing says how to draft."""
    return ParameterError(
        "speculative_config needs decoding_type",
        "nothing says how to draft",
        f"Use one of {', '.join(sorted(CONFIGS))}",
    )


def _plain(kind: str) -> str:
    return kind.casefold().replace("_", "").replace("-", "")
