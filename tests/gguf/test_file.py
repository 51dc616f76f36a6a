"""The header of a GGUF file is read as another implementation wrote it, and whatever is wrong with
a file is a ModelError, soon and without memory.
"""

from __future__ import annotations

import resource
import shutil
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf
from forethought.errors import ModelError
from forethought.gguf.block_type import BlockType
from forethought.gguf.file import GgufFile, StringArray, is_gguf, series_of

Type = gguf.GGMLQuantizationType
KEY = "tokenizer.ggml.tokens"


def write(path: Path, *, alignment: int | None = None, **tensors: tuple[np.ndarray, Type]) -> Path:
    """A file with metadata of every kind and the given tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_bool("a.bool", True)
    writer.add_int32("a.negative", -5)
    writer.add_uint64("a.long", 2**40)
    writer.add_float32("a.float", 0.5)
    writer.add_string("a.text", "grüße")
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_array(KEY, ["a", "", "\u00e9t\u00e9", "x" * 300])
    for name, (values, kind) in tensors.items():
        data = values if kind is Type.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.gguf"
    return write(path, first=(values(4, 64), Type.Q8_0), second=(values(7), Type.F32))


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    return str(caught.value)


def damaged(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    return refusal(path)


def test_metadata_and_tensors_are_those_that_were_written(plain: Path) -> None:
    file = GgufFile.open(plain)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["a.bool"] is True
    assert file.metadata["a.negative"] == -5
    assert file.metadata["a.long"] == 2**40
    assert file.metadata["a.float"] == 0.5
    assert file.metadata["a.text"] == "grüße"
    assert file.metadata["a.ints"] == (1, 2, 3)
    assert file.metadata["a.floats"] == (0.5, 1.5)
    tokens = file.metadata[KEY]
    assert isinstance(tokens, StringArray)
    assert list(tokens) == ["a", "", "été", "x" * 300]
    assert tokens[2] == "été"
    assert tokens[1:] == ["", "été", "x" * 300]
    first = file.tensors["first"]
    assert (first.type, first.shape, first.num_weights) == (BlockType.Q8_0, (4, 64), 256)
    assert first.num_bytes == 4 * 2 * 34
    assert bytes(file.raw("first")) == gguf.quants.quantize(values(4, 64), Type.Q8_0).tobytes()
    assert np.array_equal(np.frombuffer(file.raw("second"), np.float32), values(7))
    file.raw("second")[:] = bytes(28)
    assert np.array_equal(np.frombuffer(GgufFile.open(plain).raw("second"), np.float32), values(7))
    assert file.path == plain


def test_bytes_of_a_tensor_outlive_the_file_object(plain: Path) -> None:
    data = GgufFile.open(plain).raw("second")
    assert np.array_equal(np.frombuffer(data, np.float32), values(7))


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_are_found_at_any_alignment(alignment: int, tmp_path: Path) -> None:
    tensors = {"one": (values(3), Type.F32), "two": (values(2, 32), Type.Q4_0)}
    file = GgufFile.open(write(tmp_path / "x.gguf", alignment=alignment, **tensors))
    assert all(info.offset % alignment == 0 for info in file.tensors.values())
    assert np.array_equal(np.frombuffer(file.raw("one"), np.float32), values(3))


@pytest.mark.parametrize("kind", BlockType)
def test_the_sizes_of_every_type_are_those_of_the_format(kind: BlockType) -> None:
    assert gguf.GGML_QUANT_SIZES[Type(kind.number)] == (kind.num_weights, kind.num_bytes)
    assert Type(kind.number).name == kind.name


def test_a_file_is_known_by_its_first_bytes(plain: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123"
    shutil.copy(plain, blob)
    assert is_gguf(blob)
    for name, data in (("a", b"GGU"), ("b", b""), ("c", b"{}")):
        (tmp_path / name).write_bytes(data)
        assert not is_gguf(tmp_path / name)
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "none")


def test_a_file_that_ends_anywhere_is_refused(plain: Path, tmp_path: Path) -> None:
    data = plain.read_bytes()
    tensors = GgufFile.open(plain).tensors.values()
    end_of_header = min(info.offset for info in tensors)
    end = max(info.offset + info.num_bytes for info in tensors)
    for length in (*range(end_of_header), end - 1, (end_of_header + end) // 2):
        said = damaged(tmp_path, data[:length])
        assert "cannot read the GGUF file" in said


def test_what_is_no_gguf_file_is_called_that(tmp_path: Path) -> None:
    assert "does not begin as a GGUF file" in damaged(tmp_path, b"PK\x03\x04")
    assert "does not begin as a GGUF file" in damaged(tmp_path, b"")
    assert "Git LFS" in damaged(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid ...")
    assert "No such file" in refusal(tmp_path / "none.gguf")
    assert "directory" in refusal(tmp_path)


def header(version: int = 3, tensors: int = 0, metadata: int = 0, rest: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, metadata) + rest


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def info(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


HUGE = 2**63 - 1
ARRAY = struct.pack("<I", 9)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "version 1": (header(1), "of version 1"),
    "big-endian": (struct.pack("<4s", b"GGUF") + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors": (header(tensors=HUGE, rest=bytes(99)), "9,223,372,036,854,775,807 tensors"),
    "metadata": (header(metadata=2**40, rest=bytes(99)), "1,099,511,627,776 metadata"),
    "key": (header(metadata=1, rest=struct.pack("<Q", HUGE) + bytes(99)), "a string of 9,223"),
    "value": (
        header(metadata=1, rest=text("k") + struct.pack("<IQ", 8, 2**64 - 1) + bytes(99)),
        "a string of 18,446",
    ),
    "type": (header(metadata=1, rest=text("k") + struct.pack("<I", 13) + bytes(99)), "type 13"),
    "array": (
        header(metadata=1, rest=text("k") + ARRAY + struct.pack("<IQ", 4, HUGE) + bytes(99)),
        "elements in k",
    ),
    "strings": (
        header(metadata=1, rest=text("k") + ARRAY + struct.pack("<IQ", 8, 4) + bytes(99)[:20]),
        "cut short",
    ),
    "last string": (
        header(
            metadata=1,
            rest=text("k") + ARRAY + struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 99),
        ),
        "cut short",
    ),
    "nested": (
        header(metadata=1, rest=text("k") + ARRAY + struct.pack("<IQ", 9, 1) + bytes(99)),
        "an array of arrays",
    ),
    "array type": (
        header(metadata=1, rest=text("k") + ARRAY + struct.pack("<IQ", 99, 1) + bytes(99)),
        "unknown type 99",
    ),
    "twice": (
        header(metadata=2, rest=2 * (text("key") + struct.pack("<II", 4, 1)) + bytes(9)),
        "it has key twice",
    ),
    "dimensions": (header(tensors=1, rest=info("t", [1] * 5) + bytes(99)), "has 5 dimensions"),
    "no dimensions": (header(tensors=1, rest=info("t", []) + bytes(99)), "has 0 dimensions"),
    "empty": (header(tensors=1, rest=info("t", [4, 0]) + bytes(99)), "no whole blocks"),
    "product": (header(tensors=1, rest=info("t", [2**62] * 4) + bytes(99)), "cut short"),
    "blocks": (header(tensors=1, rest=info("t", [33], 8) + bytes(99)), "no whole blocks (Q8_0)"),
    "integers": (header(tensors=1, rest=info("t", [4], 26) + bytes(99)), "of the type I32"),
    "type of tensor": (header(tensors=1, rest=info("t", [4], 77) + bytes(99)), "type number 77"),
    "offset": (header(tensors=1, rest=info("t", [4], 0, 2**62) + bytes(99)), "cut short"),
    "unaligned": (header(tensors=1, rest=info("t", [4], 0, 4) + bytes(99)), "no multiple of 32"),
    "same name": (
        header(tensors=2, rest=info("t", [1]) + info("t", [1], 0, 32) + bytes(199)),
        "it has t twice",
    ),
    "overlap": (
        header(tensors=2, rest=info("a", [16]) + info("b", [1], 0, 32) + bytes(199)),
        "its a and b overlap",
    ),
    **{
        f"alignment {alignment}": (
            header(
                metadata=1,
                rest=text("general.alignment") + struct.pack("<II", 4, alignment) + bytes(9),
            ),
            "not a power of two",
        )
        for alignment in (0, 24, 2**31)
    },
    "alignment type": (
        header(metadata=1, rest=text("general.alignment") + struct.pack("<I", 8) + text("32")),
        "general.alignment is '32', not a whole number",
    ),
}


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """No more address space than there is, and 256 MiB."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("limited_memory")
def test_a_hostile_header_is_refused_before_anything_of_its_size_is_made(
    name: str, tmp_path: Path
) -> None:
    data, words = HOSTILE[name]
    assert words in damaged(tmp_path, data)


def test_arrays_and_headers_beyond_all_real_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    for count, words in ((2**22 + 1, "4,194,305 elements in k"), (2**40, "elements in k")):
        path.write_bytes(header(metadata=1, rest=text("k") + ARRAY + struct.pack("<IQ", 0, count)))
        with path.open("r+b") as file:
            file.truncate(2**34)  # without taking memory or disk
        assert words in refusal(path)
    path.write_bytes(header(metadata=2**16 + 1))
    with path.open("r+b") as file:
        file.truncate(2**34)
    assert "65,537 metadata" in refusal(path)


@settings(max_examples=300)
@given(st.data())
def test_changed_headers_are_read_or_refused(plain: Path, data: st.DataObject) -> None:
    content = bytearray(plain.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        position = 8 * data.draw(st.integers(0, len(content) // 8 - 1))
        number = data.draw(st.sampled_from([2**63, 2**64 - 1, 2**32, 2**31, 0, 1, 3]))
        content[position : position + 8] = struct.pack("<Q", number)
    path = plain.with_name("changed.gguf")
    path.write_bytes(content)
    try:
        file = GgufFile.open(path)
    except ModelError:
        return
    for name in file.tensors:
        assert len(file.raw(name)) == file.tensors[name].num_bytes
    for value in file.metadata.values():
        assert not isinstance(value, StringArray) or len(list(value)) == len(value)


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_after_the_magic_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + data)
    try:
        GgufFile.open(path)
    except ModelError:
        return


def split(folder: Path, count: int = 3) -> list[Path]:
    """A series of files with one tensor each, as llama.cpp splits them."""
    paths = []
    for number in range(count):
        path = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", count)
        writer.add_tensor(f"t{number}", values(4) + number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_a_split_series_is_one_file_by_any_of_its_names(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for path in paths:
        assert series_of(path) == paths
    file = GgufFile.open(paths)
    assert list(file.tensors) == ["t0", "t1", "t2"]
    for number, path in enumerate(paths):
        assert file.tensors[f"t{number}"].path == path
        assert np.array_equal(np.frombuffer(file.raw(f"t{number}"), np.float32), values(4) + number)
    assert series_of(tmp_path / "whole.gguf") == [tmp_path / "whole.gguf"]


def test_a_series_that_is_not_whole_or_in_another_order_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for wrong in (paths[:2], paths[::-1], [paths[0], *paths]):
        with pytest.raises(ModelError, match="Give the first part"):
            GgufFile.open(wrong)
    assert "part 1 of 3" in refusal(paths[0])
    paths[1].unlink()
    with pytest.raises(ModelError, match=r"there is no m-00002-of-00003\.gguf beside it"):
        series_of(paths[0])
    with pytest.raises(ModelError, match="its name says part 5 of 3"):
        series_of(tmp_path / "m-00005-of-00003.gguf")


def test_parts_with_a_tensor_too_few_or_twice_are_refused(tmp_path: Path) -> None:
    first, second = split(tmp_path, 2)
    data = first.read_bytes()
    second.write_bytes(data.replace(b"split.no\x02\0\0\0\0\0", b"split.no\x02\0\0\0\x01\0"))
    with pytest.raises(ModelError, match=r"it has t0, as m-00001-of-00002\.gguf has"):
        GgufFile.open([first, second])
    key = b"split.tensors.count"
    position = data.index(key) + len(key) + 4
    first.write_bytes(data[:position] + struct.pack("<i", 9) + data[position + 4 :])
    split(tmp_path / "..", 2)
    with pytest.raises(ModelError, match="2 tensors, and its header says 9"):
        GgufFile.open([first, tmp_path.parent / "m-00002-of-00002.gguf"])


def test_a_view_of_the_bytes_needs_no_copy_in_torch(plain: Path) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mapped file cannot be written
        tensor = torch.frombuffer(GgufFile.open(plain).raw("first"), dtype=torch.uint8)
    assert tensor.shape == (4 * 2 * 34,)


def test_reading_a_header_does_not_decode_its_strings(plain: Path, monkeypatch: Any) -> None:
    decoded: list[int] = []
    original = StringArray._decoded
    monkeypatch.setattr(StringArray, "_decoded", lambda self: decoded.append(1) or original(self))
    file = GgufFile.open(plain)
    assert not decoded
    assert len(file.metadata[KEY]) == 4
    assert file.metadata[KEY][0] == "a"
    assert file.metadata[KEY][1] == ""
    assert decoded == [1]
