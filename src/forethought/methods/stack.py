"""Methods inside methods, as one name: ``dynasor+majority_vote`` is Dynasor-CoT under a vote.

``name@N`` sets the samples of one of them: ``dynasor+majority_vote@8``. Names resolve in a
``MethodTable``, by default the open one of Python and the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forethought import methods
from forethought.errors import ParameterError
from forethought.methods.table import MethodTable
from forethought.scaffolding.controller import Controller

_INNER = "generation_controller"
SAMPLES = "default_sample_num"
"""Name of the parameter that ``name@N`` sets: how many samples a method draws."""
MAX_GENERATIONS = 1 << 20
"""Of one prompt at the command line; a server allows fewer."""


@dataclass(frozen=True, slots=True)
class StackedMethod:
    """One method of a stack, as its name is written."""

    name: str
    samples: int | None = None
    """The number after ``@``."""
    table: MethodTable = field(default_factory=methods.open_table, compare=False, repr=False)
    """Where it has its name."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Name -> default of its parameters."""
        return self.table.describe(self.name).parameters

    @property
    def joins_texts(self) -> bool:
        """Whether it takes no prompt of token ids: ``Controller.joins_texts``."""
        return bool(getattr(self.table.resolve(self.name), "joins_texts", False))

    @property
    def draws_samples(self) -> bool:
        """Whether it draws several samples, whose number can be set."""
        return SAMPLES in self.parameters


def split(spec: str, table: MethodTable | None = None) -> list[StackedMethod]:
    """The methods of ``"inner+outer@8"``, the innermost first; ``table`` resolves the names."""
    names = methods.open_table() if table is None else table
    return [_stacked(part, names) for part in spec.split("+")]


def _stacked(part: str, table: MethodTable) -> StackedMethod:
    name, at, number = part.partition("@")
    if not at:
        return StackedMethod(name, table=table)
    if not number.isdecimal() or not int(number):
        raise ParameterError(
            f"invalid method {part!r}",
            "the number of its samples follows @",
            "Write it as in majority_vote@8",
        )
    return StackedMethod(name, int(number), table)


def stack(
    spec: str,
    *,
    innermost: Controller | None = None,
    method_table: MethodTable | None = None,
    **settings: Any,
) -> Controller:
    """A controller for ``"inner+outer"`` (any depth; one name alone is that method).

    Args:
        spec: names of methods, the innermost first, each perhaps with its samples.
        innermost: the controller in place of plain decoding, such as a chat.
        method_table: where the names are; None: the open one.
        **settings: each goes to the outermost method that has a parameter of this name.

    Raises:
        UnknownNameError: there is no such method.
        ParameterError: a method is a reward, or takes no inner method; no method has a setting; or
            something is set twice.
    """
    table = methods.open_table() if method_table is None else method_table
    stacked = split(spec, table)
    _refuse_rewards(stacked)
    settings_of = _split_settings(spec, stacked, settings)
    if innermost is None:
        controller = table.create(stacked[0].name, **settings_of[0])
    else:
        controller = _around(innermost, stacked[0], settings_of[0])
    for method, share in zip(stacked[1:], settings_of[1:], strict=True):
        name = method.name
        if _INNER not in method.parameters:
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
        controller = table.create(name, **{_INNER: controller}, **share)
    return controller


def _refuse_rewards(stacked: Sequence[StackedMethod]) -> None:
    for method in stacked:
        if method.name in methods.REWARDS:
            raise ParameterError(
                f"method {method.name} answers nothing by itself",
                "it scores the answers of another method",
                f"Give it to one, as in best_of_n with reward_controller={method.name}",
            )


def _around(innermost: Controller, method: StackedMethod, settings: dict[str, Any]) -> Controller:
    if method.name == "plain":
        if settings:
            raise ParameterError.unknown("plain decoding here", settings, ())
        return innermost
    if _INNER not in method.parameters or _INNER in settings:
        raise ParameterError(
            f"{method.name!r} cannot generate with {type(innermost).__name__}",
            "it generates by itself" if _INNER not in settings else f"{_INNER} is set too",
            "Use plain, or a method that has another one inside",
        )
    return method.table.create(method.name, **{_INNER: innermost}, **settings)


def parameters(spec: str, table: MethodTable | None = None) -> dict[str, Any]:
    """Name -> default of every parameter that ``stack(spec, ...)`` takes; ``table`` resolves the
    names.
    """
    return _parameters(split(spec, table))


def _parameters(stacked: Sequence[StackedMethod]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for method in stacked:
        parameters |= method.parameters
    return parameters


def refuse_too_many_generations(controller: Controller) -> None:
    """Raises ParameterError for a method that could begin more than ``MAX_GENERATIONS``: these are
    not even made before the memory ends.
    """
    if (count := controller.num_generations()) > MAX_GENERATIONS:
        raise ParameterError(
            "the method would begin too many generations",
            f"up to {count:,}, and at most {MAX_GENERATIONS:,} can be begun for a prompt",
            "Ask for fewer samples, branches or steps",
        )


def refuse_greedy_samples(controller: Controller, temperature: float | None) -> None:
    """Raise ``ParameterError`` for several samples at temperature 0, as all of them would be equal.

    Args:
        controller: a method, perhaps with others inside.
        temperature: of its tasks; None: not set.
    """
    inner: Any = controller
    while temperature == 0 and isinstance(inner, Controller):
        settings = vars(inner)
        num_samples = settings.get(SAMPLES, 1)
        if num_samples > 1 and settings.get("thoughts") != "propose":
            raise ParameterError(
                "temperature 0 with a method that draws several samples",
                f"all {num_samples} samples of {type(inner).__name__} would be equal",
                "Give a temperature above 0, or a method that draws one",
            )
        inner = settings.get(_INNER)


def _split_settings(
    spec: str, stacked: list[StackedMethod], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    parameters_of = [method.parameters for method in stacked]
    allowed = _parameters(stacked)
    unknown = settings.keys() - allowed.keys()
    if unknown:
        raise ParameterError.unknown(f"method {spec!r}", unknown, allowed)
    settings_of = [_samples_of(method) for method in stacked]
    for key, value in settings.items():
        owner = max(number for number, names in enumerate(parameters_of) if key in names)
        if key in settings_of[owner]:
            raise ParameterError(
                f"{stacked[owner].name!r} is given its samples twice",
                f"{spec!r} says {settings_of[owner][key]}, and {key} is {value!r}",
                "Give them once",
            )
        settings_of[owner][key] = value
    return settings_of


def _samples_of(method: StackedMethod) -> dict[str, Any]:
    if method.samples is None:
        return {}
    if not method.draws_samples:
        raise ParameterError(
            f"{method.name!r} draws no samples",
            f"got @{method.samples}, and it has no parameter {SAMPLES!r}",
            f"Write {method.name} alone",
        )
    return {SAMPLES: method.samples}
