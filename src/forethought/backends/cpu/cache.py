"""Directories that compiled libraries are stored in and loaded from.

A library is loaded only from a directory that no other user can write, and only if its SHA-256 is
the one that was stored beside it: ``dlopen`` of a truncated file ends the process by SIGBUS at its
first page that is missing. One process compiles at a time; the others wait for its result.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_LIBRARIES = 8
"""In a directory: of versions, compilers and processors. The least recently loaded are removed."""
LOCK, DIGEST = ".lock", ".sha256"


def cache_directories() -> list[Path]:
    """Where libraries may be stored, the preferred directory first.

    ``$FORETHOUGHT_CACHE`` or ``~/.cache/forethought``, where there is a home directory; then one of
    this user among the temporary files.
    """
    root = os.environ.get("FORETHOUGHT_CACHE")
    home = os.path.expanduser("~")  # without a home it is not absolute
    roots = [Path(root)] if root else []
    if not root and os.path.isabs(home):
        roots.append(Path(home, ".cache", "forethought"))
    with suppress(FileNotFoundError):  # there are none
        roots.append(Path(tempfile.gettempdir(), f"forethought-{os.geteuid()}"))
    return [root / "native" for root in roots]


def load_or_compile(name: str, compile_to: Callable[[Path], None]) -> ctypes.CDLL:
    """The library ``name`` of the first directory that it can be stored in and loaded from.

    Args:
        name: of the file; it identifies the sources of the library.
        compile_to: compiles it to a path.

    Raises:
        OSError: there is no such directory.
        ModelError: of ``compile_to``.
    """
    for directory in cache_directories():
        try:
            with LibraryDirectory.opened(directory) as libraries:
                return libraries.load_or_compile(name, compile_to)
        except OSError as error:
            level = logging.INFO if error.errno else logging.WARNING  # it is not safe
            logger.log(level, "no library is stored in %s: %s", directory, error)
    with (  # for this process alone
        tempfile.TemporaryDirectory(prefix="forethought-") as private,
        LibraryDirectory.opened(Path(private)) as libraries,
    ):
        return libraries.load_or_compile(name, compile_to)


@dataclass(frozen=True, slots=True)
class LibraryDirectory:
    """A directory that is held open, so that none that replaces it is read.

    Attributes:
        path: of the directory.
        descriptor: of the same.
    """

    path: Path
    descriptor: int

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[LibraryDirectory]:
        """The directory, which is made if there is none.

        Raises:
            OSError: it cannot be made, or another user can write it.
        """
        _make_private(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _check_private(os.fstat(descriptor), path)
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def load_or_compile(self, name: str, compile_to: Callable[[Path], None]) -> ctypes.CDLL:
        """The library, compiled if there is none or if it is damaged.

        Raises:
            OSError: it cannot be written or loaded here.
        """
        if not self.is_intact(name):
            with self._locked():
                if not self.is_intact(name):  # another process may have compiled it meanwhile
                    self._remove_leftovers()
                    self._add(name, compile_to)
        with suppress(OSError):  # a directory of root
            os.utime(name, dir_fd=self.descriptor)  # for the order of ``_remove_leftovers``
        return ctypes.CDLL(str(self._real_path(name)))

    def is_intact(self, name: str) -> bool:
        """Whether the library is there, of this user or root, with the content that was stored."""
        try:
            content, digest = self._read(name), self._read(name + DIGEST)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("%s is compiled again: %s", self.path / name, error)
            return False
        if digest.split()[:1] == [hashlib.sha256(content).hexdigest().encode()]:
            return True
        logger.warning("%s is damaged and is compiled again", self.path / name)
        return False

    def _read(self, name: str) -> bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(name, flags, dir_fd=self.descriptor), "rb") as file:
            _check_private(os.fstat(file.fileno()), self.path / name)
            return file.read()

    def _add(self, name: str, compile_to: Callable[[Path], None]) -> None:
        """Compile the library beside its place, and move it there when it is whole."""
        with tempfile.TemporaryDirectory(prefix="compiling-", dir=self.path) as directory:
            compile_to(Path(directory, name))
            compiled, digest = (f"{Path(directory).name}/{file}" for file in (name, name + DIGEST))
            os.chmod(compiled, 0o755, dir_fd=self.descriptor)
            self._write(digest, f"{hashlib.sha256(self._read(compiled)).hexdigest()}  {name}\n")
            for path in (compiled, digest):
                fd = self.descriptor
                os.replace(path, path.split("/")[1], src_dir_fd=fd, dst_dir_fd=fd)

    def _write(self, name: str, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(name, flags, 0o644, dir_fd=self.descriptor), "w") as file:
            os.fchmod(file.fileno(), 0o644)  # whatever the umask is
            file.write(text)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process of this machine in; a process that ends gives the lock back."""
        import fcntl  # there is none on Windows

        with open(os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self.descriptor)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("another process compiles the native forward: waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove_leftovers(self) -> None:
        """Remove leftovers of interrupted compilations, and all but the latest libraries.

        The lock is held: nothing is being compiled here.
        """
        names = set(os.listdir(self.descriptor)) - {LOCK}
        stored = [name for name in names if name + DIGEST in names]
        latest = sorted(stored, key=self._loaded_at, reverse=True)[: MAX_LIBRARIES - 1]
        for name in names.difference(latest, [library + DIGEST for library in latest]):
            path = self._real_path(name)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(name, dir_fd=self.descriptor)

    def _loaded_at(self, name: str) -> int:
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime_ns

    def _real_path(self, name: str) -> Path:
        by_descriptor = Path(f"/proc/self/fd/{self.descriptor}")
        return (by_descriptor if by_descriptor.is_dir() else self.path) / name


def _make_private(directory: Path) -> None:
    """Make the directory and those above it that there are not, for this user alone."""
    for path in reversed((directory, *directory.parents)):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def _check_private(status: os.stat_result, path: Path) -> None:
    """Raise ``PermissionError`` if another user than root can write a file or directory."""
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write {path}")
