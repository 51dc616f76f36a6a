"""A GGUF file, or a series of split files: its metadata, and where each tensor is.

Only the header is read; tensors are views of the mapped file (:meth:`GgufFile.raw`). Nothing in a
header is believed: each count, length and offset is compared with what the file holds before
anything of that size is made, so that a damaged or hostile file costs a ModelError and no memory.

A header is: the magic, a version, the numbers of tensors and of metadata; the metadata, as keys and
typed values; the infos of the tensors, as names, sizes, types and offsets; padding. Numbers are
little-endian, and a string is its length in bytes (uint64) and UTF-8.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from forethought.errors import ModelError
from forethought.gguf.block_type import BlockType

MAGIC = b"GGUF"
_LFS_HEAD = b"version https://git-lfs"
_VERSIONS = (2, 3)
_BIG_ENDIAN = tuple(int.from_bytes(version.to_bytes(4, "big"), "little") for version in (1, 2, 3))
_NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Type of a value -> format of ``struct``."""
_STRING, _ARRAY = 8, 9
_UINT32, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")
_OTHER_TYPES = {
    number: name
    for name, number in (
        *(("Q4_2", 4), ("Q4_3", 5), ("Q8_1", 9), ("Q8_K", 15), ("I8", 24), ("I16", 25)),
        *(("I32", 26), ("I64", 27), ("F64", 28), ("Q4_0_4_4", 31), ("Q4_0_4_8", 32)),
        *(("Q4_0_8_8", 33), ("IQ4_NL_4_4", 36), ("NVFP4", 40)),
    )
}
"""Types of tensors that ``BlockType`` does not have, by number, for messages."""
_MAX_HEADER = 1 << 28
_MAX_ELEMENTS = 1 << 22
"""Of one array: sixteen times the largest vocabularies."""
_MAX_METADATA, _MAX_TENSORS = 1 << 16, 1 << 20
_MIN_METADATA_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
_MAX_DIMENSIONS = 4
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file.

    Attributes:
        name: in the file.
        type: of its blocks.
        shape: outermost dimension first, as of torch.
        path: of the file that has it.
        offset: of its first byte in that file.
        num_bytes: of its blocks.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int

    @property
    def num_weights(self) -> int:
        """Of all blocks."""
        return math.prod(self.shape)


class StringArray(Sequence[str]):
    """An array of strings of a header, decoded when one of them is first asked for.

    Args:
        data: lengths and bytes of the strings, in turns, which have been checked.
        count: of the strings.
    """

    def __init__(self, data: bytes, count: int) -> None:
        self._data, self._count = data, count
        self._strings: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if self._strings is None:
            self._strings = self._decoded()
        return self._strings[index]

    def _decoded(self) -> list[str]:
        data, unpack, position, strings = self._data, _LENGTH.unpack_from, 0, []
        for _ in range(self._count):
            start = position + 8
            position = start + unpack(data, position)[0]
            strings.append(data[start:position].decode(errors="replace"))
        return strings


class GgufFile:
    """The metadata and the tensors of a model in one or more GGUF files.

    Attributes:
        paths: of the files, the first of a split series first.
        metadata: by key; arrays are tuples of numbers, or a StringArray.
        tensors: by name, in the order of the files.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        metadata: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        buffers: Mapping[Path, mmap.mmap],
    ) -> None:
        self.paths, self.metadata, self.tensors = tuple(paths), dict(metadata), dict(tensors)
        self._buffers = dict(buffers)

    @classmethod
    def open(cls, paths: Path | Sequence[Path]) -> GgufFile:
        """Read the headers of a file, or of all files of a split series in their order.

        Raises ModelError for a file that cannot be read or is not whole, for a tensor of an
        unknown type, and for files that are no series.
        """
        files = [paths] if isinstance(paths, Path) else list(paths)
        headers = [_Header.read(path) for path in files]
        _check_series(headers)
        tensors: dict[str, TensorInfo] = {}
        for header in headers:
            for name, info in header.tensors.items():
                if name in tensors:
                    raise _broken(header.path, f"it has {name}, as {tensors[name].path.name} has")
                tensors[name] = info
        buffers = {header.path: header.buffer for header in headers}
        return cls(files, headers[0].metadata, tensors, buffers)

    @property
    def path(self) -> Path:
        """The first file, which messages name."""
        return self.paths[0]

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor in the mapped file, valid for as long as they are referred to. What
        is written to them, which torch takes no bytes without, changes no file.
        """
        info = self.tensors[name]
        return memoryview(self._buffers[info.path])[info.offset : info.offset + info.num_bytes]

    def give_back(self) -> None:
        """Let the system take back the memory of the mapped files, which is read again as it is
        needed.
        """
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            for buffer in self._buffers.values():
                buffer.madvise(mmap.MADV_DONTNEED)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    try:
        with path.open("rb") as stream:
            return path.is_file() and stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def series_of(path: Path) -> list[Path]:
    """All files of the split series that a file is part of, by its name; itself if it is whole.

    Raises ModelError with the names of those that are missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count:
        raise _broken(path, f"its name says part {int(match[2])} of {count}")
    files = [
        path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{path.suffix}")
        for number in range(1, count + 1)
    ]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise _broken(
            path,
            f"it is one of {count} parts, and there is no {missing[0]}{more} beside it",
            "Download all parts into one directory",
        )
    return files


def _check_series(headers: Sequence[_Header]) -> None:
    """Refuse files that say that they are other parts, or parts of another series."""
    for number, header in enumerate(headers):
        count, own_number = header.integer("split.count", 1), header.integer("split.no", number)
        if max(count, 1) != len(headers) or own_number != number:
            raise _broken(
                header.path,
                f"its header says part {own_number + 1} of {count}, and it is given as part "
                f"{number + 1} of {len(headers)}",
                "Give the first part, with all parts beside it under their own names",
            )
    num_tensors = sum(len(header.tensors) for header in headers)
    expected = headers[0].integer("split.tensors.count", num_tensors)
    if expected != num_tensors:
        why = f"its parts have {num_tensors} tensors, and its header says {expected}"
        raise _broken(headers[0].path, why)


class _Header:
    """The header of one file, read from its first byte to the infos of the tensors.

    Args:
        path: of the file.
        buffer: the mapped file.
    """

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer = path, buffer
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._position, self._end = 0, min(len(buffer), _MAX_HEADER)

    @classmethod
    def read(cls, path: Path) -> _Header:
        """Of a file; raises ModelError."""
        try:
            with path.open("rb") as stream:
                head = stream.read(len(_LFS_HEAD))
                if head == _LFS_HEAD:
                    why = "it is a pointer of Git LFS to a file that was not fetched"
                    raise _broken(path, why, f"Run 'git lfs pull' in {path.parent}")
                if head[: len(MAGIC)] != MAGIC:
                    raise _broken(path, "it does not begin as a GGUF file")
                header = cls(path, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            raise _broken(path, str(getattr(error, "strerror", None) or error)) from error
        header._read()
        return header

    def integer(self, key: str, default: int) -> int:
        """A whole number of the metadata; raises ModelError if it is something else."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise _broken(self.path, f"its {key} is {value!r:.40}, not a whole number")
        return value

    def _read(self) -> None:
        self._position = len(MAGIC)
        self._check_version(self._unpack(_UINT32))
        num_tensors, num_metadata = self._unpack(_LENGTH), self._unpack(_LENGTH)
        self._check_count(num_metadata, _MAX_METADATA, _MIN_METADATA_BYTES, "metadata")
        self._check_count(num_tensors, _MAX_TENSORS, _MIN_TENSOR_BYTES, "tensors")
        for _ in range(num_metadata):
            key = self._string()
            if key in self.metadata:
                raise _broken(self.path, f"it has {key:.60} twice")
            self.metadata[key] = self._value(key, self._unpack(_UINT32))
        infos = [self._info() for _ in range(num_tensors)]
        self._place(infos)

    def _check_version(self, version: int) -> None:
        if version in _BIG_ENDIAN:
            why, fix = "it is big-endian", "Convert the model to a little-endian file"
        elif version not in _VERSIONS:
            why = f"it is of version {version}; {_VERSIONS[0]} and {_VERSIONS[1]} can be read"
            fix = "Convert the model again"
        else:
            return
        raise _broken(self.path, why, fix)

    def _check_count(self, count: int, most: int, num_bytes: int, what: str) -> None:
        """Refuse a count of things that take ``num_bytes`` each, which cannot be."""
        if count > most or count * num_bytes > self._end - self._position:
            raise self._cut_short(f"it says that it has {count:,} {what}")

    def _unpack(self, kind: struct.Struct) -> Any:
        start, self._position = self._position, self._position + kind.size
        if self._position > self._end:
            raise self._cut_short("its header does not end")
        return kind.unpack_from(self.buffer, start)[0]

    def _string(self) -> str:
        length = self._unpack(_LENGTH)
        start, self._position = self._position, self._position + length
        if self._position > self._end:
            raise self._cut_short(f"it has a string of {length:,} bytes in its header")
        return self.buffer[start : self._position].decode(errors="replace")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key, self._unpack(_UINT32), self._unpack(_LENGTH))
        if kind in _NUMBERS:
            return self._unpack(struct.Struct(f"<{_NUMBERS[kind]}"))
        raise _broken(self.path, f"its {key:.60} is of the unknown type {kind}")

    def _array(self, key: str, kind: int, count: int) -> tuple[Any, ...] | StringArray:
        if kind != _STRING and kind not in _NUMBERS:
            what = "an array of arrays" if kind == _ARRAY else f"of the unknown type {kind}"
            raise _broken(self.path, f"its {key:.60} is {what}")
        size = 8 if kind == _STRING else struct.calcsize(f"<{_NUMBERS[kind]}")
        self._check_count(count, _MAX_ELEMENTS, size, f"elements in {key:.60}")
        start = self._position
        if kind == _STRING:
            self._skip_strings(count)
            return StringArray(self.buffer[start : self._position], count)
        self._position += count * size
        return struct.unpack_from(f"<{count}{_NUMBERS[kind]}", self.buffer, start)

    def _skip_strings(self, count: int) -> None:
        buffer, unpack, position = self.buffer, _LENGTH.unpack_from, self._position
        last = self._end - 8
        for _ in range(count):
            if position > last:
                raise self._cut_short("its header does not end")
            position += 8 + unpack(buffer, position)[0]
        self._position = position
        if position > self._end:
            raise self._cut_short("its header does not end")

    def _info(self) -> TensorInfo:
        """The next tensor; its offset is counted from the first tensor's byte."""
        name, num_dimensions = self._string(), self._unpack(_UINT32)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _broken(self.path, f"its {name:.60} has {num_dimensions:,} dimensions")
        sizes = [self._unpack(_LENGTH) for _ in range(num_dimensions)]
        number, offset = self._unpack(_UINT32), self._unpack(_LENGTH)
        kind = BlockType.numbered(number)
        if kind is None:
            of_type = _OTHER_TYPES.get(number, f"number {number}")
            raise _broken(
                self.path,
                f"its {name:.60} is of the type {of_type}, which cannot be read",
                "Choose a file with tensors of other types, such as Q4_K_M or Q8_0",
            )
        if 0 in sizes or sizes[0] % kind.num_weights:
            shape = " x ".join(map(str, sizes))
            raise _broken(self.path, f"its {name:.60} of {shape} has no whole blocks ({kind.name})")
        num_bytes = math.prod(sizes[1:]) * kind.row_bytes(sizes[0])
        return TensorInfo(name, kind, tuple(reversed(sizes)), self.path, offset, num_bytes)

    def _place(self, infos: Sequence[TensorInfo]) -> None:
        """Keep the tensors with their offsets in the file, each of which has its own bytes."""
        alignment = self.integer("general.alignment", 32)
        if alignment <= 0 or alignment & (alignment - 1) or alignment > _MAX_HEADER:
            raise _broken(self.path, f"its general.alignment is {alignment}, not a power of two")
        start, size = -(-self._position // alignment) * alignment, len(self.buffer)
        for info in infos:
            offset, end = start + info.offset, start + info.offset + info.num_bytes
            if info.offset % alignment:
                raise _broken(
                    self.path, f"its {info.name:.60} begins at no multiple of {alignment}"
                )
            if end > size:
                why = f"it has {size:,} bytes, and its {info.name:.60} ends at {end:,}"
                raise _broken(self.path, f"it is cut short: {why}", _AGAIN)
            if info.name in self.tensors:
                raise _broken(self.path, f"it has {info.name:.60} twice")
            self.tensors[info.name] = TensorInfo(
                info.name, info.type, info.shape, info.path, offset, info.num_bytes
            )
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        end, last = 0, ""
        for info in sorted(self.tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise _broken(self.path, f"its {last:.60} and {info.name:.60} overlap")
            end, last = info.offset + info.num_bytes, info.name

    def _cut_short(self, why: str) -> ModelError:
        return _broken(self.path, f"it is cut short or damaged: {why}", _AGAIN)


_AGAIN = "Download or convert it again"


def _broken(path: Path, why: str, fix: str = "") -> ModelError:
    return ModelError(f"cannot read the GGUF file {path}", why, fix or _AGAIN)
