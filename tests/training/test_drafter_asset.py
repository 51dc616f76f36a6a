"""The draft model as shipped: small, of the target's vocabulary, and mostly accepted."""

import json
import sys

import pytest
import yaml

pytest.importorskip("torch")
pytest.importorskip("transformers")

from forethought import LLM
from forethought.assets import drafter_dir, heads_dir, reasoner_dir
from forethought.training import acceptance
from forethought.training.recipes.draft_model import DraftModelSettings
from forethought.training.recipes.table import recipe
from forethought.training.texts import DistillationSettings


def test_the_directory_stays_under_two_megabytes():
    assert sum(path.stat().st_size for path in drafter_dir().iterdir()) < 2_000_000


def test_it_loads_as_a_model_of_its_own_with_the_targets_vocabulary_and_context():
    with LLM(drafter_dir()) as draft, LLM(reasoner_dir()) as target:
        assert draft.tokenizer.get_vocab() == target.tokenizer.get_vocab()
        assert draft.tokenizer.eos_token_id == target.tokenizer.eos_token_id
        assert draft.max_length == target.max_length


def test_the_cards_command_measures_that_most_of_six_greedy_drafts_are_accepted(
    monkeypatch, capsys
):
    """On 3 of the 200 problems; over all of them it is more, see the model's card."""
    command = "acceptance --problems 3 --lengths 1 6 --temperatures 0"
    monkeypatch.setattr(sys, "argv", command.split())
    acceptance.main()
    short, long = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (short["draft_len"], long["draft_len"]) == (1, 6)
    assert 1.8 < short["acceptance_length"] <= 2.0
    assert long["acceptance_length"] >= 4.5
    assert short["accepted_1"] == pytest.approx(short["acceptance_length"] - 1)


def test_its_training_settings_are_those_of_the_shipped_model():
    fields = yaml.safe_load((drafter_dir() / "training.yaml").read_text())
    answers = {name: fields.pop(name) for name in ("max_tokens", "probe_share")}
    DistillationSettings(**answers)
    settings = DraftModelSettings(**fields)
    config = json.loads((drafter_dir() / "config.json").read_text())
    assert settings.hidden_size == config["hidden_size"]
    assert settings.intermediate_size == config["intermediate_size"]
    assert settings.num_layers == config["num_hidden_layers"]
    assert settings.num_heads == config["num_attention_heads"]
    assert settings.num_kv_heads == config["num_key_value_heads"]
    assert ("float32" if settings.runs_in_float32 else "bfloat16") == config["dtype"]


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa", "redrafter"])
def test_the_training_settings_of_a_head_are_beside_it_and_good(kind):
    fields = yaml.safe_load((heads_dir(kind) / "training.yaml").read_text())
    DistillationSettings(**{name: fields.pop(name) for name in ("max_tokens", "probe_share")})
    settings = recipe(kind).Settings(**fields)
    card = (heads_dir(kind) / "README.md").read_text()
    assert f"{settings.steps:,} steps" in card or f"{settings.steps} steps" in card
