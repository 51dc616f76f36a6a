"""The caller's own drafter: taken as it is."""

from __future__ import annotations

from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.errors import ParameterError
from forethought.speculative.drafter import Drafter, ResourceManager, Target


class UserProvided:
    """Hands out the instance that the configuration holds."""

    @classmethod
    def build(cls, config: UserProvidedDecodingConfig, target: Target) -> Drafter:
        """The drafter of ``config``, checked.

        Raises:
            ParameterError: it is not a ``Drafter``, or its manager is no ``ResourceManager``.
        """
        if not isinstance(config.drafter, Drafter):
            raise ParameterError(
                "invalid drafter in UserProvidedDecodingConfig",
                f"{type(config.drafter).__name__} is not a subclass of forethought.Drafter",
                "Derive it from Drafter, which has all methods but prepare_draft_tokens",
            )
        manager = config.resource_manager
        if manager is not None and not isinstance(manager, ResourceManager):
            raise ParameterError(
                "invalid resource_manager in UserProvidedDecodingConfig",
                f"{type(manager).__name__} is not a subclass of forethought.ResourceManager",
                "Derive it from ResourceManager, which has all methods but the two that count",
            )
        return config.drafter
