"""Tree of thoughts: the model proposes steps and judges them itself, in a tree search.

Steps ("thoughts") are sampled one by one (``"sample"``), or the model is asked for several at once,
one per line (``"propose"``). They are judged one by one: the model is asked several times whether
the answer so far can succeed, and says sure, likely or impossible (``"value"``); or against each
other: it is asked several times which one is the most promising (``"vote"``)::

    breadth first   all steps from the b best beams -> judge -> the b best -> ...
    depth first     the best step first, down to an answer; beams judged too low are not entered

Proposed steps do not end an answer: that is generated as the last of ``max_steps``.
Questions to the model are appended to a fork of the beam that they are about.

The numbers are those of its Game of 24 (b = 5, three values of sure = 20, likely = 1 and impossible
= 0.001); the wording of the prompts is ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from forethought.errors import ParameterError
from forethought.methods.parts.search import (
    Beam,
    Search,
    SearchController,
    beam_stages,
    best_of,
)
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import TEXT, PositiveInt, setting, validated, with_settings
from forethought.scaffolding.task import GenerationTask

PROPOSE = "\n\nPossible next steps, one per line:\n"
VALUE = "\n\nCan this still lead to the right answer? One word (sure, likely or impossible):"
VOTE = "\n\n{choices}\nThe number of the most promising of these attempts is"
VALUES: Mapping[str, float] = {"sure": 20.0, "likely": 1.0, "impossible": 0.001}
"""What each word of a judgement counts."""


@with_settings
class TreeOfThoughtsController(SearchController):
    """Searches over steps that the model proposes and judges itself (tree of thoughts)."""

    paper = (
        'Yao et al., "Tree of Thoughts: Deliberate Problem Solving with Large Language Models", '
        "2023. arXiv 2305.10601"
    )

    name = "tree_of_thoughts"

    reward_controller: Controller | None = setting(None, "Scores beams in place of the model.")
    default_sample_num: PositiveInt = setting(
        5, "Beams that breadth first search continues; depth first search does not use it."
    )
    num_thoughts: PositiveInt = setting(
        5, "Next steps that are sampled for a beam, or at most taken from a proposal."
    )
    _: KW_ONLY
    strategy: Literal["bfs", "dfs"] = setting("bfs", "Breadth first or depth first search.")
    thoughts: Literal["sample", "propose"] = setting(
        "sample", "Steps are sampled one by one, or several are proposed at once, one per line."
    )
    evaluation: Literal["value", "vote"] = setting(
        "value", "The model judges beams one by one, or votes for the best of a level."
    )
    num_evaluations: PositiveInt = setting(3, "Judgements per beam, or votes per level.")
    threshold: Annotated[float, Field(allow_inf_nan=False)] = setting(
        0.01, "Depth first search enters beams with a higher score only."
    )
    max_expansions: PositiveInt = setting(100, "Beams that depth first search continues at most.")
    judgement_tokens: PositiveInt = setting(16, "Most tokens of a judgement.")
    prompts: Mapping[str, str] | None = setting(
        None,
        'Texts for `"propose"`, `"value"` and `"vote"` in place of the built-in ones; that of '
        "the vote has `{choices}` in it.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._prompts = _checked_prompts(self.prompts or {})

    def fan_out(self) -> int:
        """The thoughts, each with its evaluations."""
        steps = self.default_sample_num * self.max_steps
        expanded = steps if self.strategy == "bfs" else self.max_expansions
        return expanded * self.num_thoughts * (1 + self.num_evaluations)

    @override
    def search(self, search: Search, count: int) -> Process:
        if self.strategy == "bfs":
            yield from self._breadth_first(search, count)
        else:
            yield from self._depth_first(search)
        yield from self._judge(search, (yield from search.complete_best()))

    def _breadth_first(self, search: Search, count: int) -> Process:
        beams_kept = [search.root]
        while not all(beam.finished for beam in beams_kept):
            going = [beam for beam in beams_kept if not beam.finished]
            grown = yield from self._continue(search, going)
            ended = [beam for beam in beams_kept if beam.finished]
            beams = yield from search.merge([*ended, *grown])
            yield from self._judge(search, beams)
            beams_kept = best_of(beams, count)
            why = f"it is not among the best {len(beams_kept)}"
            yield from beam_stages(
                "pruned", why, [beam for beam in beams if beam not in beams_kept]
            )

    def _depth_first(self, search: Search) -> Process:
        waiting = [search.root]
        for _ in range(self.max_expansions):
            if not waiting:
                break
            beam = waiting.pop()
            if beam.finished:
                break
            beams = yield from search.merge((yield from self._continue(search, [beam])))
            yield from self._judge(search, beams)
            entered = [b for b in beams if b.score is not None and b.score > self.threshold]
            waiting += reversed(best_of(entered, len(entered)))
            why = f"its score is not above {self.threshold}"
            yield from beam_stages("pruned", why, [beam for beam in beams if beam not in entered])

    # ---- steps --------------------------------------------------------------------------------

    def _continue(self, search: Search, beams: Sequence[Beam]) -> Process:
        """The next steps of the beams, all of which have as many; the last one is generated."""
        if self.thoughts == "sample" or any(map(search.is_last, beams)):
            continuations = [
                (beam, number) for beam in beams for number in range(self.num_thoughts)
            ]
            grown: list[Beam] = yield from search.step(continuations)
            return grown
        prompt = self._prompts["propose"]
        tasks = [search.aside("proposal", beam, prompt, 0) for beam in beams]
        yield from search.ask(tasks)
        return [
            step
            for beam, task in zip(beams, tasks, strict=True)
            for step in self._proposed(search, beam, task)
        ]

    def _proposed(self, search: Search, beam: Beam, task: GenerationTask) -> list[Beam]:
        lines = [line.strip() for line in (task.output_str or "").splitlines()]
        steps = dict.fromkeys(line for line in lines if line)
        end = search.settings.step_token
        return [
            search.insert(beam, step + end, number)
            for number, step in enumerate([*steps][: self.num_thoughts])
        ]

    # ---- judgements ---------------------------------------------------------------------------

    def _judge(self, search: Search, beams: Sequence[Beam]) -> Process:
        if self.reward_controller is not None:
            yield from search.score(beams)
            return
        new = [beam for beam in beams if beam.score is None]
        search.note(new)  # before: if the budget ends here, one of them is the answer
        if self.evaluation == "value":
            yield from self._value(search, new)
        elif beams:
            yield from self._vote(search, beams)
        yield from beam_stages("scored", "", new)

    def _value(self, search: Search, beams: Sequence[Beam]) -> Process:
        numbers = range(self.num_evaluations)
        replies = {
            id(beam): [self._question(search, beam, self._prompts["value"], n) for n in numbers]
            for beam in beams
        }
        yield from search.ask([task for tasks in replies.values() for task in tasks])
        for beam in beams:
            beam.score = math.fsum(_value_of(task.output_str or "") for task in replies[id(beam)])

    def _vote(self, search: Search, beams: Sequence[Beam]) -> Process:
        choices = "\n".join(f"{n}.\n{beam.text}" for n, beam in enumerate(beams, start=1))
        prompt = self._prompts["vote"].replace("{choices}", choices)
        numbers = range(self.num_evaluations)
        tasks = [self._question(search, search.root, prompt, number) for number in numbers]
        yield from search.ask(tasks)
        votes = [_number_of(task.output_str or "") for task in tasks]
        for number, beam in enumerate(beams, start=1):
            beam.score = float(votes.count(number))

    def _question(self, search: Search, beam: Beam, prompt: str, number: int) -> GenerationTask:
        limit = self.judgement_tokens
        return search.aside(f"judgement {number}", beam, prompt, number, max_tokens=limit)


def _value_of(text: str) -> float:
    """The value of the last judgement in a text; 0 if there is none."""
    words = re.findall("|".join(VALUES), text.lower())
    return VALUES[words[-1]] if words else 0.0


def _number_of(text: str) -> int | None:
    match = re.search(r"\d+", text)
    return int(match[0]) if match else None


def _checked_prompts(custom: Mapping[str, str]) -> dict[str, str]:
    defaults = {"propose": PROPOSE, "value": VALUE, "vote": VOTE}
    if unknown := custom.keys() - defaults:
        raise ParameterError.unknown("prompts", unknown, defaults)
    prompts = defaults | {name: validated(name, text, TEXT) for name, text in custom.items()}
    if "{choices}" not in prompts["vote"]:
        raise ParameterError(
            "invalid prompt of the vote", "it has no {choices} in it", "Say where they stand"
        )
    return prompts
