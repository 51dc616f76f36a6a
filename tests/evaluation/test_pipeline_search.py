"""The search for a pipeline: what is tried, within which tokens, and what is proposed."""

from __future__ import annotations

import sys

import pytest

from forethought.errors import DependencyError, ParameterError
from forethought.evaluation.comparison import Comparison
from forethought.evaluation.journal import Journal
from forethought.evaluation.pipeline_search import PipelineSearch, PipelineSpace
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import recipe
from forethought.evaluation.runner import EvaluationRunner
from forethought.scaffolding import ScriptedWorker
from forethought.scaffolding.sampling import derived_seed

PROBLEMS = [Problem(str(i), f"question {i}", "right") for i in range(12)]
SPACE = PipelineSpace(samples=(1, 4), top_k=(1,), techniques=("verifier", "fuser"))


class Grader:
    def grade(self, text, problem):
        return text == problem.answer

    def close(self):
        pass


class Model(ScriptedWorker):
    """Of the samples of a generator only the last of four is right, which a verifier sees."""

    def __init__(self):
        self._seeds = {}
        super().__init__(self._says)

    def _says(self, prompt, index):
        if prompt.startswith("Check an"):
            return "[Correct]" if "\nright" in prompt else "[Incorrect]"
        if prompt.startswith("Here are"):
            return "fused"
        seed = self.calls[-1].task.seed
        wanted = self._seeds.setdefault(prompt, seed)  # the plain method comes first
        for number in (0, 0, 3):  # first layer, first component, last sample
            wanted = derived_seed(wanted, number)
        return "right" if seed == wanted else "wrong"


def search(tmp_path, max_tokens=10**6, problem_tokens=None, **settings):
    worker = Model()
    runner = EvaluationRunner(lambda: worker, grader=Grader())
    tmp_path.mkdir(exist_ok=True)
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        comparison = Comparison(runner, PROBLEMS, journal)
        proposal = PipelineSearch(comparison, len(PROBLEMS), max_tokens).propose(
            recipe("plain"), space=SPACE, problem_tokens=problem_tokens, **settings
        )
    return proposal, worker


def test_the_pipeline_with_the_right_answers_is_proposed_and_checked_on_held_out_problems(tmp_path):
    proposal, _ = search(tmp_path, num_trials=12)
    assert proposal.recipe.name == "archon (generator 4 > verifier)"
    assert proposal.recipe.settings["pipeline"]["layers"][1] == [{"type": "verifier"}]
    assert [row.method for row in proposal.held_out] == ["plain", proposal.recipe.name]
    assert proposal.to_dict()["config"]["method"] == "archon"


def test_no_pipeline_is_run_twice_and_the_same_seed_tries_the_same(tmp_path):
    first, worker = search(tmp_path / "a", num_trials=12, seed=3)
    again, other = search(tmp_path / "b", num_trials=12, seed=3)
    tried = [row.method for row in first.rows]
    assert len(tried) == len(set(tried)) <= 1 + 6
    assert tried == [row.method for row in again.rows]
    assert sorted(worker.prompts) == sorted(other.prompts)


def test_tokens_that_do_not_last_end_the_search_and_it_says_so(tmp_path):
    proposal, _ = search(tmp_path, max_tokens=600, num_trials=12)
    assert "The tokens lasted for" in proposal.notes[0]
    assert len(proposal.rows) < 7


def test_each_problem_is_solved_within_its_budget(tmp_path):
    proposal, _ = search(tmp_path, num_trials=12, problem_tokens=4)
    assert all(row.tokens_per_attempt <= 5 for row in proposal.rows)
    assert all(row.correct.value == 0 for row in proposal.rows), "wrong is cut to wron"


def test_mistakes_are_refused_and_a_missing_package_is_named(tmp_path, monkeypatch):
    with pytest.raises(ParameterError, match="techniques"):
        PipelineSpace(techniques=("debate",))
    for counts in ((), (0,)):
        with pytest.raises(ParameterError, match="invalid samples"):
            PipelineSpace(samples=counts)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(DependencyError, match=r"forethought\[archon\]"):
        search(tmp_path)
