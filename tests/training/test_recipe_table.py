"""Every recipe of the table can be chosen on the command line, and has what the loop needs."""

import pytest

from forethought.cli.main import main
from forethought.config.drafter_table import recipes
from forethought.errors import UnknownNameError
from forethought.training.recipes.table import recipe
from forethought.training.trainer import TrainingSettings


def test_the_command_offers_every_recipe(capsys):
    assert main(["train", "--help"]) == 0
    assert f"{{{','.join(recipes())}}}" in "".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_has_settings_and_can_be_built_and_tried(name):
    found = recipe(name)
    assert issubclass(found.Settings, TrainingSettings)
    assert callable(found.build)
    assert callable(found.decoding)


@pytest.mark.parametrize(
    ("name", "older", "now"),
    [
        ("eagle3", {"unrolled": 3}, {"ttt_length": 3}),
        ("eagle3", {"unrolled_share": 0.5}, {"ttt_share": 0.5}),
        ("eagle3", {"places": [2, 1]}, {"layer_ids": [1, 2]}),
        ("redrafter", {"unrolled": 3}, {"draft_len": 3}),
        ("medusa", {"labels": "laws"}, {"labels": "distributions"}),
        ("medusa-2", {"backbone_labels": "laws"}, {"backbone_labels": "distributions"}),
        ("mtp", {"labels": "laws"}, {"labels": "distributions"}),
    ],
)
def test_older_names_of_settings_and_values_mean_the_same(name, older, now):
    settings = recipe(name).Settings
    assert settings(**older) == settings(**now)
    assert settings(**now).model_dump(include=set(now), mode="json") == now


def test_an_unknown_recipe_is_refused_with_those_that_there_are():
    with pytest.raises(UnknownNameError, match=r"Allowed: .*medusa"):
        recipe("telepathy")
