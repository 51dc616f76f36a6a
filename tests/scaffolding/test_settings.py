"""Settings as annotated fields: the constructor that they make, what it refuses, and their text."""

import inspect
from dataclasses import KW_ONLY
from typing import Literal

import pytest

from forethought.errors import ParameterError
from forethought.scaffolding import NativeGenerationController
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.settings import (
    REQUIRED,
    PositiveInt,
    Probability,
    Words,
    required,
    setting,
    settings_of,
    with_settings,
)


@with_settings
class Sampling(Controller):
    generation_controller: Controller = required("Cloned for each sample.")
    num_samples: PositiveInt = setting(4, "Samples.")
    _: KW_ONLY
    markers: Words = setting(("so",), "Texts that are looked for.")
    on_failure: Literal["raise", "drop"] = setting("raise", "What a failure does.")


@with_settings
class Voting(Sampling):
    num_samples: PositiveInt = setting(8, "Voters.")
    threshold: Probability | None = setting(None, "Share of the votes.")

    def __post_init__(self):
        self.is_strict = self.threshold == 1.0


PLAIN = NativeGenerationController()


def test_settings_are_given_by_position_those_of_the_base_first_or_by_name():
    voting = Voting(PLAIN, 2, 0.5, on_failure="drop")
    assert (voting.num_samples, voting.threshold, voting.on_failure) == (2, 0.5, "drop")
    assert Voting(PLAIN).num_samples == 8
    assert Sampling(PLAIN).num_samples == 4
    assert list(inspect.signature(Voting).parameters) == [
        "generation_controller",
        "num_samples",
        "threshold",
        "markers",
        "on_failure",
    ]


def test_what_follows_kw_only_is_given_by_name_alone():
    with pytest.raises(TypeError, match="Sampling: too many positional arguments"):
        Sampling(PLAIN, 2, ["so"])
    with pytest.raises(TypeError, match="Sampling: missing a required argument"):
        Sampling()
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_sample'"):
        Sampling(PLAIN, num_sample=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 0}, "invalid num_samples: got 0, but it must be at least 1"),
        ({"num_samples": True}, "got True, but it must be a whole number"),
        ({"num_samples": "2"}, "got '2', but it must be a whole number"),
        ({"markers": "so"}, "got 'so', but it must be a list"),
        ({"markers": [" "]}, r"invalid markers: got \[' '\]"),
        ({"on_failure": "drops"}, "it must be 'raise' or 'drop'"),
        ({"generation_controller": "plain"}, "invalid generation_controller: .* Give a controller"),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused_by_name(settings, message):
    with pytest.raises(ParameterError, match=message):
        Sampling(**{"generation_controller": PLAIN, **settings})


def test_the_complaint_about_a_union_names_all_of_its_members():
    @with_settings
    class Drawing(Controller):
        concurrency: PositiveInt | Literal["doubling"] = setting(1, "Samples at once.")

    with pytest.raises(ParameterError, match="it must be a whole number or be 'doubling'"):
        Drawing("tripling")


def test_derived_attributes_are_made_after_all_settings_and_each_clone_has_them():
    voting = Voting(PLAIN, threshold=1.0)
    assert voting.is_strict
    assert type(voting.task_collections) is dict, "the constructor of the plain base has run"
    assert vars(voting.clone()).keys() == vars(voting).keys()
    assert voting.clone().is_strict


def test_a_subclass_may_have_a_constructor_of_its_own():
    class Mine(Voting):
        def __init__(self, note):
            self.note = note
            super().__init__(PLAIN, num_samples=3)

    mine = Mine("x")
    assert (mine.note, mine.num_samples) == ("x", 3)
    assert list(settings_of(Mine)) == ["note"]
    assert settings_of(Mine)["note"].default is REQUIRED


def test_a_subclass_without_a_constructor_has_that_of_its_base():
    class Louder(Voting):
        pass

    @with_settings
    class Loudest(Louder):
        volume: PositiveInt = setting(1, "How loud it is.")

    assert Louder(PLAIN).num_samples == 8
    assert settings_of(Louder) is settings_of(Voting)
    assert Loudest(PLAIN, volume=3).volume == 3


def test_each_setting_says_its_type_range_default_and_meaning():
    settings = settings_of(Voting)
    texts = {name: (each.type_text, each.help) for name, each in settings.items()}
    assert texts["num_samples"] == ("int >= 1", "Voters.")
    assert texts["threshold"] == ("float in [0, 1] or None", "Share of the votes.")
    assert texts["markers"][0] == "list of str"
    assert texts["on_failure"][0] == '"raise" or "drop"'
    assert settings["num_samples"].default == Voting.num_samples == 8
    assert not hasattr(Voting, "generation_controller")


def test_a_setting_without_an_annotation_is_a_mistake_of_the_class():
    with pytest.raises(TypeError, match=r"Bare\.num_samples is a setting without an annotation"):

        @with_settings
        class Bare(Controller):
            num_samples = setting(4, "Samples.")
