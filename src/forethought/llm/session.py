"""A live sequence in the caller's hand: generate, extend, fork, rewind, with its KV kept.

Knows nothing about other requests, which run in the same batches.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from forethought.config.sampling import SamplingParams
from forethought.engine import sequence as engine_sequence
from forethought.llm.frontend import Generation
from forethought.llm.tokenizer import read_length
from forethought.model.sampling import Constraints
from forethought.outputs import CompletionOutput, Usage

if TYPE_CHECKING:
    from forethought.llm.llm import LLM


class Session:
    """Made by ``LLM.start``. Closed by ``close``, at the end of a ``with``, or when forgotten.

    Lengths count tokens from the start of the prompt. One generation at a time.

    Args:
        llm: which serves it.
        sequence: which lives in the engine of the LLM.
    """

    def __init__(self, llm: LLM, sequence: engine_sequence.Sequence) -> None:
        self._llm, self._sequence = llm, sequence
        self._forgotten = weakref.finalize(self, llm._forget, sequence)
        self._forgotten.atexit = False

    def generate(self, params: SamplingParams | None = None) -> CompletionOutput:
        """Continue the sequence; the new tokens become part of it.

        Raises:
            ContextLengthError, CapacityError: there is no room for another token.
            ParameterError: params that a live sequence cannot honour.
            RequestTimeout: the grammar of ``guided_decoding`` was not compiled in time.
            RequestError: it failed in the engine; the session is closed.
        """
        generation = self._resume(*self._read(params))
        try:
            return self._llm._last(generation, Generation.completion)
        finally:
            self._llm._leave(generation)

    def stream(self, params: SamplingParams | None = None) -> Iterator[CompletionOutput]:
        """Continue the sequence; everything so far after each step. Raises as ``generate``.

        The generation begins with the first item. Leaving the iterator early ends it; what it has
        said stays.
        """
        settled, constraints = self._read(params)
        with self._llm._serving() as frontend:
            frontend.engine.check_resume(self._sequence, settled)
        return self._stream(settled, constraints)

    def _read(self, params: Any) -> tuple[SamplingParams, Constraints | None]:
        frontend = self._llm._available()
        settled = frontend.read_params(params)
        return settled, frontend.guidance.constraints(settled)

    def _resume(self, params: SamplingParams, constraints: Constraints | None) -> Generation:
        with self._llm._serving() as frontend:
            return frontend.resume(self._sequence, params, constraints)

    def _stream(
        self, params: SamplingParams, constraints: Constraints | None
    ) -> Iterator[CompletionOutput]:
        generation = self._resume(params, constraints)
        return (yield from self._llm._follow(generation, Generation.completion))

    def extend(self, more: str | Sequence[int]) -> None:
        """Put text or token ids behind; they are computed with the next generation.

        Raises:
            ContextLengthError, CapacityError: it does not fit.
        """
        token_ids = self._llm._available().read_more(more)
        with self._llm._serving() as frontend:
            frontend.engine.extend(self._sequence, token_ids)

    def fork(self, length: int | None = None) -> Session:
        """Another session with the first ``length`` tokens of this one (all by default).

        The pages are shared. May be taken while this session streams, which does not notice.

        Raises:
            UsageError: the session does not have this many tokens, or is closed.
        """
        cut = None if length is None else read_length(length)
        with self._llm._serving() as frontend:
            return Session(self._llm, frontend.fork(self._sequence, cut))

    def rewind(self, length: int) -> None:
        """Forget all tokens from ``length`` on.

        Raises:
            UsageError: a generation is under way, the session is closed or not that long.
        """
        kept = read_length(length)
        with self._llm._serving() as frontend:
            frontend.engine.rewind(self._sequence, kept)

    def close(self) -> None:
        """Give back the pages. Closing twice is fine."""
        if self._forgotten.alive:
            with self._llm._serving() as frontend:
                self._forgotten.detach()
                frontend.close(self._sequence)

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
        return self._llm._standing().tokenizer.decode(self.tokens, skip_special_tokens=False)

    @property
    def usage(self) -> Usage:
        """Tokens prefilled, cached, decoded and discarded for this session so far."""
        return dataclasses.replace(self._sequence.usage)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
