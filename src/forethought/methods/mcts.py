"""Monte Carlo tree search over steps, with values from a reward model or from rollouts.

An iteration goes from the empty answer down to a beam that has not been continued yet, at each
level to the next beam with the highest upper confidence bound (UCT)::

    mean value + exploration * sqrt(ln(visits of the beam above) / visits)

It continues that beam ``width`` times, gives each new beam a value, and adds the values to all
beams above. The new beams are generated and valued concurrently. A value is the score of the beam;
with ``rollouts`` the mean score of that many complete answers that are sampled from it. A beam
without unfinished beams below it is not entered again, so no iteration repeats another.

The answer is the finished one with the best score, rollouts included; if there is none, the beam
with the best score is completed.

(its search, UCT; not its actions and its second model). Values from a process reward model: Wang et
al., "OpenR", 2024, arXiv 2410.09671. ``exploration`` is UCT's sqrt(2); the other defaults are ours.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field

from typing_extensions import override

from forethought.methods.parts.search import (
    Beam,
    ScoredSearchController,
    Search,
    beam_stages,
)
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    setting,
    with_settings,
)


@dataclass(eq=False)
class _Node:
    """A beam in the tree."""

    beam: Beam
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)
    expanded: bool = False
    visits: int = 0
    total: float = 0.0
    """Sum of the values of its visits."""

    @property
    def exhausted(self) -> bool:
        """Whether no beam below it can be continued."""
        return self.beam.finished or (
            self.expanded and all(child.exhausted for child in self.children)
        )

    @property
    def unvisited(self) -> list[Beam]:
        """The beams from here on that could have been continued and were not."""
        if not self.expanded:
            return [] if self.beam.finished else [self.beam]
        return [beam for child in self.children for beam in child.unvisited]

    def bound(self, exploration: float) -> float:
        """Its upper confidence bound, of a node that is not the root."""
        assert self.parent is not None, "the root is not chosen"
        spread = math.sqrt(math.log(self.parent.visits) / self.visits)
        return self.total / self.visits + exploration * spread

    def expand(self, beams: list[Beam], values: list[float]) -> None:
        """Add beams below this one, except those without a value."""
        self.expanded = True
        for beam, value in zip(beams, values, strict=True):
            if value > -math.inf:
                self.children.append(_Node(beam, self))
                self.children[-1].add(value)

    def add(self, value: float) -> None:
        """Count a visit here and at all nodes above."""
        node: _Node | None = self
        while node is not None:
            node.visits, node.total = node.visits + 1, node.total + value
            node = node.parent


@with_settings
class MCTSController(ScoredSearchController):
    """Continues the steps with the best upper confidence bound (Monte Carlo tree search)."""

    paper = (
        'Qi et al., "Mutual Reasoning Makes Smaller LLMs Stronger Problem-Solvers", 2024. '
        "arXiv 2408.06195"
    )

    name = "mcts"

    default_sample_num: PositiveInt = setting(16, "Iterations: beams that are continued.")
    width: PositiveInt = setting(4, "Next steps that a continued beam gets.")
    _: KW_ONLY
    exploration: NonNegativeFloat = setting(
        math.sqrt(2.0),
        "Weight of what has been visited rarely; the default is for values from 0 to 1.",
    )
    rollouts: NonNegativeInt = setting(
        0, "Complete answers sampled from a new beam for its value; 0: its score is the value."
    )

    def fan_out(self) -> int:
        """The children of each expanded node, with their rollouts."""
        return self.default_sample_num * self.width * (1 + self.rollouts)

    @override
    def search(self, search: Search, count: int) -> Process:
        root = _Node(search.root)
        for _ in range(count):
            if root.exhausted:
                break
            leaf = self._select(root)
            grown = yield from search.step([(leaf.beam, k) for k in range(self.width)])
            beams = yield from search.merge(grown)
            yield from search.score(beams)
            values = yield from self._values(search, beams)
            leaf.expand(beams, values)
        yield from search.score((yield from search.complete_best()))
        best_path = search.best.path if search.best is not None else []
        rest = [beam for beam in root.unvisited if beam not in best_path]
        yield from beam_stages("pruned", "the iterations are over", rest)

    def _select(self, node: _Node) -> _Node:
        while node.children:
            going = [child for child in node.children if not child.exhausted]
            node = max(going, key=lambda child: child.bound(self.exploration))
        return node

    def _values(self, search: Search, beams: list[Beam]) -> Process:
        going = [beam for beam in beams if not beam.finished]
        if not self.rollouts or not going:
            return [_score(beam) for beam in beams]
        numbers = range(self.width, self.width + self.rollouts)
        ends = yield from search.step([(b, k) for b in going for k in numbers], whole=True)
        yield from search.score(ends)
        values = []
        for beam in beams:
            below = [end for end in ends if end.parent is beam] or [beam]
            values.append(math.fsum(map(_score, below)) / len(below))
        return values


def _score(beam: Beam) -> float:
    return -math.inf if beam.score is None else beam.score
