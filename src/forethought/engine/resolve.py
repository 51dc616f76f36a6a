"""Build an engine from ``LlmArgs``. Every ``"auto"`` and None is resolved here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from forethought.config.drafters import AutoDecodingConfig
from forethought.config.engine import KvCacheConfig, LlmArgs
from forethought.config.speculation import DecodingBaseConfig, named_config
from forethought.engine.engine import Engine
from forethought.engine.guarded_drafter import DrafterEntry
from forethought.engine.scheduler import Limits
from forethought.errors import CapacityError, ParameterError, UsageError
from forethought.kv.events import event_packages
from forethought.kv.storage import KvStorage
from forethought.model import backends, loader
from forethought.model.adapter import Adapter, read_adapter
from forethought.model.causal_lm import CausalLM
from forethought.model.device import (
    available_threads,
    check_threads,
    choose_threads,
    find_device,
    free_gpu_memory,
    free_host_memory,
    return_freed_memory,
    set_threads,
)
from forethought.model.hidden_states import HiddenStateCache
from forethought.model.runner import ModelRunner
from forethought.model_dir import gguf_files
from forethought.speculative import registry
from forethought.speculative.drafter import Target
from forethought.speculative.length import length_policy
from forethought.speculative.length.policy import schedule
from forethought.speculative.verify.rules import rule_of

log = logging.getLogger(__name__)

HOST_SHARE = 0.1
"""Share of the free host memory that the KV cache may take by default."""
NUM_PREFIX_CONTEXTS = 3
"""Contexts that the KV cache holds by default, if memory allows, beside those of the running batch:
for the prefixes of earlier requests."""
STEP_SHARE, STEP_LIMIT = 0.1, 2 * 2**30
"""Share of the free GPU memory, and max bytes, that the KV cache never takes: the activations of a
step and masks need them. CUDA graphs have a reserve of their own."""
NUM_DECODE_STEPS = 16
"""Continuous decode steps by default, where nobody waits for the tokens between."""
HOST_LIMIT = 4 * 2**30
"""Max bytes of host memory that the KV cache takes by default."""


def build(args: LlmArgs, model_dir: Path, launcher: Any | None = None) -> Engine:
    """Load the model of ``model_dir`` and build the engine that ``args`` describe, whose ranks a
    ``Launcher`` starts (``backends.tensor_parallel``); None: they are on this machine.

    Raises:
        ModelError: the model, or an adapter of it, cannot be loaded or is not supported.
        ParameterError: a value that this machine or model cannot honour.
        CapacityError: the KV cache would not hold a single sequence of two tokens.
        DependencyError: KV events are to be published, and the packages for it are not installed.
        EngineStopped: a rank of tensor parallelism has ended while it was started.
    """
    # Before the target is loaded: a draft model that does not exist costs no waiting.
    configs = [config.with_local_model() for config in args.speculative_config]
    adapters = _read_adapters(args)
    if args.published_kv_events is not None:
        event_packages()
    device = find_device(args.device)
    _check_kv_dtype(args, device)
    if args.layer_window is not None and args.tensor_parallel_size > 1:
        raise ParameterError(
            "layer_window and tensor_parallel_size exclude each other",
            "ranks have a slice of every layer in memory",
            "Leave one of them out",
        )
    if isinstance(args.num_threads, int):
        set_threads(args.num_threads, device)
    with _ranks(args, model_dir, device, launcher) as ranks:
        lm = _load(args, model_dir, device, ranks, adapters)
        inside = _drafter_inside(args, model_dir) if ranks is None else None
        engine = _engine(args, model_dir, configs, lm, ranks, inside)
    for adapter in adapters:
        engine.adapters.add(lm.place(adapter))
    return engine


def _read_adapters(args: LlmArgs) -> list[Adapter]:
    """The adapters, which fit no model yet. Raises as ``read_adapter``, and ParameterError where no
    model has adapters.
    """
    if args.adapters and args.tensor_parallel_size > 1:
        raise ParameterError(
            "adapters and tensor_parallel_size exclude each other",
            "the matrices of adapters are not cut to ranks",
            "Leave one of them out",
        )
    return [read_adapter(name, path) for name, path in args.adapters.items()]


def _drafter_inside(args: LlmArgs, model_dir: Path) -> DecodingBaseConfig | None:
    """The configuration of the drafter in the target's checkpoint, such as MTP modules, where the
    caller has not said how to draft; None: there is none.
    """
    if "speculative_config" in args.model_fields_set:
        return None
    names = registry.inside(model_dir)
    return named_config(next(iter(names)), model_dir) if names else None


def _check_kv_dtype(args: LlmArgs, device: torch.device) -> None:
    """Raise ParameterError where keys and values can only have the model's dtype, and may not."""
    name = args.kv_cache_config.dtype
    if name in ("auto", args.dtype):
        return
    if device.type != "cpu":
        why = f"the model is on {device}, where keys and values have its dtype"
    elif args.tensor_parallel_size > 1:
        why = "with tensor parallelism keys and values have the model's dtype"
    elif args.attention not in ("auto", "sdpa"):
        why = f"attention={args.attention!r} reads keys and values in the model's dtype"
    else:
        return
    raise ParameterError(
        f"kv_cache_config.dtype={name!r} is not possible here",
        why,
        'Leave it out, or use device="cpu" with one process and the default attention',
    )


def _ranks(
    args: LlmArgs, model_dir: Path, device: torch.device, launcher: Any | None
) -> AbstractContextManager[Any | None]:
    """The processes of tensor parallelism; None: there is one."""
    if args.tensor_parallel_size == 1:
        return nullcontext()
    return backends.tensor_parallel().starting(args, model_dir, device, launcher)


def _load(
    args: LlmArgs,
    model_dir: Path,
    device: torch.device,
    ranks: Any | None,
    adapters: Sequence[Adapter],
) -> CausalLM:
    lm = loader.load(
        model_dir,
        dtype=args.dtype,
        device=device if ranks is None else ranks.launcher.device(ranks.shard, device.type),
        attention=args.attention,
        fuse=args.fuse,
        trust_remote_code=args.trust_remote_code,
        quantization=args.quantization,
        forward=args.forward,
        shard=None if ranks is None else ranks.shard,
        adapted={name for adapter in adapters for name in adapter.additions},
        expert_bytes=None if args.expert_memory is None else int(args.expert_memory * 2**30),
        layer_window=args.layer_window,
    )
    if lm.device.type == "cpu" and args.num_threads != "auto":
        check_threads()
    if ranks is not None:
        num_threads = _threads(args, lm, ranks) or torch.get_num_threads()
        backends.tensor_parallel().join(ranks, lm, args, model_dir, num_threads)
    return lm


def _engine(
    args: LlmArgs,
    model_dir: Path,
    configs: Sequence[DecodingBaseConfig],
    lm: CausalLM,
    ranks: Any | None,
    inside: DecodingBaseConfig | None = None,
) -> Engine:
    context = _context(args, lm)
    _check_lengths(configs, context)
    batch_size = min(args.max_batch_size, args.max_num_tokens)  # a decode takes a token each
    # Drafters load their models and say what they store before the pages are counted out.
    runner = _runner(args, lm, None if configs or inside else batch_size, ranks)
    target = Target(runner, args.max_num_tokens)
    drafters = [build_drafter_entry(config, target, batch_size) for config in configs]
    if inside is not None:
        drafters += _entries_inside(inside, target, batch_size, context)
    useful = (batch_size + NUM_PREFIX_CONTEXTS) * context
    capacity = _fill(args.kv_cache_config, runner.storage, drafters, useful, runner.reserved_bytes)
    _prepare(runner, drafters, is_asked=args.cuda_graphs is True)
    if lm.device.type == "cpu":
        backends.cpu().sampler()  # which may have to be compiled: not in the first sampled step
    limits = Limits(
        max_batch_size=batch_size,
        max_num_tokens=args.max_num_tokens,
        max_length=context,
        chunked_prefill=args.enable_chunked_prefill,
    )
    return_freed_memory()
    file = (gguf_files(model_dir) or [model_dir])[0]
    log.info(
        "%s on %s, %d tokens of KV cache in %s (%.0f MiB), %s",
        file,
        lm.device,
        capacity,
        str(runner.storage.stored_dtype).removeprefix("torch."),
        _page_bytes(runner.storage, drafters) * runner.storage.num_pages / 2**20,
        limits,
    )
    log.info("layers: %s%s", lm.path.kind, f" ({lm.path.reason})" if lm.path.reason else "")
    engine = Engine(
        runner,
        limits,
        reuse=args.kv_cache_config.enable_block_reuse,
        seed=args.seed,
        drafters=drafters,
        num_threads=_threads(args, lm, ranks),
        kv_events=args.published_kv_events,
    )
    num_decode_steps = args.num_continuous_decode_steps
    engine.num_decode_steps = NUM_DECODE_STEPS if num_decode_steps is None else num_decode_steps
    engine.num_streamed_decode_steps = 1 if num_decode_steps is None else num_decode_steps
    for name, path in engine.stats.draft_paths.items():
        log.info("drafts of %s: %s", name, path)
    return engine


def _runner(
    args: LlmArgs, lm: CausalLM, max_graph_tokens: int | None, ranks: Any | None
) -> ModelRunner:
    """Of the target, over one page. Raises ParameterError for CUDA graphs that are impossible."""
    if ranks is not None:
        page_size = args.kv_cache_config.tokens_per_block
        return backends.tensor_parallel().runner(ranks, lm, page_size)
    refusal = backends.cuda().why_no_graphs(lm)
    if args.cuda_graphs is True and refusal is not None:
        raise ParameterError("cuda_graphs=True is not possible here", *refusal)
    is_tried = args.cuda_graphs is True or (
        args.cuda_graphs == "auto" and refusal is None and lm.path.kind == "fused"
    )
    kv_dtype = args.kv_cache_config.dtype
    storage = lm.storage(
        1,
        args.kv_cache_config.tokens_per_block,
        has_scratch_page=is_tried,
        stored_dtype=None if kv_dtype == "auto" else getattr(torch, kv_dtype),
    )
    if not is_tried:
        return ModelRunner(lm, storage)
    return backends.cuda().runner(lm, storage, max_graph_tokens)


def _prepare(runner: ModelRunner, drafters: Sequence[DrafterEntry], *, is_asked: bool) -> None:
    """Capture a first graph, if there are graphs; where that fails there are none, or
    ParameterError if they were asked for.
    """
    caches = [cache for entry in drafters for cache in entry.drafter.draft_caches]
    try:
        runner.prepare([cache for cache in caches if isinstance(cache, HiddenStateCache)])
    except Exception as error:  # of any operation of any model
        if is_asked:
            raise ParameterError(
                "cuda_graphs=True is not possible here",
                f"a forward of this model cannot be captured: {type(error).__name__}: {error}",
                "Leave it out",
            ) from error
        log.warning("no CUDA graphs: a forward could not be captured", exc_info=True)
        assert runner.graphs is not None
        runner.graphs.stop()


def _threads(args: LlmArgs, lm: CausalLM, ranks: Any | None) -> int | None:
    """Threads of a step; None: as torch has them."""
    if args.num_threads != "auto" or lm.device.type != "cpu":
        return None
    weights = sum(weight.num_bytes for weight in lm.traits.weights)
    num_sharing = 1 if ranks is None or not ranks.launcher.is_local else ranks.size
    available = max(1, available_threads() // num_sharing)
    chosen = choose_threads(weights, available, native=lm.path.kind == "native")
    log.info(
        "steps run on %d of %d threads: %.1f MiB of weights",
        chosen,
        available,
        weights / 2**20,
    )
    return chosen


def build_drafter_entry(
    config: DecodingBaseConfig, target: Target, batch_size: int
) -> DrafterEntry:
    """The drafter that ``config`` describes, with its length policy and acceptance rule.

    ``batch_size`` sequences run at once. Raises UsageError if the drafter does not fit the target,
    or its model cannot be loaded.
    """
    if isinstance(config, AutoDecodingConfig):
        config = config.resolve(batch_size)
    drafter = registry.build(config, target)
    for draft_cache in drafter.draft_caches:
        if isinstance(draft_cache, HiddenStateCache):
            target.runner.check_hidden_states(draft_cache.layer_ids)
    on_cpu = target.runner.lm.device.type == "cpu"  # its attention goes token by token
    return DrafterEntry(
        name=config.name,
        drafter=drafter,
        policy=length_policy(config, drafter.nodes, node_context=1.0 if on_cpu else 0.0),
        schedule=schedule(config),
        max_nodes=config.max_total_draft_tokens,
        resource_manager=getattr(config, "resource_manager", None),
        rule=rule_of(config),
    )


def _entries_inside(
    config: DecodingBaseConfig, target: Target, batch_size: int, context: int
) -> list[DrafterEntry]:
    """The drafter in the target's checkpoint; none where it cannot be used."""
    try:
        _check_lengths([config], context)
        entry = build_drafter_entry(config, target, batch_size)
    except UsageError as error:
        log.info("%s in the checkpoint: not used, as %s", config.name, error.why)
        return []
    except Exception:  # the model runs without it, as it would if nobody had asked
        log.warning("%s in the checkpoint: not used, as it fails", config.name, exc_info=True)
        return []
    log.info(
        "%s in the checkpoint: drafts where that pays (speculative_config=[] or --speculative none "
        "leaves it out)",
        config.name,
    )
    return [entry]


def _context(args: LlmArgs, lm: CausalLM) -> int:
    """Tokens that one sequence of this model may have."""
    if (args.max_seq_len or 0) > lm.max_positions:
        raise ParameterError(
            f"max_seq_len={args.max_seq_len}",
            f"the model's context has {lm.max_positions} tokens",
            "Lower it or leave it out",
        )
    return args.max_seq_len or lm.max_positions


def _check_lengths(configs: Sequence[DecodingBaseConfig], context: int) -> None:
    """Refuse drafts that could never be as long as the configuration says."""
    for config in configs:
        if config.max_draft_len >= context:
            raise ParameterError(
                f"invalid max_draft_len in {type(config).__name__}",
                f"got {config.max_draft_len}, but a sequence has at most {context} tokens",
                "Lower max_draft_len, or raise max_seq_len if the model's context allows it",
            )


def _fill(
    config: KvCacheConfig,
    storage: KvStorage,
    drafters: list[DrafterEntry],
    useful: int,
    reserved: int = 0,
) -> int:
    """Allocate the pages of the KV cache and of the drafters' caches; returns the tokens that they
    hold.

    These are not more than ``useful``, the running batch and earlier prefixes, unless asked for.
    ``reserved`` bytes of the device are for CUDA graphs.
    """
    size, page_bytes = storage.page_size, _page_bytes(storage, drafters)
    if config.max_tokens is not None:
        pages = config.max_tokens // size
    else:
        num_bytes = _cache_bytes(config, storage.device, reserved)
        pages = min(num_bytes // page_bytes - storage.has_scratch_page, -(-useful // size))
        pages = min(pages, _least_pages_elsewhere(config, storage, pages))
    if pages * size < 2:
        raise CapacityError(
            "the KV cache would hold no sequence at all",
            f"{pages} pages of {size} tokens, {page_bytes} bytes each",
            "Raise kv_cache_config.max_tokens or free some memory",
        )
    try:
        storage.resize(pages)
        for entry in drafters:
            entry.drafter.resize(pages)
    except (RuntimeError, MemoryError) as error:  # torch's allocators raise RuntimeError
        raise CapacityError(
            "the KV cache does not fit into memory",
            f"{pages} pages of {page_bytes} bytes each",
            "Lower kv_cache_config.max_tokens",
        ) from error
    return pages * size


def _page_bytes(storage: KvStorage, drafters: Sequence[DrafterEntry]) -> int:
    """Bytes that a page takes in the KV cache and in the drafters' caches, on the first device."""
    return storage.device_bytes_per_page + sum(entry.drafter.page_bytes for entry in drafters)


def _least_pages_elsewhere(config: KvCacheConfig, storage: KvStorage, pages: int) -> int:
    """Pages that every other GPU of the model can hold; ``pages``, where there are no others."""
    free_memory = storage.free_memory_elsewhere()
    if not free_memory:
        return pages
    num_pages = [_gpu_cache_bytes(config, free) // storage.bytes_per_page for free in free_memory]
    log.info("pages that the GPUs can hold: %s, of which the least is taken", [pages, *num_pages])
    return min(num_pages)


def _cache_bytes(config: KvCacheConfig, device: torch.device, reserved: int = 0) -> int:
    if device.type == "cuda":
        return _gpu_cache_bytes(config, free_gpu_memory(device), reserved)
    if config.host_cache_size is not None:
        return config.host_cache_size
    return min(HOST_LIMIT, int(free_host_memory() * HOST_SHARE))


def _gpu_cache_bytes(config: KvCacheConfig, free: int, reserved: int = 0) -> int:
    kept_free = min(int(free * STEP_SHARE), STEP_LIMIT) + reserved
    return max(0, int((free - kept_free) * config.free_gpu_memory_fraction))
