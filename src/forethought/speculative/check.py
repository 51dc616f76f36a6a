"""What a drafter answered, made fit for verification: cut where it goes too far or astray.

Never trusts a drafter's own arithmetic. Knows nothing about who asked.
"""

from __future__ import annotations

from operator import index

from forethought.speculative.draft import NO_DRAFT, Draft, DraftKind
from forethought.speculative.drafter import DraftRequest


def checked(request: DraftRequest, vocab_size: int) -> Draft:
    """The request's draft as far as it can be verified.

    Left out are nodes that are not in the vocabulary, deeper than ``max_draft_len`` or more than
    ``max_nodes``, points that repeat a sibling, and whatever follows one of these.

    Raises:
        TypeError, ValueError: it is no draft at all.
    """
    draft = request.draft
    if draft is NO_DRAFT:
        return draft
    tokens = [index(token) for token in draft.tokens]
    parents = None if draft.parents is None else tuple(index(each) for each in draft.parents)
    if parents is not None and len(parents) != len(tokens):
        raise ValueError(f"{len(parents)} parents for {len(tokens)} tokens")
    if draft.kind is not DraftKind.POINT:
        _check_law(draft, len(tokens), vocab_size)
    bad = {node for node, token in enumerate(tokens) if not 0 <= token < vocab_size}
    if parents is None:
        end = min(len(tokens), request.max_nodes, request.max_draft_len, *bad)
        kept = list(range(end))
    else:
        distinct = draft.kind is DraftKind.POINT
        kept = _kept(tokens, parents, bad, request, distinct)
    if len(kept) == len(tokens):
        return Draft(tokens, parents, draft.kind, draft.q, draft.ids)
    if not kept:
        return NO_DRAFT
    place = {-1: -1, **{node: number for number, node in enumerate(kept)}}
    return Draft(
        tokens=[tokens[node] for node in kept],
        parents=None if parents is None else tuple(place[parents[node]] for node in kept),
        kind=draft.kind,
        q=None if draft.q is None else draft.q[kept],
        ids=draft.ids,
    )


def _check_law(draft: Draft, count: int, vocab_size: int) -> None:
    """Refuse a law that is not over the target's vocabulary, or the part of it that ``ids`` name.

    The contents of ``ids`` are trusted: looking would stall a GPU, and its owner made them once.
    """
    width = vocab_size if draft.ids is None else len(draft.ids)
    if draft.q is None or tuple(draft.q.shape) != (count, width) or width > vocab_size:
        raise ValueError(
            f"a draft of kind {draft.kind.value} needs the law of each of its {count} tokens, over "
            f"{width} ids"
        )


def _kept(
    tokens: list[int],
    parents: tuple[int, ...],
    bad: set[int],
    request: DraftRequest,
    distinct: bool,
) -> list[int]:
    """The nodes of a tree that stay; a node whose parent has gone goes with it."""
    depths: dict[int, int] = {-1: 0}
    siblings: set[tuple[int, int]] = set()
    for node, token in enumerate(tokens):
        parent = parents[node]
        if not -1 <= parent < node:
            raise ValueError(f"node {node} comes before its parent {parent}")
        depth = depths.get(parent, request.max_draft_len) + 1
        repeats = distinct and (parent, token) in siblings
        full = len(depths) > request.max_nodes
        if node in bad or repeats or full or depth > request.max_draft_len:
            continue
        siblings.add((parent, token))
        depths[node] = depth
    return [node for node in depths if node >= 0]
