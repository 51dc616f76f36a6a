"""Compiled libraries are stored, checked and loaded; none that another user could change."""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from forethought.backends.cpu import cache, library
from forethought.backends.cpu.cache import LibraryDirectory, load_or_compile
from forethought.errors import ModelError

NAME = "forward-0123.so"
COMPILER = library.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> bytes:
    """Of a small library."""
    directory = tmp_path_factory.mktemp("small")
    source = directory / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    path = directory / "small.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", source, "-o", path], check=True)
    return path.read_bytes()


class Compilation:
    """Writes the library, and counts."""

    def __init__(self, content: bytes) -> None:
        self.content, self.count = content, 0

    def __call__(self, path: Path) -> None:
        self.count += 1
        path.write_bytes(self.content)


@pytest.fixture
def compilation(content: bytes) -> Compilation:
    return Compilation(content)


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path) -> list[Path]:
    """The directories of the cache, of this test alone: of the user, and of temporary files."""
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return cache.cache_directories()


def damaged(content: bytes) -> list[bytes]:
    return [content[: len(content) // 2], b"", content[:-1] + bytes([content[-1] ^ 1])]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_truncated_empty_or_changed_library_is_compiled_again(
    places, compilation, which: int
) -> None:
    load_or_compile(NAME, compilation)
    (places[0] / NAME).unlink()  # it is mapped
    (places[0] / NAME).write_bytes(damaged(compilation.content)[which])
    assert load_or_compile(NAME, compilation).answer() == 42
    assert compilation.count == 2
    assert (places[0] / NAME).read_bytes() == compilation.content


def test_a_library_without_its_digest_is_compiled_again(places, compilation) -> None:
    load_or_compile(NAME, compilation)
    (places[0] / (NAME + cache.DIGEST)).unlink()
    load_or_compile(NAME, compilation)
    load_or_compile(NAME, compilation)
    assert compilation.count == 2


def test_two_starts_at_once_compile_once(places, compilation) -> None:
    other_waits = threading.Event()

    class Waiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            other_waits.set()

    def compile_slowly(path: Path) -> None:
        assert other_waits.wait(60)
        compilation(path)

    handler = Waiting(logging.WARNING)
    cache.logger.addHandler(handler)
    try:
        starts = [
            threading.Thread(target=load_or_compile, args=(NAME, compile_slowly)) for _ in range(2)
        ]
        for start in starts:
            start.start()
        for start in starts:
            start.join()
    finally:
        cache.logger.removeHandler(handler)
    assert compilation.count == 1


def test_without_a_home_directory_temporary_files_hold_it(
    monkeypatch, tmp_path, compilation
) -> None:
    def no_such_user(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("FORETHOUGHT_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_such_user)
    for _ in range(2):
        assert load_or_compile(NAME, compilation).answer() == 42
    assert compilation.count == 1
    root = tmp_path / f"forethought-{os.geteuid()}"
    assert (root / "native" / NAME).exists()
    assert root.stat().st_mode & 0o777 == 0o700


def test_where_the_cache_cannot_be_made_temporary_files_hold_it(
    tmp_path, places, compilation
) -> None:
    (tmp_path / "cache").write_text("a file")
    load_or_compile(NAME, compilation)
    load_or_compile(NAME, compilation)
    assert compilation.count == 1
    assert (places[1] / NAME).exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_nothing_is_loaded_from_a_directory_that_others_can_write(
    places, compilation, caplog, mode: int
) -> None:
    for place in places:
        load_or_compile(NAME, compilation)
        place.chmod(mode)
        assert f"other users can write {place}" not in caplog.text
    for _ in range(2):  # in a directory of that process alone
        assert load_or_compile(NAME, compilation).answer() == 42
    assert compilation.count == 4
    assert all(f"other users can write {place}" in caplog.text for place in places)


@pytest.mark.parametrize("suffix", ["", cache.DIGEST])
def test_a_file_that_others_can_write_is_not_loaded(places, compilation, suffix: str) -> None:
    load_or_compile(NAME, compilation)
    (places[0] / (NAME + suffix)).chmod(0o666)
    load_or_compile(NAME, compilation)
    load_or_compile(NAME, compilation)
    assert compilation.count == 2


@pytest.mark.parametrize("change", [os.mkfifo, lambda path: path.symlink_to("/etc/hostname")])
def test_what_is_no_file_in_its_place_is_replaced(
    places, compilation, change: Callable[[Path], None]
) -> None:
    load_or_compile(NAME, compilation)
    (places[0] / NAME).unlink()
    change(places[0] / NAME)
    assert load_or_compile(NAME, compilation).answer() == 42


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_nothing_of_another_user_is_loaded(places, compilation, caplog) -> None:
    load_or_compile(NAME, compilation)
    os.chown(places[0] / NAME, 12345, 12345)
    load_or_compile(NAME, compilation)
    assert compilation.count == 2
    os.chown(places[0], 12345, 12345)
    load_or_compile(NAME, compilation)
    assert (places[1] / NAME).exists()
    assert f"{places[0]} belongs to another user" in caplog.text


def test_what_interrupted_compilations_and_old_versions_left_is_removed(
    places, compilation
) -> None:
    with LibraryDirectory.opened(places[0]) as libraries:
        for number in range(20):
            name = f"forward-{number:04}.so"
            libraries.load_or_compile(name, compilation)
            os.utime(places[0] / name, (number, number))
    for left_over in ("forward-ffff.so", "forward-fffe.so.sha256"):
        (places[0] / left_over).write_bytes(b"")
    (places[0] / "compiling-abcd").mkdir()
    (places[0] / "compiling-abcd" / NAME).write_bytes(b"half")
    load_or_compile(NAME, compilation)
    names = {NAME, *(f"forward-{number:04}.so" for number in range(13, 20))}
    files = names | {name + cache.DIGEST for name in names}
    assert {path.name for path in places[0].iterdir()} == files | {cache.LOCK}
    assert len(names) == cache.MAX_LIBRARIES


def test_a_compilation_that_fails_leaves_nothing(places, compilation) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ModelError("the native forward cannot be compiled")

    with pytest.raises(ModelError):
        load_or_compile(NAME, fail)
    assert [path.name for path in places[0].iterdir()] == [cache.LOCK]
    load_or_compile(NAME, compilation)


def test_compiling_is_said_and_limited_in_processor_time(monkeypatch, tmp_path, caplog) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\necho "error: limit $(ulimit -t)" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(library, "MAX_COMPILE_SECONDS", 123)
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError, match="error: limit 123"):
        library.compile_library(str(compiler), tmp_path / NAME)
    assert "compiling the native forward" in caplog.text


def test_a_long_compilation_is_said_to_go_on(monkeypatch, tmp_path, caplog) -> None:
    compiler, end = tmp_path / "c++", tmp_path / "end"
    os.mkfifo(end)
    compiler.write_text(f"#!/bin/sh\nread line < {end}\n")
    compiler.chmod(0o755)

    class Ending(logging.Handler):
        """Ends the compilation once it is said to go on."""

        def emit(self, record: logging.LogRecord) -> None:
            if "still being compiled" in record.getMessage() and end.exists():
                end.write_text("\n")
                end.unlink()

    handler = Ending(logging.WARNING)
    library.logger.addHandler(handler)
    monkeypatch.setattr(library, "PROGRESS_SECONDS", 0.01)
    try:
        library.compile_library(str(compiler), tmp_path / NAME)
    finally:
        library.logger.removeHandler(handler)
    assert "still being compiled" in caplog.text
