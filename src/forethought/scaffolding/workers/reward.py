"""``RewardWorker``: a local reward model scores answers, or the steps of answers.

``RewardModel`` runs the classifier: rows of token ids in, scores out. ``RewardWorker`` batches
reward tasks for it in one thread: tasks that arrive during a forward pass make up the next batch.
``PRMController`` splits answers into steps.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from forethought.errors import (
    ContextLengthError,
    DependencyError,
    EngineStopped,
    ModelError,
    ParameterError,
)
from forethought.model_dir import check_model_dir, find_model_dir
from forethought.scaffolding.task import RewardTask, TaskStatus
from forethought.scaffolding.worker import Worker
from forethought.silence import without_progress_bars

try:
    import torch
    import transformers
except ModuleNotFoundError as _error:
    raise DependencyError.missing(_error.name or "torch", "RewardWorker", "local") from _error

_HEADS = {"ForTokenClassification": True, "ForSequenceClassification": False}
"""Suffix of the architecture -> whether it scores steps."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")


class RewardQuery(NamedTuple):
    """The input of a reward task; equal queries are scored once."""

    tokens: tuple[int, ...] | None
    question: str | None
    answer: str | None
    positions: tuple[int, ...] | None


class ScoringRow(NamedTuple):
    """One input of the model."""

    ids: list[int]
    types: list[int] | None
    """Token types, of models with a type for question and for answer."""


class RewardScore(NamedTuple):
    """The result of a query."""

    score: float
    step_scores: list[float]
    length: int
    """Tokens of the input."""
    prefilled: int
    """Tokens of it that were run for this task; 0 if an equal query was run."""


class RewardModel:
    """A classifier: rows of token ids in, scores out. Not to be used by two threads at once.

    Args:
        directory: local Hugging Face directory.
        dtype: of the weights.
        device: where they are.

    Raises:
        ModelError: the directory holds no classifier that gives scores.
        ParameterError: an unknown dtype or device.
    """

    def __init__(self, directory: Path, dtype: str, device: str) -> None:
        if dtype not in _DTYPES:
            raise ParameterError(
                "invalid dtype", f"got {dtype!r}", f"Allowed: {', '.join(_DTYPES)}"
            )
        self.device = _device(device)
        check_model_dir(directory, "reward model")
        self.by_step = scores_steps(directory)
        self._model, self.tokenizer = _load(directory, self.by_step, dtype)
        config = self._model.config
        labels = config.num_labels
        if labels != 2 and (self.by_step or labels != 1):
            raise ModelError(
                f"the model in {directory} gives no scores",
                f"it has {labels} labels",
                "Choose a classifier of two labels, or of sequences with one",
            )
        config.use_cache = False
        self._model.to(self.device).eval()
        text = config.get_text_config()
        self._context = getattr(text, "max_position_embeddings", None) or math.inf
        self._vocabulary = self._model.get_input_embeddings().num_embeddings

    def encode(self, query: RewardQuery) -> ScoringRow:
        """The input row of a query.

        Raises:
            ParameterError: there is none, or the model scores steps and none are given, or the
                other way round.
            ContextLengthError: it is too long.
        """
        if (query.positions is not None) != self.by_step:
            raise _wrong_kind(self.by_step)
        row = self._tokenised(query) if query.tokens is None else ScoringRow([*query.tokens], None)
        length = len(row.ids)
        if not length or not all(0 <= token < self._vocabulary for token in row.ids):
            raise ParameterError(
                "invalid input_tokens",
                f"they are to be at least one id from 0 to {self._vocabulary - 1}",
                "Tokenise with the worker's tokenizer",
            )
        if not all(0 <= position < length for position in query.positions or ()):
            raise ParameterError(
                "invalid step_positions",
                f"got {list(query.positions or ())} for {length} tokens",
                "Give places in input_tokens",
            )
        if length > self._context:
            raise ContextLengthError(
                "the answer is too long for the reward model",
                f"it is {length} tokens with its question, and the context holds {self._context}",
                "Generate fewer tokens, or choose a model with a longer context",
            )
        return row

    def score(
        self, rows: Sequence[ScoringRow], queries: Sequence[RewardQuery]
    ) -> list[RewardScore]:
        """Run the model once, over all rows.

        They are padded on the right and masked, so that no row is changed by its company.
        """
        with torch.inference_mode():
            logits = self._logits(rows).float()
        scores = logits.softmax(-1)[..., 1] if logits.shape[-1] == 2 else logits[..., 0]
        results = []
        for row, query, found in zip(rows, queries, scores.tolist(), strict=True):
            steps = [found[position] for position in query.positions or ()]
            length = len(row.ids)
            score = math.prod(steps) if self.by_step else found
            results.append(RewardScore(score, steps, length, length))
        return results

    def _tokenised(self, query: RewardQuery) -> ScoringRow:
        """Question and answer in the format of the model's training."""
        question, answer = query.question, query.answer
        if question is None:
            raise ParameterError(
                "the task has nothing to score",
                "input_str and input_tokens are None",
                "Give text; token ids of another model cannot be scored",
            )
        if answer is not None and self.tokenizer.chat_template:
            turns = [("user", question), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)
        else:
            encoding = self.tokenizer(question, answer, verbose=False)
        return ScoringRow(list(encoding["input_ids"]), encoding.get("token_type_ids"))

    def _logits(self, rows: Sequence[ScoringRow]) -> Any:
        """[num_rows, num_labels]; with scored steps [num_rows, length, num_labels]."""
        inputs = {
            "input_ids": self._padded([row.ids for row in rows], self.tokenizer.pad_token_id or 0),
            "attention_mask": self._padded([[1] * len(row.ids) for row in rows], 0),
        }
        if any(row.types for row in rows):
            types = [row.types or [0] * len(row.ids) for row in rows]
            inputs["token_type_ids"] = self._padded(types, 0)
        if self.by_step or not hasattr(self._model, "score"):
            return self._model(**inputs).logits
        # A decoder's head reads the last token. Its own forward infers that position from the
        # padding token, which may be missing, or may end a text.
        hidden = self._model.base_model(**inputs).last_hidden_state
        last = torch.tensor([len(row.ids) - 1 for row in rows], device=self.device)
        return self._model.score(hidden[torch.arange(len(rows), device=self.device), last])

    def _padded(self, rows: Sequence[list[int]], value: int) -> Any:
        width = max(map(len, rows))
        filled = [row + [value] * (width - len(row)) for row in rows]
        return torch.tensor(filled, device=self.device)


def _device(name: str) -> Any:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParameterError(
            "invalid device", f"got {name!r}", "Use 'auto', 'cpu' or 'cuda'"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError("invalid device", "there is no CUDA here", "Use 'auto' or 'cpu'")
    return device


def is_reward_model(directory: Path) -> bool:
    """Whether ``directory`` is a reward model, as its config says."""
    try:
        return _architecture(directory).endswith(tuple(_HEADS))
    except ModelError:
        return False


def scores_steps(directory: Path) -> bool:
    """Whether the checkpoint classifies tokens rather than sequences.

    Raises:
        ModelError: there is no checkpoint, or it is no reward model.
    """
    name = _architecture(directory)
    for head, by_step in _HEADS.items():
        if name.endswith(head):
            return by_step
    raise ModelError(
        f"the model in {directory} is no reward model",
        f"its config names {name}",
        "Choose one whose architecture ends in ForSequenceClassification or ForTokenClassification",
    )


def _architecture(directory: Path) -> str:
    """The first of the architectures that the config names."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return str((config.get("architectures") or ["no architecture"])[0])
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"no model at {directory}",
            f"its config.json cannot be read ({type(error).__name__})",
            "Give the path of a local Hugging Face model directory",
        ) from error


def _load(directory: Path, by_step: bool, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer."""
    kind: Any = transformers.AutoModelForSequenceClassification
    if by_step:
        kind = transformers.AutoModelForTokenClassification
    try:
        with without_progress_bars():
            model, report = kind.from_pretrained(
                directory, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"cannot load the reward model in {directory}",
            reason[0],
            "Check that the directory is complete",
        ) from error
    if report["missing_keys"]:
        raise ModelError(
            f"cannot load the reward model in {directory}",
            f"it lacks {', '.join(sorted(report['missing_keys'])[:3])}, which would be random",
            "Check that the directory is complete",
        )
    return model, tokenizer


def _wrong_kind(by_step: bool) -> ParameterError:
    if by_step:
        return ParameterError(
            "this reward model scores steps",
            "the task has no step_positions",
            "Use PRMController, or a model that classifies sequences",
        )
    return ParameterError(
        "this reward model scores whole answers",
        "the task has step_positions",
        "Use NativeRewardController, or a model that classifies tokens",
    )


_FIELDS = ("dtype", "device", "max_batch_tokens")


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

    A model that classifies tokens scores steps: ``step_scores`` holds the probability of the
    second label at each of ``step_positions``, and ``score`` their product.

    Equal tasks in flight are scored once. May serve several event loops.

    Args:
        model_dir: local Hugging Face directory, or Hub id.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"``: as stored.
        device: such as ``"cuda:1"``; ``"auto"``: the GPU if there is one.
        max_batch_tokens: maximum tokens of a forward pass, with padding; a longer row runs alone.
        revision: branch, tag or commit of a model of the Hub; None: its main branch.

    Attributes:
        tokenizer: the model's, for ``PRMController``.
        by_step: whether the model scores the steps of answers, for ``PRMController``.

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
            backend: ``"pytorch"``: there is no other.
            max_batch_size: any will do: passes are bounded by their tokens.
            max_num_tokens: the same as ``max_batch_tokens``.
            kv_cache_free_gpu_memory_fraction: any will do: scoring keeps no KV cache.
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
        """Score all queued queries."""
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
        batch = [(row, pending) for row, pending in batch if self._wanted(pending)]
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

    def _wanted(self, pending: _PendingQuery) -> bool:
        """Whether a future still waits for it; if none does, the query is removed."""
        with self._lock:
            stopped = self._stopped
            wanted = not all(waiter.cancelled() for waiter in pending.waiters)
            if not wanted:
                del self._under_way[pending.query]
        if wanted and stopped:
            self._end(pending, EngineStopped("the reward worker was shut down"))
        return wanted and not stopped

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
