"""``open_llm``: one ``AsyncLLM`` over replicas; ``ReplicaWorker``: methods over it."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from typing_extensions import override

from forethought.assets import reasoner_dir
from forethought.cluster.actors import (
    ActorOpener,
    Resources,
    check_ray,
    name_of,
    node_host,
    num_ranks_of,
    start_ray,
)
from forethought.cluster.engine import ClusterEngine
from forethought.cluster.fleet import HANG, Fleet
from forethought.cluster.link import Link
from forethought.cluster.migration import Rebalancing
from forethought.cluster.prefill import check_split
from forethought.cluster.ranks import RankActors
from forethought.config.engine import LlmArgs
from forethought.errors import ParameterError
from forethought.llm.async_llm import MAX_PENDING, AsyncLLM
from forethought.llm.engine_thread import EngineThread
from forethought.llm.frontend import Frontend
from forethought.llm.grammar import GrammarCompiler
from forethought.llm.profile import ModelProfile
from forethought.llm.snapshot import SnapshotStore
from forethought.llm.thinking import ThinkingBudgets
from forethought.llm.tokenizer import Tokenizer
from forethought.model_dir import find_model_dir
from forethought.scaffolding.execution_scope import current_scope
from forethought.workers.local import EngineWorker

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def open_llm(
    model: str | Path | None = None,
    *,
    replicas: int = 2,
    ray_address: str | None = None,
    hang_seconds: float = HANG,
    max_pending: int = MAX_PENDING,
    rebalance: bool = True,
    prefill_replicas: int = 0,
    **fields: Any,
) -> AsyncLLM:
    """An ``AsyncLLM`` whose sequences are computed by replicas of the model, and outlive them.

    It returns when the first replica is up. ``shutdown`` ends them, unless others use them as well;
    a Ray that was started here ends with the process.

    Args:
        model: as of ``AsyncLLM``; each machine finds it under this name.
        replicas: how many; each has the model in its own memory, over ``tensor_parallel_size``
            ranks.
        ray_address: of a cluster of Ray, such as ``"auto"``; None: one is started here.
        hang_seconds: of silence, after which a replica is ended and replaced.
        max_pending: as of ``AsyncLLM``.
        rebalance: whether sequences move from a replica that has much more to do than another one.
        prefill_replicas: how many of the replicas prefill for the others, which go on with the
            sequences; short prompts, and those that the others have cached, stay with these.
        **fields: of ``LlmArgs``, for each replica.

    Raises:
        DependencyError: Ray is not installed.
        UsageError: as ``AsyncLLM``; or there is no cluster of Ray, or a field that replicas cannot
            honour.
        EngineStopped: the first replica does not start.
    """
    check_replicas(fields, replicas, prefill_replicas)
    args = LlmArgs.from_dict({"model": model, **fields})
    fields = {"model": None if model is None else str(model), **fields}
    start_ray(ray_address, replicas * num_ranks_of(fields))
    resources = Resources.share(fields, replicas)
    resources.check_capacity()
    arguments: tuple[Any, ...] = fields, os.getcwd()
    ranks = RankActors(resources, *arguments) if resources.num_ranks > 1 else None
    arguments = *arguments, ranks, node_host
    opener = ActorOpener(arguments, resources)
    fleet = Fleet(opener, name_of(fields), replicas, hang_seconds, prefill_replicas)
    if prefill_replicas:
        num_decode = replicas - prefill_replicas
        log.info("%d replicas prefill, for %d that decode", prefill_replicas, num_decode)
    llm = over(fleet, args, max_pending, Rebalancing() if rebalance else None)
    atexit.register(llm._shutdown)  # before Ray is, which began earlier
    return llm


def check_replicas(fields: Mapping[str, Any], num_replicas: int, num_prefill: int = 0) -> None:
    """Raises ParameterError for a number or a field of ``LlmArgs`` that replicas cannot honour,
    DependencyError if Ray is not installed.
    """
    if num_replicas < 1:
        raise ParameterError("invalid replicas", f"got {num_replicas}", "Give at least 1")
    check_split(num_replicas, num_prefill)
    if fields.get("snapshot_dir") is not None:
        why = "the sequences of replicas are on several machines"
        raise ParameterError("replicas keep no snapshots", why, "Leave snapshot_dir out")
    if fields.get("kv_events_config") is not None:
        why = "each replica has a cache of its own, and the endpoint is one"
        raise ParameterError("replicas publish no KV events", why, "Leave kv_events_config out")
    check_ray()


def over(
    fleet: Fleet,
    args: LlmArgs,
    max_pending: int = MAX_PENDING,
    rebalancing: Rebalancing | None = None,
) -> AsyncLLM:
    """An ``AsyncLLM`` over a fleet, one replica of which comes up. Raises as ``open_llm``."""
    fleet.wait()
    has_prefix_caches = args.kv_cache_config.enable_block_reuse
    engine = ClusterEngine(fleet, args.seed, _current_request, rebalancing, has_prefix_caches)
    try:
        return AsyncLLM.of(_frontend(engine, args), ClusterThread, max_pending=max_pending)
    except BaseException:
        engine.shutdown()
        raise


def _frontend(engine: ClusterEngine, args: LlmArgs) -> Frontend:
    code = args.trust_remote_code
    model = args.model or reasoner_dir()
    model_dir = find_model_dir(model, args.revision, weights=False, code=code)
    tokenizer_dir = model_dir
    if args.tokenizer is not None:
        tokenizer_dir = find_model_dir(args.tokenizer, weights=False, code=code)
    tokenizer, eos_ids = Tokenizer.load(tokenizer_dir, code), engine.eos_ids
    vocab_size = engine.capabilities.vocab_size
    return Frontend(
        engine,
        tokenizer,
        model_dir,
        GrammarCompiler(tokenizer, vocab_size, eos_ids, args.guided_decoding_config),
        ThinkingBudgets(tokenizer, vocab_size, eos_ids),
        _NoSnapshots(),
        ModelProfile.read(tokenizer, model_dir, args.tool_format),
    )


def _current_request() -> str | None:
    scope = current_scope()
    return None if scope is None else scope.session or scope.request_id


class _NoSnapshots(SnapshotStore):
    """Refuses every name."""

    def __init__(self) -> None:
        pass

    @override
    def path(self, name: str) -> Path:
        raise ParameterError(
            "replicas keep no snapshots",
            "their sequences are on several machines",
            "Serve the model without replicas",
        )

    @override
    def names(self) -> list[str]:
        return []


class ClusterThread(EngineThread):
    """Waits for replicas in place of computing. Commands see the scope of the request that gives
    them, and replicas get to know for how many tokens somebody waits.
    """

    @override
    def _bound(self, function: Callable[..., Result], *args: Any) -> Callable[[], Result]:
        return partial(contextvars.copy_context().run, function, *args)

    @override
    def _max_steps(self) -> float:
        engine = self.frontend.engine
        assert isinstance(engine, ClusterEngine), "it is made for one"
        for generation, stream in self._streams.items():
            count = generation.size + stream.num_missing(generation)
            engine.wait_for(generation.sequences[0], count)
        return math.inf


class ReplicaWorker(EngineWorker):
    """An ``EngineWorker`` whose sequences are computed by replicas.

    ::

        worker = ReplicaWorker.init_with_replicas(replicas=2)
        tag = NativeGenerationController.WorkerTag.GENERATION
        llm = ScaffoldingLlm(MajorityVoteController(NativeGenerationController()), {tag: worker})
    """

    @classmethod
    def init_with_replicas(
        cls,
        model: str | Path | None = None,
        *,
        temperature: float | None = None,
        **options: Any,
    ) -> Self:
        """A worker with replicas of its own, which ``shutdown`` ends.

        Args:
            model: as of ``open_llm``, which takes the ``options``.
            temperature: as of ``EngineWorker``.

        Raises:
            UsageError, EngineStopped: as ``open_llm``.
        """
        worker = cls(open_llm(model, **options), temperature=temperature)
        worker._owned = True
        return worker

    async def scale(self, replicas: int) -> None:
        """Start further replicas, or drain some, as ``scale``."""
        await scale(self.llm, replicas)

    async def drain(self, name: str) -> None:
        """Have a replica left by its sequences, as ``drain``."""
        await drain(self.llm, name)


async def scale(llm: AsyncLLM, replicas: int) -> None:
    """Start further replicas of a model of ``open_llm``, or drain some: their sequences move to the
    others, and they end. There are as many prefill replicas among them as before.

    Raises ParameterError for fewer than one, or none that decodes.
    """
    check_replicas({}, replicas)
    await asyncio.wrap_future(llm._thread.call(_fleet(llm).scale, replicas))


async def drain(llm: AsyncLLM, name: str) -> None:
    """Have a replica of a model of ``open_llm`` left by all who use it; it ends then. Nothing new
    begins there, and its sequences go on in others as they are. Returns when those of this model
    have moved.

    Raises ParameterError for an unknown name, or that of the last replica.
    """
    link = await asyncio.wrap_future(llm._thread.call(_fleet(llm).drain, name))
    await asyncio.shield(asyncio.wrap_future(link.ended))


def links_of(llm: AsyncLLM) -> list[Link]:
    """The replicas of a model of ``open_llm``; the list changes as they come and go."""
    return _fleet(llm).links


def _fleet(llm: AsyncLLM) -> Fleet:
    engine = llm._frontend.engine
    assert isinstance(engine, ClusterEngine), "it is of open_llm"
    return engine.fleet
