"""The drafters there are, by the ``decoding_type`` of their configuration.

The engine finds drafters here and never imports one by name. Knows nothing about how they work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forethought.config.registry import Registry
from forethought.config.speculation import DecodingBaseConfig

if TYPE_CHECKING:
    from forethought.model.runner import ModelRunner
    from forethought.speculative.drafter import Drafter

DRAFTERS = {
    "MTP": "forethought.speculative.drafters.mtp:MTPDrafter",
    "NGram": "forethought.speculative.drafters.ngram:NGramDrafter",
    "Suffix": "forethought.speculative.drafters.suffix:SuffixDrafter",
    "Draft_Target": "forethought.speculative.drafters.draft_target:DraftTargetDrafter",
    "Eagle": "forethought.speculative.drafters.eagle:EagleDrafter",
    "Medusa": "forethought.speculative.drafters.medusa:MedusaDrafter",
    "Pearl": "forethought.speculative.drafters.pearl:PearlDrafter",
    "ReDrafter": "forethought.speculative.drafters.redrafter:ReDrafterDrafter",
    "User_Provided": "forethought.speculative.drafters.user_provided:UserProvided",
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a drafter may know of the model that it drafts for."""

    runner: ModelRunner
    """Its network and the storage whose pages drafts lie in."""
    max_num_tokens: int
    """Tokens in one step; a draft model's prefill keeps to it as well."""


class DrafterClass(Protocol):
    """What the table's entries have."""

    def build(self, config: Any, target: Target) -> Drafter:
        """The drafter that ``config`` describes."""
        ...


def build(config: DecodingBaseConfig, target: Target) -> Drafter:
    """The drafter of a configuration.

    Raises:
        UsageError: it does not fit the target, or its model cannot be loaded.
    """
    found: DrafterClass = Registry("drafter", DRAFTERS).resolve(type(config).decoding_type)
    return found.build(config, target)
