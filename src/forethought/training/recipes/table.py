"""The recipes there are, by the name that ``forethought train`` has for them.

Knows nothing about how they work.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from forethought.config.registry import Registry
from forethought.config.speculation import DecodingBaseConfig
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import Recipe, TrainingSettings

RECIPES = {
    "draft-model": "forethought.training.recipes.draft_model:DraftModelRecipe",
    "eagle3": "forethought.training.recipes.eagle3:Eagle3Recipe",
    "medusa": "forethought.training.recipes.medusa:MedusaRecipe",
    "medusa-2": "forethought.training.recipes.medusa2:Medusa2Recipe",
    "mtp": "forethought.training.recipes.mtp:MtpRecipe",
    "redrafter": "forethought.training.recipes.redrafter:ReDrafterRecipe",
}


class RecipeClass(Protocol):
    """What the table's entries have."""

    Settings: type[TrainingSettings]
    """The recipe's own fields beside the loop's."""

    def build(self, settings: Any, texts: Sequence[Text], teacher: Teacher) -> Recipe:
        """The recipe that ``settings`` describe, its initial weights drawn here."""
        ...

    def decoding(self, directory: Path) -> DecodingBaseConfig:
        """How to decode with the drafter that was saved in ``directory``."""
        ...


def recipe(name: str) -> RecipeClass:
    """The recipe of this name.

    Raises:
        UnknownNameError: there is none.
    """
    found: RecipeClass = Registry("recipe", RECIPES).resolve(name)
    return found
