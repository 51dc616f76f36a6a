"""``LLM`` and its ``Session``: prompts in, texts out, for a program that waits for them.

An ``LLM`` steps its engine while a call waits for output. Threads may call it at the same time:
they take the engine one step at a time, in order of arrival, and a step advances the requests of
all of them, so that they share batches. ``AsyncLLM`` is for many clients at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Never, TypeVar, Unpack, overload

import torch

from forethought.config.engine import LlmOptions
from forethought.config.sampling import SamplingParams
from forethought.engine import sequence as engine_sequence
from forethought.engine.sequence import num_common
from forethought.errors import DependencyError, EngineStopped, ParameterError, UsageError
from forethought.garbage_collection import rare_collections
from forethought.llm.fifo_lock import FifoLock
from forethought.llm.frontend import Frontend, Generation
from forethought.llm.profile import ModelProfile
from forethought.llm.tokenizer import Prompt, is_batch, read_length
from forethought.model.sampling import Constraints
from forethought.outputs import (
    CompletionOutput,
    EngineStats,
    RequestOutput,
    TokenLogprobs,
    Usage,
)

Params = SamplingParams | Sequence[SamplingParams] | None
Output = TypeVar("Output")
Request = tuple[Prompt, SamplingParams, Constraints | None]
WithProgress = Callable[[list[Generation]], Iterable[Generation]]
"""Iterates over generations, perhaps with a progress bar."""


class LLM:
    """A model, ready to generate.

    ::

        llm = LLM()  # the embedded reasoner; or LLM("/path/to/model"), LLM("Qwen/Qwen3-0.6B")
        print(llm.generate("Hello", SamplingParams(max_tokens=20)).outputs[0].text)

    Args:
        model: local Hugging Face directory, Hub id, GGUF file (a path, or a name such as
            ``"user/repository:Q4_K_M"`` and ``"ollama:smollm2"``), or name of an embedded model,
            such as ``"forethought/countdown"``; None: the embedded reasoner.
        fields: any field of ``LlmArgs``: ``revision``, ``dtype``, ``kv_cache_config``, ...

    Raises:
        ParameterError: an unknown field or a bad value.
        ModelError: the model is neither here nor on the Hub, is broken, or is not supported.
        UnknownNameError: there is no embedded model of this name.
        CapacityError: the KV cache would not hold a single sequence.
    """

    def __init__(
        self, model: str | Path | None = None, *args: Never, **fields: Unpack[LlmOptions]
    ) -> None:
        self._frontend: Frontend | None = Frontend.build(model, fields, *args)
        self.model_dir, self.tokenizer = self._frontend.model_dir, self._frontend.tokenizer.hf
        self._borrower: str | None = None
        self._lock, self._pid = FifoLock(), os.getpid()
        after_fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (call := after_fork()) and call())

    @overload
    def generate(
        self, prompts: str | list[int], sampling_params: Params = None, *, use_tqdm: bool = False
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]: ...

    def generate(
        self, prompts: Any, sampling_params: Params = None, *, use_tqdm: bool = False
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt or many. If one of many is refused, none has run and the error gives
        its index.

        Args:
            prompts: a string or a list of token ids; or a list of such, for a list of results.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar of the prompts, in their order, on standard error.

        Raises:
            DependencyError: ``use_tqdm``, and tqdm is not installed.
            ParameterError: a prompt is empty, of a wrong type or outside the vocabulary.
            ContextLengthError, CapacityError: a prompt leaves no capacity for an answer.
            RequestTimeout: a grammar of ``guided_decoding`` was not compiled in time.
            RequestError: a request failed in the engine; the others of this call are aborted.
        """
        bar = _progress_bar(use_tqdm)
        if not is_batch(prompts):
            return self._run([self._read(prompts, sampling_params)], bar)[0]
        params = self._params_of_each(sampling_params, len(prompts))
        pairs = zip(prompts, params, strict=True)
        requests = [self._read_one(index, *pair) for index, pair in enumerate(pairs)]
        return self._run(requests, bar)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer a conversation, through the model's chat template.

        ``messages`` have ``role`` and ``content``; ``template_args`` go to the template.

        Raises:
            UsageError: there is no template, or it refuses the messages; else as ``generate``.
        """
        text, token_ids = self._checked().render(messages, template_args)
        _, checked, constraints = self._read(token_ids, sampling_params)
        return self._run([(Prompt(text, token_ids), checked, constraints)])[0]

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, to ``generate``, ``stream`` or ``start`` from."""
        return self._checked().render(messages, template_args)[1]

    def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt; everything so far after each step. Raises as ``generate``. The
        request begins with the first item. Leaving the iterator early aborts it.
        """
        return self._stream(self._read(prompt, sampling_params))

    def start(self, prompt: str | Sequence[int]) -> Session:
        """A live sequence of the prompt, whose methods generate. Raises as ``generate``."""
        read, _ = self._checked().read(prompt, None)
        with self._exclusive() as frontend:
            return Session(self, frontend.open(read.token_ids))

    def restore(self, name: str) -> Session:
        """A session as ``Session.save`` has saved it under this name: the same tokens and KV.

        Raises:
            ParameterError: ``snapshot_dir`` is not set, or the name is invalid.
            UnknownNameError: there is no snapshot of this name.
            SnapshotError: it is of another model, dtype or layout, or the file is damaged.
            ContextLengthError, CapacityError: context or KV cache do not hold it, or not now.
        """
        saved = self._checked().snapshots.load(name)
        with self._exclusive() as frontend:
            return Session(self, frontend.restore(saved))

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter, which requests then choose by ``SamplingParams.adapter``.

        Args:
            name: by which it is chosen.
            path: directory as PEFT saves it.

        Raises:
            ParameterError: an invalid name, or there is an adapter of this name.
            ModelError: it is missing, broken, not supported or of another model.
        """
        adapter = self._checked().read_adapter(name, path)
        with self._exclusive() as frontend:
            frontend.engine.add_adapter(adapter)

    def remove_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. Raises UnknownNameError if there is none of this name, UsageError
        while requests or sessions use it.
        """
        with self._exclusive() as frontend:
            frontend.remove_adapter(name)

    @property
    def adapters(self) -> list[str]:
        """The names of the LoRA adapters."""
        return list(self._running().engine.capabilities.adapters)

    @property
    def profile(self) -> ModelProfile:
        """What the model's files say of how it is to be used."""
        return self._running().profile

    @property
    def snapshots(self) -> list[str]:
        """The names of the snapshots in ``snapshot_dir``."""
        return self._checked().snapshots.names()

    @property
    def stats(self) -> EngineStats:
        """A copy of the engine's counts."""
        return self._running().stats

    @property
    def max_length(self) -> int:
        """Tokens that one sequence may have, prompt and output."""
        return self._running().engine.limits.max_length

    def lend(self, borrower: str) -> Frontend:
        """A frontend for ``borrower``; direct calls are refused until ``take_back``. Raises
        UsageError if it is lent already, or a stream is in progress.
        """
        with self._exclusive() as frontend:
            if frontend.is_busy:
                raise UsageError(
                    f"{borrower} cannot take over this LLM",
                    "a generation is in progress",
                    "Finish or close its streams first",
                )
            self._borrower = borrower
            return frontend.copy()

    def take_back(self) -> None:
        """Take direct calls again: the borrower has ended its requests."""
        self._borrower = None
        if self._frontend is not None:
            self._frontend.engine.ends_with_rows = False

    def shutdown(self) -> None:
        """Free the engine. Later calls raise ``EngineStopped``."""
        if self._frontend is not None:
            with self._exclusive() as frontend:
                frontend.clear()
                frontend.engine.shutdown()
                self._frontend = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _running(self) -> Frontend:
        if self._frontend is None:
            raise EngineStopped("this LLM has been shut down", fix="Build a new one")
        return self._frontend

    def _checked(self) -> Frontend:
        """The frontend, for what any thread may do at any time; raises as ``_exclusive``."""
        frontend = self._running()
        if self._borrower is not None:
            raise UsageError(
                "this LLM does not take direct calls now",
                f"its engine is run by {self._borrower}",
                "Call that one, or shut it down first",
            )
        if os.getpid() != self._pid:
            self._check_fork(frontend)
        return frontend

    def _after_fork(self) -> None:
        self._lock.after_fork()
        if self._frontend is not None:
            self._frontend.grammars.after_fork()

    def _check_fork(self, frontend: Frontend) -> None:
        """Raises if this forked child cannot go on with the engine of its parent."""
        reason = ""
        if frontend.local_engine.runner.lm.device.type != "cpu":
            reason = "CUDA does not survive a fork"
        elif torch.get_num_threads() > 1:
            reason = f"the {torch.get_num_threads()} threads of torch do not survive a fork"
        elif self._lock.lost_at_fork:
            reason = "another thread was using it at the fork"
        if reason:
            raise EngineStopped(
                "this LLM does not run in a forked process",
                reason,
                "Build it in the process that uses it",
            )

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[Frontend]:
        """The frontend, while no other thread uses it.

        Raises EngineStopped after a shutdown or a fork, and UsageError if the engine is lent or
        calls back from its own step, as a drafter might.
        """
        self._checked()
        if self._lock.owner == threading.get_ident():
            raise UsageError(
                "this LLM is in use", "it is called from within its own step", "Build another one"
            )
        try:
            with self._lock:
                frontend = self._checked()
                frontend.sweep()
                yield frontend
        finally:
            self._sweep()

    def _sweep(self) -> None:
        """End what was abandoned; a thread that holds the lock does so when it releases it."""
        frontend = self._frontend
        while frontend and self._borrower is None and frontend.has_abandoned:
            if not self._lock.try_acquire():
                return
            try:
                frontend.sweep()
            finally:
                self._lock.release()

    def _abort(self, generation: Generation) -> None:
        """End a generation if it goes on. The garbage collector may call this."""
        frontend = self._frontend
        if frontend is not None and generation.unfinished:
            frontend.abandon(generation)
            self._sweep()

    def _drop(self, sequence: engine_sequence.Sequence) -> None:
        if self._frontend is not None:
            self._frontend.abandon(sequence)
            self._sweep()

    def _read(self, prompt: Any, params: Any) -> Request:
        frontend = self._checked()
        read, checked = frontend.read(prompt, params)
        return read, checked, frontend.constraints(checked)

    def _read_one(self, index: int, prompt: Any, params: SamplingParams | None) -> Request:
        try:
            return self._read(prompt, params)
        except UsageError as error:
            raise type(error)(f"prompt {index}: {error.what}", error.why, error.fix) from error

    @staticmethod
    def _params_of_each(params: Params, count: int) -> Sequence[SamplingParams | None]:
        if not isinstance(params, Sequence):
            return [params] * count
        if len(params) != count:
            raise ParameterError(
                "sampling_params do not match the prompts",
                f"given: sampling_params {len(params)}, prompts {count}",
                "Give one for each, or a single one for all",
            )
        return params

    def _run(self, requests: list[Request], bar: WithProgress = list) -> list[RequestOutput]:
        generations = list[Generation]()
        try:
            with self._exclusive() as frontend:
                for request in requests:
                    generations.append(frontend.submit(*request))
                frontend.local_engine.order_by_prefix([g.sequences for g in generations])
            with rare_collections():
                return [self._last(one, Generation.output) for one in bar(generations)]
        finally:
            for generation in generations:
                self._abort(generation)

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        with self._exclusive() as frontend:
            generation = frontend.submit(*request)
        return (yield from self._iterate(generation, Generation.output))

    def _last(self, generation: Generation, read: Callable[[Generation], Output]) -> Output:
        """Step until a generation is finished; its output."""
        while not generation.finished:
            with self._exclusive() as frontend:
                while not generation.finished:  # another thread's step may have ended it
                    frontend.step()
                    if self._lock.is_wanted:
                        break
        if generation.failure is not None:
            raise generation.failure
        return read(generation)

    def _iterate(
        self, generation: Generation, read: Callable[[Generation], Output]
    ) -> Iterator[Output]:
        """Step until a generation is finished; its output after each step that changed it."""
        for sequence in generation.sequences:
            sequence.is_streamed = True
        try:
            num_seen = 0
            while not generation.finished:
                with self._exclusive() as frontend:
                    while generation.num_events == num_seen and not generation.finished:
                        frontend.step()
                    num_seen = generation.num_events
                    output = None if generation.finished else read(generation)
                if output is not None:
                    yield output
            yield self._last(generation, read)
        finally:
            self._abort(generation)


class Session:
    """A live sequence: generate, extend, fork and rewind it, with its KV cache kept.

    Made by ``LLM.start``. Closed by ``close``, at the end of a ``with``, or when garbage collected.
    Lengths count tokens from the start of the prompt. One generation at a time.
    """

    def __init__(self, llm: LLM, sequence: engine_sequence.Sequence) -> None:
        self._llm, self._sequence = llm, sequence
        self._finalizer = weakref.finalize(self, llm._drop, sequence)
        self._finalizer.atexit = False

    def generate(self, sampling_params: SamplingParams | None = None) -> CompletionOutput:
        """Continue the sequence; the new tokens become part of it.

        Raises:
            ContextLengthError, CapacityError: there is no capacity for another token.
            ParameterError: params that a live sequence cannot honour.
            RequestTimeout: the grammar of ``guided_decoding`` was not compiled in time.
            RequestError: it failed in the engine; the session is closed.
        """
        generation = self._resume(*self._read(sampling_params))
        try:
            return self._llm._last(generation, Generation.completion)
        finally:
            self._llm._abort(generation)

    def stream(self, sampling_params: SamplingParams | None = None) -> Iterator[CompletionOutput]:
        """Continue the sequence; everything so far after each step. Raises as ``generate``. The
        generation begins with the first item. Leaving the iterator early ends it; its tokens so
        far stay.
        """
        checked, constraints = self._read(sampling_params)
        with self._llm._exclusive() as frontend:
            frontend.engine.check_resume(self._sequence, checked)
        return self._stream(checked, constraints)

    def _read(self, params: Any) -> tuple[SamplingParams, Constraints | None]:
        frontend = self._llm._checked()
        checked = frontend.read_params(params)
        return checked, frontend.constraints(checked)

    def _resume(self, params: SamplingParams, constraints: Constraints | None) -> Generation:
        with self._llm._exclusive() as frontend:
            return frontend.resume(self._sequence, params, constraints)

    def _stream(
        self, params: SamplingParams, constraints: Constraints | None
    ) -> Iterator[CompletionOutput]:
        generation = self._resume(params, constraints)
        return (yield from self._llm._iterate(generation, Generation.completion))

    def extend(self, more: str | Sequence[int]) -> None:
        """Append text or token ids; they are computed with the next generation. Raises
        ContextLengthError or CapacityError if they do not fit.
        """
        token_ids = self._llm._checked().read_more(more)
        with self._llm._exclusive() as frontend:
            frontend.engine.extend(self._sequence, token_ids)

    def fork(self, length: int | None = None) -> Session:
        """Another session with the first ``length`` tokens of this one (all by default), sharing
        pages. Allowed while this session streams, which goes on unchanged.

        Raises UsageError if the session does not have this many tokens, or is closed.
        """
        cut = None if length is None else read_length(length)
        with self._llm._exclusive() as frontend:
            return Session(self._llm, frontend.fork(self._sequence, cut))

    def attend_to(self, others: Sequence[Session], length: int | None = None) -> None:
        """Read the tokens of other sessions, which may be generating; see ``Engine.attend_to``.

        ``others``, to be kept open, replace those that are read so far. ``length`` is that of the
        common beginning, after which they are read; None: the longest.

        Raises:
            UsageError: one of them is closed or of another engine, they do not begin alike, or this
                one has no token of its own after the common beginning.
            ModelError: the model's attention cannot.
        """
        with self._llm._exclusive() as frontend:
            read = [other._sequence for other in others]
            count = num_common([self._sequence, *read]) if length is None else read_length(length)
            frontend.engine.attend_to(self._sequence, dict.fromkeys(read, count))

    def rewind(self, length: int) -> None:
        """Drop all tokens from ``length`` on. Raises UsageError if a generation is in progress, the
        session is closed or not that long.
        """
        num_kept = read_length(length)
        with self._llm._exclusive() as frontend:
            frontend.engine.rewind(self._sequence, num_kept)

    def save(self, name: str) -> Path:
        """Save tokens and KV under a name, for ``LLM.restore`` of this or another process.

        A fork computes what is not computed yet, so this session stays as it is. Other requests go
        on while the file is written. An older snapshot of the name is replaced.

        Raises:
            ParameterError: ``snapshot_dir`` is not set, or the name is invalid.
            UsageError: the session is closed.
            SnapshotError: the file cannot be written.
        """
        llm = self._llm
        store = llm._checked().snapshots
        store.path(name)
        with llm._exclusive() as frontend:
            token_ids, sequence = frontend.fork_to_save(self._sequence)
        with Session(llm, sequence) as fork:
            if sequence.num_uncomputed:
                fork.generate(sequence.params)
                fork.rewind(fork.prompt_length)
            with llm._exclusive() as frontend:
                saved = frontend.engine.capture(sequence, token_ids)
        return store.save(name, saved)

    def close(self) -> None:
        """Free the pages. Closing twice is fine, and so is closing after the ``LLM``'s shutdown."""
        if self._finalizer.alive:
            with contextlib.suppress(EngineStopped), self._llm._exclusive() as frontend:
                self._finalizer.detach()
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
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """Of the current or last generation, if its ``prompt_logprobs`` asked for them: one entry
        per token before it, None for those before the extension."""
        return list(self._sequence.prompt_logprobs)

    @property
    def text(self) -> str:
        """The text of all tokens, special ones included."""
        return self._llm._running().tokenizer.decode(self.tokens, skip_special_tokens=False)

    @property
    def usage(self) -> Usage:
        """Tokens prefilled, cached, decoded and discarded for this session so far."""
        return dataclasses.replace(self._sequence.usage)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _progress_bar(use_tqdm: bool) -> WithProgress:
    """tqdm's progress bar, or none; raises DependencyError if tqdm is not installed."""
    if not use_tqdm:
        return list
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise DependencyError.missing("tqdm", "use_tqdm", "eval") from error
    return partial(tqdm, desc="prompts", unit="prompt", dynamic_ncols=True)
