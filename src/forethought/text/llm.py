"""``LLM``: prompts in, texts out, for a program that waits for them.

Owns an engine through a ``Desk`` and steps it while somebody waits. Knows nothing about threads;
many clients at once are ``AsyncLLM``'s business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack, overload

from forethought.config import LlmOptions
from forethought.engine.stats import EngineStats
from forethought.errors import DependencyError, EngineStopped, ParameterError, UsageError
from forethought.outputs import RequestOutput
from forethought.params import SamplingParams
from forethought.text.desk import Desk
from forethought.text.generation import Generation
from forethought.text.prompt import Prompt, is_batch
from forethought.text.session import Session

Params = SamplingParams | Sequence[SamplingParams] | None
Bar = Callable[[list[Generation]], Iterable[Generation]]
"""Iterates over generations, and may show how far it is."""


class LLM:
    """A model, ready to generate.

    ::

        llm = LLM()  # the embedded reasoner; or LLM("/path/to/model", dtype="bfloat16")
        print(llm.generate("Hello", SamplingParams(max_tokens=20)).outputs[0].text)

    Args:
        model: local Hugging Face directory; None: the embedded reasoner.
        fields: any field of ``LlmArgs``: ``dtype``, ``max_num_tokens``, ``kv_cache_config``, ...

    Raises:
        ParameterError: an unknown field or a bad value.
        ModelError: the directory is missing, broken, or holds a model that is not supported.
        CapacityError: the KV cache would not hold a single sequence.
    """

    def __init__(self, model: str | Path | None = None, **fields: Unpack[LlmOptions]) -> None:
        self._desk: Desk | None = Desk.build(model, fields)
        self.model_dir, self.tokenizer = self._desk.model_dir, self._desk.tokenizer.hf
        self._borrower: str | None = None
        self._stepping = threading.Lock()

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
            RequestError: a request failed in the engine; the others of this call are aborted.

        If one prompt of many is refused, none has run and the error gives its index.
        """
        bar = _bar(use_tqdm)
        if not is_batch(prompts):
            return self._finish([self._serving().read(prompts, params)], bar)[0]
        each = self._params_of_each(params, len(prompts))
        pairs = zip(prompts, each, strict=True)
        return self._finish([self._read(index, *pair) for index, pair in enumerate(pairs)], bar)

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
        desk = self._serving()
        text, token_ids = desk.render(messages, template_args)
        _, settled = desk.read(token_ids, params)
        return self._finish([(Prompt(text, token_ids), settled)])[0]

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, to ``generate``, ``stream`` or ``start`` from."""
        return self._serving().render(messages, template_args)[1]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt; everything so far after each step. Raises as ``generate``.

        The request begins with the first item. Leaving the iterator early aborts it.
        """
        return self._stream(*self._serving().read(prompt, params))

    def start(self, prompt: str | Sequence[int]) -> Session:
        """A live sequence that holds the prompt and generates when told to.

        Raises as ``generate``.
        """
        desk = self._serving()
        read, _ = desk.read(prompt, None)
        return Session(self._serving, self._run, desk.open(read.token_ids))

    @property
    def stats(self) -> EngineStats:
        """A copy of the engine's counts."""
        return self._standing().stats

    @property
    def max_length(self) -> int:
        """Tokens that one sequence may have, prompt and output."""
        return self._standing().engine.limits.max_length

    def lend(self, borrower: str) -> Desk:
        """A desk of its own for ``borrower``; direct calls are refused until ``take_back``.

        Raises:
            UsageError: it is lent already, or a stream is under way.
        """
        desk = self._serving()
        if desk.is_busy:
            raise UsageError(
                f"{borrower} cannot take over this LLM",
                "a generation is under way",
                "Finish or close its streams first",
            )
        self._borrower = borrower
        return Desk(desk.engine, desk.tokenizer, desk.model_dir)

    def take_back(self) -> None:
        """The borrower is done."""
        self._borrower = None

    def shutdown(self) -> None:
        """Give back everything. Later calls raise ``EngineStopped``."""
        if self._desk is not None:
            desk = self._serving()
            desk.clear()
            desk.engine.shutdown()
            self._desk = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _standing(self) -> Desk:
        if self._desk is None:
            raise EngineStopped("this LLM has been shut down", fix="Build a new one")
        return self._desk

    def _serving(self) -> Desk:
        desk = self._standing()
        if self._borrower is not None:
            raise UsageError(
                "this LLM does not take direct calls now",
                f"its engine is run by {self._borrower}",
                "Call that one, or shut it down first",
            )
        return desk

    def _read(
        self, index: int, prompt: Any, params: SamplingParams | None
    ) -> tuple[Prompt, SamplingParams]:
        try:
            return self._serving().read(prompt, params)
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

    def _finish(
        self, requests: list[tuple[Prompt, SamplingParams]], bar: Bar = list
    ) -> list[RequestOutput]:
        desk, generations = self._serving(), list[Generation]()
        try:
            for request in requests:
                generations.append(desk.submit(*request))
            for generation in bar(generations):
                for _ in self._run(generation):
                    pass
            return [generation.output() for generation in generations]
        finally:
            for generation in generations:
                desk.abort(generation)

    def _stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        desk = self._serving()
        generation = desk.submit(prompt, params)
        try:
            for _ in self._run(generation):
                yield generation.output()
        finally:
            desk.abort(generation)

    def _run(self, generation: Generation) -> Iterator[None]:
        """Step until the generation is finished; yields after each step that gave it something."""
        while not generation.finished:
            if generation in self._step() and not generation.finished:
                yield
        if generation.failure is not None:
            raise generation.failure
        yield  # the last piece, whoever's step has brought it

    def _step(self) -> list[Generation]:
        if not self._stepping.acquire(blocking=False):
            raise UsageError(
                "this LLM is in use", "another thread is generating with it", "Use AsyncLLM"
            )
        try:
            desk = self._serving()
            assert desk.has_work, "an unfinished generation has work to do"
            return desk.step()
        finally:
            self._stepping.release()


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
