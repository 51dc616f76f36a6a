r"""Small worlds of facts, and questions about them: from documents, and from a context.

A world says how many things are in which box, and which boxes are neighbours. A question is
answered by one fact, by the sum of two, or by a fact about a neighbour, which another fact names.
The prompts are those of ``drag``, ``iterdrag`` and ``sleep_time``; answers stand in ``\boxed{}``.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from forethought.methods.iterdrag import FINAL, FOLLOW_UP, INTERMEDIATE
from forethought.methods.parts.bm25 import BM25Index
from forethought.methods.parts.retrieval import INSTRUCTION
from forethought.methods.sleep_time import SLEEP_PROMPT
from forethought.training.chat_tokenizer import END
from forethought.training.instruct.judging import Dialogue, asked, said

NAMES = tuple("ABCDEFGHJKLMNPQRSTUVWXYZ")
"""Of boxes. Each is one token in every place, as a model has to copy it."""
ITEMS = ("nuts", "coins", "cards", "books", "pens", "cups", "eggs", "keys")
HIGHEST = 49
NUM_DOCUMENTS = (2, 3, 4, 5)
"""Documents that are retrieved for a question."""


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
        return FactQuestion(text, steps, _box(answer), answer)

    def _direct(self, name: str, item: str) -> FactQuestion:
        answer = str(self.counts[name, item])
        text = f"How many {item} does box {name} have?"
        return FactQuestion(text, ((text, answer),), _box(answer), answer)

    def _together(self, names: tuple[str, ...], item: str) -> FactQuestion:
        steps = tuple(step for name in names for step in self._direct(name, item).steps)
        values = [self.counts[name, item] for name in names]
        text = f"How many {item} do boxes {_listed(names)} have together?"
        return FactQuestion(text, steps, _sum(values), str(sum(values)))


def _listed(names: tuple[str, ...]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"


def _box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _sum(values: list[int]) -> str:
    """The running sum, with the last result in a box."""
    total, parts = values[0], []
    for number, value in enumerate(values[1:], start=2):
        result = str(total + value)
        parts.append(f"{total} + {value} = {_box(result) if number == len(values) else result}")
        total += value
    return ", ".join(parts)


def example_questions(world: World, count: int) -> list[FactQuestion]:
    """Questions about a world in a fixed order, the first three of different kinds."""
    rng = random.Random(0)
    by_kind: dict[int, FactQuestion] = {}
    found: list[FactQuestion] = []
    while len(found) < count:
        question = world.question(rng)
        kind = len(question.steps) + ("neighbour" in question.text)
        if kind not in by_kind or len(by_kind) == 3:
            by_kind[kind] = question
            found.append(question)
    return found


def _last_step(values: list[int]) -> str:
    """The last addition of a running sum."""
    return f"{sum(values[:-1])} + {values[-1]} = {sum(values)}"


# ---- documents -----------------------------------------------------------------------------------


class Retriever:
    """Prompts with documents, as ``RetrievalController`` writes them."""

    def __init__(self, world: World, num_documents: int) -> None:
        self.index, self.num_documents = BM25Index(world.documents), num_documents

    def block(self, query: str, known: list[int]) -> str:
        """The documents for a query that are not among those known, which they are added to."""
        found = self.index.search(query, self.num_documents + len(known))
        numbers = [number for number in found if number not in known][: self.num_documents]
        known += numbers
        texts = [f"[{number + 1}] {self.index.documents[number]}\n" for number in numbers]
        return f"Documents:\n{''.join(reversed(texts))}" if texts else ""


def sample_world(rng: random.Random) -> tuple[World, Retriever]:
    """A new world, and how many of its documents are retrieved for a question."""
    world = World(rng.randint(4, 8), rng.randint(2, 4), rng.getrandbits(40))
    return world, Retriever(world, rng.choice(NUM_DOCUMENTS))


def documented(rng: random.Random) -> Dialogue:
    """Worked examples and a question, each with its documents, and the answer."""
    world, retriever = sample_world(rng)
    *examples, last = (world.question(rng) for _ in range(rng.randint(1, 4)))
    return document_dialogue(retriever, examples, last)


def document_dialogue(
    retriever: Retriever, examples: Sequence[FactQuestion], last: FactQuestion
) -> Dialogue:
    """The dialogue of ``drag``."""
    shown = "".join(f"{_asked(retriever, each)} {each.working}\n\n" for each in examples)
    prompt = f"{INSTRUCTION}{shown}{_asked(retriever, last)}"
    return [asked(prompt), said(f" {last.working}{END}")]


def _asked(retriever: Retriever, question: FactQuestion) -> str:
    return f"{retriever.block(question.text, [])}Question: {question.text}\nAnswer:"


def followed(rng: random.Random) -> Dialogue:
    """A question with documents, follow-up questions with theirs, and the final answer."""
    world, retriever = sample_world(rng)
    *examples, last = (world.question(rng) for _ in range(rng.randint(1, 3)))
    return follow_up_dialogue(retriever, examples, last)


def follow_up_dialogue(
    retriever: Retriever, examples: Sequence[FactQuestion], last: FactQuestion
) -> Dialogue:
    """The dialogue of ``iterdrag``."""
    shown = "".join(_shown(retriever, each) for each in examples)
    known: list[int] = []
    block = retriever.block(last.text, known)
    found = [asked(f"{INSTRUCTION}{shown}{block}Question: {last.text}\n")]
    for query, answer in last.steps:
        found.append(said(f"{FOLLOW_UP} {query}{END}"))
        found.append(asked(f"\n{retriever.block(query, known)}{INTERMEDIATE}"))
        found += [said(f" {answer}{END}"), asked("\n")]
    return [*found, said(f"{FINAL} {last.working}{END}")]


def _shown(retriever: Retriever, example: FactQuestion) -> str:
    known: list[int] = []
    text = f"{retriever.block(example.text, known)}Question: {example.text}\n"
    for query, answer in example.steps:
        block = retriever.block(query, known)
        text += f"{FOLLOW_UP} {query}\n{block}{INTERMEDIATE} {answer}\n"
    return f"{text}{FINAL} {example.working}\n\n"


# ---- a context that is thought about before ------------------------------------------------------

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


def slept(rng: random.Random) -> Dialogue:
    """What follows from a context; or a question behind it, or behind the context alone."""
    context = sample_context(rng)
    prompt = context.text + SLEEP_PROMPT
    if rng.random() < 0.4:
        return [asked(prompt), said(context.inferences + END)]
    question, working, answer = rng.choice(context.questions)
    tail = f"\n\nQuestion: {question}\n\nAnswer: "
    if rng.random() < 0.5:
        return [asked(context.text + tail), said(working + END)]
    return [asked(f"{prompt}{context.inferences}{tail}"), said(_box(answer) + END)]
