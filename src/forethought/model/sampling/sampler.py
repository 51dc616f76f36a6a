"""The next tokens of the rows of one step: uniform samples, inverse CDF, log-probabilities.

Uniform samples come from a counter-based random number generator, a pure function of (seed, sample,
position): there is no state to carry along, so a token does not depend on the batch, preemption,
forks or rewinds.

Log-probabilities are the log-softmax of the model's raw logits, before bias, penalties, temperature
and truncation, so that those of one prompt compare across requests.

No token is sampled (``NO_TOKEN``) where the largest of the model's logits is NaN or infinite. -inf
is a valid logit as long as one is finite.
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
    needs_edits,
    probs_and_max_logits,
)
from forethought.outputs import Logprob, TokenLogprobs


def uniform_at(seed: int, sample: int, position: int, use: int = 0) -> float:
    """A uniform number in [0, 1) with 53 random bits: a pure function of the four integers.

    Each argument counts modulo 2**64.

    Args:
        seed: of the request.
        sample: index of the sample of the request.
        position: of the output token.
        use: 0 for sampling the token itself. Others where a token needs further uniform samples:
            the low 8 bits say what for (1 drafting, 2 acceptance, 3 synthetic acceptance), the rest
            numbers them.
    """
    counter = struct.pack("<QQQ", seed & _WORD, sample & _WORD, position & _WORD)
    if use:
        counter += struct.pack("<Q", use & _WORD)
    return (int.from_bytes(blake2b(counter, digest_size=8).digest(), "little") >> 11) * 2.0**-53


_WORD = 2**64 - 1


def invert_cdf(probs: Tensor, uniforms: Sequence[float] | Tensor) -> Tensor:
    """Sample one token per row by inverting the cumulative distribution in float64.

    Args:
        probs: [N, V] with positive mass in every row; need not be normalised.
        uniforms: N numbers in [0, 1).

    Returns:
        [N] int64; never a token of probability zero, however close to 1 the uniform sample.
    """
    mass = probs.cumsum(dim=-1, dtype=torch.float64)  # [N, V]
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64, device=probs.device).unsqueeze(1)
    # A float64 below 1 times the total is below the total after rounding too, and the first token
    # whose cumulative mass exceeds that has mass of its own.
    return torch.searchsorted(mass, uniforms * mass[:, -1:], right=True).squeeze(1)


def score_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Log-probabilities of the sampled and the top-k tokens of each row, on the device.

    Args:
        logits: [N, V] float32, raw.
        tokens: [N] int64, the sampled tokens.
        k: number of top tokens; at most V are returned.

    Returns:
        [N, 2 + 2 min(k, V)] float64: the sampled token's log-probability, its rank, then the
        top tokens' log-probabilities and their ids.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))  # [N, 1]
    rank = (logprobs > chosen).sum(dim=-1, keepdim=True) + 1
    values, ids = logprobs.topk(min(k, logprobs.shape[1]), dim=-1)
    return torch.cat([chosen.double(), rank.double(), values.double(), ids.double()], dim=1)


def read_logprobs(scores: Sequence[float], token: int, k: int) -> TokenLogprobs:
    """One row of ``score_logprobs``, on the host: the sampled token first, then the top ``k``.

    The rank of a token is one more than the number of more probable tokens: equals share it.
    """
    width = (len(scores) - 2) // 2
    entries = {token: Logprob(scores[0], rank=int(scores[1]))}
    rank = 1
    for index in range(min(k, width)):
        value, top = scores[2 + index], int(scores[2 + width + index])
        if index and value < scores[1 + index]:
            rank = index + 1
        entries.setdefault(top, Logprob(value, rank=rank))
    return entries


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens of a prompt.

    Args:
        logits: [M, V] float32, raw, at M positions.
        next_ids: the M tokens that follow those positions.
        k: number of top tokens to add to each.

    Returns:
        M entries; the first belongs to ``next_ids[0]``.
    """
    tokens = torch.tensor(next_ids, dtype=torch.int64, device=logits.device)
    rows = score_logprobs(logits, tokens, k).tolist()
    return [read_logprobs(row, token, k) for row, token in zip(rows, next_ids, strict=True)]


NO_TOKEN = -1
"""In place of a token where the model's logits are not finite."""


@dataclass(slots=True)
class SampledTokens:
    """The sampled tokens of N rows."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    """Of the raw logits, for the rows whose parameters ask for them."""


def sample(
    logits: Tensor, contexts: Sequence[TokenContext], uniforms: Sequence[float]
) -> SampledTokens:
    """Sample the next token of each row, with one transfer to the host.

    Args:
        logits: [N, V] float32, of the model; not modified.
        contexts: N contexts.
        uniforms: N numbers in [0, 1); those of greedy rows are not used.
    """
    if not contexts:
        return SampledTokens([], [])
    return report(logits, contexts, draw_tokens(logits, contexts, uniforms))


def draw_tokens(
    logits: Tensor, contexts: Sequence[TokenContext], uniforms: Sequence[float]
) -> Tensor:
    """The next token of each row, [N] int64, on the device. Arguments as of ``sample``.

    A step of greedy rows takes the largest logits, without a softmax.
    """
    if all(context.params.greedy for context in contexts):
        return _most_probable(logits, contexts)
    probs, largest = probs_and_max_logits(logits, contexts)
    return where_finite(invert_cdf(probs, uniforms), largest)


def where_finite(drawn: Tensor, largest: Tensor) -> Tensor:
    """``drawn`` [N] int64, with ``NO_TOKEN`` where the largest logit [N, 1] is not finite."""
    return drawn.masked_fill_(~torch.isfinite(largest.squeeze(1)), NO_TOKEN)


def _most_probable(logits: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """[N] int64, the lowest id among equals."""
    distinct = {id(context): context for context in contexts}.values()  # nodes often share one
    if logits.device.type == "cpu" and not any(map(needs_edits, distinct)):
        host = logits.numpy()
        drawn = host.argmax(axis=-1)  # a tenth of torch's time; of NaN and numbers, NaN
        finite = np.isfinite(host[np.arange(len(host)), drawn])
        if not finite.all():
            drawn[~finite] = NO_TOKEN
        return torch.from_numpy(drawn)
    edited, largest = edit_and_max_logits(logits, contexts)
    return where_finite(edited.max(dim=-1).indices, largest)


def report(logits: Tensor, contexts: Sequence[TokenContext], drawn: Tensor) -> SampledTokens:
    """The sampled tokens on the host, with the log-probabilities that their parameters ask for.

    Args:
        logits: [N, V] float32, of the model.
        contexts: N contexts.
        drawn: [N] int64, the token of each row; the log-probabilities of a ``NO_TOKEN`` have no
            meaning.
    """
    wanted = [context.params.logprobs for context in contexts]
    rows = [row for row, k in enumerate(wanted) if k is not None]
    if not rows:
        return SampledTokens(drawn.tolist(), [None] * len(contexts))

    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    max_k = max(k for k in wanted if k is not None)
    scores = score_logprobs(logits[index], drawn[index].clamp(min=0), max_k)
    # Token ids are exact in float64, so that one transfer brings everything.
    host = torch.cat([drawn.double(), scores.flatten()]).tolist()
    tokens = [int(token) for token in host[: len(contexts)]]
    found: list[TokenLogprobs | None] = [None] * len(contexts)
    width = scores.shape[1]
    for number, row in enumerate(rows):
        start = len(contexts) + number * width
        found[row] = read_logprobs(host[start : start + width], tokens[row], wanted[row] or 0)
    return SampledTokens(tokens, found)
