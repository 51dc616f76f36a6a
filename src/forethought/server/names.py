"""The names of models that clients give, and the methods that are written in front of them.

::

    reasoner                               plain decoding
    dynasor-reasoner                       one method
    majority_vote@8-reasoner               with its number of samples
    dynasor+majority_vote@8-reasoner       the first inside the second
    dynasor&self_refine-reasoner           one after the other: the second asks the first's answer
    dynasor|majority_vote-reasoner         each gives a choice
    dynasor-reasoner:sql                   a method, and the LoRA adapter "sql" of the model

A method's name may hold a ``-``, so the longest registered name in front of one is taken. Names are
those of a closed ``MethodTable``: nothing is imported for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forethought import methods
from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.methods import MethodTable
from forethought.methods.stack import StackedMethod, split

PLAIN = "plain"
_MAX_METHODS, _MAX_LENGTH = 16, 1024


@dataclass(frozen=True, slots=True)
class Composition:
    """The methods of one request: an entry of ``choices`` per choice, whose stacks of methods run
    one after the other, each written as for ``methods.stack``.
    """

    choices: tuple[tuple[str, ...], ...] = ((PLAIN,),)
    table: MethodTable = field(default_factory=methods.shipped, compare=False, repr=False)

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

    def split(self, stack: str) -> list[StackedMethod]:
        """The methods of one of its stacks."""
        return split(stack, self.table)


def read_method(spec: str, table: MethodTable | None = None) -> Composition:
    """The composition that ``spec`` describes, as above but without a model.

    Raises:
        UnknownNameError: there is no such method.
        ParameterError: it is written wrongly, or has too many methods.
    """
    method_table = methods.shipped() if table is None else table
    if len(spec) > _MAX_LENGTH:
        what, why = "the name of the method is too long", f"more than {_MAX_LENGTH} characters"
        raise ParameterError(what, why, "", param="method")
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
        for method in split(stack, method_table):
            method_table.resolve(method.name)
    return Composition(choices, method_table)


def read_model(
    model: str, served: Sequence[str], table: MethodTable | None = None
) -> tuple[str, Composition | None]:
    """The served name that a client's ``model`` ends with, and the methods in front of it, if any.

    Raises:
        UnknownNameError: no served model has this name.
        ParameterError: the methods are written wrongly.
    """
    if model in served:
        return model, None
    splits = [(model.removesuffix(f"-{name}"), name) for name in sorted(served, key=len)]
    refusal: UsageError | None = None
    for spec, name in splits:  # the longest spec first
        if spec != model:
            try:
                return name, read_method(spec, table)
            except UsageError as error:
                refusal = refusal or error
    raise refusal or UnknownNameError("model", model[:200], served)
