"""How to guess ahead: one configuration class per way of drafting, each in a file of its own.

Names, defaults and ``decoding_type`` strings are those of TensorRT-LLM, so that a
``speculative_config`` block of a YAML file that was written for it is read here as it stands. After
construction every length is settled; an impossible or ambiguous one is refused. Knows nothing about
how drafts are made.
"""

from forethought.decoding.auto import AutoDecodingConfig
from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.draft_target import DraftTargetDecodingConfig
from forethought.decoding.eagle import Eagle3DecodingConfig, EagleDecodingConfig
from forethought.decoding.medusa import MEDUSA_CHOICES, MedusaDecodingConfig
from forethought.decoding.mtp import MTPDecodingConfig
from forethought.decoding.ngram import NGramDecodingConfig
from forethought.decoding.pearl import PearlDecodingConfig
from forethought.decoding.redrafter import ReDrafterDecodingConfig
from forethought.decoding.speculative_config import read_configs
from forethought.decoding.suffix import SuffixDecodingConfig
from forethought.decoding.tree_paths import TreePaths
from forethought.decoding.user_provided import UserProvidedDecodingConfig

__all__ = [
    "MEDUSA_CHOICES",
    "AutoDecodingConfig",
    "DecodingBaseConfig",
    "DraftTargetDecodingConfig",
    "Eagle3DecodingConfig",
    "EagleDecodingConfig",
    "MTPDecodingConfig",
    "MedusaDecodingConfig",
    "NGramDecodingConfig",
    "PearlDecodingConfig",
    "ReDrafterDecodingConfig",
    "SuffixDecodingConfig",
    "TreePaths",
    "UserProvidedDecodingConfig",
    "read_configs",
]
