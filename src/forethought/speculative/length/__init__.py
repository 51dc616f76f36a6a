"""Draft length control: fixed, scheduled, gated by acceptance, or chosen for goodput."""

from __future__ import annotations

from collections.abc import Callable

from forethought.config.speculation import DecodingBaseConfig
from forethought.speculative.length.by_batch_size import ByBatchSize
from forethought.speculative.length.gate import AcceptanceGate
from forethought.speculative.length.goodput import Goodput
from forethought.speculative.length.policy import FixedLength, LengthPolicy, Shortest


def length_policy(
    config: DecodingBaseConfig,
    nodes: Callable[[int], int] | None = None,
    node_context: float = 1.0,
) -> LengthPolicy:
    """A new policy as ``config`` describes it; each drafter needs its own.

    Args:
        config: validated.
        nodes: tokens of a draft of that depth (``Drafter.nodes``); the depth itself by default.
        node_context: see ``Goodput``.
    """
    policies: list[LengthPolicy] = []
    if config.acceptance_rate_window_size:
        assert config.acceptance_rate_threshold is not None, "set by the configuration"
        policies.append(
            AcceptanceGate(config.acceptance_rate_window_size, config.acceptance_rate_threshold)
        )
    if config.length_control == "goodput":
        max_draft_len = config.max_draft_len
        policies.append(ByBatchSize(lambda: Goodput(max_draft_len, nodes, node_context)))
    if not policies:
        return FixedLength()
    return policies[0] if len(policies) == 1 else Shortest(policies)
