"""``POST /v1/score`` and ``/v1/rerank``: pairs of texts, scored by the server's reward model.

A cross-encoder's score says how relevant the second text is to the first; a reward model's how good
an answer it is, and that of a process reward model is the product of its steps' scores.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.errors import ParameterError, UsageError
from forethought.outputs import Usage
from forethought.rewards.prm_controller import PRMController
from forethought.scaffolding.base_task import RewardTask
from forethought.scaffolding.reward_controller import NativeRewardController
from forethought.server.backends.backend import Backend
from forethought.server.http import until_disconnected
from forethought.server.protocol.pooling_request import RerankRequest, ScoreRequest
from forethought.server.service import Service

Pair = tuple[str, str]
MAX_CHARACTERS = 1 << 23
"""Of all pairs of a request."""
_AT_ONCE = 64
"""Pairs that are scored together: other requests, and methods, take turns."""


async def score(service: Service, body: ScoreRequest, request: Request) -> Response:
    """Score pairs of texts, in their order."""

    async def answer(tasks: Sequence[RewardTask]) -> Response:
        scores, usage = await _scored(service, body, "score", tasks)
        data = [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(scores)
        ]
        head = {"id": f"score-{next(service.ids)}", "object": "list", "created": int(time.time())}
        return JSONResponse(
            {**head, "model": _model(service, body), "data": data, "usage": _usage(usage)}
        )

    return await _answered(service, body, request, _pairs(body), answer)


async def rerank(service: Service, body: RerankRequest, request: Request) -> Response:
    """Order documents by their relevance to a query, the most relevant first."""
    texts = body.texts

    async def answer(tasks: Sequence[RewardTask]) -> Response:
        scores, usage = await _scored(service, body, "rerank", tasks)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]} for index in order
        ]
        if body.return_documents:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        head = {"id": f"rerank-{next(service.ids)}", "model": _model(service, body)}
        return JSONResponse({**head, "results": results, "usage": _usage(usage)})

    pairs = [(body.query, text) for text in texts]
    return await _answered(service, body, request, pairs, answer)


async def _answered(
    service: Service,
    body: ScoreRequest | RerankRequest,
    request: Request,
    pairs: Sequence[Pair],
    answer: Callable[[Sequence[RewardTask]], Coroutine[Any, Any, Response]],
) -> Response:
    """What ``answer`` makes of the tasks of pairs. A repeated text is read with each of them."""
    num_characters = sum(len(first) + len(second) for first, second in pairs)
    with ExitStack() as held:
        held.enter_context(service.admitted())
        prepare = partial(_tasks, service, body, pairs, num_characters)
        tasks = await service.prepared(request, prepare, num_characters)
        return await until_disconnected(request.receive, answer(tasks))


def _model(service: Service, body: ScoreRequest | RerankRequest) -> str:
    return body.model or service.base_models[0]


def _pairs(body: ScoreRequest) -> list[Pair]:
    """Raises ParameterError if the two lists of texts are not of one length."""
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise ParameterError(
            "text_1 and text_2 make no pairs",
            f"they are {len(firsts)} and {len(seconds)} texts",
            "Give one text_1, or as many as text_2",
            param="text_2",
        )
    return list(zip(firsts, seconds, strict=True))


def _tasks(
    service: Service,
    body: ScoreRequest | RerankRequest,
    pairs: Sequence[Pair],
    num_characters: int,
) -> list[RewardTask]:
    """What the reward model is to score. Raises UsageError if there is none, ContextLengthError for
    the first text that is too long for it.
    """
    service.model_alone(body.model, "scores")
    if service.backend.reward is None:
        raise UsageError(
            "no reward model here",
            "this server has none to score with",
            "Start it with --reward-model DIR (a cross-encoder or another reward model), or with "
            "--reward-url URL",
        )
    if num_characters > MAX_CHARACTERS:
        raise ParameterError(
            "too much text",
            f"the pairs have {num_characters:,} characters in all, a repeated text included",
            f"Send at most {MAX_CHARACTERS:,} in one request",
            param="text_1" if isinstance(body, ScoreRequest) else "documents",
        )
    return [_task(service.backend, first, second) for first, second in pairs]


def _task(backend: Backend, first: str, second: str) -> RewardTask:
    task, length, reward = (
        RewardTask(input_str=first, output_str=second),
        backend.scored_length,
        backend.reward,
    )
    if length is not None:
        length.check_text(first)
        length.check_text(second)
    if isinstance(reward, PRMController):
        task.input_tokens, task.step_positions = reward.format.encode(first, second)
        if length is not None:
            length.check_tokens(len(task.input_tokens))
    return task


async def _scored(
    service: Service,
    body: ScoreRequest | RerankRequest,
    kind: str,
    tasks: Sequence[RewardTask],
) -> tuple[list[float], Usage]:
    """The scores of all tasks, and the tokens that they have taken."""
    worker = service.backend.workers[NativeRewardController.WorkerTag.REWARD.value]
    activates = service.backend.scores_are_logits and body.use_activation is not False
    async with service.pooled(service.model_alone(body.model, "scores"), kind) as usage:
        for start in range(0, len(tasks), _AT_ONCE):
            running = map(worker.run_task, tasks[start : start + _AT_ONCE])
            for result in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        usage.prompt_tokens = sum(task.usage.prompt_tokens for task in tasks)
        usage.prefilled = sum(task.usage.prefilled for task in tasks)
        usage.cached = usage.prompt_tokens - usage.prefilled
    scores = [float(task.score or 0.0) for task in tasks]
    return [_sigmoid(value) for value in scores] if activates else scores, usage


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


def _usage(usage: Usage) -> dict[str, Any]:
    cached = {"cached_tokens": usage.cached}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": cached,
    }
