"""The backend of NVIDIA GPUs: kernels of small operations, and CUDA graphs of steps and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from torch import nn

from forethought.model.backends import GraphBackend

if TYPE_CHECKING:
    from forethought.backends.cuda.chain_rounds import ChainRounds
    from forethought.backends.cuda.draft_graph import DraftGraphs
    from forethought.backends.cuda.graph_runner import GraphRunner
    from forethought.backends.cuda.module_graphs import ModuleGraphs
    from forethought.backends.cuda.recurrent import KernelRecurrence
    from forethought.kv.storage import KvStorage
    from forethought.model.causal_lm import CausalLM
    from forethought.speculative.draft_module import DraftModuleRunner


class CudaBackend(GraphBackend):
    """The entry ``cuda`` of the table in ``model.backends``."""

    @staticmethod
    def fused_ops() -> ModuleType:
        """The kernels of ``model.fused_ops``, by name."""
        from forethought.backends.cuda import fused_ops_triton

        return fused_ops_triton

    @staticmethod
    def recurrence(modules: Sequence[nn.Module]) -> KernelRecurrence | None:
        """The recurrent layers of a module of transformers; None: some have no kernels."""
        from forethought.backends.cuda.recurrent import KernelRecurrence

        return KernelRecurrence.of(modules)

    @staticmethod
    def reads_pages(lm: CausalLM) -> bool:
        """Whether a kernel attends over pages in place."""
        from forethought.backends.cuda.paged import PagedAttention

        return isinstance(lm.backend, PagedAttention)

    @classmethod
    def why_no_graphs(cls, lm: CausalLM) -> tuple[str, str] | None:
        """Why forwards cannot be captured, and what to do; None: it may be possible."""
        if lm.device.type != "cuda":
            return f"the model runs on {lm.device}", "Leave it out"
        if not cls.reads_pages(lm):
            why = f"attention {lm.backend.name} depends on the rows of a step in Python"
            return why, 'Use attention="triton", or leave it out'
        return None

    @staticmethod
    def runner(lm: CausalLM, storage: KvStorage, max_tokens: int | None) -> GraphRunner:
        """Runs steps of at most ``max_tokens`` by graphs; None: of as many as graphs may have."""
        from forethought.backends.cuda.graph_runner import GraphRunner
        from forethought.backends.cuda.graphs import MAX_GRAPH_TOKENS, CudaCapture
        from forethought.model.graph_capturer import GraphCapturer

        graphs = GraphCapturer(CudaCapture(lm.device))
        return GraphRunner(lm, storage, graphs, max_tokens or MAX_GRAPH_TOKENS)

    @staticmethod
    def draft_graphs(runner: DraftModuleRunner) -> DraftGraphs:
        """Chains and trees of one builder; the runner has ``graphs``."""
        from forethought.backends.cuda.draft_graph import DraftGraphs

        assert runner.graphs is not None
        return DraftGraphs(runner, runner.graphs)

    @staticmethod
    def module_graphs(runners: Sequence[DraftModuleRunner]) -> ModuleGraphs:
        """Drafts of several modules; the runners have ``graphs``."""
        from forethought.backends.cuda.module_graphs import ModuleGraphs

        assert runners[0].graphs is not None
        return ModuleGraphs(runners, runners[0].graphs)

    @staticmethod
    def step_runner() -> type[ChainRounds]:
        """What makes several steps with drafts, without a wait between them."""
        from forethought.backends.cuda.chain_rounds import ChainRounds

        return ChainRounds
