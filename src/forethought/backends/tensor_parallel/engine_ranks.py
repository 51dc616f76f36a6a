"""Tensor parallelism as ``LlmArgs`` asks for it: what is refused, and the start of its ranks.

The ranks themselves are in ``backends.tensor_parallel``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from forethought.backends.tensor_parallel.collectives import missing_backend
from forethought.backends.tensor_parallel.launcher import Launcher
from forethought.backends.tensor_parallel.ranks import Ranks
from forethought.backends.tensor_parallel.sharded import ShardedNetwork, connect
from forethought.config.engine import LlmArgs
from forethought.errors import ParameterError
from forethought.model.causal_lm import CausalLM
from forethought.model.llama.network import FusedNetwork
from forethought.model.shard import check_shardable

log = logging.getLogger(__name__)


def check(
    args: LlmArgs, model_dir: Path, device: torch.device, launcher: Launcher | None = None
) -> None:
    """Check that the model can be cut over the ranks, before it is loaded.

    Raises:
        ParameterError: another setting excludes it, or torch or the machine lacks something.
        ModelError: the model cannot be cut into that many parts.
    """
    is_local = launcher is None or launcher.is_local
    refused = _refusal(args, device, is_local)
    if refused is not None:
        what = f"tensor_parallel_size={args.tensor_parallel_size} is not possible here"
        raise ParameterError(what, *refused, param="tensor_parallel_size")
    check_shardable(model_dir, args.tensor_parallel_size, args.trust_remote_code)


def _refusal(args: LlmArgs, device: torch.device, is_local: bool) -> tuple[str, str] | None:
    """Why the settings or this machine exclude it, and what to do; None: they do not."""
    for excludes, why in (
        (args.forward == "native", 'forward="native" runs in one process'),
        (not args.fuse, "fuse=False asks for the module of transformers, which is not cut"),
        (args.cuda_graphs is True, "cuda_graphs=True captures the forwards of one process"),
        (args.quantization is not None, f'quantization="{args.quantization}" is not cut'),
        (device.index is not None, f'device="{device}" is a single one'),
    ):
        if excludes:
            return why, "Leave one of the two out"
    lacking = missing_backend(device.type)
    if lacking is not None:
        return lacking, "Install another torch, or leave it out"
    num_gpus = torch.cuda.device_count()
    if is_local and device.type == "cuda" and num_gpus < args.tensor_parallel_size:
        return f"there are {num_gpus} GPUs", "Lower it"
    if device.type not in ("cuda", "cpu"):
        return f"the model runs on {device.type}", "Use cuda or cpu"
    return None


@contextmanager
def starting(
    args: LlmArgs, model_dir: Path, device: torch.device, launcher: Launcher | None = None
) -> Iterator[Ranks]:
    """The processes of the other ranks, on this machine or where a launcher starts them; they end
    if the block fails.

    Raises:
        ParameterError, ModelError: as ``check``.
        EngineStopped: one of them could not be started.
    """
    check(args, model_dir, device, launcher)
    try:
        ranks = Ranks(args.tensor_parallel_size, launcher)
    except OSError as error:
        raise ParameterError(
            f"tensor_parallel_size={args.tensor_parallel_size} is not possible here",
            f"its processes cannot be started: {error}",
            "Let TMPDIR name a directory that can be written, or leave it out",
            param="tensor_parallel_size",
        ) from error
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise


def join(ranks: Ranks, lm: CausalLM, args: LlmArgs, model_dir: Path, num_threads: int) -> None:
    """Let the other ranks load what rank 0 has loaded, and connect its network with theirs.

    Args:
        ranks: that have been started.
        lm: rank 0's, from its shard.
        args: as it was loaded.
        model_dir: of the model.
        num_threads: of each rank, on a CPU.

    Raises:
        EngineStopped: one of them could not.
    """
    load = {
        "path": model_dir,
        "dtype": lm.dtype,  # "auto" might depend on the free memory
        "attention": args.attention,
        "trust_remote_code": args.trust_remote_code,
    }
    ranks.connect(lm.device, load, args.kv_cache_config.tokens_per_block, num_threads)
    assert isinstance(lm.network, FusedNetwork)
    connect(lm.network, ranks.collectives)
    lm.network = ShardedNetwork(lm.network, ranks)
    log.info("%d ranks on %s, rank 0 in this process, the others in %s",
        ranks.size, lm.device.type, ", ".join(map(str, ranks.process_ids)))  # fmt: skip
