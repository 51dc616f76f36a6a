"""A plan's way through the network: from planned rows to logits, from logits to verdicts.

What fails for several at once is tried again with half of them, down to single ones, so that an
error is that of the request that causes it. Changes nothing about the sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from forethought.engine.kinship import drawers
from forethought.engine.scheduler import PlannedRow
from forethought.engine.sequence import Sequence
from forethought.model.batch import Row
from forethought.model.runner import Runner
from forethought.model.sampling import TokenContext
from forethought.model.taps import StateReader
from forethought.speculative.draft import NO_DRAFT, Draft
from forethought.speculative.verify import Candidate, Verdict, verify

Outcome = list[tuple[Sequence, Verdict]]
"""What was drawn after one row: for its own sequence first, then for its twins."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A sequence that wants the token that follows a row: the row's own, or a twin of it."""

    row: PlannedRow
    sequence: Sequence
    candidate: Candidate


def by_halves(
    items: List[Item],
    compute: Callable[[List[Item]], Result],
    on_failure: Callable[[Item, Exception], Item | None],
) -> list[tuple[List[Item], Result]]:
    """Compute all items together; where that fails, each half of them apart, and so on.

    Args:
        items: in order.
        compute: what does not change the items, so that it can be called again.
        on_failure: told of an item for which ``compute`` fails alone. It may return another item to
            try in its place; else nothing is computed for it.

    Returns:
        In order, the items that were computed together, with what came of it.
    """
    done: list[tuple[List[Item], Result]] = []
    left = [items] if items else []
    while left:
        some = left.pop()
        failure: Exception | None = None
        try:
            done.append((some, compute(some)))
        except Exception as error:
            failure = error
        # Outside of the handler, whose traceback keeps the tensors of the failed call alive.
        if failure is None:
            continue
        if len(some) > 1:
            failure = None
            middle = len(some) // 2
            left += [some[middle:], some[:middle]]
        elif (other := on_failure(some[0], failure)) is not None:
            left.append([other])
    return done


def forward(runner: Runner, rows: List[PlannedRow], readers: List[StateReader] = ()) -> Tensor:
    """Compute the rows' tokens, and hand their hidden states to those who keep them.

    Returns:
        [R, V] float32 in the order of the rows: of each row its ``logits`` last known tokens, then
        the nodes of its draft.
    """
    packed = [_row(row) for row in rows]
    return runner.forward(packed, readers) if readers else runner.forward(packed)


def drawings(rows: List[PlannedRow], eos_ids: frozenset[int]) -> list[Drawing]:
    """Who wants a token behind rows that were computed together.

    Args:
        rows: in the order of their logits; only those that are their sequence's last one count.
        eos_ids: the model's end-of-sequence ids.
    """
    found: list[Drawing] = []
    begin = 0
    for row in rows:
        root = begin + row.logits - 1
        for sequence in drawers(row.sequence) if row.is_last else []:
            draft = row.draft if sequence is row.sequence else NO_DRAFT
            candidate = Candidate(
                draft=draft,
                rows=range(root, root + 1 + len(draft)),
                contexts=_contexts(sequence, draft, eos_ids),
                seed=sequence.seed,
                stream=sequence.index,
                position=len(sequence.tokens),
                past=sequence.tokens,
                rule=row.rule if sequence is row.sequence else None,
            )
            found.append(Drawing(row, sequence, candidate))
        begin = root + 1 + len(row.draft)
    return found


def judge(logits: Tensor, wanted: List[Drawing]) -> list[Verdict]:
    """What each of them gains; ``logits`` [R, V] float32 are those of ``forward``."""
    return verify(logits, [each.candidate for each in wanted])


def without_draft(drawing: Drawing) -> Drawing:
    """The same, where the token behind the row alone is drawn."""
    candidate = drawing.candidate
    plain = replace(
        candidate,
        draft=NO_DRAFT,
        rows=candidate.rows[:1],
        contexts=candidate.contexts[:1],
        rule=None,
    )
    return replace(drawing, candidate=plain)


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
