"""Suffix decoding: propose what followed the longest earlier match of a text's end.

SuffixDecoding (Oliaro et al., 2024). A request is matched against its own prompt and output,
against its siblings' (the samples of one prompt draft for each other), and against the outputs of
past requests of the same ``cache_salt``. The longer the match, the longer the draft.

The index finds the same matches as a suffix tree, but is kept as deflate keeps its window: n-grams
of three sizes lead to the positions after them, from where the texts are compared backwards. A
token costs three entries however long the matches are, a text can be removed again, and as only the
newest positions of a frequent n-gram are kept, a search is bounded.

A token's probability is its share among the continuations of the matches; a path's is the product
along it. The sum over all nodes of a draft is its expected number of accepted tokens (section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from typing_extensions import override

from forethought.errors import ParameterError
from forethought.speculative.chain_source import TextChains
from forethought.speculative.drafter import (
    Draft,
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)

if TYPE_CHECKING:
    from forethought.config.drafters import SuffixDecodingConfig
    from forethought.speculative.drafter import Target


Text = list[int]
Position = tuple[Text, int]
"""A text, and the position in it of the token after the match."""

SIZES = (6, 3, 1)
"""Sizes of the n-grams that lead to positions."""
MAX_POSITIONS = 16
"""Positions of an n-gram that are searched, the newest ones; more hardly improve the drafts."""


class SuffixIndex:
    """Positions in texts, by the tokens before them.

    Args:
        max_depth: tokens of a match that are compared at most, at least 1.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._sizes = tuple(size for size in SIZES if size <= max_depth)
        self._positions: dict[tuple[int, ...], list[Position]] = {}

    def __len__(self) -> int:
        """N-grams that lead to positions."""
        return len(self._positions)

    def add(self, text: Text, start: int, stop: int) -> None:
        """Index the positions [start, stop) of ``text``.

        The text is kept, not copied. It may grow, but its tokens must not change.
        """
        all_positions, sizes = self._positions, self._sizes
        for at in range(max(1, start), stop):
            position = (text, at)
            window = tuple(text[max(0, at - sizes[0]) : at])
            for size in sizes:
                if size <= at:
                    ngram = window[-size:]
                    positions = all_positions.get(ngram)
                    if positions is None:
                        all_positions[ngram] = [position]
                    elif len(positions) < 2 * MAX_POSITIONS:
                        positions.append(position)
                    else:
                        positions[:] = [*positions[1 - MAX_POSITIONS :], position]

    def remove(self, text: Text) -> None:
        """Remove all positions of a text, which is the oldest in the index."""
        for at in range(1, len(text)):
            for size in self._sizes:
                ngram = tuple(text[at - size : at]) if size <= at else ()
                positions = self._positions.get(ngram)
                if positions and positions[0][0] is text:
                    del positions[0]
                    if not positions:
                        del self._positions[ngram]

    def find(self, tokens: Sequence[int]) -> tuple[int, list[Position]]:
        """The longest match of the end of ``tokens``.

        Returns:
            Number of tokens matched, from 0 to ``max_depth``; and the newest positions after such
            a match, in order of age, the oldest first.
        """
        end = tuple(tokens[-self._max_depth :])
        for size in self._sizes:
            positions = self._positions.get(end[-size:]) if size <= len(end) else None
            if positions:
                return _longest(end, size, positions[-MAX_POSITIONS:])
        return 0, []


def _longest(
    end: tuple[int, ...], length: int, positions: list[Position]
) -> tuple[int, list[Position]]:
    """Those of ``positions`` with the longest match; all of them match ``length`` tokens."""
    if length == SIZES[0]:
        depth, whole = len(end), list(end)
        matching = [(text, at) for text, at in positions if text[max(0, at - depth) : at] == whole]
        if matching:
            return depth, matching
    while length < len(end):
        token, back = end[-1 - length], length + 1
        longer = [(text, at) for text, at in positions if at >= back and text[at - back] == token]
        if not longer:
            break
        positions, length = longer, back
    return length, positions


Ends = list[list[int]]
"""The tokens after some positions up to the ends of their texts, the newest position first."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A proposal; ``tokens`` and ``parents`` are those of a ``Draft``."""

    tokens: Sequence[int]
    parents: tuple[int, ...] | None
    score: float
    """Expected number of accepted tokens."""


NOTHING = Continuation((), None, 0.0)


def chain(positions: Sequence[Position], depth: int, min_prob: float) -> Continuation:
    """The most probable next token, repeatedly, at most ``depth`` times.

    It ends where the path's probability would fall below ``min_prob``. Of equally probable tokens
    the newest is taken.
    """
    ends = [text[at : at + depth] for text, at in reversed(positions)]
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


def tree(positions: Sequence[Position], depth: int, nodes: int, min_prob: float) -> Continuation:
    """The ``nodes`` most probable nodes, at most ``depth`` deep.

    Paths less probable than ``min_prob`` are left out. A parent is at least as probable as its
    children, so it always comes before them.
    """
    tokens: list[int] = []
    parents: list[int] = []
    score, pushed = 0.0, 0
    heap: list[tuple[float, int, int, int, int, Ends]] = []
    ends = [text[at : at + depth] for text, at in reversed(positions)]
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
    """The tokens at ``level``, each with its share and the continuations that contain it."""
    ends = [end for end in ends if len(end) > level]
    through: dict[int, Ends] = {}
    for end in ends:
        through.setdefault(end[level], []).append(end)
    for token, reaching in through.items():
        yield len(reaching) / len(ends), token, reaching


class PastOutputs:
    """Outputs and one index of them per salt.

    Args:
        max_requests: outputs over all salts at most; 0: none are kept.
        max_tokens: tokens of all outputs at most.
        max_depth: tokens of a match that are compared at most.
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

    def index(self, salt: str) -> SuffixIndex | None:
        """The outputs of one salt; None if there are none."""
        return self._indexes.get(salt)

    def add(self, salt: str, output: Text) -> None:
        """Keep an output, unless it has a single token, or more than all outputs may have."""
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
    """By id of the running requests."""
    first: Text = field(default_factory=list)
    """The first text, which has the prompt."""

    def learn(self, request: DraftRequest) -> None:
        tokens = request.tokens
        text = self.texts.get(request.request_id)
        if text is None:
            prompt = list(tokens[: request.prompt_length])
            is_prefix = self.first[: len(prompt)] == prompt
            text = self.texts[request.request_id] = prompt if is_prefix else []
            self.first = self.first or text
        start = len(text)
        if start < len(tokens):
            text.extend(tokens[start:])
            self.index.add(text, start, len(text))


class SuffixDrafter(Drafter):
    """Looks the end of each request up in earlier tokens.

    Args:
        max_draft_len: levels of a draft at most, at least 1.
        max_total_draft_tokens: tokens of a draft at most, at least ``max_draft_len``; if more,
            drafts may be trees. None: drafts are chains.
        max_tree_depth: tokens of a match that are compared at most, at least 1 (vLLM's name).
        max_spec_factor: depth of a draft per token matched, above 0. The paper's 1 suits a target
            whose time grows with each verified token; where a few more cost little, 4 accepts more.
        min_token_prob: paths that followed the match less often are not proposed, in [0, 1].
        max_cached_requests: past outputs that are kept, over all salts; 0: none.
        max_cached_tokens: their tokens, of about 0.6 KB each; the oldest outputs are evicted.

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
        """The configured drafter; ``target`` is not used."""
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
        """Number of prompts with a running sample."""
        return len(self._groups)

    def nodes(self, depth: int) -> int:
        """``max_total_draft_tokens``, in proportion to ``depth``."""
        return -(-self.max_total_draft_tokens * depth // self.max_draft_len)

    @property
    @override
    def chain_source(self) -> TextChains | None:
        return TextChains(self) if self.max_total_draft_tokens == self.max_draft_len else None

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Index all requests' new tokens, then draft for each."""
        for request in scheduled_requests.generation_requests:
            self._learn(request)
        for request in scheduled_requests.generation_requests:
            continuation = self._continue(request)
            request.draft = Draft(continuation.tokens, continuation.parents)

    def release(self, request: DraftRequest) -> None:
        """Add its output to the past ones; drop the index of the prompt with its last sample."""
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
        """The better continuation of its group's index and the past outputs'."""
        best = NOTHING
        depth = min(request.max_draft_len, request.max_nodes, self.max_draft_len)
        for index in (
            self._groups[_group(request)].index,
            self.past.index(request.params.cache_salt),
        ):
            if index is not None and best.score < depth:
                candidate = self._search(index, request, depth)
                best = candidate if candidate.score > best.score else best
        return best

    def _search(self, index: SuffixIndex, request: DraftRequest, depth: int) -> Continuation:
        length, positions = index.find(request.tokens)
        nodes = min(request.max_nodes, self.nodes(depth))
        depth = min(depth, int(self._max_spec_factor * length + 1e-6))
        if depth < 1:
            return NOTHING
        if self.max_total_draft_tokens > self.max_draft_len and nodes > depth:
            return tree(positions, depth, nodes, self._min_token_prob)
        return chain(positions, depth, self._min_token_prob)


def _group(request: DraftRequest) -> tuple[str, int]:
    return request.params.cache_salt, request.group
