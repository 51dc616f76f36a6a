"""``AsyncLLM``: the verbs of ``LLM`` for many clients at once, from any event loop or thread.

One engine thread runs everybody's requests in the same batches. Knows nothing about how.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from forethought.config.engine import LlmOptions
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.llm.async_session import AsyncSession
from forethought.llm.engine_thread import EngineThread, OutputStream
from forethought.llm.frontend import Frontend, Generation
from forethought.llm.llm import LLM, ConcurrencyLimit
from forethought.llm.tokenizer import Prompt
from forethought.model.sampling import Constraints
from forethought.outputs import EngineStats, RequestOutput

MAX_PENDING = 1024
"""Requests that may be unfinished at once unless told otherwise."""


class AsyncLLM:
    """A model, ready to generate for many clients.

    ::

        async with AsyncLLM() as llm:
            outputs = await asyncio.gather(*[llm.generate(prompt) for prompt in prompts])

    Cancelling a task that waits for a request aborts it and frees its pages.

    Args:
        model: local Hugging Face directory, or Hub id; None: the embedded reasoner.
        max_pending: requests that may be unfinished at once; more wait before they begin. Sessions
            are not counted: those that a session's owner waits for could otherwise never begin.
        fields: any field of ``LlmArgs``.

    Raises:
        UsageError: as ``LLM``.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_pending: int = MAX_PENDING,
        **fields: Unpack[LlmOptions],
    ) -> None:
        _check(max_pending)
        self._run(Frontend.build(model, fields), max_pending)

    @classmethod
    def over(cls, llm: LLM, *, max_pending: int = MAX_PENDING) -> AsyncLLM:
        """Run the engine of an ``LLM``, which takes no direct calls before ``shutdown``.

        Raises:
            UsageError: one of its streams is under way, or it is lent already.
        """
        _check(max_pending)
        self = cls.__new__(cls)
        self._run(llm.lend("an AsyncLLM"), max_pending, llm)
        return self

    def _run(self, frontend: Frontend, max_pending: int, lender: LLM | None = None) -> None:
        self.model_dir, self.tokenizer = frontend.model_dir, frontend.tokenizer.hf
        self._frontend, self._gate = frontend, ConcurrencyLimit(max_pending)
        self._thread = EngineThread(frontend)
        self._shutdown = weakref.finalize(self, _stop, self._thread, lender)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Continue one prompt. For several, gather several calls.

        Raises:
            ParameterError: the prompt is empty, of a wrong type or outside the vocabulary.
            ContextLengthError, CapacityError: it leaves no room for an answer.
            RequestTimeout: the grammar of ``guided_decoding`` was not compiled in time.
            RequestError: the request failed in the engine; others go on.
            EngineStopped: the engine has ended.
        """
        return await self._generate(*self._serving().read(prompt, params))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer a conversation, through the model's chat template.

        Args:
            messages: mappings with ``role`` and ``content``.
            params: how to draw and when to stop.
            template_args: further arguments of the template.

        Raises:
            UsageError: there is no template, or it refuses the messages; else as ``generate``.
        """
        frontend = self._serving()
        text, token_ids = frontend.render(messages, template_args)
        _, settled = frontend.read(token_ids, params)
        return await self._generate(Prompt(text, token_ids), settled)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, to ``generate``, ``stream`` or ``start`` from."""
        return self._serving().render(messages, template_args)[1]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Continue one prompt; everything so far, as often as you ask. Raises as ``generate``.

        The request begins with the first item, and the engine never waits for the reader. Leaving
        the iterator early aborts the request. What is wrong with a grammar is raised by the first
        item, since it is compiled then.
        """
        return self._stream(*self._serving().read(prompt, params))

    def start(self, prompt: str | Sequence[int]) -> AsyncSession:
        """A live sequence that holds the prompt and generates when told to.

        Raises as ``generate``.
        """
        read, _ = self._serving().read(prompt, None)
        return AsyncSession(self, self._thread, read.token_ids)

    @property
    def stats(self) -> EngineStats:
        """A copy of the engine's counts."""
        return self._frontend.stats

    @property
    def max_length(self) -> int:
        """Tokens that one sequence may have, prompt and output."""
        return self._frontend.engine.limits.max_length

    def set_step_barrier(self, barrier: Callable[[], None] | None) -> None:
        """Have the engine call ``barrier`` on its thread, and step when that has returned.

        It is called once clients have been told something or have asked for something. The engine
        does not wait for its clients otherwise, so how far it runs ahead of one that is about to
        end its request depends on the scheduling of threads. A measurement that is to be repeated
        exactly waits there until its event loop is idle.

        Args:
            barrier: None: do not wait any more.
        """
        self._thread.barrier = barrier

    def shutdown(self) -> None:
        """End the thread after its current step. What is unfinished fails with EngineStopped."""
        self._shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    async def _generate(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        constraints = await self._frontend.guidance.compiled(params)
        async with self._gate:
            listener = self._begin(prompt, params, constraints)
            try:
                return await listener.last()
            finally:
                self._leave(listener)

    async def _stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        constraints = await self._frontend.guidance.compiled(params)
        async with self._gate:
            listener = self._begin(prompt, params, constraints)
            try:
                while (output := await listener.next()) is not None:
                    yield output
            finally:
                self._leave(listener)

    def _serving(self) -> Frontend:
        self._thread.check_process()
        return self._frontend

    def _begin(
        self, prompt: Prompt, params: SamplingParams, constraints: Constraints | None
    ) -> OutputStream[RequestOutput]:
        listener, frontend = OutputStream(Generation.output), self._frontend
        self._thread.begin(listener, lambda: frontend.submit(prompt, params, constraints))
        return listener

    def _leave(self, listener: OutputStream[RequestOutput]) -> None:
        if not listener.ended:
            self._thread.abort(listener)


def _check(max_pending: int) -> None:
    if max_pending < 1:
        raise ParameterError("invalid max_pending", f"got {max_pending}", "Give at least 1")


def _stop(thread: EngineThread, lender: LLM | None) -> None:
    """Also called when the AsyncLLM is forgotten, and at the end of the program."""
    thread.stop()
    if thread.is_forked:
        return  # the parent ends its engine
    if lender is not None:
        lender.take_back()
    else:
        thread.frontend.engine.shutdown()
