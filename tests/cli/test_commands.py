"""``forethought methods``, ``eval`` and ``demo``."""

import json
import socket
import subprocess
import sys

import pytest
from transformers import Qwen2ForTokenClassification

import openai_server
import reward_server
from forethought import methods
from forethought.cli.main import main
from reward_models import save
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
    assert "``" not in shown
    before, after = shown.split("Rewards: ")
    for name in methods.REWARDS:
        assert f"\n{name}\n" not in before
        assert f"\n{name}\n" in after
    assert "--reward-model DIR" in after.partition("\nprm\n")[2]


def test_every_setting_of_a_built_in_method_is_explained(capsys):
    for name in methods.names():
        method = methods.describe(name)
        assert method.explanations.keys() == method.parameters.keys(), name
        assert all(method.explanations.values())
    assert main(["methods", "dynasor"]) == 0
    shown = capsys.readouterr().out
    assert "chunk_size=64, int >= 1: Tokens of the main chain from one probe" in shown


def test_the_default_of_a_vote_is_the_command_lines(capsys):
    assert main(["methods", "majority_vote"]) == 0
    assert "default_sample_num=8, int >= 1: Samples" in capsys.readouterr().out


def test_methods_are_listed_as_json_with_type_default_and_explanation_of_each_setting(capsys):
    assert main(["methods", "--json"]) == 0
    described = {method["name"]: method for method in json.loads(capsys.readouterr().out)}
    assert [*described] == methods.names()
    assert described["genrm"]["paper"].startswith("Zhang et al.")
    settings = {setting["name"]: setting for setting in described["beam_search"]["settings"]}
    assert settings["width"] == {
        "name": "width",
        "type": "int >= 1",
        "default": 4,
        "required": False,
        "description": "Next steps that each continued beam gets.",
    }
    assert main(["methods", "plain", "--json"]) == 0
    assert [method["name"] for method in json.loads(capsys.readouterr().out)] == ["plain"]


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
        (["--methods", ""], "empty entry"),
        (["--methods", "plain", "--set", "chunk_size=3"], "chunk_size"),
        (["--problems", "0"], "1 to 200"),
        (["--samples", "0"], "at least 1"),
        (["--in-flight", "0"], "at least 1"),
        (["--temperature", "-1"], "temperature"),
        (["--revision", "main"], "--revision needs --model"),
        (["--thinking-budget", "-1"], "thinking_budget"),
        (["--thinking-budget", "2", "--thinking-soft", "3"], "thinking_soft"),
        (["--thinking-field", "budget"], "--thinking-field needs --url"),
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


def test_the_demo_tells_three_stories_on_the_embedded_models(tmp_path, capsys):
    assert main(["demo", "--problems", "1", "--out", str(tmp_path / "new" / "one")]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [row["task"] for row in rows] == ["arithmetic"] * 2 + ["countdown"] * 3
    assert all(row["tokens_generated"] > 0 for row in rows)
    assert [row["method"] for row in rows if "paired_p" in row] == [
        "dynasor",
        "majority_vote@8",
        "repeated_sampling@16",
    ]
    assert "8/8" in err


def test_a_method_that_verifies_gets_the_checker_of_its_task(tmp_path, capsys):
    options = ["--task", "countdown", "--problems", "2", "--out", str(tmp_path)]
    options += ["--methods", "repeated_sampling@2", "--max-tokens", "40", "--all-samples"]
    assert main(["eval", *options]) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["pass_at_k"].keys() == {"1", "2"}
    assert main(["eval", "--methods", "repeated_sampling", "--problems", "2"]) == 2
    assert "needs 'verifier'" in capsys.readouterr().err


@pytest.fixture
def server():
    with openai_server.serving() as running:
        running.says = lambda body: ["\\boxed{", "1", "}"]
        yield running


def own_problems(tmp_path):
    data = tmp_path / "own.jsonl"
    data.write_text('{"question": "1?", "answer": 1}\n' * 3 + '{"question": "2?", "answer": 2}\n')
    return ["--data", str(data), "--out", str(tmp_path / "out")]


def test_eval_gives_every_attempt_the_thinking_budget(server, tmp_path):
    options = ["--url", server.url, "--api-model", "m", "--samples", "2", "--max-tokens", "9"]
    options += ["--thinking-budget", "3", "--thinking-field", "thinking_token_budget"]
    assert main(["eval", *options, *own_problems(tmp_path)]) == 0
    assert {body["thinking_token_budget"] for body in server.requests} == {3}


def test_eval_compares_methods_on_a_server(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key of the test")
    options = ["--url", server.url, "--api-model", "m", "--samples", "2", "--max-tokens", "9"]
    assert main(["eval", *options, *own_problems(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["method"], row["accuracy"]) for row in rows] == [
        ("plain", 0.75),
        ("majority_vote", 0.75),
    ]
    assert (rows[0]["tokens_generated"], rows[0]["tokens_prefilled"]) == (4 * 3, 4 * 7)
    assert 4 * 3 <= rows[1]["tokens_generated"] <= 8 * 3  # a vote may be decided early
    assert 8 < len(server.requests) <= 12
    first = server.requests[0]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("m", 9, 0.0)
    assert "boxed" in first["messages"][0]["content"]


def test_eval_continues_text_on_a_server_in_the_models_own_format(server, tmp_path, capsys):
    options = ["--url", server.url, "--api-model", "m", "--max-tokens", "9", "--methods", "dynasor"]
    options += ["--prompt-format", "<user>{question}<assistant>", "--instruction", ""]
    assert main(["eval", *options, *own_problems(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["accuracy"] == 0.75
    assert "<user>1?<assistant>" in {body["prompt"] for body in server.requests}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "dynasor"], "--prompt-format"),
        (["--prompt-format", "{question}"], "needs --max-tokens"),
        (["--prompt-format", "question", "--max-tokens", "9"], "has no {question}"),
        (["--model", "m"], "contradictory options"),
        (["--url", "nowhere"], "http://host:8000/v1"),
    ],
)
def test_eval_on_a_server_refuses_what_cannot_be(options, said, tmp_path, capsys):
    common = ["--url", "http://127.0.0.1:1/v1", "--api-model", "m"]
    assert main(["eval", *common, *own_problems(tmp_path), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize("command", [["generate", "Hello"], ["eval", "--problems", "1"]])
def test_a_server_that_does_not_answer_is_called_by_its_url(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    assert main([*command, "--url", url, "--api-model", "m"]) == 1
    assert f"no server answers at {url}" in capsys.readouterr().err.splitlines()[-1]


WITHOUT = """
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors"):
    sys.modules[name] = None
from forethought.cli.main import main
for argv in sys.argv[1:]:
    print("status", main(argv.split()), file=sys.stderr)
"""


def test_without_torch_every_command_says_what_to_install_and_a_server_does_without(
    server, tmp_path
):
    local = ["bench speculation", "bench speculation --fit-tree 4 --speculative medusa"]
    local += ["generate Hello", "chat", "eval", "demo", "train medusa --data own.jsonl --out out"]
    on_server = f"--url {server.url} --api-model m"
    remote = [f"generate Hello {on_server}", f"eval {on_server} --problems 1", "methods"]
    own_problems(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *local, *remote],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [
        line for line in done.stderr.splitlines() if line.startswith(("forethought", "status"))
    ]
    assert "Traceback" not in done.stderr, done.stderr
    refused = lines[: 2 * len(local)]
    assert refused[1::2] == ["status 2"] * len(local)
    for said in refused[::2]:
        assert "is not installed" in said
        assert 'pip install "forethought[local]"' in said
    assert lines[2 * len(local) :] == ["status 0"] * len(remote), done.stderr


def test_eval_takes_the_scores_of_a_reward_server(tmp_path, capsys):
    options = ["--problems", "2", "--max-tokens", "20", "--samples", "2", "--out", str(tmp_path)]
    with reward_server.serving({"/classify": {"probs": [0.5]}}) as scoring:
        judge = ["--reward-url", scoring.url, "--reward-api-model", "rm"]
        assert main(["eval", *options, "--methods", "best_of_n", *judge]) == 0
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        assert [row["method"] for row in rows] == ["best_of_n"]
        scored = len(scoring.requests)
        judge[-1] = "another"
        assert main(["eval", *options, "--methods", "best_of_n", *judge]) == 0
        asked = [body["model"] for _, body in scoring.requests]
    assert set(asked[:scored]) == {"rm"}
    assert set(asked[scored:]) == {"another"}, "the journal of one judge is not another's"


def test_eval_has_best_of_n_judged_by_a_reward_model(tmp_path, capsys):
    reward_model = str(save(tmp_path / "prm", Qwen2ForTokenClassification))
    options = ["--problems", "2", "--max-tokens", "40", "--samples", "2", "--out", str(tmp_path)]
    both = [*options, "--methods", "plain,best_of_n", "--reward-model", reward_model]
    assert main(["eval", *both]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["method"] for row in rows] == ["plain", "best_of_n"]
    assert 40 * 2 < rows[1]["tokens_generated"] <= 40 * 4
    config = tmp_path / "prm" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert main(["eval", *both]) == 0
    out = capsys.readouterr().out
    assert "complete before" not in out, "the journal of one judge is not another's"
    assert main(["eval", *options, "--methods", "best_of_n"]) == 2
    assert "Give --reward-model DIR" in capsys.readouterr().err
    assert main(["eval", *options, "--reward-model", reward_model]) == 2
    assert "nothing to score" in capsys.readouterr().err
