"""``RewardServerWorker``: a reward model on a server scores answers, or the steps of answers.

The requests are those of vLLM's pooling models; SGLang takes ``classify`` too::

    classify    input, or messages     -> data[0].probs: one per label
    score       text_1, text_2         -> data[0].score
    pooling     input (token ids)      -> data[0].data: a row of labels per token, or per step
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

from pydantic import TypeAdapter

from forethought.errors import ParameterError, RequestError, UsageError
from forethought.outputs import Usage
from forethought.rewards.step_format import STEP_FORMATS
from forethought.scaffolding.base_task import RewardTask, TaskStatus
from forethought.scaffolding.settings import validated
from forethought.workers.clients import CONNECTION_ERRORS, ClientWorker
from forethought.workers.concurrency import AdaptiveConcurrency
from forethought.workers.routing import shown_url

RewardEndpoint = Literal["classify", "score"]
_ENDPOINT: TypeAdapter[RewardEndpoint] = TypeAdapter(RewardEndpoint)
_POOLING = "pooling"
_RAW = {"use_activation": False}
"""Asks for logits: probabilities of good answers round to 1.0 and would tie."""
_REFUSED = (400, 404, 422)


class RewardServerWorker(ClientWorker):
    """Executes reward tasks on a server, such as ``vllm serve MODEL --runner pooling``.

    Without ``step_format`` it scores whole answers: ``score`` is the logit of the model's only
    label (or what the server makes of it), or the probability of the second of two. With it, a
    process reward model scores steps: ``step_scores`` holds the probability that the step is good
    at each of ``step_positions``, and ``score`` their product. ``PRMController.of(worker)`` writes
    such tasks.

    Args:
        async_client: as for ``OpenaiWorker``; its ``base_url`` is that of the server's API, such as
            ``http://host:8000/v1``. Endpoints are looked up there, and beside ``/v1``.
        model: name of the model on the server; None: the first one that it lists.
        endpoint: where whole answers are scored. ``"classify"`` is for reward models that read a
            chat, ``"score"`` for models of pairs of texts (cross-encoders).
        tokenizer: the reward model's, of transformers, with its chat template. ``step_format``
            needs it; ``"classify"`` then sends the chat as text, which servers without ``messages``
            there (SGLang, older ones of vLLM) need.
        step_format: how the model reads the steps of an answer, a name of ``STEP_FORMATS``; the
            rows of ``pooling`` are read where the steps end.
        extra_body: further fields of every request.
        concurrency: as for ``OpenaiWorker``.

    Attributes:
        by_step: whether it scores the steps of answers.
        scores_are_logits: not known.

    Raises:
        ParameterError: an endpoint or a format that does not exist, ``"score"`` for steps, or a
            format without a tokenizer.
    """

    def __init__(
        self,
        async_client: Any,
        model: str | None = None,
        *,
        endpoint: RewardEndpoint = "classify",
        tokenizer: Any = None,
        step_format: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        concurrency: AdaptiveConcurrency | None = None,
    ) -> None:
        super().__init__(async_client)
        self.check(endpoint, tokenizer, step_format)
        self.model, self.tokenizer, self.step_format = model, tokenizer, step_format
        self.by_step, self.scores_are_logits = step_format is not None, False
        self.extra_body, self.concurrency = dict(extra_body or {}), concurrency
        self._endpoint = _POOLING if self.by_step else str(endpoint)
        self._url: str | None = None

    @staticmethod
    def check(endpoint: str, tokenizer: Any, step_format: str | None) -> None:
        """Check settings of the constructor, and whether there is a tokenizer; raises
        ``ParameterError``.
        """
        validated("endpoint", endpoint, _ENDPOINT)
        _check_steps(endpoint, tokenizer, step_format)

    async def reward_handler(self, task: RewardTask) -> TaskStatus:
        """Score the task: sets ``score`` and ``step_scores``."""
        if self.by_step != (task.step_positions is not None):
            raise _wrong_kind(self.by_step)
        with self.open_request():
            answer = await self._ask(self._fields(task))
        try:
            self._fill(task, answer["data"][0])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                "the reward server sent no score",
                f"its answer to {self._endpoint} is {str(answer)[:200]!r}",
                "Serve a reward model there, or choose another endpoint",
            ) from error
        _count(answer, task.usage)
        return TaskStatus.SUCCESS

    task_handlers = {RewardTask: reward_handler}  # noqa: RUF012

    def _fill(self, task: RewardTask, data: Mapping[str, Any]) -> None:
        if task.step_positions is not None:
            rows = _rows_of_steps(data["data"], task)
            task.step_scores = [_label_score(row) for row in rows]
            task.score = math.prod(task.step_scores)
        elif self._endpoint == "score":
            task.score = _label_score(data["score"])
        else:
            task.score = _label_score(data["probs"])

    # ---- the request --------------------------------------------------------------------------

    def _fields(self, task: RewardTask) -> dict[str, Any]:
        """The fields of the request, without the model."""
        if task.input_tokens is not None:
            # The ids hold all special tokens.
            by_task = {"task": "token_classify"} if self.by_step else _RAW
            return {"input": task.input_tokens, **by_task, **self.extra_body}
        question, answer = task.input_str, task.output_str
        if question is None or answer is None:
            raise ParameterError(
                "the task has nothing to score",
                "it lacks input_str or output_str",
                "Give question and answer as text",
            )
        if self._endpoint == "score":
            return {"text_1": question, "text_2": answer, **_RAW, **self.extra_body}
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        return {**self._chat(messages), **_RAW, **self.extra_body}

    def _chat(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """Messages, or the text of them where the chat template is known."""
        if self.tokenizer is None:
            return {"messages": messages}
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        return {"input": text, "add_special_tokens": False}

    async def _ask(self, fields: dict[str, Any]) -> Any:
        """The server's answer; ``ConnectionError`` or ``UsageError`` where it does not answer or
        refuses.
        """
        client, limit = self._clients.of_this_loop(), self.concurrency
        try:
            async with nullcontext() if limit is None else limit.request() as request:
                send = partial(self._send, client, fields)
                return await (send() if request is None else request.send(send))
        except Exception as error:
            if type(error).__name__ in CONNECTION_ERRORS:
                raise self.connection_error(error, begun=False) from error
            if getattr(error, "status_code", None) in _REFUSED:
                raise self._refusal(error, client) from error
            raise

    async def _send(self, client: Any, fields: dict[str, Any]) -> Any:
        """Post to the first URL that has the endpoint."""
        if self.model is None:
            self.model = await _first_model(client)
        body = {"model": self.model, **fields}
        for url in [self._url] if self._url else self._candidates(client):
            try:
                answer = await client.post(url, body=body, cast_to=object)
            except Exception as error:
                if getattr(error, "status_code", None) != 404:
                    raise
                missing = error
            else:
                self._url = url
                return answer
        raise missing

    def _candidates(self, client: Any) -> list[str]:
        """Where the endpoint may be: in the API, and beside it."""
        base = str(client.base_url).rstrip("/")
        roots = [base, base.removesuffix("/v1")] if base.endswith("/v1") else [base]
        return [f"{root}/{self._endpoint}" for root in roots]

    def _refusal(self, error: Exception, client: Any) -> UsageError:
        fix = "Serve a reward model there, and name it as the server does; or choose another"
        fix += " endpoint"
        if self._endpoint == "classify" and self.tokenizer is None:
            fix += ". A server that takes no messages needs a tokenizer here"
        return UsageError(
            f"the server at {shown_url(str(client.base_url))} does not score by {self._endpoint}",
            str(getattr(error, "message", error)),
            fix,
        )


def _check_steps(endpoint: str, tokenizer: Any, step_format: str | None) -> None:
    if step_format is None:
        return
    if step_format not in STEP_FORMATS:
        raise ParameterError(
            "invalid step_format",
            f"got {step_format!r}",
            f"Allowed: {', '.join(STEP_FORMATS)}",
            param="step_format",
        )
    if endpoint == "score":
        raise ParameterError(
            "invalid endpoint", "'score' scores no steps", "Leave it out", param="endpoint"
        )
    if tokenizer is None:
        raise ParameterError(
            "the reward model's tokenizer is missing",
            "steps are found among its tokens",
            "Give it (tokenizer; on the command line --reward-tokenizer)",
            param="tokenizer",
        )


def _rows_of_steps(rows: Sequence[Any], task: RewardTask) -> list[Any]:
    """The rows at which steps end, of rows for all tokens, or for the steps alone (vLLM's STEP).

    Raises:
        ValueError: there is another number of rows.
    """
    positions = task.step_positions or []
    if len(rows) == len(task.input_tokens or ()):
        return [rows[position] for position in positions]
    if len(rows) == len(positions):
        return list(rows)
    raise ValueError(f"{len(rows)} rows")


def _label_score(row: Any) -> float:
    """The only number; of two labels the probability of the second, sent so or as logits."""
    labels = [float(row)] if isinstance(row, int | float) else [float(value) for value in row]
    if not 1 <= len(labels) <= 2 or not all(map(math.isfinite, labels)):
        raise ValueError(f"{len(labels)} labels")
    if len(labels) == 1:
        return labels[0]
    first, second = labels
    if min(labels) >= 0.0 and math.isclose(first + second, 1.0, abs_tol=1e-3):
        return second
    return 1.0 / (1.0 + math.exp(min(700.0, first - second)))


def _count(answer: Mapping[str, Any], usage: Usage) -> None:
    """Add the tokens that the server reports; none if it reports none."""
    reported = answer.get("usage") or {}
    prompt = max(0, reported.get("prompt_tokens") or 0)
    details = reported.get("prompt_tokens_details") or {}
    cached = min(prompt, max(0, details.get("cached_tokens") or 0))
    usage.prompt_tokens += prompt
    usage.prefilled += prompt - cached
    usage.cached += cached


async def _first_model(client: Any) -> str:
    """The model that the server lists first; ``UsageError`` if it lists none."""
    page = await client.models.list()
    if not page.data:
        raise UsageError("the reward server lists no model", "", "Give its name")
    return str(page.data[0].id)


def _wrong_kind(by_step: bool) -> ParameterError:
    if by_step:
        return ParameterError(
            "this reward model scores steps",
            "the task has no step_positions",
            "Use PRMController, or leave out step_format",
        )
    return ParameterError(
        "this reward model scores whole answers",
        "the task has step_positions",
        "Use NativeRewardController, or give step_format",
    )
