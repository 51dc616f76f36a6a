"""Steps in one call of C++, with drafts of a network that runs there as well or without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from forethought.backends.cpu.chain_steps import (
    ChainCall,
    NativeDraft,
    NativeDraftNetwork,
    StoredStates,
)
from forethought.backends.cpu.forward import NativeForward
from forethought.backends.cpu.network import NativeNetwork
from forethought.model.attention.base import PagedPass
from forethought.model.batch import Batch
from forethought.model.runner import ModelRunner
from forethought.speculative.chain_source import ChainSource, GreedyChains
from forethought.speculative.draft_model import DraftModel
from forethought.speculative.drafter import Draft
from forethought.speculative.heads.native import NativeDraftModule
from forethought.speculative.step_runner import Advance, DecodeRow, StepRunner
from forethought.speculative.verify.accept import VerificationResult


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
    def of(
        cls, runner: ModelRunner, chains: ChainSource | None, rows: Sequence[DecodeRow]
    ) -> Self | None:
        """See :class:`StepRunner`."""
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

    def advance(self, rows: Sequence[DecodeRow], num_steps: int) -> Advance:
        """See :class:`StepRunner`."""
        if self.chains is None:
            return self._call(rows, num_steps, None, None)
        chains, drafting = self.chains, [row.request for row in rows if row.draft_len]
        (advance,) = chains.runner.draft_behind(
            drafting,
            [0] * len(drafting),
            lambda states, known, _: [
                self._call(rows, num_steps, *self._drafting(chains, states, known))
            ],
        )
        for row, results in zip(rows, advance.results, strict=True):
            chains.mark(row.position, row.table, results)
        return advance

    def _drafting(
        self, chains: GreedyChains, states: Tensor, known: PagedPass
    ) -> tuple[NativeDraft, StoredStates | None]:
        """What drafts, after a pass of it over the tokens that it has not read.

        Args:
            chains: see above.
            states: ``[T, hidden]``, that it reads with these; ``[T, 0]`` for a draft model.
            known: the pass.
        """
        assert self.draft is not None
        self._replace_unknown(known, self.draft.num_known)
        hidden_states, stored, entering = chains.runner.hidden_states, None, None
        if hidden_states is not None:
            stored = StoredStates(hidden_states.storage.keys[0], hidden_states.layer_ids)
            entering = states.float().contiguous()
        offset, stores_drafted = chains.runner.offset, chains.builder.stores_drafted
        return NativeDraft(self.draft, known, entering, offset, stores_drafted), stored

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

    def _replace_unknown(self, known: PagedPass, num_known: int) -> None:
        batch = known.batch
        if num_known < self.runner.lm.vocab_size:
            token_ids = batch.token_ids.where(batch.token_ids < num_known, 0)
            known.batch = replace(batch, token_ids=token_ids)


def _result(drafted: list[int], tokens: list[int]) -> VerificationResult:
    if not drafted:
        return VerificationResult([], tokens)
    return VerificationResult(list(range(len(tokens) - 1)), tokens, draft=Draft(drafted))
