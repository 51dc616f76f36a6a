"""``RewardWorker``: a local reward model scores answers, or the steps of answers.

The worker batches reward tasks for a ``RewardModel`` in one thread: tasks that arrive during a
forward pass make up the next batch. ``PRMController`` splits answers into steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from forethought.errors import DependencyError, EngineStopped, ParameterError
from forethought.model_dir import find_model_dir
from forethought.scaffolding.base_task import RewardTask, TaskStatus
from forethought.scaffolding.settings import NON_NEGATIVE_INT, validated
from forethought.scaffolding.worker import Worker

try:
    from forethought.rewards.reward_model import (
        RewardModel,
        RewardQuery,
        RewardScore,
        ScoringRow,
        is_reward_model,
    )
except ModuleNotFoundError as _error:
    raise DependencyError.missing(_error.name or "torch", "RewardWorker", "local") from _error

__all__ = ["RewardModel", "RewardWorker", "is_reward_model"]

_FIELDS = ("dtype", "device", "max_batch_tokens", "step_format", "max_cached_tokens")


@dataclass(eq=False)
class _PendingQuery:
    """A query, and the futures that wait for its score."""

    query: RewardQuery
    waiters: list[Future[RewardScore]] = field(default_factory=list)


class RewardWorker(Worker):
    """Executes reward tasks on a local reward model, in a thread of its own.

    A model that classifies sequences scores whole answers: ``score`` is the logit of its only label
    or the probability of the second of two. The text it sees is ``input_tokens``; without them,
    ``input_str`` and ``output_str`` in its chat template, or as a pair of texts.

    A model that classifies tokens, or a process reward model of another kind that ``RewardModel``
    reads, scores steps: ``step_scores`` holds the probability that the step is good at each of
    ``step_positions``, and ``score`` their product. ``PRMController.of(worker)`` writes such tasks.

    Equal tasks in flight are scored once. A decoder keeps what it has computed: of a task that
    begins with the tokens of an earlier one, only the rest is run (``task.usage.prefilled``, the
    others are ``cached``), so a search that scores each prefix scores each token once. May serve
    several event loops.

    Args:
        model_dir: local Hugging Face directory, or Hub id.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"``: as stored.
        device: such as ``"cuda:1"``; ``"auto"``: the GPU if there is one.
        max_batch_tokens: maximum tokens of a forward pass, with padding; a longer row runs alone.
        revision: branch, tag or commit of a model of the Hub; None: its main branch.
        step_format: how the model reads the steps of an answer, a name of ``STEP_FORMATS``; None:
            as its config says. A causal model that was trained as Math-Shepherd's is one with
            ``"math_shepherd"`` only.
        max_cached_tokens: tokens whose keys and values are kept for later tasks; the least recently
            used ones go first. Of a model of 7 billion parameters, some 60 kilobytes each.

    Attributes:
        tokenizer: the model's, for ``PRMController``.
        by_step: whether the model scores the steps of answers.
        step_format: the format in which it reads them; None if it scores whole answers.
        scores_are_logits, max_length: as of ``RewardModel``.

    Raises:
        ModelError: the model is neither here nor on the Hub, or is of another kind.
        ParameterError: another value out of range.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_batch_tokens: int = 8192,
        revision: str | None = None,
        step_format: str | None = None,
        max_cached_tokens: int = 16384,
    ) -> None:
        if max_batch_tokens < 1:
            raise ParameterError(
                "invalid max_batch_tokens", f"got {max_batch_tokens}", "Give at least 1"
            )
        validated("max_cached_tokens", max_cached_tokens, NON_NEGATIVE_INT)
        directory = find_model_dir(model_dir, revision)
        self._model = RewardModel(directory, dtype, device, step_format, max_cached_tokens)
        self.tokenizer, self.by_step = self._model.tokenizer, self._model.by_step
        self.step_format = self._model.step_format
        self.scores_are_logits = self._model.scores_are_logits
        self.max_length = self._model.max_length
        self._max_batch_tokens = max_batch_tokens
        self._lock = threading.Lock()
        self._under_way: dict[RewardQuery, _PendingQuery] = {}
        self._queue: list[_PendingQuery] = []
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forethought-reward")

    @classmethod
    def init_with_new_llm(
        cls,
        model_dir: str | Path,
        backend: str = "pytorch",
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        kv_cache_free_gpu_memory_fraction: float | None = None,
        disable_overlap_scheduler: bool = True,
        scheduler_config: None = None,
        **fields: Any,
    ) -> Self:
        """A worker by the arguments with which ``tensorrt_llm.scaffolding`` opens a reward model.

        Args:
            model_dir: local Hugging Face directory.
            backend: must be ``"pytorch"``.
            max_batch_size: has no effect: passes are bounded by their tokens.
            max_num_tokens: an alias of ``max_batch_tokens``.
            kv_cache_free_gpu_memory_fraction: has no effect: see ``max_cached_tokens``.
            disable_overlap_scheduler: has no effect: passes never overlap here.
            scheduler_config: must be None: the scheduler has no variants.
            **fields: further arguments of ``RewardWorker``.

        Raises:
            UsageError: another backend, a scheduler config, an argument that does not exist, or as
                ``RewardWorker``.
        """
        if backend != "pytorch":
            raise ParameterError("invalid backend", f"got {backend!r}", "Use 'pytorch'")
        unknown = fields.keys() - _FIELDS
        if scheduler_config is not None or unknown:
            name = "scheduler_config" if scheduler_config is not None else min(unknown)
            raise ParameterError.unknown(f"{cls.__name__}.init_with_new_llm", [name], _FIELDS)
        if max_num_tokens is not None:
            fields.setdefault("max_batch_tokens", max_num_tokens)
        return cls(model_dir, **fields)

    async def reward_handler(self, task: RewardTask) -> TaskStatus:
        """Score the task: sets ``score`` and ``step_scores``."""
        tokens, positions = task.input_tokens, task.step_positions
        query = RewardQuery(
            None if tokens is None else tuple(tokens),
            task.input_str if tokens is None else None,
            task.output_str if tokens is None else None,
            None if positions is None else tuple(positions),
        )
        result = await asyncio.wrap_future(self._ask(query))
        task.score, task.step_scores = result.score, list(result.step_scores)
        task.usage.prompt_tokens += result.length
        task.usage.prefilled += result.prefilled
        task.usage.cached += result.length - result.prefilled
        return TaskStatus.SUCCESS

    task_handlers = {RewardTask: reward_handler}  # noqa: RUF012

    def shutdown(self) -> None:
        """Release the model; tasks that still wait fail with ``EngineStopped``."""
        with self._lock:
            self._stopped = True
        self._thread.shutdown()
        vars(self).pop("_model", None)

    # ---- asking: on the callers' event loops --------------------------------------------------

    def _ask(self, query: RewardQuery) -> Future[RewardScore]:
        waiter: Future[RewardScore] = Future()
        with self._lock:
            if self._stopped:
                raise EngineStopped("the reward worker is shut down", fix="Create another one")
            pending = self._under_way.get(query)
            if pending is None:
                pending = self._under_way[query] = _PendingQuery(query)
                self._queue.append(pending)
                self._thread.submit(self._score_queue)
            pending.waiters.append(waiter)
        return waiter

    # ---- scoring: in the worker's thread ------------------------------------------------------

    def _score_queue(self) -> None:
        with self._lock:
            pending_queries, self._queue = self._queue, []
        encoded = []
        for pending in pending_queries:
            try:
                encoded.append((self._model.encode(pending.query), pending))
            except Exception as error:
                self._end(pending, error)
        for batch in self._batches(encoded):
            self._score_batch(batch)

    def _batches(
        self, encoded: list[tuple[ScoringRow, _PendingQuery]]
    ) -> Iterator[list[tuple[ScoringRow, _PendingQuery]]]:
        """Rows of like length together, as many as fit."""
        batch: list[tuple[ScoringRow, _PendingQuery]] = []
        for row, pending in sorted(encoded, key=lambda pair: len(pair[0].ids)):
            if batch and (len(batch) + 1) * len(row.ids) > self._max_batch_tokens:
                yield batch
                batch = []
            batch.append((row, pending))
        if batch:
            yield batch

    def _score_batch(self, batch: list[tuple[ScoringRow, _PendingQuery]]) -> None:
        batch = [(row, pending) for row, pending in batch if self._is_awaited(pending)]
        if not batch:
            return
        try:
            queries = [pending.query for _, pending in batch]
            scores = self._model.score([row for row, _ in batch], queries)
        except Exception as error:
            if len(batch) == 1:
                self._end(batch[0][1], error)
            else:  # run each alone, so that only those with an error fail
                for pair in batch:
                    self._score_batch([pair])
            return
        for (_, pending), score in zip(batch, scores, strict=True):
            self._end(pending, score)

    def _is_awaited(self, pending: _PendingQuery) -> bool:
        """Whether a future still waits for the query; if none does, it is removed."""
        with self._lock:
            stopped = self._stopped
            is_awaited = not all(waiter.cancelled() for waiter in pending.waiters)
            if not is_awaited:
                del self._under_way[pending.query]
        if is_awaited and stopped:
            self._end(pending, EngineStopped("the reward worker was shut down"))
        return is_awaited and not stopped

    def _end(self, pending: _PendingQuery, outcome: RewardScore | Exception) -> None:
        with self._lock:
            del self._under_way[pending.query]
        for waiter in pending.waiters:
            if not waiter.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, Exception):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)
                outcome = outcome._replace(prefilled=0)
