"""The default recipe of a method."""

import pytest

from forethought.errors import ParameterError
from forethought.evaluation.recipe import demo_recipes, recipe


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


def test_the_demo_compares_the_four_promised_methods_with_plain_first():
    names = [made.name for made in demo_recipes()]
    assert names == ["plain", "dynasor", "majority_vote", "dynasor+majority_vote"]
