"""The types that settings of controllers, tasks and workers have, checked by pydantic.

``validated("chunk_size", chunk_size, POSITIVE_INT)`` returns the value, or raises; it takes about a
microsecond. Types are strict: neither ``True`` nor ``"2"`` is a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import DirectoryPath, Field, TypeAdapter, ValidationError

from forethought.config.base import refusal, rule

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NotInRequests:
    """Marks, in ``Annotated``, a type of settings that a server's clients may not give.

    Paths, functions and objects are none of theirs without it.
    """

    reason: str
    """Why not, as a clause about the setting."""


NAMES_A_FILE = "it names a file of the server"
FileName = Annotated[str, NotInRequests(NAMES_A_FILE)]
"""A name under which something is read from or written to a directory of this machine."""

OnFailure = Literal["raise", "drop"]
"""What happens to a failure: it is raised in the controller that waits, or only recorded."""

Concurrency = int | Literal["doubling"] | None
"""Samples under way at once; ``"doubling"``: as many again as have ended; None: all."""

POSITIVE_INT: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True, ge=1)])
NON_NEGATIVE_INT: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True, ge=0)])
NON_NEGATIVE_FLOAT: TypeAdapter[float] = TypeAdapter(
    Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
)
SECONDS: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(strict=True, gt=0)])
OPTIONAL_POSITIVE_INT: TypeAdapter[int | None] = TypeAdapter(
    Annotated[int, Field(strict=True, ge=1)] | None
)
ANY_TEXT: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(strict=True)])
TEXT: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(strict=True, min_length=1)])
OPTIONAL_TEXT: TypeAdapter[str | None] = TypeAdapter(
    Annotated[str, Field(strict=True, min_length=1)] | None
)
OPTIONAL_BOOL: TypeAdapter[bool | None] = TypeAdapter(Annotated[bool | None, Field(strict=True)])
BOOL: TypeAdapter[bool] = TypeAdapter(Annotated[bool, Field(strict=True)])
WORDS: TypeAdapter[tuple[str, ...]] = TypeAdapter(
    tuple[Annotated[str, Field(strict=True, pattern=r"\S")], ...]
)
"""Any number of texts that are not blank; a single text is no sequence of words."""
FUNCTION: TypeAdapter[Any] = TypeAdapter(Callable[..., Any])
DIRECTORY: TypeAdapter[Path] = TypeAdapter(DirectoryPath)
CONCURRENCY: TypeAdapter[Concurrency] = TypeAdapter(
    Annotated[int, Field(strict=True, ge=1)] | Literal["doubling"] | None
)
ON_FAILURE: TypeAdapter[OnFailure] = TypeAdapter(OnFailure)


def validated(name: str, value: Any, kind: TypeAdapter[_T]) -> _T:
    """``value`` as ``kind``.

    Raises:
        ParameterError: it has another type, or is outside the range.
    """
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        raise refusal(name, value, rule(error.errors(include_url=False)[0])) from error
