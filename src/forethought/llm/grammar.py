"""Structured output: a JSON schema, expression, grammar or choice compiled to a ``Constraint``.

``GrammarCompiler`` compiles with llguidance, which is imported with the first request that needs
it. A schema that cannot be honoured is refused before anything runs. Compiling may take seconds, so
it runs in threads of its own and releases the GIL: no event loop and no engine waits for it. A
request waits for at most ``compile_timeout`` seconds. The thread cannot be stopped then; it no
longer counts for ``MAX_COMPILERS``, and there are never more than ``MAX_COMPILER_THREADS``.

``GrammarConstraint`` follows the compiled grammar along the tokens of one sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from forethought.config.engine import GuidedDecodingConfig
from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import SamplingParams
from forethought.errors import (
    DependencyError,
    ForethoughtError,
    ParameterError,
    RequestError,
    RequestTimeout,
)
from forethought.llm.exact_bounds import with_exact_bounds
from forethought.llm.fair_queue import FairQueue
from forethought.llm.grammar_constraint import Bits, GrammarConstraint, one_line, read_error
from forethought.llm.grammar_cost import (
    MAX_ROW_ITEMS,
    check_enums,
    check_intersections,
    may_take_for_ever,
)
from forethought.llm.tokenizer import Tokenizer
from forethought.model.sampling import Constraints

COMPILED, COMPILED_BYTES = 64, 4 * 2**20
"""Compiled grammars that are cached, and bytes of their texts; some take 25 times the memory."""
MAX_COMPILERS = 2
"""Grammars compiled at once for requests that wait for them; further ones wait in fair turns."""
MAX_COMPILER_THREADS = 8
"""Threads that compile, those included that have exceeded the time limit."""
STACK_BYTES = 512 * 2**20
"""Address space of a compiling thread's stack. llguidance recurses along chains of references; a
grammar of a megabyte overflowed a usual stack of 8 MiB, which ends the process."""
TRIAL_SECONDS, TRIAL_BYTES = 2, 2**30
"""Processor time and memory of the process in which a grammar is tried that may take for ever."""
EXIT_SECONDS = 10.0
"""How long the end of the program waits for grammars that are being compiled."""
MAX_STEP_ITEMS, SMALL_VOCABULARY = (10_000, 50_000), 10_000
"""Alternatives that one mask may look at in all, which bounds its work and that of compiling: with
a vocabulary of up to ``SMALL_VOCABULARY`` tokens, and with a larger one, whose masks look at as
many for ordinary JSON (llguidance's own bound)."""

_stack_size_lock = threading.RLock()
"""Held while ``threading.stack_size``, which is that of the whole process, is ``STACK_BYTES``."""
os.register_at_fork(  # so that a child finds the usual size and a free lock
    before=_stack_size_lock.acquire,
    after_in_parent=_stack_size_lock.release,
    after_in_child=_stack_size_lock.release,
)

_Key: TypeAlias = tuple[GuidedDecodingParams, bool]


@dataclass(eq=False, slots=True)
class _Compilation:
    """A grammar that is compiled, or will be, for all requests with the same parameters."""

    key: _Key
    future: Future[GrammarConstraint] = field(default_factory=Future)
    salt: str = ""
    """The ``cache_salt`` of the request that asked for it first: a tenant of a server."""
    size: int = 0
    """Bytes of the grammar."""
    num_waiting: int = 0
    """Requests that wait for it."""
    began: float = math.inf
    """By ``time.monotonic``."""


class GrammarCompiler:
    """Compiles grammars for one model; safe to use from several threads. ``vocab_size`` is the
    width of the model's logits and may differ from the tokenizer's size.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: frozenset[int],
        config: GuidedDecodingConfig | None = None,
    ) -> None:
        self._hf, self._vocab_size = tokenizer.hf, vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        self._config = config or GuidedDecodingConfig()
        self._max_step_items = MAX_STEP_ITEMS[vocab_size > SMALL_VOCABULARY]
        self._lock = threading.RLock()  # the garbage collector may end a wait while it is held
        self._vocabulary_lock = threading.Lock()
        self._compilations: OrderedDict[_Key, _Compilation] = OrderedDict()
        """The least recently used first."""
        self._queue = FairQueue[_Compilation](lambda item: item.salt, lambda item: item.size)
        self._compilers: set[threading.Thread] = set()
        self._compiling_now: set[_Compilation] = set()
        weakref.finalize(self, _await_compilers, self._compilers)

    def check(self, params: SamplingParams) -> None:
        """Raises ParameterError for a grammar of more than ``max_grammar_bytes``."""
        shape, max_bytes = params.guided_decoding, self._config.max_grammar_bytes
        if shape is None or (size := _size(shape)) <= max_bytes:
            return
        raise ParameterError(
            f"the {shape.kind} in guided_decoding is too large",
            f"it has {size:,} bytes, and guided_decoding_config.max_grammar_bytes is {max_bytes:,}",
            f"Shorten the {shape.kind}",
            param="guided_decoding",
        )

    def constraints(self, params: SamplingParams) -> Constraints | None:
        """What makes the constraints of the samples, once compiled; None without a grammar.

        Raises:
            ParameterError: the grammar is too large, malformed, unsupported, or cannot be written
                with the model's tokens; or the tokenizer is not supported.
            DependencyError: llguidance is not installed.
            RequestTimeout: it was not compiled within ``compile_timeout`` seconds.
        """
        if params.guided_decoding is None:
            return None
        with self._compiling(params) as future:
            try:
                return future.result(self._config.compile_timeout).samples
            except TimeoutError as error:
                raise self._late(params.guided_decoding) from error

    async def compiled(self, params: SamplingParams) -> Constraints | None:
        """As ``constraints``, for a coroutine, which may be cancelled. Raises the same."""
        if params.guided_decoding is None:
            return None
        with self._compiling(params) as future:
            try:
                async with asyncio.timeout(self._config.compile_timeout):
                    await _done(future)
            except TimeoutError as error:
                raise self._late(params.guided_decoding) from error
            return future.result().samples

    def find(self, params: SamplingParams) -> Constraints | None:
        """As ``constraints`` if the grammar is compiled already, else None. Never waits."""
        if params.guided_decoding is None:
            return None
        with self._lock:
            compilation = self._compilations.get(_key(params))
        if compilation is None or not compilation.future.done():
            return None
        return compilation.future.result().samples

    def after_fork(self) -> None:
        """In a forked child: the compiling threads and what they compiled are not there."""
        self._lock, self._vocabulary_lock = threading.RLock(), threading.Lock()
        self._queue.clear()
        self._compilers.clear()
        self._compiling_now.clear()
        for compilation in list(self._compilations.values()):
            compilation.num_waiting = 0
            if not compilation.future.done():
                self._drop(compilation)

    # ---- compiling ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _compiling(self, params: SamplingParams) -> Iterator[Future[GrammarConstraint]]:
        """The compilation of a grammar; cancelled if no request waits for it before it begins."""
        self.check(params)
        with self._lock:
            compilation = self._find(_key(params), params.cache_salt)
            compilation.num_waiting += 1
        try:
            yield compilation.future
        finally:
            with self._lock:
                compilation.num_waiting -= 1
                if not compilation.num_waiting and compilation.future.cancel():
                    self._queue.remove(compilation)
                    self._drop(compilation)
                self._evict()
                if self._queue:
                    with contextlib.suppress(RequestError):  # those that wait are told in time
                        self._start_compiler()

    def _find(self, key: _Key, salt: str) -> _Compilation:
        compilation = self._compilations.get(key)
        if compilation is None:
            self._start_compiler()
            compilation = self._compilations[key] = _Compilation(key, salt=salt, size=_size(key[0]))
            self._queue.push(compilation)
        self._compilations.move_to_end(key)
        return compilation

    def _start_compiler(self) -> None:
        """Start a thread if fewer than ``MAX_COMPILERS`` are in use. One that is over its time, or
        compiles what no request waits for any more, does not count.
        """
        limit = time.monotonic() - self._config.compile_timeout
        late = sum(c.began <= limit or not c.num_waiting for c in self._compiling_now)
        if len(self._compilers) >= min(MAX_COMPILERS + late, MAX_COMPILER_THREADS):
            return
        thread = threading.Thread(target=self._serve, name="forethought-grammar", daemon=True)
        self._compilers.add(thread)
        try:
            _start_with_large_stack(thread)
        except RuntimeError as error:
            self._compilers.discard(thread)
            if not self._compilers:  # else one that runs compiles it
                raise RequestError(
                    "the grammar cannot be compiled", f"no thread for it: {error}", "Free memory"
                ) from error

    def _serve(self) -> None:
        """Compile what is queued, then end."""
        while (compilation := self._take()) is not None:
            try:
                constraint = self._compile(*compilation.key)
            except BaseException as error:
                with self._lock:
                    self._leave(compilation)
                    self._drop(compilation)
                compilation.future.set_exception(_wrapped(error))
            else:
                compilation.future.set_result(constraint)
                with self._lock:
                    self._leave(compilation)
                    self._evict()
            del compilation

    def _take(self) -> _Compilation | None:
        """The next in the queue; None ends the thread that asks."""
        with self._lock:
            if self._queue:
                compilation = self._queue.take()
                compilation.future.set_running_or_notify_cancel()
                compilation.began = time.monotonic()
                self._compiling_now.add(compilation)
                return compilation
            self._compilers.discard(threading.current_thread())
            return None

    def _leave(self, compilation: _Compilation) -> None:
        """Mark as not compiled any more; with the lock held."""
        if compilation in self._compiling_now:  # else this is a forked child
            self._compiling_now.discard(compilation)
            self._queue.ended(compilation)

    def _drop(self, compilation: _Compilation) -> None:
        if self._compilations.get(compilation.key) is compilation:
            del self._compilations[compilation.key]

    def _evict(self) -> None:
        """Keep the latest grammars within ``COMPILED`` and ``COMPILED_BYTES``, and those in use."""
        done = [
            c for c in list(self._compilations.values()) if c.future.done() and not c.num_waiting
        ]
        num_kept = num_bytes = 0
        for compilation in reversed(done):
            num_kept, num_bytes = num_kept + 1, num_bytes + compilation.size
            if num_kept > 1 and (num_kept > COMPILED or num_bytes > COMPILED_BYTES):
                self._drop(compilation)

    def _late(self, shape: GuidedDecodingParams) -> RequestTimeout:
        return RequestTimeout(
            f"the {shape.kind} in guided_decoding was not compiled in time",
            f"guided_decoding_config.compile_timeout is {self._config.compile_timeout:g} seconds"
            f", and {len(self._compiling_now)} grammars are being compiled",
            f"Use a simpler {shape.kind}, or allow more time",
        )

    def _compile(self, shape: GuidedDecodingParams, ignore_eos: bool) -> GrammarConstraint:
        tokens = self._tokens  # first: raises if llguidance is missing
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(shape)
        except ValueError as error:
            raise _refuse(shape, str(error)) from error
        limits: dict[str, Any] = {
            "verbose_errors": False,
            "max_items_in_row": MAX_ROW_ITEMS,
            "step_max_items": self._max_step_items,
        }
        if may_take_for_ever(shape, grammar):
            self._try(shape, grammar, limits)
        start = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**limits))
        if start.is_error():
            raise _refuse(shape, _reason(read_error(start)))
        ends = frozenset() if ignore_eos else self._eos_ids
        shared_ids = range(min(tokens.vocab_size, self._vocab_size))
        never = {*tokens.eos_tokens, *self._eos_ids} - ends
        writable = self._pack(token for token in shared_ids if token not in never)
        constraint = GrammarConstraint(start, writable, self._pack(ends))
        if not constraint.mask([]).any():
            failure = _reason(constraint.failure)
            raise _refuse(
                shape, failure or "no output can be written in it with the model's tokens"
            )
        if constraint.is_complete([]):
            raise _refuse(shape, "only the empty output keeps to it")
        _check_first_token(shape, constraint)
        return constraint

    def _try(self, shape: GuidedDecodingParams, grammar: str, limits: Mapping[str, Any]) -> None:
        """Compile it in a process with limits; raises ParameterError where it comes to one."""
        import llguidance

        hf, ends = self._end_tokens
        request = {
            "tokenizer": hf.backend_tokenizer.to_str(),
            "ends": ends or [hf.eos_token_id],
            "grammar": grammar,
            "limits": limits,
            "stack_bytes": STACK_BYTES,
            "memory_bytes": TRIAL_BYTES,
            "processor_seconds": TRIAL_SECONDS,
        }
        command = [sys.executable, "-I", str(Path(__file__).with_name("grammar_trial.py"))]
        command.append(str(Path(str(llguidance.__file__)).parents[1]))
        trial = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True)
        if trial.returncode < 0:
            raise _refuse(
                shape,
                f"it takes more than {TRIAL_SECONDS} seconds of processor time, or "
                f"{TRIAL_BYTES // 2**20:,} MiB of memory, to be compiled",
            )
        if trial.returncode:
            last_line = trial.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise RequestError("the grammar cannot be compiled", f"its trial failed: {last_line}")
        if error := one_line(trial.stdout.decode(errors="replace")):
            raise _refuse(shape, _reason(error))

    @property
    def _tokens(self) -> Any:
        with self._vocabulary_lock:
            return self._vocabulary

    @functools.cached_property
    def _vocabulary(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise DependencyError.missing("llguidance", "guided_decoding", "guided") from error
        if not self._hf.is_fast:
            raise ParameterError(
                "guided_decoding needs a fast tokenizer",
                f"this model's is a {type(self._hf).__name__}",
                "Convert it, so that its directory has a tokenizer.json",
            )
        hf, ends = self._end_tokens
        return from_tokenizer(hf, eos_token=ends or None)

    @functools.cached_property
    def _end_tokens(self) -> tuple[Any, list[int]]:
        """The tokenizer for llguidance, and the tokens of ours that end an output."""
        hf, size = self._hf, max(self._hf.get_vocab().values()) + 1
        ends = sorted(token for token in self._eos_ids if token < size)
        if not ends and hf.eos_token_id is None:  # llguidance does not work without one
            hf = copy.deepcopy(hf)
            hf.add_special_tokens({"eos_token": "<|end of output|>"})
        return hf, ends

    def _pack(self, ids: Iterable[int]) -> Bits:
        bits = np.zeros(self._vocab_size, np.bool_)
        bits[list(ids)] = True
        return np.packbits(bits, bitorder="little")


def _grammar(shape: GuidedDecodingParams) -> str:
    """The grammar in llguidance's notation; raises ValueError if it is malformed."""
    from llguidance import LLMatcher, grammar_from

    if shape.json is not None:
        schema = with_exact_bounds(json.loads(str(shape.json)))
        check_enums(schema)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    if shape.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}')
    if shape.regex is not None:
        return LLMatcher.grammar_from_regex(shape.regex)
    if shape.grammar is not None:
        grammar = grammar_from("grammar", shape.grammar)
        check_intersections(grammar)
        return grammar
    return LLMatcher.grammar_from_regex("|".join(map(_escape, shape.choice or ())))


def _escape(text: str) -> str:
    return "".join(f"\\{char}" if char in _SPECIAL else char for char in text)


_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


def _check_first_token(shape: GuidedDecodingParams, constraint: GrammarConstraint) -> None:
    """Consume one token and check again: some limits of llguidance show only then."""
    first = int(np.unpackbits(constraint.mask([]), bitorder="little").argmax())
    probe = constraint.fresh()
    try:
        if not probe.is_complete([first]) and not probe.mask([first]).any() and probe.failure:
            raise _refuse(shape, _reason(probe.failure))
    except ParameterError as error:
        raise _refuse(shape, _reason(error.why)) from error


def _reason(error: str) -> str:
    """llguidance's message, without those about its internals."""
    if error.startswith("panic:") or "schema too large" in error:
        return "llguidance cannot compile it: it has too many parts"
    if "recursion limit" in error:
        return f"it is nested too deeply: {error}"
    if "too big" in error or "too many expressions" in error:
        return f"it is too large to be compiled: {error}"
    if "lexer precomputation failed" in error or "fuel exhausted" in error:
        return "it is too large to be compiled: its expressions have too many states"
    if "NoExtensionBias" in error:
        return "nothing keeps to it: it allows no text, or its references lead to themselves alone"
    return error


def _size(shape: GuidedDecodingParams) -> int:
    texts = (shape.json, shape.regex, shape.grammar, *(shape.choice or ()))
    return sum(len(text.encode(errors="surrogatepass")) for text in texts if isinstance(text, str))


def _key(params: SamplingParams) -> _Key:
    assert params.guided_decoding is not None
    return params.guided_decoding, params.ignore_eos


def _wrapped(error: BaseException) -> ForethoughtError:
    if isinstance(error, ForethoughtError):
        return error
    failure = RequestError("the grammar cannot be compiled", f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


async def _done(future: Future[Any]) -> None:
    """Wait until a future is done, whatever the result. Cancelling the wait leaves it alone."""
    if future.done():
        return
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def finish() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish)

    future.add_done_callback(wake)
    await waiter


def _start_with_large_stack(thread: threading.Thread) -> None:
    with _stack_size_lock:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)


def _await_compilers(compilers: set[threading.Thread]) -> None:
    """At exit: a thread that returns from llguidance into a finalizing interpreter crashes it."""
    end = time.monotonic() + EXIT_SECONDS
    for thread in list(compilers):
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def _refuse(shape: GuidedDecodingParams, reason: str) -> ParameterError:
    what, fix = f"invalid {shape.kind} in guided_decoding", f"Change the {shape.kind}"
    return ParameterError(what, reason, fix, param="guided_decoding")
