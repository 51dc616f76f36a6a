"""Budget forcing: a thought is made longer with "Wait", and is ended at a budget.

Where the model ends its thought too early, its closing marker is left out, and "Wait" is appended
to the thought, which goes on from there; it often finds a mistake then. Where the thought reaches
the budget, the closing marker is appended, and the model has to answer::

    ... so it is 5.</think>             the model wants to end: the marker is left out,
    ... so it is 5.Wait, 3 + 4 is 7. ... so it is 7.</think> The answer is 7.

Each part continues the sequence of the one before, with its KV cache; on a server, its text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any

from forethought.outputs import ThinkingOutput, ThoughtEnd
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
from forethought.scaffolding.settings import (
    NonNegativeInt,
    PositiveInt,
    Text,
    setting,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask
from forethought.scaffolding.thinking import expect_thinking, thinking_of

_logger = logging.getLogger(__name__)


@dataclass
class Thought:
    """State of the thought of one task."""

    marker: str
    """What closes it."""
    num_tokens: int = 0
    """Generated for it; the inserted words do not count."""
    num_waits: int = 0
    end: ThoughtEnd | None = None


@with_settings
class BudgetForcingController(Controller):
    """Makes a thought longer with "Wait" where it ends early, and ends it at a budget (s1).

    The prompt opens the thought, or the model does; a model that is known not to think is refused,
    and an answer that has no thought is warned of. The output is the whole text, with the inserted
    words. ``customized_result_fields["budget_forcing"]`` holds the number of ``waits``, the
    ``thinking_tokens`` that were generated, and how the thought ended (``end``).
    """

    paper = 'Muennighoff et al., "s1: Simple test-time scaling", 2025'

    conversation = ConversationForm.TEXT
    uses_thinking = "required"

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation_with_budget_forcing"

    num_waits: NonNegativeInt = setting(
        1, "How many times the end of the thought is replaced by `wait`."
    )
    thinking_budget: PositiveInt | None = setting(
        None,
        "Most tokens that are generated for the thought, the markers that were left out "
        "included; None: no limit.",
    )
    min_thinking_tokens: NonNegativeInt = setting(
        0,
        "A thought with fewer is made longer, whatever `num_waits` says, unless the model adds "
        "nothing to it.",
    )
    _: KW_ONLY
    wait: Text = setting("Wait", "Text that is put in the place of the end.")
    think_end: Text | None = setting(
        None, "The model's closing marker; None: as the worker tells it, else `</think>`."
    )
    answer_prefix: str = setting(
        "",
        'Text after the marker where the budget has ended the thought, such as "Final Answer:".',
    )
    streaming: bool = setting(False, "Stream the output as it comes.")

    def fan_out(self) -> int:
        """The thought, its continuations and the answer."""
        return 2 + self.num_waits

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Solve the tasks concurrently; a task may have no other limit of its thought."""
        refuse_arguments(self, kwargs)
        for task in tasks:
            sampling.refuse(task, _REFUSED, "budget_forcing", "Use the settings of the method")
            expect_text("budget_forcing", task, "it finds the end of the thought in the text")
        yield from side_by_side(self, tasks, self._solve)

    def _solve(self, task: GenerationTask) -> Process:
        profile = thinking_of(task, self.WorkerTag.GENERATION)
        expect_thinking("budget_forcing", profile, "it makes a thought longer, or ends it")
        thought, part = Thought(self.think_end or profile.think_end), task.copy()
        part.worker_tag = self.WorkerTag.GENERATION
        part.streaming_output_flag = task.streaming_output_flag or self.streaming
        part.stop = [thought.marker, *sampling.stop_strings(task)]
        part.max_tokens = _least(task.max_tokens, self.thinking_budget)
        rest: int | None = None
        while thought.end is None:
            yield [part]
            thought.num_tokens += part.num_generated
            rest = _left(task.max_tokens, thought.num_tokens)
            tokens_left = _left(self.thinking_budget, thought.num_tokens)
            most, wants_to_end = _least(rest, tokens_left), part.stop_reason == thought.marker
            if wants_to_end and most != 0 and self._goes_on(thought, part):
                thought.num_waits += 1
                yield self._told("prolonged", "the thought ends early", thought)
                part = yield from self._continue(part, self.wait, max_tokens=most)
            elif wants_to_end:
                thought.end = ThoughtEnd.NATURAL
            elif part.finish_reason == "length" and tokens_left == 0 and rest != 0:
                thought.end = ThoughtEnd.BUDGET
            else:
                break  # the whole output has ended
        if thought.end is not None and rest != 0:
            forced = thought.end is ThoughtEnd.BUDGET
            if forced:
                yield self._told("forced", "the thinking budget is spent", thought)
            inserted = thought.marker + (self.answer_prefix if forced else "")
            part = yield from self._continue(part, inserted, max_tokens=rest, stop=task.stop)
            yield [part]
        if thought.end is None and not profile.is_thinking(part.output_str or ""):
            _logger.warning("budget_forcing has changed nothing: the answer has no thought")
        self._finish(task, part, thought)
        if rest == 0:
            task.finish_reason, task.stop_reason = "length", None

    def _goes_on(self, thought: Thought, part: GenerationTask) -> bool:
        """Whether a thought that the model wants to end is made longer."""
        is_short = thought.num_tokens < self.min_thinking_tokens and bool(part.output_str)
        return thought.num_waits < self.num_waits or is_short

    def _told(self, name: str, why: str, thought: Thought) -> Stage:
        return Stage(name, why, fields={"at": thought.num_tokens, "waits": thought.num_waits})

    def _continue(self, part: GenerationTask, text: str, **fields: Any) -> Process:
        if part.streaming_output_flag:
            yield Delta(text, source="budget_forcing")
        fork = part.fork(text, **fields)
        fork.streaming_output_flag = part.streaming_output_flag
        return fork

    def _finish(self, task: GenerationTask, part: GenerationTask, thought: Thought) -> None:
        task.result, task.request_handle = part.joined, part.request_handle
        task.thinking = ThinkingOutput(thought.num_tokens, thought.end)
        task.customized_result_fields["budget_forcing"] = {
            "waits": thought.num_waits,
            "thinking_tokens": thought.num_tokens,
            "end": thought.end,
        }


_REFUSED = ("n", "include_stop_str_in_output", *sampling.OF_THOUGHTS)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _left(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)
