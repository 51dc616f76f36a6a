"""A small recurrent network searches ahead with beams, which become one tree.

Cheng et al., 2024 (arXiv 2403.09919). The head reads the target's state that the root was drawn
from, takes in the root and whatever it guesses behind it, and keeps the likeliest continuations of
each length. The published tree is that of the beams of the last length, whose common beginnings
stand in it once. These are often alike, and what was likely but led nowhere is lost; so there is
also the tree of the likeliest continuations of any length, which gets further with fewer tokens.
Nothing is computed again, and no step of the search waits for the host. Beams follow from the state
without chance, so that drafts are points, and sampled requests are served exactly, other than by
the published rule of acceptance. Knows nothing about acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from forethought.config.drafters import ReDrafterDecodingConfig
from forethought.kv.draft_cache import DraftKvCache, HiddenStateCache
from forethought.model.causal_lm import FINAL
from forethought.speculative.draft import Draft
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.heads.redrafter import DraftRecurrence, ReDrafterHead
from forethought.speculative.registry import Target


class ReDrafterDrafter(Drafter):
    """Drafts with a head.

    Args:
        search: over the head.
        features: of the target, behind its final norm.
        config: how many beams, and what tree is made of them.
    """

    def __init__(
        self, search: BeamSearch, features: HiddenStateCache, config: ReDrafterDecodingConfig
    ) -> None:
        assert features.places == (FINAL,)
        self._search, self._features = search, features
        self._num_beams, self._max_nodes = config.num_beams, config.max_total_draft_tokens
        floor = config.min_draft_probability
        self._floor = math.log(floor) if floor else -math.inf
        self._tree = top_beams_tree if config.tree == "likeliest" else last_beams

    @classmethod
    def build(cls, config: ReDrafterDecodingConfig, target: Target) -> ReDrafterDrafter:
        """Load the head.

        Raises:
            ModelError: it cannot be loaded, or is another target's.
        """
        assert config.speculative_model is not None
        lm = target.runner.lm
        head = ReDrafterHead.load(config.speculative_model, lm.hidden_size, lm.vocab_size)
        return cls(
            BeamSearch(DraftRecurrence(head, lm.dtype, lm.device), lm.embed),
            HiddenStateCache([FINAL], lm.hidden_size, target.runner.storage),
            config,
        )

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's states."""
        return (self._features,)

    def nodes(self, depth: int) -> int:
        """As many as if no two beams began alike."""
        return min(self._num_beams * depth, self._max_nodes)

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """See :class:`Drafter`."""
        requests, slots = list[DraftRequest](), list[int]()
        for request in scheduled_requests.generation_requests:
            assert request.table is not None
            known = len(request.tokens) - 1  # the root is not computed yet
            if known and self._features.ready_length(request.table, known) == known:
                requests.append(request)
                slots += request.table.slots(known - 1, known)
        if not requests:
            return
        stored = self._features.storage.keys[0]
        with torch.inference_mode():
            found = self._search(
                stored[torch.tensor(slots, device=stored.device), 0],
                torch.tensor([request.tokens[-1] for request in requests], device=stored.device),
                self._num_beams,
                max(request.max_draft_len for request in requests),
                self._floor,
            )
        for request, beams in zip(requests, found, strict=True):
            request.draft = self._tree(beams, request.max_draft_len, request.max_nodes)


class Beams(NamedTuple):
    """What a search has kept behind one root: beams of every length, the shorter ones first.

    Beams of one length come the likeliest first. Each is written as its last token, and as the
    beam, a token shorter, that it prolongs.
    """

    tokens: list[int]
    parents: list[int]
    """Numbers of beams; -1: the root."""
    order: list[int]
    """Numbers of the useful beams, the likeliest first; a beam stands behind the one that it
    prolongs."""
    ends: list[int]
    """By length, from 0: how many beams are no longer than that."""


class BeamSearch:
    """Finds likely continuations with a recurrent head.

    Args:
        head: guesses.
        embed: int64 ``[R]`` -> the target's embeddings ``[R, hidden]``.
    """

    def __init__(self, head: DraftRecurrence, embed: Callable[[Tensor], Tensor]) -> None:
        self._head, self._embed = head, embed

    def __call__(
        self,
        contexts: Tensor,
        roots: Tensor,
        width: int,
        length: int,
        floor: float = -math.inf,
    ) -> list[Beams]:
        """Search behind N roots at once.

        Args:
            contexts: ``[N, hidden]``, the target's states that the roots were drawn from.
            roots: int64 ``[N]``, on the same device.
            width: beams that are kept at each length; fewer where there are not so many.
            length: most tokens of a beam.
            floor: beams of a lower log-probability are of no use.

        Returns:
            What is kept behind each root.
        """
        count, vocab = len(roots), self._head.shape.vocab
        first = torch.arange(count, device=roots.device)[:, None]
        state, tokens = torch.zeros_like(contexts), roots[:, None]
        score = torch.zeros(count, 1, device=roots.device)  # log-probabilities of the beams
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        ends = [0]
        for _ in range(length):
            kept = tokens.shape[1]
            state = self._head.advance(self._embed(tokens.flatten()), state)
            distributions = self._head(contexts, state).log_softmax(-1, dtype=torch.float32)
            distributions = (distributions + score.view(-1, 1)).view(count, kept * vocab)
            score, found = distributions.topk(min(width, kept * vocab), dim=-1)
            parents, tokens = found // vocab, found % vocab
            levels.append((tokens, parents, score))
            ends.append(ends[-1] + tokens.shape[1])
            if len(levels) == length or self._is_hopeless(score, floor):
                break
            rows = (parents + first * kept if count > 1 else parents).flatten()
            state = state.index_select(0, rows)
            if tokens.shape[1] != kept:  # all beams of a request have the same
                contexts = contexts.index_select(0, rows)
        every = [torch.cat(each, dim=1) for each in zip(*levels, strict=True)]
        # Equals stay in order of length, so that nobody comes before what it prolongs.
        scores, order = every[2].sort(dim=-1, descending=True, stable=True)
        useful = (scores >= floor).sum(-1, keepdim=True).expand_as(order)
        kept_tokens, prolonged, ranked, counts = torch.stack(
            [every[0], every[1], order, useful]
        ).tolist()
        starts = [-1] * ends[1]  # of the beams that each length prolongs
        for begin, end, stop in zip(ends, ends[1:], ends[2:], strict=False):
            starts += [begin] * (stop - end)
        return [
            Beams(tokens, list(map(add, parents, starts)), ranks[: count[0]], ends)
            for tokens, parents, ranks, count in zip(
                kept_tokens, prolonged, ranked, counts, strict=True
            )
        ]

    @staticmethod
    def _is_hopeless(score: Tensor, floor: float) -> bool:
        """Whether nothing useful follows; to ask would hold a GPU up for longer than it saves."""
        return floor > -math.inf and score.device.type == "cpu" and bool((score < floor).all())


def top_beams_tree(beams: Beams, depth: int, most: int) -> Draft:
    """The tree of the likeliest beams of any length.

    Args:
        beams: what was found.
        depth: most levels.
        most: tokens of the tree.
    """
    inside = beams.ends[min(depth, len(beams.ends) - 1)]
    chosen = [beam for beam in beams.order if beam < inside][:most]
    places = {-1: -1, **{beam: place for place, beam in enumerate(chosen)}}
    parents = tuple(places[beams.parents[beam]] for beam in chosen)
    return Draft([beams.tokens[beam] for beam in chosen], parents)


def last_beams(beams: Beams, depth: int, most: int) -> Draft:
    """The published tree: of the beams of the last length.

    Args:
        beams: what was found.
        depth: most levels.
        most: tokens of the tree.
    """
    last = min(depth, len(beams.ends) - 1)
    paths: list[list[int]] = []
    for beam in range(beams.ends[last - 1], beams.ends[last]):
        path: list[int] = []
        while beam >= 0:
            path.append(beams.tokens[beam])
            beam = beams.parents[beam]
        paths.append(path[::-1])
    return pack(paths, most)


def pack(beams: Sequence[Sequence[int]], most: int) -> Draft:
    """The tree of all beams, in which what several of them begin with stands once.

    Args:
        beams: token ids, the likeliest beam first.
        most: tokens of the tree; of beams that do not fit, the least likely ends are left out.
    """
    tokens, parents = list[int](), list[int]()
    places: dict[tuple[int, int], int] = {}
    for beam in beams:
        node = -1
        for token in beam:
            place = places.setdefault((node, token), len(tokens))
            if place == most:
                return Draft(tokens, tuple(parents))
            if place == len(tokens):
                tokens.append(token)
                parents.append(node)
            node = place
    return Draft(tokens, tuple(parents))
