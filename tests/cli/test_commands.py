"""``forethought methods``, ``eval`` and ``demo``."""

import json

import pytest

from forethought import methods
from forethought.cli.main import main
from tokens import speaking


def test_methods_lists_every_method_with_paper_and_defaults(capsys):
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    for name in methods.names():
        assert f"{name}\n" in shown
        for parameter in methods.describe(name).parameters:
            assert parameter in shown
    assert "chunk_size=64" in shown
    assert "Self-Consistency" in shown


def test_every_setting_of_a_built_in_method_is_explained(capsys):
    for name in ("plain", "dynasor", "majority_vote", "best_of_n"):
        method = methods.describe(name)
        assert method.explanations.keys() == method.parameters.keys(), name
        assert all(method.explanations.values())
    assert main(["methods", "dynasor"]) == 0
    assert "chunk_size=64: tokens of the main chain from one probe" in capsys.readouterr().out


def test_the_default_of_a_vote_is_the_command_lines(capsys):
    assert main(["methods", "majority_vote"]) == 0
    assert "default_sample_num=8: samples" in capsys.readouterr().out


def test_methods_can_show_one(capsys):
    assert main(["methods", "plain"]) == 0
    assert "dynasor" not in capsys.readouterr().out
    assert main(["methods", "nonsense"]) == 2


def test_eval_compares_methods_on_a_model_and_problems_of_ones_own(tmp_path, capsys):
    data = tmp_path / "own.jsonl"
    data.write_text('{"question": "Hello?", "answer": 1}\n' * 4)
    options = ["--model", str(speaking("byte_level")), "--dtype", "float32", "--max-tokens", "6"]
    options += ["--methods", "plain,dynasor+majority_vote", "--samples", "2", "--problems", "3"]
    options += ["--set", "chunk_size=3", "--data", str(data), "--out", str(tmp_path / "out")]
    assert main(["eval", *options]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["method"] for row in rows] == ["plain", "dynasor+majority_vote"]
    assert (tmp_path / "out" / "comparison.png").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--methods", "plain,nonsense"], "nonsense"),
        (["--methods", ""], "unknown method"),
        (["--methods", "plain", "--set", "chunk_size=3"], "chunk_size"),
        (["--problems", "0"], "1 to 200"),
        (["--samples", "0"], "at least 1"),
        (["--in-flight", "0"], "at least 1"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_eval_refuses_what_cannot_be(capsys, options, said):
    assert main(["eval", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]


def test_a_folder_that_cannot_be_made_is_refused_before_anything_has_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", "--problems", "1", "--out", str(tmp_path / "file" / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_demo_runs_its_four_methods_on_the_embedded_reasoner(tmp_path, capsys):
    assert main(["demo", "--problems", "1", "--out", str(tmp_path / "new" / "one")]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert len(rows) == 4
    assert all(row["tokens_generated"] > 0 for row in rows)
    assert "8/8" in err
