"""Files that are whole whenever they are read: the older content, or all of the newer one."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forethought.errors import FileError, UsageError


def check_folder(folder: Path) -> None:
    """Refuse a folder that no file can be made in, before the work whose results go there begins.

    Of a folder that is not there yet, the nearest parent is tried. Nothing is made. Raises
    UsageError.
    """
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
            file.write(b"\n")  # a full disk takes files without content
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"cannot write to {folder}", why, "Give another folder") from error


def check_file(path: Path, kind: str) -> None:
    """Refuse the name of a file that could not be written in the end; see ``check_folder``.

    Raises UsageError if its folder is missing or read-only, or the name is that of a folder.
    """
    if not path.parent.is_dir():
        why, fix = "there is no such folder", "Make it first"
    elif path.is_dir():
        why, fix = "it is a folder", "Give the name of a file"
    else:
        check_folder(path.parent)
        return
    raise UsageError(f"cannot write the {kind} {path}", why, fix)


def save_text(path: str | Path, text: str, kind: str) -> None:
    """Write ``text`` in UTF-8, in the place of what is there; see ``saving``. A lone surrogate,
    which UTF-8 cannot hold, becomes its escape, as JSON writes it.
    """
    with saving(path, kind) as file:
        file.write_bytes(text.encode("utf-8", "backslashreplace"))


@contextmanager
def saving(path: str | Path, kind: str) -> Iterator[Path]:
    """The name under which to write a file, in the folder of ``path``, whose place it then takes.

    Where the block or the disk fails, what was there is as it was. What is no ordinary file, such
    as a pipe, is written directly.

    Raises FileError, which calls the file by its ``kind``, if it cannot be written.
    """
    try:
        target = Path(path).resolve()  # a link stays one
        if target.exists() and not target.is_file() and not target.is_dir():
            yield target
            return
        draft = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
        try:
            yield draft
            if target.exists():
                draft.chmod(target.stat().st_mode & 0o777)
            replace_file(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(
            f"cannot write the {kind} {path}",
            error.strerror or str(error),
            f"Check that {Path(path).parent} is a folder with enough space that can be written to",
        ) from error


def replace_file(written: Path, file: Path) -> None:
    """Give the finished file ``written`` the name ``file``, whatever has it now.

    Its bytes reach the disk before the name does: a machine that loses power leaves the older file
    or the newer one, and never an empty one.
    """
    for path in (written, file.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if path is written:
            os.replace(written, file)
