"""Attention over paged keys and values: the protocol and the table of backends."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from forethought.config.registry import Registry
from forethought.errors import ParameterError

BACKENDS = Registry(
    "attention",
    {
        "sdpa": "forethought.model.attention.sdpa:SdpaAttention",
        "triton": "forethought.backends.cuda.paged:PagedAttention",
        "reference": "forethought.reference.engine:ReferenceAttention",
    },
)


def create_backend(name: str, device: Any) -> Any:
    """The backend ``name``: a key of ``BACKENDS``, ``"module:Name"``, or ``auto``, see
    :func:`default_backend`.

    Raises UnknownNameError for another name, ParameterError if it needs another device or what is
    not installed.
    """
    if name == "auto":
        name = default_backend(device)
    if name == "triton" and (why := _why_no_triton(device)) is not None:
        raise ParameterError('attention="triton" is not possible here', *why)
    return BACKENDS.create(name)


def _why_no_triton(device: Any) -> tuple[str, str] | None:
    """Why its kernels cannot run on the device, and what to do; None: they can."""
    if find_spec("triton") is None:
        fix = "Install a torch with CUDA, which brings it, or leave the argument out"
        return "the package triton is not installed", fix
    if not str(device).startswith("cuda") and os.environ.get("TRITON_INTERPRET") != "1":
        fix = "Leave the argument out, or set TRITON_INTERPRET=1 to interpret them, very slowly"
        return f"its kernels run on CUDA, and the model on {device}", fix
    return None


def default_backend(device: Any) -> str:
    """The kernel over pages on CUDA, where triton is installed; elsewhere torch's attention."""
    on_gpu = str(device).startswith("cuda")
    return "triton" if on_gpu and find_spec("triton") is not None else "sdpa"
