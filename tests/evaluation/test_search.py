"""The search: what each halving keeps, what is proposed and checked on held-out problems."""

import pytest

from forethought.errors import ParameterError
from forethought.evaluation.comparison import Comparison
from forethought.evaluation.journal import Journal
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import Recipe
from forethought.evaluation.runner import EvaluationRunner
from forethought.evaluation.search import MIN_PROBLEMS, Search, config_of
from forethought.scaffolding import NativeGenerationController, ScriptedWorker
from forethought.scaffolding.budget import Budget

PROBLEMS = [Problem(str(i), f"{i}", str(i)) for i in range(80)]


class Grader:
    """An answer is right if it is long enough for its problem: 1 to 10 characters."""

    def grade(self, text, problem):
        return len(text) > int(problem.answer) % 10

    def close(self):
        pass


def candidate(length, name=None):
    return Recipe(name or f"length {length}", NativeGenerationController(), {"max_tokens": length})


def search(tmp_path, candidates, max_tokens, problems=PROBLEMS):
    worker = ScriptedWorker(lambda prompt, index: "x" * 100)
    runner = EvaluationRunner(lambda: worker, grader=Grader())
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        comparison = Comparison(runner, problems, journal)
        proposal = Search(comparison, len(problems), max_tokens).run(candidates)
    asked = {}
    for call in worker.calls:
        asked.setdefault(call.task.max_tokens, []).append(int(call.prompt))
    return proposal, asked


LENGTHS = (1, 2, 3, 5, 8, 10, 20, 40)


def test_the_cheapest_of_the_most_accurate_is_proposed_and_checked_on_held_out_problems(tmp_path):
    proposal, asked = search(tmp_path, [candidate(n) for n in LENGTHS], 10**6)
    assert proposal.recipe.name == "length 10"
    assert [row.method for row in proposal.held_out] == ["length 1", "length 10"]
    assert [row.correct.value for row in proposal.held_out] == [0.1, 1.0]
    assert proposal.held_out[1].paired.baseline == "length 1"
    held_out = {number for numbers in asked.values() for number in numbers if number >= 40}
    assert held_out == set(range(40, 80))
    assert {n for n, numbers in asked.items() if max(numbers) >= 40} == {1, 10}
    assert "held-out problems length 10 solves 100.0%" in proposal.notes[-1]


def test_what_is_dominated_gets_few_problems_and_the_rest_more(tmp_path):
    _, asked = search(tmp_path, [candidate(n) for n in LENGTHS], 10**6)
    searched = {n: sum(number < 40 for number in numbers) for n, numbers in asked.items()}
    assert searched[20] == searched[40] == 10
    assert searched[10] == 40
    assert sum(count == 40 for count in searched.values()) == 3
    assert all(len(set(numbers)) == len(numbers) for numbers in asked.values())


def test_tokens_that_do_not_last_end_the_halving_and_it_says_so(tmp_path):
    proposal, asked = search(tmp_path, [candidate(n) for n in LENGTHS], 1_000)
    assert sum(n * len(numbers) for n, numbers in asked.items()) <= 1_000
    assert proposal.recipe.name == "length 10"
    notes = " ".join(proposal.notes)
    assert "on 10 problems" in notes
    small, asked = search(tmp_path / "..", [candidate(n) for n in LENGTHS], 50)
    assert set(asked) == {1, 2, 3}
    assert "did not last for length 5, length 8" in " ".join(small.notes)
    assert "did not last for the held-out problems" in " ".join(small.notes)
    assert small.held_out == []


def test_one_candidate_is_checked_alone(tmp_path):
    proposal, asked = search(tmp_path, [candidate(4)], 10**6, PROBLEMS[:12])
    assert [row.method for row in proposal.held_out] == ["length 4"]
    assert asked == {4: list(range(12))}
    assert MIN_PROBLEMS > 6


def test_one_problem_is_too_few(tmp_path):
    with pytest.raises(ParameterError, match="two problems"):
        search(tmp_path, [candidate(1)], 10, PROBLEMS[:1])


def test_the_configuration_is_what_the_method_was_run_with():
    made = Recipe(
        "majority_vote@4 in 300",
        NativeGenerationController(),
        {"temperature": 0.8},
        budget=Budget(tokens=300),
        settings={"early_stop": True},
    )
    assert config_of(made) == {
        "method": "majority_vote@4",
        "settings": {"early_stop": True},
        "sampling_params": {"temperature": 0.8},
        "budget": {"tokens": 300},
    }
