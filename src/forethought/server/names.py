"""The names of models that clients give, and the methods that are written in front of them.

::

    reasoner                               plain decoding
    dynasor-reasoner                       one method
    majority_vote@8-reasoner               with its number of samples
    dynasor+majority_vote@8-reasoner       the first inside the second
    dynasor&self_refine-reasoner           one after the other: the second asks the first's answer
    dynasor|majority_vote-reasoner         each gives a choice

A method's name may hold a ``-``, so the longest registered name in front of one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forethought import methods
from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.methods.stack import split

PLAIN = "plain"
_MAX_METHODS = 16


@dataclass(frozen=True, slots=True)
class Composition:
    """The methods of one request.

    Attributes:
        choices: one entry per choice: the stacks of methods that run one after the other, each
            written as for ``methods.stack``.
    """

    choices: tuple[tuple[str, ...], ...] = ((PLAIN,),)

    @property
    def spec(self) -> str:
        """As it is written."""
        return "|".join("&".join(stages) for stages in self.choices)

    @property
    def is_plain(self) -> bool:
        """Whether there is no method."""
        return self.choices == ((PLAIN,),)

    @property
    def is_one_stack(self) -> bool:
        """Whether there is a single stack of methods, to which settings belong."""
        return len(self.choices) == 1 and len(self.choices[0]) == 1


def read_method(spec: str) -> Composition:
    """The composition that a text describes.

    Raises:
        UnknownNameError: there is no such method.
        ParameterError: it is written wrongly, or has too many methods.
    """
    choices = tuple(tuple(choice.split("&")) for choice in spec.split("|"))
    stacked = [stack for stages in choices for stack in stages]
    if sum(len(stack.split("+")) for stack in stacked) > _MAX_METHODS:
        raise ParameterError(
            "too many methods in one request",
            f"{spec[:80]!r} has more than {_MAX_METHODS}",
            "",
            param="method",
        )
    for stack in stacked:
        for method in split(stack):
            if method.name not in methods.names():  # not module:Class, which would be imported
                raise UnknownNameError("method", method.name, methods.names())
    return Composition(choices)


def read_model(model: str, served: Sequence[str]) -> tuple[str, Composition | None]:
    """The served name that a client's ``model`` ends with, and the methods in front of it.

    Args:
        model: as the client gives it.
        served: names of the served model.

    Returns:
        The name, and the composition; None if there is none in front of it.

    Raises:
        UnknownNameError: no served model has this name.
        ParameterError: the methods are written wrongly.
    """
    if model in served:
        return model, None
    found = [(model.removesuffix(f"-{name}"), name) for name in sorted(served, key=len)]
    refusal: UsageError | None = None
    for spec, name in found:  # the longest spec first
        if spec != model:
            try:
                return name, read_method(spec)
            except UsageError as error:
                refusal = refusal or error
    raise refusal or UnknownNameError("model", model[:200], served)
