"""Tokens to read and not to write: what a drafter sees of a text that the engine owns.

A view copies nothing and grows with its text. A slice is a new list, made as fast as a list makes
it. Knows nothing about requests.

[drafter] What a drafter is: the base class of ours and of a user's own, and what it is shown.

A drafter in full::

    class Repeat(Drafter):
        def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
            for request in scheduled_requests.generation_requests:
                request.py_draft_tokens = [request.tokens[-1]] * request.max_draft_len

It proposes; it never decides. Whatever it proposes, the output is what plain decoding gives, and if
it raises, be it ``SystemExit``, or proposes what does not exist, its requests go on without. Only
Ctrl-C, and what a signal handler raises, end the call in which the drafter was asked. The names are
those of TensorRT-LLM's developer guide. Knows nothing about the engine.

[check] What a drafter answered, made fit for verification: cut where it goes too far or astray.

Never trusts a drafter's own arithmetic. Knows nothing about who asked.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, overload

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.speculative.draft import NO_DRAFT, Draft, DraftKind
from forethought.speculative.tree import node_depths

if TYPE_CHECKING:
    from forethought.kv.draft_cache import DraftKvCache
    from forethought.kv.table import TableView


class TokenView(Sequence[int]):
    """A list of token ids that cannot be written to; it equals lists with the same ids.

    Args:
        tokens: the list itself, which may grow and shrink meanwhile.
    """

    __slots__ = ("_tokens",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        return self._tokens[place]

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._tokens

    def index(self, token: int, start: int = 0, stop: int = sys.maxsize) -> int:
        """The first place of a token in [start, stop).

        Raises:
            ValueError: it is not there.
        """
        return self._tokens.index(token, start, stop)

    def count(self, token: int) -> int:
        """How often a token stands there."""
        return self._tokens.count(token)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenView):
            return self._tokens == other._tokens
        return self._tokens == other if isinstance(other, list) else NotImplemented

    def __add__(self, more: Sequence[int]) -> list[int]:
        return [*self._tokens, *more]

    def __radd__(self, before: Sequence[int]) -> list[int]:
        return [*before, *self._tokens]

    def __repr__(self) -> str:
        return f"TokenView({self._tokens!r})"


@dataclass(eq=False, slots=True)
class DraftRequest:
    """One request that is about to decode a token: what a drafter may know, and where it answers.

    The same object is shown in every step of a generation; ``tokens`` grows.
    """

    request_id: int
    tokens: Sequence[int]
    """Prompt and output so far, live and read-only: what writes to it raises ``TypeError``. A slice
    is a list. The last one is the root, which the draft follows."""
    prompt_length: int
    """Tokens before the current generation."""
    params: SamplingParams
    group: int
    """Equal among the samples of one prompt."""
    index: int
    """Which of the samples of its prompt this is."""
    seed: int
    """With ``index``, what its coins are drawn from."""
    max_draft_len: int = 0
    """Most depth of the draft in this step."""
    max_nodes: int = 0
    """Most tokens of the draft in this step."""
    table: TableView | None = None
    """Where its keys and values lie, to read; reaches ``max_nodes`` tokens behind the root, or,
    while it prefills, to the last token that this step computes."""
    draft: Draft = field(default=NO_DRAFT)
    """The answer."""

    @property
    def py_draft_tokens(self) -> list[int]:
        """The answer as a chain of token ids. Setting it proposes a chain of points."""
        return list(self.draft.tokens)

    @py_draft_tokens.setter
    def py_draft_tokens(self, tokens: Sequence[int] | None) -> None:
        self.draft = Draft(() if tokens is None else list(tokens))

    @property
    def py_request_id(self) -> int:
        """``request_id`` under TensorRT-LLM's name."""
        return self.request_id

    def get_tokens(self, beam: int = 0) -> list[int]:
        """A copy of ``tokens``.

        Raises:
            ParameterError: another beam than 0.
        """
        if beam != 0:
            raise ParameterError(
                "invalid beam", f"got {beam!r}, and there is no beam search", "Leave it out"
            )
        return list(self.tokens)


@dataclass(slots=True)
class ScheduledRequests:
    """The requests of one step that concern one drafter.

    Not all that run: left out are those that turn speculation off, want another drafter, got their
    draft from one before it, or are to have none by the length policy.
    """

    generation_requests: list[DraftRequest]
    """Those that want a draft; at least one."""
    context_requests: list[DraftRequest] = field(default_factory=list)
    """Those whose prompt this step is computing, the whole of it or a chunk, and that may want
    drafts later. They are there to be read: a draft of theirs is left alone, and none of them has
    asked the resource manager for anything yet. Empty where requests are asked for one by one."""

    @property
    def batch_size(self) -> int:
        """Number of requests in both lists."""
        return len(self.generation_requests) + len(self.context_requests)

    def all_requests(self) -> list[DraftRequest]:
        """Prefills first, as TensorRT-LLM orders them."""
        return [*self.context_requests, *self.generation_requests]


class Drafter(ABC):
    """Proposes tokens. Subclass it, and set ``request.py_draft_tokens`` or ``request.draft``."""

    @abstractmethod
    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Propose for each of ``scheduled_requests.generation_requests``, or leave it as it is.

        Called once in each step in which somebody wants a draft. If it raises, it is called again
        for each of these requests alone, and those for which it raises then get no more drafts.

        Args:
            scheduled_requests: the requests of this step, none of which has a draft yet.
            resource_manager: the one that the configuration names, if any.
        """

    def nodes(self, depth: int) -> int:
        """Most tokens of a draft of ``depth`` levels: the depth itself, unless it branches.

        So many slots of the KV cache are reserved, but never more than the configuration's
        ``max_total_draft_tokens``; ``DraftRequest.max_nodes`` says what has become of it.
        """
        return depth

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """Storages of its own over the target's pages; see ``kv.draft_cache``."""
        return ()

    @property
    def page_bytes(self) -> int:
        """Bytes that it stores for each page of the target."""
        return sum(draft_cache.storage.bytes_per_page for draft_cache in self.draft_caches)

    def resize(self, num_pages: int) -> None:
        """The target has so many pages now; called once, before the first request."""
        for draft_cache in self.draft_caches:
            draft_cache.resize(num_pages)

    def update(self, scheduled_requests: ScheduledRequests) -> None:
        """The step is over: ``tokens`` of each request now include what was accepted.

        Told of the requests of ``prepare_draft_tokens`` that go on. If it raises, none of them gets
        another draft.
        """

    def release(self, request: DraftRequest) -> None:
        """The generation is over, or gone: forget what was kept for it.

        Also told of requests that it never drafted for.
        """

    def shutdown(self) -> None:
        """The engine is going away."""


class ResourceManager(ABC):
    """State beside a user's drafter, told of a request's life; see TensorRT-LLM's guide.

    For each request: ``get_needed_resource_to_completion`` until there is room for it; then, in
    each step that drafts for it, ``prepare_resources`` once before the drafter is asked and
    ``update_resources`` once after verification; at last ``free_resources``, once, when it is over
    or gets no more drafts because something failed. If ``prepare_resources`` or
    ``update_resources`` raises, no request of that call gets another draft. ``shutdown`` is last of
    all.
    """

    @abstractmethod
    def get_max_resource_count(self) -> int:
        """How many units there are; a request that would exceed them gets no drafts."""

    @abstractmethod
    def get_needed_resource_to_completion(self, request: DraftRequest) -> int:
        """How many of them this request may come to need."""

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Before the drafter is asked, once for all that it is asked for."""

    def update_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """After verification, for those of them that go on."""

    def free_resources(self, request: DraftRequest) -> None:
        """The request, which held what it may need, gives it back."""

    def add_dummy_requests(self, request_ids: Sequence[int]) -> Any:
        """Never called here; there are no padded batches."""

    def shutdown(self) -> None:
        """The engine is going away."""


def check_draft(request: DraftRequest, vocab_size: int) -> Draft:
    """The request's draft as far as it can be verified.

    Left out are nodes that are not in the vocabulary, deeper than ``max_draft_len`` or more than
    ``max_nodes``, points that repeat a sibling, and whatever follows one of these.

    Raises:
        TypeError, ValueError: it is no draft at all.
    """
    draft = request.draft
    if draft is NO_DRAFT:
        return draft
    tokens = [index(token) for token in draft.tokens]
    parents = None if draft.parents is None else tuple(index(each) for each in draft.parents)
    if parents is not None and len(parents) != len(tokens):
        raise ValueError(f"{len(parents)} parents for {len(tokens)} tokens")
    if draft.kind is not DraftKind.POINT:
        _check_distribution(draft, len(tokens), vocab_size)
    bad = {node for node, token in enumerate(tokens) if not 0 <= token < vocab_size}
    if parents is None:
        end = min(len(tokens), request.max_nodes, request.max_draft_len, *bad)
        kept = list(range(end))
    else:
        distinct = draft.kind is DraftKind.POINT
        kept = _kept(tokens, parents, bad, request, distinct)
    if len(kept) == len(tokens):
        return Draft(tokens, parents, draft.kind, draft.q, draft.ids)
    if not kept:
        return NO_DRAFT
    place = {-1: -1, **{node: number for number, node in enumerate(kept)}}
    return Draft(
        tokens=[tokens[node] for node in kept],
        parents=None if parents is None else tuple(place[parents[node]] for node in kept),
        kind=draft.kind,
        q=None if draft.q is None else draft.q[kept],
        ids=draft.ids,
    )


def _check_distribution(draft: Draft, count: int, vocab_size: int) -> None:
    """Refuse a law that is not over the target's vocabulary, or the part of it that ``ids`` name.

    The contents of ``ids`` are trusted: looking would stall a GPU, and its owner made them once.
    """
    width = vocab_size if draft.ids is None else len(draft.ids)
    if draft.q is None or tuple(draft.q.shape) != (count, width) or width > vocab_size:
        raise ValueError(
            f"a draft of kind {draft.kind.value} needs the law of each of its {count} tokens, over "
            f"{width} ids"
        )


def _kept(
    tokens: list[int],
    parents: tuple[int, ...],
    bad: set[int],
    request: DraftRequest,
    distinct: bool,
) -> list[int]:
    """The nodes of a tree that stay; a node whose parent has gone goes with it."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} comes before its parent {parent}")
    kept = {-1}
    siblings: set[tuple[int, int]] = set()
    for node, depth in enumerate(node_depths(parents)):
        parent, token = parents[node], tokens[node]
        repeats = distinct and (parent, token) in siblings
        full = len(kept) > request.max_nodes
        if parent in kept and not (node in bad or repeats or full or depth > request.max_draft_len):
            siblings.add((parent, token))
            kept.add(node)
    return sorted(kept - {-1})
