"""A coin that depends on nothing but its place, and the draw that it decides.

Knows nothing about logits or laws' origins.

[logprobs] Log-probabilities of tokens under the model's own law: the log-softmax of the raw logits.

Bias, penalties, temperature and truncation are wishes about the draw and do not show here, so the
figures of one prompt compare across requests. Knows nothing about how the tokens were drawn.

[choice] The next tokens of the rows of one step. Knows nothing about sequences, pages or text.

No token follows where the largest of the model's own logits is NaN or infinite: ``NO_TOKEN`` is
drawn. -inf is a logit like others as long as one is finite.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from forethought.model.sampling.distribution import (
    TokenContext,
    edit_and_max_logits,
    probs_and_max_logits,
    wants_edits,
)
from forethought.outputs import Logprob, TokenLogprobs


def uniform_at(seed: int, stream: int, position: int, use: int = 0) -> float:
    """A uniform number in [0, 1) with 53 random bits: a pure function of the four integers.

    There is no generator to carry along: the coin of output token ``position`` of sample ``stream``
    is the same in any company, after preemption, fork or rewind, and coins may be asked for in any
    order. Each argument counts modulo 2**64.

    Args:
        seed: of the request.
        stream: the sample.
        position: the token that it helps to decide.
        use: 0 for the draw of the token itself; others where a token needs more coins than one. The
            low 8 bits say what for (1 drafting, 2 acceptance, 3 made-up acceptance), the rest
            number the coins of it.
    """
    place = struct.pack("<QQQ", seed & _WORD, stream & _WORD, position & _WORD)
    if use:
        place += struct.pack("<Q", use & _WORD)
    return (int.from_bytes(blake2b(place, digest_size=8).digest(), "little") >> 11) * 2.0**-53


_WORD = 2**64 - 1


def invert_cdf(probs: Tensor, uniforms: Sequence[float] | Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative law in float64.

    Args:
        probs: [N, V] with positive mass in every row; need not be normalised.
        coins: N numbers in [0, 1).

    Returns:
        [N] int64; never a token of probability zero, however close to 1 the coin.
    """
    mass = probs.cumsum(dim=-1, dtype=torch.float64)  # [N, V]
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64, device=probs.device).unsqueeze(1)
    # A float64 below 1 times the total is below the total after rounding too, and the first token
    # whose cumulative mass exceeds that has mass of its own.
    return torch.searchsorted(mass, uniforms * mass[:, -1:], right=True).squeeze(1)


def score_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Scores of the chosen and of the ``k`` likeliest tokens of each row, left on the device.

    Args:
        logits: [N, V] float32, raw.
        tokens: [N] int64, the chosen tokens.
        k: how many of the likeliest; at most V are given.

    Returns:
        [N, 2 + 2 min(k, V)] float64: the chosen token's log-probability, its rank, then the
        likeliest tokens' log-probabilities and their ids.
    """
    distribution = logits.log_softmax(dim=-1)
    chosen = distribution.gather(1, tokens.unsqueeze(1))  # [N, 1]
    rank = (distribution > chosen).sum(dim=-1, keepdim=True) + 1
    values, ids = distribution.topk(min(k, distribution.shape[1]), dim=-1)
    return torch.cat([chosen.double(), rank.double(), values.double(), ids.double()], dim=1)


def read_logprobs(scores: Sequence[float], token: int, k: int) -> TokenLogprobs:
    """One row of ``score``, on the host: the chosen token first, then the ``k`` likeliest.

    The rank of a token is one more than the number of tokens strictly likelier: equals share it.
    """
    width = (len(scores) - 2) // 2
    entries = {token: Logprob(scores[0], rank=int(scores[1]))}
    rank = 1
    for place in range(min(k, width)):
        value, top = scores[2 + place], int(scores[2 + width + place])
        if place and value < scores[1 + place]:
            rank = place + 1
        entries.setdefault(top, Logprob(value, rank=rank))
    return entries


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """What the model thought of the tokens of a prompt.

    Args:
        logits: [M, V] float32, raw, at M positions.
        next_ids: the M tokens that follow those positions.
        k: how many of the likeliest tokens to add to each.

    Returns:
        M entries; the first belongs to ``next_ids[0]``.
    """
    tokens = torch.tensor(next_ids, dtype=torch.int64, device=logits.device)
    rows = score_logprobs(logits, tokens, k).tolist()
    return [read_logprobs(row, token, k) for row, token in zip(rows, next_ids, strict=True)]


NO_TOKEN = -1
"""Is drawn where the model's logits are not finite."""


@dataclass(slots=True)
class SampledTokens:
    """What was drawn for N rows."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    """Under the model's own law, for the rows whose params ask for them."""


def sample(
    logits: Tensor, contexts: Sequence[TokenContext], uniforms: Sequence[float]
) -> SampledTokens:
    """Draw the next token of each row; the results cross to the host once.

    Args:
        logits: [N, V] float32, the model's own; not modified.
        contexts: N contexts.
        coins: N numbers in [0, 1); those of greedy rows are not looked at.
    """
    if not contexts:
        return SampledTokens([], [])
    return report(logits, contexts, draw_tokens(logits, contexts, uniforms))


def draw_tokens(
    logits: Tensor, contexts: Sequence[TokenContext], uniforms: Sequence[float]
) -> Tensor:
    """The next token of each row, [N] int64, left on the device. Arguments as of ``choose``.

    A step of greedy rows takes the largest logits: no softmax, no coin.
    """
    if all(context.params.greedy for context in contexts):
        return _likeliest(logits, contexts)
    distribution, peaks = probs_and_max_logits(logits, contexts)
    return where_finite(invert_cdf(distribution, uniforms), peaks)


def where_finite(drawn: Tensor, peaks: Tensor) -> Tensor:
    """The drawn tokens [N] int64, or ``NO_TOKEN`` where the largest logit [N, 1] is not finite."""
    return drawn.masked_fill_(~torch.isfinite(peaks.squeeze(1)), NO_TOKEN)


def _likeliest(logits: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """[N] int64, the first of equals."""
    different = {id(context): context for context in contexts}.values()  # nodes often share one
    if logits.device.type == "cpu" and not any(map(wants_edits, different)):
        host = logits.numpy()
        drawn = host.argmax(axis=-1)  # a tenth of torch's time; of NaN and numbers, NaN
        finite = np.isfinite(host[np.arange(len(host)), drawn])
        if not finite.all():
            drawn[~finite] = NO_TOKEN
        return torch.from_numpy(drawn)
    edited, peaks = edit_and_max_logits(logits, contexts)
    return where_finite(edited.max(dim=-1).indices, peaks)


def report(logits: Tensor, contexts: Sequence[TokenContext], drawn: Tensor) -> SampledTokens:
    """The drawn tokens on the host, with the log-probabilities that their params ask for.

    Args:
        logits: [N, V] float32, the model's own.
        contexts: N contexts.
        drawn: [N] int64, the token of each row; ``NO_TOKEN`` is reported as any other, with
            log-probabilities that mean nothing.
    """
    wanted = [context.params.logprobs for context in contexts]
    rows = [row for row, k in enumerate(wanted) if k is not None]
    if not rows:
        return SampledTokens(drawn.tolist(), [None] * len(contexts))

    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    most = max(k for k in wanted if k is not None)
    scores = score_logprobs(logits[index], drawn[index].clamp(min=0), most)
    # Token ids are exact in float64, so that one transfer brings everything.
    host = torch.cat([drawn.double(), scores.flatten()]).tolist()
    tokens = [int(token) for token in host[: len(contexts)]]
    found: list[TokenLogprobs | None] = [None] * len(contexts)
    width = scores.shape[1]
    for place, row in enumerate(rows):
        start = len(contexts) + place * width
        found[row] = read_logprobs(host[start : start + width], tokens[row], wanted[row] or 0)
    return SampledTokens(tokens, found)
