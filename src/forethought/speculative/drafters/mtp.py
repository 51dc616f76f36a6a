"""One MTP module over keys and values of its own, and the texts whose pairs go through it.

In a lane of lag k, pair i is a state at position i and the token at i + k. Its keys and values lie
at the slot of that token, and are worth what the token is: what forks, prefix hits and rewinds do
to tokens they do to pairs. Knows nothing about how lanes follow each other.

[mtp] Modules of the target's own kind guess further on: multi-token prediction.

DeepSeek-V3 (2024, arXiv 2412.19437, section 2.2) in both ways in which modules are used. *Replay*:
one module steps along the text like a small model; behind the known pairs it reads its own state
and the token that it has guessed, as EAGLE does. *Vanilla*: one module per place, each reading what
the one before it made of every position, with a token one further on. Of a text ABCD, behind which
the target drew E, with states H::

    module 1    (H_A, B) (H_B, C) (H_C, D) (H_D, E)  -> F
    module 2    (1_A, C) (1_B, D) (1_C, E) (1_D, F)  -> G
    module 3    (2_A, D) (2_B, E) (2_C, F) (2_D, G)  -> H

Where drafts are longer than there are modules, these are used again, each use with keys and values
of its own. What is missing is computed over all requests in one forward; tokens stay on the device
until the drafts are complete. Knows nothing about acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forethought.config.drafters import MTPDecodingConfig
from forethought.errors import ParameterError
from forethought.kv.draft_cache import DraftKvCache, HiddenStateCache
from forethought.kv.storage import KvStorage
from forethought.kv.table import ReadableTable
from forethought.model.attention.base import PagedPass
from forethought.model.attention.workspace import KvWorkspace, catch_up_start
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import FINAL, CausalLM
from forethought.speculative.draft import Draft
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.heads.mtp import ModuleStates, MtpNetwork, load_modules
from forethought.speculative.registry import Target

_UNKNOWN = 0
"""Stands for a token that only the device knows."""


@dataclass(eq=False, slots=True)
class ModuleText:
    """A request's text of L tokens, the last of which the target has not computed.

    Attributes:
        request: whose.
        depth: levels of the draft to be made.
        begin: the first pair that has to be computed.
    """

    request: DraftRequest
    depth: int
    begin: int

    @property
    def table(self) -> ReadableTable:
        """Where its tokens lie."""
        assert self.request.table is not None
        return self.request.table

    @property
    def pairs(self) -> int:
        """L - 1: how many positions have a state."""
        return len(self.request.tokens) - 1


class MtpModuleCache:
    """A module over a storage.

    Args:
        network: the module.
        lm: its target.
        like: the target's storage, whose pages this lane's follow.
        lag: how far behind its state the token of a pair stands.
    """

    def __init__(self, network: MtpNetwork, lm: CausalLM, like: KvStorage, lag: int) -> None:
        self.network, self.lag, self._lm = network, lag, lm
        self.draft_cache = DraftKvCache(
            KvStorage([network.shape], like.num_pages, like.page_size, like.dtype, like.device)
        )

    def missing_from(self, request: DraftRequest) -> int:
        """The first pair of a request that is not stored."""
        assert request.table is not None
        ready = self.draft_cache.ready_length(request.table, len(request.tokens))
        return max(0, ready - self.lag)

    def mark(self, text: ModuleText, stop: int) -> None:
        """The pairs of a text up to ``stop`` are stored.

        Guessed tokens count: where one is accepted, its pair is what it would have been; where not,
        the target writes another token at its slot, and the pair is invalid.
        """
        begin = text.begin + self.lag if text.begin else 0  # the first slots hold no pair
        self.draft_cache.mark(text.table, begin, stop + self.lag)

    def rows(self, texts: Sequence[ModuleText], stops: Sequence[int], whole: bool) -> list[Row]:
        """The missing pairs of each text up to its stop.

        Args:
            texts: whose.
            stops: up to ``pairs``.
            whole: what leaves behind every pair is wanted, not only behind the last ones.
        """
        rows = []
        for text, stop in zip(texts, stops, strict=True):
            begin, end = text.begin + self.lag, stop + self.lag
            tokens = list(text.request.tokens[begin:end])
            tokens += [_UNKNOWN] * (end - begin - len(tokens))
            rows.append(
                Row(
                    tokens,
                    begin,
                    text.table.window(end),
                    logits_from=0 if whole else -1 + len(tokens),
                )
            )
        return rows

    def workspace(self, texts: Sequence[ModuleText], room: int) -> KvWorkspace:
        """Where pairs from ``begin`` on of each text can be read, at most ``room`` of them."""
        tables = [text.table for text in texts]
        lengths = [text.begin + self.lag for text in texts]
        storage, windows = self.draft_cache.storage, [self.network.window]
        return KvWorkspace(storage, tables, lengths, room, windows, seen_from=self.lag)

    def read(
        self, states: Tensor, rows: Sequence[Row], guessed: Sequence[Tensor] = ()
    ) -> ModuleStates:
        """Take pairs through the module.

        Args:
            states: ``[T, hidden]`` of the T pairs.
            rows: the pairs' tokens.
            guessed: int64 ``[len(rows)]`` each: the last tokens of the rows.
        """
        lm = self._lm
        packed = Batch.build(rows, lm.device)
        batch = replace(
            packed,
            token_ids=_completed(packed, guessed) if guessed else packed.token_ids,
            positions=packed.positions - self.lag,
            spans=tuple(replace(span, seen_from=self.lag) for span in packed.spans),
        )
        storage = self.draft_cache.storage
        forward_pass = PagedPass(batch, storage, lm.backend, [self.network.window])
        return self.network.read(states, forward_pass)


def _completed(batch: Batch, guessed: Sequence[Tensor]) -> Tensor:
    """int64 ``[T]``: the batch's tokens, the last ones of each row replaced."""
    places: list[int] = []
    chosen: list[int] = []
    for row, span in enumerate(batch.spans):
        count = min(len(guessed), span.length)
        places += range(span.stop - count, span.stop)
        chosen += [level * len(batch.spans) + row for level in range(len(guessed))][-count:]
    known = torch.cat(list(guessed))
    if len(places) == len(batch.token_ids):  # single steps
        return known[: len(places)] if len(guessed) == 1 else known[_index(chosen, known)]
    return batch.token_ids.index_copy(0, _index(places, known), known[_index(chosen, known)])


def _index(places: list[int], like: Tensor) -> Tensor:
    return torch.tensor(places, device=like.device)


class MTPDrafter(Drafter):
    """Drafts with MTP modules.

    Args:
        lanes: one, which is replayed, or one for each place of the longest draft.
        features: of the target, behind its final norm.
        max_num_tokens: pairs in one forward, unless there are more requests.
    """

    def __init__(
        self, lanes: Sequence[MtpModuleCache], features: HiddenStateCache, max_num_tokens: int
    ) -> None:
        assert features.places == (FINAL,)
        self._lanes, self._features, self._most = list(lanes), features, max_num_tokens

    @classmethod
    def build(cls, config: MTPDecodingConfig, target: Target) -> MTPDrafter:
        """Load the modules.

        Raises:
            ModelError: there are none, or they do not fit the target.
            ParameterError: the tokens around its thinking are not in its vocabulary.
        """
        _check_thinking(config, target.runner.lm)
        lm, storage = target.runner.lm, target.runner.storage
        directory = config.speculative_model or Path(lm.config.name_or_path)
        modules = load_modules(
            directory, lm, config.num_nextn_predict_layers, config.recycled_state
        )
        networks = [MtpNetwork(module, lm) for module in modules]
        vanilla = config.use_mtp_vanilla or len(networks) > 1
        lanes = [
            MtpModuleCache(networks[place % len(networks)], lm, storage, lag=1 + place)
            for place in range(config.max_draft_len if vanilla else 1)
        ]
        return cls(lanes, HiddenStateCache([FINAL], lm.hidden_size, storage), target.max_num_tokens)

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's states, and the keys and values of each lane."""
        return (self._features, *(lane.draft_cache for lane in self._lanes))

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """See :class:`Drafter`."""
        texts = [
            self._text(request)
            for request in scheduled_requests.generation_requests
            if len(request.tokens) > 1  # without a state there is no pair
        ]
        if not texts:
            return
        texts.sort(key=lambda text: -text.depth)  # whose draft is complete early stands behind
        with torch.inference_mode():
            if len(self._lanes) == 1:
                levels = self._replay(texts)
            else:
                self._catch_up(texts)
                levels, _ = self._pass(texts, [text.pairs for text in texts], guessing=True)
            drafted = torch.cat(levels).tolist()  # one transfer for all
        begins = [0]
        for level in levels:
            begins.append(begins[-1] + len(level))
        for place, text in enumerate(texts):
            text.request.draft = Draft([drafted[begins[n] + place] for n in range(text.depth)])

    def _text(self, request: DraftRequest) -> ModuleText:
        depth = min(request.max_draft_len, request.max_nodes)
        last = len(request.tokens) - 2  # what leaves behind it is needed in any case
        return ModuleText(
            request, depth, min(last, *(lane.missing_from(request) for lane in self._lanes[:depth]))
        )

    def _catch_up(self, texts: Sequence[ModuleText]) -> None:
        """Compute parts of long texts, so that no forward has more pairs than it may."""
        while True:
            missing = [text.pairs - text.begin for text in texts]
            # The last pairs of a text have tokens that are guesses in some lanes.
            early = [max(0, count - len(self._lanes)) for count in missing]
            if sum(missing) <= self._most or not any(early):
                return
            room, parts, stops = self._most, list[ModuleText](), list[int]()
            for text, count in zip(texts, early, strict=True):
                if min(room, count):
                    parts.append(text)
                    stops.append(text.begin + min(room, count))
                    room -= min(room, count)
            self._pass(parts, stops, guessing=False)
            for text, stop in zip(parts, stops, strict=True):
                text.begin = stop

    def _pass(
        self, texts: Sequence[ModuleText], stops: Sequence[int], guessing: bool
    ) -> tuple[list[Tensor], ModuleStates]:
        """Take the missing pairs of texts, the deepest first, through all lanes.

        Args:
            texts: whose.
            stops: of each text, up to which pair.
            guessing: whether these are all, so that guesses follow.

        Returns:
            For each lane, if guessing, the tokens int64 ``[n]`` of the first n texts; and what
            leaves the last lane behind each text.
        """
        levels: list[Tensor] = []
        left = ModuleStates(self._read_features(texts, stops), torch.empty(0))
        lanes = self._lanes[: texts[0].depth]
        for level, lane in enumerate(lanes):
            size = sum(text.depth > level for text in texts)
            whole = level + 1 < len(lanes)
            rows = lane.rows(texts[:size], stops[:size], whole)
            count = sum(len(row.tokens) for row in rows)
            left = lane.read(left.states[:count], rows, [tokens[:size] for tokens in levels])
            for text, stop in zip(texts[:size], stops[:size], strict=True):
                lane.mark(text, stop)
            if guessing:
                normed = left.normed[_ends(rows, left.normed)] if whole else left.normed
                levels.append(lane.network.logits(normed).argmax(-1))
        return levels, left

    def _replay(self, texts: Sequence[ModuleText]) -> list[Tensor]:
        """Let the only module guess, and guess on behind its own guesses.

        Args:
            texts: the deepest first.

        Returns:
            For each level the tokens int64 ``[n]`` of the first n texts.
        """
        [lane] = self._lanes
        workspace, (states, normed) = self._begin(texts, lane)
        levels = [lane.network.logits(normed).argmax(-1)]
        places = torch.tensor([text.pairs for text in texts], device=states.device)
        for level in range(1, texts[0].depth):
            size = sum(text.depth > level for text in texts)
            workspace.keep(size)
            step = workspace.chain(levels[-1][:size], places[:size] + (level - 1))
            states, normed = lane.network.read(states[:size], step)
            levels.append(lane.network.logits(normed).argmax(-1))
        return levels

    def _begin(
        self, texts: Sequence[ModuleText], lane: MtpModuleCache
    ) -> tuple[KvWorkspace, ModuleStates]:
        """Read the missing pairs; the strands behind them, and what leaves behind each text."""
        room, stops = texts[0].depth - 1, [text.pairs for text in texts]
        alike = catch_up_start([text.begin for text in texts], stops)
        if alike is None:
            self._catch_up(texts)
            _, left = self._pass(texts, stops, guessing=False)
        for text, begin in zip(texts, alike or stops, strict=True):
            text.begin = begin
        if alike is None:
            return lane.workspace(texts, room), left
        known = stops[0] - alike[0]
        workspace = lane.workspace(texts, known + room)
        tokens, positions = list[int](), list[int]()
        for text in texts:
            tokens += text.request.tokens[text.begin + 1 : text.pairs + 1]
            positions += range(text.begin, text.pairs)
        states = self._read_features(texts, stops)
        index = torch.tensor([tokens, positions], device=states.device)
        left = lane.network.read(states, workspace.chain(index[0], index[1]))
        workspace.store([known] * len(texts))
        for text in texts:
            lane.mark(text, text.pairs)
        return workspace, left

    def _read_features(self, texts: Sequence[ModuleText], stops: Sequence[int]) -> Tensor:
        """``[T, hidden]``: the target's states of the missing pairs."""
        found = [
            self._features.read(text.table, text.begin, stop)
            for text, stop in zip(texts, stops, strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)


def _check_thinking(config: MTPDecodingConfig, lm: CausalLM) -> None:
    if not config.use_relaxed_acceptance_for_thinking:
        return
    for name in ("begin_thinking_phase_token", "end_thinking_phase_token"):
        if getattr(config, name) >= lm.vocab_size:
            raise ParameterError(
                f"{name} {getattr(config, name)} is no token of the target",
                f"its vocabulary has {lm.vocab_size}",
                "Set it to the id that stands there when this model thinks",
            )


def _ends(rows: Sequence[Row], like: Tensor) -> Tensor:
    """int64 ``[len(rows)]``: the last token of each row in the packed batch."""
    lengths = torch.tensor([len(row.tokens) for row in rows], device=like.device)
    return lengths.cumsum(0) - 1
