"""Trees of the tokens that heads draft: the most probable combinations, for which requests."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from forethought.config.sampling import SamplingParams
from forethought.config.tree import TreeChoices
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.drafters.medusa import StaticTrees, TopTrees, top_nodes
from forethought.speculative.heads.medusa import DraftHeads

DISTRIBUTIONS = st.lists(
    st.lists(st.floats(-9.0, 0.0), min_size=1, max_size=4).map(lambda row: sorted(row)[::-1]),
    max_size=3,
)
"""Log-probabilities by level and rank."""


def all_paths(scores: list[list[float]]) -> list[tuple[float, tuple[int, ...]]]:
    """Every combination of ranks and what it scores, the slow and obvious way."""
    found = []
    for depth in range(1, len(scores) + 1):
        for path in itertools.product(*(range(len(row)) for row in scores[:depth])):
            total = 0.0
            for level, rank in enumerate(path):
                total += scores[level][rank]
            found.append((total, path))
    return sorted(found, reverse=True)


def paths(nodes: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """What stands on the way to each node."""
    found: list[tuple[int, ...]] = []
    for place, (parent, level, rank) in enumerate(nodes):
        assert -1 <= parent < place
        before = found[parent] if parent >= 0 else ()
        assert len(before) == level
        found.append((*before, rank))
    return found


@given(DISTRIBUTIONS, st.integers(0, 20))
def test_a_tree_is_of_the_most_probable_combinations_of_all(
    scores: list[list[float]], most: int
) -> None:
    every = all_paths(scores)
    value = {path: total for total, path in every}
    chosen = paths(top_nodes(scores, most))
    assert len(set(chosen)) == len(chosen) == min(most, len(every))
    assert [value[path] for path in chosen] == [total for total, _ in every[:most]]


@given(DISTRIBUTIONS, st.floats(-9.0, 0.0))
def test_what_is_too_unlikely_is_left_out(scores: list[list[float]], floor: float) -> None:
    chosen = paths(top_nodes(scores, 99, floor))
    assert sorted(chosen) == sorted(path for total, path in all_paths(scores) if total >= floor)


def test_what_is_impossible_is_left_out() -> None:
    chosen = paths(top_nodes([[0.0, -math.inf], [-math.inf]], 9))
    assert chosen == [(0,)]


def test_sure_heads_make_a_deep_tree_and_unsure_ones_a_wide_one() -> None:
    sure, unsure = [-0.01, -5.0, -6.0], [-1.0, -1.1, -1.2]
    assert paths(top_nodes([sure, sure, sure], 3)) == [(0,), (0, 0), (0, 0, 0)]
    assert paths(top_nodes([unsure, unsure, unsure], 3)) == [(0,), (1,), (2,)]


def request(**limits: int) -> DraftRequest:
    params = SamplingParams()
    made = DraftRequest(0, [1, 2], prompt_length=2, params=params, group=0, index=0, seed=0)
    made.max_draft_len, made.max_nodes = limits["depth"], limits["nodes"]
    return made


class Fixed(DraftHeads):
    """Heads that predict the same whatever they read.

    Args:
        logits: ``[heads, N, V]``.
        token_map: of the columns.
    """

    def __init__(self, logits: Tensor, token_map: Tensor | None = None) -> None:
        self._logits, self.token_map, self.vocab = logits, token_map, logits.shape[-1]

    def __call__(self, states: Tensor, count: int) -> Tensor:
        return self._logits[:count]


STATES = torch.zeros(1, 4)


@pytest.mark.parametrize(
    ("limits", "tokens", "parents"),
    [
        ({"depth": 2, "nodes": 9}, [3, 5, 1, 5], (-1, 0, -1, 2)),
        ({"depth": 2, "nodes": 2}, [3, 5], (-1, 0)),
        ({"depth": 1, "nodes": 9}, [3, 1], (-1, -1)),
        ({"depth": 0, "nodes": 9}, [], ()),
    ],
)
def test_a_request_gets_as_much_of_a_tree_as_it_may(
    limits: dict[str, int], tokens: list[int], parents: tuple[int, ...]
) -> None:
    distributions = torch.full((2, 1, 6), 1e-9)
    distributions[0, 0, 3], distributions[0, 0, 1], distributions[1, 0, 5] = 0.7, 0.3, 1.0
    asked = request(**limits)
    heads = Fixed(distributions.log())
    TopTrees(depth=2, max_nodes=4, min_prob=0.01).grow(heads, STATES, [asked])
    assert (list(asked.draft.tokens), asked.draft.parents) == (tokens, parents)


@pytest.mark.parametrize(
    ("limits", "tokens", "parents"),
    [
        ({"depth": 9, "nodes": 9}, [40, 50, 60, 40], (-1, -1, 0, 1)),
        ({"depth": 9, "nodes": 3}, [40, 50, 60], (-1, -1, 0)),
        ({"depth": 1, "nodes": 9}, [40, 50], (-1, -1)),
        ({"depth": 0, "nodes": 9}, [], ()),
    ],
)
def test_a_static_tree_is_cut_to_the_request_s_limit_in_target_ids(
    limits: dict[str, int], tokens: list[int], parents: tuple[int, ...]
) -> None:
    trees = StaticTrees(TreeChoices.parse([[0, 0], [1, 1]]), torch.device("cpu"))
    logits = torch.tensor([[[3.0, 2.0, 1.0]], [[2.0, 1.0, 3.0]]])
    asked = request(**limits)
    trees.grow(Fixed(logits, torch.tensor([40, 50, 60])), STATES, [asked])
    assert (list(asked.draft.tokens), asked.draft.parents) == (tokens, parents)


def test_each_request_has_a_tree_of_its_own_in_the_target_s_ids() -> None:
    logits: Any = torch.zeros(1, 2, 3)
    logits[0, 0, 2] = logits[0, 1, 1] = 9.0
    asked = [request(depth=1, nodes=1) for _ in range(2)]
    heads = Fixed(logits, torch.tensor([40, 50, 60]))
    TopTrees(depth=1, max_nodes=3, min_prob=0.0).grow(heads, STATES.expand(2, -1), asked)
    assert [list(each.draft.tokens) for each in asked] == [[60], [50]]
