"""The confidences of a token in slow, plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence as List

from forethought.outputs import TokenConfidence


def exact_confidence(logits: List[float], token: int, k: int) -> TokenConfidence:
    """The confidence in ``token``, one of the finite ``logits``, over the ``k`` most probable."""
    peak = max(logits)
    total = math.fsum(math.exp(x - peak) for x in logits)
    logprobs = [x - peak - math.log(total) for x in logits]
    top = sorted(logprobs, reverse=True)[:k]
    return TokenConfidence(
        value=-math.fsum(top) / len(top),
        logprob=logprobs[token],
        entropy=-math.fsum(math.exp(x) * x for x in logprobs),
        self_certainty=-math.log(len(logprobs)) - math.fsum(logprobs) / len(logprobs),
    )
