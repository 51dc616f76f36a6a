"""Drafts from the caller's own drafter. Knows of it only how to load it."""

from __future__ import annotations

from typing import Any, ClassVar

import pydantic
from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.errors import UsageError
from forethought.registry import Registry


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts come from the caller's own ``Drafter``; see ``speculative.drafter``."""

    decoding_type: ClassVar[str] = "User_Provided"
    branches: ClassVar[bool] = True

    name: str = Field(default="user_provided", min_length=1)
    drafter: Any
    """A ``Drafter``: an instance, or ``"module:Name"`` of a class without arguments."""
    resource_manager: Any = None
    """A ``ResourceManager``, or ``"module:Name"`` of one, told of each request's life."""

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
