"""EAGLE-2's trees: what is expanded, what is kept, and what happens between equals."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forethought.speculative.dynamic_tree import DynamicTreeBuilder, Expansion, top_indices, tree_of


def distributions(*rows: list[float]) -> Tensor:
    """Logits of these probabilities."""
    return torch.tensor(rows).log()


def grown(width: int, *levels: Tensor) -> Expansion:
    expansion = Expansion(width)
    expansion.begin(levels[0])
    for level in levels[1:]:
        expansion.grow(level)
    return expansion


# Behind the root a .6, b .3, c .1. Behind a: a .5, b .4; behind b: c .9, a .1.
ROOT = distributions([0.6, 0.3, 0.1])
SECOND = distributions([0.5, 0.4, 0.1], [0.1, 0.0001, 0.8999])


def test_the_best_children_of_all_beams_go_on() -> None:
    expansion = grown(2, ROOT, SECOND)
    # aa .3, bc .27, ab .24, ba .03: the two best are children of different beams
    assert expansion.beams.tolist() == [[0, 2]]
    assert expansion.above.tolist() == [[0, 1]]
    assert expansion.seen[0].tolist() == [[True, False, True, False], [False, True, False, True]]


def test_both_beams_may_follow_the_same_one() -> None:
    expansion = grown(2, distributions([0.9, 0.05, 0.05]), SECOND)
    assert expansion.above.tolist() == [[0, 0]]
    assert expansion.seen[0].tolist() == [[True, False, True, False], [True, False, False, True]]


def test_the_best_nodes_of_all_levels_are_kept_in_the_order_they_were_made() -> None:
    expansion = grown(2, ROOT, SECOND)
    # a .6, then b .3 and aa .3 (nearly), bc .27, ab .24, ba .03
    kept = expansion.kept(4, None)[0].tolist()
    assert kept[0] == [0, 0, -1]
    draft = tree_of(kept, 4)
    assert (list(draft.tokens), draft.parents) == ([0, 1, 0, 2], (-1, -1, 0, 1))
    assert (list(tree_of(kept, 1).tokens), tree_of(kept, 1).parents) == ([0], (-1,))


def test_tokens_are_the_targets_and_parents_are_not_touched_by_that() -> None:
    ids = torch.tensor([70, 80, 90])
    draft = tree_of(grown(2, ROOT, SECOND).kept(4, ids)[0].tolist(), 4)
    assert (list(draft.tokens), draft.parents) == ([70, 80, 70, 90], (-1, -1, 0, 1))


def test_of_equal_scores_the_first_wins_so_that_parents_come_before_sure_children() -> None:
    sure = torch.tensor([[0.0, -math.inf, -math.inf]])
    expansion = grown(1, sure, sure, sure)
    for total in (1, 2, 3):
        draft = tree_of(expansion.kept(total, None)[0].tolist(), total)
        assert draft.parents == tuple(range(-1, total - 1))
    assert top_indices(torch.tensor([[1.0, 2.0, 2.0, 1.0]]), 3).tolist() == [[1, 2, 0]]


def test_a_batch_is_its_requests_one_by_one() -> None:
    torch.manual_seed(0)
    levels = [torch.randn(3, 9), *(torch.randn(3 * 2, 9) for _ in range(3))]
    together = grown(2, *levels).kept(7, None).tolist()
    for row in range(3):
        mine = [levels[0][row : row + 1], *(each[2 * row : 2 * row + 2] for each in levels[1:])]
        assert grown(2, *mine).kept(7, None).tolist() == [together[row]]


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 4),
    depth=st.integers(1, 4),
    total=st.integers(1, 20),
    ties=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_what_is_kept_is_a_tree_of_the_best_scores(
    width: int, depth: int, total: int, ties: bool, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)

    def logits(rows: int) -> Tensor:
        drawn = torch.randn(rows, 6, generator=source)
        return drawn.round() * (1 if ties else 0.01) * 50 if ties else drawn

    expansion = grown(width, logits(1), *(logits(width) for _ in range(depth - 1)))
    made = width + (depth - 1) * width**2
    for count in (total, min(total, 3)):
        draft = tree_of(expansion.kept(total, None)[0].tolist(), count)
        assert len(draft) == min(count, total, made)
        assert all(draft.parent(node) < node for node in range(len(draft)))  # none is missing
        pairs = [(draft.parent(node), draft.tokens[node]) for node in range(len(draft))]
        assert len(set(pairs)) == len(pairs)
        assert draft.depth <= depth


def test_capacity_is_for_the_nodes_kept_or_the_beams_read_whichever_are_more() -> None:
    assert DynamicTreeBuilder(10, 59).nodes(6) == 59
    assert DynamicTreeBuilder(10, 20).nodes(6) == 50
    assert DynamicTreeBuilder(3, 30).nodes(1) == 3
    assert DynamicTreeBuilder(2, 30).nodes(2) == 6
