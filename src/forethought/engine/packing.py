"""Planned rows as the model and verification see them.

Packed for the model, a row is its known tokens and the nodes of its draft. After the forward, each
row that computed its sequence's last token is sampled from: for that sequence, and for the siblings
that wait with the very same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace

from torch import Tensor

from forethought.engine.scheduler import PlannedRow
from forethought.engine.sequence import Sequence, siblings_to_sample
from forethought.model.batch import ConcurrentTokens, Row
from forethought.model.sampling import TokenContext, prompt_logprobs
from forethought.speculative.drafter import NO_DRAFT, DeviceTokens
from forethought.speculative.verify.accept import VerificationResult, verify_argmax
from forethought.speculative.verify.unread_drafts import read_drafts
from forethought.speculative.verify.verify import SampledToken, VerificationRequest


def pack(row: PlannedRow, starts: Mapping[int, int]) -> Row:
    """The model's view of a planned row: its known tokens, then the nodes of its draft. ``starts``
    are the tokens of all planned sequences, by id, that were stored before this step.
    """
    draft, parents, count = row.draft, None, row.num_tokens
    if draft.parents is not None:
        nodes = (count + parent if parent >= 0 else count - 1 for parent in draft.parents)
        parents = (*range(-1, count - 1), *nodes)
    drafted: List[int] = draft.tokens
    on_device: Tensor | None = None
    if isinstance(draft.tokens, DeviceTokens):
        drafted, on_device = [0] * len(draft.tokens), draft.tokens.on_device
    return Row(
        tokens=[*row.sequence.tokens[row.start : row.stop], *drafted],
        start=row.start,
        table=row.sequence.table,
        parents=parents,
        logits_from=count - row.num_logits,
        drafted=on_device,
        concurrent=_concurrent(row, starts) if row.sequence.others else None,
        adapter=row.sequence.adapter,
        num_nodes=len(drafted),
    )


def _concurrent(row: PlannedRow, starts: Mapping[int, int]) -> ConcurrentTokens | None:
    """The tokens of other sequences that a row attends to: those stored before this step. A
    sequence that was planned and then left out may have lost a part of its last page.
    """
    others = [other for other in row.sequence.others if other.num_common <= row.start]
    if not others:
        return None
    begins = [other.num_common for other in others]
    read = [other.sequence for other in others]
    stored = [
        min(sequence.table.length, starts.get(sequence.id, sequence.table.length))
        for sequence in read
    ]
    return ConcurrentTokens(
        starts=begins,
        stops=[max(stop, begin) for stop, begin in zip(stored, begins, strict=True)],
        pages=[list(sequence.table.pages) for sequence in read],
    )


@dataclass(slots=True, eq=False)
class PendingSample:
    """A sequence to sample for after a row: the row's own, or a sibling with the same tokens."""

    row: PlannedRow
    sequence: Sequence
    request: VerificationRequest

    def take(self, result: VerificationResult) -> None:
        """Note what the sequence gains."""
        if self.sequence is self.row.sequence:
            self.row.results.append(result)
        else:
            self.row.sibling_results.append((self.sequence, result))

    def without_draft(self) -> PendingSample:
        """The same, sampled after the root."""
        rows, contexts = self.request.rows[:1], self.request.contexts[:1]
        plain = replace(self.request, draft=NO_DRAFT, rows=rows, contexts=contexts, rule=None)
        return replace(self, request=plain)


def takes_argmax(row: PlannedRow) -> bool:
    """Whether the tokens after a row and its nodes are the argmaxes of their logits, and no more
    than its own draft is verified with them."""
    sequence = row.sequence
    is_plain = sequence.takes_argmax and row.rule is None and not sequence.dependents
    return is_plain and row.num_logits == 1 and row.is_last


def goes_on_plainly(row: PlannedRow) -> bool:
    """Whether further decode steps of the sequence could follow at once, with drafts or without:
    nothing has to be looked at between them but whether it has ended, and by a token that says so.
    """
    sequence = row.sequence
    has_unknown_stops = bool(sequence.params.stop) and sequence.stop_candidates is None
    is_read = has_unknown_stops or sequence.wants_prompt_logprobs  # token by token
    is_apart = not (sequence.others or sequence.dependents or sequence.had_nonfinite_logits)
    return not _reads_tokens(sequence) and row.is_last and is_apart and not is_read


def _reads_tokens(sequence: Sequence) -> bool:
    """Whether the next token's distribution is computed from the earlier tokens on the host: by a
    constraint, or DRY.
    """
    return sequence.constraint is not None or sequence.params.penalises_repeats


def take_argmax(rows: List[PlannedRow], logits: Tensor) -> list[Sequence]:
    """Verify rows that ``takes_argmax``: what ``verify`` does for them, in one operation. Returns
    the sequences whose logits after the root, of [R, V] float32, are not finite.
    """
    nonfinite: list[Sequence] = []
    results = verify_argmax(logits, [row.draft for row in rows])
    for row, result in zip(rows, results, strict=True):
        if result.tokens:
            row.results.append(result)
        else:
            nonfinite.append(row.sequence)
    return nonfinite


def pending_samples(rows: List[PlannedRow], eos_ids: frozenset[int]) -> list[PendingSample]:
    """The sequences to sample for after rows that were computed together, in the order of their
    logits; only a row that is its sequence's last is sampled from.
    """
    pending, begin = list[PendingSample](), 0
    shared = dict[int, TokenContext]()
    drafted = [row for row in rows if row.num_nodes and _reads_tokens(row.sequence)]
    if drafted:
        read_drafts(row.draft for row in drafted)
    for row in rows:
        root = begin + row.num_logits - 1
        begin = root + 1 + row.num_nodes
        if not row.is_last:
            continue
        for sequence in siblings_to_sample(row.sequence):
            is_own = sequence is row.sequence
            draft = row.draft if is_own else NO_DRAFT
            token = sampled_token(sequence, eos_ids, shared)
            request = VerificationRequest.of(draft, root, token, sequence.tokens)
            request.rule = row.rule if is_own else None
            pending.append(PendingSample(row, sequence, request))
    return pending


def sampled_token(
    sequence: Sequence, eos_ids: frozenset[int], shared: dict[int, TokenContext]
) -> SampledToken:
    """How the next token of a sequence is sampled, with its prefix if the distribution depends on
    it.

    ``shared`` are contexts without prefix by the id of their params, added to: one for all
    sequences of a step that have the same params.
    """
    params, start = sequence.params, sequence.prompt_length
    if sequence.has_stateful_distribution:
        prompt, output = sequence.tokens[:start], sequence.output
        rule, breakers = sequence.constraint, sequence.breakers
        context = TokenContext(params, prompt, output, eos_ids, rule, breakers=breakers)
        return SampledToken(context, sequence.seed, sequence.index, is_stateful=True)
    shared_context = shared.get(id(params))
    if shared_context is None or params.min_tokens:  # the length of the output still counts
        output = sequence.output if params.min_tokens else []
        shared_context = shared[id(params)] = TokenContext(params, (), output, eos_ids)
    return SampledToken(shared_context, sequence.seed, sequence.index, is_stateful=False)


def keep_logits(rows: List[PlannedRow], logits: Tensor) -> list[Sequence]:
    """Set ``known_logits`` of rows whose prompt is scored; ``logits`` [R, V] is of all rows.
    Returns the sequences whose prompt is scored with logits that are not finite.
    """
    begin, nonfinite = 0, []
    for row in rows:
        if row.sequence.wants_prompt_logprobs:
            known_logits = row.known_logits = logits[begin : begin + row.num_logits]
            if not known_logits.amax(-1).isfinite().all():
                nonfinite.append(row.sequence)
        begin += row.num_logits + row.num_nodes
    return nonfinite


def add_prompt_logprobs(sequence: Sequence, logits: Tensor, start: int) -> None:
    """Score the prompt tokens that follow the positions from ``start`` on; logits: [M, V]."""
    scores = sequence.prompt_logprobs
    if not scores:
        scores.append(None)
    first = len(scores) - 1  # earlier positions were scored before a preemption
    stop = min(start + len(logits), sequence.prompt_length - 1)
    if first < stop:
        following = sequence.tokens[first + 1 : stop + 1]
        k = sequence.params.prompt_logprobs or 0
        scores += prompt_logprobs(logits[first - start : stop - start], following, k)
