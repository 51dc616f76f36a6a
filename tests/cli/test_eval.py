"""``forethought eval``: tasks, budgets, samples of one method, search, and what it refuses."""

import importlib.util
import json
import shlex
import sys

import pytest

import adapters
import openai_server
from forethought.cli.main import main
from forethought.scaffolding import Trace
from tokens import speaking

ENDS = ("0", "0,1", "1", "1,1")


@pytest.fixture
def server():
    with openai_server.serving() as running:
        running.says = lambda body: ["\\boxed{", "1", "}"]
        yield running


@pytest.fixture
def own(tmp_path):
    """Options for problems of one's own, of which every answer of the server is right but one."""
    data = tmp_path / "own.jsonl"
    answers = [1, 1, 1, 2, 1, 1]
    data.write_text(
        "".join(f'{{"question": "q{n}", "answer": {a}}}\n' for n, a in enumerate(answers))
    )
    return ["--data", str(data), "--out", str(tmp_path / "out")]


def on(server):
    return ["--url", server.url, "--api-model", "m"]


def rows(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_everything_at_once_on_a_tiny_model(tmp_path, own, capsys):
    options = ["--model", str(speaking("byte_level")), "--dtype", "float32", "--max-tokens", "6"]
    options += ["--methods", "plain,majority_vote@2,dynasor+majority_vote@3", "--problems", "3"]
    options += ["--set", "chunk_size=3", "--all-samples", "--columns", "regret,behaviours"]
    assert main(["eval", *options, *own]) == 0
    first = capsys.readouterr()
    report = json.loads(first.out.splitlines()[-1])
    assert [row["method"] for row in report["rows"]] == options[7].split(",")
    assert [len(row.get("pass_at_k", ())) for row in report["rows"]] == [0, 2, 3]
    assert all(0 <= row["regret"] <= 1 for row in report["rows"])
    assert {"verification", "backtracking"} <= report["rows"][0].keys()
    assert all(row["paired_p"] == 1.0 for row in report["rows"][1:])
    assert "9/9" in first.err
    # The same again is read from the journal.
    assert main(["eval", *options, *own]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir()} == {
        "journal.jsonl",
        *(f"comparison.{suffix}" for suffix in ("png", "html", "md", "json")),
    }


def test_an_adapter_answers_all_questions(tmp_path, own, capsys):
    model = speaking("byte_level")
    directory = adapters.adapter(tmp_path / "sql", model)
    options = ["--model", str(model), "--dtype", "float32", "--max-tokens", "6", "--problems", "2"]
    options += ["--methods", "plain"]
    texts = []
    for number, adapter in enumerate(([], ["--adapter", f"sql={directory}"])):
        traces = tmp_path / str(number)
        out = [*own[:-1], str(tmp_path / f"out-{number}")]
        assert main(["eval", *options, *adapter, "--trace", str(traces), *out]) == 0
        loaded = [Trace.load(path) for path in sorted(traces.iterdir())]
        texts.append([str(trace.spans[0].results) for trace in loaded])
    assert len(texts[0]) == len(texts[1]) == 2
    assert texts[0] != texts[1]
    journal = (tmp_path / "out-1" / "journal.jsonl").read_text()
    assert "adapter_model.safetensors" in journal
    assert main(["eval", *options, "--adapter", "a=x", "--adapter", "b=y", *own]) == 2
    assert "several adapters" in capsys.readouterr().err


def test_the_options_reach_the_requests(server, own, capsys):
    options = ["--methods", "plain,majority_vote@3", "--budget", "tokens=50,seconds=100"]
    assert main(["eval", *on(server), *options, "--repeats", "2", *own]) == 0
    plain, vote = rows(capsys)
    assert plain["accuracy"] == vote["accuracy"] == 0.8333
    assert vote["paired_test"] == "sign flip"
    assert {body["max_tokens"] for body in server.requests} <= set(range(1, 51))
    assert len({body["seed"] for body in server.requests}) == len(server.requests)


def test_each_attempt_leaves_its_trace_in_a_folder(server, own, tmp_path, capsys):
    folder = tmp_path / "made" / "traces"
    options = ["--methods", "plain,majority_vote@2", "--problems", "2", "--repeats", "2"]
    assert main(["eval", *on(server), *options, "--trace", str(folder), *own]) == 0
    rows(capsys)
    traces = {path.name: Trace.load(path) for path in folder.iterdir()}
    files = {f"{name},{end}.json" for name in ("plain", "majority_vote@2") for end in ENDS}
    assert traces.keys() == files
    for name, trace in traces.items():
        assert len(trace.tasks()) == (2 if "vote" in name else 1)
        assert "boxed" in trace.scaffolding_outputs[0].text
    assert main(["trace", "show", str(folder / "majority_vote@2,1,1.json")]) == 0
    assert "MajorityVoteController" in capsys.readouterr().out


def test_a_task_brings_its_problems_instruction_and_grader(server, tmp_path, capsys):
    data = tmp_path / "gsm.jsonl"
    data.write_text(json.dumps({"question": "How many?", "answer": "1 + 0 = 1\n#### 1"}) + "\n")
    options = ["--task", "gsm8k", "--data", str(data), "--out", str(tmp_path / "out")]
    assert main(["eval", *on(server), *options, "--methods", "plain", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["task"], report["rows"][0]["accuracy"], err) == ("gsm8k", 1.0, "")
    assert "boxed" in server.requests[0]["messages"][0]["content"]


def test_a_search_proposes_a_command(server, own, capsys):
    options = ["--search", "--search-tokens", "9999", "--search-samples", "2,3"]
    options += ["--search-budgets", "2,none", "--methods", "plain,majority_vote"]
    options += ["--all-samples", "--seed", "5"]
    assert main(["eval", *on(server), *options, *own]) == 0
    out = capsys.readouterr().out
    search = json.loads(out.splitlines()[-1])["search"]
    # Two tokens do not reach the answer.
    assert search["proposed"] == "plain"
    assert search["config"]["method"] == "plain"
    assert search["held_out"][-1]["accuracy"] in (0.6667, 1.0)
    [line] = [line for line in out.splitlines() if line.startswith("Use it: ")]
    command = shlex.split(line.removeprefix("Use it: "))
    assert command[:4] == ["forethought", "eval", "--methods", "plain"]
    assert command[command.index("--seed") + 1] == "5"
    assert "--all-samples" in command
    assert "--unsafe-code" not in command
    assert main([*command[1:], *own[2:]]) == 0  # the search is finished
    assert [row["method"] for row in rows(capsys)] == ["plain"]


def test_each_evaluation_has_a_folder_of_its_own(server, own, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["eval", *on(server), *own[:2], "--methods"]
    assert main([*command, "plain"]) == 0
    assert main([*command, "plain,majority_vote@2", "--seed", "3"]) == 0
    folders = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "runs/eval").iterdir())
    assert folders == ["own-m-plain", "own-m-plain-majority_vote@2"]
    capsys.readouterr()
    num_requests = len(server.requests)
    assert main([*command, "plain"]) == 0
    output = capsys.readouterr().out
    assert "complete before" in output
    assert json.loads(output.splitlines()[-1])["rows"][0]["accuracy"] == 0.8333
    assert len(server.requests) == num_requests
    assert main([*command, "plain", "--fresh"]) == 0
    assert "complete before" not in capsys.readouterr().out
    assert len(server.requests) == num_requests + 6


def test_an_unfinished_evaluation_in_the_folder_is_named_in_words(server, own, tmp_path, capsys):
    command = ["eval", *on(server), *own, "--methods"]
    assert main([*command, "plain"]) == 0
    journal = tmp_path / "out" / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:3]))
    assert main([*command, "majority_vote@2", "--seed", "1"]) == 2
    error = capsys.readouterr().err
    assert "not finished: methods: plain -> majority_vote@2; seed: 0 -> 1." in error
    assert "--fresh" in error
    assert main([*command, "plain"]) == 0  # which is resumed
    assert main([*command, "majority_vote@2", "--seed", "1"]) == 0


def test_without_matplotlib_and_tqdm_there_is_a_report_without_a_plot(
    server, own, tmp_path, monkeypatch, capsys
):
    found = importlib.util.find_spec
    missing = ("matplotlib", "tqdm")

    def find_spec(name, *rest):
        return None if name in missing else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["eval", *on(server), *own, "--methods", "plain"]) == 0
    assert "plot: none, as matplotlib is not installed" in capsys.readouterr().out
    page, markdown = ((tmp_path / f"out/comparison.{end}").read_text() for end in ("html", "md"))
    assert "<table>" in page
    assert "<svg" not in page
    assert "![" not in markdown
    assert not (tmp_path / "out/comparison.png").exists()


def test_a_search_for_a_pipeline_proposes_a_command_that_runs(server, own, capsys):
    server.says = lambda body: ["\\boxed{1}" if "prompt" in body else "[Correct]"]
    options = ["--search-pipelines", "--search-tokens", "9999", "--search-trials", "2"]
    options += ["--search-samples", "2", "--search-techniques", "verifier", "--methods", "plain"]
    options += ["--prompt-format", "{question}", "--max-tokens", "9", "--budget", "tokens=99"]
    assert main(["eval", *on(server), *options, *own]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report["rows"][1]["method"].startswith("archon (generator 2")
    assert report["search"]["proposed"] == "plain"  # as accurate, and cheaper
    [line] = [line for line in out.splitlines() if line.startswith("Use it: ")]
    command = shlex.split(line.removeprefix("Use it: "))
    assert command[command.index("--methods") + 1] == "plain"
    assert main([*command[1:], *own[2:], "--fresh"]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--task", "nonsense"], "nonsense"),
        (["--methods", "plain@3"], "draws no samples"),
        (["--methods", "majority_vote@x"], "follows @"),
        (["--budget", "tokens=0"], "budget of tokens"),
        (["--budget", "tokens"], "Write --budget key=value"),
        (["--budget", "token=5"], "did you mean 'tokens'"),
        (["--repeats", "0"], "invalid --repeats"),
        (["--columns", "regrets"], "did you mean 'regret'"),
        (["--stop-when-decided", "1.5"], "invalid level"),
        (["--stop-when-decided", "--repeats", "2"], "stopped early"),
        (["--methods", "plain,"], "has an empty entry"),
        (["--methods", "plain,majority_vote@2, plain"], "'plain' is given twice"),
        (["--methods", "majority_vote@2", "--temperature", "0"], "all 2 samples of MajorityVote"),
        (["--search", "--search-tokens", "9", "--search-samples", "2, 2"], "@2' is given twice"),
        (["--unsafe-code"], "--unsafe-code needs a task"),
        (
            ["--methods", "repeated_sampling", "--set", "verifier=countdown"],
            "does not name a list of numbers",
        ),
        (["--search"], "--search needs --search-tokens"),
        (["--search-samples", "2"], "--search-samples needs --search"),
        (["--search-trials", "2"], "--search-trials needs --search-pipelines"),
        (["--search-pipelines"], "--search-pipelines needs --search-tokens"),
        (["--search-pipelines", "--search-tokens", "9"], "needs --prompt-format"),
        (["--search-pipelines", "--search", "--search-tokens", "9"], "exclude each other"),
        (["--search", "--search-tokens", "9", "--columns", "regret"], "goes without"),
        (["--search", "--search-tokens", "9", "--budget", "tokens=3"], "--search-budgets"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_asked(server, own, capsys, options, said):
    assert main(["eval", *on(server), *own, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
    assert server.requests == []


def test_a_task_without_an_embedded_model_needs_one(tmp_path, capsys):
    data = tmp_path / "gsm.jsonl"
    data.write_text(json.dumps({"question": "How many?", "answer": "#### 1"}) + "\n")
    assert main(["eval", "--task", "gsm8k", "--data", str(data), "--out", str(tmp_path)]) == 2
    assert "the task gsm8k needs a model" in capsys.readouterr().err
