r"""Small worlds of facts, and questions about them: from documents, and from a context.

A world says how many things are in which box, and which boxes are neighbours. A question is
answered by one fact, by the sum of two, or by a fact about a neighbour, which another fact names.
Answers stand in ``\boxed{}``.
"""

import random
from dataclasses import dataclass, field
from itertools import combinations

NAMES = tuple("ABCDEFGHJKLMNPQRSTUVWXYZ")
"""Of boxes. Each is one token in every place, as a model has to copy it."""
ITEMS = ("nuts", "coins", "cards", "books", "pens", "cups", "eggs", "keys")
HIGHEST = 49


@dataclass(frozen=True, slots=True)
class FactQuestion:
    """A question with the follow-up questions that lead to its answer."""

    text: str
    steps: tuple[tuple[str, str], ...]
    """Follow-up questions and their answers."""
    working: str
    """The calculation, with the answer in its box."""
    answer: str


@dataclass(frozen=True)
class World:
    """Facts, as documents.

    Args:
        num_names: boxes.
        num_items: kinds of things; every box has some of each.
        seed: of the numbers.
    """

    num_names: int
    num_items: int
    seed: int
    names: tuple[str, ...] = field(init=False)
    items: tuple[str, ...] = field(init=False)
    counts: dict[tuple[str, str], int] = field(init=False)
    """(name, item) -> how many."""
    neighbours: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(f"world {self.seed}")
        names = tuple(rng.sample(NAMES, self.num_names))
        items = tuple(rng.sample(ITEMS, self.num_items))
        counts = {(name, item): rng.randint(1, HIGHEST) for name in names for item in items}
        others = dict(zip(names, (*names[1:], names[0]), strict=True))
        for key, value in (("names", names), ("items", items), ("counts", counts)):
            object.__setattr__(self, key, value)
        object.__setattr__(self, "neighbours", others)

    @property
    def documents(self) -> list[str]:
        """One sentence each."""
        had = [f"Box {name} has {n} {item}." for (name, item), n in self.counts.items()]
        near = self.neighbours.items()
        return had + [f"The neighbour of box {name} is box {other}." for name, other in near]

    def question(self, rng: random.Random) -> FactQuestion:
        """A question of one of three kinds."""
        one, other = rng.sample(self.names, 2)
        item = rng.choice(self.items)
        kind = rng.randrange(3)
        if kind == 0:
            return self._direct(one, item)
        if kind == 1:
            return self._together((one, other), item)
        who = self.neighbours[one]
        steps = (
            (f"What is the neighbour of box {one}?", f"box {who}"),
            *self._direct(who, item).steps,
        )
        answer = str(self.counts[who, item])
        text = f"How many {item} does the neighbour of box {one} have?"
        return FactQuestion(text, steps, boxed(answer), answer)

    def _direct(self, name: str, item: str) -> FactQuestion:
        answer = str(self.counts[name, item])
        text = f"How many {item} does box {name} have?"
        return FactQuestion(text, ((text, answer),), boxed(answer), answer)

    def _together(self, names: tuple[str, ...], item: str) -> FactQuestion:
        steps = tuple(step for name in names for step in self._direct(name, item).steps)
        values = [self.counts[name, item] for name in names]
        text = f"How many {item} do boxes {_listed(names)} have together?"
        return FactQuestion(text, steps, _sum(values), str(sum(values)))


def _listed(names: tuple[str, ...]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"


def boxed(answer: str) -> str:
    """As methods extract it."""
    return f"\\boxed{{{answer}}}"


def _sum(values: list[int]) -> str:
    total, parts = values[0], []
    for number, value in enumerate(values[1:], start=2):
        result = str(total + value)
        parts.append(f"{total} + {value} = {boxed(result) if number == len(values) else result}")
        total += value
    return ", ".join(parts)


def example_questions(world: World, count: int) -> list[FactQuestion]:
    """Questions about a world in a fixed order, the first three of different kinds."""
    rng = random.Random(0)
    by_kind: dict[int, FactQuestion] = {}
    questions: list[FactQuestion] = []
    while len(questions) < count:
        question = world.question(rng)
        kind = len(question.steps) + ("neighbour" in question.text)
        if kind not in by_kind or len(by_kind) == 3:
            by_kind[kind] = question
            questions.append(question)
    return questions


def _last_step(values: list[int]) -> str:
    return f"{sum(values[:-1])} + {values[-1]} = {sum(values)}"


CONTEXT_NAMES = 4


@dataclass(frozen=True, slots=True)
class Context:
    """Some persons with things of one kind, and sums that may be asked for."""

    text: str
    inferences: str
    """All sums of two and three."""
    questions: tuple[tuple[str, str, str], ...]
    """Question, working with the answer in its box, answer."""


def sample_context(rng: random.Random) -> Context:
    """A new context."""
    world = World(CONTEXT_NAMES, 1, rng.getrandbits(40))
    [item] = world.items
    groups = [group for size in (2, 3) for group in combinations(world.names, size)]
    values = {group: [world.counts[name, item] for name in group] for group in groups}
    return Context(
        " ".join(f"Box {name} has {world.counts[name, item]} {item}." for name in world.names),
        " ".join(f"Boxes {_listed(group)}: {_last_step(values[group])}." for group in groups),
        tuple(
            (
                f"How many {item} do boxes {_listed(group)} have together?",
                _sum(values[group]),
                str(sum(values[group])),
            )
            for group in groups
        ),
    )
