"""Methods compared on the same problems: journal, early stop, columns, killed and resumed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

import openai_server
from forethought.cli.main import main
from forethought.errors import ParameterError, UnknownNameError
from forethought.evaluation.comparison import Comparison, ComparisonOptions
from forethought.evaluation.journal import Journal
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import Recipe, recipe
from forethought.evaluation.runner import EvaluationProgress, EvaluationRunner
from forethought.evaluation.statistics import SequentialTest, mcnemar
from forethought.scaffolding import NativeGenerationController, ScriptedWorker

PROBLEMS = [Problem(str(i), f"question {i}", str(i)) for i in range(40)]
FIRST = recipe("plain")
SECOND = Recipe("better", NativeGenerationController(), {"max_tokens": 3})


def number_of(prompt):
    return int(prompt.split()[1].split("\n")[0])


class Grader:
    """An answer is right if it is "yes"; ``plain`` says so to every fourth problem."""

    def grade(self, text, problem):
        return text == "yes"

    def close(self):
        pass


def answer(prompt, index):
    return "yes" if index else ("yes!!!" if number_of(prompt) % 4 else "yes")


@pytest.fixture
def comparison(tmp_path):
    """Makes comparisons on one worker, so that a problem's second answer is the second method's."""
    journals = []

    def make(options=None, script=answer, problems=PROBLEMS, **settings):
        worker = ScriptedWorker(script)
        runner = EvaluationRunner(lambda: worker, **{"grader": Grader(), **settings})
        for journal in journals:
            journal.close()
        journals.append(Journal(tmp_path / "journal.jsonl", {"seed": 0}))
        return Comparison(runner, problems, journals[-1], options), worker, journals[-1]

    yield make
    for journal in journals:
        journal.close()


def test_each_method_but_the_first_is_compared_with_the_first(comparison):
    compared, _, journal = comparison()
    first, second = compared.rows([FIRST, SECOND])
    assert first.paired is None
    assert (first.correct.successes, second.correct.successes) == (10, 40)
    paired = second.paired
    assert (paired.baseline, paired.num_better, paired.num_worse) == ("plain", 30, 0)
    assert paired.p == mcnemar(0, 30)
    assert len(journal.records("attempt")) == 80


def test_what_the_journal_has_is_not_asked_again(comparison):
    compared, _, _ = comparison()
    rows = compared.rows([FIRST, SECOND])
    again, worker, _ = comparison()
    assert again.rows([FIRST, SECOND]) == rows
    assert worker.calls == []


def test_the_progress_bar_counts_every_attempt_once(comparison, capsys):
    compared, _, _ = comparison(problems=PROBLEMS[:6])
    compared.attempts(FIRST)
    with EvaluationProgress(6) as bar:
        again = Comparison(compared._runner, PROBLEMS[:6], compared._journal, bar=bar)
        for _ in range(2):
            assert len(again.attempts(FIRST, numbers=range(6))) == 6
    assert "6/6 [" in capsys.readouterr().err.splitlines()[-1]


def test_a_method_ends_when_its_comparison_is_decided(comparison):
    options = ComparisonOptions(stop_level=0.05)
    compared, _, _ = comparison(options, in_flight=1)
    first, second = compared.rows([FIRST, SECOND])
    # Problem 0 is solved by both; the eighth discordant pair decides, that of problem 10.
    assert (first.correct.trials, second.correct.trials) == (40, 11)
    paired = second.paired
    assert (paired.num_better, paired.num_worse, paired.test) == (8, 0, "sequential")
    assert paired.p == pytest.approx(9 / 256)
    assert paired.difference == pytest.approx(8 / 11)


def test_the_decision_is_of_the_first_problems_whichever_are_finished_first(comparison):
    options = ComparisonOptions(stop_level=0.05)
    compared, _, _ = comparison(options, in_flight=40)
    rows = compared.rows([FIRST, SECOND])
    assert rows[1].correct.trials == 11
    again, _, _ = comparison(options)
    assert [row.paired for row in again.rows([FIRST, SECOND])] == [row.paired for row in rows]


def test_methods_that_are_equally_good_are_not_ended(comparison):
    options = ComparisonOptions(stop_level=0.05)
    compared, _, _ = comparison(options, script=lambda prompt, index: "yes")
    second = compared.rows([FIRST, SECOND])[1]
    assert (second.correct.trials, second.paired.p) == (40, 1.0)


def test_early_stop_and_repeats_exclude_each_other(comparison):
    compared, worker, _ = comparison(ComparisonOptions(stop_level=0.05))
    with pytest.raises(ParameterError, match="stopped early"):
        compared.rows([replace(FIRST, repeats=2)])
    compared, worker, _ = comparison(ComparisonOptions(("regret",), stop_level=0.05))
    with pytest.raises(ParameterError, match="regret needs all"):
        compared.rows([FIRST])
    assert worker.calls == []


def test_an_unknown_column_is_refused():
    with pytest.raises(UnknownNameError, match="behaviours"):
        ComparisonOptions(("behavior",))


def test_repeats_are_compared_problem_by_problem(comparison):
    compared, _, _ = comparison(script=lambda prompt, index: "no" if index < 2 else "yes")
    first, second = compared.rows([replace(FIRST, repeats=2), replace(SECOND, repeats=2)])
    assert (first.correct.trials, second.correct.trials) == (80, 80)
    assert second.paired.test == "sign flip"
    assert second.paired.p == 2 / 2**40
    assert second.pass_at_k == {1: 1.0, 2: 1.0}


def forced(prompt, index):
    """Right when 4 characters or more of the chain are there; the chain itself is right."""
    chain = prompt.partition("|")[2]
    kept = chain.partition("...")[0]
    if not chain:
        return "yes and so on"
    return "1}" if len(kept) >= 4 else "2}"


class Boxed(Grader):
    def grade(self, text, problem):
        return text in ("yes and so on", "\\boxed{1}")


def test_the_regret_is_of_answers_forced_along_the_chain(comparison):
    options = ComparisonOptions(("regret",), interval=2)
    settings = {"prompt_format": "{question}|", "grader": Boxed()}
    compared, worker, journal = comparison(options, forced, PROBLEMS[:3], **settings)
    chain = Recipe("plain", NativeGenerationController(), {})
    [row] = compared.rows([chain])
    # 13 tokens: forced at 0, 2, ..., 12; right from 4 on, as is the end; against its own best.
    assert row.columns == {"regret": 0.0}
    assert [record["outcomes"] for record in journal.records("forced")] == [
        [False, False, True, True, True, True, True]
    ] * 3
    asked = len(worker.calls)
    assert asked == 3 + 3 * 7
    assert compared.rows([chain]) == [row]
    assert len(worker.calls) == asked


def test_behaviours_are_columns(comparison):
    compared, _, _ = comparison(
        ComparisonOptions(("behaviours",)), lambda prompt, index: "Wait, check: 3."
    )
    [row] = compared.rows([FIRST])
    assert row.columns["verification"] == 1.0
    assert row.columns["backtracking"] == 1.0
    assert row.columns["subgoals"] == row.columns["backward_chaining"] == 0.0


def test_a_watched_test_gets_the_pairs_in_the_order_of_the_problems():
    class Recorder(SequentialTest):
        pairs = ()

        def add(self, first, second):
            self.pairs = (*self.pairs, (first, second))

    from forethought.evaluation.comparison import _Watch
    from forethought.evaluation.journal import Attempt

    first = [Attempt("plain", PROBLEMS[n], "", n == 0, n) for n in range(4)]
    second = [Attempt("better", PROBLEMS[n], "", n == 1, n) for n in range(4)]
    test = Recorder()
    watch = _Watch(first, test)
    for number, seen in ((2, 0), (1, 0), (0, 3), (3, 4)):
        watch.see(second[number])
        assert len(test.pairs) == watch.num_compared == seen
    assert test.pairs == ((True, False), (False, True), (False, False), (False, False))


# ---- killed and resumed --------------------------------------------------------------------------


def seeded(body):
    """An answer that depends on what is asked, and on the seed."""
    question = body["messages"][0]["content"]
    drawn = hashlib.sha256(f"{question}/{body.get('seed')}".encode()).digest()[0] % 3
    return ["So ", "\\boxed{", str(drawn), "}"]


class Blocking:
    """Answers so many requests; then it says so, and lets the others wait."""

    def __init__(self, count):
        self.left, self.reached, self.go_on = count, threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def __call__(self, body):
        with self._lock:
            self.left -= 1
            blocked = self.left < 0
        if blocked:
            self.reached.set()
            self.go_on.wait(60)
        return seeded(body)


def rows_of(folder):
    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_an_evaluation_killed_in_the_middle_goes_on_to_the_same_rows(tmp_path, capsys):
    data = tmp_path / "own.jsonl"
    data.write_text("".join(f'{{"question": "{n}?", "answer": {n % 3}}}\n' for n in range(12)))
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with openai_server.serving() as server:
        server.says = blocking = Blocking(17)
        options = ["--url", server.url, "--api-model", "m", "--data", str(data), "--in-flight", "4"]
        options += ["--methods", "plain,majority_vote@3", "--all-samples", "--seed", "3"]
        process = subprocess.Popen(
            [sys.executable, "-m", "forethought", "eval", *options, "--out", str(killed)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "OPENAI_API_KEY": "k"},
        )
        try:
            assert blocking.reached.wait(100), process.communicate(timeout=5)[1]
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        blocking.go_on.set()
        server.says = seeded
        lines = (killed / "journal.jsonl").read_bytes().splitlines()[1:]
        assert 8 <= len(lines) < 24
        with (killed / "journal.jsonl").open("ab") as journal:
            journal.write(b'{"attempt": {"method": "pl')  # torn
        first = len(server.requests)
        # Other arguments are refused by name, and what is there is kept.
        assert main(["eval", *options, "--seed", "4", "--out", str(killed)]) == 2
        assert "not finished: seed: 3 -> 4" in capsys.readouterr().err
        assert main(["eval", *options, "--out", str(killed)]) == 0
        plain, vote = (sum(name in line for line in lines) for name in (b'"plain"', b"vote"))
        assert len(server.requests) - first == 12 - plain + 3 * (12 - vote)
        assert main(["eval", *options, "--out", str(whole)]) == 0
        assert rows_of(killed) == rows_of(whole)
        # A finished one makes way for one with other arguments, and is kept.
        assert main(["eval", *options, "--seed", "4", "--out", str(killed)]) == 0
        capsys.readouterr()
        assert main(["eval", *options, "--out", str(killed), "--json"]) == 0
        out, err = capsys.readouterr()
        assert out == (killed / "comparison.json").read_text()
        assert err == ""
