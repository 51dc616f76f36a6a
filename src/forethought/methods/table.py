"""``MethodTable``: methods by name, with what there is to know about each before it is used."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from forethought.config.registry import Registry
from forethought.errors import ParameterError

if TYPE_CHECKING:
    from forethought.scaffolding.controller import Controller
    from forethought.scaffolding.thinking import ThinkingUse

BY_METHOD = "settings by method"
SettingsByMethod = Annotated[Mapping[str, Mapping[str, Any]], BY_METHOD]
"""Method, as it is written for ``stack`` -> its settings."""
NESTED = ("generation_controller", "reward_controller", "meta_reward_controller")
"""Parameters that are controllers."""
REWARDS = ("genrm", "checker", "judge", "compare", "confidence", "spct")
"""Names of those that score the answers of others, as their ``reward_controller``, and answer
nothing by themselves."""
_TABLE = "method_table"
"""The parameter of a method that makes others by name: the table in which they have names."""
_DESCRIBED = 1024
"""Methods whose description is remembered."""


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
    """Name -> what it means, from the docstring of its class, of those that it explains."""
    conversation: str = "messages"
    """How it answers conversations: a ``ConversationForm``."""
    uses_thinking: ThinkingUse = "unused"
    """What the thoughts of models are to it: it does not look at them (``unused``), does without
    where there are none (``adapts``), or is for models that think alone (``required``)."""

    REQUIRED = inspect.Parameter.empty


class MethodTable:
    """The methods that have a name.

    Args:
        registry: of their classes. If it is closed, so is the table, for the methods inside of
            others and those of a policy too.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def names(self) -> list[str]:
        """The names of all methods, those of plug-ins included where they have one."""
        return self._registry.names()

    def resolve(self, name: str) -> Callable[..., Controller]:
        """The class of a method.

        Raises:
            UnknownNameError: there is no such method.
        """
        method: Callable[..., Controller] = self._registry.resolve(name)
        return method

    def describe(self, name: str) -> Method:
        """What a method does and how it can be set.

        Raises:
            UnknownNameError: there is no such method.
        """
        return _described(self.resolve(name), name)

    def create(self, spec: str | Controller, **settings: Any) -> Controller:
        """A controller.

        Args:
            spec: the name of a method, or a controller as it is.
            **settings: parameters of its class; those that are controllers may be names, or
                mappings of ``method`` and its settings.

        Raises:
            UnknownNameError: there is no such method.
            ParameterError: a setting that the method does not have, or one that is missing.
        """
        method = self._registry.resolve(spec)
        if not callable(method):
            if settings:
                raise ParameterError.unknown("a finished controller", settings, ())
            controller: Controller = method
            return controller
        return self._created(method, spec, settings)

    def name_of(self, controller: Controller) -> str:
        """The name of a controller's method, or that of its class."""
        kind = type(controller)
        return next((n for n in self.names() if self.resolve(n) is kind), kind.__name__)

    def tags(self) -> list[str]:
        """The worker tags of all methods, by value: a server of them has a worker for each."""
        tags = (getattr(self.resolve(name), "WorkerTag", ()) for name in self.names())
        return list(dict.fromkeys(str(tag.value) for of_one in tags for tag in of_one))

    def _created(self, method: Any, spec: Any, settings: Mapping[str, Any]) -> Controller:
        allowed = parameters_of(method)
        unknown = settings.keys() - allowed.keys()
        if unknown:
            raise ParameterError.unknown(f"method {spec!r}", unknown, allowed)
        values = {**settings}
        if "generation_controller" in allowed:
            values.setdefault("generation_controller", allowed["generation_controller"])
        if _TABLE in allowed and self._registry.is_closed:
            values[_TABLE] = self
        for name in NESTED:
            if name in values:
                values[name] = self._nested(name, values[name])
        required = (name for name, default in allowed.items() if default is Method.REQUIRED)
        if missing := [name for name in required if name not in values]:
            what, fix = f"method {spec!r} needs {missing[0]!r}", f"Set {missing[0]}=..."
            raise ParameterError(what, "it has no default", fix, param=missing[0])
        controller: Controller = method(**values)
        return controller

    def _nested(self, parameter: str, value: Any) -> Any:
        settings = dict(value) if isinstance(value, Mapping) else {"method": value}
        method = settings.pop("method", "plain")
        if parameter == NESTED[0] and isinstance(method, str) and method in REWARDS:
            raise ParameterError(
                f"method {method} answers nothing by itself",
                "it scores the answers of another method",
                f'Give it to one, as in best_of_n with "reward_controller": "{method}"',
                param=parameter,
            )
        return self.create(method, **settings)


@functools.lru_cache(_DESCRIBED)
def _described(method: Any, name: str) -> Method:
    text, parameters = inspect.getdoc(method) or "", parameters_of(method)
    first_line = text.partition("\n")[0].replace("``", "")
    explanations = _explanations(text, parameters)
    form = str(getattr(method, "conversation", "messages"))
    use: ThinkingUse = getattr(method, "uses_thinking", "unused")
    return Method(name, first_line, _paper(method), parameters, explanations, form, use)


def _paper(method: Any) -> str:
    """What the docstring of the method's module says after ``Paper:``, to the end of the entry."""
    text = inspect.getdoc(inspect.getmodule(method)) or ""
    match = re.search(r"^Paper: (.*?\d{4})\.", text, re.MULTILINE | re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def _explanations(docstring: str, parameters: Iterable[str]) -> dict[str, str]:
    """What the ``Args`` of a docstring say about each parameter that they name."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.split(r"^    (?=\w+:)", section[1], flags=re.MULTILINE) if section else []
    explanations = {}
    for entry in entries:
        name, _, meaning = entry.partition(":")
        if name in parameters:
            explanations[name] = " ".join(meaning.split()).replace("``", "")
    return explanations


@functools.lru_cache(_DESCRIBED)
def parameters_of(method: Any) -> Mapping[str, Any]:
    """Name -> default of the parameters of a method's class."""
    parameters = inspect.signature(method).parameters.items()
    defaults = {name: parameter.default for name, parameter in parameters}
    if "generation_controller" in defaults:
        defaults["generation_controller"] = "plain"
    return MappingProxyType(defaults)
