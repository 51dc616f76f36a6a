"""``generate`` with every drafter that is shipped: by name, and by TensorRT-LLM's own blocks."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from forethought.assets import drafter_dir, heads_dir
from forethought.cli.main import main
from forethought.cli.options import speculative_config_of
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.speculation import named_config

QUESTION = "Tom has 3 pens. He buys 4 more. How many?"
OPTIONS = ["--json", "--dtype", "float32", "--max-tokens", "60"]
DRAFT, EAGLE = str(drafter_dir()), str(heads_dir("eagle3"))
MEDUSA, MTP = str(heads_dir("medusa")), str(heads_dir("mtp"))
REDRAFTER = str(heads_dir("redrafter"))
NAMES = {  # tokens per step that each reaches at least
    "eagle3": 3.0,
    "medusa": 2.0,
    "mtp": 3.0,
    "redrafter": 2.4,
    "draft_target": 4.0,
    "pearl": 2.0,
    "ngram": 1.0,
    "suffix": 1.0,
    "auto": 1.0,
}
ALL = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 1], [0, 1, 0], [1], [1, 0], [1, 1]]
LEAVES = [[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]
BLOCKS: dict[str, dict[str, Any]] = {
    "draft/target": {
        "decoding_type": "DraftTarget",
        "max_draft_len": 3,
        "speculative_model": DRAFT,
    },
    "EAGLE 3": {"decoding_type": "Eagle", "max_draft_len": 4, "speculative_model": EAGLE},
    "EAGLE 3, two models": {
        "decoding_type": "Eagle",
        "max_draft_len": 3,
        "speculative_model_dir": EAGLE,
        "eagle3_one_model": False,
    },
    "n-gram": {
        "decoding_type": "NGram",
        "max_draft_len": 3,
        "max_matching_ngram_size": 4,
        "is_public_pool": True,
    },
    "MTP": {
        "decoding_type": "MTP",
        "max_draft_len": 3,
        "num_nextn_predict_layers": 3,
        "speculative_model": MTP,
    },
    "MTP, length left out": {
        "decoding_type": "MTP",
        "num_nextn_predict_layers": 3,
        "speculative_model": MTP,
    },
    "Medusa, all choices": {
        "decoding_type": "Medusa",
        "num_medusa_heads": 4,
        "medusa_choices": ALL,
        "speculative_model": MEDUSA,
    },
    "Medusa, paths": {
        "decoding_type": "Medusa",
        "max_draft_len": 4,
        "medusa_choices": LEAVES,
        "speculative_model": MEDUSA,
    },
    "ReDrafter": {
        "decoding_type": "ReDrafter",
        "num_beams": 5,
        "draft_len_per_beam": 5,
        "speculative_model": REDRAFTER,
    },
}


def generated(*options: str) -> tuple[str, dict[str, Any]]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["generate", QUESTION, *OPTIONS, *options]) == 0
    found = json.loads(said.getvalue())
    return found["text"], found["metrics"]


@functools.cache
def plain() -> str:
    return generated()[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_name_drafts_with_what_is_shipped_and_says_the_same(name: str) -> None:
    longest = named_config(name).max_draft_len or 5  # auto has none before it is resolved
    text, metrics = generated("--speculative", name, "--max-draft-len", str(longest))
    assert text == plain()
    assert metrics["drafted"] > 0
    assert metrics["mean_acceptance_length"] >= NAMES[name]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_length_each_name_is_under_goodput_control(name: str) -> None:
    args = argparse.Namespace(speculative=name, max_draft_len=None, draft_model=None)
    config = speculative_config_of(args)
    assert config == named_config(name)
    assert config.length_control == "goodput"
    args.max_draft_len = 2
    assert speculative_config_of(args) == named_config(name, max_draft_len=2)
    assert named_config(name, max_draft_len=2).length_control == "fixed"
    assert named_config(name, draft_len_schedule={4: 2}).length_control == "fixed"


@pytest.mark.parametrize("name", ["ngram", "medusa"])
def test_under_goodput_control_the_text_is_that_of_plain_decoding(name: str) -> None:
    assert generated("--speculative", name)[0] == plain()


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_written_for_tensorrt_llm_drafts_and_says_the_same(
    name: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    block = {"disable_overlap_scheduler": True, "speculative_config": BLOCKS[name]}
    config.write_text(yaml.safe_dump(block))
    text, metrics = generated("--extra_llm_api_options", str(config))
    assert text == plain()
    assert metrics["accepted"] > 0
    assert not metrics["lossy"]


def test_medusa_drafts_the_most_probable_trees_from_the_command_line() -> None:
    args = argparse.Namespace(speculative="medusa", max_draft_len=None, draft_model=Path(MEDUSA))
    config = speculative_config_of(args)
    assert isinstance(config, MedusaDecodingConfig)
    assert (config.tree, config.max_total_draft_tokens) == ("most_probable", 15)
