"""From logits to tokens: the law, the coin, the draw and what it is reported to have cost.

* ``distribution.py``         logits and what the caller asked for -> the one probability law
* ``constraint.py``  which tokens a grammar allows, as the law asks for it
* ``draw.py``        a coin that depends on nothing but its place, and the inverse CDF
* ``logprobs.py``    log-probabilities under the model's own law
* ``choice.py``      all of it for the rows of one step
* ``reference.py``   the law of one row in slow, plain Python: the oracle of the tests

Knows nothing about sequences, pages or text.
"""

from forethought.model.sampling.distribution import (
    Constraint,
    Constraints,
    TokenContext,
    edit_logits,
    logits_to_probs,
)
from forethought.model.sampling.sampler import (
    SampledTokens,
    invert_cdf,
    prompt_logprobs,
    sample,
    uniform_at,
)

__all__ = [
    "Constraint",
    "Constraints",
    "SampledTokens",
    "TokenContext",
    "edit_logits",
    "invert_cdf",
    "logits_to_probs",
    "prompt_logprobs",
    "sample",
    "uniform_at",
]
