"""Tree searches with the arguments of ``tensorrt_llm.scaffolding.contrib.TreeInference``.

They are the methods ``mcts`` and ``tree_of_thoughts``, so two things differ from ``tensorrt_llm``:
steps are sampled up to a blank line rather than read from a numbered list, and without a reward
controller MCTS scores beams by the mean log-probability of their tokens rather than by their
number of words.
"""

from __future__ import annotations

from typing import Literal

from forethought.errors import ParameterError
from forethought.methods.mcts import MCTSController as _MCTS
from forethought.methods.tree_of_thoughts import TreeOfThoughtsController
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.settings import POSITIVE_INT, validated

__all__ = ["MCTSController", "TOTController"]


class MCTSController(_MCTS):
    """Monte Carlo tree search over steps.

    Args:
        generation_controller: generates the steps.
        reward_controller: scores them; None: the mean log-probability of their tokens.
        max_depth: steps of an answer.
        max_iterations: beams that are continued.
        exploration_constant: weight of rarely visited beams.
        num_thoughts_per_step: next steps that a continued beam gets from one expansion.
        expansion_parallel_samples: expansions of a continued beam, side by side.
    """

    def __init__(
        self,
        generation_controller: Controller,
        reward_controller: Controller | None = None,
        max_depth: int = 5,
        max_iterations: int = 100,
        exploration_constant: float = 1.414,
        num_thoughts_per_step: int = 3,
        expansion_parallel_samples: int = 1,
    ) -> None:
        validated("num_thoughts_per_step", num_thoughts_per_step, POSITIVE_INT)
        validated("expansion_parallel_samples", expansion_parallel_samples, POSITIVE_INT)
        super().__init__(
            generation_controller,
            reward_controller,
            validated("max_iterations", max_iterations, POSITIVE_INT),
            num_thoughts_per_step * expansion_parallel_samples,
            exploration=exploration_constant,
            max_steps=validated("max_depth", max_depth, POSITIVE_INT),
        )


class TOTController(TreeOfThoughtsController):
    """Tree of thoughts, breadth first.

    Args:
        generation_controller: generates steps and judgements.
        reward_controller: scores steps in place of the model.
        max_depth: steps of an answer.
        max_iterations: beams that are continued at most; a tree that could have more is refused.
        num_thoughts_per_step: next steps of a beam.
        selection_strategy: ``"best"``: steps are judged one by one; ``"vote"``: against each other.
        branch_factor: beams that go on at each level.

    Raises:
        ParameterError: a setting of the wrong kind; ``"random"``, which chooses no step.
    """

    def __init__(
        self,
        generation_controller: Controller,
        reward_controller: Controller | None = None,
        max_depth: int = 4,
        max_iterations: int = 50,
        num_thoughts_per_step: int = 3,
        selection_strategy: Literal["best", "vote"] = "best",
        branch_factor: int = 2,
    ) -> None:
        if selection_strategy not in ("best", "vote"):
            raise ParameterError(
                f"invalid selection_strategy {selection_strategy!r}",
                "steps are judged one by one or against each other",
                "Set 'best' or 'vote'",
            )
        depth = validated("max_depth", max_depth, POSITIVE_INT)
        width = validated("branch_factor", branch_factor, POSITIVE_INT)
        if (continued := 1 + width * (depth - 1)) > max_iterations:
            raise ParameterError(
                "max_iterations is too small",
                f"a tree of this depth and branch_factor continues up to {continued} beams",
                f"Set max_iterations to {continued} or more, or build a smaller tree",
            )
        super().__init__(
            generation_controller,
            reward_controller,
            width,
            num_thoughts_per_step,
            evaluation="vote" if selection_strategy == "vote" else "value",
            max_steps=depth,
        )
