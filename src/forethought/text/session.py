"""A live sequence in the caller's hand: generate, extend, fork, rewind, with its KV kept.

Knows nothing about other requests, which run in the same batches.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from forethought.engine import sequence as engine_sequence
from forethought.outputs import CompletionOutput, Usage
from forethought.params import SamplingParams
from forethought.text.prompt import read_length

if TYPE_CHECKING:
    from forethought.text.desk import Desk
    from forethought.text.generation import Generation


class Session:
    """Made by ``LLM.start``. Closed by ``close``, at the end of a ``with``, or when forgotten.

    Lengths count tokens from the start of the prompt. Like its ``LLM`` it belongs to one thread.

    Args:
        desk: gives the desk that serves it, or raises if none does.
        run: steps until a generation is finished, yielding after each step that gave it something.
        sequence: which lives in the engine of the desk.
    """

    def __init__(
        self,
        desk: Callable[[], Desk],
        run: Callable[[Generation], Iterator[None]],
        sequence: engine_sequence.Sequence,
    ) -> None:
        self._desk, self._run, self._sequence = desk, run, sequence
        self._forgotten = weakref.finalize(self, desk().abandon, sequence)
        self._forgotten.atexit = False

    def generate(self, params: SamplingParams | None = None) -> CompletionOutput:
        """Continue the sequence; the new tokens become part of it.

        Raises:
            ContextLengthError, CapacityError: there is no room for another token.
            ParameterError: params that a live sequence cannot honour.
            RequestError: it failed in the engine; the session is closed.
        """
        generation = self._desk().resume(self._sequence, self._desk().read_params(params))
        try:
            for _ in self._run(generation):
                pass
            return generation.completion()
        finally:
            self._desk().abort(generation)

    def stream(self, params: SamplingParams | None = None) -> Iterator[CompletionOutput]:
        """Continue the sequence; everything so far after each step. Raises as ``generate``.

        The generation begins with the first item. Leaving the iterator early ends it; what it has
        said stays.
        """
        settled = self._desk().read_params(params)
        self._desk().engine.check_resume(self._sequence, settled)
        return self._stream(settled)

    def _stream(self, params: SamplingParams) -> Iterator[CompletionOutput]:
        generation = self._desk().resume(self._sequence, params)
        try:
            for _ in self._run(generation):
                yield generation.completion()
        finally:
            self._desk().abort(generation)

    def extend(self, more: str | Sequence[int]) -> None:
        """Put text or token ids behind; they are computed with the next generation.

        Raises:
            ContextLengthError, CapacityError: it does not fit.
        """
        desk = self._desk()
        desk.engine.extend(self._sequence, desk.read_more(more))

    def fork(self, length: int | None = None) -> Session:
        """Another session with the first ``length`` tokens of this one (all by default).

        The pages are shared. May be taken while this session streams, which does not notice.

        Raises:
            UsageError: the session does not have this many tokens, or is closed.
        """
        cut = None if length is None else read_length(length)
        return Session(self._desk, self._run, self._desk().fork(self._sequence, cut))

    def rewind(self, length: int) -> None:
        """Forget all tokens from ``length`` on.

        Raises:
            UsageError: a generation is under way, the session is closed or not that long.
        """
        self._desk().engine.rewind(self._sequence, read_length(length))

    def close(self) -> None:
        """Give back the pages. Closing twice is fine."""
        if self._forgotten.detach():
            self._desk().close(self._sequence)

    @property
    def tokens(self) -> list[int]:
        """All token ids, prompt and output."""
        return list(self._sequence.tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens before the current or last generation began."""
        return self._sequence.prompt_length

    @property
    def text(self) -> str:
        """The text of all tokens, special ones included."""
        return self._desk().tokenizer.decode(self.tokens, skip_special_tokens=False)

    @property
    def usage(self) -> Usage:
        """Tokens prefilled, cached, decoded and discarded for this session so far."""
        return dataclasses.replace(self._sequence.usage)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
