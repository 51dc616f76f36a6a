"""Steps in one call of C++, with drafts of a network that runs there as well or without any."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from forethought.backends.cpu.draft_module import NativeDraftModule
from forethought.backends.cpu.draft_network import NativeDraftNetwork
from forethought.backends.cpu.forward import NativeForward, PackedCall, Wanted
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.network import NativeNetwork
from forethought.backends.cpu.structures import (
    ChainRowStruct,
    ChainStepsStruct,
    TargetStatesStruct,
)
from forethought.backends.cpu.weights import TYPES
from forethought.model.attention.base import ForwardPass, PagedPass
from forethought.model.batch import Batch
from forethought.model.runner import ModelRunner
from forethought.speculative.chain_source import GreedyChains
from forethought.speculative.draft_model import DraftModel
from forethought.speculative.drafter import ChainSource, Draft
from forethought.speculative.step_runner import Advance, DecodeRow, StepRunner
from forethought.speculative.verify.accept import VerificationResult


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


@dataclass(slots=True)
class ChainCall:
    """Decode steps of some rows.

    Attributes:
        target: a pass of the target over the roots.
        rows: none has longer drafts than the one before it.
        draft: what drafts; None: no row has drafts.
        stored: where states are written and read; None: none are.
    """

    target: ForwardPass
    rows: Sequence[DecodeRow]
    draft: NativeDraft | None
    stored: StoredStates | None
    _keep: list[object] = field(default_factory=list)
    """What structures point to."""

    def run(
        self, target: NativeForward, num_steps: int
    ) -> tuple[list[list[tuple[list[int], list[int]]]], int, float]:
        """Make up to ``num_steps`` steps; ``IndexError`` for a token outside a vocabulary.

        Args:
            target: its packed weights.
            num_steps: at most; rows that have ended leave.

        Returns:
            Of each row the drafted and the decoded tokens of each step; the number of forwards; and
            the seconds of the drafts.
        """
        num_rows, width = len(self.rows), 1 + self.rows[0].draft_len
        tokens = array("q", bytes(8 * num_steps * num_rows * 2 * width))
        counts = array("i", bytes(4 * num_steps * num_rows * 2))
        seconds = ctypes.c_double()
        struct = ChainStepsStruct(
            target=ctypes.pointer(self._target_call(target, num_rows * width).struct),
            rows=self._packed_rows(),
            states=self._states(target),
            tokens=tokens.buffer_info()[0],
            counts=counts.buffer_info()[0],
            draft_seconds=ctypes.addressof(seconds),
            num_rows=num_rows,
            num_steps=num_steps,
            width=width,
            **({} if self.draft is None else self._draft_fields(self.draft, num_rows * width)),
        )
        num_steps_run = load_library().decode_chains(
            ctypes.byref(target.model), ctypes.byref(struct)
        )
        if num_steps_run < 0:
            raise IndexError("a token is outside the vocabulary of the target or the draft network")
        values, sizes = tokens.tolist(), counts.tolist()
        return (
            [self._steps(row, values, sizes) for row in range(num_rows)],
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

    def _steps(
        self, row: int, tokens: list[int], counts: list[int]
    ) -> list[tuple[list[int], list[int]]]:
        """The steps of a row that gave a token: those before its end."""
        num_rows, width, steps = len(self.rows), 1 + self.rows[0].draft_len, []
        for at in range(2 * row, len(counts), 2 * num_rows):
            count, begin = counts[at + 1], at * width
            if not count:
                break
            decoded = tokens[begin + width : begin + width + count]
            steps.append((tokens[begin : begin + counts[at]], decoded))
        return steps

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
        return (ChainRowStruct * len(self.rows))(*map(self._packed_row, self.rows))

    def _packed_row(self, row: DecodeRow) -> ChainRowStruct:
        first, pages, ends = row.table.first_slot(), array("i"), array("q", row.ends)
        if first is None:
            pages.extend(row.table.pages)
        self._keep += [pages, ends]
        return ChainRowStruct(
            pages=pages.buffer_info()[0],
            ends=ends.buffer_info()[0],
            first_slot=-1 if first is None else first,
            token=row.request.tokens[-1],
            position=row.position,
            draft_len=row.draft_len,
            num_left=row.num_left,
            num_ends=len(ends),
        )

    def _states(self, target: NativeForward) -> ctypes._Pointer[TargetStatesStruct] | None:
        stored, entry = self.stored, None if self.draft is None else self.draft.network.entry
        if stored is None or entry is None:
            return None
        layers = array("i", [range(target.model.num_layers + 2)[at] for at in stored.layer_ids])
        self._keep.append(layers)
        return ctypes.pointer(
            TargetStatesStruct(
                stored=stored.stored.data_ptr(),
                layers=layers.buffer_info()[0],
                norm=None if entry.norm is None else entry.norm.data_ptr(),
                entry=None if entry.linear is None else ctypes.pointer(entry.linear.struct),
                num_layers=len(layers),
                type=TYPES[stored.stored.dtype],
                eps=entry.eps,
            )
        )


@dataclass(frozen=True, slots=True)
class NativeSteps(StepRunner):
    """Where the target runs natively, and the draft network, if there is one.

    Attributes:
        runner: of the target.
        target: its packed weights.
        chains: what drafts; None: plain decoding.
        draft: the network of ``chains``.
    """

    runner: ModelRunner
    target: NativeForward
    chains: GreedyChains | None = None
    draft: NativeDraftNetwork | None = None

    @classmethod
    @override
    def of(
        cls, runner: ModelRunner, chains: ChainSource | None, rows: Sequence[DecodeRow]
    ) -> Self | None:
        target = runner.lm.network
        if not isinstance(target, NativeNetwork):
            return None
        if chains is None:
            return cls(runner, target.forward)
        if not isinstance(chains, GreedyChains):
            return None
        network = chains.runner.network
        if not isinstance(network, DraftModel | NativeDraftModule) or network.native is None:
            return None
        return cls(runner, target.forward, chains, network.native)

    @override
    def advance(self, rows: Sequence[DecodeRow], num_steps: int) -> Advance:
        if self.chains is None:
            return self._call(rows, num_steps, None, None)
        chains, drafting = self.chains, [row.request for row in rows if row.draft_len]
        (advance,) = chains.runner.draft_behind(
            drafting,
            [0] * len(drafting),
            lambda states, paged_pass, _: [
                self._call(rows, num_steps, *self._drafting(chains, states, paged_pass))
            ],
        )
        for row, results in zip(rows, advance.results, strict=True):
            chains.mark(row.position, row.table, results)
        return advance

    def _drafting(
        self, chains: GreedyChains, states: Tensor, paged_pass: PagedPass
    ) -> tuple[NativeDraft, StoredStates | None]:
        """The draft network, after a pass of it over the tokens that it has not read.

        Args:
            chains: see above.
            states: ``[T, hidden]``, that it reads with these; ``[T, 0]`` for a draft model.
            paged_pass: the pass.
        """
        assert self.draft is not None
        self._replace_unknown(paged_pass, self.draft.num_known)
        hidden_states, stored, entering = chains.runner.hidden_states, None, None
        if hidden_states is not None:
            stored = StoredStates(hidden_states.storage.keys[0], hidden_states.layer_ids)
            entering = states.float().contiguous()
        offset, stores_drafted = chains.runner.offset, chains.builder.stores_drafted
        return NativeDraft(self.draft, paged_pass, entering, offset, stores_drafted), stored

    def _call(
        self,
        rows: Sequence[DecodeRow],
        num_steps: int,
        draft: NativeDraft | None,
        stored: StoredStates | None,
    ) -> Advance:
        lm = self.runner.lm
        roots = Batch.build([row.root() for row in rows])
        target = PagedPass(roots, self.runner.storage, lm.backend, lm.windows)
        steps, num_forwards, seconds = ChainCall(target, rows, draft, stored).run(
            self.target, num_steps
        )
        results = [[_result(*step) for step in row_steps] for row_steps in steps]
        return Advance(results, num_forwards, seconds)

    def _replace_unknown(self, paged_pass: PagedPass, num_known: int) -> None:
        batch = paged_pass.batch
        if num_known < self.runner.lm.vocab_size:
            token_ids = batch.token_ids.where(batch.token_ids < num_known, 0)
            paged_pass.batch = replace(batch, token_ids=token_ids)


def _result(drafted: list[int], tokens: list[int]) -> VerificationResult:
    if not drafted:
        return VerificationResult([], tokens)
    return VerificationResult(list(range(len(tokens) - 1)), tokens, draft=Draft(drafted))
