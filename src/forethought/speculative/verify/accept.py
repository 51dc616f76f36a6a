"""Acceptance: what a sequence gains in a step, and the token that ends it.

A draft is a tree below the root, the last known token. Its accepted path is found in one of two
ways; both start at the root and go on while a node has an accepted child::

    accept_points   the child that carries the token drawn at its parent; with the argmax of each
                    node this is greedy acceptance
    accept_tested   the first child that rejection sampling has accepted (``rejection.py``)

``result_of`` adds the token that is drawn after the path, and ``num_until_end`` is the rule for
the end of a generation. Each of them has one counterpart in C++ (``accept.h``), and
``num_accepted`` is greedy acceptance of chains on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from forethought.kv.staging import Download
from forethought.model.sampling.sampler import NO_TOKEN, draw_most_probable, most_probable
from forethought.outputs import TokenConfidence, TokenLogprobs
from forethought.speculative.drafter import NO_DRAFT, Draft
from forethought.speculative.verify.unread_drafts import UnreadDrafts

Scores = TypeVar("Scores", TokenLogprobs, TokenConfidence)


@dataclass(slots=True)
class VerificationResult:
    """The tokens of one sequence in a step."""

    path: list[int]
    """The accepted nodes, from the root down."""
    tokens: list[int]
    """Their tokens and one more, drawn by the target. Empty: the root's logits are not finite."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, under the model's own distribution, if requested."""
    confidences: list[TokenConfidence] | None = None
    """As ``logprobs``."""
    draft: Draft = field(default=NO_DRAFT, compare=False)
    """What was verified."""

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens; the last one is no longer followed, so its node is not kept."""
        del self.tokens[num_tokens:], self.path[max(num_tokens - 1, 0) :]
        for scores in (self.logprobs, self.confidences):
            if scores is not None:
                del scores[num_tokens:]


def accept_points(draft: Draft, drawn: Sequence[int]) -> list[int]:
    """The accepted path of drafted points, or of any draft of a greedy request.

    Args:
        draft: of N nodes.
        drawn: 1 + N: the target's own token after the root, then after each node.
    """
    path, last, parents = list[int](), -1, draft.parents
    for node, token in enumerate(draft.tokens):
        parent = node - 1 if parents is None else parents[node]
        if parent == last and drawn[1 + last] == token:
            last = node
            path.append(node)
        elif parents is None:
            break
    return path


def accept_tested(draft: Draft, accepted: Sequence[bool]) -> list[int]:
    """The accepted path of a draft whose nodes were tested one by one.

    Args:
        draft: of N nodes.
        accepted: 1 + N: of the root, which does not count, then of each node.
    """
    path, last = list[int](), -1
    for node in range(len(draft)):  # later siblings and children come after a node
        if accepted[1 + node] and draft.parent(node) == last:
            last = node
            path.append(node)
    return path


def result_of(draft: Draft, path: list[int], drawn: Sequence[int]) -> VerificationResult:
    """The tokens of an accepted path, and the one that is drawn after it.

    The path ends where no token can be drawn; its last node then counts as drawn, not as accepted.

    Args:
        draft: of N nodes.
        path: of some of them.
        drawn: 1 + N: the token that follows the root, then each node.
    """
    tokens, last = [draft.tokens[node] for node in path], path[-1] if path else -1
    if NO_TOKEN in drawn:
        end = next((at for at, node in enumerate((-1, *path)) if drawn[1 + node] == NO_TOKEN), None)
        if end is not None:
            return VerificationResult(path[: max(end - 1, 0)], tokens[:end], draft=draft)
    return VerificationResult(path, [*tokens, drawn[1 + last]], draft=draft)


def tokens_of(results: Sequence[VerificationResult]) -> list[int]:
    """The tokens of consecutive results."""
    if len(results) == 1:
        return results[0].tokens
    return [token for result in results for token in result.tokens]


def join_scores(parts: Sequence[list[Scores] | None]) -> list[Scores] | None:
    """The scores of consecutive results; None: they are not asked for."""
    if len(parts) == 1:
        return parts[0]
    joined = [score for part in parts for score in part or ()]
    return joined or None


def truncate(results: list[VerificationResult], num_tokens: int) -> None:
    """Keep the first tokens of consecutive results."""
    for number, result in enumerate(results, 1):
        if num_tokens <= len(result.tokens):
            result.truncate(num_tokens)
            del results[number:]
            return
        num_tokens -= len(result.tokens)


def verify_argmax(logits: Tensor, drafts: Sequence[Draft]) -> list[VerificationResult]:
    """The result of ``verify`` for greedy requests without edits of logits, scores or lossy rules.

    Args:
        logits: [R, V] float32: the 1 + N rows of each draft in turn.
        drafts: of any kind; greedy acceptance does not depend on it.
    """
    if logits.is_cpu:
        drawn = most_probable(logits)
    else:
        download = Download()
        unread, drawn_at = UnreadDrafts(drafts, download), download.add(draw_most_probable(logits))
        parts = download.read()
        unread.set(parts)
        drawn = parts[drawn_at]
    results, begin = list[VerificationResult](), 0
    for draft in drafts:
        end = begin + 1 + len(draft.tokens)
        path = accept_points(draft, drawn[begin:end])
        results.append(result_of(draft, path, drawn[begin:end]))
        begin = end
    return results


def num_until_end(tokens: Sequence[int], ends: Collection[int], num_left: int) -> int | None:
    """How many of the next tokens a generation gets, if one of them ends it; None: it goes on.

    ``min_tokens`` has no effect here: until then the tokens in ``ends`` are not drawn
    (``model.sampling.distribution``).

    Args:
        tokens: the next ones.
        ends: tokens that end the generation, which belong to it.
        num_left: tokens that it may still have, at least one.
    """
    for size, token in enumerate(tokens, 1):
        if token in ends or size == num_left:
            return size
    return None


def num_accepted(drafted: Tensor, decoded: Tensor, draft_lens: Tensor) -> Tensor:
    """``accept_points`` of chains on a GPU: how many tokens of each row, int64 ``[B]``.

    Args:
        drafted: int64 ``[B, K]``.
        decoded: int64 ``[B, K + 1]``, the most probable tokens after the root and each of them.
        draft_lens: int64 ``[B]``, tokens of each draft that count.
    """
    size = drafted.shape[1]
    counts = torch.arange(size, device=drafted.device) < draft_lens[:, None]
    return ((drafted == decoded[:, :size]) & counts).long().cumprod(1).sum(1)
