"""Regret over tokens, and behaviours counted by a heuristic."""

from dataclasses import replace

import pytest

from forethought.errors import ParameterError
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import recipe
from forethought.evaluation.runner import EvaluationRunner
from forethought.evaluation.thoughts import (
    BEHAVIOURS,
    Chain,
    count_behaviours,
    force_answers,
    regrets,
)
from forethought.scaffolding import ScriptedWorker


def test_the_regret_of_a_hand_computed_case():
    # Budgets 0, 1, 2 and the end. a: 0, 1/2, 1, 1; b: 0, 0, 0, 1/2; the best: 0, 1/2, 1, 1.
    chains = {
        "a": [Chain((False, True, True), True), Chain((False, False), True)],
        "b": [Chain((False, False, False), True), Chain((False, False, False), False)],
    }
    assert regrets(chains) == pytest.approx({"a": 0.0, "b": (0 + 1 / 2 + 1 + 1 / 2) / 4})


def test_thinking_a_right_answer_away_is_regretted():
    chains = [Chain((False, True, False, False), False)]
    assert regrets({"one": chains}) == {"one": (0 + 0 + 1 + 1 + 1) / 5}


def test_a_chain_that_ends_early_keeps_its_answer():
    short, long = Chain((False,), True), Chain((False, False, False), True)
    assert regrets({"short": [short], "long": [long]}) == {"short": 0.0, "long": 0.5}


def test_a_chain_without_tokens_has_one_answer_forced():
    assert Chain((), False).at(5) is False


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Let me verify this. Check: 3 + 4 = 7. Re-check.", {"verification": 3}),
        ("I double-checked to make sure it holds.", {"verification": 2}),
        ("Wait, that's not right. Let me try another way.", {"backtracking": 3}),
        ("3 * 4 = 12, too large, back", {"backtracking": 1}),
        ("First, find the price. Next, step 2: add.", {"subgoals": 3}),
        ("Working backwards: to get 24, we need 8 * 3.", {"backward_chaining": 2}),
        ("The checkout is waiting, the nexus is backed.", {}),
        ("", {}),
    ],
)
def test_what_the_expressions_find(text, found):
    assert count_behaviours([text]) == {name: found.get(name, 0) for name in BEHAVIOURS}


def test_counts_are_means_over_texts():
    assert count_behaviours(["wait", "no", "wait, wait", ""])["backtracking"] == 3 / 4


def test_answers_in_chats_cannot_be_forced():
    runner = EvaluationRunner(lambda: ScriptedWorker(["a"]))
    chat = replace(recipe("plain"), is_chat=True)
    attempts = runner.attempts(chat, [Problem("0", "q", "1")])
    with pytest.raises(ParameterError, match="in a chat"):
        force_answers(runner, chat, attempts, lambda attempt, chain: None)
    with pytest.raises(ParameterError, match="interval"):
        force_answers(runner, recipe("plain"), attempts, lambda attempt, chain: None, 0)
