"""The next tokens of the rows of one step: uniform samples, inverse CDF, and their scores.

Uniform samples come from a counter-based random number generator, a pure function of (seed, sample,
position): there is no state to carry along, so a token does not depend on the batch, preemption,
forks or rewinds.

Log-probabilities and confidences are those of the model's raw logits, before bias, penalties,
temperature and truncation, so that those of one prompt compare across requests.

No token is sampled (``NO_TOKEN``) where the largest of the model's logits is NaN or infinite. -inf
is a valid logit as long as one is finite.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import torch
from torch import Tensor

from forethought.kv.staging import Download, upload
from forethought.model import backends
from forethought.model.sampling.distribution import (
    TokenContext,
    edit_and_max_logits,
    needs_edits,
    probs_and_max_logits,
)
from forethought.outputs import Logprob, TokenConfidence, TokenLogprobs


def uniform_at(seed: int, sample: int, position: int, use: int = 0) -> float:
    """A uniform number in [0, 1) with 53 random bits: a pure function of the four integers, each
    modulo 2**64: the request's seed, the index of the sample, the output token's position, and
    the use.

    ``use`` is 0 for sampling the token itself. Others where a token needs further uniform samples:
    the low 8 bits say what for (1 drafting, 2 acceptance, 3 synthetic acceptance), the rest numbers
    them.
    """
    counter = struct.pack("<QQQ", seed & _WORD, sample & _WORD, position & _WORD)
    if use:
        counter += struct.pack("<Q", use & _WORD)
    return (int.from_bytes(blake2b(counter, digest_size=8).digest(), "little") >> 11) * 2.0**-53


_WORD = 2**64 - 1


def invert_cdf(probs: Tensor, uniforms: Sequence[float] | Tensor) -> Tensor:
    """Sample one token per row, [N] int64, by inverting the cumulative distribution in float64.

    ``probs``, [N, V], has positive mass in every row and need not be normalised. A token of
    probability zero is never sampled, however close to 1 the uniform sample in [0, 1).
    """
    mass = probs.cumsum(dim=-1, dtype=torch.float64)  # [N, V]
    if not isinstance(uniforms, Tensor):
        uniforms = upload(uniforms, probs.device, torch.float64)
    uniforms = uniforms.to(probs.device, torch.float64).unsqueeze(1)
    # A float64 below 1 times the total is below the total after rounding too, and the first token
    # whose cumulative mass exceeds that has mass of its own.
    return torch.searchsorted(mass, uniforms * mass[:, -1:], right=True).squeeze(1)


def score_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Log-probabilities of the sampled tokens [N] int64 and the top-k tokens of each row of the raw
    logits [N, V] float32, on the device.

    Returns [N, 2 + 2 min(k, V)] float64: the sampled token's log-probability, its rank, then the
    top tokens' log-probabilities and their ids.
    """
    native = native_sampling(logits)
    if native is not None:
        return native.score_logprobs(logits, tokens, k)
    return torch_score_logprobs(logits, tokens, k)


def torch_score_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """``score_logprobs`` by torch, the reference implementation."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))  # [N, 1]
    rank = (logprobs > chosen).sum(dim=-1, keepdim=True) + 1
    values, ids = logprobs.topk(min(k, logprobs.shape[1]), dim=-1)
    return torch.cat([chosen.double(), rank.double(), values.double(), ids.double()], dim=1)


def read_logprobs(scores: Sequence[float], token: int, k: int) -> TokenLogprobs:
    """One row of ``score_logprobs``, on the host: the sampled token first, then the top ``k``. The
    rank of a token is one more than the number of more probable tokens: equals share it.
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


def score_confidence(logits: Tensor, tokens: Tensor, ks: Sequence[int]) -> Tensor:
    """The fields of ``TokenConfidence``, [N, 4] float64, for the sampled tokens [N] int64 of raw
    logits [N, V] float32, over the ``ks`` (from 1) most probable tokens, on the device.
    """
    native = native_sampling(logits)
    if native is not None:
        return native.score_confidence(logits, tokens, ks)
    return torch_score_confidence(logits, tokens, ks)


def torch_score_confidence(logits: Tensor, tokens: Tensor, ks: Sequence[int]) -> Tensor:
    """``score_confidence`` by torch, the reference implementation. One pass of exponentials over
    the logits serves all fields; no log-softmax is written out.
    """
    rows, width = logits.shape
    group = max(1, _CACHED_LOGITS // width)
    if logits.device.type == "cpu" and rows > group:
        return torch.cat(
            [
                torch_score_confidence(
                    logits[at : at + group], tokens[at : at + group], ks[at : at + group]
                )
                for at in range(0, rows, group)
            ]
        )
    top = logits.topk(min(max(ks), width), dim=-1).values  # [N, K], falling
    largest = top[:, :1]
    shifted = logits - largest
    weights = shifted.exp()  # [N, V]
    mass = weights.sum(dim=-1)
    log_mass = mass.log()  # log(sum(exp(logits - largest)))
    sampled_logits = shifted.gather(1, tokens.unsqueeze(1)).squeeze(1)
    # 0 * -inf would be NaN, but -inf adds nothing to the mean of the logits.
    finite = shifted.clamp(min=torch.finfo(logits.dtype).min)
    mean = torch.linalg.vecdot(weights, finite) / mass  # of the logits, by probability
    certainty = log_mass - math.log(width) - shifted.mean(dim=-1)
    value = log_mass - _mean_of_first(top - largest, ks)
    return torch.stack(
        (value, sampled_logits - log_mass, log_mass - mean, certainty), dim=1
    ).double()


_CACHED_LOGITS = 2**16
"""Logits of one pass on a CPU: rows beyond the cache take twice as long each."""


def _mean_of_first(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Mean of the first ``counts[row]`` finite ones of ``values`` [N, K] in falling order: [N]."""
    counted = values.isfinite()
    if min(counts) < values.shape[1]:
        columns = torch.arange(values.shape[1], device=values.device)
        counted &= columns < upload(counts, values.device).unsqueeze(1)
    return torch.where(counted, values, 0.0).sum(dim=-1) / counted.sum(dim=-1)


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-probabilities of the M tokens ``next_ids`` that follow the positions of the raw logits
    [M, V] float32, each with the top ``k``.
    """
    tokens = upload(next_ids, logits.device)
    rows = score_logprobs(logits, tokens, k).tolist()
    return [read_logprobs(row, token, k) for row, token in zip(rows, next_ids, strict=True)]


NO_TOKEN = -1
"""In place of a token where the model's logits are not finite."""


@dataclass(slots=True)
class SampledTokens:
    """The sampled tokens of N rows."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    """Log-probabilities of the raw logits, for rows whose parameters ask for them."""
    confidences: list[TokenConfidence | None]
    """The same."""


def sample(
    logits: Tensor, contexts: Sequence[TokenContext], uniforms: Sequence[float]
) -> SampledTokens:
    """Sample the next token of each row of the model's logits [N, V] float32, which are not
    modified, with one transfer to the host. The N uniforms are in [0, 1); those of greedy rows
    are not used.
    """
    if not contexts:
        return SampledTokens([], [], [])
    return report(logits, contexts, draw_tokens(logits, contexts, uniforms))


def draw_tokens(
    logits: Tensor, contexts: Sequence[TokenContext], uniforms: Sequence[float]
) -> Tensor:
    """The next token of each row, [N] int64, on the device. Arguments as of ``sample``.

    On a CPU it is drawn in C++, where there is a library: in single steps as in several steps of
    one call, and as in verification, so that a token does not depend on which of these it is.
    """
    distinct = list({id(context): context for context in contexts}.values())  # often one for all
    greedy = all(context.params.greedy for context in distinct)
    if greedy and not any(map(needs_edits, distinct)):
        return draw_most_probable(logits)
    native = native_sampling(logits)
    if native is not None:
        return native.draw_tokens(logits, contexts, uniforms)
    return torch_draw_tokens(logits, contexts, uniforms)


def native_sampling(logits: Tensor) -> backends.NativeSampling | None:
    """What samples from these logits in C++; None: torch does, as on a GPU."""
    return backends.cpu().sampler() if logits.is_cpu else None


def torch_draw_tokens(
    logits: Tensor, contexts: Sequence[TokenContext], uniforms: Sequence[float]
) -> Tensor:
    """``draw_tokens`` by torch, the reference implementation. Greedy rows alone take the largest
    logits, without a softmax.
    """
    if all(context.params.greedy for context in contexts):
        edited, largest = edit_and_max_logits(logits, contexts)
        return where_finite(edited.max(dim=-1).indices, largest)
    probs, largest = probs_and_max_logits(logits, contexts)
    return where_finite(invert_cdf(probs, uniforms), largest)


def where_finite(drawn: Tensor, largest: Tensor) -> Tensor:
    """``drawn`` [N] int64, with ``NO_TOKEN`` where the largest logit [N, 1] is not finite."""
    return drawn.masked_fill_(~torch.isfinite(largest.squeeze(1)), NO_TOKEN)


def draw_most_probable(logits: Tensor) -> Tensor:
    """``most_probable`` of logits [N, V] float32, on their device: [N] int64."""
    if logits.is_cpu:
        return torch.tensor(most_probable(logits))
    largest, ids = logits.max(dim=-1)
    return mark_not_finite(ids, largest)


def mark_not_finite(ids: Tensor, largest: Tensor) -> Tensor:
    """``ids`` [N] int64, with ``NO_TOKEN`` where the largest logit [N] is not finite."""
    return ids.masked_fill_(largest - largest != 0, NO_TOKEN)  # of infinity and NaN that is NaN


def most_probable(logits: Tensor) -> list[int]:
    """The token with the largest of the logits, [N, V] float32, of each row, the lowest id among
    equals; ``NO_TOKEN`` where the largest logit is not finite.
    """
    if not logits.is_cpu:
        drawn: list[int] = draw_most_probable(logits).tolist()
        return drawn
    host = logits.numpy()
    tokens = host.argmax(axis=-1).tolist()  # a tenth of torch's time; of NaN and numbers, NaN
    return [
        token if math.isfinite(host.item(row, token)) else NO_TOKEN
        for row, token in enumerate(tokens)
    ]


def report(logits: Tensor, contexts: Sequence[TokenContext], drawn: Tensor) -> SampledTokens:
    """The sampled tokens [N] int64 on the host, with the scores that their parameters ask for;
    those of a ``NO_TOKEN`` have no meaning. ``logits``, [N, V] float32, are the model's.
    """
    download = Download()
    download.add(drawn)
    scores = TokenScores(logits, contexts, drawn, download)
    parts = download.read()
    tokens: list[int] = parts[0]
    return SampledTokens(tokens, *scores.read(parts, tokens))


class TokenScores:
    """The scores of N tokens that their parameters ask for, computed and not read yet. ``download``
    brings them to the host, with whatever else there is to read.
    """

    def __init__(
        self,
        logits: Tensor,
        contexts: Sequence[TokenContext],
        drawn: Tensor,
        download: Download,
    ) -> None:
        self._num_logprobs, self._ks = dict[int, int](), dict[int, int]()  # by row: what it asks
        self._num_rows, self._width = len(contexts), 0
        for row, context in enumerate(contexts):
            params = context.params
            if params.logprobs is not None:
                self._num_logprobs[row] = params.logprobs
            if params.confidence is not None:
                self._ks[row] = params.confidence
        if self._num_logprobs:
            k = max(self._num_logprobs.values())
            scores = score_logprobs(*_rows_of(logits, drawn, self._num_logprobs), k)
            self._width = scores.shape[1]
            self._logprobs_at = download.add(scores)
        if self._ks:
            confidences = score_confidence(
                *_rows_of(logits, drawn, self._ks), list(self._ks.values())
            )
            self._confidences_at = download.add(confidences)

    def read(
        self, parts: Sequence[Sequence[float]], tokens: Sequence[int]
    ) -> tuple[list[TokenLogprobs | None], list[TokenConfidence | None]]:
        """Log-probabilities and confidences of the N tokens; None where they are not asked for.
        ``parts`` are what the download has read.
        """
        logprobs: list[TokenLogprobs | None] = [None] * self._num_rows
        confidences: list[TokenConfidence | None] = [None] * self._num_rows
        if self._num_logprobs:
            values = iter(parts[self._logprobs_at])
            for row, k in self._num_logprobs.items():
                logprobs[row] = read_logprobs(list(islice(values, self._width)), tokens[row], k)
        if self._ks:
            values = iter(parts[self._confidences_at])
            for row in self._ks:
                confidences[row] = TokenConfidence(*islice(values, 4))
        return logprobs, confidences


def _rows_of(logits: Tensor, drawn: Tensor, rows: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Logits [M, V] and tokens [M] of some rows; a token that was not sampled counts as id 0."""
    index = upload(list(rows), logits.device)
    return logits[index], drawn[index].clamp(min=0)
