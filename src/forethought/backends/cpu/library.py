"""Loads ``forward.cpp``: compiled into the wheel, or for this processor at the first start.

A wheel that was built where there is a compiler brings one library for each of ``LEVELS``. Where
none of them fits the sources and the processor, the first start compiles one, which takes some ten
seconds, and later ones load it from a directory of ``cache``. It is compiled again when the source,
its headers, the compiler or the processor changes.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path

from forethought.backends.cpu.cache import cache_directories, load_or_compile
from forethought.errors import ModelError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpp" / "forward.cpp"
SOURCES = (SOURCE, *sorted(SOURCE.parent.rglob("*.h")))
"""With the headers that it includes."""
FLAGS = (
    *("-std=c++17", "-O3", "-pthread", "-shared", "-fPIC", "-Wno-psabi"),
    "--param=avoid-fma-max-bits=0",
)
"""GCC, tuned for AMD's Zen, multiplies and adds in two instructions where it finds a chain of them:
in some instances of a template and not in others, which would then round differently."""
NATIVE = ("-march=native",)
PREBUILT = Path(__file__).with_name("prebuilt")
"""Where the wheel has its libraries."""
NO_COMPILER = (
    "this installation has no library for this processor, and there is no C++ compiler (c++, g++ "
    "or clang++) on the path"
)
FIX = "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"
MAX_COMPILE_SECONDS = 300
"""Of processor time, of each process of the compiler: a busy machine may take longer."""
PROGRESS_SECONDS = 10
"""Between lines that say that it is being compiled."""


@dataclass(frozen=True, slots=True)
class Level:
    """Instruction sets that a library is compiled for.

    Attributes:
        name: of the level.
        flags: of the compiler.
        features: that a processor needs, as ``/proc/cpuinfo`` names them.
    """

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AMX = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16")
LEVELS = (
    Level("amx", _AMX, _V4 | {"avx512_bf16", "avx512_vnni"}),
    Level("x86-64-v4", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
)
"""Of the libraries in the wheel, the highest first. That of AMX asks for it when it runs, and
multiplies bf16 by AVX-512 where there is none (Zen 4)."""


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The library for this processor, prebuilt or compiled.

    Raises:
        ModelError: there is none prebuilt, and there is no C++ compiler, or it fails.
    """
    library = _load_prebuilt() or _load_compiled()
    library.scratch_size.restype = ctypes.c_int64
    library.open_experts.restype = ctypes.c_void_p
    library.open_layers.restype = ctypes.c_void_p
    library.checksum.restype = ctypes.c_int64
    library.experts_scratch_size.restype = ctypes.c_int64
    library.uniform_sample.restype = ctypes.c_double
    address, number, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
    library.linear.argtypes = (address, address, number, address, number)
    library.mlp.argtypes = (address, address, number, address, address, number)
    library.norm_rows.argtypes = (address, address, number, number, real, address, number)
    library.checksum.argtypes = (ctypes.c_int64, address, ctypes.c_int64)
    library.uniform_sample.argtypes = (ctypes.c_int64,) * 3
    return library


def is_available() -> bool:
    """Whether there is a library for this processor, or a compiler that may make it."""
    return prebuilt_path() is not None or find_compiler() is not None


def prebuilt_path() -> Path | None:
    """The library of the highest level that this processor has, of the present sources."""
    if not PREBUILT.is_dir():
        return None
    features = set(_processor().get("flags", "").split())
    paths = [PREBUILT / prebuilt_name(level) for level in LEVELS if level.features <= features]
    return next((path for path in paths if path.exists()), None)


def _load_prebuilt() -> ctypes.CDLL | None:
    path = prebuilt_path()
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # the system is older than the one that it was built on
        logger.info("%s cannot be loaded: %s", path, error)
        return None


def _load_compiled() -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise ModelError(
            "the native forward cannot be compiled", NO_COMPILER, f'{FIX}, or set forward="torch"'
        )
    try:
        return load_or_compile(library_name(compiler), partial(compile_library, compiler))
    except OSError as error:
        raise ModelError(
            "the native forward cannot be loaded",
            f"neither from its cache nor from a temporary directory ({error})",
            'Set FORETHOUGHT_CACHE to a directory that is not mounted noexec, or forward="torch"',
        ) from error


@cache
def warn_unavailable(reason: str, fix: str = FIX) -> None:
    """Warn that torch computes in place of the native forward, once for each reason."""
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
    return next((path for name in names if name and (path := shutil.which(name))), None)


def library_name(compiler: str) -> str:
    """The file name of the library for this source, compiler and processor."""
    processor = "\n".join(_processor().values())
    return f"forward-{_digest(*NATIVE, _version(compiler), processor)}.so"


def prebuilt_name(level: Level) -> str:
    """The file name of the library for this source and a level."""
    return f"forward-{level.name}-{_digest(*level.flags)}.so"


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    for part in (*FLAGS, *parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def library_path(compiler: str) -> Path:
    """Where the library for this source, compiler and processor is stored, if that is possible."""
    return cache_directories()[0] / library_name(compiler)


def compile_library(compiler: str, path: Path, flags: Sequence[str] = NATIVE) -> None:
    """Compile to a file, for this processor or by other flags; ``ModelError`` if the compiler
    fails.
    """
    # A warning, as it is shown where nobody has configured logging: the start waits for it.
    logger.warning("compiling the native forward with %s, once: some ten seconds", compiler)
    limit = f'ulimit -t {MAX_COMPILE_SECONDS} 2>/dev/null; exec "$0" "$@"'
    command = [compiler, *flags, *FLAGS, str(SOURCE), "-o", str(path)]
    try:
        _run(["/bin/sh", "-c", limit, *command])
    except (OSError, subprocess.SubprocessError) as error:
        printed = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        raise ModelError(
            "the native forward cannot be compiled",
            f"{compiler} failed: {_first_error(printed) or error}",
            'Install a working compiler, or set forward="torch"',
        ) from error


def _run(command: Sequence[str]) -> None:
    """Run a compiler, and say from time to time that it still runs.

    Raises:
        OSError, CalledProcessError: it cannot run, or fails.
    """
    began = time.monotonic()
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=null, stdout=null, stderr=pipe) as process:
        try:
            while (printed := _printed(process)) is None:
                seconds = time.monotonic() - began
                logger.warning("the native forward is still being compiled, for %.0f s", seconds)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=printed)
    logger.info("compiled in %.1f s", time.monotonic() - began)


def _printed(process: subprocess.Popen[bytes]) -> bytes | None:
    """Its errors when it has ended; None: it has not after ``PROGRESS_SECONDS``."""
    with suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=PROGRESS_SECONDS)[1]
    return None


def _first_error(printed: str) -> str:
    """Of what a compiler has printed; with headers other lines come before it."""
    lines = printed.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "")


def _version(compiler: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        printed = subprocess.run([compiler, "--version"], capture_output=True, text=True)
        return f"{compiler} {printed.stdout}"
    return compiler


def _processor() -> dict[str, str]:
    names = ("vendor_id", "cpu family", "model", "flags", "Features")
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = (line.partition(":") for line in lines if line.startswith(names))
        return {name.strip(): value.strip() for name, _, value in facts}
    return {"machine": platform.machine(), "processor": platform.processor()}
