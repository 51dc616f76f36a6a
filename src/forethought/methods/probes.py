"""Probes: forks of a chain of thought that are asked for the answer, and when they agree.

Knows nothing about the chain's own fate.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Sequence
from typing import Any

from forethought.scaffolding.answers import unpaired_brace
from forethought.scaffolding.equivalence import (
    AnswerClasses,
    Equivalence,
    PairwiseEquivalence,
)
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.task import GenerationTask

_logger = logging.getLogger(__name__)

_CLOSE = "}"


class Probe:
    r"""A fork whose prompt ends in ``\boxed{``: what it says up to the closing brace is its answer.

    Its task stops at every ``}``. If that one closes a brace of the answer itself, the probe goes
    on with another task, until ``length`` tokens are spent.

    Args:
        main: the chain; forked where it is now.
        suffix: the question.
        length: most tokens of the answer.
        fields: sampling fields.

    Attributes:
        task: to be executed; after ``hear`` it may be another one.
        kept_text: the chain's text at the fork.
        kept_tokens: the chain's tokens at the fork.
        answer: ``""`` if it has said nothing of use; None while it is under way.
    """

    def __init__(
        self, main: GenerationTask, suffix: str, length: int, fields: dict[str, Any]
    ) -> None:
        self.kept_text, self.kept_tokens = main.output_str or "", main.num_generated
        self.answer: str | None = None
        self._said, self._left, self._fields = "", length, fields
        self.task = self._ask(main, suffix)

    def hear(self) -> None:
        """The task is done: either there is an answer now, or there is a further task."""
        task = self.task
        if task.error is not None:
            _logger.warning("a probe failed, and counts as one without an answer: %s", task.error)
        said = self._said + (task.output_str or "")
        self._left -= task.num_generated
        if task.error is not None or task.stop_reason != _CLOSE:
            self.answer = ""
        elif unpaired_brace(said + _CLOSE) is not None:
            self.answer = said.strip()
        elif self._left < 1:
            self.answer = ""
        else:
            self._said = said + _CLOSE
            self.task = self._ask(task, _CLOSE)

    def _ask(self, task: GenerationTask, suffix: str) -> GenerationTask:
        return task.fork(
            suffix,
            GenerationTask,
            inherit=False,
            max_tokens=self._left,
            stop=[_CLOSE],
            on_failure="drop",
            **self._fields,
        )


class Agreement:
    """How many answers in a row mean the same.

    Args:
        needed: answers in a row that settle it.
        uncertain_words: an answer that has one of them, as a word, does not count.
        equivalence: decides which answers mean the same, see ``AnswerClasses``.

    Attributes:
        answers: all judged so far, in order.
        count: length of the present run.
    """

    def __init__(
        self,
        needed: int,
        uncertain_words: Sequence[str],
        equivalence: Equivalence | PairwiseEquivalence,
    ) -> None:
        self.needed, self.count, self.answers = needed, 0, list[str]()
        self._classes = AnswerClasses(equivalence)
        self._class: Hashable = None
        words = "|".join(re.escape(word.lower()) for word in uncertain_words)
        # A word that begins or ends with a sign needs no border there.
        pattern = rf"(?:(?<!\w)|(?!\w))(?:{words})(?:(?<!\w)|(?!\w))"
        self._uncertain = re.compile(pattern) if words else None

    @property
    def reached(self) -> bool:
        """Whether the run is long enough."""
        return self.count >= self.needed

    def judge(self, answer: str) -> Process:
        """Take in the next answer; a controller's generator, as comparing may take a while."""
        self.answers.append(answer)
        if not self._counts(answer):
            self.count = 0
            return
        finding = self._classes.finding([answer])
        if finding:
            yield finding
        found = self._classes.of(answer)
        self.count = self.count + 1 if found == self._class else 1
        self._class = found

    def _counts(self, answer: str) -> bool:
        uncertain = self._uncertain is not None and self._uncertain.search(answer.lower())
        return bool(answer) and not uncertain
