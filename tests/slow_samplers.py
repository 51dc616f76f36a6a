"""DRY, top-n-sigma and XTC by their definitions, one token at a time: what the real ones are
compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from hypothesis import strategies as st

from forethought.config.sampling import SamplingParams
from forethought.model.sampling import SequenceBreakers, TokenContext
from forethought.model.sampling.dry import BreakerTree
from forethought.reference.engine import _edited
from sampling_cases import VOCABULARY

llama_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.25, 1.0, 1.7]),
    top_k=st.sampled_from([0, 3, 7]),
    top_p=st.sampled_from([1.0, 0.83]),
    min_p=st.sampled_from([0.0, 0.013]),
    repetition_penalty=st.sampled_from([1.0, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    min_tokens=st.sampled_from([0, 4]),
    top_n_sigma=st.sampled_from([0.0, 0.31, 1.0, 1.77]),
    xtc_probability=st.sampled_from([0.0, 0.3, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.0123, 0.0789, 0.217, 0.51]),
    dry_multiplier=st.sampled_from([0.0, 0.8, 100.0]),
    dry_base=st.sampled_from([1.0, 1.75, 100.0]),
    dry_allowed_length=st.sampled_from([1, 2, 3]),
    dry_penalty_last_n=st.sampled_from([-1, 0, 3, 8]),
)
"""Params in which the three take part, beside the others."""


def breakers_of(*texts: Sequence[int], size: int = VOCABULARY) -> SequenceBreakers:
    """Breakers of the given tokens."""
    singles = {text[0] for text in texts if len(text) == 1}
    tree = BreakerTree()
    for text in texts:
        if len(text) > 1:
            tree.add(frozenset(text[:1]), text[1:])
    return SequenceBreakers(bytes(token in singles for token in range(size)), tree)


def slow_dry(
    params: SamplingParams, tokens: Sequence[int], breakers: Sequence[Sequence[int]] = ()
) -> Mapping[int, float]:
    """Every earlier position is compared with the end, token by token."""
    if not params.penalises_repeats:
        return {}
    last_n = len(tokens) if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
    recent = list(tokens[max(0, len(tokens) - last_n) :])
    after_breaker = max(
        (
            at + len(text)
            for at in range(len(recent))
            for text in breakers
            if recent[at : at + len(text)] == list(text)
        ),
        default=0,
    )
    limit = len(recent) - after_breaker
    penalties: dict[int, float] = {}
    for end in range(1, len(recent)):  # of the earlier occurrence; what follows it
        length = 0
        while length < min(limit, end) and recent[end - 1 - length] == recent[-1 - length]:
            length += 1
        power = length - params.dry_allowed_length
        if power < 0 or [recent[end]] in [list(text) for text in breakers]:
            continue
        penalty = min(2.0**126, params.dry_multiplier * params.dry_base**power)
        penalties[recent[end]] = max(penalty, penalties.get(recent[end], 0.0))
    return penalties


def slow_probs(
    logits: Sequence[float], context: TokenContext, breakers: Sequence[Sequence[int]] = ()
) -> list[float]:
    """The distribution of a token, of finite logits and without a constraint."""
    params, ids = context.params, range(len(logits))
    edited = edited_by(logits, context, breakers)
    order = sorted(ids, key=lambda token: (-edited[token], token))
    if params.greedy:
        return [float(token == order[0]) for token in ids]
    weights = [math.exp((x - edited[order[0]]) / params.temperature) for x in edited]
    probs = [weight / math.fsum(weights) for weight in weights]
    support, mass = set[int](), 0.0
    for rank, token in enumerate(order):
        is_kept = (
            (not params.top_k or rank < params.top_k)
            and (params.top_p == 1.0 or mass < params.top_p)
            and probs[token] >= params.min_p * probs[order[0]]
            and (not params.top_n_sigma or edited[token] >= sigma_bound(edited, params))
        )
        if rank == 0 or is_kept:
            support.add(token)
        mass += probs[token]
    kept = scaled([probs[token] if token in support else 0.0 for token in ids])
    return xtc(kept, params)


def edited_by(
    logits: Sequence[float], context: TokenContext, breakers: Sequence[Sequence[int]]
) -> list[float]:
    """With bias, penalties and DRY; as they are, if that leaves no token."""
    dry = slow_dry(context.params, [*context.prompt, *context.output], breakers)
    edited = [_edited(token, x, context) - dry.get(token, 0.0) for token, x in enumerate(logits)]
    return edited if any(map(math.isfinite, edited)) else list(logits)


def sigma_bound(edited: Sequence[float], params: SamplingParams) -> float:
    """The least logit that top-n-sigma keeps."""
    finite = [x for x in edited if math.isfinite(x)]
    mean = fmean(finite)
    return max(edited) - params.top_n_sigma * math.sqrt(fmean((x - mean) ** 2 for x in finite))


def xtc(probs: Sequence[float], params: SamplingParams) -> list[float]:
    """The mixture of what llama.cpp samples from when its coin says so, and else."""
    by_coin = scaled(without_top(probs, params.xtc_threshold))
    share = params.xtc_probability
    return [(1 - share) * p + share * q for p, q in zip(probs, by_coin, strict=True)]


def without_top(probs: Sequence[float], threshold: float) -> list[float]:
    """The tokens that reach the threshold are left out, but for the last of them."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    top = [token for token in order if probs[token] >= threshold and probs[token] > 0.0]
    return [0.0 if token in top[:-1] else p for token, p in enumerate(probs)]


def scaled(probs: Sequence[float]) -> list[float]:
    total = math.fsum(probs)
    return [p / total for p in probs]


def at_an_edge(
    logits: Sequence[float], context: TokenContext, breakers: Sequence[Sequence[int]] = ()
) -> bool:
    """Whether a bound of a cut is reached within the rounding of float32: either side is right."""
    params = context.params
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 0.0, "xtc_probability": 0.0}
    uncut = replace(context, params=params.replace(**neutral))
    probs = slow_probs(logits, uncut, breakers)
    falling = sorted(probs, reverse=True)
    edited = edited_by(logits, context, breakers)
    masses = [math.fsum(falling[:count]) for count in range(len(falling) + 1)]
    kept = slow_probs(
        logits, replace(context, params=params.replace(xtc_probability=0.0)), breakers
    )
    return (
        (params.top_p < 1.0 and any(abs(mass - params.top_p) < 1e-5 for mass in masses))
        or (params.min_p > 0.0 and any(abs(p / falling[0] - params.min_p) < 1e-5 for p in falling))
        or any(abs(x - sigma_bound(edited, params)) < 1e-9 * (1 + abs(x)) for x in edited)
        or is_near_xtc(kept, params)
    )


def is_near_xtc(probs: Sequence[float], params: SamplingParams) -> bool:
    """Whether the threshold is reached by a hair, or two tokens are last by a hair."""
    if not params.excludes_top:
        return False
    falling = sorted(p for p in probs if p > 0.0)
    has_twins = any(0.0 < b - a < 1e-6 or (b == 0.0) for a, b in pairwise(falling))
    return has_twins or any(abs(p - params.xtc_threshold) < 1e-5 for p in falling)
