"""One request in flight: its samples in the engine, and what each has said.

Knows nothing about who waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from forethought.engine.commit import Event
from forethought.engine.sequence import Sequence
from forethought.errors import RequestError
from forethought.outputs import CompletionOutput, FinishReason, RequestOutput, Usage
from forethought.text.prompt import Prompt
from forethought.text.tokenizer import Tokenizer
from forethought.text.transcript import Transcript, name_tokens


class Generation:
    """The samples of one prompt, or one continuation of a live sequence.

    Args:
        sequences: the samples, just started.
        tokenizer: of the model.
        prompt: what they continue; None for a live sequence, which knows by itself.
    """

    def __init__(
        self, sequences: list[Sequence], tokenizer: Tokenizer, prompt: Prompt | None = None
    ) -> None:
        self.sequences, self._tokenizer, self._prompt = sequences, tokenizer, prompt
        self._transcripts = {
            sequence.id: Transcript(tokenizer, sequence.params, sequence.tokens, sequence.index)
            for sequence in sequences
        }
        self._metrics = {sequence.id: sequence.metrics for sequence in sequences}
        self._error: Exception | None = None
        self.num_events = 0
        """Events of the engine taken in so far."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come, for better or worse."""
        return self._error is not None or not self.unfinished

    @property
    def unfinished(self) -> list[Sequence]:
        """The samples that go on."""
        transcripts = self._transcripts
        return [s for s in self.sequences if transcripts[s.id].finish_reason is None]

    @property
    def failure(self) -> RequestError | None:
        """What the engine could not do for it, if it failed."""
        if self._error is None or isinstance(self._error, RequestError):
            return self._error
        failure = RequestError(
            "the request failed in the engine",
            f"{type(self._error).__name__}: {self._error}",
            "The cause is attached; no other request fails with it",
        )
        failure.__cause__ = self._error
        return failure

    def take(self, event: Event) -> bool:
        """Take in what a step did to one sample; whether that sample is finished now."""
        self.num_events += 1
        transcript, stop_reason = self._transcripts[event.sequence.id], event.sequence.stop_reason
        try:
            if event.error is not None:
                raise event.error
            transcript.add(event.tokens, event.logprobs, event.finish_reason, stop_reason)
        except Exception as error:  # is this request's, and no other one's
            self._error = error
        return self._error is not None or transcript.finish_reason is not None

    @property
    def size(self) -> int:
        """Tokens that the first sample has generated."""
        return len(self._transcripts[self.sequences[0].id].token_ids)

    def length(self, sequence: Sequence) -> int:
        """Tokens of a sample up to the one that ended it, prompt and output."""
        return sequence.prompt_length + len(self._transcripts[sequence.id].token_ids)

    def abort(self) -> None:
        """Whatever goes on has ended here."""
        if self._error is not None:
            return  # it has ended, and what was said may be unreadable
        try:
            for sequence in self.unfinished:
                self._transcripts[sequence.id].finish(FinishReason.ABORT)
        except Exception as error:
            self._error = error

    def completion(self) -> CompletionOutput:
        """A copy of what the first sample has said. Raises as ``output``."""
        with self._failing():
            return self._completion(self.sequences[0])

    def output(self) -> RequestOutput:
        """A copy of everything so far.

        Raises:
            RequestError: what was said cannot be read; the generation is finished then.
        """
        with self._failing():
            return self._output()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What goes wrong inside fails this generation."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error
            if isinstance(error, RequestError):
                raise
            assert self.failure is not None
            raise self.failure from error

    def _output(self) -> RequestOutput:
        assert self._prompt is not None, "a live sequence gives completions only"
        leader = self.sequences[0]
        outputs = [self._completion(sequence) for sequence in self.sequences]
        usage = sum((sequence.usage for sequence in self.sequences), Usage())
        usage.prompt_tokens = len(self._prompt.token_ids)
        usage.completion_tokens = sum(len(output.token_ids) for output in outputs)
        scores = None
        if leader.params.prompt_logprobs is not None:
            scores = [s and name_tokens(s, self._tokenizer) for s in leader.prompt_logprobs]
        return RequestOutput(
            request_id=f"request-{leader.id}",
            prompt=self._prompt.text,
            prompt_token_ids=list(self._prompt.token_ids),
            outputs=outputs,
            finished=self.finished,
            usage=usage,
            prompt_logprobs=scores,
        )

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        output = self._transcripts[sequence.id].output()
        output.metrics = self._metrics[sequence.id].copy()
        return output
