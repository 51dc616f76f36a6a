"""A plan's way through the network: from planned rows to logits, from logits to drawn tokens.

Changes nothing about the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forethought.engine.kinship import drawers
from forethought.engine.scheduler import Plan
from forethought.engine.sequence import Sequence
from forethought.model.batch import Row
from forethought.model.runner import Runner
from forethought.model.sampling import TokenContext, choose, coin
from forethought.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Draw:
    """A token drawn for a sequence."""

    sequence: Sequence
    token: int
    logprobs: TokenLogprobs | None


def forward(runner: Runner, plan: Plan) -> Tensor:
    """Logits [R, V] float32, R the sum of the rows' ``logits``, in the order of the rows."""
    runner.storage.copy_pages(plan.copies)
    return runner.forward(
        [
            Row(
                tokens=row.sequence.tokens[row.start : row.stop],
                start=row.start,
                table=row.sequence.table,
                logits_from=row.count - row.logits,
            )
            for row in plan.rows
        ]
    )


def draw(plan: Plan, logits: Tensor, eos_ids: frozenset[int]) -> list[list[Draw]]:
    """For each row the tokens drawn after its last one: for its sequence, and for its twins.

    Args:
        plan: the rows.
        logits: [R, V] float32 from ``forward``.
        eos_ids: the model's end-of-sequence ids.
    """
    wanting = [drawers(row.sequence) if row.is_last else [] for row in plan.rows]
    places, contexts, coins, end = [], [], [], 0
    for row, sequences in zip(plan.rows, wanting, strict=True):
        end += row.logits
        for sequence in sequences:
            start, tokens = sequence.prompt_length, sequence.tokens
            places.append(end - 1)
            contexts.append(TokenContext(sequence.params, tokens[:start], tokens[start:], eos_ids))
            coins.append(coin(sequence.seed, sequence.index, len(tokens)))
    if places != list(range(len(logits))):
        logits = logits[places]
    choice = choose(logits, contexts, coins)
    drawn = zip(choice.tokens, choice.logprobs, strict=True)
    return [[Draw(sequence, *next(drawn)) for sequence in sequences] for sequences in wanting]
