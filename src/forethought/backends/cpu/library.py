"""Compiles ``forward.cpp`` for this processor, keeps the result on disk, and loads it.

The first start on a machine takes some ten seconds for it. Later ones load the library from a
directory of ``cache``. It is compiled again when the source, its headers, the compiler or the
processor changes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path

from forethought.backends.cpu.cache import cache_directories, load_or_compile
from forethought.errors import ModelError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("forward.cpp")
SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
"""With the headers that it includes."""
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-pthread", "-shared", "-fPIC", "-Wno-psabi"),
    "--param=avoid-fma-max-bits=0",
)
"""GCC, tuned for AMD's Zen, multiplies and adds in two instructions where it finds a chain of them:
in some instances of a template and not in others, which would then round differently."""
NO_COMPILER = "there is no C++ compiler (c++, g++ or clang++) on the path"
FIX = "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"
MAX_COMPILE_SECONDS = 300
"""Of processor time, of each process of the compiler: a busy machine may take longer."""


class LinearStruct(ctypes.Structure):
    """``Linear`` of ``structures.h``."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("float32_input", ctypes.c_int32),
    ]


class ExpertsStruct(ctypes.Structure):
    """``Experts`` of ``structures.h``."""

    _fields_ = [
        ("router", ctypes.POINTER(LinearStruct)),
        ("gate_up", ctypes.POINTER(LinearStruct)),
        ("down", ctypes.POINTER(LinearStruct)),
        ("num_experts", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("renormalise", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class JoinStruct(ctypes.Structure):
    """``Join`` of ``structures.h``."""

    _fields_ = [
        ("token_norm", ctypes.c_void_p),
        ("state_norm", ctypes.c_void_p),
        ("project", ctypes.POINTER(LinearStruct)),
        ("state_first", ctypes.c_int32),
        ("zero_first", ctypes.c_int32),
        ("norm_residual", ctypes.c_int32),
        ("feeds_normed", ctypes.c_int32),
    ]


class LayerStruct(ctypes.Structure):
    """``Layer`` of ``structures.h``."""

    _fields_ = [
        ("input_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("output_norm", ctypes.c_void_p),
        ("rotary", ctypes.c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("experts", ctypes.POINTER(ExpertsStruct)),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int32),
    ]


class ModelStruct(ctypes.Structure):
    """``Model`` of ``structures.h``."""

    _fields_ = [
        ("layers", ctypes.POINTER(LayerStruct)),
        ("final_norm", ctypes.c_void_p),
        ("head", ctypes.POINTER(LinearStruct)),
        ("embedding", ctypes.POINTER(LinearStruct)),
        ("table", ctypes.c_void_p),
        ("join", ctypes.POINTER(JoinStruct)),
        ("table_type", ctypes.c_int32),
        ("num_embeddings", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("kv_type", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("head_norm_eps", ctypes.c_float),
        ("logit_cap", ctypes.c_float),
        ("score_cap", ctypes.c_float),
        ("embed_scale", ctypes.c_float),
    ]


class RowStruct(ctypes.Structure):
    """``Row`` of ``structures.h``."""

    _fields_ = [
        ("first_slot", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("visible", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("prefix", ctypes.c_int64),
        ("seen_from", ctypes.c_int64),
        ("num_recent", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
    ]


class CallStruct(ctypes.Structure):
    """``Call`` of ``structures.h``."""

    _fields_ = [
        ("token_ids", ctypes.c_void_p),
        ("entering", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("logit_index", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("last_normed", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("num_logits", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("max_length", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    ]


class ChainsStruct(ctypes.Structure):
    """``Chains`` of ``structures.h``."""

    _fields_ = [
        ("known", ctypes.POINTER(CallStruct)),
        ("slots", ctypes.c_void_p),
        ("num_rows", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("num_ends", ctypes.c_void_p),
        ("drafted", ctypes.c_void_p),
        ("num_levels", ctypes.c_int32),
        ("num_choices", ctypes.c_int32),
        ("last_position", ctypes.c_int32),
    ]


class BeamsStruct(ctypes.Structure):
    """``Beams`` of ``structures.h``."""

    _fields_ = [
        ("recur", ctypes.POINTER(LinearStruct)),
        ("enter", ctypes.POINTER(LinearStruct)),
        ("head", ctypes.POINTER(LinearStruct)),
        ("contexts", ctypes.c_void_p),
        ("roots", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int32),
        ("num_roots", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("length", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("min_logprob", ctypes.c_float),
    ]


class TreesStruct(ctypes.Structure):
    """``Trees`` of ``structures.h``."""

    _fields_ = [
        ("known", ctypes.POINTER(CallStruct)),
        ("slots", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("depth", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("total", ctypes.c_int32),
        ("last_position", ctypes.c_int32),
    ]


class ChainRowStruct(ctypes.Structure):
    """``ChainRow`` of ``structures.h``."""

    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("first_slot", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("draft_len", ctypes.c_int64),
        ("num_left", ctypes.c_int64),
        ("num_ends", ctypes.c_int64),
    ]


class TargetStatesStruct(ctypes.Structure):
    """``TargetStates`` of ``structures.h``."""

    _fields_ = [
        ("stored", ctypes.c_void_p),
        ("layers", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("entry", ctypes.POINTER(LinearStruct)),
        ("num_layers", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("eps", ctypes.c_float),
    ]


class ChainStepsStruct(ctypes.Structure):
    """``ChainSteps`` of ``structures.h``."""

    _fields_ = [
        ("draft", ctypes.POINTER(ModelStruct)),
        ("known", ctypes.POINTER(CallStruct)),
        ("target", ctypes.POINTER(CallStruct)),
        ("rows", ctypes.POINTER(ChainRowStruct)),
        ("states", ctypes.POINTER(TargetStatesStruct)),
        ("ids", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("draft_seconds", ctypes.POINTER(ctypes.c_double)),
        ("num_rows", ctypes.c_int32),
        ("num_steps", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("num_choices", ctypes.c_int32),
        ("last_position", ctypes.c_int32),
        ("num_known", ctypes.c_int32),
        ("seen_from", ctypes.c_int32),
        ("stores_drafted", ctypes.c_int32),
    ]


STRUCTURES = (
    LinearStruct,
    ExpertsStruct,
    JoinStruct,
    LayerStruct,
    ModelStruct,
    RowStruct,
    CallStruct,
    ChainsStruct,
    BeamsStruct,
    TreesStruct,
    ChainRowStruct,
    TargetStatesStruct,
    ChainStepsStruct,
)


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The library for this processor; it is compiled if it has not been.

    Raises:
        ModelError: there is no C++ compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ModelError(
            "the native forward cannot be compiled", NO_COMPILER, f'{FIX}, or set forward="torch"'
        )
    try:
        library = load_or_compile(library_name(compiler), partial(compile_library, compiler))
    except OSError as error:
        raise ModelError(
            "the native forward cannot be loaded",
            f"neither from its cache nor from a temporary directory ({error})",
            'Set FORETHOUGHT_CACHE to a directory that is not mounted noexec, or forward="torch"',
        ) from error
    library.scratch_size.restype = ctypes.c_int64
    sizes = (ctypes.c_int32 * len(STRUCTURES))()
    library.structure_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(structure) for structure in STRUCTURES]
    return library


@cache
def warn_unavailable(reason: str, fix: str = FIX) -> None:
    """Warn that torch computes in place of the native forward, once in a process for each reason.

    Args:
        reason: why.
        fix: what to do about it.
    """
    logger.warning(
        "no native forward: %s. torch computes in its place, which takes about 2 to 3 times as "
        "long. %s",
        reason,
        fix,
    )


def uses_amx() -> bool:
    """Whether the library multiplies bf16 by AMX: compiler, processor and system know it.

    Raises:
        ModelError: as ``load_library``.
    """
    return bool(load_library().uses_amx())


def rounds_inputs() -> bool:
    """Whether inputs of weights in bf16 are rounded to it: AMX or AVX-512 multiplies such pairs.

    Raises:
        ModelError: as ``load_library``.
    """
    return bool(load_library().rounds_inputs())


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ on the path."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def library_name(compiler: str) -> str:
    """The file name of the library for this source, compiler and processor."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    for part in (*FLAGS, _version(compiler), _processor()):
        digest.update(part.encode() + b"\0")
    return f"forward-{digest.hexdigest()[:16]}.so"


def library_path(compiler: str) -> Path:
    """Where the library for this source, compiler and processor is stored, if that is possible."""
    return cache_directories()[0] / library_name(compiler)


def compile_library(compiler: str, path: Path) -> None:
    """Compile to a file.

    Raises:
        ModelError: the compiler fails.
    """
    # A warning, as it is shown where nobody has configured logging: the start waits for it.
    logger.warning("compiling the native forward for this processor with %s, once", compiler)
    began = time.monotonic()
    limit = f'ulimit -t {MAX_COMPILE_SECONDS} 2>/dev/null; exec "$0" "$@"'
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(path)]
    try:
        subprocess.run(
            ["/bin/sh", "-c", limit, *command],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        printed = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        raise ModelError(
            "the native forward cannot be compiled",
            f"{compiler} failed: {_first_error(printed) or error}",
            'Install a working compiler, or set forward="torch"',
        ) from error
    logger.info("compiled in %.1f s", time.monotonic() - began)


def _first_error(printed: str) -> str:
    """Of what a compiler has printed; with headers other lines come before it."""
    lines = printed.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "")


def _version(compiler: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        printed = subprocess.run([compiler, "--version"], capture_output=True, text=True)
        return f"{compiler} {printed.stdout}"
    return compiler


def _processor() -> str:
    """What ``-march=native`` depends on."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("vendor_id", "cpu family", "model", "flags", "Features")
        found = {line.split(":")[0].strip(): line for line in lines if line.startswith(wanted)}
        return "\n".join(found.values())
    return f"{platform.machine()} {platform.processor()}"
