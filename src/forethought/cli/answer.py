"""One answer at the terminal: printed as it comes, with what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from forethought.evaluation.report import count_of
from forethought.methods import worker_tags
from forethought.outputs import SpeculationMetrics, Usage
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.output import Delta, ScaffoldingOutput
from forethought.scaffolding.result import ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.worker import Worker


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    output: ScaffoldingOutput
    usage: Usage
    """Of everything that was run for it."""
    seconds: float
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    """Of everything that was run for it; without steps if a server did."""

    @property
    def text(self) -> str:
        """Its text."""
        return self.output.text or ""

    @property
    def token_count(self) -> int:
        """Tokens of the answer itself, as exactly as they are known."""
        tokens = self.output.token_ids
        return self.usage.completion_tokens if tokens is None else len(tokens)

    def summary(self) -> str:
        """One line: tokens, seconds, speed, what was generated beside the answer, and how well it
        was guessed ahead.
        """
        speed = self.usage.decoded / self.seconds if self.seconds else 0.0
        line = (
            f"{count_of(self.token_count, 'token')} in {self.seconds:.2f} s ({speed:.0f} tokens/s)"
        )
        beside = self.usage.decoded - self.token_count
        if beside > 0:
            line += f", {self.usage.decoded} generated in all"
        if self.metrics.drafted:
            line += f", {self.metrics.mean_acceptance_length:.1f} tokens per step"
        if self.metrics.synthetic:
            line += " (acceptance made up)"
        elif self.metrics.lossy:
            line += " (lossy)"
        return f"{line}, finished by {self.output.finish_reason}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "text": self.text,
            "token_count": self.token_count,
            "finish_reason": self.output.finish_reason,
            "usage": asdict(self.usage),
            "metrics": self.metrics.to_dict() if self.metrics.steps else None,
            "seconds": round(self.seconds, 3),
        }


class Respondent:
    """A method with a worker, ready to answer at the terminal.

    Args:
        controller: the method.
        worker: executes all its tasks, but for those of ``others``.
        others: further workers by tag.
    """

    def __init__(
        self, controller: Controller, worker: Worker, others: Mapping[Any, Worker] | None = None
    ) -> None:
        workers = dict.fromkeys(worker_tags(controller), worker) | dict(others or {})
        self._llm = ScaffoldingLlm(controller, workers)

    def answer(
        self, prompt: Any, params: Mapping[str, Any], write: Callable[[str], None]
    ) -> Answer:
        """Answer one prompt.

        Args:
            prompt: whatever the controller takes.
            params: sampling fields by name.
            write: called with each new piece of text; all pieces together are the answer.

        Raises:
            Exception: what the method failed with. If ``write`` raises, or Ctrl-C is pressed, the
                request is ended first.
        """
        began = time.perf_counter()
        result = self._llm.generate_async(prompt, sampling_params=params)
        try:
            streamed = _print(result, write)
        except BaseException:
            result.abort()
            raise
        output = result.output or ScaffoldingOutput("")
        seconds = time.perf_counter() - began
        answer = Answer(output, result.usage, seconds, result.metrics)
        # A method that streams nothing, or something else than its answer in the end.
        whole = answer.text
        write(whole[len(streamed) :] if whole.startswith(streamed) else f"\n{whole}")
        return answer

    def close(self) -> None:
        """End what is under way."""
        self._llm.shutdown()


def _print(result: ScaffoldingResult, write: Callable[[str], None]) -> str:
    """Write the stream of the request itself, not those of its branches; all of its text."""
    streamed = ""
    for event in result.events():
        if not event.branch and isinstance(event.output, Delta):
            streamed += event.output.text
            write(event.output.text)
    return streamed
