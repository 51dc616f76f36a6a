"""Build an engine from ``LlmArgs``. Every ``"auto"`` and None is resolved here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from forethought.config.drafters import AutoDecodingConfig
from forethought.config.engine import KvCacheConfig, LlmArgs
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.drafting import DrafterEntry
from forethought.engine.engine import Engine
from forethought.engine.scheduler import Limits
from forethought.errors import CapacityError, ParameterError
from forethought.kv.storage import HiddenStateCache, KvStorage
from forethought.model import loader
from forethought.model.causal_lm import CausalLM
from forethought.model.device import (
    available_threads,
    check_threads,
    choose_threads,
    find_device,
    free_host_memory,
    return_freed_memory,
    set_threads,
)
from forethought.model.runner import ModelRunner
from forethought.speculative import registry
from forethought.speculative.length import length_policy
from forethought.speculative.length.policy import schedule
from forethought.speculative.registry import Target
from forethought.speculative.verify.rules import rule_of

log = logging.getLogger(__name__)

HOST_SHARE = 0.1
"""Share of the free host memory that the KV cache may take by default."""
NUM_PREFIX_CONTEXTS = 3
"""Contexts that the KV cache holds by default, if memory allows, beside those of the running batch:
for the prefixes of earlier requests."""
STEP_SHARE, STEP_LIMIT = 0.1, 2 * 2**30
"""Share of the free GPU memory, and max bytes, that the KV cache never takes: the activations of a
step, masks and CUDA graphs need them."""
HOST_LIMIT = 4 * 2**30
"""Max bytes of host memory that the KV cache takes by default."""


def build(args: LlmArgs, model_dir: Path) -> Engine:
    """Load the model of ``model_dir`` and build the engine that ``args`` describe.

    Raises:
        ModelError: the model cannot be loaded or is not supported.
        ParameterError: a value that this machine or model cannot honour.
        CapacityError: the KV cache would not hold a single sequence of two tokens.
    """
    # Before the target is loaded: a draft model that does not exist costs no waiting.
    configs = [config.with_local_model() for config in args.speculative_config]
    device = find_device(args.device)
    if isinstance(args.num_threads, int):
        set_threads(args.num_threads, device)
    lm = loader.load(
        model_dir,
        dtype=args.dtype,
        device=device,
        attention=args.attention,
        fuse=args.fuse,
        trust_remote_code=args.trust_remote_code,
        quantization=args.quantization,
        forward=args.forward,
    )
    if lm.device.type == "cpu" and args.num_threads != "auto":
        check_threads()
    context = _context(args, lm)
    _check_lengths(configs, context)
    batch_size = min(args.max_batch_size, args.max_num_tokens)  # a decode takes a token each
    # Drafters load their models and say what they store before the pages are counted out.
    runner = ModelRunner(
        lm,
        KvStorage(lm.layer_shapes, 1, args.kv_cache_config.tokens_per_block, lm.dtype, lm.device),
    )
    target = Target(runner, args.max_num_tokens)
    drafters = [build_drafter_entry(config, target, batch_size) for config in configs]
    capacity = _fill(
        args.kv_cache_config, runner.storage, drafters, (batch_size + NUM_PREFIX_CONTEXTS) * context
    )
    limits = Limits(
        max_batch_size=batch_size,
        max_num_tokens=args.max_num_tokens,
        max_length=context,
        chunked_prefill=args.enable_chunked_prefill,
    )
    return_freed_memory()
    log.info(
        "%s on %s, %d tokens of KV cache (%.0f MiB), %s",
        model_dir,
        lm.device,
        capacity,
        _page_bytes(runner.storage, drafters) * runner.storage.num_pages / 2**20,
        limits,
    )
    log.info("layers: %s%s", lm.path.taken, f" ({lm.path.reason})" if lm.path.reason else "")
    engine = Engine(
        runner,
        limits,
        reuse=args.kv_cache_config.enable_block_reuse,
        seed=args.seed,
        drafters=drafters,
        num_threads=_threads(args, lm),
    )
    for name, path in engine.stats.draft_paths.items():
        log.info("drafts of %s: %s", name, path)
    return engine


def _threads(args: LlmArgs, lm: CausalLM) -> int | None:
    """Threads of a step; None: as torch has them."""
    if args.num_threads != "auto" or lm.device.type != "cpu":
        return None
    weights, available = sum(weight.num_bytes for weight in lm.traits.weights), available_threads()
    chosen = choose_threads(weights, available)
    log.info(
        "steps run on %d of %d threads: %.1f MiB of weights", chosen, available, weights / 2**20
    )
    return chosen


def build_drafter_entry(
    config: DecodingBaseConfig, target: Target, batch_size: int
) -> DrafterEntry:
    """The drafter that ``config`` describes, with its length policy and acceptance rule.

    Args:
        config: how to draft.
        target: the model to draft for.
        batch_size: sequences that the engine runs at once.

    Raises:
        UsageError: it does not fit the target, or its model cannot be loaded.
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


def _context(args: LlmArgs, lm: CausalLM) -> int:
    """Tokens that one sequence may have as far as the model is concerned."""
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
    config: KvCacheConfig, storage: KvStorage, drafters: list[DrafterEntry], useful: int
) -> int:
    """Allocate the pages of the KV cache and of the drafters' caches.

    Args:
        config: of the KV cache.
        storage: the target's.
        drafters: their caches get the same number of pages.
        useful: tokens that the running batch and earlier prefixes could take.

    Returns:
        Tokens that the cache holds: not more than ``useful``, unless asked for.
    """
    size, page_bytes = storage.page_size, _page_bytes(storage, drafters)
    if config.max_tokens is not None:
        pages = config.max_tokens // size
    else:
        pages = min(_cache_bytes(config, storage.device) // page_bytes, -(-useful // size))
    if pages * size < 2:
        raise CapacityError(
            "the KV cache would hold no sequence at all",
            f"{pages} pages of {size} tokens, {page_bytes} bytes each",
            "Raise kv_cache_config.max_tokens or free some memory",
        )
    try:
        storage.resize(pages)
        for each in drafters:
            each.drafter.resize(pages)
    except (RuntimeError, MemoryError) as error:  # torch's allocators raise RuntimeError
        raise CapacityError(
            "the KV cache does not fit into memory",
            f"{pages} pages of {page_bytes} bytes each",
            "Lower kv_cache_config.max_tokens",
        ) from error
    return pages * size


def _page_bytes(storage: KvStorage, drafters: Sequence[DrafterEntry]) -> int:
    """Bytes that a page takes in the KV cache and in the drafters' caches."""
    return storage.bytes_per_page + sum(each.drafter.page_bytes for each in drafters)


def _cache_bytes(config: KvCacheConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = min(int(free * STEP_SHARE), STEP_LIMIT)
        return int((free - kept) * config.free_gpu_memory_fraction)
    if config.host_cache_size is not None:
        return config.host_cache_size
    return min(HOST_LIMIT, int(free_host_memory() * HOST_SHARE))
