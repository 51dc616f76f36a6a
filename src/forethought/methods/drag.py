"""DRAG: many documents and many worked examples in one long prompt.

::

    documents 3 2 1 | question | answer     an example, with what its own question retrieves
    ...
    documents k ... 2 1 | question | ->     the best document is next to the question

More documents and more examples are more computation per question: ``num_documents`` and
``num_examples`` scale it. The documents are retrieved by BM25.

The order of the documents and their place in the examples are the paper's; it retrieves with a
learned model. The texts of the prompt are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

from forethought.methods.parts.bm25 import BM25Index
from forethought.methods.parts.retrieval import INSTRUCTION, RetrievalController
from forethought.scaffolding.controller import Controller, answer_by
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    NonNegativeInt,
    PositiveInt,
    required,
    setting,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask


@with_settings
class DRAGController(RetrievalController):
    """Answers a question from documents and worked examples in front, as plain text (DRAG).

    The prompt of the request is the question; of token ids, or of a prompt that went through a chat
    template, give ``question="..."``: the template is left out, as the prompt is a text that the
    model continues. In a conversation it is the last message, after those before the question.
    ``customized_result_fields["drag"]`` holds the numbers of the ``documents``, the best one first.
    """

    paper = (
        'Yue et al., "Inference Scaling for Long-Context Retrieval Augmented Generation", 2024. '
        "arXiv 2410.04343"
    )

    name = "drag"

    generation_controller: Controller = required("Writes the answer.")
    documents: Sequence[str] | BM25Index = required("Texts, or a `methods.parts.bm25.BM25Index`.")
    num_documents: PositiveInt = setting(
        5, "Retrieved for the question and for each example (the paper's k)."
    )
    examples: Sequence[Any] = setting(
        (), "(question, answer), or mappings of `question` and `answer`."
    )
    num_examples: NonNegativeInt | None = setting(
        None, "How many of them, from the first on (the paper's m); None: all."
    )
    _: KW_ONLY
    instruction: str = setting(INSTRUCTION, "Text in front of all.")

    def _solve(self, task: GenerationTask) -> Process:
        question = task.question_text or ""
        documents = self._retrieve(question)
        yield Stage("retrieved", fields={"query": question, "documents": documents})
        shown = "".join(
            f"{self._asked(example.question)} {example.answer}\n\n"
            for example in self.demonstrations
        )
        prompt_task = self._prompted(task, f"{self.instruction}{shown}{self._asked(question)}")
        prompt_task.question = question
        yield from answer_by(self.generation_controller, task, prompt_task)
        task.customized_result_fields["drag"] = {"documents": documents}

    def _asked(self, question: str) -> str:
        return f"{self._block(self._retrieve(question))}Question: {question}\nAnswer:"
