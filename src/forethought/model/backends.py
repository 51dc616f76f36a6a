"""The table of backends: what computes beside plain torch, which is the reference.

A backend is a folder of ``forethought.backends``, with a class that has all that it offers. The
engine, its models and its drafters find it here and never import it::

    cpu               layers, drafts and whole steps in C++
    cuda              Triton kernels and CUDA graphs
    tensor_parallel   a model cut over processes

``lm`` is a ``CausalLM``; other types of the layers above are named in the docstrings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from forethought.config.registry import Registry

if TYPE_CHECKING:
    from forethought.model.recurrence import Recurrence

BACKENDS = Registry(
    "backend",
    {
        "cpu": "forethought.backends.cpu.backend:CpuBackend",
        "cuda": "forethought.backends.cuda.backend:CudaBackend",
        "tensor_parallel": "forethought.backends.tensor_parallel.backend:TensorParallelBackend",
    },
)


class NativeSampling(Protocol):
    """What ``model.sampling.sampler`` does, of logits on a CPU. Arguments are the same there."""

    def draw_tokens(
        self, logits: Tensor, contexts: Sequence[Any], uniforms: Sequence[float]
    ) -> Tensor:
        """The next tokens, int64 ``[N]``."""
        ...

    def score_logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> Tensor:
        """Float64 ``[N, 2 + 2 min(k, V)]``."""
        ...

    def score_confidence(self, logits: Tensor, tokens: Tensor, ks: Sequence[int]) -> Tensor:
        """Float64 ``[N, 4]``."""
        ...


class NativeBackend(Protocol):
    """Layers, drafts and steps in C++. Drafts read the packed weights of a target that runs there.

    Methods raise ModelError where the library has to be compiled and cannot be.
    """

    NO_COMPILER: str
    """The reason of ``why_unavailable`` where there is no compiler."""

    @staticmethod
    def why_unavailable() -> str | None:
        """Why nothing can run on this machine; None: it can."""

    @staticmethod
    def warn_unavailable(reason: str, fix: str = ...) -> None:
        """Log once that the slower forward is taken, and why."""

    @staticmethod
    def uses_amx() -> bool:
        """Whether products of bfloat16 run on AMX."""
        ...

    @staticmethod
    def causal_lm_class(config: Any) -> Any | None:
        """The class of transformers whose layers run here; None: this config has none."""

    @staticmethod
    def refusal(module: Any) -> str | None:
        """Why a module of transformers cannot run here; None: it can."""

    @staticmethod
    def network(
        module: Any,
        max_positions: int,
        windows: Sequence[int | None],
        expert_bytes: int | None = None,
        layer_window: int | None = None,
    ) -> Any:
        """The ``Network`` of a module that ``refusal`` accepts; its layers' weights are taken.
        ``expert_bytes``: of memory for experts, where the others are left in a file.
        ``layer_window``: layers in memory, where the others are left in one.
        """

    @staticmethod
    def linear(weight: Any) -> Any:
        """The product with a ``StoredWeight``, whose ``multiply`` takes float32 ``[T, in]``."""

    @staticmethod
    def recurrence(modules: Sequence[nn.Module]) -> Recurrence | None:
        """The recurrent layers of a module of transformers; None: some are not known here."""

    @staticmethod
    def attention(modules: Sequence[nn.Module], profiles: Sequence[Any]) -> Any:
        """The attention layers of a module of transformers."""

    @staticmethod
    def sublayers(layers: Sequence[nn.Module], attention: Any, recurrence: Any) -> Any | None:
        """Decoder layers of a module of transformers, whose parts are these and those of
        ``use_native_parts``, in one call; None: they have others.
        """

    @staticmethod
    def use_native_parts(module: Any, excluded: Collection[nn.Module]) -> None:
        """Have linears, MLPs and norms of a module that torch runs computed here; ``excluded``
        linears are not called.
        """

    @staticmethod
    def draft_network(lm: Any, vocab_size: int) -> Any | None:
        """A draft model for targets with ``vocab_size`` tokens, with ``draft_chains(forward_pass,
        slots)``; None: it does not run here."""

    @staticmethod
    def draft_module(
        parts: Any, lm: Any, dtype: torch.dtype, shape: Any, ids: Tensor | None = None
    ) -> Any | None:
        """A ``DraftModule``; None: its target does not run here, or the module cannot.

        Args:
            parts: ``ModuleParts``, whose weights are copied.
            lm: the target.
            dtype: of weights and entries.
            shape: ``LayerShape`` of its layer's keys and values.
            ids: see ``DraftNetwork``.
        """

    @staticmethod
    def mtp_module(module: nn.Module, lm: Any) -> Any | None:
        """The ``MtpDraftModule`` of an ``MtpModule``; None: as of ``draft_module``."""

    @staticmethod
    def draft_heads(heads: nn.Module, lm: Any) -> Any | None:
        """The ``RankingHeads`` of ``MedusaHeads``; None: the target does not run here."""

    @staticmethod
    def beam_search(head: nn.Module, lm: Any) -> Any | None:
        """The ``BeamSearcher`` of a ``ReDrafterHead``; None: the target does not run here."""

    @staticmethod
    def sampler() -> NativeSampling | None:
        """What samples from logits on a CPU; None: torch does, as there is no library."""

    @staticmethod
    def module_forward(lm: Any) -> Any | None:
        """The forward of a module of transformers, whose network's ``decoder`` runs here, in one
        call; None: its module calls what is around these layers.
        """

    @staticmethod
    def step_runners() -> tuple[Any, ...]:
        """The classes of ``StepRunner`` that make several steps in one call."""
        ...


class GraphBackend(Protocol):
    """Kernels of small operations, and graphs of steps and drafts."""

    @staticmethod
    def fused_ops() -> ModuleType:
        """The kernels of ``model.fused_ops``, by name."""
        ...

    @staticmethod
    def recurrence(modules: Sequence[nn.Module]) -> Recurrence | None:
        """As of :class:`NativeBackend`."""
        ...

    @staticmethod
    def reads_pages(lm: Any) -> bool:
        """Whether a kernel attends over pages in place."""
        ...

    @staticmethod
    def why_no_graphs(lm: Any) -> tuple[str, str] | None:
        """Why forwards cannot be captured, and what to do; None: it may be possible."""

    @staticmethod
    def runner(lm: Any, storage: Any, max_tokens: int | None) -> Any:
        """The ``ModelRunner`` of steps of at most ``max_tokens`` by graphs; None: of as many as
        graphs may have."""

    @staticmethod
    def draft_graphs(runner: Any) -> Any:
        """``DraftGraphs`` of one builder's chains and trees; the ``DraftModuleRunner`` has
        ``graphs``."""

    @staticmethod
    def module_graphs(runners: Sequence[Any]) -> Any:
        """The same of several MTP modules, as ``ModuleGraphs``."""

    @staticmethod
    def step_runner() -> Any:
        """The ``StepRunner`` of steps with drafts, without a wait between them."""


class ParallelBackend(Protocol):
    """The processes of a model that is cut over ranks."""

    @staticmethod
    def refusal(config: Any, size: int) -> str | None:
        """Why a model cannot be cut into ``size`` shards, by its config; None: it can."""

    @staticmethod
    def starting(
        args: Any, model_dir: Any, device: torch.device, launcher: Any | None = None
    ) -> AbstractContextManager[Any]:
        """The processes of the other ranks, which end if the block fails; a ``Launcher`` starts
        them elsewhere than on this machine.
        """
        ...

    @staticmethod
    def join(ranks: Any, lm: Any, args: Any, model_dir: Any, num_threads: int) -> None:
        """Let the other ranks load what rank 0 has loaded, and connect its network with theirs."""

    @staticmethod
    def runner(ranks: Any, lm: Any, page_size: int) -> Any:
        """The ``ModelRunner`` of rank 0's shard, over one page, and with it of the others."""


def cpu() -> type[NativeBackend]:
    """The C++ forward."""
    backend: type[NativeBackend] = BACKENDS.resolve("cpu")
    return backend


def cuda() -> type[GraphBackend]:
    """Kernels and graphs of NVIDIA GPUs."""
    backend: type[GraphBackend] = BACKENDS.resolve("cuda")
    return backend


def tensor_parallel() -> type[ParallelBackend]:
    """Several processes."""
    backend: type[ParallelBackend] = BACKENDS.resolve("tensor_parallel")
    return backend
