"""Settings typed as key=value."""

import pytest

from forethought.cli.options import parse_settings
from forethought.errors import ParameterError


def test_values_are_read_as_json_and_as_text_where_they_are_none():
    assert parse_settings(
        ["threshold=3", "p=0.9", "on=true", "off=null", 'words=["wait", "no"]', "name=a=b", 'q="3"']
    ) == {
        "threshold": 3,
        "p": 0.9,
        "on": True,
        "off": None,
        "words": ["wait", "no"],
        "name": "a=b",
        "q": "3",
    }


@pytest.mark.parametrize("pair", ["threshold", "=3", " =3", ""])
def test_what_is_not_key_equals_value_is_refused(pair):
    with pytest.raises(ParameterError, match="key=value"):
        parse_settings([pair])


def test_a_key_given_twice_is_refused():
    with pytest.raises(ParameterError, match="twice"):
        parse_settings(["a=1", "a=2"])
