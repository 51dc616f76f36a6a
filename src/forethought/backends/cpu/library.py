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
