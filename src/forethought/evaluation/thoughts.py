r"""Regret of chains of thought over tokens, and counts of cognitive behaviours in them.

**Regret** (Qu et al., "Optimizing Test-Time Compute via Meta Reinforcement Fine-Tuning" (MRT),
2025, arXiv 2503.07572): how much accuracy a chain gives away by not answering earlier, or by
thinking on without progress, added up over its tokens. The estimator here: at every multiple of
``interval`` tokens of the chain an answer is forced, by the chain so far and a suffix that asks for
the final answer, decoded greedily; after its end a chain has its own answer. So each method m has
an accuracy ``a_m(t)`` at each budget t = 0, interval, 2 interval, ... The best attainable accuracy
at t is the largest of all methods at t or before, ``b(t) = max over m and s <= t of a_m(s)``. The
regret of m is the mean of ``b(t) - a_m(t)`` over the budgets up to the longest chain: from 0, as
good as any of the methods at every budget, to 1. It is relative to the methods compared, of the
chains that they return, and tokens spent on other samples are not in t.

**Behaviours** (Gandhi et al., "Cognitive Behaviors that Enable Self-Improving Reasoners", 2025,
arXiv 2503.01307) are counted by regular expressions, a heuristic: the paper has a model read the
chains. The expressions are those of ``BEHAVIOURS``; one that matches twice counts twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import MappingProxyType

from forethought.errors import ParameterError
from forethought.evaluation.journal import Attempt
from forethought.evaluation.recipe import Recipe
from forethought.evaluation.runner import EvaluationRunner, Request, Source
from forethought.methods.parts.probe import PROBE_SUFFIX
from forethought.scaffolding.controller import NativeGenerationController
from forethought.scaffolding.task import ChatTask

INTERVAL = 64
"""Default number of tokens between forced answers."""
FORCED_TOKENS = 20
"""Tokens of a forced answer at most."""


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(patterns)})\b", re.IGNORECASE)


BEHAVIOURS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        # A result is checked: "let me verify", "check: 3 * 4 = 12", "to make sure".
        "verification": _words(
            r"(?:re-?|double[- ]?)?check(?:s|ed|ing)?",
            r"verif(?:y|ies|ied|ying)",
            r"(?:to )?make sure",
            r"confirm(?:s|ed|ing)?",
        ),
        # An approach is given up: "wait", "that's not right", "back", "let me try another way".
        "backtracking": _words(
            r"back",
            r"backtrack(?:s|ed|ing)?",
            r"wait",
            r"(?:that|this)(?:'s| is| was) (?:not right|wrong|incorrect)",
            r"(?:does|did)(?:n't| not) work",
            r"(?:try|start|go) (?:again|over|another way|something else|a different \w+)",
            r"instead",
        ),
        # The way is divided: "first", "step 2", "next", "we need to find ... first".
        "subgoals": _words(
            r"first(?:ly)?",
            r"second(?:ly)?",
            r"next",
            r"step \d+",
            r"(?:break|split) (?:it|this|the problem) (?:down|up|into)",
        ),
        # From the goal to the givens: "to get 24 we need", "working backwards", "24 = 8 * 3, so".
        "backward_chaining": _words(
            r"work(?:s|ed|ing)? backwards?",
            r"(?:to|in order to) (?:get|reach|make|obtain) [^.,\n]{1,40}(?:,)? (?:we|I|you) need",
            r"(?:goal|target) is",
            r"starting from the (?:goal|target|end|answer|result)",
        ),
    }
)


def count_behaviours(texts: Sequence[str]) -> dict[str, float]:
    """The mean number of occurrences of each behaviour in a text, by a heuristic."""
    return {
        name: sum(len(pattern.findall(text)) for text in texts) / len(texts)
        for name, pattern in BEHAVIOURS.items()
    }


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of thought, and the answers forced along it."""

    forced: tuple[bool, ...]
    """Whether the answer forced after ``i * interval`` tokens is right, by i."""
    correct: bool
    """Whether its own answer is."""

    def at(self, index: int) -> bool:
        """Whether it is right after ``index * interval`` tokens."""
        return self.forced[index] if index < len(self.forced) else self.correct


def regrets(chains: Mapping[str, Sequence[Chain]]) -> dict[str, float]:
    """The regret of each method against the best of all of them, as defined above.

    Args:
        chains: at least one, by method.
    """
    count = 1 + max(len(chain.forced) for of_method in chains.values() for chain in of_method)
    curves = {
        method: [sum(chain.at(i) for chain in of_method) / len(of_method) for i in range(count)]
        for method, of_method in chains.items()
    }
    best, reached = [], 0.0
    for accuracies in zip(*curves.values(), strict=True):
        reached = max(reached, *accuracies)
        best.append(reached)
    return {
        method: sum(b - a for b, a in zip(best, curve, strict=True)) / count
        for method, curve in curves.items()
    }


def force_answers(
    runner: EvaluationRunner,
    recipe: Recipe,
    attempts: Sequence[Attempt],
    on_chain: Callable[[Attempt, Chain], None],
    interval: int = INTERVAL,
) -> None:
    """Force answers along the chains of attempts.

    Args:
        runner: has made the attempts.
        recipe: the method that made them.
        attempts: their texts are the chains.
        on_chain: called for each of them when its answers are there.
        interval: tokens between two answers.

    Raises:
        ParameterError: the prompts are chats, which cannot be continued, or ``interval`` is not
            above 0.
    """
    if interval < 1:
        raise ParameterError("invalid interval", f"got {interval}", "Give at least 1 token")
    if recipe.is_chat:
        raise ParameterError(
            "answers cannot be forced in a chat",
            f"{recipe.name} sends chats, and their answers cannot be continued",
            "Leave the regret out, or write the prompt in the model's own format: --prompt-format",
        )
    forcing = Recipe(
        recipe.name,
        NativeGenerationController(),
        {"temperature": 0.0, "max_tokens": FORCED_TOKENS},
    )
    with runner.open_source() as source:
        requests, owners = list[Request](), list[Attempt]()
        for attempt in attempts:
            for request in _requests(runner, source, recipe, attempt, interval):
                owners.append(attempt)
                requests.append(replace(request, key=(len(requests), 0)))
        outcomes: dict[tuple[int, int], dict[int, bool]] = {one.key: {} for one in attempts}
        waiting = {one.key: sum(other is one for other in owners) for one in attempts}
        source.begin()
        with closing(runner.results(forcing, requests, source)) as results:
            for request, result in results:
                index = request.key[0]
                attempt, output = owners[index], result.result().output
                text = f"\\boxed{{{(output and output.text) or ''}"
                mine = outcomes[attempt.key]
                mine[index] = runner.grade(text, attempt.problem)
                if len(mine) == waiting[attempt.key]:
                    forced = tuple(mine[index] for index in sorted(mine))
                    on_chain(attempt, Chain(forced, attempt.correct))


def _requests(
    runner: EvaluationRunner, source: Source, recipe: Recipe, attempt: Attempt, interval: int
) -> list[Request]:
    """One request for each multiple of ``interval`` tokens before the chain's end."""
    prompt = runner.prompt(source, attempt.problem, recipe)
    assert not isinstance(prompt, ChatTask), "chats are refused before"
    length = max(1, attempt.num_answer_tokens)
    return [
        Request((0, 0), source.extended(prompt, attempt.text, position / length, PROBE_SUFFIX), {})
        for position in range(0, length, interval)
    ]
