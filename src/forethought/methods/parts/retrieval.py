"""The base of methods that put retrieved documents and demonstrations into the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forethought.errors import ParameterError
from forethought.methods.parts.bm25 import BM25Index
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import Controller, refuse_arguments, side_by_side
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.task import ChatTask, GenerationTask

INSTRUCTION = (
    "Answer the last question from the documents that are given with it, as briefly as in the "
    "examples.\n\n"
)


@dataclass(frozen=True)
class Demonstration:
    """A question with its answer, as an example in the prompt."""

    question: str
    answer: str
    steps: tuple[tuple[str, str], ...] = ()
    """Follow-up questions and their answers, which lead to the answer."""

    @classmethod
    def read(cls, value: Any) -> Demonstration:
        """A demonstration, also from a mapping of its fields, or from (question, answer)."""
        try:
            if isinstance(value, cls):
                return value
            fields = dict(value) if isinstance(value, Mapping) else None
            example = cls(**fields) if fields is not None else cls(*value)
            steps = tuple((str(question), str(answer)) for question, answer in example.steps)
            texts = [example.question, example.answer]
            if isinstance(value, str) or not all(isinstance(text, str) for text in texts):
                raise TypeError
            return cls(example.question, example.answer, steps)
        except (TypeError, ValueError) as error:
            raise ParameterError(
                "invalid examples",
                f"got {value!r}",
                "Give (question, answer), or a mapping of question, answer and steps",
            ) from error


class RetrievalController(Controller):
    """Base of methods that answer a question with retrieved documents. Override ``_solve``.

    A subclass declares these attributes as settings, and its ``name``.
    """

    name = ""
    documents: Sequence[str] | BM25Index
    num_documents: int
    examples: Sequence[Any]
    num_examples: int | None
    instruction: str

    def __post_init__(self) -> None:
        documents = self.documents
        self.index = documents if isinstance(documents, BM25Index) else BM25Index(documents)
        shown = self.examples[: self.num_examples]
        self.demonstrations = [Demonstration.read(example) for example in shown]

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Answer the questions side by side; they have to be text, and there are no keyword
        arguments.
        """
        refuse_arguments(self, kwargs)
        for task in tasks:
            sampling.refuse(task, ["echo"], self.name, "Leave it out")
            if task.question_text is None or task.skip_detokenizer:
                raise ParameterError(
                    f"{self.name} searches for the words of the question",
                    "the prompt is token ids, or no text is wanted",
                    'Give the question as text: generate(prompt, question="...")',
                )
        yield from side_by_side(self, tasks, self._solve)

    def _solve(self, task: GenerationTask) -> Process:
        raise NotImplementedError(f"{type(self).__name__} does not override _solve")

    def _prompted(self, task: GenerationTask, prompt: str) -> GenerationTask:
        """The same request with another prompt: a text, or the last message of a conversation."""
        if isinstance(task, ChatTask) or task.history:
            return task.asked_again(prompt)
        copy = task.copy()
        copy.input_tokens, copy.skip_tokenizer, copy.input_str = None, False, prompt
        return copy

    def _retrieve(self, query: str, numbers_shown: Iterable[int] = ()) -> list[int]:
        """The numbers of the best documents that are not in the prompt yet, the best first."""
        shown = set(numbers_shown)
        numbers = self.index.search(query, self.num_documents + len(shown))
        return [number for number in numbers if number not in shown][: self.num_documents]

    def _block(self, numbers: Sequence[int]) -> str:
        """The documents as text, the best one last: next to the question about them."""
        texts = [f"[{number + 1}] {self.index.documents[number]}\n" for number in numbers]
        return f"Documents:\n{''.join(reversed(texts))}" if texts else ""
