"""The sampling distribution: a request's parameters applied to the model's logits.

Sampling, drafting and verification all call ``logits_to_probs``; the distribution of a token is
defined here and nowhere else, in this order:

1. ``logit_bias`` is added.
2. ``repetition_penalty`` divides the positive and multiplies the negative logits of tokens that are
   in the prompt or the output.
3. ``presence_penalty`` is subtracted once, ``frequency_penalty`` once per occurrence, from the
   logits of tokens in the output. DRY (``dry.py``) subtracts from those that would continue a
   repeat.
4. While the output is shorter than ``min_tokens``, every token that would end it is forbidden: the
   stop token ids, and end-of-sequence unless ``ignore_eos`` (then it ends nothing and is allowed).
5. What the ``constraint`` (a grammar, a thinking budget) does not allow is forbidden. It allows
   end-of-sequence where the output may end.
6. ``temperature`` divides. 0 is greedy: all mass on the largest logit, lowest id among equals.
7. ``top_k``, ``top_p``, ``min_p`` and ``top_n_sigma`` truncate *jointly*: each marks the tokens
   that it keeps of the distribution of step 6, and a token stays if all four keep it. Each keeps a
   prefix of the tokens in order of falling probability (lower id first among equals), so together
   they keep the shortest prefix: at most ``top_k`` tokens; the tokens with less than ``top_p`` mass
   before them; the tokens with at least ``min_p`` times the largest probability; those whose logit
   after step 5, of which temperature is no part, is at most ``top_n_sigma`` standard deviations of
   the finite ones below the largest (Top-nsigma, C. Tang et al., 2024). The most probable token
   always stays. The rest is renormalised.
8. XTC ("exclude top choices", P. E. Weidmann, 2024): of the tokens with a probability from
   ``xtc_threshold`` on after step 7, only the least probable one stays (the highest id among
   equals), with probability ``xtc_probability``. The distribution is the mixture of the two cases,
   so that the uniform sample of the token decides on both: no other random number takes part.
   Greedy tokens stay as they are.

llama.cpp has these steps in nearly the same order, with temperature after them (it does not change
which tokens ``top_n_sigma`` keeps), and cuts one after the other, each what the one before left.

A row whose largest logit after step 5 is not finite falls back to its raw logits without steps 1 to
4, NaN and -inf read as the lowest float and +inf as the highest: never NaN, and uniform if all were
alike. There are two cases. Everything was forbidden: then step 5 still holds, so that
``min_tokens`` never breaks a grammar, except where the constraint itself allows no token, which
does not happen in a sequence that goes on. Or the model's own logits are NaN or infinite: that
distribution serves drafters only, and ``sampler.py`` samples no token from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought.config.sampling import SamplingParams
from forethought.kv.staging import upload
from forethought.model.sampling.dry import SequenceBreakers, dry_penalties


class Constraint(Protocol):
    """A rule for the output of one generation, as pure functions of the output so far. It may
    cache, so that queries along one path or over the nodes of a tree are cheap; their order does
    not change the results.
    """

    def mask(self, output: Sequence[int]) -> NDArray[np.uint8] | None:
        """Which tokens may follow ``output``; None: any.

        An end-of-sequence token that ends the generation is among them exactly where the rule
        allows an end. No token may follow an output that breaks the rule. Returns [ceil(V / 8)]
        bytes, V the width of the model's logits: token t is bit ``t % 8`` of byte ``t // 8``, the
        lowest bit first. Read-only.
        """
        ...

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether ``output`` follows the rule and no text may follow it: the generation ends.
        Raises ParameterError if it breaks the rule.
        """
        ...


Constraints = Callable[[Sequence[int], int], Sequence[Constraint | None]]
"""Makes the constraints of generations under one rule: ids of the prompt that they continue, and
their number -> one for each."""


def unpack(masks: NDArray[np.uint8], width: int) -> NDArray[np.bool_]:
    """[..., ceil(width / 8)] bytes of ``Constraint.mask`` -> [..., width] booleans."""
    bits = np.unpackbits(masks, axis=-1, count=width, bitorder="little")
    return bits.view(np.bool_)


class DevicePath(NamedTuple):
    """Tokens that are on a GPU, and that the host need not know: a path through a draft."""

    tokens: Tensor
    """int64 ``[N]``, of all nodes."""
    nodes: tuple[int, ...]
    """The path, in order."""

    @classmethod
    def of_nodes(cls, tokens: Tensor, parents: Sequence[int] | None) -> list[DevicePath]:
        """The path to each node of a draft, itself included; parents: None: it is a chain."""
        paths: list[tuple[int, ...]] = []
        for node in range(len(tokens)):
            parent = node - 1 if parents is None else parents[node]
            paths.append((*(paths[parent] if parent >= 0 else ()), node))
        return [cls(tokens, path) for path in paths]


@dataclass(slots=True)
class TokenContext:
    """What the distribution of one position depends on besides the logits. In a draft tree each
    node has its own, with the path to the node at the end of ``output``.
    """

    params: SamplingParams
    prompt: Sequence[int]
    """Token ids before the generation."""
    output: Sequence[int]
    """Token ids generated before this position."""
    eos_ids: frozenset[int]
    """The model's end-of-sequence ids."""
    constraint: Constraint | None = None
    """The rule that ``output`` and the next token follow."""
    path: DevicePath | None = None
    """Tokens between ``output`` and this position; None: there are none. With a constraint or DRY
    there are none: they read them on the host."""
    breakers: SequenceBreakers | None = None
    """What ends a repeat, for DRY; None: nothing does."""

    @property
    def num_output(self) -> int:
        """Tokens generated before this position."""
        return len(self.output) + (0 if self.path is None else len(self.path.nodes))

    @property
    def dry_penalties(self) -> dict[int, float]:
        """What DRY subtracts from the logits of tokens, by id."""
        if not self.params.penalises_repeats:
            return {}
        assert self.path is None, "the drafted tokens are on the host"
        return dry_penalties(self.params, [*self.prompt, *self.output], self.breakers)


def logits_to_probs(logits: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """The distributions of the next tokens, [N, V] float32; every row sums to 1 and has no NaN.

    The model's logits, [N, V] float32, are not modified. Ids in ``logit_bias`` and in the prefixes
    of the N contexts must be below V.
    """
    return probs_and_max_logits(logits, contexts)[0]


def probs_and_max_logits(logits: Tensor, contexts: Sequence[TokenContext]) -> tuple[Tensor, Tensor]:
    """``logits_to_probs``, and the largest of the model's logits of each row, [N, 1] float32. No
    token may be sampled from a row whose largest logit is not finite.
    """
    edited, largest, raw_largest = _edit(logits, contexts)
    shifted = edited - largest  # the largest is 0 at any temperature
    temperatures = [context.params.temperature for context in contexts]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        smallest = torch.finfo(torch.float32).tiny  # what rounds to 0 would make 0 / 0
        shifted /= _column([max(t, smallest) if t else 1.0 for t in temperatures], logits)
    probs = _truncate(torch.softmax(shifted, dim=-1), contexts)
    probs = _keep_within_sigma(probs, edited, contexts)
    probs = _exclude_top(probs, contexts)
    greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0.0]
    if greedy:
        rows = upload(greedy, logits.device)
        probs[rows] = 0.0
        probs[rows, edited[rows].max(dim=-1).indices] = 1.0  # max gives the first of equals
    return probs, raw_largest


def edit_logits(logits: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """Steps 1 to 5 and the fallback: [N, V] float32, the largest value of each row finite;
    ``logits`` itself if nothing changed.
    """
    return _edit(logits, contexts)[0]


def edit_and_max_logits(logits: Tensor, contexts: Sequence[TokenContext]) -> tuple[Tensor, Tensor]:
    """``edit_logits``, and the largest of the model's logits of each row, [N, 1] float32."""
    edited, _, raw_largest = _edit(logits, contexts)
    return edited, raw_largest


def _edit(logits: Tensor, contexts: Sequence[TokenContext]) -> tuple[Tensor, Tensor, Tensor]:
    """``edit_logits``, its largest value of each row, and that of ``logits``, both [N, 1]."""
    edited, allowed = logits, _allowed(contexts, logits)
    largest = raw_largest = logits.amax(dim=-1, keepdim=True)
    if any(needs_edits(context) for context in contexts):
        edited = logits.clone()
        _add_bias(edited, contexts)
        _penalise_repetition(edited, contexts)
        _penalise_output(edited, contexts)
        _penalise_repeats(edited, contexts)
        _forbid_ends(edited, contexts)
        _forbid_others(edited, allowed)
        largest = edited.amax(dim=-1, keepdim=True)
    invalid = ~torch.isfinite(largest)
    if logits.device.type == "cpu" and not invalid.any():  # on a GPU the check would synchronise
        return edited, largest, raw_largest
    bounds = torch.finfo(logits.dtype)
    fallback = logits.nan_to_num(nan=bounds.min, posinf=bounds.max, neginf=bounds.min)
    _forbid_others(fallback, allowed)
    edited = torch.where(invalid, fallback, edited)
    return edited, edited.amax(dim=-1, keepdim=True), raw_largest


def needs_edits(context: TokenContext) -> bool:
    """Whether any of steps 1 to 5 applies."""
    params = context.params
    if params.edits_logits or context.constraint is not None:
        return True
    return context.num_output < params.min_tokens


def _allowed(contexts: Sequence[TokenContext], like: Tensor) -> tuple[Tensor, Tensor] | None:
    """The rows that a constraint restricts, [R] int64, and the tokens allowed there, [R, V] bool.
    Masks are computed on the host, while a GPU still computes the logits.
    """
    masks = [
        (row, mask)
        for row, context in enumerate(contexts)
        if context.constraint is not None
        and (mask := context.constraint.mask(context.output)) is not None
    ]
    if not masks:
        return None
    packed = np.stack([mask for _, mask in masks])
    packed[~packed.any(axis=-1)] = 0xFF  # a mask that allows no token forbids none
    allowed = torch.from_numpy(unpack(packed, like.shape[1])).to(like.device)
    return _index([row for row, _ in masks], like), allowed


def _forbid_others(logits: Tensor, allowed: tuple[Tensor, Tensor] | None) -> None:
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
        bias = upload(values, logits.device, logits.dtype)
        logits[_index(rows, logits), _index(ids, logits)] += bias


def _penalise_repetition(logits: Tensor, contexts: Sequence[TokenContext]) -> None:
    rows = [row for row, c in enumerate(contexts) if c.params.repetition_penalty != 1.0]
    if not rows:
        return
    penalised_contexts = [contexts[row] for row in rows]
    occurs = (
        _counts(
            logits,
            [[*context.prompt, *context.output] for context in penalised_contexts],
            penalised_contexts,
        )
        > 0
    )
    penalty = _column([contexts[row].params.repetition_penalty for row in rows], logits)
    chosen = logits[_index(rows, logits)]
    penalised = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    logits[_index(rows, logits)] = torch.where(occurs, penalised, chosen)


def _penalise_output(logits: Tensor, contexts: Sequence[TokenContext]) -> None:
    rows = [
        row
        for row, context in enumerate(contexts)
        if context.params.presence_penalty or context.params.frequency_penalty
    ]
    if not rows:
        return
    penalised_contexts = [contexts[row] for row in rows]
    counts = _counts(
        logits,
        [penalised_context.output for penalised_context in penalised_contexts],
        penalised_contexts,
    )
    presence = _column([contexts[row].params.presence_penalty for row in rows], logits)
    frequency = _column([contexts[row].params.frequency_penalty for row in rows], logits)
    logits[_index(rows, logits)] -= presence * (counts > 0) + frequency * counts


def _penalise_repeats(logits: Tensor, contexts: Sequence[TokenContext]) -> None:
    rows, ids, values = [], [], []
    for row, context in enumerate(contexts):
        for token, penalty in context.dry_penalties.items():
            rows.append(row)
            ids.append(token)
            values.append(penalty)
    if rows:
        penalties = upload(values, logits.device, logits.dtype)
        logits[_index(rows, logits), _index(ids, logits)] -= penalties


def _forbid_ends(logits: Tensor, contexts: Sequence[TokenContext]) -> None:
    rows, ids = [], []
    for row, context in enumerate(contexts):
        params = context.params
        if context.num_output < params.min_tokens:
            ends = params.end_ids(context.eos_ids)
            within = [token for token in ends if token < logits.shape[1]]
            rows += [row] * len(within)
            ids += within
    if rows:
        logits[_index(rows, logits), _index(ids, logits)] = -torch.inf


def _truncate(probs: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """Step 7 but for ``top_n_sigma``, on the rows that ask for it. probs: [N, V] float32."""
    rows = [row for row, context in enumerate(contexts) if context.params.cuts]
    if not rows:
        return probs
    index = _index(rows, probs)
    chosen, params, vocab_size = (
        probs[index],
        [contexts[row].params for row in rows],
        probs.shape[1],
    )
    rising = _sorted_rising(chosen)  # [R, V]
    top_k = _index([p.top_k or vocab_size for p in params], probs).unsqueeze(1)
    top_p = _column([p.top_p if p.top_p < 1.0 else 2.0 for p in params], probs, torch.float64)
    min_p = _column([p.min_p for p in params], probs)
    mass = rising.flip(-1).cumsum(dim=-1, dtype=torch.float64)  # [R, V] in falling order
    num_top_p = torch.searchsorted(mass, top_p) + 1  # those that do not reach it, and one more
    num_min_p = vocab_size - torch.searchsorted(rising, min_p * rising[:, -1:])  # 1 to V
    num_kept = torch.minimum(torch.minimum(num_top_p, num_min_p), top_k)  # [R, 1], at least 1
    threshold = rising.gather(1, vocab_size - num_kept)
    probs[index] = _keep_top_k(chosen, threshold, num_kept)
    return probs


def _keep_within_sigma(probs: Tensor, edited: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """``top_n_sigma`` of step 7, on the rows that ask for it. probs, and the logits after step 5:
    [N, V] float32.
    """
    rows = [row for row, context in enumerate(contexts) if context.params.keeps_within_sigma]
    if not rows:
        return probs
    index = _index(rows, probs)
    values = edited[index].double()  # [R, V]
    is_finite = values.isfinite()
    count = is_finite.sum(dim=-1, keepdim=True)
    mean = torch.where(is_finite, values, 0.0).sum(dim=-1, keepdim=True) / count
    squares = torch.where(is_finite, values - mean, 0.0).square()
    deviation = (squares.sum(dim=-1, keepdim=True) / count).sqrt()
    num_sigmas = _column([contexts[row].params.top_n_sigma for row in rows], values)
    bound = values.amax(dim=-1, keepdim=True) - num_sigmas * deviation
    chosen = torch.where(values >= bound, probs[index], 0.0)
    probs[index] = chosen / chosen.sum(dim=-1, keepdim=True)
    return probs


def _exclude_top(probs: Tensor, contexts: Sequence[TokenContext]) -> Tensor:
    """Step 8, on the rows that ask for it. probs: [N, V] float32."""
    rows = [row for row, context in enumerate(contexts) if context.params.excludes_top]
    if not rows:
        return probs
    index, params = _index(rows, probs), [contexts[row].params for row in rows]
    chosen = probs[index]  # [R, V]
    is_top = (chosen >= _column([p.xtc_threshold for p in params], probs)) & (chosen > 0.0)
    least = torch.where(is_top, chosen, torch.inf).amin(dim=-1, keepdim=True)
    ids = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(is_top & (chosen == least), ids, -1).amax(dim=-1, keepdim=True)
    rest = torch.where(is_top & (ids != last), 0.0, chosen)
    rest /= rest.sum(dim=-1, keepdim=True)
    share = _column([p.xtc_probability for p in params], probs)
    probs[index] = (1.0 - share) * chosen + share * rest
    return probs


def _keep_top_k(probs: Tensor, threshold: Tensor, num_kept: Tensor) -> Tensor:
    """The ``num_kept`` [R, 1] most probable tokens of each row of probs [R, V] float32,
    renormalised; among equals the lower ids. ``threshold``, [R, 1], is the probability of the
    last token kept.
    """
    is_kept = probs >= threshold
    surplus = is_kept.count_nonzero(dim=-1).unsqueeze(1) > num_kept
    if probs.device.type != "cpu" or surplus.any():  # of equals at the threshold keep the lower ids
        above, equal = probs > threshold, probs == threshold
        num_equal = num_kept - above.count_nonzero(dim=-1).unsqueeze(1)
        is_kept = above | (equal & (equal.cumsum(dim=-1) <= num_equal))
    probs = torch.where(is_kept, probs, 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def _sorted_rising(probs: Tensor) -> Tensor:
    """Each row in rising order. NumPy's vectorised sort is 20 to 30 times as fast as torch's."""
    if probs.device.type == "cpu":
        return torch.from_numpy(np.sort(probs.numpy(), axis=-1))
    return probs.sort(dim=-1).values


def _counts(
    like: Tensor, tokens: Sequence[Sequence[int]], contexts: Sequence[TokenContext]
) -> Tensor:
    """How often each id occurs in each list, and in the ``path`` of its context: [len(tokens), V]
    in the dtype of ``like``.
    """
    width = like.shape[1]
    flat = [row * width + token for row, ids in enumerate(tokens) for token in ids]
    index, on_paths = _index(flat, like), _on_paths(contexts, like)
    if on_paths is not None:
        index = torch.cat([index, on_paths])
    if like.device.type == "cpu":
        counts = torch.bincount(index, minlength=len(tokens) * width)
        return counts.view(len(tokens), width).to(like.dtype)
    # On a GPU bincount waits for the device, twice. Sums of ones are exact in any order.
    counts = like.new_zeros(len(tokens) * width)
    counts.scatter_add_(0, index, torch.ones_like(index, dtype=like.dtype))
    return counts.view(len(tokens), width)


def _on_paths(contexts: Sequence[TokenContext], like: Tensor) -> Tensor | None:
    """Of the tokens on the paths of contexts, their index in counts [len(contexts), V], flat."""
    begins, drafts, num_tokens = dict[int, int](), list[Tensor](), 0
    rows, sources = list[int](), list[int]()
    for row, context in enumerate(contexts):
        if context.path is None:
            continue
        tokens, nodes = context.path
        if id(tokens) not in begins:
            begins[id(tokens)], num_tokens = num_tokens, num_tokens + len(tokens)
            drafts.append(tokens)
        rows += [row * like.shape[1]] * len(nodes)
        sources += [begins[id(tokens)] + node for node in nodes]
    if not rows:
        return None
    index = upload([rows, sources], like.device)
    return index[0] + torch.cat(drafts)[index[1]]


def _index(values: Sequence[int], like: Tensor) -> Tensor:
    return upload(values, like.device)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[len(values), 1] in ``dtype``, by default that of ``like``."""
    return upload(values, like.device, dtype or like.dtype).unsqueeze(1)
