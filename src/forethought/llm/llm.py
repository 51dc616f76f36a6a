"""How many may be inside at once; the rest wait in the order of their coming.

``Gate`` is for tasks of any event loop in any thread, which ``asyncio.Semaphore`` is not. ``Turns``
is for threads, one at a time.

[llm] ``LLM``: prompts in, texts out, for a program that waits for them.

Owns an engine through a ``Desk`` and steps it while somebody waits. May be used from several
threads: they take turns at the engine, and whoever has the turn steps for all, so that their
requests share batches. Many clients at once are ``AsyncLLM``'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

import torch

from forethought.config.engine import LlmOptions
from forethought.config.sampling import SamplingParams
from forethought.engine import sequence as engine_sequence
from forethought.errors import DependencyError, EngineStopped, ParameterError, UsageError
from forethought.llm.frontend import Frontend, Generation
from forethought.llm.session import Session
from forethought.llm.tokenizer import Prompt, is_batch
from forethought.model.sampling import Constraints
from forethought.outputs import EngineStats, RequestOutput


class ConcurrencyLimit:
    """``async with gate:`` waits for a place and gives it back.

    Args:
        places: how many there are, at least 1.
    """

    def __init__(self, places: int) -> None:
        self._free, self._lock = places, threading.Lock()
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except BaseException:  # cancelled
            with self._lock:
                waited = turn in self._waiting
                if waited:
                    self._waiting.remove(turn)
            if not waited:  # the place had been given, or was about to be
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Pass the place on to whoever waits longest and still has a loop to run on."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_admit, turn)
                except RuntimeError:  # its loop is closed
                    continue
                return
            self._free += 1


def _admit(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class Turns:
    """``with turns:`` waits until no other thread is inside.

    In order of arrival, which ``threading.Lock`` does not promise: there a thread that leaves and
    comes back at once keeps the others out for as long as it likes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False
        self.owner: int | None = None
        """The thread inside, as ``threading.get_ident`` names it; None also while one leaves and
        the next one has not come in yet."""
        self.lost_at_fork = False
        """Whether this is a forked child, and a thread of the parent was inside at the fork."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._take()
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # KeyboardInterrupt
            with self._lock:
                waited = turn in self._waiting
                if waited:
                    self._waiting.remove(turn)
            if not waited:
                self.leave()
            raise
        self.owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter_at_once(self) -> bool:
        """Enter if nobody is inside. Never waits, so the garbage collector may call it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._taken:
                return False
            self._take()
            return True
        finally:
            self._lock.release()

    def leave(self) -> None:
        """Let the one in who waits longest."""
        with self._lock:
            self.owner = None
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    def after_fork(self) -> None:
        """In a forked child, which has but one thread: nobody else leaves or waits any more.

        If another thread was inside, or about to be, nobody can enter: it may have left what it
        was changing half changed.
        """
        inside = self._taken and self.owner != threading.get_ident()
        self.lost_at_fork = self.lost_at_fork or inside or self._lock.locked()
        self._taken = self._taken or self.lost_at_fork
        self._lock = threading.Lock()
        self._waiting.clear()

    def _take(self) -> None:
        self._taken, self.owner = True, threading.get_ident()


Params = SamplingParams | Sequence[SamplingParams] | None
Output = TypeVar("Output")
Request = tuple[Prompt, SamplingParams, Constraints | None]
Bar = Callable[[list[Generation]], Iterable[Generation]]
"""Iterates over generations, and may show how far it is."""


class LLM:
    """A model, ready to generate.

    ::

        llm = LLM()  # the embedded reasoner; or LLM("/path/to/model"), LLM("Qwen/Qwen3-0.6B")
        print(llm.generate("Hello", SamplingParams(max_tokens=20)).outputs[0].text)

    Args:
        model: local Hugging Face directory, or Hub id; None: the embedded reasoner.
        fields: any field of ``LlmArgs``: ``revision``, ``dtype``, ``kv_cache_config``, ...

    Raises:
        ParameterError: an unknown field or a bad value.
        ModelError: the model is neither here nor on the Hub, is broken, or is not supported.
        CapacityError: the KV cache would not hold a single sequence.
    """

    def __init__(self, model: str | Path | None = None, **fields: Unpack[LlmOptions]) -> None:
        self._frontend: Frontend | None = Frontend.build(model, fields)
        self.model_dir, self.tokenizer = self._frontend.model_dir, self._frontend.tokenizer.hf
        self._borrower: str | None = None
        self._turns, self._pid = Turns(), os.getpid()
        after_fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (call := after_fork()) and call())

    @overload
    def generate(
        self, prompts: str | list[int], params: Params = None, *, use_tqdm: bool = False
    ) -> RequestOutput: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], params: Params = None, *, use_tqdm: bool = False
    ) -> list[RequestOutput]: ...

    def generate(
        self, prompts: Any, params: Params = None, *, use_tqdm: bool = False
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt or many.

        Args:
            prompts: a string or a list of token ids; or a list of such, for a list of results.
            params: for all prompts, or one for each.
            use_tqdm: show a bar of the finished prompts, in their order, on standard error.

        Raises:
            DependencyError: ``use_tqdm``, and tqdm is not installed.
            ParameterError: a prompt is empty, of a wrong type or outside the vocabulary.
            ContextLengthError, CapacityError: a prompt leaves no room for an answer.
            RequestTimeout: a grammar of ``guided_decoding`` was not compiled in time.
            RequestError: a request failed in the engine; the others of this call are aborted.

        If one prompt of many is refused, none has run and the error gives its index.
        """
        bar = _bar(use_tqdm)
        if not is_batch(prompts):
            return self._finish([self._read(prompts, params)], bar)[0]
        each = self._params_of_each(params, len(prompts))
        pairs = zip(prompts, each, strict=True)
        requests = [self._read_one(index, *pair) for index, pair in enumerate(pairs)]
        return self._finish(requests, bar)

    def chat(
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
        text, token_ids = self._available().render(messages, template_args)
        _, settled, constraints = self._read(token_ids, params)
        return self._finish([(Prompt(text, token_ids), settled, constraints)])[0]

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, to ``generate``, ``stream`` or ``start`` from."""
        return self._available().render(messages, template_args)[1]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt; everything so far after each step. Raises as ``generate``.

        The request begins with the first item. Leaving the iterator early aborts it.
        """
        return self._stream(self._read(prompt, params))

    def start(self, prompt: str | Sequence[int]) -> Session:
        """A live sequence that holds the prompt and generates when told to.

        Raises as ``generate``.
        """
        read, _ = self._available().read(prompt, None)
        with self._serving() as frontend:
            return Session(self, frontend.open(read.token_ids))

    @property
    def stats(self) -> EngineStats:
        """A copy of the engine's counts."""
        return self._standing().stats

    @property
    def max_length(self) -> int:
        """Tokens that one sequence may have, prompt and output."""
        return self._standing().engine.limits.max_length

    def lend(self, borrower: str) -> Frontend:
        """A desk of its own for ``borrower``; direct calls are refused until ``take_back``.

        Raises:
            UsageError: it is lent already, or a stream is under way.
        """
        with self._serving() as frontend:
            if frontend.is_busy:
                raise UsageError(
                    f"{borrower} cannot take over this LLM",
                    "a generation is under way",
                    "Finish or close its streams first",
                )
            self._borrower = borrower
            return frontend.another()

    def take_back(self) -> None:
        """The borrower is done."""
        self._borrower = None

    def shutdown(self) -> None:
        """Give back everything. Later calls raise ``EngineStopped``."""
        if self._frontend is not None:
            with self._serving() as frontend:
                frontend.clear()
                frontend.engine.shutdown()
                self._frontend = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _standing(self) -> Frontend:
        if self._frontend is None:
            raise EngineStopped("this LLM has been shut down", fix="Build a new one")
        return self._frontend

    def _available(self) -> Frontend:
        """The desk, for what may be done in any thread."""
        frontend = self._standing()
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
        """In a forked child: forget the threads of its parent."""
        self._turns.after_fork()
        if self._frontend is not None:
            self._frontend.guidance.after_fork()

    def _check_fork(self, frontend: Frontend) -> None:
        """Whether this forked child can go on with the engine of its parent."""
        reason = ""
        if frontend.engine.runner.lm.device.type != "cpu":
            reason = "CUDA does not survive a fork"
        elif torch.get_num_threads() > 1:
            reason = f"the {torch.get_num_threads()} threads of torch do not survive a fork"
        elif self._turns.lost_at_fork:
            reason = "another thread was using it at the fork"
        if reason:
            raise EngineStopped(
                "this LLM does not run in a forked process",
                reason,
                "Build it in the process that uses it",
            )

    @contextlib.contextmanager
    def _serving(self) -> Iterator[Frontend]:
        """The desk, while no other thread uses it.

        Raises:
            EngineStopped: the LLM has been shut down, or cannot run in this process.
            UsageError: it is lent; or this very thread is using it, as in a drafter.
        """
        self._available()
        if self._turns.owner == threading.get_ident():
            raise UsageError(
                "this LLM is in use", "it is called from within its own step", "Build another one"
            )
        try:
            with self._turns:
                frontend = self._available()
                frontend.sweep()
                yield frontend
        finally:
            self._sweep()

    def _sweep(self) -> None:
        """End what was abandoned, unless a thread is inside: then it does so when it leaves."""
        frontend = self._frontend
        while frontend and self._borrower is None and frontend.has_abandoned:
            if not self._turns.enter_at_once():
                return
            try:
                frontend.sweep()
            finally:
                self._turns.leave()

    def _leave(self, generation: Generation) -> None:
        """Nobody waits for a generation any more. The garbage collector may call this."""
        frontend = self._frontend
        if frontend is not None and generation.unfinished:
            frontend.abandon(generation)
            self._sweep()

    def _forget(self, sequence: engine_sequence.Sequence) -> None:
        """Nobody holds a live sequence any more. The garbage collector may call this."""
        if self._frontend is not None:
            self._frontend.abandon(sequence)
            self._sweep()

    def _read(self, prompt: Any, params: Any) -> Request:
        frontend = self._available()
        read, settled = frontend.read(prompt, params)
        return read, settled, frontend.guidance.constraints(settled)

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
                "params do not match the prompts",
                f"given: params {len(params)}, prompts {count}",
                "Give one for each, or a single one for all",
            )
        return params

    def _finish(self, requests: list[Request], bar: Bar = list) -> list[RequestOutput]:
        generations = list[Generation]()
        try:
            with self._serving() as frontend:
                for request in requests:
                    generations.append(frontend.submit(*request))
            return [self._last(generation, Generation.output) for generation in bar(generations)]
        finally:
            for generation in generations:
                self._leave(generation)

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        with self._serving() as frontend:
            generation = frontend.submit(*request)
        return (yield from self._follow(generation, Generation.output))

    def _last(self, generation: Generation, read: Callable[[Generation], Output]) -> Output:
        """Step until a generation is finished; what it has said then."""
        while not generation.finished:
            with self._serving() as frontend:
                if not generation.finished:  # else another thread's step has ended it
                    frontend.step()
        if generation.failure is not None:
            raise generation.failure
        return read(generation)

    def _follow(
        self, generation: Generation, read: Callable[[Generation], Output]
    ) -> Iterator[Output]:
        """Step until a generation is finished; what it has said after each step that told more."""
        try:
            told = 0
            while not generation.finished:
                with self._serving() as frontend:
                    while generation.num_events == told and not generation.finished:
                        frontend.step()
                    told = generation.num_events
                    output = None if generation.finished else read(generation)
                if output is not None:
                    yield output
            yield self._last(generation, read)
        finally:
            self._leave(generation)


def _bar(use_tqdm: bool) -> Bar:
    """tqdm's bar, or none.

    Raises:
        DependencyError: tqdm is not installed.
    """
    if not use_tqdm:
        return list
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise DependencyError.missing("tqdm", "use_tqdm", "eval") from error
    return partial(tqdm, desc="prompts", unit="prompt", dynamic_ncols=True)
