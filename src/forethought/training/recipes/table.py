"""Training recipes by their names for ``forethought train``, as listed in the table of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from forethought.config.drafter_table import recipes
from forethought.config.registry import Registry
from forethought.config.speculation import DecodingBaseConfig
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import TrainingRecipe, TrainingSettings


class RecipeClass(Protocol):
    """The interface of the classes in the table."""

    Settings: type[TrainingSettings]
    """The recipe's own fields beside the loop's."""

    def build(self, settings: Any, texts: Sequence[Text], teacher: Teacher) -> TrainingRecipe:
        """The recipe that ``settings`` describe, its initial weights drawn here."""
        ...

    def decoding(self, directory: Path) -> DecodingBaseConfig:
        """How to decode with the drafter that was saved in ``directory``."""
        ...


def recipe(name: str) -> RecipeClass:
    """The recipe of this name; raises UnknownNameError if there is none."""
    recipe_class: RecipeClass = Registry("recipe", recipes()).resolve(name)
    return recipe_class
