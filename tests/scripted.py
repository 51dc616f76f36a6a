"""Helpers for tests of controllers: run one against a worker, and script a chain of thought."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from forethought.methods import worker_tags
from forethought.methods.parts.probe import PROBE_SUFFIX
from forethought.scaffolding import (
    Controller,
    GenerationTask,
    ScaffoldingLlm,
    ScriptedWorker,
    Worker,
)
from forethought.scaffolding.execution_scope import current_scope

TAG = "generation"


def answer(controller: Controller, worker: Worker, prompt: Any = "p", **options: Any) -> Any:
    """The result of one prompt, with all tasks going to one worker."""
    workers = dict.fromkeys([TAG, *worker_tags(controller)], worker)
    with ScaffoldingLlm(controller, workers) as llm:
        return llm.generate(prompt, **options)


def has_begun(worker: ScriptedWorker, count: int = 1) -> bool:
    """Wait until the worker has been asked ``count`` times; a loaded machine takes its time."""
    waiting, latest = threading.Event(), time.monotonic() + 60
    while len(worker.calls) < count and time.monotonic() < latest:
        waiting.wait(0.005)
    return len(worker.calls) >= count


class TimeEnds(ScriptedWorker):
    """The seconds of the budget are over once nothing is under way but replies that take long.

    So what is answered quickly comes in time on any machine. The budget must name seconds.
    """

    def __init__(self, script: Any, **options: Any) -> None:
        super().__init__(script, **options)
        self._num_slow = 0

    async def _generate(self, task: Any, generation: Any, step: int | None) -> None:
        if generation.reply.delay < 1.0:
            return await super()._generate(task, generation, step)
        self._num_slow += 1
        ends = asyncio.ensure_future(self._end_time(current_scope().account))
        try:
            return await super()._generate(task, generation, step)
        finally:
            ends.cancel()

    async def _end_time(self, account: Any) -> None:
        turns = 0
        while turns < 50:  # what has ended is seen by its controller meanwhile
            num_left = sum(call.ended is None for call in self.calls)
            turns = turns + 1 if num_left <= self._num_slow else 0
            await asyncio.sleep(0)
        account.expire()


class Together(Worker):
    """Answers nobody before ``count`` tasks have come, so only what runs at the same time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier: asyncio.Barrier | None = None

    async def _meet(self, task: GenerationTask) -> None:
        self._barrier = self._barrier or asyncio.Barrier(self.count)
        await self._barrier.wait()
        task.output_str = task.input_str

    task_handlers = {GenerationTask: _meet}  # noqa: RUF012


def chain(prompt: str, text: str, probe: Callable[[int], str]) -> Callable[[str, int], str]:
    """A script for one chain of thought, continued from any point, and for probes into it.

    Args:
        prompt: of the chain.
        text: the whole chain.
        probe: what the model goes on with behind the probe's suffix, by the characters of the
            chain that the probe knows.
    """

    def script(asked: str, index: int) -> str:
        known, probed, said = asked.removeprefix(prompt).partition(PROBE_SUFFIX)
        assert asked.startswith(prompt), asked
        assert text.startswith(known), known
        if not probed:
            return text[len(known) :]
        whole = probe(len(known))
        assert whole.startswith(said), said
        return whole[len(said) :]

    return script
