"""Large JSON read and written in pieces: the same values and bytes as ``json`` at once."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forethought.server import json_pieces
from forethought.server.json_pieces import read_pieces, write_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(VALUES, st.integers(0, 3), st.sampled_from([None, 1]))
@example({}, 1, None)
@example([[], {"": []}], 3, 1)
def test_a_value_is_read_and_written_as_at_once(value, depth, indent):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "LARGE", 0)
        patch.setattr(json_pieces, "DEPTH", depth)
        assert read_pieces(json.dumps(value, indent=indent)) == value
        whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert write_pieces(value) == whole.encode(errors="replace")


@given(VALUES, st.data())
def test_what_is_no_json_at_once_is_none_in_pieces(value, data):
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    broken = (
        text[:at] + data.draw(st.sampled_from(["", ",", "]", "}", ":", '"', "x"])) + text[at + 1 :]
    )
    try:
        expected = json.loads(broken)
    except ValueError:
        expected = ValueError
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "LARGE", 0)
        try:
            read = read_pieces(broken)
        except ValueError:
            read = ValueError
    assert read == expected or read != read
