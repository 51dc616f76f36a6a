"""``forethought bench methods``: which rows there are, what they are compared with, and how they
go on where they were ended."""

import json
from dataclasses import replace

import pytest

from forethought import methods
from forethought.bench.method_tasks import (
    MethodTask,
    calibration_problems,
    held_out_problems,
    method_task,
)
from forethought.bench.methods import (
    LEFT_OUT,
    PROBE,
    MethodBench,
    MethodComparison,
    cells,
    chosen,
    fit_policy,
    journal_path,
    json_line,
    markdown,
    text,
)
from forethought.cli.main import main
from forethought.errors import ParameterError, UnknownNameError
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import recipe
from forethought.evaluation.runner import EvaluationRunner
from forethought.methods.compute_optimal import Policy
from forethought.methods.stack import split
from forethought.scaffolding import CheckerController, ScriptedWorker

POLICY = Policy(2, (0.0,), ("probes", "majority_vote@4"))
PROBLEMS = [Problem(str(n), f"Use 1, {n} and 3 to make 9.", "x") for n in range(4)]
TASK = MethodTask(10, 20, lambda problem: "odd" if int(problem.name) % 2 else "even")


@pytest.mark.parametrize(
    "options",
    [["--only", "plain"], ["--against", "plain"], ["--policy", "x.json"]],
    ids=["only", "against", "policy"],
)
def test_a_calibration_refuses_what_it_has_no_use_for(options, tmp_path, capsys):
    file = str(tmp_path / "policy.json")
    assert main(["bench", "methods", "--calibrate", file, "--out", str(tmp_path), *options])
    assert f"Leave {options[0]} out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_calibration_needs_a_task_with_an_exact_checker(tmp_path, capsys):
    for task in ("arithmetic", "facts", "context"):
        file = str(tmp_path / "policy.json")
        out = ["--out", str(tmp_path), "--task", task]
        assert main(["bench", "methods", "--calibrate", file, *out])
        assert "exact checker" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_policy_without_a_folder_to_be_saved_in_is_refused_before_anything_runs(tmp_path, capsys):
    file = str(tmp_path / "missing" / "policy.json")
    assert main(["bench", "methods", "--calibrate", file, "--out", str(tmp_path / "out")])
    assert "there is no such folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_policy_by_score_is_refused_on_a_task_without_an_exact_checker():
    policy = replace(POLICY, difficulty="score")
    bench = MethodBench(method_task("arithmetic"), 100, policy=policy)
    with pytest.raises(ParameterError, match="exact checker"):
        bench.recipes()


class Grader:
    def grade(self, text, problem):
        return text == "right"

    def close(self):
        pass


def rows(folder, says, recipes=None, settings=None):
    worker = ScriptedWorker(says)
    runner = EvaluationRunner(lambda: worker, grader=Grader())
    table = MethodComparison(runner, PROBLEMS, TASK, settings or {"seed": 0}, {})
    recipes = recipes or [
        recipe("plain"),
        recipe("majority_vote@2"),
        recipe(
            "best_of_n@2",
            settings={"reward_controller": CheckerController(lambda _, said: said == "right")},
        ),
    ]
    return table.rows(recipes, folder), worker


def test_every_method_has_a_row_or_a_reason_why_it_has_none():
    made = MethodBench(method_task("countdown"), 820, policy=POLICY).recipes()
    names = [one.name for one in made]
    assert len(names) == len(set(names))
    assert names[:2] == ["plain", "majority_vote@4"]
    in_rows = {part.name for name in names for part in split(name.partition(",")[0])}
    assert in_rows | set(LEFT_OUT) == set(methods.names())
    assert not in_rows & set(LEFT_OUT)


def test_the_budget_decides_how_many_samples_methods_draw():
    bench = [MethodBench(method_task("countdown"), tokens) for tokens in (1, 820, 3280)]
    assert [one.num_samples for one in bench] == [2, 4, 16]
    votes = {one.name: one for one in bench[1].recipes()}
    assert votes["budget_vote@4"].settings["total_tokens"] == 820
    assert "max_tokens" not in votes["budget_vote@4"].sampling_params
    assert votes["best_of_n@4"].sampling_params["max_tokens"] == 450


def test_rows_are_chosen_by_name_or_by_how_it_begins():
    made = MethodBench(method_task("countdown"), 820).recipes()
    found = [one.name for one in chosen(made, "best_of_n@4, repeated")]
    assert found == [
        *("plain", "majority_vote@4", "best_of_n@4"),
        *("repeated_sampling@8", "repeated_sampling@16"),
    ]
    assert chosen(made, None) == made
    with pytest.raises(UnknownNameError):
        chosen(made, "zzz")
    with pytest.raises(UnknownNameError):
        chosen(made, None, "zzz")
    assert [one.name for one in chosen(made, "plain", "mcts@4")][-1] == "mcts@4"


def test_problems_are_the_shipped_ones_and_further_ones_that_were_not_trained_on():
    shipped = held_out_problems("countdown", 300)
    more = held_out_problems("countdown", 302)
    assert more[:300] == shipped
    assert len({problem.question for problem in more}) == 302
    assert all(method_task("countdown").group_of(problem) == "4 numbers" for problem in more[300:])
    assert len(held_out_problems("arithmetic", 201)) == 201
    assert len(held_out_problems("countdown", 5)) == 5
    with pytest.raises(UnknownNameError, match="countdown"):
        method_task("countdwn")


def test_a_policy_is_fitted_on_other_problems_than_it_is_measured_on():
    found = calibration_problems("countdown", 20)
    assert {method_task("countdown").group_of(problem) for problem in found} == {
        "3 numbers",
        "4 numbers",
    }
    measured = {problem.question for problem in held_out_problems("countdown", 400)}
    assert not measured & {problem.question for problem in found}
    assert found == calibration_problems("countdown", 20)
    assert found != calibration_problems("countdown", 20, seed=1)


def test_a_policy_chooses_by_rewards_and_samples_its_probe():
    made = MethodBench(method_task("countdown"), 820).calibration_recipes()
    assert [one.name for one in made] == [
        *(PROBE, "best_of_n@4", "particle_filtering@2", "particle_filtering@4"),
    ]
    assert {one.sampling_params["temperature"] for one in made} == {0.8}
    assert all(isinstance(one.controller.reward_controller, CheckerController) for one in made[1:])
    with pytest.raises(ParameterError, match="no policy can be fitted"):
        MethodBench(method_task("arithmetic"), 820).calibration_recipes()


def test_a_fitted_policy_has_at_most_half_of_the_tokens_of_best_of_n(tmp_path):
    """Odd problems are solved at once, others by best of N alone, for 20 tokens at 5 each."""

    def says(prompt, index):
        return "right" if prompt[7] in "13" or index > 3 else "wrong"

    reward = {"reward_controller": CheckerController(lambda _, said: said == "right")}
    probe, best = recipe("plain"), recipe("best_of_n@4", settings=reward)
    table, _ = rows(tmp_path, says, [replace(probe, name=PROBE), best])
    journals = {one.row.method: journal_path(tmp_path, one.row.method) for one in table}
    policy = fit_policy(table, journals)
    assert (policy.num_probes, policy.difficulty, policy.methods) == (1, "score", ("probes",) * 2)
    assert policy.tokens <= table[1].row.tokens_per_attempt / 2
    made = MethodBench(method_task("countdown"), 820, policy=policy).recipes()
    [chosen_by_policy] = [one for one in made if one.name == "compute_optimal"]
    assert chosen_by_policy.sampling_params["temperature"] == 0.8
    assert chosen_by_policy.to_dict()["settings"] == {"policy": str(policy)}


def test_rows_are_compared_with_plain_decoding_and_the_vote_and_have_groups(tmp_path):
    found, _ = rows(tmp_path, lambda prompt, index: "right" if prompt[7] in "13" else "wrong")
    plain, vote, best = found
    assert set(plain.against) == {"majority_vote@2"}
    assert set(vote.against) == {"plain"}
    assert set(best.against) == {"plain", "majority_vote@2"}
    assert plain.groups["odd"][0].value == 1.0
    assert plain.groups["even"][0].value == 0.0
    assert best.against["plain"].p == 1.0
    head, *lines = cells(found)
    assert head[6:] == ("even", "odd", "p, plain", "p, majority_vote@2")
    assert len(lines) == 3
    assert "drag: left out" in text(found, LEFT_OUT)
    assert markdown(found).count("\n") == 5
    report = json.loads(json_line(found, LEFT_OUT, seed=0))
    assert report["rows"][2]["groups"]["odd"]["accuracy"] == 1.0


def test_rows_go_on_where_they_were_ended_and_refuse_other_settings(tmp_path):
    def right(prompt, index):
        return "right"

    rows(tmp_path, right)
    again, worker = rows(tmp_path, right)
    assert worker.calls == []
    assert [one.row.correct.value for one in again] == [1.0] * 3
    (journal,) = tmp_path.glob("plain.jsonl")
    finished = journal.read_text()
    journal.write_text("".join(finished.splitlines(keepends=True)[:2]))
    with pytest.raises(ParameterError, match=r"not finished: seed: 0 -> 1"):
        rows(tmp_path, right, settings={"seed": 1})
    journal.write_text(finished)
    _, worker = rows(tmp_path, right, settings={"seed": 1})
    assert worker.calls


def test_what_cannot_be_is_refused_before_anything_is_loaded(capsys, tmp_path):
    out = ["--out", str(tmp_path)]
    assert main(["bench", "methods", "--task", "countdwn", *out]) == 2
    assert main(["bench", "methods", "--tokens", "0", *out]) == 2
    assert main(["bench", "methods", "--policy", str(tmp_path / "none.json"), *out]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "did you mean 'countdown'" in said[0]
    assert "--tokens" in said[1]
    assert "policy" in said[2]


@pytest.mark.slow
def test_the_command_writes_the_table_and_where_it_was_measured(capsys, tmp_path):
    sizes = ["--problems", "1", "--tokens", "1", "--in-flight", "2"]
    assert (
        main(["bench", "methods", *sizes, "--only", "plain", "--json", "--out", str(tmp_path)]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in found["rows"]] == ["plain", "majority_vote@2"]
    assert found["machine"]["threads"] >= 1
    assert "| majority_vote@2 |" in (tmp_path / "countdown" / "methods.md").read_text()


def test_rows_are_compared_with_another_row_too(tmp_path):
    recipes = [recipe("plain"), recipe("majority_vote@3"), recipe("no_thinking")]
    runner = EvaluationRunner(lambda: ScriptedWorker(lambda *_: "right"), grader=Grader())
    table = MethodComparison(runner, PROBLEMS, TASK, {"seed": 0}, {})
    found = table.rows(recipes, tmp_path, against=["no_thinking"])
    assert [[*one.against] for one in found] == [
        ["majority_vote@3", "no_thinking"],
        ["plain", "no_thinking"],
        ["plain", "majority_vote@3"],
    ]
    assert [*cells(found)[0]][-3:] == ["p, plain", "p, majority_vote@3", "p, no_thinking"]
    assert {len(line) for line in cells(found)} == {11}
