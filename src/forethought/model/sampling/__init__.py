"""From logits to tokens.

* ``distribution.py``  logits and sampling parameters -> probabilities; masks of grammars
* ``dry.py``           penalties for tokens that would continue a repeat
* ``sampler.py``       uniform samples, inverse CDF, log-probabilities, the tokens of a step
"""

from forethought.model.sampling.distribution import (
    Constraint,
    Constraints,
    DevicePath,
    TokenContext,
    edit_logits,
    logits_to_probs,
)
from forethought.model.sampling.dry import SequenceBreakers
from forethought.model.sampling.sampler import (
    NO_TOKEN,
    SampledTokens,
    invert_cdf,
    most_probable,
    prompt_logprobs,
    sample,
    uniform_at,
)

__all__ = [
    "NO_TOKEN",
    "Constraint",
    "Constraints",
    "DevicePath",
    "SampledTokens",
    "SequenceBreakers",
    "TokenContext",
    "edit_logits",
    "invert_cdf",
    "logits_to_probs",
    "most_probable",
    "prompt_logprobs",
    "sample",
    "uniform_at",
]
