"""The default recipe of a method."""

import pytest

from forethought.errors import ParameterError
from forethought.evaluation.recipe import recipe, with_each_count, within_each
from forethought.scaffolding.budget import Budget


@pytest.mark.parametrize("spec", ["plain", "dynasor"])
def test_a_method_of_one_chain_is_greedy(spec):
    assert recipe(spec, temperature=0.7).sampling_params["temperature"] == 0.0


@pytest.mark.parametrize("spec", ["majority_vote", "dynasor+majority_vote", "plain+majority_vote"])
def test_a_method_of_several_chains_draws_them(spec):
    made = recipe(spec, temperature=0.7, samples=5, max_tokens=30)
    assert made.sampling_params == {"temperature": 0.7, "top_p": 1.0, "max_tokens": 30}
    assert made.controller.default_sample_num == 5


def test_settings_reach_the_method_and_win_over_the_number_of_samples():
    made = recipe("majority_vote", samples=5, settings={"default_sample_num": 3})
    assert made.controller.default_sample_num == 3
    with pytest.raises(ParameterError):
        recipe("plain", settings={"default_sample_num": 3})


def test_samples_behind_a_name_win_over_the_default_and_chains_multiply():
    made = recipe("majority_vote@3+majority_vote", samples=5)
    assert made.controller.default_sample_num == 5
    assert made.controller.generation_controller.default_sample_num == 3
    assert made.chains == 15
    assert recipe("majority_vote@3", samples=5).chains == 3
    assert recipe("plain").chains == 1


def test_samples_that_are_drawn_one_after_the_other_are_one_chain():
    settings = {"verifier": "countdown"}
    assert recipe("repeated_sampling@16", settings=settings).chains == 1
    assert recipe("repeated_sampling@16", settings={**settings, "concurrency": 4}).chains == 4
    assert (
        recipe("repeated_sampling@16", settings={**settings, "concurrency": "doubling"}).chains
        == 16
    )
    assert recipe("majority_vote@3+repeated_sampling@16", settings=settings).chains == 3


def test_the_outermost_method_that_draws_samples_is_tried_with_each_number():
    assert with_each_count("plain", ["2", "4"]) == ["plain"]
    assert with_each_count("dynasor+majority_vote", ["2", " 4"]) == [
        "dynasor+majority_vote@2",
        "dynasor+majority_vote@4",
    ]
    assert with_each_count("majority_vote@3", ["2"]) == ["majority_vote@3"]
    assert with_each_count("majority_vote@3+majority_vote", ["2"]) == [
        "majority_vote@3+majority_vote@2"
    ]


def test_samples_without_a_temperature_are_refused_but_not_a_single_one_or_proposed_steps():
    with pytest.raises(ParameterError, match="all 3 samples of MajorityVoteController"):
        recipe("majority_vote@3+majority_vote@1", temperature=0.0)
    with pytest.raises(ParameterError, match="all 5 samples of TreeOfThoughtsController"):
        recipe("tree_of_thoughts@5", temperature=0.0)
    assert recipe("majority_vote@1", temperature=0.0).chains == 1
    recipe("tree_of_thoughts@5", temperature=0.0, settings={"thoughts": "propose"})


def test_the_number_of_samples_is_among_the_settings():
    assert recipe("majority_vote", samples=5).to_dict()["settings"] == {"default_sample_num": "5"}
    assert recipe("majority_vote@5").to_dict()["settings"] == {}


def test_a_recipe_is_named_by_the_budget_that_is_tried():
    plain = recipe("plain")
    some, none = within_each(plain, [Budget(tokens=50), None])
    assert (some.name, some.budget.tokens) == ("plain in 50", 50)
    assert none is plain
    assert some.to_dict() == {
        "name": "plain in 50",
        "sampling_params": {"temperature": 0.0, "top_p": 1.0},
        "settings": {},
        "budget": {"tokens": 50, "calls": None, "seconds": None},
        "repeats": 1,
    }
