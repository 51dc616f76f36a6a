"""A sequence in the engine that a task generates, and from where later tasks may continue it.

Knows nothing about which tasks come later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from forethought.errors import EngineStopped, RequestError
from forethought.outputs import CompletionOutput, FinishReason, Usage
from forethought.params import SamplingParams
from forethought.scaffolding.budget import Ledger
from forethought.text.async_session import AsyncSession, SessionStream

Prompt = str | tuple[int, ...]
Boundaries = Callable[[Sequence[int], Sequence[int]], Iterator[int]]
"""``boundaries(context, tokens)``: after each token, the length of the text that they make."""


class Spelled(NamedTuple):
    """A text, and the tokens of the sequence that make it."""

    text: str
    length: int
    """Tokens from the start of the prompt."""


class Live:
    """One session of the engine and the task that it generates for.

    Args:
        session: holds the prompt, and nothing generates from it yet.
        prompt: as the task gives it; None if it gives none, but continues another one by handle.
        boundaries: of the model's tokenizer.
        usage: of the task; kept up to date.
        ledger: of the request; None outside of one.

    Attributes:
        output: what has been generated, when it was last looked at.
        prompt_length: tokens of the prompt.
    """

    def __init__(
        self,
        session: AsyncSession,
        prompt: Prompt | None,
        boundaries: Boundaries,
        usage: Usage,
        ledger: Ledger | None,
    ) -> None:
        self.session, self.prompt, self.closed = session, prompt, False
        self.prompt_length = len(session.tokens)
        self.output = CompletionOutput(0)
        self._whole_tokens = self._whole_text = 0
        self._boundaries, self._usage, self._ledger = boundaries, usage, ledger
        self._counted = Usage()
        self._stream: SessionStream | None = None
        self._params = SamplingParams()

    @property
    def ended(self) -> bool:
        """Whether its generation is over."""
        return self.closed or self.output.finish_reason is not None

    def begin(self, params: SamplingParams) -> None:
        """Start to generate; it runs on by itself."""
        self._params = params
        self._stream = self.session.stream(params)

    async def reach(self, count: int | None) -> CompletionOutput:
        """Wait for ``count`` generated tokens, or the end (None: only that)."""
        assert self._stream is not None, "it has begun"
        if not self.ended:
            if count is None:
                self._see(await self._stream.finish())
            else:
                self._see(await self._stream.reach(count))
        return self.output

    async def look(self) -> CompletionOutput:
        """See at once how far it has come."""
        assert self._stream is not None, "it has begun"
        if not self.ended:
            self._see(await self._stream.peek())
        return self.output

    async def abort(self) -> CompletionOutput:
        """End the generation; what it has said stays."""
        if not self.ended:
            await self.session.abort()
        return await self.reach(None)

    async def close(self) -> None:
        """Give back its pages."""
        if not self.closed:
            under_way, self.closed = not self.ended, True
            with suppress(EngineStopped, RequestError):
                await self.session.close()
                if under_way and self._stream is not None and self._ledger is not None:
                    self._ledger.ended((await self._stream.finish()).metrics)
            self.count()

    def count(self) -> None:
        """Book what it has cost since the last time."""
        now = self.session.usage
        for name in ("prefilled", "cached", "decoded", "discarded"):
            grown = getattr(now, name) - getattr(self._counted, name)
            setattr(self._usage, name, getattr(self._usage, name) + grown)
        self._usage.completion_tokens += now.decoded - self._counted.decoded
        self._counted = now
        if self._ledger is not None:
            self._ledger.record(self._usage)

    @property
    def spelled(self) -> Spelled | None:
        """The text, prompt and output, that a later prompt may begin with; None if it has none."""
        if not isinstance(self.prompt, str) or not self._whole_text:
            return None
        text = self.prompt + self.output.text[: self._whole_text]
        return Spelled(text, self.prompt_length + self._whole_tokens)

    def cut(self, kept: int | None) -> tuple[int, str]:
        """Where to fork for its first ``kept`` generated tokens; None: for all of its text.

        Returns:
            The length from the start of the prompt, and text that goes behind it again, because no
            whole tokens make it.
        """
        generated = len(self.output.token_ids)
        if not self.ended or (kept is not None and kept < generated):
            return self.prompt_length + (generated if kept is None else kept), ""
        return self.prompt_length + self._whole_tokens, self.output.text[self._whole_text :]

    def _see(self, output: CompletionOutput) -> None:
        self.output = output
        if self.ended:
            self._end()
            if self._ledger is not None:
                self._ledger.ended(output.metrics)
        self.count()

    def _end(self) -> None:
        """Find the tokens that make the output's text, and how much of it they make.

        The token that ended a generation is not in its text, nor is what a stop string cut off.
        """
        tokens, text = self.output.token_ids, self.output.text
        self._whole_tokens, self._whole_text = len(tokens), len(text)
        if self.output.finish_reason is not FinishReason.STOP:
            return
        if not isinstance(self.output.stop_reason, str):
            self._whole_tokens -= 0 if self._params.include_stop_str_in_output else 1
            return
        self._whole_tokens = self._whole_text = 0
        context = self.session.tokens[: self.prompt_length]
        for number, end in enumerate(self._boundaries(context, tokens), start=1):
            if end > len(text):
                break
            self._whole_tokens, self._whole_text = number, end
