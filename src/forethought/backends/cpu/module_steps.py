"""Plain steps in one call of C++ of a module with recurrent layers (``ModuleForward``)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from forethought.backends.cpu.module_forward import ModuleForward
from forethought.backends.cpu.native_steps import ChainCall, StateAddresses, keeps_scores
from forethought.kv.recurrent import DecodedStates, RecurrentStorage
from forethought.model.attention.base import PagedPass
from forethought.model.batch import Batch
from forethought.model.causal_lm import TransformersNetwork
from forethought.model.hidden_states import HiddenStateCache
from forethought.model.recurrent_layers import RecurrentLayers
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import ChainSource
from forethought.speculative.step_runner import Advance, DecodeRow, Interrupt, StepRunner


@dataclass(frozen=True, slots=True)
class ModuleSteps(StepRunner):
    """Where all of a module runs in one call: without drafts, hidden states and adapters.

    The first step reads and leaves states as every forward does; those of later tokens are kept as
    single steps would have kept them.

    Attributes:
        runner: of the target.
        target: its forward.
        recurrent: its recurrent layers.
        storage: of their states.
    """

    runner: ModelRunner
    target: ModuleForward
    recurrent: RecurrentLayers
    storage: RecurrentStorage

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
        if chains is not None or caches or any(row.adapter is not None for row in rows):
            return None
        if not isinstance(network, TransformersNetwork) or network.whole is None:
            return None
        target: ModuleForward = network.whole
        if target.are_hooked() or not keeps_scores(rows, target.vocab_size):
            return None
        assert network.recurrent is not None
        assert isinstance(storage, RecurrentStorage)
        return cls(runner, target, network.recurrent, storage)

    @override
    def advance(
        self, rows: Sequence[DecodeRow], num_steps: int, interrupt: Interrupt | None = None
    ) -> Advance:
        lm, decoded = self.runner.lm, [self._decoded(row, num_steps) for row in rows]
        batch = Batch.build([row.known() for row in rows])
        target = PagedPass(batch, self.storage, lm.backend, lm.windows)
        with self.recurrent.over(batch, self.storage):
            states = self._addresses(batch, decoded)
            call = ChainCall(target, rows, recurrent=states)
            advance = Advance(*call.run(self.target, num_steps, interrupt))
        counts = [max(0, len(results) - 1) for results in advance.results]
        self.storage.keep_decoded(decoded, counts)
        return advance

    def _decoded(self, row: DecodeRow, num_steps: int) -> DecodedStates:
        native, start = self.recurrent.native, row.position + 1
        assert native is not None
        stop = row.position + min(row.num_left, num_steps)
        return self.storage.new_decoded(row.table, start, stop, native.new_state)

    def _addresses(self, batch: Batch, decoded: Sequence[DecodedStates]) -> StateAddresses:
        """Of the states after the first step, and of those to come."""
        states = self.recurrent.token_table.states
        after = [
            array("q", [states[span.stop - 1].after])
            + array("q", [state.floats.data_ptr() for state in row.states])
            for span, row in zip(batch.spans, decoded, strict=True)
        ]
        return StateAddresses(states, after)
