"""``ChatWithMCPController``: a chat in which the model calls tools until it answers.

Paper: Yao et al., ReAct: Synergizing Reasoning and Acting in Language Models, 2022.

::

    controller = ChatWithMCPController(NativeGenerationController()) workers = {"generation":
    EngineWorker(llm), "tool_call": MCPWorker(["http://127.0.0.1:8000/mcp"])} with
    ScaffoldingLlm(controller, workers) as llm:
        llm.generate("What is 127 * 45?").output.text

Each round generates a message of the model, runs the tools that it calls, all at once, and appends
their results. An error in a call is such a result: the model reads it and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from enum import Enum
from typing import Any

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError, UsageError
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import MCPCallTask, MCPToolListTask, TaskStatus
from forethought.scaffolding.controller import Controller, refuse_arguments
from forethought.scaffolding.messages import (
    AssistantMessage,
    RoleMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from forethought.scaffolding.parallel import ParallelProcess, Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    ANY_TEXT,
    PositiveInt,
    required,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import ChatTask, GenerationTask

_SHOWN = 200
"""Characters of arguments and results that stages show."""


@with_settings
class ChatWithMCPController(Controller):
    """Generates, runs the tools that the model calls, and goes on until it calls none.

    The output's ``meta["tools"]`` counts ``rounds``, ``calls`` and ``errors``.
    """

    class WorkerTag(Enum):
        """The worker that runs the tools."""

        TOOLCALL = "tool_call"

    generation_controller: Controller = required(
        "Generates the model's messages; its worker must take `ChatTask`."
    )
    system_prompts: Sequence[RoleMessage] | None = setting(None, "Messages in front of the user's.")
    max_iterations: PositiveInt = setting(
        3, "Rounds of tool calls. After them the answer is asked for without tools."
    )
    tools: Sequence[Any] | None = setting(
        None,
        "Descriptions of the tools that the model may call; None: all those of the worker, as "
        "far as it can list them.",
    )
    _: KW_ONLY
    max_calls: PositiveInt | None = setting(
        None, "Calls that are run in one round; further ones are refused. None: all are."
    )

    def __post_init__(self) -> None:
        self._system_prompts = _messages(self.system_prompts)

    def generate(
        self,
        prompt: Any,
        *,
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        question: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Answer a prompt, which is text or the messages of a chat.

        Args:
            prompt: the user's message, or a chat's messages so far.
            sampling_params: sampling fields set by the caller; they win over the controller's.
            question: what the user asks, for verifiers; the last user message if None.
            **kwargs: refused by ``process``.

        Raises:
            ParameterError: token ids, an unknown sampling parameter, or a question that is no text.
        """
        chat = self._chat(prompt)
        chat.question = None if question is None else validated("question", question, ANY_TEXT)
        sampling.choose(chat, sampling.checked("sampling_params", sampling_params))
        yield from self.process([chat], **kwargs)
        return chat.create_scaffolding_output()

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Answer all chats at once; a plain task's prompt is the user's message, which has to be
        text.
        """
        refuse_arguments(self, kwargs)
        if len(tasks) > 1:
            clones = [self.clone() for _ in tasks]
            yield ParallelProcess(clones, [[task] for task in tasks], [{} for _ in tasks])
            return
        for task in tasks:
            chat = task if isinstance(task, ChatTask) else self._chat_of(task)
            yield from self._answer(chat)
            if chat is not task:
                task.result, task.samples = chat.result, chat.samples
                task.status, task.error = chat.status, chat.error

    def _answer(self, chat: ChatTask) -> Process:
        counts = {"rounds": 0, "calls": 0, "errors": 0}
        if chat.tools is None:
            chat.tools = yield from self._tools()
        tools, has_ended = chat.tools, False
        while not has_ended:
            is_last = counts["rounds"] == self.max_iterations
            chat.tools = None if is_last else tools
            yield from self.generation_controller.process([chat])
            message = chat.messages[-1]
            has_ended = is_last or chat.error is not None or not _calls(message)
            if not has_ended:
                counts["rounds"] += 1
                yield from self._run_calls(chat, message, counts)
        chat.tools = tools
        chat.customized_result_fields = {**chat.customized_result_fields, "tools": counts}

    def _tools(self) -> Any:
        if self.tools is not None:
            return self.tools
        listing = MCPToolListTask(self.WorkerTag.TOOLCALL, on_failure="drop")
        yield [listing]
        if isinstance(listing.error, UsageError):
            raise listing.error
        if listing.error is not None and listing.status is not TaskStatus.WORKER_NOT_SUPPORTED:
            raise listing.error
        return listing.tools

    def _run_calls(self, chat: ChatTask, message: RoleMessage, counts: dict[str, int]) -> Any:
        """Run the calls of ``message``, and append the results."""
        assert isinstance(message, AssistantMessage), "a message with calls"
        if message.unreadable_call is not None:
            counts["errors"] += 1
            chat.add_message(UserMessage(_unreadable(message.unreadable_call)))
            yield Stage("called", "the call cannot be read")
            return
        calls = message.tool_calls or []
        tasks = [self._task(call) for call in calls[: self.max_calls]]
        yield tasks
        counts["calls"] += len(tasks)
        for task in tasks:
            counts["errors"] += _is_failed(task)
            chat.add_message(_result(task))
            yield Stage("called", task.tool_name or "", fields=_shown(task))
        for call in calls[len(tasks) :]:
            why = f"Error: only {self.max_calls} calls at once are allowed; call it again."
            chat.add_message(ToolMessage(why, call.id))

    def _task(self, call: ToolCall) -> MCPCallTask:
        name, arguments = call.function.name, call.function.arguments
        task = MCPCallTask.create_mcptask(call.id, name, arguments, self.WorkerTag.TOOLCALL)
        task.on_failure = "drop"
        return task

    def _chat(self, prompt: Any) -> ChatTask:
        if isinstance(prompt, str):
            return ChatTask.create_from_prompt(prompt, self._system_prompts)
        is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if is_chat and prompt and not isinstance(prompt[0], int):
            return ChatTask.create_from_messages([*self._system_prompts, *_messages(prompt)])
        raise ParameterError(
            "a chat needs text",
            f"got {str(prompt)[:60]!r}",
            "Give text, or messages such as UserMessage('Hello')",
        )

    def _chat_of(self, task: GenerationTask) -> ChatTask:
        chat = self._chat(task.input_str)
        sampling.carry(task, chat)
        for name in ("streaming_output_flag", "on_failure", "priority", "question"):
            setattr(chat, name, getattr(task, name))
        return chat


def _messages(values: Sequence[Any] | None) -> list[RoleMessage]:
    """Messages, of which some may be dictionaries; ``ParameterError`` for anything else."""
    messages = []
    for message in values or ():
        if isinstance(message, Mapping) and "role" in message:
            message = RoleMessage.from_dict(message)
        if not isinstance(message, RoleMessage):
            raise ParameterError(
                "invalid message", f"got {message!r}", "Give messages such as SystemMessage('...')"
            )
        messages.append(message)
    return messages


def _calls(message: RoleMessage) -> bool:
    """Whether the model calls tools, or has tried to."""
    if not isinstance(message, AssistantMessage):
        return False
    return bool(message.tool_calls) or message.unreadable_call is not None


def _is_failed(task: MCPCallTask) -> bool:
    return task.is_error or task.error is not None


def _result(task: MCPCallTask) -> ToolMessage:
    """The message with the result; ``UsageError`` if no call was possible, as without a worker."""
    text = task.result_str
    if isinstance(task.error, UsageError) or task.status is TaskStatus.WORKER_NOT_SUPPORTED:
        raise task.error or UsageError("the worker runs no tools")
    if task.error is not None:
        text = f"Error: {getattr(task.error, 'why', '') or task.error}"
    return ToolMessage(
        "" if text is None else text,
        task.tool_call_id,
        trace_stdout=task.result_stdout,
        trace_stderr=task.result_stderr,
    )


def _shown(task: MCPCallTask) -> dict[str, Any]:
    result = str(task.error) if task.error is not None else str(task.result_str)
    return {
        "args": str(task.args)[:_SHOWN],
        "result": result[:_SHOWN],
        "is_error": _is_failed(task),
    }


def _unreadable(why: str) -> str:
    return (
        f"Your call of a tool cannot be read: {why} Write it again, in the form that is asked for."
    )
