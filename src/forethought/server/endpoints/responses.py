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
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.errors import ParameterError
from forethought.server.backends.backend import Conversation
from forethought.server.endpoints.message import (
    AnswerStream,
    AnswerTokens,
    answer_of,
    num_thought_tokens,
)
from forethought.server.http import (
    Caller,
    EventStream,
    HttpError,
    encode,
    http_error,
    until_disconnected,
)
from forethought.server.job import Job, Piece
from forethought.server.protocol.chat_request import (
    Function,
    RefusalPart,
    Tool,
    make_tools,
    schema_fields,
)
from forethought.server.protocol.logprobs import Span, chat_logprobs
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
from forethought.server.protocol.tool_calls import Call, Tools
from forethought.server.protocol.usage import response_usage
from forethought.server.response_journal import Saved
from forethought.server.response_store import Record
from forethought.server.service import Service

log = logging.getLogger(__name__)
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's words for the error of a response, by status."""
_ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)

_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a response is incomplete, by the finish reason of its answer."""


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
        run = _Run(service, job, record, tools, _num_alternatives(body))
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
    return JSONResponse(record.response)


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
        async with service.recovering:
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
    async with service.recovering:
        if response_id in service.store:
            return
        saved = await journal.run(journal.read, response_id, tenant)
        if saved is None:
            return
        try:
            await _take_over(service, saved, tenant)
        except BaseException:
            journal.submit(saved.file._close)
            raise


async def _take_over(service: Service, saved: Saved, tenant: str) -> None:
    record = await asyncio.to_thread(Record.restored, saved, tenant)
    with ExitStack() as held:
        if not saved.has_ended:
            held.enter_context(service.admitted())
            body = ResponseRequest.model_validate(saved.request["body"])
            messages = saved.request["messages"]
            prepare = partial(_prepared, service, body, Caller(tenant), messages, record)
            await service.backend.prepare()
            job, _, tools = await service.workers.run(prepare, tenant, len(str(messages)))
            log.info("response %s goes on after event %d", record.id, len(record.events) - 1)
        service.store.make_room(tenant)
        service.store.add(record)
        if not saved.has_ended:
            run = _Run(service, job, record, tools, _num_alternatives(body))
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
            yield b"".join(encode(event["type"], event) for event in batch)


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


# ---- the run -------------------------------------------------------------------------------------


class _Item:
    """An output item with one text while it is generated: ``reasoning``, ``message`` or
    ``refusal``, which is a message.
    """

    _NAMES: ClassVar = {"reasoning": "reasoning_text", "refusal": "refusal"}

    def __init__(self, record: Record, index: int, kind: str) -> None:
        self._record, self._index, self._kind = record, index, kind
        thinks = kind == "reasoning"
        self._name = self._NAMES.get(kind, "output_text")
        self._field = "refusal" if kind == "refusal" else "text"
        self._text, self._logprobs = "", list[dict[str, Any]]()
        self._item: dict[str, Any] = {
            "id": f"{'rs' if thinks else 'msg'}_{uuid.uuid4().hex}",
            "type": kind if thinks else "message",
            "status": "in_progress",
            "content": [],
            **({"summary": []} if thinks else {"role": "assistant"}),
        }
        added = self._add_event("response.output_item.added", location={}, item=dict(self._item))
        self._item = dict(added["item"])
        self._add_event("response.content_part.added", part=self._part())

    def push(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        self._text += text
        self._logprobs += logprobs
        extra: dict[str, Any] = {}
        if self._kind == "message":
            extra["logprobs"] = list(logprobs)
        self._add_event(f"response.{self._name}.delta", delta=text, **extra)

    def close(self, status: str = "completed") -> None:
        text: dict[str, Any] = {self._field: self._text}
        if self._kind == "message":
            text["logprobs"] = self._logprobs
        self._add_event(f"response.{self._name}.done", **text)
        self._add_event("response.content_part.done", part=self._part())
        done = {**self._item, "status": status, "content": [self._part()]}
        self._record.response["output"].append(done)
        self._add_event("response.output_item.done", location={}, item=done)

    def _part(self) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._kind == "message":
            extra = {"annotations": [], "logprobs": list(self._logprobs)}
        return {"type": self._name, self._field: self._text, **extra}

    def _add_event(
        self, kind: str, *, location: dict[str, Any] | None = None, **fields: Any
    ) -> Mapping[str, Any]:
        if location is None:
            location = {"item_id": self._item["id"], "content_index": 0}
        return self._record.add(kind, output_index=self._index, **location, **fields)


class _CallItem:
    """An output item that is a call, while it is generated."""

    def __init__(self, record: Record, index: int, call: Call) -> None:
        self._record, self._arguments, self._call = record, "", call
        self._item: dict[str, Any] = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        self._place = {"output_index": index}
        added = self._add_event("response.output_item.added", item=dict(self._item))
        self._item = dict(added["item"])

    def push(self, arguments: str) -> None:
        self._arguments += arguments
        kind, item_id = "response.function_call_arguments.delta", self._item["id"]
        self._add_event(kind, item_id=item_id, delta=arguments)

    def close(self, status: str) -> None:
        """End the item; ``incomplete`` if its arguments have turned out to be no JSON."""
        if not self._call._replace(arguments=self._arguments).is_whole:
            status = "incomplete"
        done = {**self._item, "status": status, "arguments": self._arguments}
        kind = "response.function_call_arguments.done"
        call = {"name": done["name"], "arguments": done["arguments"]}
        self._add_event(kind, item_id=done["id"], **call)
        self._record.response["output"].append(done)
        self._add_event("response.output_item.done", item=done)

    def _add_event(self, kind: str, **fields: Any) -> Mapping[str, Any]:
        return self._record.add(kind, **self._place, **fields)


class _Run:
    """Turns a job into the events of a record.

    Args:
        top: alternatives per token of the message; None: no log-probabilities are asked for.

    Attributes:
        error: why it failed; None if it did not.
    """

    def __init__(
        self, service: Service, job: Job, record: Record, tools: Tools, top: int | None
    ) -> None:
        self._service, self._job, self._record, self._tools = service, job, record, tools
        self._top = top
        self._tokens = None if top is None else AnswerTokens(service, job.ask)
        self._stream = AnswerStream(service, job.ask.prompted, tools)
        self._open: tuple[str, _Item] | None = None
        self._calls: dict[int, _CallItem] = {}  # by number
        self._num_items = 0
        self.error: Exception | None = None

    async def run(self) -> None:
        record = self._record
        self._snapshot("response.created")
        record.response["status"] = "in_progress"
        self._snapshot("response.in_progress")
        try:
            if self._job.ask.events:
                record.add("forethought", event=self._job.started())
            async with aclosing(self._service.updates(self._job)) as updates:
                async for update in updates:
                    for event in update.events:
                        record.add("forethought", event=event)
                    for piece in update.pieces:
                        self._push_piece(piece)
            self._finish()
        except asyncio.CancelledError:
            self._fail("cancelled", "response.incomplete", None)
            raise
        except Exception as error:
            self.error = error
            failure = http_error(error)
            if failure.status == 500:
                log.exception("response %s failed", record.id)
            code = _ERROR_CODES.get(failure.status, "server_error")
            shown = {"code": code, "message": failure.message, "param": failure.param}
            self._fail("failed", "response.failed", shown)
        finally:
            record.finish()

    def _push_piece(self, piece: Piece) -> None:
        reasoning, content = self._stream.push(piece.text, piece.thought)
        self._stream.push_calls(piece.calls)
        streams = self._tokens is not None and self._job.streams_logprobs
        _, tokens = self._tokens.push(piece, self._stream) if self._tokens and streams else ([], [])
        self._push(reasoning, content, tokens)
        self._push_calls()

    def _push(self, reasoning: str, content: str, tokens: Sequence[Span] = ()) -> None:
        if reasoning:
            self._item("reasoning").push(reasoning)
        if content or tokens:
            self._item("message").push(content, chat_logprobs(tokens, self._top or 0))

    def _item(self, kind: str) -> _Item:
        """The open item of this kind; another one is closed first."""
        if self._open is not None and self._open[0] == kind:
            return self._open[1]
        self._close()
        item = _Item(self._record, self._num_items, kind)
        self._num_items += 1
        self._open = kind, item
        return item

    def _close(self, status: str = "completed") -> None:
        if self._open is not None:
            self._open[1].close(status)
        self._open = None

    def _finish(self) -> None:
        outcome, record = self._job.ended(), self._record
        output = outcome.outputs[0]
        self._push(*self._stream.push_rest(self._job.rest(0, output.text or ""), output))
        answer = answer_of(output, self._service, self._job.ask.prompted, self._tools)
        _, tokens = self._tokens.rest(answer, output) if self._tokens else ([], [])
        self._push(*self._stream.finish(answer), tokens)
        if answer.refusal:
            self._item("refusal").push(answer.refusal)
        reason = _CUT.get(answer.finish_reason)
        if not self._num_items and not answer.calls:
            self._item("message")
        status = "incomplete" if reason else "completed"
        self._push_calls()
        self._close(status)
        self._close_calls(status)
        num_thought = num_thought_tokens(self._service, self._job, [answer])
        usage = response_usage(outcome.usage, outcome.metrics, num_thought, outcome.spent_budget)
        record.response["usage"] = usage
        if self._job.ask.events:
            record.add("forethought", event=self._job.finished(outcome))
        record.response["status"] = "incomplete" if reason else "completed"
        record.response["completed_at"] = None if reason else int(time.time())
        if reason:
            record.response["incomplete_details"] = {"reason": reason}
        self._snapshot("response.incomplete" if reason else "response.completed")

    def _push_calls(self) -> None:
        """Send what is new of calls."""
        for piece in self._stream.take_calls():
            if piece.opening is not None:
                self._close()
                item = _CallItem(self._record, self._num_items, piece.opening)
                self._calls[piece.number] = item
                self._num_items += 1
            if piece.arguments:
                self._calls[piece.number].push(piece.arguments)

    def _close_calls(self, status: str) -> None:
        for item in self._calls.values():
            item.close(status)
        self._calls.clear()

    def _fail(self, status: str, kind: str, error: dict[str, Any] | None) -> None:
        replay, self._record.replay = self._record.replay, None
        if replay is None or replay.is_over:  # else its items are not as clients have them
            self._close("incomplete")
            self._close_calls("incomplete")
        self._record.response |= {"status": status, "error": error}
        self._snapshot(kind)

    def _snapshot(self, kind: str) -> None:
        response = {**self._record.response, "output": list(self._record.response["output"])}
        self._record.add(kind, response=response)
