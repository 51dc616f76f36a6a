"""From a configuration to its drafter, by the table of drafters (``config.drafter_table``).

The engine builds configured drafters here and imports none of ``speculative.drafters``. Packages
add drafters of their own through the entry-point group ``forethought.drafter``, under the
``decoding_type`` of their configuration class.
"""

from __future__ import annotations

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
