"""Static trees that fit a measured profile."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from forethought.bench.tree_fit import (
    AcceptanceProfile,
    ProfileCount,
    comb,
    fit_tree,
    measure_profile,
    widened,
)
from forethought.config.drafters import DraftTargetDecodingConfig, NGramDecodingConfig
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.tree import TreeChoices
from forethought.errors import ParameterError
from medusa_heads import random_heads
from models import prompts, tiny

PROFILE = AcceptanceProfile(((0.6, 0.2, 0.1), (0.5, 0.25, 0.05), (0.4, 0.3, 0.1)))


def test_a_tree_grows_by_the_most_probable_node_that_hangs_on_it():
    assert fit_tree(PROFILE, 1).choices == ((0,),)
    assert fit_tree(PROFILE, 2).choices == ((0,), (0, 0))  # 0.30 before the 0.20 of (1,)
    assert fit_tree(PROFILE, 3).choices == ((0,), (1,), (0, 0))
    assert fit_tree(PROFILE, 3).acceptance_length == pytest.approx(1 + 0.6 + 0.2 + 0.3)
    assert fit_tree(PROFILE, 4).choices == ((0,), (1,), (0, 0), (0, 1))


def trees(nodes: int) -> list[set[tuple[int, ...]]]:
    """All trees of so many nodes over two levels of two ranks, by brute force."""
    paths = [path for n in (1, 2) for path in itertools.product(range(2), repeat=n)]
    return [
        set(chosen)
        for chosen in itertools.combinations(paths, nodes)
        if all(path[:-1] in chosen for path in chosen if len(path) > 1)
    ]


def test_no_tree_of_its_size_is_expected_to_accept_more():
    rng = random.Random(0)
    for _ in range(50):
        profile = AcceptanceProfile(
            tuple(tuple(sorted((rng.random() / 2, rng.random() / 2))) for _ in range(2))
        )
        for nodes in range(1, 7):
            best = max(1 + sum(map(profile.chance, tree)) for tree in trees(nodes))
            assert fit_tree(profile, nodes).acceptance_length == pytest.approx(best)


def test_a_fitted_tree_is_one_that_configurations_take():
    tree = fit_tree(PROFILE, 9)
    assert TreeChoices.parse(tree.choices).paths == tree.choices
    config = MedusaDecodingConfig(speculative_model=Path("x"), medusa_choices=tree.choices)
    assert (config.max_draft_len, config.max_total_draft_tokens) == (tree.depth, 9)


def test_ranks_that_are_never_right_are_left_out():
    profile = AcceptanceProfile(((0.5, 0.0), (0.0, 0.0)))
    assert fit_tree(profile, 10).choices == ((0,),)


def test_counting_sees_only_the_levels_that_were_reached():
    count = ProfileCount(2, 3)
    drafted = comb(2, 3)
    assert drafted == ((0,), (1,), (2,), (0, 0), (0, 1), (0, 2))
    for accepted in ((), (0,), (0, 1), (0, 0), (2,)):
        count.record(drafted, accepted)
    assert count.profile().chances == ((3 / 5, 0.0, 1 / 5), (1 / 3, 1 / 3, 0.0))
    # (2,) ends where the tree does: nothing hangs on it that could be right or wrong


def test_a_profile_is_measured_by_decoding(tmp_path: Path):
    heads = random_heads(tmp_path)
    config = MedusaDecodingConfig(speculative_model=heads, num_medusa_heads=2)
    profile = measure_profile(
        tiny("llama"), config, prompts((4, 9)), max_tokens=60, dtype="float32"
    )
    assert len(profile.chances) in (1, 2)
    assert all(0 <= chance <= 1 for level in profile.chances for chance in level)
    assert 0 < sum(profile.chances[0]) < 1


def test_a_profile_is_of_a_static_tree_whatever_trees_are_drafted(tmp_path: Path):
    heads = random_heads(tmp_path)
    config = MedusaDecodingConfig(
        speculative_model=heads, tree="most_probable", min_draft_probability=0.1
    )
    wide = widened(config, 4)
    assert isinstance(wide, MedusaDecodingConfig)
    assert (wide.tree, wide.medusa_choices) == ("choices", comb(3, 4))


def test_a_draft_model_that_is_the_target_is_always_right_at_rank_0():
    config = DraftTargetDecodingConfig(speculative_model=tiny("llama"), max_draft_len=3)
    profile = measure_profile(
        tiny("llama"), config, prompts((4, 9)), max_tokens=40, dtype="float32"
    )
    assert [level[0] for level in profile.chances] == [1.0] * 3
    assert fit_tree(profile, 8).choices == ((0,), (0, 0), (0, 0, 0))


def test_only_drafters_with_static_trees_can_be_fitted():
    with pytest.raises(ParameterError, match="NGramDecodingConfig has no static trees"):
        widened(NGramDecodingConfig())
