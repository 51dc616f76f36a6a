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


def test_an_unknown_recipe_is_refused_with_those_that_there_are():
    with pytest.raises(UnknownNameError, match=r"Allowed: .*medusa"):
        recipe("telepathy")
