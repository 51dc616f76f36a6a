"""``POST /v1/embeddings``: pooled hidden states of the served model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from forethought.errors import ParameterError, UsageError
from forethought.server.http import until_disconnected
from forethought.server.protocol.pooling_request import MAX_INPUTS, EmbeddingRequest
from forethought.server.service import Service

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM

MAX_TOKENS = 300_000
"""Of all inputs of a request, as OpenAI has it."""
MAX_NUMBERS = 1 << 22
"""Of all embeddings of a request."""


async def embeddings(service: Service, body: EmbeddingRequest, request: Request) -> Response:
    """Embed one input or several. Raises what ``http_error`` makes a response of."""
    with ExitStack() as held:
        held.enter_context(service.admitted())
        prepare = partial(_rows, service, _engine(service), body)
        rows = await service.prepared(request, prepare)
        answer = _answer(service, body, rows, request.state.caller.tenant)
        return await until_disconnected(request.receive, answer)


def _engine(service: Service) -> AsyncLLM:
    llm = service.backend.llm
    if llm is None or not llm.embedding_size:
        why = "no model runs here" if llm is None else "replicas run the model"
        fix = "Start a server with a model on this machine, and without --replicas"
        raise UsageError("this server has no embeddings", why, fix)
    return llm


def _rows(service: Service, llm: AsyncLLM, body: EmbeddingRequest) -> list[list[int]]:
    """The inputs in tokens, checked."""
    service.model_alone(body.model, "embeddings")
    inputs = _inputs(body)
    size = min(body.dimensions or llm.embedding_size, llm.embedding_size)
    most = min(MAX_INPUTS, MAX_NUMBERS // size)
    if len(inputs) > most:
        raise _too_many(f"{len(inputs):,} inputs", f"Send at most {most:,} in one request")
    rows, num_tokens = list[list[int]](), 0
    for index, text_or_ids in enumerate(inputs):
        try:
            rows.append(llm.check_embedded(text_or_ids))
        except ParameterError as error:
            error.param = f"input.{index}" if isinstance(body.input, list) else "input"
            raise
        num_tokens += len(rows[-1])
        if num_tokens > MAX_TOKENS:
            fix = f"Send at most {MAX_TOKENS:,} tokens in one request"
            raise _too_many(f"more than {MAX_TOKENS:,} tokens", fix)
    return rows


def _inputs(body: EmbeddingRequest) -> list[Any]:
    """The inputs of a body, each as text or token ids; raises ParameterError if there is none."""
    value: Any = body.input
    inputs = value if isinstance(value, list) and value and not isinstance(value[0], int) else None
    if value == []:
        raise ParameterError("empty input", "there is nothing to embed", "", param="input")
    return [value] if inputs is None else list(inputs)


def _too_many(what: str, fix: str) -> ParameterError:
    return ParameterError("too much input", what, fix, param="input")


async def _answer(
    service: Service, body: EmbeddingRequest, rows: Sequence[list[int]], tenant: str
) -> Response:
    model = service.model_alone(body.model, "embeddings")
    adapter = service.adapters[model][1] if model in service.adapters else None
    async with service.pooled(model, "embeddings") as usage:
        llm = _engine(service)
        vectors = await llm.embed(rows, dimensions=body.dimensions, adapter=adapter)
        usage.prompt_tokens = usage.prefilled = sum(map(len, rows))
        write = partial(_written, vectors, body, body.model or model, usage.prompt_tokens)
        content = await service.workers.run(write, tenant, vectors.nbytes)
    return Response(content, media_type="application/json")


def _written(vectors: Any, body: EmbeddingRequest, model: str, num_tokens: int) -> bytes:
    """The body of the response to float32 vectors ``[R, D]``. They are written one by one, so
    that other threads run in between.
    """
    shows_numbers = body.encoding_format != "base64"
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    head = json.dumps({"object": "list", "model": model, "usage": usage})
    rows = ",".join(_entries(vectors, shows_numbers))
    return f'{head[:-1]}, "data": [{rows}]}}'.encode()


def _entries(vectors: Any, shows_numbers: bool) -> Iterator[str]:
    for index, vector in enumerate(vectors):
        little_endian = vector.astype("<f4")
        encoded = base64.b64encode(little_endian.tobytes()).decode()
        embedding = vector.tolist() if shows_numbers else encoded
        yield json.dumps({"object": "embedding", "index": index, "embedding": embedding})
