"""From a configuration to its drafter, by the table of drafters (``config.drafter_table``).

The engine builds configured drafters here and imports none of ``speculative.drafters``. Packages
add drafters of their own through the entry-point group ``forethought.drafter``, under the
``decoding_type`` of their configuration class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from forethought.config import drafter_table
from forethought.config.registry import Registry
from forethought.config.speculation import DecodingBaseConfig
from forethought.speculative.drafter import Drafter, Target


class DrafterClass(Protocol):
    """The interface of the classes in the table."""

    def build(self, config: Any, target: Target) -> Drafter:
        """The drafter that ``config`` describes."""
        ...


def build(config: DecodingBaseConfig, target: Target) -> Drafter:
    """The drafter of a configuration.

    Raises:
        UsageError: it does not fit the target, or its model cannot be loaded.
    """
    classes = {spec.decoding_type: spec.drafter for spec in drafter_table.DRAFTERS if spec.drafter}
    drafter_class: DrafterClass = Registry("drafter", classes).resolve(type(config).decoding_type)
    return drafter_class.build(config, target)


def inside(directory: Path) -> dict[str, str]:
    """The drafters that a target has in its own checkpoint: name for ``speculative_config`` -> what
    there is of it, in words.

    Raises ModelError for weight files that cannot be read.
    """
    specs = drafter_table.options().items()
    finders = {name: spec.inside for name, spec in specs if spec.inside is not None}
    registry = Registry("drafter", finders)
    modules = {name: registry.resolve(name)(directory) for name in finders}
    return {name: words for name, words in modules.items() if words is not None}
