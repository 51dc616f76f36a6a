"""Shapes of drafts: who follows whom, who sees whom, and how static trees are written down."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forethought.config.sampling import SamplingParams
from forethought.config.tree import TreeChoices, node_depths
from forethought.errors import ParameterError
from forethought.model.batch import ancestors
from forethought.speculative.drafter import Draft, DraftKind, DraftRequest, check_draft

#      -1
#     /  \
#    0    1
#   / \    \
#  2   3    4
#      |
#      5
PARENTS = (-1, -1, 0, 0, 1, 3)


def path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root's child down to ``node``."""
    return [] if node < 0 else [*path(parents, parents[node]), node]


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(0, 12))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(size))


def test_children_of_the_root_have_depth_one():
    assert node_depths(PARENTS) == [1, 1, 2, 2, 2, 3]
    assert node_depths(()) == []


@given(trees())
def test_the_depth_of_a_node_is_the_length_of_its_path(parents: tuple[int, ...]):
    paths = [path(parents, node) for node in range(len(parents))]
    assert node_depths(parents) == list(map(len, paths))
    draft = Draft([0] * len(parents), parents)
    assert draft.depths == list(map(len, paths))
    assert draft.depth == max(map(len, paths), default=0)


@given(trees())
def test_a_node_sees_its_path_and_nothing_else(parents: tuple[int, ...]):
    mask = ancestors(parents)
    for node in range(len(parents)):
        assert mask[node].nonzero().flatten().tolist() == path(parents, node)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_draft_without_parents_is_the_chain_of_its_tokens(length: int):
    chain, tree = Draft([0] * length), Draft([0] * length, tuple(range(-1, length - 1)))
    assert chain.depths == tree.depths == list(range(1, length + 1))
    assert chain.depth == tree.depth == length
    assert [chain.parent(node) for node in range(length)] == list(tree.parents or ())


def test_a_node_before_its_parent_is_no_draft():
    with pytest.raises(ValueError, match="node 1 comes before its parent 1"):
        check_draft(asked(Draft([1, 2], (-1, 1))), 10)


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
    for node, ranks in enumerate(choices.paths):
        assert tuple(choices.ranks[step] for step in path(choices.parents, node)) == ranks
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
def test_a_tree_is_cut_to_as_many_nodes_as_the_request_may_have(nodes: int, kept: int) -> None:
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
