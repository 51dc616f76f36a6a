"""Reference implementations of distributions and confidences: one row, in slow, plain Python.

The order and the meaning of the steps are in ``distribution.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forethought.config.sampling import SamplingParams
from forethought.model.sampling.distribution import Constraint
from forethought.outputs import TokenConfidence


def reference_probs(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_ids: frozenset[int],
    constraint: Constraint | None = None,
) -> list[float]:
    """Probabilities of the next token; ``logits`` and the result have one entry per id."""
    allowed = _allowed(len(logits), output, constraint)
    edited = _edited(logits, params, prompt, output, eos_ids)
    edited = [x if allowed[token] else -math.inf for token, x in enumerate(edited)]
    if not math.isfinite(_largest(edited)):
        highest = 3.4028234663852886e38  # of float32
        readable = [-highest if math.isnan(x) else x for x in logits]
        edited = [min(max(x, -highest), highest) for x in readable]
        edited = [x if allowed[token] else -math.inf for token, x in enumerate(edited)]
    order = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    peak = edited[order[0]]
    if params.greedy:
        return [float(token == order[0]) for token in range(len(edited))]

    weights = [math.exp((x - peak) / params.temperature) for x in edited]
    total = math.fsum(weights)
    probs = [weight / total for weight in weights]

    kept, mass_before = [], 0.0
    for rank, token in enumerate(order):
        in_top_k = params.top_k == 0 or rank < params.top_k
        in_top_p = params.top_p == 1.0 or mass_before < params.top_p
        in_min_p = probs[token] >= params.min_p * probs[order[0]]
        if rank == 0 or (in_top_k and in_top_p and in_min_p):
            kept.append(token)
        mass_before += probs[token]
    remaining = math.fsum(probs[token] for token in kept)
    return [probs[t] / remaining if t in kept else 0.0 for t in range(len(probs))]


def reference_confidence(logits: Sequence[float], token: int, k: int) -> TokenConfidence:
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


def _edited(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_ids: frozenset[int],
) -> list[float]:
    edited = []
    for token, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        if token in output:
            logit -= params.presence_penalty
            logit -= params.frequency_penalty * list(output).count(token)
        ends = token in params.stop_token_ids or (token in eos_ids and not params.ignore_eos)
        if ends and len(output) < params.min_tokens:
            logit = -math.inf
        edited.append(logit)
    return edited


def _allowed(width: int, output: Sequence[int], constraint: Constraint | None) -> list[bool]:
    mask = None if constraint is None else constraint.mask(output)
    if mask is None:
        return [True] * width
    allowed = [bool(mask[token // 8] >> (token % 8) & 1) for token in range(width)]
    return allowed if any(allowed) else [True] * width


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(x) for x in values) else max(values)
