"""The drafter interface: drafts, base classes of our drafters and custom ones, and their input.

A complete drafter::

    class Repeat(Drafter):
        def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
            for request in scheduled_requests.generation_requests:
                request.py_draft_tokens = [request.tokens[-1]] * request.max_draft_len

A drafter proposes, the target decides: whatever is proposed, outputs have the distribution of plain
decoding, and greedy ones its tokens.
If a drafter raises (``SystemExit`` included) or proposes an invalid draft, its requests continue
without drafts; ``check_draft`` cuts what cannot be verified. Only Ctrl-C, and what a signal handler
raises, end the call in which the drafter ran. Names are those of TensorRT-LLM's developer guide.

A draft is a tree of proposed tokens that follow the last known one. Node numbers count the drafted
tokens from 0; -1 is the root, the last known token. A chain is a tree without branches. A draft
states how its tokens were drawn, because verification is exact only for the distribution that they
really come from.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, overload

from forethought.config.sampling import SamplingParams
from forethought.config.tree import node_depths
from forethought.errors import ParameterError

if TYPE_CHECKING:
    from torch import Tensor

    from forethought.kv.storage import DraftKvCache
    from forethought.kv.table import ReadableTable, TableView
    from forethought.model.hidden_states import HiddenStateCache
    from forethought.model.runner import ModelRunner
    from forethought.model.sampling import SequenceBreakers


class DraftKind(Enum):
    """How the children of one node were chosen."""

    POINT = "point"
    """Deterministically, or at random in a way that verification need not know: n-grams, the k most
    probable tokens, beams. Each is tested as a point mass."""
    IID = "iid"
    """Drawn independently from ``q`` (chains; SpecInfer's trees)."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Drawn one after the other from ``q``, earlier siblings taken out."""


class DeviceTokens(Sequence[int]):
    """Tokens of a draft that are on a GPU: the host need not wait for them before the forward.

    Verification brings them to the host together with the target's own tokens. Reading
    one before that waits for the drafter.

    Args:
        on_device: int64 ``[N]``, ids of the target's vocabulary.
    """

    __slots__ = ("_read", "on_device")

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        self._read: list[int] | None = None

    @property
    def is_read(self) -> bool:
        """Whether they are on the host."""
        return self._read is not None

    def set(self, tokens: list[int]) -> None:
        """Their values, which the caller has brought to the host."""
        assert len(tokens) == len(self)
        self._read = tokens

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if self._read is None:
            self._read = self.on_device.tolist()
        return self._read[index]

    def __len__(self) -> int:
        return len(self.on_device)


@dataclass(frozen=True, slots=True)
class Draft:
    """N proposed tokens.

    Attributes:
        tokens: N ids of the target's vocabulary, or ``DeviceTokens``.
        parents: the node that each one follows, -1 for the root; parents come before children.
            None: a chain.
        kind: how siblings were chosen.
        q: None for ``POINT``; else float32 ``[N, D]``, on the target's device: row n is the
            distribution that node n's token was drawn from, before any sibling was taken out.
        ids: int64 ``[D]``, the target's id of each column of ``q``; None: D is its vocabulary.
    """

    tokens: Sequence[int]
    parents: tuple[int, ...] | None = None
    kind: DraftKind = DraftKind.POINT
    q: Tensor | None = None
    ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, node: int) -> int:
        """The node that ``node`` follows; -1 is the root."""
        return node - 1 if self.parents is None else self.parents[node]

    @property
    def depths(self) -> list[int]:
        """Depth of each node: 1 for the children of the root."""
        if self.parents is None:
            return list(range(1, len(self) + 1))
        return node_depths(self.parents)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return len(self) if self.parents is None else max(self.depths, default=0)


NO_DRAFT = Draft(())
"""Nothing is proposed: plain decoding."""


class TokenView(Sequence[int]):
    """A read-only view of a list of token ids; it equals lists with the same ids.

    Args:
        tokens: the list itself, not copied; it may grow and shrink.
    """

    __slots__ = ("_tokens",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._tokens

    def index(self, token: int, start: int = 0, stop: int = sys.maxsize) -> int:
        """The first index of a token in [start, stop); raises ``ValueError`` if there is none."""
        return self._tokens.index(token, start, stop)

    def count(self, token: int) -> int:
        """Number of occurrences of a token."""
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
    """One request about to decode: a drafter's input, and the place of its draft.

    It is the same object in every step of a generation; ``tokens`` grows.
    """

    request_id: int
    tokens: Sequence[int]
    """Prompt and output so far, live and read-only: writing raises ``TypeError``. A slice is a
    list. The last one is the root, which the draft follows."""
    prompt_length: int
    """Tokens before the current generation."""
    params: SamplingParams
    group: int
    """Equal among the samples of one prompt."""
    index: int
    """Which of the samples of its prompt this is."""
    seed: int
    """With ``index`` and a position, determines the uniform samples."""
    max_draft_len: int = 0
    """Greatest depth of the draft in this step."""
    max_nodes: int = 0
    """Greatest number of tokens of the draft in this step."""
    table: TableView | None = None
    """Its page table, read-only; it covers ``max_nodes`` tokens after the root or, during prefill,
    ends at the last token that this step computes."""
    draft: Draft = field(default=NO_DRAFT)
    """The proposed draft."""
    breakers: SequenceBreakers | None = None
    """What ends a repeat, for DRY."""

    @property
    def py_draft_tokens(self) -> list[int]:
        """The draft's token ids. Setting them proposes a chain of points."""
        return list(self.draft.tokens)

    @py_draft_tokens.setter
    def py_draft_tokens(self, tokens: Sequence[int] | None) -> None:
        self.draft = Draft(() if tokens is None else list(tokens))

    @property
    def py_request_id(self) -> int:
        """``request_id`` under TensorRT-LLM's name."""
        return self.request_id

    def get_tokens(self, beam: int = 0) -> list[int]:
        """A copy of ``tokens``; ``beam`` has to be 0."""
        if beam != 0:
            raise ParameterError(
                "invalid beam", f"got {beam!r}, and there is no beam search", "Leave it out"
            )
        return list(self.tokens)


def table_of(request: DraftRequest) -> ReadableTable:
    """Where its tokens lie."""
    assert request.table is not None
    return request.table


def readable(
    requests: Sequence[DraftRequest], hidden_states: HiddenStateCache
) -> list[DraftRequest]:
    """The requests that may have a draft and whose hidden states for it are stored."""
    return [
        request
        for request in requests
        if request.max_nodes > 0
        and hidden_states.is_readable(table_of(request), _num_computed(request))
    ]


def root_states(requests: Sequence[DraftRequest], hidden_states: HiddenStateCache) -> Tensor:
    """The hidden state that the root of each request was sampled from: ``[N, width]``."""
    tables = list(map(table_of, requests))
    return hidden_states.read_last(tables, list(map(_num_computed, requests)))


def _num_computed(request: DraftRequest) -> int:
    return len(request.tokens) - 1


@dataclass(slots=True)
class ScheduledRequests:
    """The requests of one step that concern one drafter.

    Left out are requests that turn speculation off, want another drafter, got a draft from an
    earlier drafter, or are to have none by the length policy.
    """

    generation_requests: list[DraftRequest]
    """Requests to draft for; at least one."""
    context_requests: list[DraftRequest] = field(default_factory=list)
    """Requests whose prompt, or a chunk of it, this step computes, and that may want drafts later.
    They are read-only: their drafts are ignored, and they hold no units of the resource manager
    yet. Empty where the drafter is called for each request alone."""

    @property
    def batch_size(self) -> int:
        """Number of requests in both lists."""
        return len(self.generation_requests) + len(self.context_requests)

    def all_requests(self) -> list[DraftRequest]:
        """Prefills first, as TensorRT-LLM orders them."""
        return [*self.context_requests, *self.generation_requests]


@dataclass(frozen=True, slots=True)
class Target:
    """The model to draft for, as drafters see it."""

    runner: ModelRunner
    """Its network, and the KV storage whose pages draft KV caches follow."""
    max_num_tokens: int
    """Tokens in one step; a draft model's prefill keeps to it as well."""


class ChainSource(Protocol):
    """A source of chains of points for greedy requests."""

    @property
    def max_positions(self) -> float:
        """Known and drafted tokens of a sequence that it can read."""
        ...

    @property
    def learns_from_ends(self) -> bool:
        """Whether drafts depend on rows that have ended: then the first one ends the call."""
        ...

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """Its caches over the target's pages."""
        ...

    def can_follow(self, request: DraftRequest) -> bool:
        """Whether what it reads of the target is stored up to the root of a request."""
        ...

    def draft(self, requests: list[DraftRequest]) -> None:
        """Set the drafts of requests, or leave them unset."""
        ...


class Drafter(ABC):
    """Proposes tokens. Subclass it, and set ``request.py_draft_tokens`` or ``request.draft``."""

    @abstractmethod
    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Propose for each of ``scheduled_requests.generation_requests``, or leave it as it is.

        Called once in each step in which a request wants a draft. If it raises, it is called again
        for each of these requests alone; those for which it raises again get no more drafts.

        Args:
            scheduled_requests: the requests of this step, without drafts so far.
            resource_manager: the one that the configuration names, if any.
        """

    def nodes(self, depth: int) -> int:
        """Greatest number of tokens of a draft of ``depth`` levels: ``depth`` unless it branches.

        This many slots of the KV cache are reserved, but never more than the configuration's
        ``max_total_draft_tokens``; ``DraftRequest.max_nodes`` is what was granted.
        """
        return depth

    @property
    def forward_path(self) -> str:
        """What computes its network, as ``EngineStats.draft_paths`` says it; empty: it has none."""
        return ""

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """Its caches over the target's pages; see ``kv.draft_cache``."""
        return ()

    @property
    def chain_source(self) -> ChainSource | None:
        """What makes several steps with its drafts in one call (``speculative.step_runner``), in
        which it is not asked, nor told by ``update``; None: each step asks for its drafts.
        """
        return None

    @property
    def page_bytes(self) -> int:
        """Bytes of its caches per page of the target."""
        return sum(draft_cache.storage.bytes_per_page for draft_cache in self.draft_caches)

    def resize(self, num_pages: int) -> None:
        """Set the number of the target's pages; called once, before the first request."""
        for draft_cache in self.draft_caches:
            draft_cache.resize(num_pages)

    def update(self, scheduled_requests: ScheduledRequests) -> None:
        """Called after verification: ``tokens`` of each request now include what was accepted.

        With the requests of ``prepare_draft_tokens`` that continue. If it raises, none of them gets
        another draft.
        """

    def release(self, request: DraftRequest) -> None:
        """Called when a generation ends, however it does: drop what is kept for it.

        Also called for requests that it never drafted for.
        """

    def shutdown(self) -> None:
        """Called when the engine shuts down."""


class ResourceManager(ABC):
    """State with limits beside a custom drafter; see TensorRT-LLM's developer guide.

    For each request: ``get_needed_resource_to_completion`` until enough units are free; then, in
    each step that drafts for it, ``prepare_resources`` once before the drafter and
    ``update_resources`` once after verification; finally ``free_resources``, once, when it ends or
    gets no more drafts because of an error. If ``prepare_resources`` or ``update_resources``
    raises, no request of that call gets another draft. ``shutdown`` comes last.
    """

    @abstractmethod
    def get_max_resource_count(self) -> int:
        """Number of units; a request that would exceed them gets no drafts."""

    @abstractmethod
    def get_needed_resource_to_completion(self, request: DraftRequest) -> int:
        """Number of units that this request may need."""

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Called before the drafter, with all requests that it drafts for."""

    def update_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Called after verification, with those of them that continue."""

    def free_resources(self, request: DraftRequest) -> None:
        """Free the units that the request held."""

    def add_dummy_requests(self, request_ids: Sequence[int]) -> Any:
        """Never called here; there are no padded batches."""

    def shutdown(self) -> None:
        """Called when the engine shuts down."""


def check_draft(request: DraftRequest, vocab_size: int) -> Draft:
    """The part of the request's draft that can be verified.

    Left out are tokens outside the vocabulary, nodes deeper than ``max_draft_len`` or more than
    ``max_nodes``, points that repeat a sibling, and their descendants.

    Raises:
        TypeError, ValueError: it is not a draft.
    """
    draft = request.draft
    if draft is NO_DRAFT or _is_sound_on_device(draft, request, vocab_size):
        return draft
    tokens = list(map(operator.index, draft.tokens))
    parents = (
        None if draft.parents is None else tuple(operator.index(parent) for parent in draft.parents)
    )
    if parents is not None and len(parents) != len(tokens):
        raise ValueError(f"{len(parents)} parents for {len(tokens)} tokens")
    if draft.kind is not DraftKind.POINT:
        _check_q(draft, len(tokens), vocab_size)
    elif _is_sound(tokens, parents, request, vocab_size):  # most are
        return Draft(tokens, parents)
    invalid = {node for node, token in enumerate(tokens) if not 0 <= token < vocab_size}
    if parents is None:
        end = min(len(tokens), request.max_nodes, request.max_draft_len, *invalid)
        nodes = list(range(end))
    else:
        distinct = draft.kind is DraftKind.POINT
        nodes = _kept(tokens, parents, invalid, request, distinct)
    if len(nodes) == len(tokens):
        return Draft(tokens, parents, draft.kind, draft.q, draft.ids)
    if not nodes:
        return NO_DRAFT
    number = {-1: -1, **{node: new for new, node in enumerate(nodes)}}
    return Draft(
        tokens=[tokens[node] for node in nodes],
        parents=None if parents is None else tuple(number[parents[node]] for node in nodes),
        kind=draft.kind,
        q=None if draft.q is None else draft.q[nodes],
        ids=draft.ids,
    )


def _is_sound(
    tokens: list[int], parents: tuple[int, ...] | None, request: DraftRequest, vocab_size: int
) -> bool:
    size = len(tokens)
    if not 0 < size <= request.max_nodes or min(tokens) < 0 or max(tokens) >= vocab_size:
        return False
    if parents is None:
        return size <= request.max_draft_len
    is_tree = min(parents) >= -1 and all(map(operator.lt, parents, range(size)))
    is_distinct = len(set(zip(parents, tokens, strict=True))) == size
    return is_tree and is_distinct and max(node_depths(parents)) <= request.max_draft_len


def _is_sound_on_device(draft: Draft, request: DraftRequest, vocab_size: int) -> bool:
    """Whether it is within the limits and on a GPU, where its tokens are trusted: to read them the
    host would wait.
    """
    if not isinstance(draft.tokens, DeviceTokens):
        return False
    if draft.kind is not DraftKind.POINT:
        _check_q(draft, len(draft), vocab_size)
    return 0 < len(draft) <= request.max_nodes and draft.depth <= request.max_draft_len


def _check_q(draft: Draft, count: int, vocab_size: int) -> None:
    """Check that q is over the target's vocabulary, or the part of it that ``ids`` selects.

    The contents of ``ids`` are trusted: reading them would stall a GPU.
    """
    width = vocab_size if draft.ids is None else len(draft.ids)
    if draft.q is None or tuple(draft.q.shape) != (count, width) or width > vocab_size:
        raise ValueError(
            f"a draft of kind {draft.kind.value} needs q for each of its {count} tokens, over "
            f"{width} ids"
        )


def _kept(
    tokens: list[int],
    parents: tuple[int, ...],
    invalid: set[int],
    request: DraftRequest,
    distinct: bool,
) -> list[int]:
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} comes before its parent {parent}")
    nodes = {-1}
    siblings: set[tuple[int, int]] = set()
    for node, depth in enumerate(node_depths(parents)):
        parent, token = parents[node], tokens[node]
        repeats = distinct and (parent, token) in siblings
        full = len(nodes) > request.max_nodes
        if parent in nodes and not (
            node in invalid or repeats or full or depth > request.max_draft_len
        ):
            siblings.add((parent, token))
            nodes.add(node)
    return sorted(nodes - {-1})
