"""How methods read the scores of a reward controller."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from forethought import methods
from forethought.errors import ParameterError
from forethought.scaffolding import Controller, ScriptedWorker
from forethought.scaffolding.reward_controller import scores_of, step_scores_of
from scripted import answer

METHODS = [
    *("best_of_n", "beam_search", "dvts", "mcts", "tree_of_thoughts", "sequential_revision"),
    *("particle_filtering", "particle_gibbs"),
]


class Scores(Controller):
    """Scores the answers that have a 1 in them with ``odd``, and the others with 0.5."""

    def __init__(self, odd: float) -> None:
        super().__init__()
        self.odd = odd

    def process(self, tasks: Any, **kwargs: Any) -> Any:
        self.scores = [self.odd if "1" in task.output_str else 0.5 for task in tasks]
        yield []


class StepScores(Controller):
    step_scores = ([0.5, math.nan], None)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("first", [1, 2])
def test_a_score_that_is_nan_is_refused_wherever_it_stands(name: str, first: int) -> None:
    def reply(prompt: Any, index: int) -> str:
        return f"\\boxed{{{1 + (first + next(calls)) % 2}}}"

    calls = itertools.count()
    options = {"selection": "reward"} if name == "sequential_revision" else {}
    for odd, said in ((0.75, None), (math.nan, "no number")):
        method = methods.create(name, reward_controller=Scores(odd), **options)
        if said is None:
            answer(method, ScriptedWorker(reply))
            continue
        with pytest.raises(ParameterError, match=said):
            answer(method, ScriptedWorker(reply))


def test_scores_that_are_not_there_are_none_or_refused() -> None:
    reward = Scores(0.75)
    with pytest.raises(ParameterError, match="no reward controller"):
        scores_of(reward, 1)
    reward.scores = [None, 2]
    assert scores_of(reward, 2) == [None, 2]
    assert step_scores_of(reward, 2) == [None, None]
    with pytest.raises(ParameterError, match="sample 0 is nan"):
        step_scores_of(StepScores(), 2)
