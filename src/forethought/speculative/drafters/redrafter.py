"""ReDrafter: beam search with a small recurrent network; the beams form one tree.

Cheng et al., 2024 (arXiv 2403.09919). The head reads the target's hidden state that the root was
sampled from, then the root and its own tokens, and keeps the most probable beams of each length.
The published tree consists of the beams of the last length, their common prefixes once. These are
often alike, and probable prefixes are lost; so there is also the tree of the most probable beams of
any length, which accepts more per verified token. No entry is computed again, and no step of the
search waits for the host. Beams are a deterministic function of the state, so drafts are verified
as point masses and sampled requests are exact, unlike with the published acceptance rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from forethought.config.drafters import ReDrafterDecodingConfig
from forethought.kv.staging import upload
from forethought.kv.storage import DraftKvCache
from forethought.model import backends
from forethought.model.hidden_states import FINAL, HiddenStateCache
from forethought.speculative.drafter import (
    Draft,
    Drafter,
    ResourceManager,
    ScheduledRequests,
    Target,
    readable,
    root_states,
)
from forethought.speculative.heads.redrafter import (
    DraftRecurrence,
    ReDrafterHead,
)


class ReDrafterDrafter(Drafter):
    """Drafts with a head.

    Args:
        search: over the head.
        hidden_states: of the target, after its final norm.
        config: number of beams, and the tree that is built from them.
    """

    def __init__(
        self,
        search: BeamSearcher,
        hidden_states: HiddenStateCache,
        config: ReDrafterDecodingConfig,
    ) -> None:
        assert hidden_states.layer_ids == (FINAL,)
        self._search, self._hidden_states = search, hidden_states
        self._num_beams, self._max_nodes = config.num_beams, config.max_total_draft_tokens
        min_prob = config.min_draft_probability
        self._min_logprob = math.log(min_prob) if min_prob else -math.inf
        self._tree = top_beams_tree if config.tree == "most_probable" else last_beams

    @classmethod
    def build(cls, config: ReDrafterDecodingConfig, target: Target) -> ReDrafterDrafter:
        """Load the head.

        Raises:
            ModelError: it cannot be loaded, or is another target's.
        """
        assert config.speculative_model is not None
        lm = target.runner.lm
        head = ReDrafterHead.load(config.speculative_model, lm.hidden_size, lm.vocab_size)
        native = backends.cpu().beam_search(head, lm)
        search = native or BeamSearch(DraftRecurrence(head, lm.dtype, lm.device), lm.embed)
        return cls(
            search,
            HiddenStateCache([FINAL], lm.hidden_size, target.runner.storage, roots_only=True),
            config,
        )

    @property
    @override
    def forward_path(self) -> str:
        return self._search.forward_path

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's hidden states."""
        return (self._hidden_states,)

    def nodes(self, depth: int) -> int:
        """As many as if no two beams had a common prefix."""
        return min(self._num_beams * depth, self._max_nodes)

    @override
    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        requests = readable(scheduled_requests.generation_requests, self._hidden_states)
        if not requests:
            return
        with torch.inference_mode():
            states = root_states(requests, self._hidden_states)
            beams_of = self._search(
                states,
                [request.tokens[-1] for request in requests],
                self._num_beams,
                max(request.max_draft_len for request in requests),
                self._min_logprob,
            )
        for request, beams in zip(requests, beams_of, strict=True):
            request.draft = self._tree(beams, request.max_draft_len, request.max_nodes)


class Beams(NamedTuple):
    """The beams of a search after one root: shorter ones first, then the most probable first.

    A beam is its last token, and the number of its parent, the beam that it extends by this token.
    """

    tokens: list[int]
    parents: list[int]
    """Numbers of beams; -1: the root."""
    order: list[int]
    """Numbers of the beams that are probable enough, the most probable first, parents before their
    children."""
    ends: list[int]
    """By length, from 0: the number of beams up to this length."""


class BeamSearcher(Protocol):
    """Finds the most probable continuations of a recurrent head."""

    forward_path: str

    def __call__(
        self,
        contexts: Tensor,
        roots: Sequence[int],
        width: int,
        length: int,
        min_logprob: float = -math.inf,
    ) -> list[Beams]:
        """Search after N roots at once.

        Args:
            contexts: ``[N, hidden]``, the target's states that the roots were sampled from.
            roots: N ids.
            width: beams that are kept at each length.
            length: tokens of a beam at most.
            min_logprob: less probable beams are left out of ``Beams.order``.
        """
        ...


class BeamSearch(BeamSearcher):
    """Finds likely continuations with a recurrent head.

    Args:
        head: predicts the next token.
        embed: int64 ``[R]`` -> the target's embeddings ``[R, hidden]``.
    """

    forward_path = "torch"

    def __init__(self, head: DraftRecurrence, embed: Callable[[Tensor], Tensor]) -> None:
        self._head, self._embed = head, embed

    @override
    def __call__(
        self,
        contexts: Tensor,
        roots: Sequence[int],
        width: int,
        length: int,
        min_logprob: float = -math.inf,
    ) -> list[Beams]:
        count, vocab = len(roots), self._head.shape.vocab
        device = contexts.device
        first = torch.arange(count, device=device)[:, None]
        state, tokens = torch.zeros_like(contexts), upload(roots, device)[:, None]
        score = torch.zeros(count, 1, dtype=torch.float32, device=device)
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        ends = [0]
        for _ in range(length):
            num_beams = tokens.shape[1]
            state = self._head.advance(self._embed(tokens.flatten()), state)
            logprobs = self._head(contexts, state).log_softmax(-1, dtype=torch.float32)
            logprobs = (logprobs + score.view(-1, 1)).view(count, num_beams * vocab)
            score, indices = logprobs.topk(min(width, num_beams * vocab), dim=-1)
            parents, tokens = indices // vocab, indices % vocab
            if self._head.token_map is not None:
                tokens = self._head.token_map[tokens]
            levels.append((tokens, parents, score))
            ends.append(ends[-1] + tokens.shape[1])
            if len(levels) == length or self._is_complete(score, min_logprob):
                break
            rows = (parents + first * num_beams if count > 1 else parents).flatten()
            state = state.index_select(0, rows)
            if tokens.shape[1] != num_beams:  # a request's beams have the same context
                contexts = contexts.index_select(0, rows)
        every = [torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)]
        # A stable sort keeps equals in order of length: parents before their children.
        scores, order = every[2].sort(dim=-1, descending=True, stable=True)
        useful = (scores >= min_logprob).sum(-1, keepdim=True).expand_as(order)
        kept_tokens, extended, ranked, counts = torch.stack(
            [every[0], every[1], order, useful]
        ).tolist()
        starts = first_beams(ends)
        return [
            Beams(tokens, list(map(add, parents, starts)), ranks[: count[0]], ends)
            for tokens, parents, ranks, count in zip(
                kept_tokens, extended, ranked, counts, strict=True
            )
        ]

    @staticmethod
    def _is_complete(score: Tensor, min_logprob: float) -> bool:
        """Whether longer beams are too improbable; on a GPU the check costs more than it saves."""
        if score.device.type != "cpu" or min_logprob == -math.inf:
            return False
        return bool((score < min_logprob).all())


def first_beams(ends: Sequence[int]) -> list[int]:
    """The number of the first beam of those that each beam's parent is one of; -1: the root is."""
    starts = [-1] * ends[1]
    for begin, end, stop in zip(ends, ends[1:], ends[2:], strict=False):
        starts += [begin] * (stop - end)
    return starts


def top_beams_tree(beams: Beams, depth: int, max_nodes: int) -> Draft:
    """The tree of the most probable beams of any length, within ``depth``, ``max_nodes``."""
    inside = beams.ends[min(depth, len(beams.ends) - 1)]
    chosen = [beam for beam in beams.order if beam < inside][:max_nodes]
    nodes = {-1: -1, **{beam: node for node, beam in enumerate(chosen)}}
    parents = tuple(nodes[beams.parents[beam]] for beam in chosen)
    return Draft([beams.tokens[beam] for beam in chosen], parents)


def last_beams(beams: Beams, depth: int, max_nodes: int) -> Draft:
    """The published tree: the beams of the last length, within ``depth`` and ``max_nodes``."""
    last = min(depth, len(beams.ends) - 1)
    paths: list[list[int]] = []
    for beam in range(beams.ends[last - 1], beams.ends[last]):
        path: list[int] = []
        while beam >= 0:
            path.append(beams.tokens[beam])
            beam = beams.parents[beam]
        paths.append(path[::-1])
    return pack(paths, max_nodes)


def pack(beams: Sequence[Sequence[int]], max_nodes: int) -> Draft:
    """The prefix tree of beams, the most probable beam first, cut to ``max_nodes`` nodes."""
    tokens, parents = list[int](), list[int]()
    nodes: dict[tuple[int, int], int] = {}
    """Parent and token -> node."""
    for beam in beams:
        node = -1
        for token in beam:
            child = nodes.setdefault((node, token), len(tokens))
            if child == max_nodes:
                return Draft(tokens, tuple(parents))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
            node = child
    return Draft(tokens, tuple(parents))
