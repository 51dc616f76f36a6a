"""Methods named by what they are made of."""

import pytest

from forethought import methods
from forethought.errors import ParameterError, UnknownNameError
from forethought.methods import DynasorGenerationController, MajorityVoteController
from forethought.methods.stack import StackedMethod, parameters, split, stack
from forethought.scaffolding import NativeGenerationController


def test_one_name_is_that_method():
    assert type(stack("plain")) is NativeGenerationController
    assert stack("dynasor", chunk_size=7).chunk_size == 7


def test_the_first_name_is_the_innermost_method():
    outer = stack("dynasor+majority_vote")
    assert type(outer) is MajorityVoteController
    assert type(outer.generation_controller) is DynasorGenerationController


def test_a_setting_goes_to_the_method_that_has_it():
    outer = stack("dynasor+majority_vote", default_sample_num=5, certainty_threshold=2)
    assert outer.default_sample_num == 5
    assert outer.generation_controller.certainty_threshold == 2


def test_of_two_methods_that_have_it_the_outer_one_gets_it():
    outer = stack("majority_vote+majority_vote", default_sample_num=3)
    assert outer.default_sample_num == 3
    assert outer.generation_controller.default_sample_num == 1


def test_a_setting_that_none_of_them_has_is_refused_with_those_they_have():
    with pytest.raises(ParameterError, match=r"did you mean 'chunk_size'.*default_sample_num"):
        stack("dynasor+majority_vote", chunk_sise=3)


def test_a_method_that_takes_none_inside_it_is_refused():
    with pytest.raises(ParameterError, match="'dynasor' cannot be put around"):
        stack("plain+dynasor")


def test_two_methods_for_one_place_are_refused():
    with pytest.raises(ParameterError, match="two methods"):
        stack("dynasor+majority_vote", generation_controller="plain")


@pytest.mark.parametrize("spec", ["", "+", "nonsense", "dynasor+", "dynasor+nonsense"])
def test_unknown_names_are_refused(spec):
    with pytest.raises(UnknownNameError):
        stack(spec)


def test_the_parameters_of_a_stack_are_those_of_all_its_methods():
    both = parameters("dynasor+majority_vote")
    assert both.keys() == parameters("dynasor").keys() | parameters("majority_vote").keys()


def test_samples_behind_a_name_are_that_methods():
    outer = stack("majority_vote@4+majority_vote@2", early_stop=False)
    assert (outer.default_sample_num, outer.generation_controller.default_sample_num) == (2, 4)
    assert split("plain+majority_vote@12") == [
        StackedMethod("plain"),
        StackedMethod("majority_vote", 12),
    ]
    assert parameters("majority_vote@4") == parameters("majority_vote")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("majority_vote@", "follows @"),
        ("majority_vote@0", "follows @"),
        ("majority_vote@-1", "follows @"),
        ("majority_vote@2@3", "follows @"),
        ("plain@3", "'plain' draws no samples"),
    ],
)
def test_samples_that_cannot_be_are_refused(spec, said):
    with pytest.raises(ParameterError, match=said):
        stack(spec)


@pytest.mark.parametrize("name", methods.REWARDS)
def test_a_reward_in_the_place_of_a_method_is_refused_with_what_to_do(name):
    for spec in (name, f"plain+{name}"):
        with pytest.raises(ParameterError, match=f"reward_controller={name}"):
            stack(spec)


def test_samples_given_twice_are_refused():
    with pytest.raises(ParameterError, match="samples twice"):
        stack("majority_vote@3", default_sample_num=3)
