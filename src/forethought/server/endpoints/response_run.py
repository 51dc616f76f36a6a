"""The events of a response, made from the updates of its job: items, their texts and calls."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from forethought.server.endpoints.message import (
    AnswerStream,
    AnswerTokens,
    answer_of,
    num_thought_tokens,
)
from forethought.server.http import (
    http_error,
)
from forethought.server.job import Job, Piece
from forethought.server.protocol.logprobs import Span, chat_logprobs
from forethought.server.protocol.tool_calls import Call, Tools
from forethought.server.protocol.usage import response_usage
from forethought.server.response_store import Record
from forethought.server.service import Service

log = logging.getLogger(__name__)
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's words for the error of a response, by status."""
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a response is incomplete, by the finish reason of its answer."""


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


class ResponseRun:
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
        """Add the events until the last one, and finish the record; an error of the job is one of
        them.
        """
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
