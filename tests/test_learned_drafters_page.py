"""The page on learned drafters: its Python and its configurations are good as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from forethought.assets import heads_dir
from forethought.config.drafter_table import recipes
from forethought.config.speculation import DecodingBaseConfig
from forethought.speculative.heads.eagle3 import Eagle3Head
from forethought.speculative.heads.medusa import MedusaHeads
from forethought.training.recipes.table import recipe
from forethought.training.trainer import TrainingSettings

PAGE = (Path(__file__).parents[1] / "docs" / "learned-drafters.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_its_export_writes_what_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = blocks("python")
    exec(code, {"__name__": "guide"})
    head = Eagle3Head.load(tmp_path / "runs" / "eagle3-vllm")
    assert head.traits == Eagle3Head.load(heads_dir("eagle3")).traits
    assert len(MedusaHeads.load(tmp_path / "runs" / "medusa-vllm", 256, 512)) == 5


def test_its_blocks_configure_drafters() -> None:
    found = [yaml.safe_load(block)["speculative_config"] for block in blocks("yaml")]
    kinds = [DecodingBaseConfig.from_dict(fields).decoding_type for fields in found]
    assert kinds == ["Eagle", "Eagle", "Medusa", "MTP"]


@pytest.mark.parametrize("kind", sorted(set(recipes()) - {"medusa-2"}))
def test_it_names_every_setting_of_a_recipe(kind: str) -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` |")]
    own = set(recipe(kind).Settings.model_fields) - set(TrainingSettings.model_fields)
    own -= {"start"}  # a paragraph of its own has it
    assert own
    assert "`--start DIR`" in PAGE
    assert own <= set(re.findall(r"`(\w+)`", row))
