"""IterDRAG: the model asks itself follow-up questions, each with documents of its own.

::

    examples | documents | question
        Follow up: ...  | more documents |  Intermediate answer: ...
        Follow up: ...  | more documents |  Intermediate answer: ...
        So the final answer is: ...

Each line continues the sequence before it, so no document is prefilled twice. When there have been
``max_iterations`` follow-ups, or the model writes something else, it has to give the final answer.

Follow-ups, intermediate answers and at most five iterations are the paper's; it retrieves with a
learned model and constrains the beginning of each line. The prompt's texts are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any

from forethought.errors import BudgetExceeded
from forethought.methods.parts.bm25 import BM25Index
from forethought.methods.parts.retrieval import INSTRUCTION, Demonstration, RetrievalController
from forethought.scaffolding import sampling
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import ScaffoldingOutput, Stage
from forethought.scaffolding.settings import (
    NonNegativeInt,
    PositiveInt,
    required,
    setting,
    with_settings,
)
from forethought.scaffolding.task import ChatTask, GenerationTask

FOLLOW_UP = "Follow up:"
INTERMEDIATE = "Intermediate answer:"
FINAL = "So the final answer is:"
NEXT = "The next line:"
"""What a chat is asked after an intermediate answer."""


@dataclass
class _Progress:
    """The documents and follow-ups so far."""

    documents: list[list[int]]
    """Numbers of those retrieved for the question and for each follow-up."""
    queries: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @property
    def shown(self) -> list[int]:
        """Numbers of all documents in the prompt."""
        return [number for numbers in self.documents for number in numbers]


@with_settings
class IterDRAGController(RetrievalController):
    """Answers a question by follow-up questions with documents for each, as plain text (IterDRAG).

    The prompt of the request is the question; of token ids, or of a prompt that went through a chat
    template, give ``question="..."``: the template is left out, as the prompt is a text that the
    model continues. In a conversation it is the last message, after those before the question, and
    each line of the model is a message. The output is the final answer.
    ``customized_result_fields["iterdrag"]`` holds the follow-up questions (``queries``), their
    ``answers``, the numbers of the ``documents`` of the question and of each follow-up, whether the
    final answer was ``forced``, and whether the budget ended it before it (``budget_ended``): the
    output is then the last intermediate answer.
    """

    paper = (
        'Yue et al., "Inference Scaling for Long-Context Retrieval Augmented Generation", 2024. '
        "arXiv 2410.04343"
    )

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation_with_iterdrag"

    name = "iterdrag"

    documents: Sequence[str] | BM25Index = required("Texts, or a `methods.parts.bm25.BM25Index`.")
    num_documents: PositiveInt = setting(
        5,
        "Retrieved for the question, for each follow-up and each example, without those that "
        "are in the prompt already (the paper's k).",
    )
    examples: Sequence[Any] = setting(
        (),
        "Mappings of `question`, `answer` and `steps`, a list of (follow-up question, its answer).",
    )
    num_examples: NonNegativeInt | None = setting(
        None, "How many of them, from the first on (the paper's m); None: all."
    )
    max_iterations: NonNegativeInt = setting(5, "Follow-up questions at most (the paper's n).")
    _: KW_ONLY
    line_tokens: PositiveInt = setting(
        128, "Length of a follow-up question or an intermediate answer at most."
    )
    instruction: str = setting(INSTRUCTION, "Text in front of all.")

    def fan_out(self) -> int:
        """The follow-up questions with their answers, and the final answer."""
        return 1 + 2 * self.max_iterations

    def _solve(self, task: GenerationTask) -> Process:
        sampling.refuse(task, _REFUSED, "iterdrag", "Leave it out, or put the method into a vote")
        question = task.question_text or ""
        progress, budget_ended, forced = _Progress([self._retrieve(question)]), False, False
        yield Stage("retrieved", fields={"query": question, "documents": progress.documents[0]})
        shown = "".join(map(self._shown, self.demonstrations))
        suffix = f"{self._block(progress.documents[0])}Question: {question}\n"
        prompt = self._prompted(task, f"{self.instruction}{shown}{suffix}")
        try:
            task.result, forced = yield from self._follow_up(task, prompt, progress)
        except BudgetExceeded:
            if not progress.answers:
                raise
            budget_ended = True
            task.result = ScaffoldingOutput(progress.answers[-1], finish_reason="length")
        task.customized_result_fields["iterdrag"] = {
            "queries": progress.queries,
            "answers": progress.answers,
            "documents": progress.documents,
            "forced": forced,
            "budget_ended": budget_ended,
        }

    def _follow_up(
        self, task: GenerationTask, part: GenerationTask, progress: _Progress
    ) -> Process:
        prefix = ""
        while len(progress.queries) < self.max_iterations:
            line = self._part(task, part, prefix, self.line_tokens)
            yield [line]
            text = (line.output_str or "").strip()
            if text.startswith(FINAL):
                output = ScaffoldingOutput(text.removeprefix(FINAL).strip())
                output.finish_reason, output.usage = line.finish_reason, line.usage
                return output, False
            query = text.removeprefix(FOLLOW_UP).strip()
            if not text.startswith(FOLLOW_UP) or not query:
                break
            numbers = self._retrieve(query, progress.shown)
            yield Stage("retrieved", fields={"query": query, "documents": numbers})
            progress.queries.append(query)
            progress.documents.append(numbers)
            suffix = f"\n{self._block(numbers)}{INTERMEDIATE}"
            part = self._part(task, line, suffix, self.line_tokens)
            yield [part]
            progress.answers.append((part.output_str or "").strip())
            prefix = "\n"
        asked_all = len(progress.queries) == self.max_iterations
        why = "there are no further questions" if asked_all else "it is no follow-up question"
        yield Stage("forced", why, fields={"queries": len(progress.queries)})
        final = self._part(task, part, f"{prefix}{FINAL}", task.max_tokens)
        yield [final]
        output = final.result or ScaffoldingOutput("")
        output.text = (output.text or "").strip()
        return output, True

    def _part(
        self, task: GenerationTask, source: GenerationTask, suffix: str, max_tokens: int | None
    ) -> GenerationTask:
        """The task that writes a line after ``source`` and a suffix."""
        if source.result is not None:
            is_chat = isinstance(source, ChatTask)
            part = source.follow_up(suffix.strip() or NEXT if is_chat else suffix, inherit=False)
        elif isinstance(source, ChatTask):
            part = source.asked_again(f"{source.messages[-1].content}{suffix}")
        else:
            part = GenerationTask(input_str=f"{source.input_str}{suffix}")
        part.streaming_output_flag = False
        sampling.carry(task, part)
        part.worker_tag, part.priority = self.WorkerTag.GENERATION, task.priority
        part.stop = ["\n", *sampling.stop_strings(task)]
        part.max_tokens = max_tokens
        return part

    def _shown(self, example: Demonstration) -> str:
        numbers = self._retrieve(example.question)
        text, numbers_shown = f"{self._block(numbers)}Question: {example.question}\n", [*numbers]
        for follow_up, answer in example.steps:
            numbers = self._retrieve(follow_up, numbers_shown)
            numbers_shown += numbers
            text += f"{FOLLOW_UP} {follow_up}\n{self._block(numbers)}{INTERMEDIATE} {answer}\n"
        return f"{text}{FINAL} {example.answer}\n\n"


_REFUSED = ("n", "guided_decoding", "min_tokens", "thinking_budget", "thinking_soft")
