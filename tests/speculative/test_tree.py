"""Shapes of drafts: who follows whom, who sees whom, and how static trees are written down."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.speculative.draft import Draft, DraftKind
from forethought.speculative.drafter import DraftRequest, check_draft
from forethought.speculative.tree import TokenTree, TreeChoices

#      -1
#     /  \
#    0    1
#   / \    \
#  2   3    4
#      |
#      5
BUSH = TokenTree((-1, -1, 0, 0, 1, 3))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(0, 12))
    return TokenTree(tuple(draw(st.integers(-1, node - 1)) for node in range(size)))


def test_a_tree_knows_its_depths_children_and_paths():
    assert BUSH.depths == [1, 1, 2, 2, 2, 3]
    assert [BUSH.children(node) for node in range(-1, 6)] == [[0, 1], [2, 3], [4], [], [5], [], []]
    assert BUSH.path(5) == [0, 3, 5]
    assert BUSH.path(-1) == []
    assert not BUSH.is_chain


def test_a_chain_is_a_thin_tree():
    chain = TokenTree.chain(4)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.depths == [1, 2, 3, 4]
    assert chain.is_chain
    assert torch.equal(chain.mask, torch.ones(4, 4, dtype=torch.bool).tril())
    assert TokenTree.chain(0).is_chain
    assert TokenTree.chain(0).mask.shape == (0, 0)


@given(trees())
def test_a_node_sees_its_path_and_nothing_else(tree: TokenTree):
    for node in range(len(tree)):
        assert tree.mask[node].nonzero().flatten().tolist() == tree.path(node)
        assert len(tree.path(node)) == tree.depths[node]
        assert tree.children(tree.parents[node]).count(node) == 1


@given(trees())
def test_a_tree_and_a_draft_agree_on_the_depth(tree: TokenTree):
    draft = Draft([0] * len(tree), tree.parents)
    assert draft.depth == max(tree.depths, default=0)
    assert Draft([0] * len(tree)).depth == max(TokenTree.chain(len(tree)).depths, default=0)


@given(trees(), st.integers(0, 5))
def test_a_truncated_tree_has_the_paths_that_are_short_enough(tree: TokenTree, depth: int):
    kept = [node for node in range(len(tree)) if tree.depths[node] <= depth]
    cut = tree.truncated(depth)
    assert cut.depths == [tree.depths[node] for node in kept]
    assert [[kept[n] for n in cut.path(new)] for new in range(len(cut))] == [
        tree.path(old) for old in kept
    ]


def test_a_node_before_its_parent_is_no_tree():
    with pytest.raises(AssertionError):
        TokenTree((-1, 1))


ALL = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 1], [0, 1, 0], [1], [1, 0], [1, 1]]
LEAVES = [[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize("choices", [ALL, LEAVES, str(ALL), " [[1,1],[1,0],[0,1,0],[0,0,0,0]] "])
def test_both_spellings_of_choices_are_the_same_tree(choices):
    tree = TreeChoices.parse(choices)
    expected = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]
    assert list(tree.paths) == expected
    assert tree.parents == (-1, -1, 0, 0, 1, 1, 2, 3, 6)
    assert tree.ranks == (0, 1, 0, 1, 0, 1, 0, 0, 0)
    assert (tree.depth, len(tree)) == (4, 9)


@given(
    st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
        min_size=1,
        max_size=8,
        unique=True,
    )
)
def test_choices_are_complete_sorted_and_lead_back_to_their_paths(paths):
    choices = TreeChoices.parse(paths)
    assert set(paths) <= set(choices.paths)
    assert list(choices.paths) == sorted(choices.paths, key=lambda path: (len(path), path))
    tree = TokenTree(choices.parents)
    for node, path in enumerate(choices.paths):
        assert tuple(choices.ranks[step] for step in tree.path(node)) == path
    assert TreeChoices.parse(list(choices.paths)) == choices


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ([], "one or more paths"),
        ([[0], []], "at least one rank"),
        ([[0], [-1]], "integers from 0"),
        ([[0], [True]], "integers from 0"),
        ([[0], [0.5]], "integers from 0"),
        ([[0], ["1"]], "integers from 0"),
        ([[0], [1, 0], [1, 0]], "twice"),
        ("[[0], [1", "not a list of lists"),
        ("open('x')", "not a list of lists"),
        ([0, 1], "not a list of lists"),
        (7, "not a list of lists"),
    ],
)
def test_what_is_no_tree_is_refused_with_the_reason(choices, why):
    with pytest.raises(ParameterError, match=why):
        TreeChoices.parse(choices)


# ---- what is left of a draft -------------------------------------------------------------------


def asked(draft: Draft, depth: int = 9, nodes: int = 9) -> DraftRequest:
    request = DraftRequest(0, [5, 6], 2, SamplingParams(), 0, 0, 0, depth, nodes)
    request.draft = draft
    return request


@pytest.mark.parametrize(("nodes", "kept"), [(4, 4), (3, 3), (2, 2), (1, 1)])
def test_a_tree_is_cut_to_as_many_nodes_as_there_is_room_for(nodes: int, kept: int) -> None:
    draft = Draft([1, 2, 3, 4], (-1, -1, 0, 1))
    found = check_draft(asked(draft, nodes=nodes), 10)
    assert list(found.tokens) == [1, 2, 3, 4][:kept]
    assert found.parents == (-1, -1, 0, 1)[:kept]


def test_points_that_repeat_a_sibling_go_and_tokens_that_were_drawn_stay() -> None:
    parents = (-1, -1, 0, 1)
    assert list(check_draft(asked(Draft([5, 5, 6, 7], parents)), 10).tokens) == [5, 6]
    drawn = Draft([5, 5, 6, 7], parents, DraftKind.IID, torch.full((4, 10), 0.1))
    assert list(check_draft(asked(drawn), 10).tokens) == [5, 5, 6, 7]


def test_nodes_that_are_too_deep_go_with_what_follows_them() -> None:
    found = check_draft(asked(Draft([1, 2, 3, 4], (-1, 0, 1, -1)), depth=1), 10)
    assert list(found.tokens) == [1, 4]
    assert list(check_draft(asked(Draft([1, 2, 3]), depth=2), 10).tokens) == [1, 2]
