"""``MethodTable``: methods by name, with the description of each."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from traceback import extract_tb
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from forethought.config.registry import Registry
from forethought.errors import ForethoughtError, ParameterError, UsageError
from forethought.scaffolding.settings import REQUIRED, Setting, settings_of

if TYPE_CHECKING:
    from forethought.scaffolding.controller import Controller
    from forethought.scaffolding.thinking import ThinkingUse

logger = logging.getLogger(__name__)

BY_METHOD = "settings by method"
SettingsByMethod = Annotated[Mapping[str, Mapping[str, Any]], BY_METHOD]
"""Method, as it is written for ``stack`` -> its settings."""
NESTED = ("generation_controller", "reward_controller", "meta_reward_controller")
"""Parameters that are controllers."""
REWARDS = ("genrm", "checker", "judge", "compare", "confidence", "spct")
"""Names of those that score the answers of others, as their ``reward_controller``, and answer
nothing by themselves."""
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Plain decoding": ("plain",),
        "Shorten, lengthen or share the thought": (
            "dynasor",
            "first_answer",
            "budget_forcing",
            "no_thinking",
            "specreason",
        ),
        "Draw samples and vote": (
            "majority_vote",
            "deepconf",
            "deepconf_online",
            "budget_vote",
            "fork_think",
        ),
        "Draw samples and take the best": ("best_of_n", "repeated_sampling", "adaptive_compute"),
        "Search step by step": (
            "beam_search",
            "dvts",
            "particle_filtering",
            "particle_gibbs",
            "mcts",
            "tree_of_thoughts",
        ),
        "Revise the answer": ("self_refine", "sequential_revision"),
        "Think in parallel": ("parallel_thinking", "hogwild", "hogwild_turns"),
        "Use documents or a context": ("drag", "iterdrag", "sleep_time"),
        "Combine methods": ("compute_optimal", "archon"),
        "Score answers of others": REWARDS,
    }
)
"""What methods do -> their names. Those of plug-ins are ``OTHERS``."""
OTHERS = "Other methods"
_TABLE = "method_table"
"""The parameter of a method that makes others by name: the table in which they have names."""
_DESCRIBED = 1024
"""Methods whose description is remembered."""


@dataclass(frozen=True, slots=True)
class Method:
    """The description of a method."""

    name: str
    description: str
    """One line."""
    paper: str
    """The paper that it follows; empty if there is none."""
    settings: Mapping[str, Setting]
    """By name, in the order of the constructor's parameters."""
    conversation: str = "messages"
    """How it answers conversations: a ``ConversationForm``."""
    uses_thinking: ThinkingUse = "unused"
    """What the thoughts of models are to it: it does not look at them (``unused``), does without
    where there are none (``adapts``), or is for models that think alone (``required``)."""

    REQUIRED = REQUIRED

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Name -> default of the settings; ``REQUIRED`` where there is none."""
        return _defaults(self.settings)

    @property
    def group(self) -> str:
        """What it does, in the words of ``GROUPS``."""
        return next((group for group, names in GROUPS.items() if self.name in names), OTHERS)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON."""
        return {
            "name": self.name,
            "description": self.description,
            "group": self.group,
            "paper": self.paper,
            "conversation": self.conversation,
            "thinking": self.uses_thinking,
            "settings": [
                {
                    "name": name,
                    "type": self.settings[name].type_text,
                    "default": as_json(default),
                    "required": default is REQUIRED,
                    "description": self.explanations.get(name, ""),
                }
                for name, default in self.parameters.items()
            ],
        }

    @property
    def explanations(self) -> Mapping[str, str]:
        """Name -> help of the settings that have one, as plain text."""
        explained = {name: setting.help.replace("`", "") for name, setting in self.settings.items()}
        return {name: text for name, text in explained.items() if text}


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

        Raises ``UnknownNameError`` for an unknown name, ``UsageError`` for what is no method.
        """
        method: Callable[..., Controller] = self._registry.resolve(name)
        _check_method(method, name)
        return method

    def describe(self, name: str) -> Method:
        """What a method does and its settings; raises ``UnknownNameError`` for an unknown name."""
        return _described(self.resolve(name), name)

    def create(self, spec: str | Controller, **settings: Any) -> Controller:
        """A controller.

        Args:
            spec: the name of a method, or a controller, which is returned unchanged.
            **settings: parameters of its class; those that are controllers may be names, or
                mappings of ``method`` and its settings.

        Raises:
            UnknownNameError: there is no such method.
            ParameterError: a setting that the method does not have, or one that is missing.
        """
        method = self._registry.resolve(spec)
        _check_method(method, spec)
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
        _check_declared(method, settings)
        controller: Controller = _made(method, spec, values)
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


def _check_declared(method: Any, settings: Mapping[str, Any]) -> None:
    """Raises ParameterError for a value that is neither the default nor of the number, text or
    truth value that a class declares in a constructor of its own; others check themselves.
    """
    for name, setting in settings_of(method).items():
        is_set = name in settings and not _is_same(settings[name], setting.default)
        if setting.is_plain and is_set:
            setting.value(settings)


def _is_same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _made(method: Any, spec: Any, values: Mapping[str, Any]) -> Any:
    """A controller of a class. Raises UsageError for what the constructor of a class that is not
    shipped raises, with its place, and the traceback in the log at level DEBUG; errors of ours
    stay as they are.
    """
    try:
        return method(**values)
    except ForethoughtError:
        raise
    except Exception as error:
        if str(method.__module__).startswith("forethought."):
            raise  # a fault of ours
        logger.debug("the constructor of method %r failed", spec, exc_info=True)
        name, place = (
            f"{method.__module__}.{method.__qualname__}",
            extract_tb(error.__traceback__)[-1],
        )
        raise UsageError(
            f"cannot make the method {spec!r}",
            f"{name}(...) raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})",
            "Fix its constructor or the settings that it is given",
        ) from error


def _check_method(method: Any, name: Any) -> None:
    """Raises UsageError for a ``"module:Name"`` that is no controller and no class of one, so that
    nothing else is ever called.
    """
    from forethought.scaffolding.controller import Controller

    if not (isinstance(name, str) and ":" in name) or isinstance(method, Controller):
        return
    if not (isinstance(method, type) and issubclass(method, Controller)):
        raise UsageError(
            f"{name!r} is no method",
            f"it is {method!r:.80}",
            "Name a class that derives from forethought.scaffolding.Controller",
        )


@functools.lru_cache(_DESCRIBED)
def _described(method: Any, name: str) -> Method:
    description = (inspect.getdoc(method) or "").partition("\n")[0].replace("``", "")
    form = str(getattr(method, "conversation", "messages"))
    use: ThinkingUse = getattr(method, "uses_thinking", "unused")
    paper = getattr(method, "paper", "")
    return Method(name, description, paper, settings_of(method), form, use)


def parameters_of(method: Any) -> Mapping[str, Any]:
    """Name -> default of the settings of a method's class."""
    return _defaults(settings_of(method))


def as_json(default: Any) -> Any:
    """The default of a setting as JSON has it; None where there is none."""
    if default is REQUIRED:
        return None
    if isinstance(default, str | int | float | bool | None):
        return default
    if isinstance(default, tuple | list):
        return [as_json(item) for item in default]
    if isinstance(default, Mapping):
        return {str(key): as_json(item) for key, item in default.items()}
    return getattr(default, "__name__", str(default))


def _defaults(settings: Mapping[str, Setting]) -> Mapping[str, Any]:
    defaults = {name: setting.default for name, setting in settings.items()}
    if "generation_controller" in defaults:
        defaults["generation_controller"] = "plain"
    return defaults
