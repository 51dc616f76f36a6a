"""Rules of acceptance other than the exact one: what they are, and which one a configuration names.

A rule replaces verification where it was asked for by name. What comes out no longer has the law
of plain decoding, so every result that was made with one is marked. Knows nothing about the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from forethought.decoding import DecodingBaseConfig, MedusaDecodingConfig, MTPDecodingConfig
from forethought.params import SamplingParams
from forethought.speculative.relaxed import RelaxedAcceptance
from forethought.speculative.synthetic import SyntheticAcceptance
from forethought.speculative.typical import TypicalAcceptance

if TYPE_CHECKING:
    from torch import Tensor

    from forethought.speculative.verify import Candidate


class AcceptanceRule(Protocol):
    """Decides which drafted tokens stand. The token behind them is drawn by the target as ever."""

    @property
    def synthetic(self) -> bool:
        """Whether its outputs mean nothing at all."""

    def bends(self, params: SamplingParams) -> bool:
        """Whether it is to decide for such a request; the others are verified, and not marked."""

    def paths(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[list[int]]:
        """The accepted nodes of each draft, from the root down.

        Args:
            logits: [R, V] float32, the model's own: the 1 + N rows of each candidate in turn.
            candidates: with drafts of any kind; their ``rows`` do not count here.
        """


def rule_of(config: DecodingBaseConfig) -> AcceptanceRule | None:
    """What the configuration names; None: exact verification."""
    if config.synthetic_acceptance is not None:
        return SyntheticAcceptance.of_rate(config.synthetic_acceptance)
    if config.synthetic_acceptance_length is not None:
        return SyntheticAcceptance.of_length(config.synthetic_acceptance_length)
    if isinstance(config, MedusaDecodingConfig) and config.posterior_threshold is not None:
        assert config.posterior_alpha is not None
        return TypicalAcceptance(config.posterior_threshold, config.posterior_alpha)
    if isinstance(config, MTPDecodingConfig) and config.use_relaxed_acceptance_for_thinking:
        assert config.relaxed_rule is not None
        return RelaxedAcceptance(
            config.relaxed_topk,
            config.relaxed_delta,
            config.relaxed_rule,
            config.begin_thinking_phase_token,
            config.end_thinking_phase_token,
        )
    return None
