"""Engines over tiny models, and ways to drive them."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from forethought.backends.cuda.graph_runner import GraphRunner
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import continuous
from forethought.engine.engine import Engine, Event
from forethought.engine.resolve import build_drafter_entry
from forethought.engine.scheduler import Limits
from forethought.engine.sequence import Sequence
from forethought.model import checkpoint_tensors, loader, transformers_module
from forethought.model.causal_lm import CausalLM
from forethought.model.graph_capturer import GraphCapturer
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import Target
from forethought.speculative.step_runner import Advance, Interrupt
from models import tiny, transformers_model

if TYPE_CHECKING:
    from forethought import AsyncLLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def load(architecture: str, device: str = "cpu", dtype: str = "float32") -> CausalLM:
    """The tiny model; it has no state, so engines may share it."""
    return _loaded(architecture, device, dtype)


@functools.cache
def _loaded(architecture: str, device: str, dtype: str) -> CausalLM:
    return loader.load(tiny(architecture), dtype=dtype, device=device, forward="auto")


def load_poisoned(
    token: int, directory: Path, forward: loader.Forward = "auto", architecture: str = "llama"
) -> CausalLM:
    """The tiny model, whose embedding of a token is NaN: a checkpoint that is refused, loaded."""
    path = tiny(architecture)
    module = type(transformers_model(path)).from_pretrained(path)
    module.get_input_embeddings().weight.data[token] = math.nan
    module.save_pretrained(directory)
    with (
        mock.patch.object(checkpoint_tensors, "check_values"),
        mock.patch.object(transformers_module, "check_values"),
    ):
        return loader.load(directory, dtype="float32", device="cpu", forward=forward)


def change_advance(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Advance]) -> None:
    """Have ``change(advance, rows, num_steps)`` make the steps of a call."""
    original = continuous.step_runner

    def changed(*args: Any) -> Any:
        steps = original(*args)
        if steps is None:
            return None

        def advance(rows: Any, num_steps: int, interrupt: Interrupt) -> Advance:
            made = functools.partial(steps.advance, interrupt=interrupt)
            return change(made, rows, num_steps)

        return SimpleNamespace(advance=advance)

    monkeypatch.setattr(continuous, "step_runner", changed)


def engine(
    architecture: str = "llama",
    *,
    pages: int = 64,
    page_size: int = 4,
    reuse: bool = True,
    device: str = "cpu",
    dtype: str = "float32",
    speculative: Iterable[DecodingBaseConfig] = (),
    **limits: Any,
) -> Engine:
    """An engine, with drafters if any are configured."""
    lm = load(architecture, device, dtype)
    return engine_over(
        lm, pages=pages, page_size=page_size, reuse=reuse, speculative=speculative, **limits
    )


def engine_over(
    lm: CausalLM,
    *,
    pages: int = 64,
    page_size: int = 4,
    reuse: bool = True,
    speculative: Iterable[DecodingBaseConfig] = (),
    graphs: GraphCapturer | None = None,
    kv_dtype: torch.dtype | None = None,
    **limits: Any,
) -> Engine:
    """The same over a model that is loaded, computed by graphs if something captures them."""
    storage = lm.storage(
        pages,
        page_size,
        has_scratch_page=graphs is not None,
        stored_dtype=kv_dtype,
    )
    runner = ModelRunner(lm, storage) if graphs is None else GraphRunner(lm, storage, graphs)
    return engine_of(runner, reuse=reuse, speculative=speculative, **limits)


def engine_of(
    runner: ModelRunner,
    *,
    reuse: bool = True,
    speculative: Iterable[DecodingBaseConfig] = (),
    **limits: Any,
) -> Engine:
    """The same over a runner and its storage."""
    settings = {"max_batch_size": 8, "max_num_tokens": 64, "max_length": 128, **limits}
    target = Target(runner, settings["max_num_tokens"])
    drafters = [
        build_drafter_entry(config, target, settings["max_batch_size"]) for config in speculative
    ]
    return Engine(runner, Limits(**settings), reuse=reuse, seed=0, drafters=drafters)


@contextmanager
def held_back(llm: AsyncLLM, after: int) -> Iterator[threading.Event]:
    """Behind its next ``after`` forwards, the engine makes another one only when a client has asked
    it for something, so that it is never ahead of its clients; until the event is set, or the
    block is left. It waits five seconds at most: a request may have come just before."""
    engine, numbers, let_go = llm._frontend.engine, itertools.count(), threading.Event()
    runner, num_steps = engine.runner, engine.num_decode_steps
    forward, commands = runner.forward, llm._thread._commands

    def waiting(rows: Any) -> Any:
        if next(numbers) >= after:
            ends = time.monotonic() + 5.0
            while commands.empty() and time.monotonic() < ends and not let_go.wait(0.001):
                pass
        return forward(rows)

    runner.forward = waiting  # type: ignore[method-assign]
    engine.num_decode_steps = 1  # a native call of several makes its forwards itself
    try:
        yield let_go
    finally:
        del runner.forward  # type: ignore[method-assign]
        engine.num_decode_steps = num_steps
        let_go.set()


@contextmanager
def after_each_call(owner: Any, name: str, then: Callable[[Any], object]) -> Iterator[None]:
    """``then`` is called with the result of each call of a method, in the thread of the call and
    before it ends: where another thread looks for a state that passes, it may come too late."""
    method = getattr(owner, name)

    def watched(*args: Any) -> Any:
        result = method(*args)
        then(result)
        return result

    setattr(owner, name, watched)
    try:
        yield
    finally:
        delattr(owner, name)


def drain(machine: Engine, most: int = 2000) -> list[Event]:
    """Step until nothing is left to do, checking the pool after each step."""
    events: list[Event] = []
    for _ in range(most):
        if not machine.has_work:
            return events
        events += machine.step()
        machine.check_integrity()
    raise AssertionError("the engine did not come to an end")


def outputs(sequences: Iterable[Sequence]) -> list[list[int]]:
    """What each sequence has generated."""
    return [sequence.output for sequence in sequences]


def expect_empty(machine: Engine) -> None:
    """Nothing holds a page any more."""
    machine.check_integrity()
    assert not list(machine.scheduler)
    assert machine.pool.in_use == 0
