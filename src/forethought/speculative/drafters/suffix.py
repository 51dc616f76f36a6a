"""Proposes what followed the longest match of a text's end: suffix decoding.

A request is matched against its own prompt and output, against those of its siblings (the samples
of one prompt draft for each other while they run), and against the outputs of past requests of the
same ``cache_salt``. The longer the match, the longer the draft. Source: SuffixDecoding (Oliaro et
al., 2024). Knows nothing about models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forethought.errors import ParameterError
from forethought.speculative.continuation import NOTHING, Continuation, chain, tree
from forethought.speculative.draft import Draft
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.past_outputs import PastOutputs
from forethought.speculative.suffix_index import SuffixIndex, Text

if TYPE_CHECKING:
    from forethought.decoding import SuffixDecodingConfig
    from forethought.speculative.table import Target


@dataclass(eq=False, slots=True)
class _Group:
    """The samples of one prompt."""

    index: SuffixIndex
    texts: dict[int, Text] = field(default_factory=dict)
    """By request, of those that still run."""
    first: Text = field(default_factory=list)
    """The text that was there first; it brought the prompt into the index."""

    def learn(self, request: DraftRequest) -> None:
        """Take in what a request has added, and its prompt unless that is known already."""
        tokens = request.tokens
        text = self.texts.get(request.request_id)
        if text is None:
            prompt = list(tokens[: request.prompt_length])
            known = self.first[: len(prompt)] == prompt
            text = self.texts[request.request_id] = prompt if known else []
            self.first = self.first or text
        start = len(text)
        if start < len(tokens):
            text.extend(tokens[start:])
            self.index.add(text, start, len(text))


class SuffixDrafter(Drafter):
    """Looks the end of each request up in what was said before.

    Args:
        max_draft_len: most depth of a draft, at least 1.
        max_total_draft_tokens: most tokens of a draft, at least ``max_draft_len``; where more than
            one continuation is likely, it is a tree. None: drafts are chains.
        max_tree_depth: most tokens that a match is compared over, at least 1. (The name is vLLM's.)
        max_spec_factor: depth of a draft per token matched, above 0. The paper's 1 suits a target
            whose time grows with each token verified; where a few more cost little, 4 accepts more.
        min_token_prob: paths that followed the match less often are not proposed, in [0, 1].
        max_cached_requests: most past outputs that are remembered, over all salts; 0: none.
        max_cached_tokens: most tokens of them; the oldest outputs leave. About 0.6 KB each.

    Raises:
        ParameterError: a value is outside its range.
    """

    def __init__(
        self,
        max_draft_len: int,
        max_total_draft_tokens: int | None = None,
        *,
        max_tree_depth: int = 24,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_requests: int = 10_000,
        max_cached_tokens: int = 1 << 17,
    ) -> None:
        total = max_draft_len if max_total_draft_tokens is None else max_total_draft_tokens
        for name, value, fits, range_ in (
            ("max_draft_len", max_draft_len, max_draft_len >= 1, "at least 1"),
            ("max_total_draft_tokens", total, total >= max_draft_len, "at least max_draft_len"),
            ("max_tree_depth", max_tree_depth, max_tree_depth >= 1, "at least 1"),
            ("max_spec_factor", max_spec_factor, max_spec_factor > 0, "above 0"),
            ("min_token_prob", min_token_prob, 0 <= min_token_prob <= 1, "in [0, 1]"),
            ("max_cached_requests", max_cached_requests, max_cached_requests >= 0, "at least 0"),
            ("max_cached_tokens", max_cached_tokens, max_cached_tokens >= 0, "at least 0"),
        ):
            if not fits:
                raise ParameterError(
                    f"invalid {name}", f"got {value}, and it must be {range_}", f"Change {name}"
                )
        self.max_draft_len, self.max_total_draft_tokens = max_draft_len, total
        self._max_depth, self._max_spec_factor = max_tree_depth, max_spec_factor
        self._min_token_prob = min_token_prob
        self._groups: dict[tuple[str, int], _Group] = {}
        self.past = PastOutputs(max_cached_requests, max_cached_tokens, max_tree_depth)

    @classmethod
    def build(cls, config: SuffixDecodingConfig, target: Target) -> SuffixDrafter:
        """As configured; it needs nothing of the target."""
        return cls(
            config.max_draft_len,
            config.max_total_draft_tokens,
            max_tree_depth=config.max_tree_depth,
            max_spec_factor=config.max_spec_factor,
            min_token_prob=config.min_token_prob,
            max_cached_requests=config.max_cached_requests,
            max_cached_tokens=config.max_cached_tokens,
        )

    @property
    def prompts(self) -> int:
        """Prompts of which a sample is still running."""
        return len(self._groups)

    def nodes(self, depth: int) -> int:
        """As large a share of ``max_total_draft_tokens`` as ``depth`` is of ``max_draft_len``."""
        return -(-self.max_total_draft_tokens * depth // self.max_draft_len)

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Learn what all have added, then propose for each."""
        for request in scheduled_requests.generation_requests:
            self._learn(request)
        for request in scheduled_requests.generation_requests:
            found = self._continue(request)
            request.draft = Draft(found.tokens, found.parents)

    def release(self, request: DraftRequest) -> None:
        """Its output joins the past ones; what its siblings share goes with the last of them."""
        group = self._groups.get(_group(request))
        if group is None or request.request_id not in group.texts:
            return
        group.learn(request)
        text = group.texts.pop(request.request_id)
        if not group.texts:
            del self._groups[_group(request)]
        self.past.add(request.params.cache_salt, text[request.prompt_length :])

    def _learn(self, request: DraftRequest) -> None:
        group = self._groups.get(_group(request))
        if group is None:
            group = self._groups[_group(request)] = _Group(SuffixIndex(self._max_depth))
        group.learn(request)

    def _continue(self, request: DraftRequest) -> Continuation:
        """The best of what its group and the past propose; the group's, if they are equal."""
        best = NOTHING
        depth = min(request.max_draft_len, request.max_nodes, self.max_draft_len)
        for index in (
            self._groups[_group(request)].index,
            self.past.index(request.params.cache_salt),
        ):
            if index is not None and best.score < depth:
                found = self._search(index, request, depth)
                best = found if found.score > best.score else best
        return best

    def _search(self, index: SuffixIndex, request: DraftRequest, depth: int) -> Continuation:
        length, places = index.find(request.tokens)
        nodes = min(request.max_nodes, self.nodes(depth))
        depth = min(depth, int(self._max_spec_factor * length + 1e-6))
        if depth < 1:
            return NOTHING
        if self.max_total_draft_tokens > self.max_draft_len and nodes > depth:
            return tree(places, depth, nodes, self._min_token_prob)
        return chain(places, depth, self._min_token_prob)


def _group(request: DraftRequest) -> tuple[str, int]:
    return request.params.cache_salt, request.group
