"""Inference-time methods: one controller per file, found through a table of names.

A method is created by name, ``create("dynasor", certainty_threshold=2)``; one inside another is
given by name too, ``create("majority_vote", generation_controller="dynasor")``, or as a mapping
with its settings, or as a controller. Nothing here needs torch.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forethought.config.registry import Registry
from forethought.errors import ParameterError

if TYPE_CHECKING:
    from forethought.methods.best_of_n import BestOfNController
    from forethought.methods.dynasor import DynasorGenerationController
    from forethought.methods.majority_vote import MajorityVoteController
    from forethought.scaffolding.controller import Controller

_REGISTRY = Registry(
    "method",
    {
        "plain": "forethought.scaffolding.controller:NativeGenerationController",
        "dynasor": "forethought.methods.dynasor:DynasorGenerationController",
        "majority_vote": "forethought.methods.majority_vote:MajorityVoteController",
        "best_of_n": "forethought.methods.best_of_n:BestOfNController",
    },
)
_NESTED = ("generation_controller", "reward_controller")
"""Parameters that are controllers."""

_HOMES = {
    "BestOfNController": "best_of_n",
    "DynasorGenerationController": "dynasor",
    "MajorityVoteController": "majority_vote",
}

__all__ = [
    "BestOfNController",
    "DynasorGenerationController",
    "MajorityVoteController",
    "Method",
    "create",
    "describe",
    "names",
    "worker_tags",
]


@dataclass(frozen=True, slots=True)
class Method:
    """What there is to know about a method before using it."""

    name: str
    description: str
    """One line."""
    paper: str
    """The paper that it follows; empty if there is none."""
    parameters: Mapping[str, Any]
    """Name -> default; ``REQUIRED`` where there is none."""
    explanations: Mapping[str, str] = field(default_factory=dict)
    """Name -> what it means, from the docstring of its class, as far as explained there."""

    REQUIRED = inspect.Parameter.empty


def names() -> list[str]:
    """The names of all methods, those of plug-ins included."""
    return _REGISTRY.names()


def describe(name: str) -> Method:
    """What a method does and how it can be set.

    Raises:
        UnknownNameError: there is no such method.
    """
    method = _REGISTRY.resolve(name)
    text, found = inspect.getdoc(method) or "", _parameters(method)
    first_line = text.partition("\n")[0]
    return Method(name, first_line, _paper(method), found, _explanations(text, found))


def create(spec: str | Controller, **settings: Any) -> Controller:
    """A controller.

    Args:
        spec: the name of a method, ``"module:Class"`` of one's own, or a controller as it is.
        **settings: parameters of its class; ``generation_controller`` may be a name, or a mapping
            of ``method`` and its settings.

    Raises:
        UnknownNameError: there is no such method.
        ParameterError: a setting that the method does not have, or one that is missing.
    """
    method = _REGISTRY.resolve(spec)
    if not callable(method):
        if settings:
            raise ParameterError.unknown("a finished controller", settings, ())
        controller: Controller = method
        return controller
    allowed = _parameters(method)
    unknown = settings.keys() - allowed.keys()
    if unknown:
        raise ParameterError.unknown(f"method {spec!r}", unknown, allowed)
    given = {**settings}
    if "generation_controller" in allowed:
        given.setdefault("generation_controller", allowed["generation_controller"])
    for name in _NESTED:
        if name in given:
            given[name] = _nested(given[name])
    missing = [n for n, default in allowed.items() if default is Method.REQUIRED and n not in given]
    if missing:
        raise ParameterError(
            f"method {spec!r} needs {missing[0]!r}", "it has no default", f"Set {missing[0]}=..."
        )
    created: Controller = method(**given)
    return created


def worker_tags(controller: Controller) -> list[Any]:
    """The worker tags of a controller and of those inside it.

    ``ScaffoldingLlm(controller, dict.fromkeys(worker_tags(controller), worker))`` gives all tasks
    to one worker.
    """
    from forethought.scaffolding.controller import Controller

    tags = list(type(controller).WorkerTag)
    for value in vars(controller).values():
        if isinstance(value, Controller):
            tags += worker_tags(value)
    return tags


def _nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        settings = dict(value)
        return create(settings.pop("method", "plain"), **settings)
    return create(value)


def _paper(method: Any) -> str:
    """What the docstring of the method's module says behind ``Paper:``, to the end of the entry."""
    text = inspect.getdoc(inspect.getmodule(method)) or ""
    found = re.search(r"^Paper: (.*?\d{4})\.", text, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _explanations(docstring: str, parameters: Iterable[str]) -> dict[str, str]:
    """What the ``Args`` of a docstring say about each parameter that they name."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.split(r"^    (?=\w+:)", section[1], flags=re.MULTILINE) if section else []
    found = {}
    for entry in entries:
        name, _, meaning = entry.partition(":")
        if name in parameters:
            found[name] = " ".join(meaning.split()).replace("``", "")
    return found


def _parameters(method: Any) -> dict[str, Any]:
    signature = inspect.signature(method)
    found = {name: parameter.default for name, parameter in signature.parameters.items()}
    if "generation_controller" in found:
        found["generation_controller"] = "plain"
    return found


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
