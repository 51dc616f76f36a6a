"""The backend of tensor parallelism: the processes of a model that is cut over ranks."""

from __future__ import annotations

from forethought.backends.tensor_parallel import engine_ranks, shard
from forethought.backends.tensor_parallel.ranks import Ranks
from forethought.backends.tensor_parallel.sharded import ShardedRunner, ShardedStorage
from forethought.model.backends import ParallelBackend
from forethought.model.causal_lm import CausalLM


class TensorParallelBackend(ParallelBackend):
    """The entry ``tensor_parallel`` of the table in ``model.backends``."""

    refusal = staticmethod(shard.refusal)
    starting = staticmethod(engine_ranks.starting)
    join = staticmethod(engine_ranks.join)

    @staticmethod
    def runner(ranks: Ranks, lm: CausalLM, page_size: int) -> ShardedRunner:
        """Runs rank 0's shard of a model, over one page, and with it the others."""
        return ShardedRunner(lm, ShardedStorage(ranks, lm, page_size), ranks)
