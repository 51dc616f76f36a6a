"""Drafts from the caller's own drafter. Knows of it only how to load it and how large it drafts."""

from __future__ import annotations

from dataclasses import is_dataclass
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

import pydantic
from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.bounds import MOST_NODES, Nodes
from forethought.errors import ParameterError, UsageError
from forethought.registry import Registry


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts come from the caller's own ``Drafter``; see ``speculative.drafter``."""

    decoding_type: ClassVar[str] = "User_Provided"
    branches: ClassVar[bool] = True

    name: str = Field(default="user_provided", min_length=1)
    max_total_draft_tokens: Nodes = 0
    """Most tokens of a draft, all branches together, whatever the drafter's ``nodes`` says. Left
    out: what ``nodes`` says of a draft of ``max_draft_len`` levels."""
    drafter: Any
    """A ``Drafter``: an instance, or ``"module:Name"`` of a class without arguments."""
    resource_manager: Any = None
    """A ``ResourceManager``, or ``"module:Name"`` of one, told of each request's life."""

    _names: dict[str, str] = pydantic.PrivateAttr(default_factory=dict)
    """How the objects were named, if they were: a dump names them so."""

    if not TYPE_CHECKING:  # see DecodingBaseConfig

        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            for name in ("drafter", "resource_manager"):
                if isinstance(values.get(name), str):
                    self._names[name] = values[name]

    @pydantic.field_validator("drafter", "resource_manager", mode="after")
    @classmethod
    def _load(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        kind = str(info.field_name)
        try:
            made = Registry(kind, {}).create(value) if isinstance(value, str | type) else value
        except UsageError:
            raise
        except Exception as error:  # of the caller's own code
            raise ValueError(f"it cannot be made: {type(error).__name__}: {error}") from error
        method = "prepare_draft_tokens" if kind == "drafter" else "get_max_resource_count"
        if not callable(getattr(made, method, None)):
            raise ValueError(f"it has no method {method}")
        return made

    @pydantic.field_serializer("drafter", "resource_manager")
    def _dump(self, value: Any, info: pydantic.FieldSerializationInfo) -> Any:
        """The name that it was given by; an object stays itself where a dump may hold objects."""
        kept = info.mode == "python" and not is_dataclass(value)  # of which pydantic makes fields
        if value is None or (kept and info.field_name not in self._names):
            return value
        if info.field_name not in self._names:
            raise ParameterError(
                f"{info.field_name} cannot be written down",
                f"it is an object of {type(value).__name__}, and nothing says how to make it",
                'Give it as "module:Name", of a class without arguments',
            )
        return self._names[info.field_name]

    def _settle_lengths(self) -> None:
        """A draft is as large as the drafter says, unless ``max_total_draft_tokens`` does."""
        if not self.max_total_draft_tokens and self.max_draft_len:
            self._set("max_total_draft_tokens", self._own_size())
        super()._settle_lengths()

    def _own_size(self) -> int:
        try:
            size = index(self.drafter.nodes(self.max_draft_len))
        except Exception:  # of the caller's own code; the engine will see to it
            return self.max_draft_len
        return min(max(size, self.max_draft_len), MOST_NODES)
