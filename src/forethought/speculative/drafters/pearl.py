"""Drafting while the target verifies: PEARL (Liu et al., 2024, arXiv 2408.11850).

A block of drafts is put to the target, and in the same moment the draft model begins the next one,
as if the whole block were accepted and its last token guessed right. If so, the next block is ready
when the target is (post-verify), and the segment of agreement may be of any length. If not, what
was drafted is thrown away, and the target decodes one token alone while the draft model starts
again behind the one before it (pre-verify). Nothing that the target has not verified is ever said:
the engine's verification knows no difference between these drafts and others.

It pays where draft model and target run on different devices; on one they share its time. The draft
model has pages of its own here, since it runs ahead of the target's.

What fails while it is drafted ahead is raised when the request is next asked for: by then everybody
else's next block is ready, and stays so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from torch import Tensor

from forethought.config.drafters import PearlDecodingConfig
from forethought.kv.pool import OutOfPages, PagePool
from forethought.kv.table import PageTable
from forethought.model.batch import Row
from forethought.model.sampling import TokenContext, invert_cdf, logits_to_probs, uniform_at
from forethought.speculative.draft_model import DraftModel
from forethought.speculative.draft_module import TokenRange
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.registry import Target

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class PearlRequest:
    """How far the draft model is ahead of one request. The thread that drafts writes to it."""

    table: PageTable
    ahead: list[int] = field(default_factory=list)
    """Tokens guessed for the positions from ``base`` on."""
    base: int = 0
    """Tokens that were known when the guessing began."""
    failure: Exception | None = None
    """What drafting for it has raised; nothing is drafted for it after that."""

    def settle(self, tokens: Sequence[int]) -> None:
        """Keep of the guesses those that follow what is known now; ``tokens`` has only grown."""
        come = list(tokens[self.base :])
        agreed = 0
        while agreed < min(len(come), len(self.ahead)) and come[agreed] == self.ahead[agreed]:
            agreed += 1
        if agreed < len(come):
            self.table.rewind(min(self.table.length, self.base + agreed))
            self.ahead = []
        else:
            self.ahead = self.ahead[agreed:]
        self.base = len(tokens)

    def fail(self, failure: Exception) -> None:
        """Nothing more comes of it."""
        self.table.release()
        self.ahead, self.failure = [], failure


@dataclass(frozen=True, slots=True)
class DraftJob:
    """What to draft behind: known tokens, then guesses of before."""

    lane: PearlRequest
    request: DraftRequest
    tokens: list[int]
    count: int
    """Tokens to add to the guesses."""
    stored: int
    """Tokens in the lane's pages before any of it was done."""
    guesses: list[int] = field(default_factory=list)
    """Those added so far."""

    @property
    def done(self) -> bool:
        """Whether the block is whole."""
        return len(self.guesses) == self.count

    def undo(self) -> None:
        """Forget what was stored for a block that is not whole."""
        if not self.done:
            self.lane.table.rewind(min(self.stored, self.lane.table.length))
            self.guesses.clear()


class PearlDrafter(Drafter):
    """Drafts one block ahead of the target.

    Args:
        model: the draft model over a storage of its own.
        max_draft_len: tokens of a block (gamma).
        overlap: draft in a thread of its own; else at once, which says the same.
    """

    def __init__(self, model: DraftModel, max_draft_len: int, *, overlap: bool = True) -> None:
        self._model, self._block = model, max_draft_len
        self._storage = model.runner.storage
        self._pool = PagePool(self._storage.num_pages, self._storage.page_size)
        self._lanes: dict[int, PearlRequest] = {}
        self._executor: Executor | None = None
        if overlap:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pearl")
        self._future: Future[None] | None = None

    @classmethod
    def build(cls, config: PearlDecodingConfig, target: Target) -> PearlDrafter:
        """Load the draft model.

        Raises:
            ModelError: it cannot be loaded.
            ParameterError: its vocabulary is not the target's.
        """
        assert config.speculative_model is not None
        model = DraftModel.load(config.speculative_model, target, config.draft_device)
        return cls(model, config.max_draft_len, overlap=config.overlap)

    @property
    def page_bytes(self) -> int:
        """Its own pages are as many as the target's."""
        return self._storage.bytes_per_page

    def resize(self, num_pages: int) -> None:
        """See :class:`Drafter`."""
        self._storage.resize(num_pages)
        self._pool = PagePool(num_pages, self._storage.page_size)

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Put the block that is ready to the target, and begin the next one.

        Raises:
            Exception: what drafting ahead for one of them has raised; nothing has changed, so
                those for whom it did not fail can be asked for again.
        """
        self._join()
        lanes = [self._lane(request) for request in scheduled_requests.generation_requests]
        for lane in lanes:
            if lane.failure is not None:
                raise lane.failure
        jobs: list[DraftJob] = []
        for lane, request in zip(lanes, scheduled_requests.generation_requests, strict=True):
            lane.settle(request.tokens)
            request.py_draft_tokens = lane.ahead[: request.max_draft_len]
            if job := self._job(lane, request):
                jobs.append(job)
        if jobs and self._executor is not None:
            self._future = self._executor.submit(self._draft, jobs)
        elif jobs:
            self._draft(jobs)

    def release(self, request: DraftRequest) -> None:
        """Its pages are free again."""
        if request.request_id in self._lanes:
            self._join()
            lane = self._lanes.pop(request.request_id, None)
            if lane is not None:
                lane.table.release()

    def shutdown(self) -> None:
        """End the thread."""
        self._join()
        if self._executor is not None:
            self._executor.shutdown(wait=True)

    @property
    def pages_in_use(self) -> int:
        """Of the draft model's own."""
        return self._pool.in_use

    def _join(self) -> None:
        """Wait for the drafting under way; an interrupt while it waits leaves it under way."""
        if self._future is not None:
            wait([self._future])
            future, self._future = self._future, None
            future.result()

    def _lane(self, request: DraftRequest) -> PearlRequest:
        if request.request_id not in self._lanes:
            self._lanes[request.request_id] = PearlRequest(PageTable(self._pool))
        return self._lanes[request.request_id]

    def _job(self, lane: PearlRequest, request: DraftRequest) -> DraftJob | None:
        """The next block of a request; None where the context or the pages end."""
        tokens = [*request.tokens, *lane.ahead]
        count = min(self._block, self._model.max_positions - len(tokens))
        return DraftJob(lane, request, tokens, count, lane.table.length) if count > 0 else None

    # ---- in the thread ----------------------------------------------------------------------

    def _draft(self, jobs: list[DraftJob]) -> None:
        """Add a block to the guesses of each lane.

        If that fails, what is not done is begun again for each lane alone, and a failure is that of
        the lanes for which it then fails.
        """
        try:
            self._grow(jobs)
        except Exception as failure:
            for job in jobs:
                if job.done:
                    continue
                own = failure if len(jobs) == 1 else self._failure_alone(job)
                if own is not None:
                    log.warning("nothing is drafted ahead for this request", exc_info=own)
                    job.lane.fail(own)
        except BaseException:
            for job in jobs:
                job.undo()
            raise

    def _failure_alone(self, job: DraftJob) -> Exception | None:
        """Draft for one lane, from what it had; what that raises."""
        job.undo()
        try:
            self._grow([job])
        except Exception as failure:
            return failure
        return None

    def _grow(self, jobs: list[DraftJob]) -> None:
        """Add a block to the guesses of each lane that has the pages for it."""
        pasts = {id(job): past for job in jobs if (past := self._past(job)) is not None}
        growing = [job for job in jobs if id(job) in pasts]
        if not growing:
            return
        logits = self._model.compute([pasts[id(job)] for job in growing])
        while growing:
            for place, job in enumerate(growing):
                job.guesses.append(_choose(job, logits[place : place + 1]))
                if job.done:
                    job.lane.ahead += job.guesses
            growing = [job for job in growing if not job.done]
            if growing:
                logits = self._model.forward([_next_row(job) for job in growing])

    def _past(self, job: DraftJob) -> TokenRange | None:
        """What the draft model has yet to see; None if its pages do not suffice for the block."""
        table, length = job.lane.table, len(job.tokens)
        start = min(table.length, length - 1)  # the last one's logits are wanted in any case
        table.rewind(start)
        try:
            table.append(length + job.count - 1 - start)
        except OutOfPages:
            return None
        return TokenRange(job.tokens, table, start, length)


def _choose(job: DraftJob, logits: Tensor) -> int:
    """The likeliest token; of a sampled request, the one that the target's own coin would pick.

    With the coin in common, draft and target agree as often as their laws let them, and a draft is
    a point: whatever it is, the target draws its token by itself.
    """
    request = job.request
    if request.params.greedy:
        return int(logits.argmax())
    known = [*job.tokens, *job.guesses]
    split = request.prompt_length
    context = TokenContext(request.params, known[:split], known[split:], frozenset())
    toss = uniform_at(request.seed, request.index, len(known))
    return int(invert_cdf(logits_to_probs(logits, [context]), [toss]))


def _next_row(job: DraftJob) -> Row:
    position = len(job.tokens) + len(job.guesses) - 1
    return Row([job.guesses[-1]], position, job.lane.table.window(position + 1))
