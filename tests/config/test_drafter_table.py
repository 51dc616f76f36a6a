"""The table of drafters: every entry holds, and one entry is all that a new drafter needs."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import forethought
from bigram_drafter import SPEC, BigramDecodingConfig
from forethought import assets
from forethought.bench.variant import variants_of
from forethought.cli.main import main
from forethought.cli.options import add_model_options, llm_args_of
from forethought.config import drafter_table
from forethought.config.drafter_table import DRAFTERS, DrafterSpec, find_drafter, options
from forethought.config.engine import LlmArgs
from forethought.config.registry import Registry
from forethought.config.speculation import find_config_class, read_configs
from forethought.errors import ParameterError, UnknownNameError
from forethought.model_dir import find_model_dir

DRAFT = ["--json", "--max-tokens", "12", "--dtype", "float32"]


@pytest.mark.parametrize("spec", DRAFTERS, ids=lambda spec: spec.decoding_type)
def test_every_entry_names_what_there_is(spec: DrafterSpec) -> None:
    config = find_config_class(spec.decoding_type)
    assert config.decoding_type == spec.decoding_type
    assert set(spec.option_defaults) <= set(config.model_fields)
    assert set(spec.embedded_defaults) <= set(config.model_fields)
    assert config.__name__ in forethought.__all__
    classes = Registry("class", {})
    if spec.drafter is not None:
        assert callable(classes.resolve(spec.drafter).build)
    for recipe in spec.recipes.values():
        assert callable(classes.resolve(recipe).build)
    if spec.embedded_model is not None:
        assert (assets.heads_dir(spec.embedded_model) / "config.json").is_file()
        assert find_model_dir(assets.PREFIX + spec.embedded_model) == spec.embedded_dir()


@pytest.mark.parametrize("name", options())
def test_a_name_alone_is_the_drafter_that_the_command_line_makes_of_it(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    fields = llm_args_of(parser.parse_args(["--speculative", name]))
    for model in (None, assets.REASONER, assets.reasoner_dir()):
        args = LlmArgs.from_dict({"model": model, "speculative_config": name})
        assert args.speculative_config == fields["speculative_config"]


def test_the_embedded_drafters_are_those_of_the_table_and_found_by_name() -> None:
    assert {spec.embedded_model for spec in DRAFTERS} - {None} == set(assets.DRAFTERS)
    for head in assets.HEADS:
        with pytest.raises(ParameterError, match=f"is no model.*speculative_config='{head}'"):
            LlmArgs(model=assets.PREFIX + head)  # type: ignore[arg-type]
        assert head in options()


def test_options_and_aliases_are_spellings_of_one_entry_each() -> None:
    spellings = [(spec, name) for spec in DRAFTERS for name in (spec.decoding_type, *spec.aliases)]
    spellings += [(spec, name) for name, spec in options().items()]
    for spec, name in spellings:
        assert find_drafter(name.upper()) is spec
        assert find_drafter(name.replace("_", "-")) is spec
    with pytest.raises(UnknownNameError, match="telepathy"):
        find_drafter("telepathy")


def test_the_import_contract_covers_every_drafter() -> None:
    contracts = ConfigParser()
    contracts.read(Path(__file__).parents[2] / ".importlinter")
    listed = contracts["importlinter:contract:independent-drafters"]["modules"].split()
    modules = [spec.drafter.partition(":")[0] for spec in DRAFTERS if spec.drafter is not None]
    assert listed == sorted(modules)


def test_listing_the_drafters_imports_neither_torch_nor_their_configurations() -> None:
    code = (
        "import sys; from forethought.config import drafter_table as t; t.options(); t.recipes();"
        "assert not {'torch', 'pydantic', 'forethought.config.drafters'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_entry_makes_a_learned_drafter_known_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained and used from the command line, from a dictionary, and in the benchmark's list."""
    monkeypatch.setattr(drafter_table, "DRAFTERS", (*DRAFTERS, SPEC))
    data = tmp_path / "texts.jsonl"
    records = [
        {"prompt": problem["question"], "response": problem["answer"]}
        for problem in assets.problems()[:8]
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = ["--data", str(data), "--out", str(tmp_path / "out"), "--held-out", "2"]
    assert main(["train", "bigram", *given, "--steps", "3", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    assert "--speculative bigram" in printed
    assert main([*shlex.split(printed)[1:], "--max-draft-len", "2", *DRAFT]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["metrics"]["drafted"] > 0
    assert main(["generate", "...", *DRAFT]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == drafted["text"]
    [config] = read_configs({"decoding_type": "bigram", "speculative_model": tmp_path})
    assert isinstance(config, BigramDecodingConfig)
    assert [variant.label for variant in variants_of([config], [2])] == ["bigram 2"]
