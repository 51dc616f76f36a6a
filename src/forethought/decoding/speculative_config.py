"""What ``speculative_config`` may be: one way of drafting or several, however they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forethought.decoding.base import DecodingBaseConfig
from forethought.errors import ParameterError


def read_configs(value: Any) -> tuple[DecodingBaseConfig, ...]:
    """One configuration or several, however they are written, in order.

    Args:
        value: a configuration, a dictionary for ``from_dict``, a list of them, or None.

    Raises:
        UsageError: something else, a bad dictionary, or two with one name.
    """
    items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    configs = [_read(item) for item in items if item is not None]
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ParameterError(
            "two entries of speculative_config have one name",
            f"their names are {', '.join(names)}",
            "Set name, by which requests choose a drafter",
        )
    return tuple(configs)


def _read(item: Any) -> DecodingBaseConfig:
    if isinstance(item, Mapping):
        config: DecodingBaseConfig = DecodingBaseConfig.from_dict(item)
        return config
    if not isinstance(item, DecodingBaseConfig):
        raise ParameterError(
            "invalid speculative_config",
            f"got {item!r}",
            "Give a configuration such as NGramDecodingConfig(), a dictionary, or a list of them",
        )
    return item
