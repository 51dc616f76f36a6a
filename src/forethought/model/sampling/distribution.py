"""Which tokens may follow a prefix: what the law asks of a grammar.

Knows nothing about text, grammars or who follows one; ``text.guidance`` makes constraints.

[law] The one law: what the caller asked for, applied to the model's logits, as probabilities.

Sampling, drafting and verification all call ``logits_to_probs``; a token's law is defined here and
nowhere else, in this order:

1. ``logit_bias`` is added.
2. ``repetition_penalty`` divides the positive and multiplies the negative logits of tokens that are
   in the prompt or the output.
3. ``presence_penalty`` is subtracted once, ``frequency_penalty`` once per occurrence, from the
   logits of tokens in the output.
4. While the output is shorter than ``min_tokens``, every token that would end it is forbidden: the
   stop token ids, and end-of-sequence unless ``ignore_eos`` (then it ends nothing and is allowed).
5. What the ``constraint`` does not allow is forbidden. End-of-sequence it allows where its rule may
   end.
6. ``temperature`` divides. 0 is greedy: all mass on the likeliest token, lowest id among equals.
7. ``top_k``, ``top_p`` and ``min_p`` cut *jointly*: each marks the tokens that it keeps on the law
   of step 6, and a token stays if all three keep it. Each keeps a prefix of the tokens in order of
   falling probability (lower id first among equals), so together they keep the shortest prefix:
   at most ``top_k`` tokens; the tokens with less than ``top_p`` mass before them; the tokens with
   at least ``min_p`` of the likeliest one's probability. The likeliest token always stays. What
   stays is renormalised.

A row whose largest logit after step 5 is not finite falls back to its raw logits with steps 1 to 4
undone, NaN and -inf read as the lowest float and +inf as the highest: never NaN, and uniform if
there was nothing to go by. Either everything was forbidden; then step 5 holds there too, so that
``min_tokens`` never breaks a grammar, and only a constraint that allows nothing at all, which no
sequence that goes on has, forbids nothing. Or the model's own logits are NaN or infinite; that law
serves drafters alone, and ``choice`` draws no token there.

Knows nothing about how a token is drawn from the law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought.config.sampling import SamplingParams


class Constraint(Protocol):
    """A rule for the output of one generation, as pure functions of the output so far.

    It may keep what it has worked out, so that asking along one path, or about the nodes of a tree,
    costs little; in whichever order it is asked, the answers are the same.
    """

    def mask(self, output: Sequence[int]) -> NDArray[np.uint8]:
        """Which tokens may come after ``output``.

        An end-of-sequence token that ends the generation is among them exactly where the rule
        allows an end. Behind an output that breaks the rule, nothing may come.

        Returns:
            [ceil(V / 8)] bytes, V the width of the model's logits: bit ``t % 8`` of byte ``t // 8``
            is token t's, the lowest bit first. Not to be written to.
        """
        ...

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether no text may follow ``output``, which keeps to the rule: it ends here.

        Raises:
            ParameterError: ``output`` breaks the rule, as it could not be kept to any longer.
        """
        ...


Constraints = Callable[[], Constraint]
"""Makes the constraints of generations that keep to the same rule, one for each."""


def unpack(masks: NDArray[np.uint8], width: int) -> NDArray[np.bool_]:
    """[..., ceil(width / 8)] bytes as of ``Constraint.mask`` -> [..., width] booleans."""
    bits = np.unpackbits(masks, axis=-1, count=width, bitorder="little")
    return bits.view(np.bool_)


@dataclass(slots=True)
class TokenContext:
    """What the law of one position depends on beside the logits: the prefix and the wishes.

    In a draft tree each node has its own, with the path to the node at the end of ``output``.
    """

    params: SamplingParams
    prompt: Sequence[int]
    """Token ids before the generation."""
    output: Sequence[int]
    """Token ids generated before this position."""
    eos_ids: frozenset[int]
    """The model's end-of-sequence ids."""
    constraint: Constraint | None = None
    """What ``output`` and the next token have to keep to."""


def logits_to_probs(logits: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """The law of the next token of each row.

    Args:
        logits: [N, V] float32, the model's own; not modified.
        contexts: N contexts. Ids in ``logit_bias`` and in the prefixes must be below V.

    Returns:
        [N, V] float32; every row sums to 1 and has no NaN.
    """
    return probs_and_max_logits(logits, contexts)[0]


def probs_and_max_logits(logits: Tensor, contexts: Sequence[TokenContext]) -> tuple[Tensor, Tensor]:
    """``logits_to_probs``, and [N, 1] float32: the largest of the model's own logits of each row.

    The law of a row whose largest logit is not finite means nothing.
    """
    edited, peaks, own = _edit(logits, contexts)
    shifted = edited - peaks  # the peak is 0 at any temperature
    temperatures = [context.params.temperature for context in contexts]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        smallest = torch.finfo(torch.float32).tiny  # what rounds to 0 would make 0 / 0
        shifted /= _column([max(t, smallest) if t else 1.0 for t in temperatures], logits)
    probs = _truncate(torch.softmax(shifted, dim=-1), contexts)
    greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0.0]
    if greedy:
        rows = torch.tensor(greedy, device=logits.device)
        probs[rows] = 0.0
        probs[rows, edited[rows].max(dim=-1).indices] = 1.0  # max gives the first of equals
    return probs, own


def edit_logits(logits: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """Steps 1 to 5 of the law and the fallback, for rows that want them.

    Args:
        logits: [N, V] float32; not modified.
        contexts: N contexts.

    Returns:
        [N, V] float32, the largest value of each row finite; ``logits`` itself if nothing changed.
    """
    return _edit(logits, contexts)[0]


def edit_and_max_logits(logits: Tensor, contexts: Sequence[TokenContext]) -> tuple[Tensor, Tensor]:
    """``edit_logits``, and [N, 1]: the largest of the model's own logits of each row."""
    edited, _, own = _edit(logits, contexts)
    return edited, own


def _edit(logits: Tensor, contexts: Sequence[TokenContext]) -> tuple[Tensor, Tensor, Tensor]:
    """``edit_logits``, its largest value of each row, and that of ``logits``, both [N, 1]."""
    edited, allowed = logits, _allowed(contexts, logits)
    peaks = own = logits.amax(dim=-1, keepdim=True)
    if any(wants_edits(context) for context in contexts):
        edited = logits.clone()
        _add_bias(edited, contexts)
        _penalise_repetition(edited, contexts)
        _penalise_output(edited, contexts)
        _forbid_ends(edited, contexts)
        _keep_to(edited, allowed)
        peaks = edited.amax(dim=-1, keepdim=True)
    lost = ~torch.isfinite(peaks)
    if logits.device.type == "cpu" and not lost.any():  # on a GPU looking would stall the queue
        return edited, peaks, own
    bounds = torch.finfo(logits.dtype)
    fallback = logits.nan_to_num(nan=bounds.min, posinf=bounds.max, neginf=bounds.min)
    _keep_to(fallback, allowed)
    edited = torch.where(lost, fallback, edited)
    return edited, edited.amax(dim=-1, keepdim=True), own


def wants_edits(context: TokenContext) -> bool:
    """Whether anything is to be done to its logits before temperature and cuts."""
    params = context.params
    return (
        params.logit_bias is not None
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or len(context.output) < params.min_tokens
        or context.constraint is not None
    )


def _allowed(contexts: Sequence[TokenContext], like: Tensor) -> tuple[Tensor, Tensor] | None:
    """What constraints allow: the rows that have one, [R] int64, and their tokens, [R, V] bool.

    The masks are worked out on the host, on a GPU while it still computes the logits.
    """
    masks = [
        (row, context.constraint.mask(context.output))
        for row, context in enumerate(contexts)
        if context.constraint is not None
    ]
    if not masks:
        return None
    packed = np.stack([mask for _, mask in masks])
    packed[~packed.any(axis=-1)] = 0xFF  # what allows nothing forbids nothing
    allowed = torch.from_numpy(unpack(packed, like.shape[1])).to(like.device)
    return _index([row for row, _ in masks], like), allowed


def _keep_to(logits: Tensor, allowed: tuple[Tensor, Tensor] | None) -> None:
    if allowed is not None:
        rows, tokens = allowed
        logits[rows] = torch.where(tokens, logits[rows], -torch.inf)


def _add_bias(logits: Tensor, contexts: Sequence[TokenContext]) -> None:
    rows, ids, values = [], [], []
    for row, context in enumerate(contexts):
        for token, value in (context.params.logit_bias or {}).items():
            rows.append(row)
            ids.append(token)
            values.append(value)
    if rows:
        logits[_index(rows, logits), _index(ids, logits)] += torch.tensor(
            values, dtype=logits.dtype, device=logits.device
        )


def _penalise_repetition(logits: Tensor, contexts: Sequence[TokenContext]) -> None:
    rows = [row for row, c in enumerate(contexts) if c.params.repetition_penalty != 1.0]
    if not rows:
        return
    seen = _counts(logits, [[*contexts[row].prompt, *contexts[row].output] for row in rows]) > 0
    penalty = _column([contexts[row].params.repetition_penalty for row in rows], logits)
    chosen = logits[_index(rows, logits)]
    penalised = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    logits[_index(rows, logits)] = torch.where(seen, penalised, chosen)


def _penalise_output(logits: Tensor, contexts: Sequence[TokenContext]) -> None:
    rows = [
        row
        for row, context in enumerate(contexts)
        if context.params.presence_penalty or context.params.frequency_penalty
    ]
    if not rows:
        return
    counts = _counts(logits, [contexts[row].output for row in rows])
    presence = _column([contexts[row].params.presence_penalty for row in rows], logits)
    frequency = _column([contexts[row].params.frequency_penalty for row in rows], logits)
    logits[_index(rows, logits)] -= presence * (counts > 0) + frequency * counts


def _forbid_ends(logits: Tensor, contexts: Sequence[TokenContext]) -> None:
    rows, ids = [], []
    for row, context in enumerate(contexts):
        params = context.params
        if len(context.output) < params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else context.eos_ids)}
            within = [token for token in ends if token < logits.shape[1]]
            rows += [row] * len(within)
            ids += within
    if rows:
        logits[_index(rows, logits), _index(ids, logits)] = -torch.inf


def _truncate(probs: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """Step 7, on the rows that ask for it. probs: [N, V] float32."""
    rows = [row for row, context in enumerate(contexts) if context.params.cuts]
    if not rows:
        return probs
    index = _index(rows, probs)
    distribution, requested_nodes, width = (
        probs[index],
        [contexts[row].params for row in rows],
        probs.shape[1],
    )
    rising = _sorted_rising(distribution)  # [R, V]
    likeliest = rising[:, -1:]
    top_k = _index([p.top_k or width for p in requested_nodes], probs).unsqueeze(1)
    top_p = _column(
        [p.top_p if p.top_p < 1.0 else 2.0 for p in requested_nodes], probs, torch.float64
    )
    min_p = _column([p.min_p for p in requested_nodes], probs)
    mass = rising.flip(-1).cumsum(dim=-1, dtype=torch.float64)  # [R, V] of the likeliest so far
    in_top_p = torch.searchsorted(mass, top_p) + 1  # those that do not reach it, and one more
    in_min_p = width - torch.searchsorted(rising, min_p * likeliest)  # 1 to V
    keep = torch.minimum(torch.minimum(in_top_p, in_min_p), top_k)  # [R, 1] tokens, at least one
    threshold = rising.gather(1, width - keep)
    probs[index] = _keep_top_k(distribution, threshold, keep)
    return probs


def _keep_top_k(distribution: Tensor, threshold: Tensor, keep: Tensor) -> Tensor:
    """The ``keep`` likeliest tokens of each row, renormalised; among equals the lower ids.

    law: [R, V] float32; threshold: [R, 1] probability of the last token kept; keep: [R, 1] int64.
    """
    kept = distribution >= threshold
    surplus = kept.count_nonzero(dim=-1).unsqueeze(1) > keep
    if (
        distribution.device.type != "cpu" or surplus.any()
    ):  # equals across the edge: count them off by id
        above, equal = distribution > threshold, distribution == threshold
        room = keep - above.count_nonzero(dim=-1).unsqueeze(1)
        kept = above | (equal & (equal.cumsum(dim=-1) <= room))
    distribution = torch.where(kept, distribution, 0.0)
    return distribution / distribution.sum(dim=-1, keepdim=True)


def _sorted_rising(distribution: Tensor) -> Tensor:
    """Values of each row in rising order. NumPy's vectorised sort is 20 to 30 times torch's."""
    if distribution.device.type == "cpu":
        return torch.from_numpy(np.sort(distribution.numpy(), axis=-1))
    return distribution.sort(dim=-1).values


def _counts(like: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """How often each id occurs in each list. Returns [len(tokens), V] in the dtype of ``like``."""
    width = like.shape[1]
    flat = [row * width + token for row, ids in enumerate(tokens) for token in ids]
    counts = torch.bincount(_index(flat, like), minlength=len(tokens) * width)
    return counts.view(len(tokens), width).to(like.dtype)


def _index(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[len(values), 1] in the dtype of ``like`` unless told otherwise."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).unsqueeze(1)
