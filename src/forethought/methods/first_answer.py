"""First-answer stopping: the thought is closed after the first answer that it states.

A reasoning model that has an answer goes on to check it, often several times; mostly the first
answer was right and the checks change nothing. Here the thought ends with the line that states the
first answer, and the model writes its final answer after it::

    thought     47 + 3 = 50. So the answer is 50.       stated: "answer is"
                Wait, let me check that again. ...      never generated
    answer      </think> The answer is 50.

The chain is one generation, which is inspected token by token and cut after the token that ends the
line; so its tokens are those of the uncut chain. No probe is asked, as Dynasor-CoT does; in return
the model has to announce an answer in known words (``markers``). A thought without them is not
shortened.

The paper keeps the first solution of a finished thought, to train on ("first correct solutions");
stopping the generation there, by the words that state it, is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from enum import Enum
from typing import Any

from forethought.errors import ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    expect_text,
    refuse_arguments,
    side_by_side,
)
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Delta, Stage
from forethought.scaffolding.settings import Text, Words, setting, with_settings
from forethought.scaffolding.task import GenerationTask, StreamGenerationTask
from forethought.scaffolding.thinking import thinking_of

MARKERS = ("answer is", "Answer:", "\\boxed{")


@with_settings
class FirstAnswerController(Controller):
    """Closes the thought after the first answer that it states.

    If the prompt closes its thought, nothing is closed: the output is the answer. All else is read
    as a thought up to ``think_end``. A model that is known not to think is stopped after the line
    that states the answer, and that is its answer.

    ``customized_result_fields["first_answer"]`` holds the ``marker`` that the thought was ended by
    (None: it came to its own end), and the tokens of the chain (``chain_tokens``), without those of
    an answer after a thought that was ended.

    Raises:
        ParameterError: a setting of the wrong kind, or no markers.
    """

    paper = (
        'Chen et al., "Do NOT Think That Much for 2+3=? On the Overthinking of o1-Like LLMs", '
        "2024. arXiv 2412.21187"
    )

    conversation = ConversationForm.TEXT
    uses_thinking = "adapts"

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation_to_first_answer"

    markers: Words = setting(
        MARKERS,
        "Texts that state an answer; the thought ends with the line that the first one is in.",
    )
    _: KW_ONLY
    line_end: Text = setting("\n", "Text that ends this line.")
    think_end: Text | None = setting(
        None, "The model's closing marker; None: as the worker tells it, else `</think>`."
    )
    streaming: bool = setting(False, "Stream the output as it comes.")

    def __post_init__(self) -> None:
        if not self.markers:
            raise ParameterError(
                "invalid markers", "there are none", "Give texts that state an answer"
            )

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Solve the tasks concurrently; a task may have no other limit of its thought."""
        refuse_arguments(self, kwargs)
        for task in tasks:
            sampling.refuse(task, _REFUSED, "first_answer", "Leave it out")
            expect_text("first_answer", task, "it finds the answer in the text")
        yield from side_by_side(self, tasks, self._solve)

    def _solve(self, task: GenerationTask) -> Process:
        """The chain to the end of the line that states an answer, then the answer."""
        profile = thinking_of(task, self.WorkerTag.GENERATION)
        think_end = self.think_end or profile.think_end
        if _is_answering(task.input_str or "", think_end):
            task.worker_tag = self.WorkerTag.GENERATION
            task.streaming_output_flag |= self.streaming
            yield [task]
            task.customized_result_fields["first_answer"] = {"marker": None, "chain_tokens": 0}
            return
        chain = StreamGenerationTask.create_from_generation_task(task)
        chain.worker_tag = self.WorkerTag.GENERATION
        chain.streaming_output_flag = task.streaming_output_flag or self.streaming
        part, marker, thought = chain, None, _Thought(self, think_end)
        while not chain.end_flag and marker is None:
            yield [chain]
            marker = thought.stated(chain.output_str or "")
            if thought.is_closed:
                chain.streaming_step = _TO_THE_END  # what follows is the answer
        if marker is not None and not chain.end_flag:
            chain.cancel_flag = True
            yield [chain]
            yield Stage("early_exit", fields={"marker": marker, "at": chain.num_generated})
            if profile.has_no_thoughts:
                chain.finish_reason = "stop"
            else:
                part = yield from self._answer(task, chain, think_end)
        is_cut = part is not chain or (chain.cancel_flag and chain.finish_reason == "stop")
        task.result, task.request_handle = part.joined, part.request_handle
        task.customized_result_fields["first_answer"] = {
            "marker": marker if is_cut else None,
            "chain_tokens": chain.num_generated,
        }

    def _answer(self, task: GenerationTask, chain: StreamGenerationTask, think_end: str) -> Process:
        """Generate the answer after the chain, whose thought is closed; returns the last part."""
        fields: dict[str, Any] = {}
        if task.max_tokens is not None:
            fields["max_tokens"] = task.max_tokens - chain.num_generated
            if fields["max_tokens"] < 1:
                chain.finish_reason = "length"
                return chain
        if chain.streaming_output_flag:
            yield Delta(think_end, source="first_answer")
        answer = chain.fork(think_end, **fields)
        answer.streaming_output_flag = chain.streaming_output_flag
        yield [answer]
        return answer


def _is_answering(prompt: str, think_end: str) -> bool:
    """Whether a prompt ends after a thought: what follows is the answer already."""
    closed = prompt.rfind(think_end)
    return closed >= 0 and closed > prompt.rfind(think_end.replace("/", ""))


class _Thought:
    """Reads a thought as it grows; the text that it has searched is not searched again."""

    def __init__(self, method: FirstAnswerController, think_end: str) -> None:
        self._method, self._think_end = method, think_end
        longest = max(map(len, (*method.markers, think_end, method.line_end)))
        self._overlap, self._searched = longest - 1, 0
        self._marker: str | None = None
        self._behind = 0
        """Where the marker ends."""
        self.is_closed = False

    def stated(self, text: str) -> str | None:
        """The marker in the first finished line that has one; None so far."""
        begin = max(self._behind, self._searched - self._overlap)
        end = text.find(self._think_end, begin)
        self.is_closed, self._searched = end >= 0, len(text)
        stop = end if self.is_closed else len(text)
        if self._marker is None:
            places = [(text.find(marker, begin, stop), marker) for marker in self._method.markers]
            if matches := [(place, marker) for place, marker in places if place >= 0]:
                place, self._marker = min(matches)
                self._behind = begin = place + len(self._marker)
        if self._marker is None or text.find(self._method.line_end, begin, stop) < 0:
            return None
        return self._marker


_TO_THE_END = 2**30
"""Tokens of a step that ends with its stream."""
_REFUSED = ("n", "include_stop_str_in_output", *sampling.OF_THOUGHTS)
