"""The public door: what ``__all__`` promises is there, and the rest is private."""

import ast
import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

import forethought
from forethought import moved_modules

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


@pytest.mark.parametrize("door", ["forethought", "forethought.scaffolding"])
def test_the_stub_for_editors_has_the_names_that_the_package_exports(door):
    module = importlib.import_module(door)
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert sorted(name.asname for node in imports for name in node.names) == sorted(module.__all__)


@pytest.mark.parametrize("former", moved_modules.MOVED)
def test_a_former_path_imports_the_module_of_today(former):
    sys.modules.pop(f"forethought.{former}", None)
    with pytest.warns(DeprecationWarning, match="is now forethought"):
        module = importlib.import_module(f"forethought.{former}")
    assert module is importlib.import_module(f"forethought.{moved_modules.MOVED[former]}")


def test_names_that_another_module_defines_now_are_still_where_they_were():
    for module, names in moved_modules.FORMER_NAMES.items():
        for name, home in names.items():
            former = getattr(importlib.import_module(f"forethought.{module}"), name)
            assert former is getattr(importlib.import_module(f"forethought.{home}"), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = forethought.Nonsense


def test_every_module_says_what_it_is():
    for info in pkgutil.walk_packages(forethought.__path__, "forethought."):
        spec = importlib.util.find_spec(info.name)
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), info.name
