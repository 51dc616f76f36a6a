"""PEARL: the draft model drafts the next block while the target verifies the current one.

Liu et al., 2024 (arXiv 2408.11850). While a block is verified, the next one is drafted as if the
whole block were accepted. If it is, and the target's own token is the first of the next block, the
rest of that is ready when the target is (post-verify), and the run of accepted tokens may be of any
length. If not, the drafted tokens are discarded, and the target decodes one token alone while the
draft model starts again one token earlier (pre-verify). Drafts are verified as any others.

Faster where draft model and target run on different devices; on one device they share its time. The
draft model has a page pool of its own, since it runs ahead of the target.

An error in the drafting thread is raised when a draft for the request is next asked for; the blocks
of other requests are then complete and stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

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
    Target,
)

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class PearlRequest:
    """The draft model's state for one request. The drafting thread writes to it."""

    table: PageTable
    ahead: list[int] = field(default_factory=list)
    """Tokens drafted for the positions from ``base`` on."""
    base: int = 0
    """Tokens that were known when the drafting began."""
    failure: Exception | None = None
    """The error of an earlier draft for it, after which nothing more is drafted."""

    def settle(self, tokens: Sequence[int]) -> None:
        """Keep the drafted tokens that agree with ``tokens``, which has only grown."""
        new = list(tokens[self.base :])
        agreed = 0
        while agreed < min(len(new), len(self.ahead)) and new[agreed] == self.ahead[agreed]:
            agreed += 1
        if agreed < len(new):
            self.table.rewind(min(self.table.length, self.base + agreed))
            self.ahead = []
        else:
            self.ahead = self.ahead[agreed:]
        self.base = len(tokens)

    def fail(self, failure: Exception) -> None:
        """Release its pages; no more drafts for it."""
        self.table.release()
        self.ahead, self.failure = [], failure


@dataclass(frozen=True, slots=True)
class DraftJob:
    """A block to draft for one request."""

    state: PearlRequest
    request: DraftRequest
    tokens: list[int]
    """Known tokens, then those drafted before."""
    count: int
    """Tokens to draft."""
    stored: int
    """Tokens in the request's pages before the job."""
    drafted: list[int] = field(default_factory=list)
    """The tokens of the block so far."""

    @property
    def done(self) -> bool:
        """Whether the block is complete."""
        return len(self.drafted) == self.count

    def undo(self) -> None:
        """Discard an incomplete block."""
        if not self.done:
            self.state.table.rewind(min(self.stored, self.state.table.length))
            self.drafted.clear()


class PearlDrafter(Drafter):
    """Drafts one block ahead of the target.

    Args:
        model: the draft model over a storage of its own.
        max_draft_len: tokens of a block (gamma).
        overlap: draft in a separate thread; else in the calling one, with the same result.
    """

    def __init__(self, model: DraftModel, max_draft_len: int, *, overlap: bool = True) -> None:
        self._model, self._block = model, max_draft_len
        self._storage = model.runner.storage
        self._pool = PagePool(self._storage.num_pages, self._storage.page_size)
        self._states: dict[int, PearlRequest] = {}
        self._executor: Executor | None = None
        if overlap:
            self._executor = ThreadPoolExecutor(
                max_workers=1,
                thread_name_prefix="pearl",
                initializer=torch.set_num_threads,
                initargs=(torch.get_num_threads(),),
            )
        self._future: Future[None] | None = None

    @classmethod
    def build(cls, config: PearlDecodingConfig, target: Target) -> PearlDrafter:
        """Load the draft model.

        Raises:
            ModelError: it cannot be loaded.
            ParameterError: its vocabulary is not the target's.
        """
        assert config.speculative_model is not None
        model = DraftModel.load(
            config.speculative_model, target, config.draft_device, config.quantization
        )
        return cls(model, config.max_draft_len, overlap=config.overlap)

    @property
    @override
    def forward_path(self) -> str:
        return self._model.forward_path

    @property
    def page_bytes(self) -> int:
        """It has as many pages of its own as the target."""
        return self._storage.bytes_per_page

    @override
    def resize(self, num_pages: int) -> None:
        self._storage.resize(num_pages)
        self._pool = PagePool(num_pages, self._storage.page_size)

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Propose the block that is ready, and begin the next one; raises errors of the drafting
        thread.
        """
        self._join()
        self._storage.limit_states([state.table for state in self._states.values()])
        states = [self._state(request) for request in scheduled_requests.generation_requests]
        for state in states:
            if state.failure is not None:
                raise state.failure
        jobs: list[DraftJob] = []
        for state, request in zip(states, scheduled_requests.generation_requests, strict=True):
            state.settle(request.tokens)
            request.py_draft_tokens = state.ahead[: request.max_draft_len]
            if job := self._job(state, request):
                jobs.append(job)
        if jobs and self._executor is not None:
            self._future = self._executor.submit(self._draft, jobs)
        elif jobs:
            self._draft(jobs)

    def release(self, request: DraftRequest) -> None:
        """Its pages are free again."""
        if request.request_id in self._states:
            self._join()
            state = self._states.pop(request.request_id, None)
            if state is not None:
                state.table.release()

    def shutdown(self) -> None:
        """End the thread."""
        self._join()
        if self._executor is not None:
            self._executor.shutdown(wait=True)

    def _join(self) -> None:
        if self._future is not None:
            wait([self._future])
            future, self._future = self._future, None
            future.result()

    def _state(self, request: DraftRequest) -> PearlRequest:
        if request.request_id not in self._states:
            self._states[request.request_id] = PearlRequest(PageTable(self._pool))
        return self._states[request.request_id]

    def _job(self, state: PearlRequest, request: DraftRequest) -> DraftJob | None:
        """The next block of a request; None at the end of the context or without pages."""
        tokens = [*request.tokens, *state.ahead]
        count = min(self._block, self._model.max_positions - len(tokens))
        return DraftJob(state, request, tokens, count, state.table.length) if count > 0 else None

    # ---- in the thread ----------------------------------------------------------------------

    def _draft(self, jobs: list[DraftJob]) -> None:
        """Draft a block for each request.

        If that fails, incomplete blocks are drafted again for each request alone; errors then are
        those of single requests.
        """
        try:
            self._grow(jobs)
        except Exception as failure:
            for job in jobs:
                if job.done:
                    continue
                error = failure if len(jobs) == 1 else self._failure_alone(job)
                if error is not None:
                    log.warning("nothing is drafted ahead for this request", exc_info=error)
                    job.state.fail(error)
        except BaseException:
            for job in jobs:
                job.undo()
            raise

    def _failure_alone(self, job: DraftJob) -> Exception | None:
        """Draft for one request from the start of its block; the error, if any."""
        job.undo()
        try:
            self._grow([job])
        except Exception as failure:
            return failure
        return None

    def _grow(self, jobs: list[DraftJob]) -> None:
        missing = {
            id(job): missing_text
            for job in jobs
            if (missing_text := self._missing(job)) is not None
        }
        growing = [job for job in jobs if id(job) in missing]
        if not growing:
            return
        logits = self._model.compute([missing[id(job)] for job in growing])
        while growing:
            for row, job in enumerate(growing):
                job.drafted.append(_choose(job, logits[row : row + 1]))
                if job.done:
                    job.state.ahead += job.drafted
            growing = [job for job in growing if not job.done]
            if growing:
                logits = self._model.forward([_next_row(job) for job in growing])

    def _missing(self, job: DraftJob) -> TokenRange | None:
        """Tokens to compute before the block; None if there are not enough pages for the block."""
        table, length = job.state.table, len(job.tokens)
        # The last one's logits are always needed.
        start = self._storage.resume(table, min(table.length, length - 1))
        table.rewind(start)
        try:
            table.append(length + job.count - 1 - start)
        except OutOfPages:
            return None
        return TokenRange(job.tokens, table, start, length)


def _choose(job: DraftJob, logits: Tensor) -> int:
    """The most probable token; for a sampled request, sampled with the target's own uniform.

    With a common uniform sample, draft and target agree as often as their distributions allow. The
    draft is verified as a point mass, so the target's token does not depend on it.
    """
    request = job.request
    if request.params.greedy:
        return int(logits.argmax())
    all_tokens = [*job.tokens, *job.drafted]
    split = request.prompt_length
    prompt, output = all_tokens[:split], all_tokens[split:]
    context = TokenContext(request.params, prompt, output, frozenset(), breakers=request.breakers)
    uniform = uniform_at(request.seed, request.index, len(all_tokens))
    return int(invert_cdf(logits_to_probs(logits, [context]), [uniform]))


def _next_row(job: DraftJob) -> Row:
    position = len(job.tokens) + len(job.drafted) - 1
    return Row([job.drafted[-1]], position, job.state.table.prefix(position + 1))
