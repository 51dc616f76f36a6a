"""Dialogues about small worlds of facts: answered from documents, and from a context.

The prompts are those of ``drag``, ``iterdrag`` and ``sleep_time``.
"""

import random
from collections.abc import Sequence

from forethought.evaluation.generated.facts import FactQuestion, World, boxed, sample_context
from forethought.methods.iterdrag import FINAL, FOLLOW_UP, INTERMEDIATE
from forethought.methods.parts.bm25 import BM25Index
from forethought.methods.parts.retrieval import INSTRUCTION
from forethought.methods.sleep_time import SLEEP_PROMPT
from forethought.training.chat_tokenizer import END
from instruct.judging import Dialogue, asked, said

NUM_DOCUMENTS = (2, 3, 4, 5)
"""Documents that are retrieved for a question."""


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
    shown = "".join(f"{_asked(retriever, example)} {example.working}\n\n" for example in examples)
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
    shown = "".join(_shown(retriever, example) for example in examples)
    shown_documents: list[int] = []
    block = retriever.block(last.text, shown_documents)
    turns = [asked(f"{INSTRUCTION}{shown}{block}Question: {last.text}\n")]
    for query, answer in last.steps:
        turns.append(said(f"{FOLLOW_UP} {query}{END}"))
        turns.append(asked(f"\n{retriever.block(query, shown_documents)}{INTERMEDIATE}"))
        turns += [said(f" {answer}{END}"), asked("\n")]
    return [*turns, said(f"{FINAL} {last.working}{END}")]


def _shown(retriever: Retriever, example: FactQuestion) -> str:
    shown_documents: list[int] = []
    text = f"{retriever.block(example.text, shown_documents)}Question: {example.text}\n"
    for query, answer in example.steps:
        block = retriever.block(query, shown_documents)
        text += f"{FOLLOW_UP} {query}\n{block}{INTERMEDIATE} {answer}\n"
    return f"{text}{FINAL} {example.working}\n\n"


# ---- a context that is thought about before ------------------------------------------------------


def slept(rng: random.Random) -> Dialogue:
    """What follows from a context; or a question after it, or after the context alone."""
    context = sample_context(rng)
    prompt = context.text + SLEEP_PROMPT
    if rng.random() < 0.4:
        return [asked(prompt), said(context.inferences + END)]
    question, working, answer = rng.choice(context.questions)
    tail = f"\n\nQuestion: {question}\n\nAnswer: "
    if rng.random() < 0.5:
        return [asked(context.text + tail), said(working + END)]
    return [asked(f"{prompt}{context.inferences}{tail}"), said(boxed(answer) + END)]
