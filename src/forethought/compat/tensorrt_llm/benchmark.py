"""``async_scaffolding_benchmark``: many requests to a method, at the times of a strategy.

The names are those of ``tensorrt_llm.scaffolding``.

================================  ================================================================
``SynchronousStrategy()``         one after the other
``ConcurrentStrategy(n)``         ``n`` at once
``ThroughputStrategy()``          all at once
``ConstantRateStrategy(rate)``    ``rate`` per second
``PoissonRateStrategy(rate)``     ``rate`` per second on average, at random times
================================  ================================================================
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from forethought.compat.tensorrt_llm.task_collection import TaskCollection, observed
from forethought.errors import ParameterError
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.result import ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.settings import OPTIONAL_POSITIVE_INT, SECONDS, validated


@dataclass(slots=True)
class ScaffoldingBenchRequest:
    """One request; ``scope_params`` go to workers that have ``set_scope_params``."""

    prompt: Any
    scope_params: Mapping[str, Any] | None = None


class Strategy:
    """When requests begin, and how many run at once."""

    max_concurrency: int | None = None
    """None: no limit."""

    def start_times(self, count: int) -> list[float]:
        """Seconds from the start at which each request may begin, if there is room."""
        return [0.0] * count


class SynchronousStrategy(Strategy):
    """One after the other."""

    max_concurrency = 1


class ThroughputStrategy(Strategy):
    """All at once, up to ``max_concurrency``."""

    def __init__(self, max_concurrency: int | None = None) -> None:
        self.max_concurrency = validated("max_concurrency", max_concurrency, OPTIONAL_POSITIVE_INT)


class ConcurrentStrategy(ThroughputStrategy):
    """``concurrency`` at once."""

    def __init__(self, concurrency: int) -> None:
        super().__init__(concurrency)


class ConstantRateStrategy(ThroughputStrategy):
    """``rate`` requests per second.

    Args:
        rate: requests per second.
        initial_burst: the requests of the first second begin at once.
        max_concurrency: most requests at once; None: no limit.
    """

    def __init__(
        self, rate: float, initial_burst: bool = False, max_concurrency: int | None = None
    ) -> None:
        super().__init__(max_concurrency)
        self.rate, self.initial_burst = validated("rate", rate, SECONDS), initial_burst

    @override
    def start_times(self, count: int) -> list[float]:
        burst = min(count, max(1, int(self.rate))) if self.initial_burst else 1
        gaps = self._gaps(count - burst)
        times = [0.0] * min(count, burst)
        for gap in gaps:
            times.append(times[-1] + gap)
        return times

    def _gaps(self, count: int) -> list[float]:
        return [1 / self.rate] * count


class PoissonRateStrategy(ConstantRateStrategy):
    """``rate`` requests per second on average, with exponentially distributed gaps.

    Args:
        rate: requests per second.
        initial_burst: as many as come in a second on average begin at once.
        max_concurrency: most requests at once; None: no limit.
        random_seed: of the gaps.
    """

    def __init__(
        self,
        rate: float,
        initial_burst: bool = False,
        max_concurrency: int | None = None,
        random_seed: int = 42,
    ) -> None:
        super().__init__(rate, initial_burst, max_concurrency)
        self.random_seed = random_seed

    def _gaps(self, count: int) -> list[float]:
        source = random.Random(self.random_seed)
        return [source.expovariate(self.rate) for _ in range(count)]


async def async_scaffolding_benchmark(
    scaffolding_llm: ScaffoldingLlm,
    task_collection_types: Mapping[str, Callable[[], TaskCollection]] | None,
    requests: Sequence[ScaffoldingBenchRequest],
    concurrency: int | None = None,
    strategy: Strategy | None = None,
) -> tuple[list[ScaffoldingResult], list[float], list[float], float]:
    """Run all requests.

    Args:
        scaffolding_llm: on this event loop; other requests should not run on it meanwhile.
        task_collection_types: collections that watch each request, by their name in the
            ``task_collections`` of its result.
        requests: the prompts.
        concurrency: short for ``ConcurrentStrategy(concurrency)``.
        strategy: when they begin; all at once if neither is set.

    Returns:
        The results in the order of the requests; the seconds from the start at which each began,
        and for which each ran; and the seconds of all together.

    Raises:
        ParameterError: both ``concurrency`` and ``strategy``, or ``scope_params`` that no worker
            takes.
    """
    if concurrency is not None and strategy is not None:
        raise ParameterError(
            "concurrency and strategy exclude each other", "both are given", "Give one of them"
        )
    if concurrency is not None:
        strategy = ConcurrentStrategy(concurrency)
    run = _Run(scaffolding_llm, strategy or ThroughputStrategy(), requests)
    prototype = scaffolding_llm.prototype_controller
    scaffolding_llm.prototype_controller = _Watched(prototype, task_collection_types or {})
    try:
        return await run.all()
    finally:
        scaffolding_llm.prototype_controller = prototype


class _Run:
    """The requests of one benchmark."""

    def __init__(
        self, llm: ScaffoldingLlm, strategy: Strategy, requests: Sequence[ScaffoldingBenchRequest]
    ) -> None:
        self._llm, self._requests = llm, list(requests)
        self._times = strategy.start_times(len(self._requests))
        limit = strategy.max_concurrency
        self._room = None if limit is None else asyncio.Semaphore(limit)
        self._scoped = [
            worker for worker in llm.workers.values() if hasattr(worker, "set_scope_params")
        ]
        if any(request.scope_params for request in self._requests) and not self._scoped:
            raise ParameterError(
                "no worker takes scope_params", "none has set_scope_params", "Leave them out"
            )

    async def all(self) -> tuple[list[ScaffoldingResult], list[float], list[float], float]:
        self._began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(self._one(number)) for number in range(len(self._requests))]
        total = time.perf_counter() - self._began
        outcomes = [job.result() for job in jobs]
        return [o[0] for o in outcomes], [o[1] for o in outcomes], [o[2] for o in outcomes], total

    async def _one(self, number: int) -> tuple[ScaffoldingResult, float, float]:
        await asyncio.sleep(self._times[number])
        async with AsyncExitStack() as room:
            if self._room is not None:
                await room.enter_async_context(self._room)
            began, request = time.perf_counter(), self._requests[number]
            result = self._llm.generate_async(request.prompt)
            for worker in self._scoped if request.scope_params else ():
                worker.set_scope_params(result.id, **request.scope_params or {})
            await result.aresult()
            return result, began - self._began, time.perf_counter() - began


class _Watched(Controller):
    """Another controller, watched by collections."""

    def __init__(
        self, inner: Controller, collections: Mapping[str, Callable[[], TaskCollection]]
    ) -> None:
        super().__init__()
        self.inner = inner
        self.own = {name: collection() for name, collection in collections.items()}
        self.task_collections = {**inner.task_collections, **self.own}

    def clone(self) -> _Watched:
        """With collections of its own; those of the inner controller are the clone's."""
        clone = super().clone()
        clone.task_collections = {**clone.inner.task_collections, **clone.own}
        return clone

    def generate(self, prompt: Any, **kwargs: Any) -> Any:
        process = self.inner.generate(prompt, **kwargs)
        for collection in self.own.values():
            process = observed(process, collection)
        return process
