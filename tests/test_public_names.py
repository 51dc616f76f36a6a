"""The public door: what ``__all__`` promises is there, and the rest is private."""

import ast
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import pytest

import forethought

DOORS = ["forethought", "forethought.scaffolding", "forethought.methods"]


@pytest.mark.parametrize("door", DOORS)
def test_every_name_in_all_can_be_imported(door):
    module = importlib.import_module(door)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("door", DOORS)
def test_every_public_name_has_a_docstring_of_its_own(door):
    module = importlib.import_module(door)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{door}.{name}"


@pytest.mark.parametrize("door", DOORS)
def test_dir_shows_every_public_name(door):
    module = importlib.import_module(door)
    assert set(module.__all__) <= set(dir(module))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = forethought.Nonsense


def test_every_module_says_what_it_is():
    for info in pkgutil.walk_packages(forethought.__path__, "forethought."):
        spec = importlib.util.find_spec(info.name)
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), info.name
