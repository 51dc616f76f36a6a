"""``forethought bench speculation``: what it prints and writes, and what it refuses."""

import json

import pytest

from forethought.cli.main import main
from forethought.model import loader
from tokens import speaking

COMMON = ["--model", str(speaking("byte_level")), "--dtype", "float32", "--max-tokens", "12"]
COMMON += ["--rounds", "1", "--batch", "1", "2"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Hello world\nGrüße aus Köln\n", encoding="utf-8")
    return ["--prompts", str(path)]


def test_a_table_a_plot_and_one_json_line_last(capsys, tmp_path, prompts):
    out = tmp_path / "new" / "out"
    options = [*COMMON, *prompts, "--lengths", "2", "--out", str(out)]
    assert main(["bench", "speculation", *options]) == 0
    shown, err = capsys.readouterr()
    lines = shown.splitlines()
    report = json.loads(lines[-1])
    assert report == json.loads((out / "speculation.json").read_text(encoding="utf-8"))
    assert (out / "speculation.png").stat().st_size > 1000
    assert lines[0].startswith("batch  drafter")
    assert "Recommended: " in shown
    drafters = [(row["batch"], row["drafter"]) for row in report["rows"]]
    assert {"none", "ngram", "suffix"} <= {drafter for _, drafter in drafters}
    assert all(row["identical"] is True for row in report["rows"])
    assert report["model"] == str(speaking("byte_level"))
    assert report["machine"]["dtype"] == "float32"
    assert report["recommendation"]["drafter"] in {drafter for _, drafter in drafters}
    assert "run" in err
    block = report["recommendation"]["speculative_config"]
    assert (block is None) == (report["recommendation"]["drafter"] == "none")
    assert block is None or f"speculative_config: {json.dumps(block)}" in lines


def test_a_configuration_says_which_drafters_and_json_is_all_there_is(capsys, tmp_path, prompts):
    config = tmp_path / "config.yaml"
    config.write_text("speculative_config: {decoding_type: NGram, max_draft_len: 2, name: mine}\n")
    options = [*COMMON, *prompts, "--config", str(config), "--json", "--out", str(tmp_path)]
    assert main(["bench", "speculation", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = json.loads(out)["rows"]
    assert [(r["batch"], r["drafter"], r["max_draft_len"]) for r in rows] == [
        (batch, *variant) for batch in (1, 2) for variant in (("none", 0), ("mine", 1), ("mine", 2))
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "WHAT"),
        (["telepathy"], "telepathy"),
        (["speculation", "--batch", "0"], "invalid batch size 0"),
        (["speculation", "--batch", "201"], "200 different prompts"),
        (["speculation", "--lengths", "99"], "invalid draft length 99"),
        (["speculation", "--prompts", "/nowhere.txt"], "/nowhere.txt"),
        (["speculation", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["speculation", "--model", "/nowhere"], "/nowhere"),
        (["roofline", "/nowhere"], "/nowhere"),
        (["auto", "/nowhere"], "/nowhere"),
        (["roofline", "/nowhere", "--model", "/other"], "the model is given twice: as /nowhere"),
        (["roofline", "--model", "/other", "/nowhere"], "the model is given twice: as /other"),
        (["speculation", "--rounds", "0"], "rounds"),
        (["speculation", "--max-tokens", "0"], "max_tokens"),
        (["speculation", "--fit-tree", "0"], "at least 1 node"),
        (["speculation", "--fit-tree", "4", "--batch", "2"], "--batch is for timing"),
        (["speculation", "--fit-tree", "4", "--lengths", "2"], "--lengths is for timing"),
        (["speculation", "--fit-tree", "4", "--rounds", "2"], "--rounds is for timing"),
        (["speculation", "--fit-tree", "4", "--out", "here"], "--out is for timing"),
        (["speculation", "--fit-tree", "4", "--max-tokens", "0"], "max_tokens"),
        (["speculation", "--device", "abacus"], "invalid device"),
        (["speculation", "--tensor-parallel-size", "3"], "tensor_parallel_size=3"),
        (["speculation", "--speculative", "pearl", "--draft-model", "/no/such/dir"], "/no/such"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_loaded(
    capsys, tmp_path, monkeypatch, options, said
):
    monkeypatch.chdir(tmp_path)
    if "/nowhere" not in options:

        def load(*_, **__):
            raise AssertionError("a model was loaded")

        monkeypatch.setattr(loader, "load", load)
    assert main(["bench", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]


def test_a_tree_is_fitted_and_printed_as_it_is_configured(capsys, tmp_path, prompts):
    config = tmp_path / "config.yaml"
    draft = {"decoding_type": "DraftTarget", "max_draft_len": 2, "speculative_model": COMMON[1]}
    config.write_text(json.dumps({"speculative_config": draft}))
    options = [*COMMON[:6], *prompts, "--config", str(config), "--fit-tree", "5"]
    assert main(["bench", "speculation", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert (report["field"], report["choices"]) == ("draft_choices", [[0], [0, 0]])
    assert lines[-2] == "draft_choices: [[0],[0,0]]"
    assert main(["bench", "speculation", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fit-tree", "5"], "--fit-tree needs one drafter"),
        (["--fit-tree", "5", "--speculative", "ngram"], "no tree to fit for ngram"),
        (["--fit-tree", "0", "--speculative", "ngram"], "at least 1 node"),
    ],
)
def test_what_has_no_tree_is_refused(capsys, prompts, options, said):
    assert main(["bench", "speculation", *COMMON[:6], *prompts, *options]) == 2
    assert said in capsys.readouterr().err
