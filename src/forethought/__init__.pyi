"""Public names for editors and type checkers; ``__init__.py`` loads them when first used."""

from forethought.config.drafters import AutoDecodingConfig as AutoDecodingConfig
from forethought.config.drafters import DraftTargetDecodingConfig as DraftTargetDecodingConfig
from forethought.config.drafters import Eagle3DecodingConfig as Eagle3DecodingConfig
from forethought.config.drafters import EagleDecodingConfig as EagleDecodingConfig
from forethought.config.drafters import MTPDecodingConfig as MTPDecodingConfig
from forethought.config.drafters import NGramDecodingConfig as NGramDecodingConfig
from forethought.config.drafters import PearlDecodingConfig as PearlDecodingConfig
from forethought.config.drafters import ReDrafterDecodingConfig as ReDrafterDecodingConfig
from forethought.config.drafters import SuffixDecodingConfig as SuffixDecodingConfig
from forethought.config.drafters import UserProvidedDecodingConfig as UserProvidedDecodingConfig
from forethought.config.engine import GuidedDecodingConfig as GuidedDecodingConfig
from forethought.config.engine import KvCacheConfig as KvCacheConfig
from forethought.config.engine import LlmArgs as LlmArgs
from forethought.config.guided import GuidedDecodingParams as GuidedDecodingParams
from forethought.config.medusa import MedusaDecodingConfig as MedusaDecodingConfig
from forethought.config.sampling import SamplingParams as SamplingParams
from forethought.config.sampling import SpeculationParams as SpeculationParams
from forethought.errors import ForethoughtError as ForethoughtError
from forethought.llm.async_llm import AsyncLLM as AsyncLLM
from forethought.llm.llm import LLM as LLM
from forethought.llm.llm import Session as Session
from forethought.outputs import CompletionOutput as CompletionOutput
from forethought.outputs import FinishReason as FinishReason
from forethought.outputs import RequestOutput as RequestOutput
from forethought.outputs import SpeculationMetrics as SpeculationMetrics
from forethought.outputs import ThinkingOutput as ThinkingOutput
from forethought.outputs import ThoughtEnd as ThoughtEnd
from forethought.outputs import Usage as Usage
from forethought.speculative.drafter import Drafter as Drafter
from forethought.speculative.drafter import ResourceManager as ResourceManager

__version__: str
__all__: list[str]
