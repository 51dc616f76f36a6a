"""Steps in one call of C++, with drafts of a network that runs there as well or without any."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from forethought.backends.cpu.draft_network import NativeDraftNetwork
from forethought.backends.cpu.forward import NativeForward, PackedCall, Wanted
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.network import NativeNetwork
from forethought.backends.cpu.packed_linear import TYPES
from forethought.backends.cpu.sampler import packed_sampling
from forethought.backends.cpu.structures import (
    ChainRowStruct,
    ChainStepsStruct,
    TargetStatesStruct,
    TokenStateStruct,
)
from forethought.config.sampling import SamplingParams
from forethought.model.attention.base import ForwardPass, PagedPass
from forethought.model.batch import Batch
from forethought.model.hidden_states import HiddenStateCache
from forethought.model.runner import ModelRunner
from forethought.model.sampling.sampler import read_logprobs
from forethought.outputs import Logprob, TokenConfidence
from forethought.speculative.chain_source import GreedyChains
from forethought.speculative.drafter import NO_DRAFT, ChainSource, Draft
from forethought.speculative.step_runner import Advance, DecodeRow, Interrupt, StepRunner
from forethought.speculative.verify.accept import VerificationResult
from forethought.speculative.verify.verify import SampledToken

MAX_SCORES = 64
"""Float64 of a token. Rows that ask for more are decoded step by step: they are kept for all tokens
of a call."""


class StoredStates(NamedTuple):
    """Where the target's hidden states are stored."""

    stored: Tensor
    """``[slots, 1, width]``: those of the layers side by side."""
    layer_ids: Sequence[int]
    """As of ``model.hidden_states``; that of the final norm is the last one."""


class NativeDraft(NamedTuple):
    """The draft network of a call.

    Attributes:
        network: see above.
        known: a pass of it over the tokens up to the roots that it has not read, of the rows with
            drafts, the first ones; with the logits of each row's last one.
        entering: float32 ``[T, hidden]``, the states that it reads with these; None: it is a model.
        seen_from: the first position that it attends to.
        stores_drafted: its entries of drafted tokens are those of known ones.
    """

    network: NativeDraftNetwork
    known: ForwardPass
    entering: Tensor | None
    seen_from: int
    stores_drafted: bool


@dataclass(frozen=True, slots=True)
class Written:
    """What a call has written, row-major: see ``ChainSteps`` of ``structures.h``.

    Attributes:
        tokens: ``[num_steps, num_rows, 2, width]``, drafted and decoded ones.
        counts: ``[num_steps, num_rows, 2]``, how many of either.
        scores: ``[num_steps, num_rows, width, scores_width]``, of decoded tokens.
        num_rows: of the call.
        width: one more than are drafted in a step.
        scores_width: float64 of a token.
    """

    tokens: list[int]
    counts: list[int]
    scores: list[float]
    num_rows: int
    width: int
    scores_width: int

    def results(self, row: int, sampled: SampledToken | None) -> list[VerificationResult]:
        """The steps of a row that gave a token: those before its end."""
        results = list[VerificationResult]()
        for at in range(row, len(self.counts) // 2, self.num_rows):
            num_drafted, num_decoded = self.counts[2 * at : 2 * at + 2]
            if not num_decoded:
                break
            begin = 2 * at * self.width
            tokens = self.tokens[begin + self.width : begin + self.width + num_decoded]
            draft = Draft(self.tokens[begin : begin + num_drafted]) if num_drafted else NO_DRAFT
            path = list(range(num_decoded - 1)) if num_drafted else []
            results.append(VerificationResult(path, tokens, draft=draft))
            if sampled is not None and self.scores_width:
                self._add_scores(results[-1], at * self.width, sampled.context.params)
        return results

    def _add_scores(
        self, result: VerificationResult, position: int, params: SamplingParams
    ) -> None:
        """Add the scores of a result, whose first token is at ``position`` in all of them."""
        width, k = self.scores_width, params.logprobs
        begins = range(position * width, (position + len(result.tokens)) * width, width)
        if k == 0:
            result.logprobs = [
                {token: Logprob(self.scores[begin], int(self.scores[begin + 1]))}
                for begin, token in zip(begins, result.tokens, strict=True)
            ]
        elif k is not None:
            result.logprobs = [
                read_logprobs(self.scores[begin : begin + 2 + 2 * k], token, k)
                for begin, token in zip(begins, result.tokens, strict=True)
            ]
        if params.confidence is not None:
            first = 0 if k is None else 2 + 2 * k
            result.confidences = [
                TokenConfidence(*self.scores[begin + first : begin + first + 4]) for begin in begins
            ]


class StateAddresses(NamedTuple):
    """Where the states of the target's recurrent layers are."""

    first_step: ctypes.Array[TokenStateStruct]
    """Of its tokens."""
    after: list[array[int]]
    """Of each row, of the states that the steps leave."""


@dataclass(slots=True)
class ChainCall:
    """Decode steps of some rows.

    Attributes:
        target: a pass of the target over the roots, at least.
        rows: none has longer drafts than the one before it.
        draft: what drafts; None: no row has drafts.
        stored: where hidden states are written and read; None: none are.
        recurrent: states of recurrent layers; None: there are none.
    """

    target: ForwardPass
    rows: Sequence[DecodeRow]
    draft: NativeDraft | None = None
    stored: StoredStates | None = None
    recurrent: StateAddresses | None = None
    _keep: list[object] = field(default_factory=list)
    """What structures point to."""

    def run(
        self, target: NativeForward, num_steps: int, interrupt: Interrupt | None
    ) -> tuple[list[list[VerificationResult]], int, float]:
        """Make up to ``num_steps`` steps; ``IndexError`` for a token outside a vocabulary.

        Args:
            target: its packed weights.
            num_steps: at most; rows that have ended leave.
            interrupt: see ``StepRunner.advance``.

        Returns:
            Of each row the result of each step; the number of forwards; and the seconds of the
            drafts.
        """
        num_rows, width = len(self.rows), 1 + self.rows[0].draft_len
        interrupt = interrupt or Interrupt()
        tokens = array("q", bytes(8 * num_steps * num_rows * 2 * width))
        counts = array("i", bytes(4 * num_steps * num_rows * 2))
        scores_width = max(map(_num_scores, self.rows))
        scores = array("d", bytes(8 * num_steps * num_rows * width * scores_width))
        seconds = ctypes.c_double()
        num_at_once = num_rows * (width - 1) + sum(row.num_known for row in self.rows)
        struct = ChainStepsStruct(
            target=ctypes.pointer(self._target_call(target, num_at_once).struct),
            rows=self._packed_rows(),
            states=self._states(target),
            known_states=None if self.recurrent is None else self.recurrent.first_step,
            tokens=tokens.buffer_info()[0],
            counts=counts.buffer_info()[0],
            scores=scores.buffer_info()[0],
            draft_seconds=ctypes.addressof(seconds),
            num_rows=num_rows,
            num_steps=num_steps,
            width=width,
            scores_width=scores_width,
            interrupt=interrupt.address,
            max_waiting=interrupt.max_waiting(num_rows),
            ended_rows_wait=interrupt.with_rows,
            **({} if self.draft is None else self._draft_fields(self.draft, num_rows * width)),
        )
        num_steps_run = load_library().decode_chains(
            ctypes.byref(target.model), ctypes.byref(struct)
        )
        if num_steps_run < 0:
            raise IndexError("a token is outside the vocabulary of the target or the draft network")
        target.check_read()
        written = Written(
            tokens.tolist(), counts.tolist(), scores.tolist(), num_rows, width, scores_width
        )
        return (
            [written.results(number, row.sampled) for number, row in enumerate(self.rows)],
            num_steps_run,
            seconds.value,
        )

    def _draft_fields(self, draft: NativeDraft, num_tokens: int) -> dict[str, object]:
        network, ids = draft.network, draft.network.ids
        return {
            "draft": ctypes.pointer(network.forward.model),
            "known": ctypes.pointer(self._known_call(draft, num_tokens).struct),
            "ids": None if ids is None else ids.data_ptr(),
            "num_choices": network.num_choices,
            "last_position": network.forward.max_positions - 1,
            "num_known": network.num_known,
            "seen_from": draft.seen_from,
            "stores_drafted": draft.stores_drafted,
        }

    @property
    def _num_further(self) -> int:
        """Tokens of a row that are computed after its root, at most."""
        return max(row.table.length - row.position for row in self.rows)

    def _known_call(self, draft: NativeDraft, num_tokens: int) -> PackedCall:
        forward = draft.network.forward
        logits = torch.empty(len(self.rows), forward.vocab_size, dtype=torch.float32)
        outputs = Wanted(logits, entering=draft.entering)
        return self._kept(forward.pack(draft.known, outputs, self._num_further, num_tokens))

    def _target_call(self, target: NativeForward, num_tokens: int) -> PackedCall:
        logits = torch.empty(num_tokens, target.vocab_size, dtype=torch.float32)
        states: list[Tensor | None] | None = None
        if self.stored is not None:
            states = [None] * (target.model.num_layers + 2)
            for layer_id in self.stored.layer_ids:
                states[layer_id] = torch.empty(num_tokens, target.model.hidden)
        outputs = Wanted(logits, states)
        return self._kept(target.pack(self.target, outputs, self._num_further, num_tokens))

    def _kept(self, call: PackedCall) -> PackedCall:
        self._keep.append(call)
        return call

    def _packed_rows(self) -> ctypes.Array[ChainRowStruct]:
        rows = (ChainRowStruct * len(self.rows))(*map(self._packed_row, self.rows))
        if self.recurrent is not None:
            for packed, addresses in zip(rows, self.recurrent.after, strict=True):
                packed.after = addresses.buffer_info()[0]
        return rows

    def _packed_row(self, row: DecodeRow) -> ChainRowStruct:
        first, pages, ends = row.table.first_slot(), array("i"), array("q", row.ends)
        if first is None:
            pages.extend(row.table.pages)
        tokens = array("q", row.request.tokens[row.start :])
        self._keep += [pages, ends, tokens]
        return ChainRowStruct(
            pages=pages.buffer_info()[0],
            ends=ends.buffer_info()[0],
            pauses=row.pauses.buffer_info()[0],
            known=tokens.buffer_info()[0],
            first_slot=-1 if first is None else first,
            num_known=row.num_known,
            position=row.position,
            draft_len=row.draft_len,
            num_left=row.num_left,
            num_ends=len(ends),
            num_pauses=len(row.pauses),
            adapter=None if row.adapter is None else row.adapter.parts.address,
            **self._sampling_fields(row.sampled),
        )

    def _sampling_fields(self, sampled: SampledToken | None) -> dict[str, object]:
        if sampled is None:
            return {}
        sampling = packed_sampling(sampled.context, self._keep)
        self._keep.append(sampling)
        pointer = ctypes.pointer(sampling)
        return {"sampling": pointer, "seed": sampled.seed, "sample": sampled.stream}

    def _states(self, target: NativeForward) -> ctypes._Pointer[TargetStatesStruct] | None:
        stored, entry = self.stored, None if self.draft is None else self.draft.network.entry
        if stored is None or (entry is None and self.draft is not None):
            return None
        norm, linear = (None, None) if entry is None else (entry.norm, entry.linear)
        layers = array("i", [range(target.model.num_layers + 2)[at] for at in stored.layer_ids])
        self._keep.append(layers)
        return ctypes.pointer(
            TargetStatesStruct(
                stored=stored.stored.data_ptr(),
                layers=layers.buffer_info()[0],
                norm=None if norm is None else norm.data_ptr(),
                entry=None if linear is None else ctypes.pointer(linear.struct),
                num_layers=len(layers),
                type=TYPES[stored.stored.dtype],
                eps=0.0 if entry is None else entry.eps,
            )
        )


Steps = Callable[[NativeDraft | None, StoredStates | None], Advance]
"""Makes steps with a draft network, or without one, and stores hidden states of the target."""


@dataclass(frozen=True, slots=True)
class ChainDrafting:
    """Chains whose network runs in the calls of the target.

    Attributes:
        chains: see above.
        network: of them.
        vocab_size: the target's.
    """

    chains: GreedyChains
    network: NativeDraftNetwork
    vocab_size: int

    @classmethod
    def of(cls, chains: ChainSource, vocab_size: int) -> Self | None:
        """None: the network does not run there."""
        if not isinstance(chains, GreedyChains):
            return None
        network = getattr(chains.runner.network, "native", None)  # of a draft model, or a module
        if not isinstance(network, NativeDraftNetwork):
            return None
        return cls(chains, network, vocab_size)

    def advance(self, rows: Sequence[DecodeRow], steps: Steps) -> Advance:
        """Make the steps of a call, and mark what they store for drafts."""
        drafting = [row.request for row in rows if row.draft_len]
        (advance,) = self.chains.runner.draft_behind(
            drafting,
            [0] * len(drafting),
            lambda states, paged_pass, _: [steps(*self._inputs(states, paged_pass))],
        )
        for row, results in zip(rows, advance.results, strict=True):
            self.chains.mark(row.position, row.table, results)
        return advance

    def _inputs(
        self, states: Tensor, paged_pass: PagedPass
    ) -> tuple[NativeDraft, StoredStates | None]:
        """The draft network, after a pass of it over the tokens that it has not read.

        Args:
            states: ``[T, hidden]``, that it reads with these; ``[T, 0]`` for a draft model.
            paged_pass: the pass.
        """
        runner = self.chains.runner
        self._replace_unknown(paged_pass)
        hidden_states, stored, entering = runner.hidden_states, None, None
        if hidden_states is not None:
            stored = StoredStates(hidden_states.storage.keys[0], hidden_states.layer_ids)
            entering = states.float().contiguous()
        stores_drafted = self.chains.builder.stores_drafted
        draft = NativeDraft(self.network, paged_pass, entering, runner.offset, stores_drafted)
        return draft, stored

    def _replace_unknown(self, paged_pass: PagedPass) -> None:
        batch, num_known = paged_pass.batch, self.network.num_known
        if num_known < self.vocab_size:
            token_ids = batch.token_ids.where(batch.token_ids < num_known, 0)
            paged_pass.batch = replace(batch, token_ids=token_ids)


def make_steps(
    rows: Sequence[DecodeRow],
    steps: Steps,
    drafting: ChainDrafting | None,
    cache: HiddenStateCache | None,
) -> Advance:
    """Make steps with drafts, or plain ones that store hidden states where a cache will be read."""
    if drafting is not None:
        return drafting.advance(rows, steps)
    if cache is None:
        return steps(None, None)
    advance = steps(None, StoredStates(cache.storage.keys[0], cache.layer_ids))
    for row, results in zip(rows, advance.results, strict=True):
        num_stored = sum(len(result.tokens) for result in results)
        cache.mark(row.table, row.start, row.position + num_stored)
    return advance


@dataclass(frozen=True, slots=True)
class NativeSteps(StepRunner):
    """Where the target runs natively, and the draft network, if there is one.

    Attributes:
        runner: of the target.
        target: its packed weights.
        drafting: what drafts; None: plain decoding.
        cache: which stores the target's hidden states of plain steps; None: none does.
    """

    runner: ModelRunner
    target: NativeForward
    drafting: ChainDrafting | None = None
    cache: HiddenStateCache | None = None

    @classmethod
    @override
    def of(
        cls,
        runner: ModelRunner,
        chains: ChainSource | None,
        rows: Sequence[DecodeRow],
        caches: Sequence[HiddenStateCache] = (),
    ) -> Self | None:
        target = runner.lm.network
        if not isinstance(target, NativeNetwork):
            return None
        if not keeps_scores(rows, target.forward.vocab_size):
            return None
        if chains is None:
            cache = caches[0] if caches else None
            return cls(runner, target.forward, cache=cache) if len(caches) < 2 else None
        drafting = ChainDrafting.of(chains, runner.lm.vocab_size)
        return None if drafting is None else cls(runner, target.forward, drafting)

    @override
    def advance(
        self, rows: Sequence[DecodeRow], num_steps: int, interrupt: Interrupt | None = None
    ) -> Advance:
        steps = partial(self._call, rows, num_steps, interrupt)
        return make_steps(rows, steps, self.drafting, self.cache)

    def _call(
        self,
        rows: Sequence[DecodeRow],
        num_steps: int,
        interrupt: Interrupt | None,
        draft: NativeDraft | None,
        stored: StoredStates | None,
    ) -> Advance:
        lm = self.runner.lm
        roots = Batch.build([row.root() for row in rows])
        target = PagedPass(roots, self.runner.storage, lm.backend, lm.windows)
        results, num_forwards, seconds = ChainCall(target, rows, draft, stored).run(
            self.target, num_steps, interrupt
        )
        return Advance(results, num_forwards, seconds)


def keeps_scores(rows: Sequence[DecodeRow], vocab_size: int) -> bool:
    """Whether a call has room for the scores that rows ask for."""
    # of 2 + 2 k scores or fewer than the vocabulary, where k may not exceed that
    return max(map(_num_scores, rows), default=0) <= min(MAX_SCORES, vocab_size)


def _num_scores(row: DecodeRow) -> int:
    """Float64 of each token of a row; see ``score`` of ``sampling.h``."""
    if row.sampled is None:
        return 0
    params = row.sampled.context.params
    num_logprob = 0 if params.logprobs is None else 2 + 2 * params.logprobs
    return num_logprob + 4 * (params.confidence is not None)
