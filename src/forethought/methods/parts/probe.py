"""Probes: a chain of thought is asked for its answer so far, which is then appended to it.

A probe is a fork of the chain with a suffix that prompts for the answer. The chain goes on
undisturbed::

    chain    ... 3 + 4 is 7, and 7 * 6 is 42 | Wait, let me check ...
    probe                                    | ... **Final Answer** \\[ \\boxed{ | 42 }

The texts are those of Dynasor-CoT in TensorRT-LLM.
"""

from __future__ import annotations

import importlib
import logging
import threading
from pathlib import Path
from typing import Any

from forethought.answers.answer_extraction import unpaired_brace
from forethought.errors import DependencyError, ModelError
from forethought.model_dir import find_model_dir
from forethought.scaffolding import sampling
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.task import GenerationTask
from forethought.scaffolding.thinking import ThinkingProfile

_logger = logging.getLogger(__name__)

PROBE_SUFFIX = (
    "... Oh, I suddenly got the answer to the whole problem, **Final Answer**\n\n\\[ \\boxed{"
)
ANSWER_SUFFIX = (
    "\n\n... Oh, I have got the answer to the whole problem\n**Final Answer:**\n\\[\n \\boxed{"
)
ANSWER_SUFFIX_WITH_MARKER = (
    "\n\n...</think>\n Oh, I have got the answer to the whole problem\n"
    "**Final Answer:**\n\\[\n \\boxed{"
)
THINK_END = "</think>"
ANSWER_END = "}\n\\]"
_CLOSE = "}"


def written_answer(text: str, answer: str, profile: ThinkingProfile) -> str:
    """The text that is appended to a chain to give its answer.

    Args:
        text: of the chain; a thought that it ends within is closed first.
        answer: of a probe.
        profile: of the model, after the prompt of the chain.
    """
    suffix = ANSWER_SUFFIX
    if profile.is_thinking(text):
        suffix = ANSWER_SUFFIX_WITH_MARKER.replace(THINK_END, profile.think_end)
    return suffix + answer + ANSWER_END


class Probe:
    r"""A fork whose prompt ends in ``\boxed{``: its answer is the text up to the closing brace.

    Its task stops at every ``}``. If that closes a brace of the answer itself, the probe continues
    with another task, up to ``length`` tokens. It is drawn with the sampling fields of the chain,
    and comes before all chains: what they generate while a probe waits may be discarded.

    Args:
        main: the chain; forked at its present length.
        length: maximum number of tokens of the answer.

    Attributes:
        task: to be executed; after ``on_result`` it may be another one.
        kept_text: the chain's text at the fork.
        kept_tokens: the chain's tokens at the fork.
        answer: ``""`` if it has found none; None while it is in flight.
    """

    def __init__(self, main: GenerationTask, length: int) -> None:
        self.kept_text, self.kept_tokens = main.output_str or "", main.num_generated
        self.answer: str | None = None
        self._text, self._tokens_left = "", length
        self._fields = {name: getattr(main, name) for name in sampling.OF_ASIDES}
        self._fields["priority"] = _priority(main) - 1
        self.task = self._fork(main, PROBE_SUFFIX)

    def on_result(self) -> None:
        """Handle the finished task: sets ``answer``, or a further ``task``."""
        task = self.task
        if task.error is not None:
            _logger.warning("a probe failed, and counts as one without an answer: %s", task.error)
        text = self._text + (task.output_str or "")
        self._tokens_left -= task.num_generated
        if task.error is not None or task.stop_reason != _CLOSE:
            self.answer = ""
        elif unpaired_brace(text + _CLOSE) is not None:
            self.answer = text.strip()
        elif self._tokens_left < 1:
            self.answer = ""
        else:
            self._text = text + _CLOSE
            self.task = self._fork(task, _CLOSE)

    def _fork(self, task: GenerationTask, suffix: str) -> GenerationTask:
        return task.fork(
            suffix,
            GenerationTask,
            inherit=False,
            max_tokens=self._tokens_left,
            stop=[_CLOSE],
            on_failure="drop",
            **self._fields,
        )


def _priority(task: GenerationTask) -> int:
    """The priority of the task, or else of its request."""
    scope = current_scope()
    if task.priority is not None or scope is None:
        return task.priority or 0
    return scope.priority


class AnswerTokenizer:
    """The tokenizer in a directory, for the tokens of written answers.

    It is loaded when it is first needed, and shared by all copies.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self._hf: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AnswerTokenizer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._directory,)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that continues another one. Loads the tokenizer at first use.

        Raises:
            DependencyError: transformers is not installed.
            ModelError: the directory holds no tokenizer.
        """
        with self._lock:
            if self._hf is None:
                try:
                    transformers = importlib.import_module("transformers")
                except ImportError as error:
                    raise DependencyError.missing(
                        "transformers", "reading generation_dir", "local"
                    ) from error
                try:
                    directory = find_model_dir(self._directory, weights=False)
                    self._hf = transformers.AutoTokenizer.from_pretrained(directory)
                except Exception as error:
                    raise ModelError(
                        f"cannot load the tokenizer in {self._directory}",
                        str(error).strip().split("\n")[0] or type(error).__name__,
                        "Give the model's directory as generation_dir",
                    ) from error
            ids: list[int] = self._hf.encode(text, add_special_tokens=False)
            return ids
