"""``AsyncLLM``: the methods of ``LLM`` for many clients at once, from any event loop or thread.

One ``EngineThread`` runs the requests of all clients in the same batches.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never, Unpack

import numpy as np
from numpy.typing import NDArray

from forethought.config.engine import LlmOptions
from forethought.config.sampling import SamplingParams
from forethought.engine.embedding import groups_of
from forethought.errors import ForethoughtError, ModelError, ParameterError, RequestError
from forethought.llm.async_session import AsyncSession
from forethought.llm.detokenizer import Detokenizer
from forethought.llm.engine_thread import EngineThread, OutputStream
from forethought.llm.frontend import Frontend, Generation
from forethought.llm.llm import LLM
from forethought.llm.profile import ModelProfile
from forethought.llm.tokenizer import Prompt
from forethought.model.sampling import Constraints
from forethought.outputs import EngineLoad, EngineStats, RequestOutput

MAX_PENDING = 1024
"""Default of ``max_pending``."""


class ConcurrencyLimit:
    """``async with limit:`` waits, in order of arrival, until fewer than ``max_running`` tasks are
    inside. Unlike ``asyncio.Semaphore`` it serves tasks of any event loop in any thread.
    """

    def __init__(self, max_running: int) -> None:
        self._free, self._lock = max_running, threading.Lock()
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
        try:
            await waiter
        except BaseException:  # cancelled
            with self._lock:
                waited = waiter in self._waiting
                if waited:
                    self._waiting.remove(waiter)
            if not waited:  # it was admitted, or about to be
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                waiter = self._waiting.popleft()
                try:
                    waiter.get_loop().call_soon_threadsafe(_admit, waiter)
                except RuntimeError:  # its loop is closed
                    continue
                return
            self._free += 1


def _admit(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class AsyncLLM:
    """A model, ready to generate for many clients.

    ::

        async with AsyncLLM() as llm:
            outputs = await asyncio.gather(*[llm.generate(prompt) for prompt in prompts])

    Cancelling a task that waits for a request aborts it and frees its pages. Raises as ``LLM``.

    Args:
        model: as of ``LLM``; None: the embedded reasoner.
        max_pending: unfinished requests at once; more wait before they begin. Sessions are not
            counted: a client that holds one may wait for another, which must then begin.
        fields: any field of ``LlmArgs``.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *args: Never,
        max_pending: int = MAX_PENDING,
        **fields: Unpack[LlmOptions],
    ) -> None:
        _check(max_pending)
        self._run(Frontend.build(model, fields, *args), max_pending)

    @classmethod
    def over(cls, llm: LLM, *, max_pending: int = MAX_PENDING) -> AsyncLLM:
        """Run the engine of an ``LLM``, which takes no direct calls before ``shutdown``. Raises as
        ``LLM.lend``.
        """
        _check(max_pending)
        self = cls.__new__(cls)
        self._run(llm.lend("an AsyncLLM"), max_pending, llm)
        return self

    @classmethod
    def of(
        cls,
        frontend: Frontend,
        thread: type[EngineThread] = EngineThread,
        *,
        max_pending: int = MAX_PENDING,
    ) -> AsyncLLM:
        """Run a frontend in a thread of this kind."""
        _check(max_pending)
        self = cls.__new__(cls)
        self._run(frontend, max_pending, thread=thread)
        return self

    def _run(
        self,
        frontend: Frontend,
        max_pending: int,
        lender: LLM | None = None,
        thread: type[EngineThread] = EngineThread,
    ) -> None:
        self.model_dir, self.tokenizer = frontend.model_dir, frontend.tokenizer.hf
        self._frontend, self._limit = frontend, ConcurrencyLimit(max_pending)
        self._embedding_turn = ConcurrencyLimit(1)
        frontend.engine.ends_with_rows = True
        frontend.tokenizer.stop_candidates.of(())  # made now, so that no event loop waits for them
        self._thread = thread(frontend)
        self._shutdown = weakref.finalize(self, _stop, self._thread, lender)

    async def generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Continue one prompt; for several, gather several calls. Raises as ``LLM.generate``, and
        EngineStopped if the engine has ended.
        """
        return await self._generate(*self._checked().read(prompt, sampling_params))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer a conversation; as ``LLM.chat``."""
        frontend = self._checked()
        text, token_ids = frontend.render(messages, template_args)
        _, checked = frontend.read(token_ids, sampling_params)
        return await self._generate(Prompt(text, token_ids), checked)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, to ``generate``, ``stream`` or ``start`` from."""
        return self._checked().render(messages, template_args)[1]

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        gather: float = 0.0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt; each item is everything so far. Raises as ``generate``.

        The request begins with the first item, which also raises the errors of a grammar, and the
        engine never waits for the reader. Leaving the iterator early aborts the request. With
        ``gather``, at most one item per that many seconds of the loop's clock comes, and one at the
        end.
        """
        return self._stream(*self._checked().read(prompt, sampling_params), gather)

    def start(self, prompt: str | Sequence[int]) -> AsyncSession:
        """A live sequence that holds the prompt; it generates when its methods are called.

        Raises as ``generate``.
        """
        read, _ = self._checked().read(prompt, None)
        return AsyncSession(self, self._thread, read.token_ids)

    async def restore(self, name: str) -> AsyncSession:
        """A session as ``save`` has saved it under this name; as ``LLM.restore``."""
        saved = await asyncio.to_thread(self._checked().snapshots.load, name)
        return await AsyncSession.restored(self, self._thread, saved)

    async def add_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter while others generate; as ``LLM.add_adapter``."""
        frontend = self._checked()
        adapter = await asyncio.to_thread(frontend.read_adapter, name, path)
        await asyncio.wrap_future(self._thread.call(frontend.engine.add_adapter, adapter))

    async def remove_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; as ``LLM.remove_adapter``."""
        await asyncio.wrap_future(self._thread.call(self._checked().remove_adapter, name))

    @property
    def adapters(self) -> list[str]:
        """The names of the LoRA adapters."""
        return list(self._frontend.engine.capabilities.adapters)

    @property
    def snapshots(self) -> list[str]:
        """The names of the snapshots in ``snapshot_dir``."""
        return self._checked().snapshots.names()

    @property
    def has_ended(self) -> bool:
        """Whether it was shut down, or the engine died: all further calls raise EngineStopped."""
        return self._thread.has_ended

    @property
    def stats(self) -> EngineStats:
        """A copy of the engine's counts."""
        return self._frontend.stats

    @property
    def max_length(self) -> int:
        """Tokens that one sequence may have, prompt and output."""
        return self._frontend.engine.limits.max_length

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is; of a moment, since its thread goes on."""
        return self._frontend.engine.load

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters, in the order in which they are asked."""
        return list(self._frontend.engine.capabilities.drafters)

    @property
    def profile(self) -> ModelProfile:
        """What the model's files say of how it is to be used."""
        return self._frontend.profile

    @property
    def thinking_markers(self) -> tuple[str, str] | None:
        """What opens and closes a thought of the model; None: it has no such markers."""
        return self._frontend.profile.thinking_markers

    def check(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None
    ) -> list[int]:
        """The tokens of a prompt; raises what ``generate`` raises before it begins."""
        return self._checked().read(prompt, sampling_params)[0].token_ids

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; ``special``: with the special tokens that the tokenizer puts around a text."""
        tokenizer = self._frontend.tokenizer
        return tokenizer.encode(text) if special else tokenizer.encode_more(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. ParameterError if an id is not in the
        vocabulary.
        """
        size = self._frontend.engine.capabilities.vocab_size
        bad = next((token for token in token_ids if not 0 <= token < size), None)
        if bad is not None:
            raise ParameterError(
                "invalid token ids",
                f"{bad} is none of the ids 0 to {size - 1}",
                "Use its tokenizer",
                param="tokens",
            )
        return self._frontend.tokenizer.decode(token_ids, skip_special_tokens=False)

    def detokenizer(self, context: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer:
        """The text of tokens that follow a context, token by token."""
        return Detokenizer(self._frontend.tokenizer, context, skip_special_tokens)

    def why_not_concurrent(self) -> str | None:
        """Why sessions cannot attend to each other (``AsyncSession.attend_to``); None: they can."""
        try:
            self._frontend.engine.check_concurrent()
        except ModelError as error:
            return error.why
        return None

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding; 0: none is computed."""
        return self._frontend.engine.capabilities.hidden_size

    def check_embedded(self, text_or_ids: str | Sequence[int]) -> list[int]:
        """The tokens of an input; raises what ``embed`` raises before it begins."""
        return self._checked().read_embedded(text_or_ids)

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        adapter: str | None = None,
    ) -> NDArray[np.float32]:
        """The embeddings of texts or token ids: pooled hidden states of the final norm, of length
        1, float32 [len(inputs), dimensions].

        Forwards of embeddings take turns with the steps of generations, one with one; all inputs
        share them. The pooling is that of ``1_Pooling/config.json`` in the model's directory, or
        else the mean.

        Args:
            dimensions: the first numbers, which are kept; None: all.
            adapter: a LoRA adapter, by name.

        Raises:
            ParameterError, ContextLengthError: an input that is empty, no text or too long.
            ModelError: the model gives no embeddings.
        """
        frontend = self._checked()
        rows = [frontend.read_embedded(text_or_ids) for text_or_ids in inputs]
        if not rows:
            return np.zeros((0, dimensions or 0), np.float32)
        parts = []
        for group in groups_of(rows):
            async with self._embedding_turn:
                parts.append(await self._embed(group, frontend.pooling, adapter, dimensions))
        return np.concatenate(parts)

    def set_step_barrier(self, barrier: Callable[[], None] | None) -> None:
        """Have the engine thread call ``barrier`` before a step that follows new outputs or
        commands.

        Without it, how many steps run before a client ends its request depends on the scheduling of
        threads. A measurement that must repeat exactly waits in it until its event loop is idle.
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
        constraints = await self._frontend.compiled(params)
        async with self._limit:
            stream = self._begin(prompt, params, constraints)
            try:
                return await stream.last()
            finally:
                self._abort(stream)

    async def _stream(
        self, prompt: Prompt, params: SamplingParams, gather: float
    ) -> AsyncGenerator[RequestOutput, None]:
        constraints = await self._frontend.compiled(params)
        async with self._limit:
            stream = self._begin(prompt, params, constraints)
            try:
                while (output := await stream.next()) is not None:
                    yield output
                    if gather:
                        await stream.pause(gather)
            finally:
                self._abort(stream)

    async def _embed(self, rows: Sequence[Sequence[int]], *how: Any) -> NDArray[np.float32]:
        """One pass; ``how`` are the further arguments of ``BaseEngine.embedding_pass``."""
        engine, call = self._frontend.engine, self._thread.call_for_long
        try:
            embedding_pass = await asyncio.wrap_future(call(engine.embedding_pass, rows, *how))
            while not embedding_pass.has_ended:
                await asyncio.wrap_future(call(engine.advance, embedding_pass))
        except ForethoughtError:
            raise
        except Exception as error:  # such as one of memory
            why = f"{type(error).__name__}: {error}"
            raise RequestError("the embeddings failed in the engine", why) from error
        return embedding_pass.result().numpy()

    def _checked(self) -> Frontend:
        self._thread.check_process()
        return self._frontend

    def _begin(
        self, prompt: Prompt, params: SamplingParams, constraints: Constraints | None
    ) -> OutputStream[RequestOutput]:
        stream, frontend = OutputStream(Generation.output), self._frontend
        self._thread.begin(stream, lambda: frontend.submit(prompt, params, constraints))
        return stream

    def _abort(self, stream: OutputStream[RequestOutput]) -> None:
        if not stream.ended:
            self._thread.abort(stream)


def _check(max_pending: int) -> None:
    if max_pending < 1:
        raise ParameterError("invalid max_pending", f"got {max_pending}", "Give at least 1")


def _stop(thread: EngineThread, lender: LLM | None) -> None:
    """Also called when the AsyncLLM is garbage, and at the end of the program."""
    thread.stop()
    if thread.is_forked:
        return  # the parent ends its engine
    if lender is not None:
        lender.take_back()
    else:
        thread.frontend.engine.shutdown()
