"""``RewardWorker``: a local reward model judges answers, or the steps of answers.

What arrives while the model is busy is judged together next. Knows nothing about where answers come
from, nor how they are cut into steps: ``PRMController`` does that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from forethought.errors import EngineStopped, ParameterError
from forethought.model_dir import find_model_dir
from forethought.scaffolding.task import RewardTask, TaskStatus
from forethought.scaffolding.worker import Worker
from forethought.scaffolding.workers.reward_model import Inquiry, RewardModel, Row, Verdict

_FIELDS = ("dtype", "device", "max_batch_tokens")


@dataclass(eq=False)
class _Job:
    """One inquiry, and all who wait for the verdict."""

    inquiry: Inquiry
    waiters: list[Future[Verdict]] = field(default_factory=list)


class RewardWorker(Worker):
    """Executes reward tasks on a local reward model, in a thread of its own.

    A model that classifies sequences judges whole answers: ``score`` is the logit of its only label
    or the probability of the second of two. The text it sees is ``input_tokens``; without them,
    ``input_str`` and ``output_str`` in its chat template, or as a pair of texts.

    A model that classifies tokens judges steps: ``step_scores`` holds the probability of the
    second label at each of ``step_positions``, and ``score`` their product.

    Equal tasks under way are judged once. May serve several event loops.

    Args:
        model_dir: local Hugging Face directory, or Hub id.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"``: as stored.
        device: such as ``"cuda:1"``; ``"auto"``: the GPU if there is one.
        max_batch_tokens: judged in one pass at most, padding included; a longer one goes alone.
        revision: branch, tag or commit of a model of the Hub; None: its main branch.

    Attributes:
        tokenizer: the model's, for ``PRMController``.
        by_step: whether the model judges the steps of answers, as ``PRMController`` wants it.

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
    ) -> None:
        if max_batch_tokens < 1:
            raise ParameterError(
                "invalid max_batch_tokens", f"got {max_batch_tokens}", "Give at least 1"
            )
        self._model = RewardModel(find_model_dir(model_dir, revision), dtype, device)
        self.tokenizer, self.by_step = self._model.tokenizer, self._model.by_step
        self._max_batch_tokens = max_batch_tokens
        self._lock = threading.Lock()
        self._under_way: dict[Inquiry, _Job] = {}
        self._queue: list[_Job] = []
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
            backend: ``"pytorch"``: there is no other.
            max_batch_size: any will do: passes are bounded by their tokens.
            max_num_tokens: judged in one pass at most: ``max_batch_tokens``.
            kv_cache_free_gpu_memory_fraction: any will do: judging keeps no KV cache.
            disable_overlap_scheduler: either will do: passes never overlap here.
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
        """Judge, and leave ``score`` and ``step_scores`` on the task."""
        tokens, positions = task.input_tokens, task.step_positions
        inquiry = Inquiry(
            None if tokens is None else tuple(tokens),
            task.input_str if tokens is None else None,
            task.output_str if tokens is None else None,
            None if positions is None else tuple(positions),
        )
        verdict = await asyncio.wrap_future(self._ask(inquiry))
        task.score, task.step_scores = verdict.score, list(verdict.step_scores)
        task.usage.prompt_tokens += verdict.length
        task.usage.prefilled += verdict.prefilled
        task.usage.cached += verdict.length - verdict.prefilled
        return TaskStatus.SUCCESS

    task_handlers = {RewardTask: reward_handler}  # noqa: RUF012

    def shutdown(self) -> None:
        """Let go of the model; whoever still waits gets ``EngineStopped``."""
        with self._lock:
            self._stopped = True
        self._thread.shutdown()
        vars(self).pop("_model", None)

    # ---- asking: on the callers' event loops --------------------------------------------------

    def _ask(self, inquiry: Inquiry) -> Future[Verdict]:
        waiter: Future[Verdict] = Future()
        with self._lock:
            if self._stopped:
                raise EngineStopped("the reward worker is shut down", fix="Create another one")
            job = self._under_way.get(inquiry)
            if job is None:
                job = self._under_way[inquiry] = _Job(inquiry)
                self._queue.append(job)
                self._thread.submit(self._judge_queue)
            job.waiters.append(waiter)
        return waiter

    # ---- judging: in the worker's thread ------------------------------------------------------

    def _judge_queue(self) -> None:
        """Judge all that has come since the last time."""
        with self._lock:
            jobs, self._queue = self._queue, []
        encoded = []
        for job in jobs:
            try:
                encoded.append((self._model.encode(job.inquiry), job))
            except Exception as error:
                self._end(job, error)
        for batch in self._batches(encoded):
            self._judge(batch)

    def _batches(self, encoded: list[tuple[Row, _Job]]) -> Iterator[list[tuple[Row, _Job]]]:
        """Rows of like length together, as many as fit."""
        batch: list[tuple[Row, _Job]] = []
        for row, job in sorted(encoded, key=lambda pair: len(pair[0].ids)):
            if batch and (len(batch) + 1) * len(row.ids) > self._max_batch_tokens:
                yield batch
                batch = []
            batch.append((row, job))
        if batch:
            yield batch

    def _judge(self, batch: list[tuple[Row, _Job]]) -> None:
        batch = [(row, job) for row, job in batch if self._wanted(job)]
        if not batch:
            return
        try:
            inquiries = [job.inquiry for _, job in batch]
            verdicts = self._model.judge([row for row, _ in batch], inquiries)
        except Exception as error:
            if len(batch) == 1:
                self._end(batch[0][1], error)
            else:  # only those that fail on their own fail
                for pair in batch:
                    self._judge([pair])
            return
        for (_, job), verdict in zip(batch, verdicts, strict=True):
            self._end(job, verdict)

    def _wanted(self, job: _Job) -> bool:
        """Whether somebody still waits for it; nobody else will, if not."""
        with self._lock:
            stopped = self._stopped
            wanted = not all(waiter.cancelled() for waiter in job.waiters)
            if not wanted:
                del self._under_way[job.inquiry]
        if wanted and stopped:
            self._end(job, EngineStopped("the reward worker was shut down"))
        return wanted and not stopped

    def _end(self, job: _Job, outcome: Verdict | Exception) -> None:
        with self._lock:
            del self._under_way[job.inquiry]
        for waiter in job.waiters:
            if not waiter.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, Exception):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)
                outcome = outcome._replace(prefilled=0)
