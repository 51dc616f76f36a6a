"""Log-probabilities of tokens under the model's own law: the log-softmax of the raw logits.

Bias, penalties, temperature and truncation are wishes about the draw and do not show here, so the
figures of one prompt compare across requests. Knows nothing about how the tokens were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forethought.outputs import Logprob, TokenLogprobs


def score(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Scores of the chosen and of the ``k`` likeliest tokens of each row, left on the device.

    Args:
        logits: [N, V] float32, raw.
        tokens: [N] int64, the chosen tokens.
        k: how many of the likeliest; at most V are given.

    Returns:
        [N, 2 + 2 min(k, V)] float64: the chosen token's log-probability, its rank, then the
        likeliest tokens' log-probabilities and their ids.
    """
    law = logits.log_softmax(dim=-1)
    chosen = law.gather(1, tokens.unsqueeze(1))  # [N, 1]
    rank = (law > chosen).sum(dim=-1, keepdim=True) + 1
    values, ids = law.topk(min(k, law.shape[1]), dim=-1)
    return torch.cat([chosen.double(), rank.double(), values.double(), ids.double()], dim=1)


def read(scores: Sequence[float], token: int, k: int) -> TokenLogprobs:
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
    rows = score(logits, tokens, k).tolist()
    return [read(row, token, k) for row, token in zip(rows, next_ids, strict=True)]
