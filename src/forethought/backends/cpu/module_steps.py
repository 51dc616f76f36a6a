"""Steps in one call of C++ of a module with recurrent layers (``ModuleForward``), with drafts of a
model that runs there as well or without any.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from typing_extensions import override

from forethought.backends.cpu.module_forward import ModuleForward
from forethought.backends.cpu.native_steps import (
    ChainCall,
    ChainDrafting,
    NativeDraft,
    StateAddresses,
    StoredStates,
    keeps_scores,
    make_steps,
)
from forethought.kv.recurrent import DecodedStates, RecurrentStorage
from forethought.model.attention.base import PagedPass
from forethought.model.batch import Batch
from forethought.model.causal_lm import TransformersNetwork
from forethought.model.hidden_states import HiddenStateCache
from forethought.model.recurrent_layers import RecurrentLayers
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import ChainSource
from forethought.speculative.step_runner import Advance, DecodeRow, Interrupt, StepRunner
from forethought.speculative.verify.accept import VerificationResult


@dataclass(frozen=True, slots=True)
class ModuleSteps(StepRunner):
    """Where all of a module runs in one call: without adapters.

    The first step reads and leaves states as every forward does; those of later tokens, and of the
    drafts of the first one, are kept as single steps would have kept them.

    Attributes:
        runner: of the target.
        target: its forward.
        recurrent: its recurrent layers.
        storage: of their states.
        drafting: what drafts; None: plain decoding.
        cache: which stores the target's hidden states of plain steps; None: none does.
    """

    runner: ModelRunner
    target: ModuleForward
    recurrent: RecurrentLayers
    storage: RecurrentStorage
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
        network, storage = runner.lm.network, runner.storage
        if len(caches) > 1 or any(row.adapter is not None for row in rows):
            return None
        if not isinstance(network, TransformersNetwork) or network.whole is None:
            return None
        target: ModuleForward = network.whole
        if target.are_hooked() or not keeps_scores(rows, target.vocab_size):
            return None
        drafting = None if chains is None else ChainDrafting.of(chains, target.vocab_size)
        if chains is not None and drafting is None:
            return None
        assert network.recurrent is not None
        assert isinstance(storage, RecurrentStorage)
        cache = caches[0] if caches else None
        return cls(runner, target, network.recurrent, storage, drafting, cache)

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
        lm, decoded = self.runner.lm, [self._decoded(row, num_steps) for row in rows]
        batch = Batch.build([row.known() for row in rows])
        target = PagedPass(batch, self.storage, lm.backend, lm.windows)
        with self.recurrent.over(batch, self.storage):
            states = self._addresses(batch, decoded)
            call = ChainCall(target, rows, draft, stored, states)
            advance = Advance(*call.run(self.target, num_steps, interrupt))
        self.storage.keep_decoded(decoded, [*map(_num_stored, advance.results)])
        return advance

    def _decoded(self, row: DecodeRow, num_steps: int) -> DecodedStates:
        native, start = self.recurrent.native, row.position + 1
        assert native is not None
        stop = row.position + min(row.num_left, num_steps * (1 + row.draft_len))
        positions = range(start, max(start, stop))
        return self.storage.new_decoded(row.table, positions, native.new_state, row.draft_len)

    def _addresses(self, batch: Batch, decoded: Sequence[DecodedStates]) -> StateAddresses:
        """Of the states after the first step, and of those to come."""
        states = self.recurrent.token_table.states
        after = [
            array("q", [states[span.stop - 1].after])
            + array("q", [state.floats.data_ptr() for state in row.states])
            for span, row in zip(batch.spans, decoded, strict=True)
        ]
        return StateAddresses(states, after)


def _num_stored(results: Sequence[VerificationResult]) -> list[int]:
    """How many states each step of a row has left after tokens that were not known before."""
    return [len(result.tokens) - (not step) for step, result in enumerate(results)]
