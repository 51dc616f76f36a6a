"""Steps of a chain of thought: a chain that is written in parts, and models that score its steps.

A ``StepChain`` is an output of several generations, its parts. A part is a step, up to a text that
ends one, or the whole rest::

    prompt | step 1 \\n\\n | step 2 \\n\\n | step 3 </think> | the rest: the answer

A ``StepScorer`` has a model score a step that another one has written, before it is appended to the
chain: ``PromptScorer`` asks for a digit, ``LikelihoodScorer`` reads the model's own probability of
the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from forethought.errors import ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.task import GenerationTask

SCORE_PROMPT = (
    "\n\nHow good is the last step, from 0 (wrong) to 9 (certainly right)? Only its facts and its "
    "logic count, not its style.\nScore: "
)
Aggregation = Literal["min", "mean"]
_DIGITS = frozenset("0123456789")
_ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}


@dataclass
class StepChain:
    """The output of a task so far."""

    task: GenerationTask
    """Of the request; its prompt is text."""
    step_end: str
    think_end: str | None
    """Marker after which there are no further steps; None: all is steps."""
    step_tokens: int
    """Length of a step at most."""
    text: str = ""
    num_tokens: int = 0
    is_thinking: bool = True
    finish_reason: str | None = None
    """None: the output goes on."""
    stop_reason: int | str | None = None

    @property
    def so_far(self) -> str:
        """The prompt and the output."""
        return f"{self.task.input_str}{self.text}"

    @property
    def _ends(self) -> list[str]:
        return [self.step_end] if self.think_end is None else [self.step_end, self.think_end]

    def part(self, tag: Any, in_steps: bool = True) -> GenerationTask:
        """The task of the worker ``tag`` that generates the next part: a step, or the rest."""
        part = self.task.copy()
        part.worker_tag, part.streaming_output_flag = tag, False
        part.input_str = self.so_far
        tokens_left = (
            None if self.task.max_tokens is None else self.task.max_tokens - self.num_tokens
        )
        part.max_tokens = tokens_left
        if in_steps:
            part.stop = [*self._ends, *sampling.stop_strings(self.task)]
            part.max_tokens = min(
                self.step_tokens, self.step_tokens if tokens_left is None else tokens_left
            )
        return part

    def text_of(self, part: GenerationTask, in_steps: bool = True) -> str:
        """The text of a part, with the text that ended its step."""
        text, stop = part.output_str or "", part.stop_reason
        at_end = in_steps and stop in self._ends
        if not isinstance(stop, str) or at_end == part.include_stop_str_in_output:
            return text
        return text + stop if at_end else text.removesuffix(stop)

    def add(self, part: GenerationTask, in_steps: bool = True) -> str:
        """Append a part, which has ended, to the chain; returns its text."""
        at_end = in_steps and part.stop_reason in self._ends
        text = self.text_of(part, in_steps)
        self.text += text
        self.num_tokens += part.num_generated
        if at_end:
            self.is_thinking = part.stop_reason != self.think_end
        is_full = self.task.max_tokens is not None and self.num_tokens >= self.task.max_tokens
        is_cut = part.finish_reason == "length" and self.is_thinking and not is_full
        if is_full:
            self.finish_reason = "length"
        elif not at_end and not (is_cut and part.max_tokens == self.step_tokens):
            self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason
        return text


class StepScorer:
    """How a model scores the next step of one chain.

    Args:
        tag: of its worker.
    """

    def __init__(self, tag: Any) -> None:
        self._tag = tag

    def judgement(self, chain: StepChain, draft: GenerationTask) -> Process:
        """Prepare the judgement of a draft: the task whose result is the score; None: nothing to
        score.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override judgement")

    def score(self, judged: GenerationTask) -> float:
        """The score, when the task of the judgement is done."""
        raise NotImplementedError(f"{type(self).__name__} does not override score")

    def keep(self, judged: GenerationTask) -> None:
        """Called when the judged step is appended to the chain."""

    def follow(self, part: GenerationTask) -> None:
        """Called when the model itself is about to write ``part``."""

    def _prepared(self, chain: StepChain, task: GenerationTask) -> GenerationTask:
        task.worker_tag, task.priority = self._tag, chain.task.priority
        return task


class PromptScorer(StepScorer):
    """Asks for a score from 0 to 9, in one token after a prompt.

    Args:
        tag: of the model's worker.
        prompt: text after a step; a reply that is no digit counts as 0.
    """

    def __init__(self, tag: Any, prompt: str = SCORE_PROMPT) -> None:
        super().__init__(tag)
        self._prompt = prompt

    @override
    def judgement(self, chain: StepChain, draft: GenerationTask) -> Process:
        yield from ()
        question = GenerationTask(input_str=f"{chain.so_far}{draft.output_str}{self._prompt}")
        sampling.choose(question, _ONE_TOKEN)
        return self._prepared(chain, question)

    def score(self, judged: GenerationTask) -> float:
        """The digit."""
        digit = (judged.output_str or "").strip()
        return int(digit) if digit in _DIGITS else 0


class LikelihoodScorer(StepScorer):
    """The model's own probability of a step's tokens, from 0 to 1.

    The step is appended to the model's live sequence, which computes its tokens in one forward. If
    it is kept, they are computed already; if not, the sequence is forked before them.

    Args:
        tag: of the model's worker, one that holds sequences (``EngineWorker``).
        aggregation: ``"min"``, of the least probable token, or the geometric ``"mean"``.
    """

    def __init__(self, tag: Any, aggregation: Aggregation) -> None:
        super().__init__(tag)
        self._aggregation = aggregation
        self._base: GenerationTask | None = None
        """Its sequence ends where the chain does."""

    @override
    def judgement(self, chain: StepChain, draft: GenerationTask) -> Process:
        """None for an empty step, too."""
        text = chain.text_of(draft)
        if not text:
            return None
        if self._base is None:
            opened = GenerationTask(input_str=chain.so_far)
            sampling.choose(opened, _ONE_TOKEN)
            yield [self._prepared(chain, opened)]
            self._base = _without_output(opened)
        forked: GenerationTask = self._base.fork(
            text, inherit=False, score_suffix=True, **_ONE_TOKEN
        )
        return self._prepared(chain, forked)

    def score(self, judged: GenerationTask) -> float:
        """The probability; 0 without tokens, ``ParameterError`` if the worker does not give it."""
        logprobs = judged.suffix_logprobs
        if logprobs is None:
            raise ParameterError(
                "the base model's worker cannot score by likelihood",
                "it does not hold the sequence, and has no log-probabilities of a prompt",
                "Use an EngineWorker for the base model, or scorer='prompt'",
            )
        if not logprobs:
            return 0.0
        return math.exp(
            min(logprobs) if self._aggregation == "min" else sum(logprobs) / len(logprobs)
        )

    def keep(self, judged: GenerationTask) -> None:
        """The sequence goes on after the step."""
        self._base = _without_output(judged)

    def follow(self, part: GenerationTask) -> None:
        """The part is written by the sequence, which is to end where the step does."""
        part.include_stop_str_in_output = True
        if self._base is not None:
            fork: GenerationTask = self._base.fork()
            part.input_str, part.fork_point = fork.input_str, fork.fork_point
        self._base = part


def _without_output(task: GenerationTask) -> GenerationTask:
    """The task without its output, so that its forks go on after its prompt."""
    task.output_str, task.output_tokens = "", []
    return task
