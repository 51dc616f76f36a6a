"""C++ and Python lay the structures of a call out alike: both read one declaration."""

from __future__ import annotations

import ctypes
import subprocess
from array import array
from pathlib import Path

import pytest
import torch

from forethought.backends.cpu import forward, library, structures
from forethought.backends.cpu.structures import STRUCTURES, CStruct, RowStruct, declared_fields
from forethought.model.attention.base import KvLayout, KvRow

COMPILER = library.find_compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


def checks(structs: dict[str, type[CStruct]]) -> str:
    """C++ that compiles where each field has the offset, and each structure the size, of Python."""
    lines = ["#include <cstddef>", '#include "structures.h"']
    for struct, cls in structs.items():
        lines.append(f"static_assert(sizeof({struct}) == {ctypes.sizeof(cls)});")
        for name, _ in cls._fields_:
            field = getattr(cls, name)
            lines.append(
                f'static_assert(offsetof({struct}, {name}) == {field.offset}, "{struct}.{name}");'
            )
            lines.append(f"static_assert(sizeof({struct}::{name}) == {field.size});")
    return "\n".join(lines)


def compiled(source: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [str(COMPILER), "-std=c++17", "-fsyntax-only", f"-I{directory}", "-x", "c++", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True)


@needs_compiler
def test_every_field_has_the_offset_and_size_that_the_compiler_gives_it() -> None:
    result = compiled(checks(STRUCTURES), structures.HEADER.parent)
    assert result.returncode == 0, result.stderr


@needs_compiler
def test_two_fields_of_one_type_that_are_swapped_in_the_header_alone_are_noticed(tmp_path) -> None:
    header = structures.HEADER.read_text()
    swapped = header.replace("int32_t num_inputs, num_outputs", "int32_t num_outputs, num_inputs")
    assert swapped != header
    (tmp_path / "structures.h").write_text(swapped)
    result = compiled(checks(STRUCTURES), tmp_path)
    assert "Linear.num_inputs" in result.stderr
    names = [name for name, _, _ in declared_fields(swapped)["Linear"]]
    assert names[4:6] == ["num_outputs", "num_inputs"]  # Python reads the new order, too


def test_every_structure_of_the_header_has_its_class() -> None:
    assert declared_fields(structures.HEADER.read_text()).keys() == STRUCTURES.keys()


def test_a_declaration_gives_names_types_and_pointers() -> None:
    header = """struct Pair { // two
        const float *first, *second; // [n]
        void* const* keys;
        Linear value;
        int32_t num, size;
    };"""
    assert declared_fields(header) == {
        "Pair": [
            ("first", "float", True),
            ("second", "float", True),
            ("keys", "void", True),
            ("value", "Linear", False),
            ("num", "int32_t", False),
            ("size", "int32_t", False),
        ]
    }


def test_a_field_that_is_not_declared_is_refused() -> None:
    with pytest.raises(AttributeError, match="num_token"):
        structures.CallStruct(num_token=1)


def test_a_packed_row_has_its_integers_in_the_order_of_the_fields() -> None:
    recent = torch.arange(9)
    row = KvRow(
        start=1,
        num_tokens=2,
        prefix=3,
        recent=range(4, 7),
        seen_from=5,
        first_slot=6,
        pages=[7],
        visible=torch.ones(2, 3, dtype=torch.bool),
        segments=((8, 9),),
    )
    packed, keep, longest = forward.packed_rows(
        KvLayout(array("q"), torch.float32, recent, recent, recent, 4, [row])
    )
    segments, pages, visible = keep
    struct = RowStruct.from_buffer(packed)
    assert {name: getattr(struct, name) for name, _ in RowStruct._fields_} == {
        "first_slot": 6,
        "pages": pages.buffer_info()[0],
        "slots": recent[4:].data_ptr(),
        "positions": recent[4:].data_ptr(),
        "visible": visible.data_ptr(),
        "start": 1,
        "num_tokens": 2,
        "prefix": 3,
        "seen_from": 5,
        "num_recent": 3,
        "segments": segments.buffer_info()[0],
        "num_segments": 1,
    }
    assert longest == 6
