"""Drafts from n-grams: how they are configured. Knows nothing about how they are looked up."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.bounds import MOST_ENTRIES, MOST_NGRAM, Levels


class NGramDecodingConfig(DecodingBaseConfig):
    """Drafts are what followed the last few tokens when they stood there before.

    Prompt lookup decoding: needs no model. See ``speculative.drafters.ngram``.
    """

    decoding_type: ClassVar[str] = "NGram"

    name: str = Field(default="ngram", min_length=1)
    max_draft_len: Levels = 5
    max_matching_ngram_size: int = Field(default=2, ge=1, le=MOST_NGRAM)
    """Most tokens at the end that are looked up; the longest that is found wins."""
    is_keep_all: bool = True
    """Keep every continuation of a pattern; else only one, the longest."""
    is_use_oldest: bool = True
    """Propose the oldest continuation of a pattern; else the newest."""
    is_public_pool: bool = True
    """Requests look up what others have said, within one ``cache_salt``; else only their own."""
    max_pool_size: int = Field(default=1 << 17, ge=1, le=MOST_ENTRIES)
    """Most continuations in all pools, of about 0.4 KB each; the least recently used leave."""
