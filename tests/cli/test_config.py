"""``--config`` and ``--speculative``: which engine the options stand for, and what is refused."""

import argparse
import json
from pathlib import Path

import pytest

from forethought import assets
from forethought.cli.main import main
from forethought.cli.options import add_model_options, llm_args_of, load_config_file
from forethought.config.drafters import (
    AutoDecodingConfig,
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    ReDrafterDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.engine import KvCacheConfig
from forethought.errors import UsageError
from forethought.model import loader
from tokens import speaking

BLOCK = """
disable_overlap_scheduler: true
speculative_config:
  decoding_type: NGram
  max_draft_len: 3
  max_matching_ngram_size: 4
"""
GOODPUT = {"length_control": "goodput"}
"""What a drafter's name without a length means."""


@pytest.fixture
def write(tmp_path):
    """Writes a configuration; returns its path."""

    def to(text):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to


def fields(*options, **defaults):
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    return llm_args_of(parser.parse_args([str(option) for option in options]), **defaults)


def test_without_options_the_engine_is_left_at_its_defaults():
    assert fields() == {}


@pytest.mark.parametrize("option", ["--config", "--extra_llm_api_options"])
def test_a_file_holds_any_field_under_either_name_of_the_option(write, option):
    path = write(BLOCK + "max_batch_size: 8\nkv_cache_config:\n  page_size: 4\n")
    found = fields(option, path)
    assert found["speculative_config"] == (
        NGramDecodingConfig(max_draft_len=3, max_matching_ngram_size=4),
    )
    assert found["max_batch_size"] == 8
    assert found["kv_cache_config"] == KvCacheConfig(tokens_per_block=4)


def test_a_file_may_list_several_drafters(write):
    path = write(
        "speculative_config:\n- decoding_type: Suffix\n- {decoding_type: NGram, max_draft_len: 2}\n"
    )
    configs = fields("--config", path)["speculative_config"]
    assert configs == (SuffixDecodingConfig(), NGramDecodingConfig(max_draft_len=2))


def test_options_win_over_the_file_and_the_file_over_the_command(write):
    path = write(BLOCK + "dtype: bfloat16\nmax_batch_size: 8\n")
    options = ["--config", path, "--dtype", "float32", "--speculative", "suffix"]
    found = fields(*options, max_batch_size=2, max_num_tokens=64)
    assert found["dtype"] == "float32"
    assert (found["max_batch_size"], found["max_num_tokens"]) == (8, 64)
    assert found["speculative_config"] == (SuffixDecodingConfig(**GOODPUT),)


def test_an_empty_file_says_nothing(write):
    assert fields("--config", write("# nothing yet\n")) == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["ngram"], NGramDecodingConfig(**GOODPUT)),
        (["ngram", "--max-draft-len", 2], NGramDecodingConfig(max_draft_len=2)),
        (["suffix"], SuffixDecodingConfig(**GOODPUT)),
        (["pearl", "--draft-model", "d"], PearlDecodingConfig(speculative_model="d", **GOODPUT)),
        (
            ["redrafter", "--draft-model", "d"],
            ReDrafterDecodingConfig(speculative_model="d", **GOODPUT),
        ),
        (["auto"], AutoDecodingConfig(**GOODPUT)),
        (
            ["draft_target", "--draft-model", "d"],
            DraftTargetDecodingConfig(speculative_model="d", max_draft_len=4, **GOODPUT),
        ),
        (
            ["draft_target", "--draft-model", "d", "--max-draft-len", 2],
            DraftTargetDecodingConfig(speculative_model="d", max_draft_len=2),
        ),
    ],
)
def test_speculative_names_a_way_of_drafting(options, expected):
    assert fields("--speculative", *options)["speculative_config"] == (expected,)


def test_the_embedded_reasoner_has_a_draft_model_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(assets, "heads_dir", tmp_path.joinpath)
    (own := tmp_path / "drafter").mkdir()
    (config,) = fields("--speculative", "draft_target")["speculative_config"]
    expected = DraftTargetDecodingConfig(speculative_model=own, max_draft_len=8, **GOODPUT)
    assert config == expected
    options = ["--speculative", "draft_target", "--draft-model", "d"]
    assert fields(*options)["speculative_config"][0].speculative_model == Path("d")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "cannot read the configuration"),
        ("- a\n- b\n", "not fields by name"),
        ("just words", "not fields by name"),
        ("dtype: auto\ndtype: float32\n", "'dtype' is given twice"),
        ("a: {b: 1, b: 2}", "'b' is given twice"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(write, text, said):
    with pytest.raises(UsageError, match=said):
        load_config_file(write(text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_batchsize: 3", "did you mean 'max_batch_size'?"),
        ("max_batch_size: many", "invalid max_batch_size"),
        ("pipeline_parallel_size: 2", "only 1 is taken, not 2"),
        ("speculative_config: telepathy", "unknown decoding_type 'telepathy'"),
        ("speculative_config: {max_draft_len: 3}", "needs decoding_type"),
        ("speculative_config: {decoding_type: Telepathy}", "Allowed: AUTO"),
        ("speculative_config: {decoding_type: NGram, max_draft: 3}", "'max_draft_len'?"),
        ("a: [", "cannot read"),
    ],
)
def test_a_bad_file_is_one_line_and_status_2(capsys, write, text, said):
    assert main(["generate", "Hello", "--config", str(write(text))]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--speculative", "telepathy"], "--speculative"),
        (["--model", "m", "--speculative", "draft_target"], "--draft-model"),
        (["--model", "m", "--speculative", "pearl"], "--draft-model"),
        (["--speculative", "pearl", "--draft-model", "d", "--max-draft-len", "0"], "max_draft_len"),
        (["--speculative", "ngram", "--draft-model", "d"], "no draft model"),
        (["--speculative", "ngram", "--max-draft-len", "0"], "max_draft_len"),
        (["--draft-model", "d"], "need --speculative"),
        (["--draft-model", "", "--speculative", "pearl"], "--draft-model: it is empty"),
        (["--model", ""], "--model: it is empty"),
        (["--revision", "main"], "--revision needs --model"),
        (["--revision", "main", "--model", str(speaking("byte_level"))], "invalid revision"),
        (["--speculative", "medusa", "--max-draft-len", "99"], "max_draft_len"),
        (["--max-draft-len", "3"], "need --speculative"),
        (["--url", "u", "--api-model", "m", "--speculative", "ngram"], "--speculative"),
        (["--url", "u", "--api-model", "m", "--config", "c.yaml"], "--config"),
    ],
)
def test_options_that_cannot_be_are_one_line_and_status_2(capsys, monkeypatch, options, said):
    monkeypatch.setattr(loader, "load", None)  # no model is loaded for it
    assert main(["generate", "Hello", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_the_model_may_stand_in_the_file(capsys, write):
    path = write(f"model: {speaking('byte_level')}\ndtype: float32\n")
    options = ["--config", str(path), "--max-tokens", "4", "--json"]
    assert main(["generate", "Hello", *options]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(speaking("byte_level"))


@pytest.mark.parametrize(("method", "temperature"), [("plain", "0"), ("majority_vote", "0.8")])
def test_speculation_changes_the_metrics_and_not_the_text(capsys, write, method, temperature):
    question = "Tom has 3 pens. He buys 4 more. He gives away 2. How many pens does Tom have now?"
    common = ["generate", question, "--json", "--seed", "5", "--temperature", temperature]
    common += ["--dtype", "float32", "--max-tokens", "100", "--method", method]
    reports = []
    for options in ([], ["--config", str(write(BLOCK))]):
        assert main([*common, *options]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    plain, drafted = reports
    assert plain["text"] == drafted["text"]
    assert (plain["metrics"]["drafted"], plain["metrics"]["mean_acceptance_length"]) == (0, 1.0)
    assert drafted["metrics"]["accepted"] > 0
    assert drafted["metrics"]["steps"] < plain["metrics"]["steps"]
    assert drafted["metrics"]["mean_acceptance_length"] > 1.2
    assert len(drafted["metrics"]["accepted_by_position"]) <= 3
    decoded = drafted["metrics"]["steps"] + drafted["metrics"]["accepted"]
    samples = drafted["usage"]["decoded"] - decoded
    assert samples >= 1, "each generation's first token comes from its prefill"


def test_the_summary_tells_tokens_per_step_only_where_there_were_drafts(capsys):
    common = ["generate", "Tom has 3 pens. He buys 4 more.", "--max-tokens", "60"]
    assert main(common) == 0
    assert "per step" not in capsys.readouterr().err
    assert main([*common, "--speculative", "ngram", "--max-draft-len", "3"]) == 0
    assert " tokens per step, finished by " in capsys.readouterr().err
    assert main([*common, "--speculative", "ngram"]) == 0
    assert " tokens per step (drafts only where they pay), " in capsys.readouterr().err
