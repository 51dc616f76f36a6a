"""N-gram drafting (prompt lookup): propose what followed an earlier occurrence of the last n-gram.

TensorRT-LLM's n-gram decoding with its options. A *pattern* is 1 to N consecutive tokens; its
*matches* are the runs of up to D tokens that followed it, distinct, in the order in which they were
first seen. A match is stored once, when its D tokens are known, so a step costs as much as it has
added tokens. Where no match of a pattern is complete, partial matches at the end of the text itself
are used (runs and short loops are found there).

It differs from TensorRT-LLM's in that pools are bounded, with the least recently used patterns of
the least recently active owner evicted; that they are isolated by ``cache_salt``; and that a
partial match is never returned where a longer one is known.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from forethought.errors import ParameterError
from forethought.speculative.chain_source import TextChains
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)

if TYPE_CHECKING:
    from forethought.config.drafters import NGramDecodingConfig
    from forethought.speculative.drafter import Target


Pattern = tuple[int, ...]
Match = tuple[int, ...]

MAX_MATCHES = 64
"""Matches that one pattern keeps at most; only the first or the last is ever returned."""


@dataclass(eq=False, slots=True)
class _Bucket:
    """The patterns of one owner, the most recently used last."""

    patterns: OrderedDict[Pattern, dict[Match, None]] = field(default_factory=OrderedDict)
    size: int = 0
    """Matches of all patterns."""


class NGramPool:
    """Matches by pattern, by owner.

    Args:
        max_ngram: N, tokens of the longest pattern.
        max_match: D, tokens of a complete match.
        keep_all: keep up to ``MAX_MATCHES`` matches of a pattern; else only the longest that was
            seen first.
        use_oldest: return the match that was seen first, else the newest one; without ``keep_all``
            of no effect.
        max_size: matches of all patterns of all owners at most.
    """

    def __init__(
        self, max_ngram: int, max_match: int, keep_all: bool, use_oldest: bool, max_size: int
    ) -> None:
        self.max_ngram, self.max_match = max_ngram, max_match
        self._use_oldest, self._max_size = use_oldest or not keep_all, max_size
        self._max_matches = MAX_MATCHES if keep_all else 1
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """Matches of all patterns of all owners."""
        return self._size

    @property
    def owners(self) -> list[Hashable]:
        """Owners with patterns, the most recently active one last."""
        return list(self._buckets)

    def matches(self, owner: Hashable, pattern: Sequence[int]) -> list[Match]:
        """The matches of one pattern, in the order in which they were first seen."""
        bucket = self._buckets.get(owner)
        return list(bucket.patterns.get(tuple(pattern), ())) if bucket else []

    def learn(self, owner: Hashable, tokens: Sequence[int], start: int, stop: int) -> None:
        """Store the matches of each pattern whose last token is at a position in [start, stop)."""
        bucket = self._bucket(owner)
        patterns, before, start = bucket.patterns, bucket.size, max(start, 0)
        offset = max(0, start + 1 - self.max_ngram)
        text = tuple(tokens[offset : stop + self.max_match])
        for middle in range(start + 1 - offset, stop + 1 - offset):  # after the patterns
            match = text[middle : middle + self.max_match]
            for begin in range(max(0, middle - self.max_ngram), middle):
                pattern = text[begin:middle]
                matches = patterns.get(pattern)
                if matches is None:
                    patterns[pattern] = {match: None}
                    bucket.size += 1
                    continue
                patterns.move_to_end(pattern)
                if match not in matches:
                    bucket.size += self._add(matches, match)
        self._size += bucket.size - before
        self._shrink()

    def look_up(self, owner: Hashable, tokens: Sequence[int]) -> Match:
        """The match of the longest known pattern that ``tokens`` end in; empty if none is known.

        Incomplete matches at the end of ``tokens`` itself are used too.
        """
        bucket = self._bucket(owner)
        text = tuple(tokens[-self.max_match - self.max_ngram :])  # its end
        recent = self._recent(text)
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            pattern = text[-size:]
            matches = bucket.patterns.get(pattern)
            longest: Match = ()
            if matches is not None:
                bucket.patterns.move_to_end(pattern)
                longest = next(iter(matches) if self._use_oldest else reversed(matches))
            if len(longest) < self.max_match:
                partial = self._partial(text, recent, pattern)
                longest = partial if len(partial) > len(longest) else longest
            if longest:
                return longest
        return ()

    def forget(self, owner: Hashable) -> None:
        """Drop all patterns of one owner."""
        bucket = self._buckets.pop(owner, None)
        if bucket is not None:
            self._size -= bucket.size

    def _bucket(self, owner: Hashable) -> _Bucket:
        bucket = self._buckets.get(owner)
        if bucket is None:
            bucket = self._buckets[owner] = _Bucket()
        self._buckets.move_to_end(owner)
        return bucket

    def _add(self, matches: dict[Match, None], match: Match) -> int:
        """Store another match of a pattern; return the change in its number of matches.

        All matches of a pattern are equally long: longer ones replace those that the end of a text
        has cut short.
        """
        before, length = len(matches), len(next(iter(matches)))
        if len(match) < length:
            return 0
        if len(match) > length:
            matches.clear()
        elif before == self._max_matches:
            if self._use_oldest:
                return 0
            del matches[next(iter(matches))]
        matches[match] = None
        return len(matches) - before

    def _recent(self, text: Match) -> list[int]:
        """Earlier positions of the last token, near the end: their matches are incomplete."""
        end, last = len(text), text[-1]
        return [at for at in range(max(0, end - self.max_match), end - 1) if text[at] == last]

    @staticmethod
    def _partial(text: Match, recent: list[int], pattern: Pattern) -> Match:
        """The longest incomplete match of a pattern at the end of a text."""
        size = len(pattern)
        for last in recent:
            if last + 1 >= size and text[last + 1 - size : last + 1] == pattern:
                return text[last + 1 :]
        return ()

    def _shrink(self) -> None:
        while self._size > self._max_size:
            owner, bucket = next(iter(self._buckets.items()))
            if bucket.patterns:
                _, matches = bucket.patterns.popitem(last=False)
                bucket.size -= len(matches)
                self._size -= len(matches)
            if not bucket.patterns:
                del self._buckets[owner]


class NGramDrafter(Drafter):
    """Looks the end of each request up in a pool of n-grams.

    Args:
        max_draft_len: tokens of a draft at most, at least 1.
        max_matching_ngram_size: tokens of the longest n-gram that is looked up, at least 1.
        is_keep_all: keep all matches of an n-gram, else only the longest that was seen first.
        is_use_oldest: propose the match seen first, else the newest; without ``is_keep_all`` of no
            effect.
        is_public_pool: one pool for all requests of the same ``cache_salt``, which outlives them;
            else one per request, dropped with it.
        max_pool_size: matches in all pools together, of about 0.4 KB each; the least recently used
            are evicted.

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
        """Requests with a text in the pool, by salt and prompt."""

    @classmethod
    def build(cls, config: NGramDecodingConfig, target: Target) -> NGramDrafter:
        """The configured drafter; ``target`` is not used."""
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
        """Whether no state of single requests is kept outside the pool."""
        return not self._learnt and not self._siblings

    @property
    @override
    def chain_source(self) -> TextChains:
        return TextChains(self)

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Add all requests' new tokens to the pool, then draft for each."""
        for request in scheduled_requests.generation_requests:
            self._learn(request, len(request.tokens) - self.max_draft_len)
        for request in scheduled_requests.generation_requests:
            limit = min(request.max_draft_len, request.max_nodes, self.max_draft_len)
            if limit > 0:
                match = self.pool.look_up(self._owner(request), request.tokens)
                request.py_draft_tokens = match[:limit]

    def release(self, request: DraftRequest) -> None:
        """Drop a private pool; add the end of the text to a public one."""
        if request.request_id not in self._learnt:
            return
        if self.is_public_pool:
            self._learn(request, len(request.tokens) - 1)
            self._count(request, -1)
        else:
            self.pool.forget(self._owner(request))
        del self._learnt[request.request_id]

    def _learn(self, request: DraftRequest, stop: int) -> None:
        start = self._learnt.get(request.request_id)
        if start is None:
            start = 0
            if self.is_public_pool:
                self._count(request, 1)
                if self._siblings[_prompt(request)] > 1:  # a sibling has added their common prompt
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
