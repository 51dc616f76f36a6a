"""The base of everything that a caller configures: fields by name, no others, none changed later.

A name whose value is None, ``null`` in YAML, is not given: its field has its default, and a name
that there is not asks for nothing (``cuda_graph_config: null`` in a file for TensorRT-LLM).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import pydantic
from pydantic import AliasChoices, BaseModel, ConfigDict

from forethought.errors import ParameterError, UsageError

_Model = TypeVar("_Model", bound="StrictModel")


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses what cannot be with a ``ParameterError``.

    Raises:
        ParameterError: an unknown name, or a value of the wrong type or outside its range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    if not TYPE_CHECKING:  # checkers and editors see pydantic's own, which knows the fields

        def __init__(self, **values: Any) -> None:
            values = {name: value for name, value in values.items() if value is not None}
            known = set(type(self).model_fields)
            for info in type(self).model_fields.values():
                if isinstance(info.validation_alias, AliasChoices):
                    known |= {str(choice) for choice in info.validation_alias.choices}
            unknown = set(values) - known
            if unknown:
                raise ParameterError.unknown(type(self).__name__, unknown, type(self).model_fields)
            try:
                super().__init__(**values)
            except pydantic.ValidationError as error:
                raise _refusal(type(self).__name__, error) from error

    @classmethod
    def from_dict(cls: type[_Model], values: dict[str, Any]) -> _Model:
        """Build from field names and values.

        Raises:
            ParameterError: an unknown name, or a value of the wrong type or outside its range.
        """
        return cls(**values)


def _refusal(owner: str, error: pydantic.ValidationError) -> UsageError:
    """The first complaint of pydantic in our own words, or the refusal that it has caught."""
    first = error.errors()[0]
    caught = first.get("ctx", {}).get("error")
    if isinstance(caught, UsageError):
        return caught
    name = ".".join(str(part) for part in first["loc"]) or owner
    if first["type"] == "missing":
        return ParameterError(f"{owner} needs {name}", "it is not given", f"Give {name}")
    return ParameterError(
        f"invalid {name} in {owner}", f"got {first['input']!r}: {first['msg']}", f"Change {name}"
    )
