"""A plan's way through the network: from planned rows to logits, from logits to verdicts.

Changes nothing about the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from torch import Tensor

from forethought.engine.kinship import drawers
from forethought.engine.scheduler import Plan, PlannedRow
from forethought.engine.sequence import Sequence
from forethought.model.batch import Row
from forethought.model.runner import Runner
from forethought.model.sampling import TokenContext
from forethought.model.taps import StateReader
from forethought.speculative.draft import NO_DRAFT, Draft
from forethought.speculative.verify import Candidate, Verdict, verify

Outcome = list[tuple[Sequence, Verdict]]
"""What was drawn after one row: for its own sequence first, then for its twins."""


def forward(runner: Runner, plan: Plan, readers: List[StateReader] = ()) -> Tensor:
    """Compute the plan's tokens, and hand their hidden states to those who keep them.

    Returns:
        [R, V] float32 in the order of the rows: of each row its ``logits`` last known tokens, then
        the nodes of its draft.
    """
    rows = [_row(row) for row in plan.rows]
    return runner.forward(rows, readers) if readers else runner.forward(rows)


def judge(plan: Plan, logits: Tensor, eos_ids: frozenset[int]) -> list[Outcome]:
    """For each row that is its sequence's last one, what follows; nothing for the others.

    Args:
        plan: the rows.
        logits: [R, V] float32 from ``forward``.
        eos_ids: the model's end-of-sequence ids.
    """
    drawing: list[list[Sequence]] = []
    candidates: list[Candidate] = []
    begin = 0
    for row in plan.rows:
        root = begin + row.logits - 1
        drawing.append(drawers(row.sequence) if row.is_last else [])
        for sequence in drawing[-1]:
            draft = row.draft if sequence is row.sequence else NO_DRAFT
            candidates.append(
                Candidate(
                    draft=draft,
                    rows=range(root, root + 1 + len(draft)),
                    contexts=_contexts(sequence, draft, eos_ids),
                    seed=sequence.seed,
                    stream=sequence.index,
                    position=len(sequence.tokens),
                    past=sequence.tokens,
                    rule=row.rule if sequence is row.sequence else None,
                )
            )
        begin = root + 1 + len(row.draft)
    verdicts = iter(verify(logits, candidates))
    return [[(sequence, next(verdicts)) for sequence in sequences] for sequences in drawing]


def _row(row: PlannedRow) -> Row:
    draft, parents = row.draft, None
    if draft.parents is not None:
        nodes = (row.count + parent if parent >= 0 else row.count - 1 for parent in draft.parents)
        parents = (*range(-1, row.count - 1), *nodes)
    return Row(
        tokens=[*row.sequence.tokens[row.start : row.stop], *draft.tokens],
        start=row.start,
        table=row.sequence.table,
        parents=parents,
        logits_from=row.count - row.logits,
    )


def _contexts(sequence: Sequence, draft: Draft, eos_ids: frozenset[int]) -> list[TokenContext]:
    """Of the root and of each node, with the path to it where the law looks at it."""
    params, start = sequence.params, sequence.prompt_length
    if not sequence.law_has_memory:
        return [TokenContext(params, (), (), eos_ids)] * (1 + len(draft))
    prompt, output, constraint = sequence.tokens[:start], sequence.output, sequence.constraint
    contexts = [TokenContext(params, prompt, output, eos_ids, constraint)]
    for node, token in enumerate(draft.tokens):
        before = contexts[1 + draft.parent(node)].output
        contexts.append(TokenContext(params, prompt, [*before, token], eos_ids, constraint))
    return contexts
