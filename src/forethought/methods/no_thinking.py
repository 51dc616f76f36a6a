"""NoThinking: the thought is skipped, and its cost is spent on more samples.

The prompt continues with a finished thought; the model answers after it. One such answer is worse
than one with a thought. Several together, from among which a vote or a verifier chooses, are as
good at fewer tokens and a fraction of the time, since they run side by side. So this method is used
inside another one::

    no_thinking+majority_vote    the most frequent of N answers without a thought
    no_thinking+best_of_n        the one with the highest score
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forethought.config.thoughts import MARKERS
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import Controller, first_tag
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import Text, required, setting, with_settings
from forethought.scaffolding.task import ChatTask, GenerationTask
from forethought.scaffolding.thinking import expect_thinking, thinking_of

FINISHED = "Okay, I think I have finished thinking.\n</think>\n\n"
"""The thought of the paper and what closes it; the model's own marker takes the place of
``</think>``."""


@with_settings
class NoThinkingController(Controller):
    """Answers without a thought, after one that is already finished.

    ``thinking_budget`` of the tasks is 0, so the prompt has to open a thought, as the chat
    templates of reasoning models do, or the model opens it itself. In a chat, what runs the model
    leaves the thought out.
    """

    paper = 'Ma et al., "Reasoning Models Can Be Effective Without Thinking", 2025'

    uses_thinking = "required"

    generation_controller: Controller = required("Generates the answers.")
    thinking_end: Text | None = setting(
        FINISHED,
        "The finished thought; it has the model's closing marker in it. None: the marker alone.",
    )

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Generate the answers; a task may have no limit of its thought."""
        limits = ("thinking_budget", "thinking_soft", "thinking_end")
        tag = first_tag(self.generation_controller)
        for task in tasks:
            sampling.refuse(task, limits, "no_thinking", "Leave it out: there is no thought")
            profile = thinking_of(task, tag)
            expect_thinking("no_thinking", profile, "a finished thought replaces one")
            finished = None if isinstance(task, ChatTask) else self.thinking_end
            if finished == FINISHED:
                finished = FINISHED.replace(MARKERS[0][1], profile.think_end)
            sampling.choose(task, {"thinking_budget": 0, "thinking_end": finished})
        yield from self.generation_controller.process(tasks, **kwargs)
