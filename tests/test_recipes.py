"""docs/recipes.md: its commands are parsed, and its memory is what the engine takes."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forethought.cli.main import COMMANDS, Parser
from forethought.cli.options import llm_args_of
from forethought.kv.storage import KvStorage
from forethought.model import loader
from models import tiny

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def recipes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipes", ROOT / "scripts" / "recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands_of(page: Path) -> list[list[str]]:
    """The arguments of each forethought command in the blocks and tables of a page."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = re.findall(r"^\$ (forethought .*)$", blocks, re.MULTILINE)
    lines += re.findall(r"^\| .* \| `(forethought [^`]*)` \| .* GiB \|$", text, re.MULTILINE)
    return [arguments(line) for line in lines]


def arguments(line: str) -> list[str]:
    """Of a line of shell, up to a pipe, a redirection or a comment; words as they stand."""
    words = shlex.split(line, comments=True)
    end = next((i for i, word in enumerate(words) if word[0:1] in "|<>&;"), len(words))
    return words[1:end]


def parsed(words: list[str]) -> argparse.Namespace:
    """What the command's parser reads; raises UsageError for what it does not know."""
    name, *rest = words
    assert name in COMMANDS
    command = importlib.import_module(f"forethought.cli.{name}")
    parser = Parser(prog=f"forethought {name}")
    command.configure(parser)
    return parser.parse_args(rest)


@pytest.mark.parametrize("page", [page for page in DOCS if commands_of(page)], ids=lambda p: p.name)
def test_the_commands_of_a_page_are_parsed_by_the_command_line(page: Path) -> None:
    for words in commands_of(page):
        assert parsed(words) is not None, words


def test_the_recipes_are_settings_of_the_engine(recipes: ModuleType) -> None:
    for recipe in recipes.data()["recipes"]:
        args = parsed(arguments(recipe["command"]))
        assert llm_args_of(args).keys() >= {"model"}


def test_the_tables_are_what_the_script_writes(recipes: ModuleType) -> None:
    text = recipes.PAGE.read_text(encoding="utf-8")
    assert recipes.written(text) == text
    assert [*recipes.BLOCK.findall(text)] == [*recipes.data()["machines"]]


def test_the_shapes_have_as_many_parameters_as_their_publishers_say(recipes: ModuleType) -> None:
    for name, model in recipes.data()["models"].items():
        count = recipes.memory_of(model["config"], "bfloat16").weights / recipes.SHORT_BYTES
        assert count == pytest.approx(model["parameters"], rel=0.02), name


def test_each_recipe_fits_its_machine(recipes: ModuleType) -> None:
    for recipe in recipes.data()["recipes"]:
        machine = recipes.data()["machines"][recipe["machine"]]
        config = recipes.data()["models"][recipe["model"]]["config"]
        needed = recipes.memory_of(config, recipe["form"]).needed(recipe["tokens"])
        usable = machine["usable"] * machine["memory_gib"] * recipes.GIB
        assert needed < usable, recipe["command"]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "gpt_oss", "qwen3_5"])
def test_the_memory_is_what_the_engine_takes(recipes: ModuleType, architecture: str) -> None:
    directory = tiny(architecture)
    lm = loader.load(directory, dtype="bfloat16")
    config = AutoConfig.from_pretrained(directory)
    kv = KvStorage.page_bytes(lm.layer_shapes, 1, torch.bfloat16)
    assert recipes.kv_bytes(config) == (2 * kv if lm.state_bytes else kv)
    module = AutoModelForCausalLM.from_config(config)
    num_weights = sum(weight.numel() for weight in module.parameters())
    assert recipes.weight_bytes(module, "bfloat16") == 2 * num_weights


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])
def test_weights_in_8_bits_take_what_they_take_in_the_engine(
    recipes: ModuleType, architecture: str
) -> None:
    directory = tiny(architecture)
    lm = loader.load(directory, dtype="bfloat16", quantization="int8", forward="torch", fuse=False)
    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    multiplied = sum(weight.num_bytes for weight in lm.traits.weights)
    plain = sum(
        weight.numel()
        for name, weight in module.named_parameters()
        if weight.ndim == 1 or "embed" in name
    )
    assert recipes.weight_bytes(module, "int8") == multiplied + 2 * plain
