"""Finds where the end of a text has stood before: the longest match, at its newest places.

It answers what a suffix tree answers, but is kept as deflate keeps its window: n-grams of three
sizes lead to the places behind them, and from there the texts themselves are compared backwards.
A token costs three entries, however long the matches may be, where a tree with counts costs as many
as its depth; a text can be taken away again; and as a common n-gram keeps its newest places only, a
search is bounded too. Knows nothing about requests.

[continuation] What is likely to come behind places that look alike: what came behind them, counted.

A token's probability is its share of the places; a path's is the product along it. The sum over all
nodes of a draft is the number of its tokens that are expected to be accepted (SuffixDecoding, 2024,
section 4). Knows nothing about how the places were found.

[past_outputs] Remembers what was generated before: a bounded queue of outputs, searchable by
tenant.

The oldest outputs leave first. Knows nothing about requests.

[suffix] Proposes what followed the longest match of a text's end: suffix decoding.

A request is matched against its own prompt and output, against those of its siblings (the samples
of one prompt draft for each other while they run), and against the outputs of past requests of the
same ``cache_salt``. The longer the match, the longer the draft. Source: SuffixDecoding (Oliaro et
al., 2024). Knows nothing about models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from forethought.errors import ParameterError
from forethought.speculative.draft import Draft
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)

if TYPE_CHECKING:
    from forethought.config.drafters import SuffixDecodingConfig
    from forethought.speculative.registry import Target


Text = list[int]
Position = tuple[Text, int]
"""A text, and the position in it of the token behind the match."""

SIZES = (6, 3, 1)
"""Sizes of the n-grams that lead to places."""
MAX_POSITIONS = 16
"""Most places of one n-gram that are searched, the newest ones. More found hardly better drafts."""


class SuffixIndex:
    """Places by what stands before them.

    Args:
        max_depth: most tokens that a match is compared over, at least 1.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._sizes = tuple(size for size in SIZES if size <= max_depth)
        self._places: dict[tuple[int, ...], list[Position]] = {}

    def __len__(self) -> int:
        """N-grams that lead to places."""
        return len(self._places)

    def add(self, text: Text, start: int, stop: int) -> None:
        """Make the places at positions [start, stop) of ``text`` findable.

        The text is kept, not copied. It may grow; what it holds must not change.
        """
        all_places, sizes = self._places, self._sizes
        for at in range(max(1, start), stop):
            place = (text, at)
            window = tuple(text[max(0, at - sizes[0]) : at])
            for size in sizes:
                if size <= at:
                    ngram = window[-size:]
                    places = all_places.get(ngram)
                    if places is None:
                        all_places[ngram] = [place]
                    elif len(places) < 2 * MAX_POSITIONS:
                        places.append(place)
                    else:
                        places[:] = [*places[1 - MAX_POSITIONS :], place]

    def remove(self, text: Text) -> None:
        """Take all places of a text away; of the texts that are left it was added first."""
        for at in range(1, len(text)):
            for size in self._sizes:
                ngram = tuple(text[at - size : at]) if size <= at else ()
                places = self._places.get(ngram)
                if places and places[0][0] is text:
                    del places[0]
                    if not places:
                        del self._places[ngram]

    def find(self, tokens: Sequence[int]) -> tuple[int, list[Position]]:
        """The longest match of the end of ``tokens``.

        Returns:
            Tokens matched, 0 if nothing is, at most ``max_depth``; the newest of the places behind
            such a match, the oldest of them first.
        """
        end = tuple(tokens[-self._max_depth :])
        for size in self._sizes:
            places = self._places.get(end[-size:]) if size <= len(end) else None
            if places:
                return _longest(end, size, places[-MAX_POSITIONS:])
        return 0, []


def _longest(
    end: tuple[int, ...], length: int, places: list[Position]
) -> tuple[int, list[Position]]:
    """Those of ``places``, which match in ``length`` tokens, that match in the most."""
    if length == SIZES[0]:
        depth, whole = len(end), list(end)
        matching = [(text, at) for text, at in places if text[max(0, at - depth) : at] == whole]
        if matching:
            return depth, matching
    while length < len(end):
        token, back = end[-1 - length], length + 1
        longer = [(text, at) for text, at in places if at >= back and text[at - back] == token]
        if not longer:
            break
        places, length = longer, back
    return length, places


Ends = list[list[int]]
"""The tokens behind some places, the newest place first. They are as long as their texts go on."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A proposal; ``tokens`` and ``parents`` are those of a ``Draft``."""

    tokens: Sequence[int]
    parents: tuple[int, ...] | None
    score: float
    """Tokens that are expected to be accepted."""


NOTHING = Continuation((), None, 0.0)


def chain(places: Sequence[Position], depth: int, min_prob: float) -> Continuation:
    """The likeliest next token, again and again, at most ``depth`` times.

    It ends where the path's probability would fall below ``min_prob``. Of equally likely tokens it
    takes the newest.
    """
    ends = [text[at : at + depth] for text, at in reversed(places)]
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    while len(ends) > 1:
        level = len(tokens)
        ends = [end for end in ends if len(end) > level]
        heads = [end[level] for end in ends]
        if not heads:
            break
        token = max(dict.fromkeys(heads), key=heads.count)
        count = heads.count(token)
        if count < len(heads):
            prob *= count / len(heads)
            ends = [end for end in ends if end[level] == token]
        if prob < min_prob:
            return Continuation(tokens, None, score)
        tokens.append(token)
        score += prob
    rest = ends[0][len(tokens) :] if ends else []
    return Continuation(tokens + rest, None, score + prob * len(rest))


def tree(places: Sequence[Position], depth: int, nodes: int, min_prob: float) -> Continuation:
    """The likeliest ``nodes`` nodes of all, at most ``depth`` deep.

    None of a path less likely than ``min_prob``. A parent is at least as likely as its children, so
    it always comes before them.
    """
    tokens: list[int] = []
    parents: list[int] = []
    score, pushed = 0.0, 0
    heap: list[tuple[float, int, int, int, int, Ends]] = []
    ends = [text[at : at + depth] for text, at in reversed(places)]
    prob, node, level = 1.0, -1, 0
    while True:
        for share, token, reaching in _branches(ends, level):
            if prob * share >= min_prob:
                heappush(heap, (-prob * share, pushed, token, node, level, reaching))
                pushed += 1
        if not heap:
            break
        negative, _, token, parent, above, ends = heappop(heap)
        prob, node, level = -negative, len(tokens), above + 1
        tokens.append(token)
        parents.append(parent)
        score += prob
        if len(tokens) == nodes:
            break
    thin = parents == list(range(-1, len(parents) - 1))
    return Continuation(tokens, None if thin else tuple(parents), score)


def _branches(ends: Ends, level: int) -> Iterator[tuple[float, int, Ends]]:
    """The tokens at ``level``, each with its share and the ends that go through it."""
    ends = [end for end in ends if len(end) > level]
    through: dict[int, Ends] = {}
    for end in ends:
        through.setdefault(end[level], []).append(end)
    for token, reaching in through.items():
        yield len(reaching) / len(ends), token, reaching


class PastOutputs:
    """Outputs and one index of them per salt.

    Args:
        max_requests: most outputs, over all salts; 0: none are kept.
        max_tokens: most tokens of all outputs.
        max_depth: most tokens that a match is compared over.
    """

    def __init__(self, max_requests: int, max_tokens: int, max_depth: int) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._max_depth = max_depth
        self._indexes: dict[str, SuffixIndex] = {}
        self._outputs: deque[tuple[str, Text]] = deque()
        """Salt and text, the oldest first."""
        self.tokens = 0
        """Tokens of all outputs."""

    def __len__(self) -> int:
        """Outputs of all salts."""
        return len(self._outputs)

    @property
    def salts(self) -> list[str]:
        """Those who have outputs here."""
        return list(self._indexes)

    def index(self, salt: str) -> SuffixIndex | None:
        """The outputs of one salt; None if there are none."""
        return self._indexes.get(salt)

    def add(self, salt: str, output: Text) -> None:
        """Remember an output, unless it is too short to say what follows what, or too long."""
        if not self._max_requests or not 1 < len(output) <= self._max_tokens:
            return
        index = self._indexes.get(salt)
        if index is None:
            index = self._indexes[salt] = SuffixIndex(self._max_depth)
        index.add(output, 1, len(output))
        self._outputs.append((salt, output))
        self.tokens += len(output)
        while len(self._outputs) > self._max_requests or self.tokens > self._max_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        salt, output = self._outputs.popleft()
        self.tokens -= len(output)
        self._indexes[salt].remove(output)
        if not len(self._indexes[salt]):
            del self._indexes[salt]


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
