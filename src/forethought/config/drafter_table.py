"""The table of drafters: one entry each, which everything that lists drafters reads.

What reads which field::

    decoding_type, aliases, config    speculative_config: config/speculation.py
    drafter                           the engine: speculative/registry.py
    recipes                           forethought train: training/recipes/table.py, cli/train.py
    option..., embedded_...           a drafter's name alone: config/speculation.py, cli/options.py
    inside                            a target that ships its drafter: speculative/registry.py

Classes are written ``"module:Class"`` and imported when they are first asked for, so that the table
costs no import of torch. CONTRIBUTING.md, "Adding a drafter", lists what else a drafter needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forethought import assets
from forethought.errors import UnknownNameError

_CONFIG = "forethought.config.drafters"
_DRAFTER = "forethought.speculative.drafters"
_RECIPE = "forethought.training.recipes"


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """What is registered of one drafter."""

    decoding_type: str
    """Its name in a ``speculative_config``; case, ``_`` and ``-`` do not matter there."""
    config: str
    """Class of its configuration, derived from ``DecodingBaseConfig``."""
    drafter: str | None = None
    """Class with ``build(config, target)``, which loads its weights; None: the configuration
    resolves to another drafter's."""
    aliases: tuple[str, ...] = ()
    """Other spellings of ``decoding_type``."""
    option: str | None = None
    """Its name for ``--speculative``, a spelling of ``decoding_type``; None: not offered there."""
    option_help: str = ""
    """What ``--help`` says about it in particular."""
    option_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its configuration that ``--speculative`` sets unless the user does."""
    embedded_model: str | None = None
    """Directory under ``assets`` of the weights that draft for the embedded reasoner."""
    embedded_defaults: Mapping[str, Any] = field(default_factory=dict)
    """As ``option_defaults``, where no ``--draft-model`` is given; these win."""
    inside: str | None = None
    """Function of a target's directory that says which modules of it are in there; None: it is in
    no target."""
    recipes: Mapping[str, str] = field(default_factory=dict)
    """Name for ``forethought train`` -> class of the training recipe."""

    def embedded_dir(self) -> Path | None:
        """Directory of the embedded reasoner's weights for it; None: it has none here."""
        folder = None if self.embedded_model is None else assets.heads_dir(self.embedded_model)
        return folder if folder is not None and folder.is_dir() else None


DRAFTERS: tuple[DrafterSpec, ...] = (
    DrafterSpec(
        "NGram",
        f"{_CONFIG}:NGramDecodingConfig",
        f"{_DRAFTER}.ngram:NGramDrafter",
        option="ngram",
    ),
    DrafterSpec(
        "Suffix",
        f"{_CONFIG}:SuffixDecodingConfig",
        f"{_DRAFTER}.suffix:SuffixDrafter",
        option="suffix",
    ),
    DrafterSpec(
        "Draft_Target",
        f"{_CONFIG}:DraftTargetDecodingConfig",
        f"{_DRAFTER}.draft_target:DraftTargetDrafter",
        aliases=("Draft_Model",),
        option="draft_target",
        option_defaults={"max_draft_len": 4},
        embedded_model="drafter",
        embedded_defaults={"max_draft_len": 8},  # the embedded draft model is nearly always right
        recipes={"draft-model": f"{_RECIPE}.draft_model:DraftModelRecipe"},
    ),
    DrafterSpec(
        "Pearl",
        f"{_CONFIG}:PearlDecodingConfig",
        f"{_DRAFTER}.pearl:PearlDrafter",
        option="pearl",
        option_defaults={"max_draft_len": 4},
        embedded_model="drafter",
        embedded_defaults={"max_draft_len": 8},
    ),
    DrafterSpec(
        "Eagle",
        f"{_CONFIG}:EagleDecodingConfig",
        f"{_DRAFTER}.eagle:EagleDrafter",
        aliases=("Eagle3",),
        option="eagle3",
        option_defaults={"max_draft_len": 5},
        embedded_model="eagle3",
        recipes={"eagle3": f"{_RECIPE}.eagle3:Eagle3Recipe"},
    ),
    DrafterSpec(
        "Medusa",
        "forethought.config.medusa:MedusaDecodingConfig",
        f"{_DRAFTER}.medusa:MedusaDrafter",
        option="medusa",
        option_help="medusa: with the most probable trees, whatever tree the heads' config has",
        option_defaults={"tree": "most_probable"},  # the published static tree suits larger batches
        embedded_model="medusa",
        recipes={
            "medusa": f"{_RECIPE}.medusa:MedusaRecipe",
            "medusa-2": f"{_RECIPE}.medusa2:Medusa2Recipe",
        },
    ),
    DrafterSpec(
        "MTP",
        f"{_CONFIG}:MTPDecodingConfig",
        f"{_DRAFTER}.mtp:MTPDrafter",
        option="mtp",
        option_defaults={"max_draft_len": 6},
        inside="forethought.speculative.heads.mtp_layout:find_modules",
        embedded_model="mtp",
        recipes={"mtp": f"{_RECIPE}.mtp:MtpRecipe"},
    ),
    DrafterSpec(
        "ReDrafter",
        f"{_CONFIG}:ReDrafterDecodingConfig",
        f"{_DRAFTER}.redrafter:ReDrafterDrafter",
        option="redrafter",
        embedded_model="redrafter",
        recipes={"redrafter": f"{_RECIPE}.redrafter:ReDrafterRecipe"},
    ),
    DrafterSpec("AUTO", f"{_CONFIG}:AutoDecodingConfig", option="auto"),
    DrafterSpec(
        "User_Provided",
        f"{_CONFIG}:UserProvidedDecodingConfig",
        f"{_DRAFTER}.user_provided:UserProvided",
    ),
)


def decoding_types() -> list[str]:
    """The ``decoding_type`` of every entry, sorted."""
    return sorted(spec.decoding_type for spec in DRAFTERS)


def options() -> dict[str, DrafterSpec]:
    """The entries that ``--speculative`` offers, by their names there."""
    return {spec.option: spec for spec in DRAFTERS if spec.option is not None}


def recipes() -> dict[str, str]:
    """The training recipes of all entries: name -> ``"module:Class"``."""
    return {name: target for spec in DRAFTERS for name, target in spec.recipes.items()}


def find_drafter(kind: Any) -> DrafterSpec:
    """The entry of a ``decoding_type``; case, ``_`` and ``-`` do not matter.

    Raises UnknownNameError if there is none.
    """
    spelled = _plain(str(kind))
    for spec in DRAFTERS:
        if spelled in map(_plain, (spec.decoding_type, *spec.aliases)):
            return spec
    raise UnknownNameError("decoding_type", str(kind), decoding_types())


def _plain(kind: str) -> str:
    return kind.casefold().replace("_", "").replace("-", "")
