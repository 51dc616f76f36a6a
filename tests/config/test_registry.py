"""Tables of names: short names, the user's own, and the objects themselves."""

from __future__ import annotations

import collections

import pytest

from forethought.config.registry import Registry
from forethought.errors import UnknownNameError, UsageError

TABLE = Registry("thing", {"ordered": "collections:OrderedDict"})


def test_a_short_name_a_path_and_an_object_all_resolve() -> None:
    assert TABLE.resolve("ordered") is collections.OrderedDict
    assert TABLE.resolve("collections:Counter") is collections.Counter
    assert TABLE.resolve(collections.deque) is collections.deque
    assert TABLE.create("ordered", a=1) == {"a": 1}
    instance = collections.deque([1])
    assert TABLE.create(instance) is instance


def test_an_unknown_name_is_refused_with_the_nearest_and_all_there_are() -> None:
    with pytest.raises(UnknownNameError, match=r"'orderd': did you mean 'ordered'\? Allowed"):
        TABLE.resolve("orderd")


@pytest.mark.parametrize("path", ["nowhere:Thing", "collections:Nothing"])
def test_a_path_that_cannot_be_imported_says_how_to_write_one(path: str) -> None:
    with pytest.raises(UsageError, match="module:Name"):
        TABLE.resolve(path)


def test_an_error_inside_a_table_entry_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError):
        Registry("thing", {"broken": "nowhere:Thing"}).resolve("broken")
