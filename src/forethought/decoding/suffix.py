"""Drafts from suffixes: how they are configured. Knows nothing about how they are looked up."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.bounds import MOST_ENTRIES, MOST_FACTOR, MOST_SUFFIX, Levels


class SuffixDecodingConfig(DecodingBaseConfig):
    """Drafts are the likeliest continuations of the longest suffix that was seen before.

    SuffixDecoding (Oliaro et al., 2024), over what was said in the request itself, by the other
    samples of its prompt, and by earlier requests. See ``speculative.drafters.suffix``.
    """

    decoding_type: ClassVar[str] = "Suffix"
    branches: ClassVar[bool] = True

    name: str = Field(default="suffix", min_length=1)
    max_draft_len: Levels = 16
    max_tree_depth: int = Field(default=24, ge=1, le=MOST_SUFFIX)
    """Most tokens of a suffix that are compared."""
    max_spec_factor: float = Field(default=1.0, gt=0.0, le=MOST_FACTOR)
    """A suffix of n tokens is followed by at most this times n drafted ones."""
    min_token_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    """The draft ends where the continuation's estimated probability falls below this."""
    max_cached_requests: int = Field(default=10_000, ge=0, le=MOST_ENTRIES)
    """Most past outputs that are remembered, each for its own ``cache_salt``; 0: none."""
    max_cached_tokens: int = Field(default=1 << 17, ge=0, le=MOST_ENTRIES)
    """Most tokens of them, of about 0.6 KB each; the oldest outputs leave."""
