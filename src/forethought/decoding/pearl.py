"""Drafts of the next block meanwhile: how they are configured. Knows nothing about threads."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.bounds import Levels


class PearlDecodingConfig(DecodingBaseConfig):
    """A draft model drafts the next block while the target verifies this one.

    PEARL (Liu et al., 2024); pays where the two run on different devices. See
    ``speculative.drafters.pearl``.
    """

    decoding_type: ClassVar[str] = "Pearl"
    uses_model: ClassVar[bool] = True

    name: str = Field(default="pearl", min_length=1)
    max_draft_len: Levels = 4
    """Tokens of a block, which PEARL calls gamma."""
    draft_device: str | None = None
    """Where the draft model runs; None: where the target does."""
    overlap: bool = True
    """Draft in a thread of its own; False drafts the same blocks in turn with the target."""
