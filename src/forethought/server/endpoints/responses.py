"""``/v1/responses``: answers that are kept, may run in the background, and can be streamed again.

A task per response turns the updates of its job into numbered events of a ``Record``. Clients read
the record, not the job: a stream can be resumed from any event number, and a response in the
background from any connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.errors import ParameterError
from forethought.server.backends.backend import Conversation
from forethought.server.endpoints.response_run import ResponseRun
from forethought.server.http import (
    Caller,
    EventStream,
    HttpError,
    encode,
    until_disconnected,
)
from forethought.server.job import Job
from forethought.server.json_pieces import LARGE, write_pieces
from forethought.server.protocol.chat_request import (
    Function,
    RefusalPart,
    Tool,
    make_tools,
    schema_fields,
)
from forethought.server.protocol.responses_request import (
    FunctionCallItem,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    InputText,
    ItemReference,
    ReasoningItem,
    ReasoningOptions,
    ResponseRequest,
    TextOptions,
)
from forethought.server.protocol.sampling import wants_logprobs
from forethought.server.protocol.tool_calls import Tools
from forethought.server.response_journal import Saved
from forethought.server.response_store import Record
from forethought.server.service import Service

log = logging.getLogger(__name__)
_ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)


async def create_response(service: Service, body: ResponseRequest, request: Request) -> Response:
    """Answer, or begin to in the background. Raises what ``http_error`` makes a response of."""
    stored, caller = body.store is not False, request.state.caller
    if body.background and not stored:
        why, fix = "store is false", "Leave store out"
        raise ParameterError("background needs store", why, fix, param="background")
    if body.previous_response_id is not None:
        await find(service, body.previous_response_id, caller.tenant, "previous_response_id")
    messages = conversation_of(service, body, caller.tenant)
    num_bytes = sum(len(str(message.get("content") or "")) for message in messages)
    is_journaled = stored and service.journal is not None and not body.events
    if is_journaled and body.seed is None:
        body = body.model_copy(update={"seed": secrets.randbits(63)})
    with ExitStack() as held:
        held.enter_context(service.admitted())
        prepare = partial(_prepared, service, body, caller, messages)
        job, record, tools = await service.prepared(request, prepare, num_bytes)
        if stored:
            service.store.make_room(caller.tenant)
            service.store.add(record)
        if is_journaled:
            await _journal(service, body, record)
        run = ResponseRun(service, job, record, tools, _num_alternatives(body))
        record.task = service.spawn(run.run(), held.pop_all())
    if body.stream:
        on_disconnect = None if body.background else record.task.cancel
        return EventStream(_encoded(record, 0), on_disconnect=on_disconnect)
    if body.background:
        return JSONResponse(record.response)
    try:
        await until_disconnected(request.receive, record.end())
    finally:
        record.task.cancel()
    if run.error is not None:
        raise run.error
    return await shown(record)


async def shown(record: Record) -> Response:
    """A response as it is now; a large one is written beside the event loop."""
    if record.finished is None or record.num_bytes < LARGE:
        return JSONResponse(record.response)
    content = await asyncio.to_thread(write_pieces, record.response)
    return Response(content, media_type="application/json")


def _num_alternatives(body: ResponseRequest) -> int | None:
    """Per token; None: no log-probabilities are asked for."""
    return (body.top_logprobs or 0) if wants_logprobs(body) else None


async def _journal(service: Service, body: ResponseRequest, record: Record) -> None:
    """Begin the file of a new response; a warning is logged where it cannot be written."""
    assert service.journal is not None, "the response is journaled"
    request = {
        "body": body.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "messages": record.messages,
        "response": {**record.response},
    }
    try:
        begin = service.journal.begin
        record.journal = await service.journal.run(begin, record.id, record.tenant, request)
    except OSError as error:
        log.warning("a response cannot be kept in a file: %s", error)
    except BaseException:
        record.finish()  # nothing runs for it
        raise


async def find(
    service: Service, response_id: str, tenant: str, field: str = "response_id"
) -> Record:
    """A response, if need be from its file. One that says that it has ended is written until its
    end. Raises as ``recover``, and HttpError about ``field``: there is none.
    """
    await recover(service, response_id, tenant)
    record = service.store.find(response_id, tenant, field)
    await record.settle()
    return record


async def delete(service: Service, response_id: str, tenant: str) -> None:
    """Forget a response, and end it if it goes on here; one of which there is only a file is not
    generated for that.

    Raises HttpError: there is none, or another server generates it.
    """
    journal, is_removed = service.journal, False
    if journal is not None:
        async with service.recovering(response_id):
            if response_id not in service.store:
                is_removed = await journal.run(journal.remove, response_id, tenant)
    if not is_removed:
        await service.store.delete(response_id, tenant)


async def recover(service: Service, response_id: str, tenant: str) -> None:
    """Take over a response from its file, if it is not here and there is one: one that has not
    ended goes on, as one in the background.

    Raises HttpError, Overloaded or UsageError: it cannot be taken over, or not now.
    """
    journal = service.journal
    if journal is None or response_id in service.store:
        return
    async with service.recovering(response_id):
        if response_id in service.store:
            return
        saved = await journal.run(journal.read, response_id, tenant)
        if saved is None:
            return
        try:
            await _take_over(service, saved, tenant)
        except BaseException:
            journal.submit(saved.file.close)
            raise


async def _take_over(service: Service, saved: Saved, tenant: str) -> None:
    record = await asyncio.to_thread(Record.restored, saved, tenant)
    with ExitStack() as held:
        if not saved.has_ended:
            held.enter_context(service.admitted())
            body = await asyncio.to_thread(ResponseRequest.model_validate, saved.request["body"])
            messages = saved.request["messages"]
            prepare = partial(_prepared, service, body, Caller(tenant), messages, record)
            await service.backend.prepare()
            job, _, tools = await service.workers.run(prepare, tenant, record.num_bytes)
            log.info("response %s goes on after event %d", record.id, len(record.events) - 1)
        service.store.make_room(tenant)
        service.store.add(record)
        if not saved.has_ended:
            run = ResponseRun(service, job, record, tools, _num_alternatives(body))
            record.task = service.spawn(run.run(), held.pop_all())


def _prepared(
    service: Service,
    body: ResponseRequest,
    caller: Caller,
    messages: Sequence[dict[str, Any]],
    record: Record | None = None,
) -> tuple[Job, Record, Tools]:
    """The job of a body, which answers ``messages``, and its record; a new one, unless the job
    takes over that of another server.
    """
    tools = service.tools(_tools(body))
    sampling = service.sampling_of(body, tools)
    opening = [{"role": "system", "content": body.instructions}] if body.instructions else []
    conversation = Conversation(
        [*opening, *messages],
        tools,
        has_shape=sampling.has_shape,
        thinks_first=sampling.thinks_first,
        schema_fields=schema_fields(body.text.format if body.text else None),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        prompt_end="last" if body.continue_final_message else "answer",
    )
    prompted = service.backend.open(conversation)
    ask = service.ask("resp_", body, prompted, sampling, num_choices=1, caller=caller)
    if len(ask.composition.choices) > 1:
        raise ParameterError(
            "a response has one answer",
            f"{ask.composition.spec!r} gives several",
            "Use chats",
            param="method",
        )
    if record is not None:
        return service.start(replace(ask, id=record.id)), record, tools
    response = _response(body, ask.id, ask.model, body.store is not False)
    return service.start(ask), Record(response, caller.tenant, messages), tools


def resumed(record: Record, after: int | None) -> Response:
    """The events of a response that follow number ``after``."""
    return EventStream(_encoded(record, 0 if after is None else after + 1))


async def _encoded(record: Record, first: int) -> AsyncGenerator[bytes, None]:
    async with aclosing(record.follow(first)) as batches:
        async for batch in batches:
            if record.num_bytes < LARGE or all(e["type"].endswith(".delta") for e in batch):
                yield b"".join(encode(event["type"], event) for event in batch)
            else:
                yield await asyncio.to_thread(_encoded_in_pieces, batch)


def _encoded_in_pieces(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Events of which some have all of a large text, with its log-probabilities."""
    parts = []
    for event in events:
        parts += [f"event: {event['type']}\ndata: ".encode(), write_pieces(event), b"\n\n"]
    return b"".join(parts)


# ---- the input -----------------------------------------------------------------------------------


def conversation_of(service: Service, body: ResponseRequest, tenant: str) -> list[dict[str, Any]]:
    """The messages of a body, after those of its previous response.

    Raises:
        HttpError: there is no such response.
        ParameterError: that response has not finished, or there is nothing to answer.
    """
    messages: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        field = "previous_response_id"
        record = service.store.find(body.previous_response_id, tenant, field)
        if record.finished is None:
            raise ParameterError(
                "the previous response has not finished",
                "",
                "Wait for its end",
                param=field,
            )
        messages += [dict(message) for message in record.messages]
        messages += _output_messages(record.response["output"])
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in _resolved(service, body.input, tenant):
        _append(messages, item)
    if not messages:
        raise ParameterError(
            "empty input", "there is nothing to answer", "Give some text", param="input"
        )
    return messages


def _resolved(service: Service, items: Sequence[Any], tenant: str) -> Iterator[Any]:
    """The items, with those that the tenant's references name in their place."""
    stored_items: dict[str, dict[str, Any]] | None = None
    for index, item in enumerate(items):
        if not isinstance(item, ItemReference):
            yield item
            continue
        stored_items = service.store.items(tenant) if stored_items is None else stored_items
        if item.id not in stored_items:
            message, param = f"there is no item {item.id[:80]!r}", f"input.{index}.id"
            raise HttpError(404, message, param=param, code="item_not_found")
        yield _ITEM.validate_python(stored_items[item.id])


def _append(messages: list[dict[str, Any]], item: Any) -> None:
    if isinstance(item, InputMessage):
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": _plain(item.content)})
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), call]
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif isinstance(item, FunctionCallOutput):
        content = _plain(item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    else:
        assert isinstance(item, ReasoningItem), (
            "there is no other kind; thoughts are not shown again"
        )


def _plain(content: str | Sequence[InputText | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _output_messages(output: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The output items of a response as messages."""
    text = "".join(
        part.get("text") or part.get("refusal", "")
        for item in output
        if item["type"] == "message"
        for part in item["content"]
    )
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in output
        if item["type"] == "function_call"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return [{**message, "tool_calls": calls} if calls else message]


def _tools(body: ResponseRequest) -> Tools:
    choice = body.tool_choice or ("auto" if body.tools else "none")
    named = not isinstance(choice, str)
    tools = [
        Tool(
            type="function",
            function=Function(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            ),
        )
        for tool in body.tools or []
    ]
    name = choice if isinstance(choice, str) else choice.name
    return make_tools(tools, name, named, body.parallel_tool_calls is not False)


def _response(body: ResponseRequest, name: str, model: str, stored: bool) -> dict[str, Any]:
    """A response that has not begun, with what was asked for."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    choice, reasoning = body.tool_choice or "auto", body.reasoning or ReasoningOptions()
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": body.temperature,
        "text": _text(body),
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [{"parameters": None, "strict": None, **tool} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _text(body: ResponseRequest) -> dict[str, Any]:
    options = body.text or TextOptions()
    if options.format is None:
        shape: dict[str, Any] = {"type": "text"}
    else:
        shape = options.format.model_dump(by_alias=True, exclude_none=True)
    if shape["type"] == "json_schema":
        shape = {"name": "response", **shape}
    return {"format": shape, "verbosity": options.verbosity or "medium"}
