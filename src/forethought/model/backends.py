"""The table of backends: what computes beside plain torch, which is the reference.

A backend is a folder of ``forethought.backends``, with a class that has all that it offers. The
engine, its models and its drafters find it here and never import it::

    cpu               layers, drafts and whole steps in C++
    cuda              Triton kernels and CUDA graphs
    tensor_parallel   a model cut over processes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forethought.config.registry import Registry

if TYPE_CHECKING:
    from forethought.backends.cpu.backend import CpuBackend
    from forethought.backends.cuda.backend import CudaBackend
    from forethought.backends.tensor_parallel.backend import TensorParallelBackend

BACKENDS = Registry(
    "backend",
    {
        "cpu": "forethought.backends.cpu.backend:CpuBackend",
        "cuda": "forethought.backends.cuda.backend:CudaBackend",
        "tensor_parallel": "forethought.backends.tensor_parallel.backend:TensorParallelBackend",
    },
)


def cpu() -> type[CpuBackend]:
    """The C++ forward."""
    backend: type[CpuBackend] = BACKENDS.resolve("cpu")
    return backend


def cuda() -> type[CudaBackend]:
    """Kernels and graphs of NVIDIA GPUs."""
    backend: type[CudaBackend] = BACKENDS.resolve("cuda")
    return backend


def tensor_parallel() -> type[TensorParallelBackend]:
    """Several processes."""
    backend: type[TensorParallelBackend] = BACKENDS.resolve("tensor_parallel")
    return backend
