"""Methods inside methods, as one name: ``dynasor+majority_vote`` is Dynasor-CoT under a vote."""

from __future__ import annotations

from typing import Any

from forethought import methods
from forethought.errors import ParameterError
from forethought.scaffolding.controller import Controller

_INNER = "generation_controller"


def stack(spec: str, **settings: Any) -> Controller:
    """A controller for ``"inner+outer"`` (any depth; one name alone is that method).

    Args:
        spec: names of methods, the innermost first.
        **settings: each goes to the outermost method that has a parameter of this name.

    Raises:
        UnknownNameError: there is no such method.
        ParameterError: no method of the stack has a setting; or a method takes none inside it, or
            is given two.
    """
    names = spec.split("+")
    settings_of = _split_settings(spec, names, settings)
    controller = methods.create(names[0], **settings_of[0])
    for name, share in zip(names[1:], settings_of[1:], strict=True):
        if _INNER not in methods.describe(name).parameters:
            raise ParameterError(
                f"{name!r} cannot be put around another method",
                f"it has no parameter {_INNER!r}",
                "Name the innermost method first, as in dynasor+majority_vote",
            )
        if _INNER in share:
            raise ParameterError(
                f"{name!r} is given two methods to put inside",
                f"{_INNER} is set, and {spec!r} names another",
                "Do one of the two",
            )
        controller = methods.create(name, **{_INNER: controller}, **share)
    return controller


def parameters(spec: str) -> dict[str, Any]:
    """Name -> default of every parameter that ``stack(spec, ...)`` takes.

    Raises:
        UnknownNameError: there is no such method.
    """
    found: dict[str, Any] = {}
    for name in spec.split("+"):
        found |= methods.describe(name).parameters
    return found


def _split_settings(spec: str, names: list[str], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of each method."""
    known = [methods.describe(name).parameters for name in names]
    unknown = settings.keys() - parameters(spec).keys()
    if unknown:
        raise ParameterError.unknown(f"method {spec!r}", unknown, parameters(spec))
    settings_of: list[dict[str, Any]] = [{} for _ in names]
    for key, value in settings.items():
        owner = max(number for number, taken in enumerate(known) if key in taken)
        settings_of[owner][key] = value
    return settings_of
