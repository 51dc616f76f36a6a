"""Proposes what followed the last n-gram before: in this text, or in any of the same tenant.

TensorRT-LLM's n-gram decoding with its options. What differs from it is in ``ngram_pool``: bounded,
isolated by ``cache_salt``, updated by the new tokens alone, and never answering with a shorter
match where it knows a longer one. Knows nothing about models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING

from forethought.errors import ParameterError
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.ngram_pool import NGramPool

if TYPE_CHECKING:
    from forethought.decoding import NGramDecodingConfig
    from forethought.speculative.table import Target


class NGramDrafter(Drafter):
    """Looks the end of each request up in a pool of n-grams.

    Args:
        max_draft_len: most tokens of a draft, at least 1.
        max_matching_ngram_size: tokens of the longest n-gram that is looked up, at least 1.
        is_keep_all: keep all matches of an n-gram, else the one that would be proposed.
        is_use_oldest: propose the match seen first, else the newest.
        is_public_pool: one pool for all requests of the same ``cache_salt``, which outlives them;
            else one per request, dropped with it.
        max_pool_size: most matches in all pools together; the least recently used leave. About
            0.4 KB each.

    Raises:
        ParameterError: a number is below 1.
    """

    def __init__(
        self,
        max_draft_len: int,
        max_matching_ngram_size: int = 2,
        *,
        is_keep_all: bool = True,
        is_use_oldest: bool = True,
        is_public_pool: bool = True,
        max_pool_size: int = 1 << 17,
    ) -> None:
        for name, value in (
            ("max_draft_len", max_draft_len),
            ("max_matching_ngram_size", max_matching_ngram_size),
            ("max_pool_size", max_pool_size),
        ):
            if value < 1:
                raise ParameterError(
                    f"invalid {name}", f"got {value}, and it must be at least 1", f"Change {name}"
                )
        self.max_draft_len = max_draft_len
        self.is_public_pool = is_public_pool
        self.pool = NGramPool(
            max_matching_ngram_size, max_draft_len, is_keep_all, is_use_oldest, max_pool_size
        )
        self._learnt: dict[int, int] = {}
        """By request: its n-grams that end before this position are in the pool."""
        self._siblings: Counter[tuple[str, int]] = Counter()
        """Requests with a text in the pool, by tenant and prompt."""

    @classmethod
    def build(cls, config: NGramDecodingConfig, target: Target) -> NGramDrafter:
        """As configured; it needs nothing of the target."""
        return cls(
            config.max_draft_len,
            config.max_matching_ngram_size,
            is_keep_all=config.is_keep_all,
            is_use_oldest=config.is_use_oldest,
            is_public_pool=config.is_public_pool,
            max_pool_size=config.max_pool_size,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is kept of any single request, beside what is in the pool."""
        return not self._learnt and not self._siblings

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Learn what all have added, then propose for each."""
        for request in scheduled_requests.generation_requests:
            self._learn(request, len(request.tokens) - self.max_draft_len)
        for request in scheduled_requests.generation_requests:
            limit = min(request.max_draft_len, request.max_nodes, self.max_draft_len)
            if limit > 0:
                found = self.pool.look_up(self._owner(request), request.tokens)
                request.py_draft_tokens = found[:limit]

    def release(self, request: DraftRequest) -> None:
        """A private pool goes; a public one learns the end of the text."""
        if request.request_id not in self._learnt:
            return
        if self.is_public_pool:
            self._learn(request, len(request.tokens) - 1)
            self._count(request, -1)
        else:
            self.pool.forget(self._owner(request))
        del self._learnt[request.request_id]

    def _learn(self, request: DraftRequest, stop: int) -> None:
        """Take n-grams that end before ``stop`` into the pool, but for those that are there."""
        start = self._learnt.get(request.request_id)
        if start is None:
            start = 0
            if self.is_public_pool:
                self._count(request, 1)
                if self._siblings[_prompt(request)] > 1:  # has learnt the prompt that they share
                    start = max(0, request.prompt_length - self.max_draft_len)
        if start < stop:
            self.pool.learn(self._owner(request), request.tokens, start, stop)
        self._learnt[request.request_id] = max(start, stop)

    def _owner(self, request: DraftRequest) -> Hashable:
        return request.params.cache_salt if self.is_public_pool else request.request_id

    def _count(self, request: DraftRequest, change: int) -> None:
        prompt = _prompt(request)
        self._siblings[prompt] += change
        if not self._siblings[prompt]:
            del self._siblings[prompt]


def _prompt(request: DraftRequest) -> tuple[str, int]:
    return request.params.cache_salt, request.group
