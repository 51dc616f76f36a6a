"""The next tokens of the rows of one step. Knows nothing about sequences, pages or text.

No token follows where the largest of the model's own logits is NaN or infinite: ``NO_TOKEN`` is
drawn. -inf is a logit like others as long as one is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forethought.model.sampling import logprobs
from forethought.model.sampling.draw import pick
from forethought.model.sampling.law import (
    TokenContext,
    edit_and_peaks,
    law_and_peaks,
    wants_edits,
)
from forethought.outputs import TokenLogprobs

NO_TOKEN = -1
"""Is drawn where the model's logits are not finite."""


@dataclass(slots=True)
class Choice:
    """What was drawn for N rows."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    """Under the model's own law, for the rows whose params ask for them."""


def choose(logits: Tensor, contexts: Sequence[TokenContext], coins: Sequence[float]) -> Choice:
    """Draw the next token of each row; the results cross to the host once.

    Args:
        logits: [N, V] float32, the model's own; not modified.
        contexts: N contexts.
        coins: N numbers in [0, 1); those of greedy rows are not looked at.
    """
    if not contexts:
        return Choice([], [])
    return report(logits, contexts, draw_tokens(logits, contexts, coins))


def draw_tokens(logits: Tensor, contexts: Sequence[TokenContext], coins: Sequence[float]) -> Tensor:
    """The next token of each row, [N] int64, left on the device. Arguments as of ``choose``.

    A step of greedy rows takes the largest logits: no softmax, no coin.
    """
    if all(context.params.greedy for context in contexts):
        return _likeliest(logits, contexts)
    law, peaks = law_and_peaks(logits, contexts)
    return where_finite(pick(law, coins), peaks)


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
    edited, peaks = edit_and_peaks(logits, contexts)
    return where_finite(edited.max(dim=-1).indices, peaks)


def report(logits: Tensor, contexts: Sequence[TokenContext], drawn: Tensor) -> Choice:
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
        return Choice(drawn.tolist(), [None] * len(contexts))

    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    most = max(k for k in wanted if k is not None)
    scores = logprobs.score(logits[index], drawn[index].clamp(min=0), most)
    # Token ids are exact in float64, so that one transfer brings everything.
    host = torch.cat([drawn.double(), scores.flatten()]).tolist()
    tokens = [int(token) for token in host[: len(contexts)]]
    found: list[TokenLogprobs | None] = [None] * len(contexts)
    width = scores.shape[1]
    for place, row in enumerate(rows):
        start = len(contexts) + place * width
        found[row] = logprobs.read(host[start : start + width], tokens[row], wanted[row] or 0)
    return Choice(tokens, found)
