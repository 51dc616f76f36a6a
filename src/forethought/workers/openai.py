"""``OpenaiWorker``: executes tasks as requests to an OpenAI-compatible server.

Continuations and forks are sent as text; only the server's prefix cache makes them cheap. Time
limits and retries are those of the client.

::

    task --> OneAnswer (one request, or one per part of a stream) --> chunks
    task <-- ChunkReader (text, tokens, log-probabilities, usage) <-- chunks
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import LLAMA_SAMPLERS
from forethought.errors import ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import TaskStatus
from forethought.scaffolding.execution_scope import ExecutionScope, current_scope
from forethought.scaffolding.messages import AssistantMessage
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.settings import OPTIONAL_BOOL, validated
from forethought.scaffolding.task import ChatTask, GenerationTask, StreamGenerationTask
from forethought.scaffolding.thinking import ThinkingProfile
from forethought.workers.clients import ClientWorker
from forethought.workers.concurrency import AdaptiveConcurrency
from forethought.workers.openai_answer import ChunkReader, StreamedChoice
from forethought.workers.openai_requests import (
    OneAnswer,
    PromptLengths,
    ThoughtThenAnswer,
    has_open_thought,
)

_BODY = (
    "top_k",
    "min_p",
    *LLAMA_SAMPLERS,
    "min_tokens",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
EXTENSIONS = (*_BODY, "guided_decoding")
"""Fields outside OpenAI's API that some servers accept in the body. Chats always take
``guided_decoding``, as ``response_format``; the completions of some servers do too."""

_CHAT = (
    "frequency_penalty",
    "logit_bias",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "user",
)
_COMPLETION = (*_CHAT, "best_of", "echo", "suffix")


class OpenaiWorker(ClientWorker):
    """Executes generation, stream and chat tasks on a server.

    Token ids are not known: ``output_tokens`` stays None, and the server counts the tokens.
    Confidences are computed from the top log-probabilities of the server (OpenAI's own API returns
    at most 20), without entropy and self-certainty. If the server sends no stop reason and the task
    has a single stop string, an answer with the finish reason ``stop`` counts as ended at that
    string.

    Args:
        async_client: an ``openai.AsyncOpenAI`` (or a compatible object), or a function that makes
            one. The worker uses a copy of it on each event loop, and closes the copies; a client
            with an ``http_client`` of its own serves one event loop only.
        model: name of the model on the server.
        kv_cache_hint_enabled: must be False: no task asks for hints about the server's KV cache.
        extra_body: further fields of every request.
        extensions: those of ``EXTENSIONS`` that the server takes; tasks that set one of the others
            are refused.
        thinking_field: the server's own field for ``thinking_budget``, such as vLLM's
            ``thinking_token_budget``. None: completions whose prompt opens a thought are generated
            in two requests, up to the cap or the closing marker and from there; other tasks with a
            budget are refused.
        thinking_markers: what opens and closes a thought of the model.
        thinks: whether the model thinks. None: it is not known.
        concurrency: the limit of requests in flight, and the retries of refused ones; the client
            should have ``max_retries=0`` then. None: no limit, and the client's retries.

    Attributes:
        num_left: returns the number of context tokens after the prompt of a completion (None:
            unknown), which limits ``max_tokens``. Without it, and without ``max_tokens``, the
            server chooses the length: 16 tokens in OpenAI's API.
        prompt_lengths: counts the prompts of answers for which the server has sent no usage.

    Raises:
        ParameterError: an extension that does not exist, or hints.
    """

    default_extensions: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        async_client: Any,
        model: str,
        kv_cache_hint_enabled: bool = False,
        extra_body: Mapping[str, Any] | None = None,
        *,
        extensions: Collection[str] | None = None,
        thinking_field: str | None = None,
        thinking_markers: tuple[str, str] = ("<think>", "</think>"),
        thinks: bool | None = None,
        concurrency: AdaptiveConcurrency | None = None,
    ) -> None:
        if kv_cache_hint_enabled is not False:
            raise ParameterError(
                "invalid kv_cache_hint_enabled",
                f"got {kv_cache_hint_enabled!r}, but no task gives hints about the KV cache",
                "Leave it out",
            )
        super().__init__(async_client)
        self.model = model
        self.extra_body = dict(extra_body or {})
        self.extensions = set(self.default_extensions if extensions is None else extensions)
        unknown = self.extensions - set(EXTENSIONS)
        if unknown:
            raise ParameterError.unknown("OpenaiWorker(extensions=...)", unknown, EXTENSIONS)
        self.thinking_field, self.thinking_markers = thinking_field, thinking_markers
        self.thinks = validated("thinks", thinks, OPTIONAL_BOOL)
        self.concurrency = concurrency
        self._readers: dict[str, list[ChunkReader]] = {}
        self.prompt_lengths = PromptLengths()
        self.num_left: Callable[[str | Sequence[int]], int | None] | None = None

    def thinking(self, task: GenerationTask) -> ThinkingProfile | None:
        """By the constructor's arguments, or the server's answers, and the prompt's text."""
        if self.thinks is None:
            return None
        markers = self.thinking_markers if self.thinks else None
        return ThinkingProfile.of_text(task.input_str or "", markers)

    # ---- tasks --------------------------------------------------------------------------------

    async def generation_handler(self, task: GenerationTask) -> TaskStatus:
        """Generate all samples."""
        reader = self._completion(task)
        await _read(task, reader)
        return TaskStatus.SUCCESS

    async def stream_handler(self, task: StreamGenerationTask) -> TaskStatus:
        """Return with ``streaming_step`` more tokens than the last time.

        A server reports the end only after the last token, so the step waits for the next chunk.
        """
        step = task.checked_step
        reader = task.request_handle if task.under_way else None
        if not isinstance(reader, ChunkReader):
            sampling.refuse(task, ["n"], "a stream", "Use a GenerationTask, or copies")
            reader = task.request_handle = self._completion(task)
            self._keep(reader)
            reader.begin()
        first, goal = reader.choices[0], reader.shown + step
        try:
            if task.cancel_flag:
                await reader.cancel()
            elif step == 0:
                reader.want(reader.available + 1)
                await reader.reach(0)
                _show(task, reader, first.count)
            else:
                await self._follow(task, reader, goal)
        except BaseException:
            await reader.cancel()
            raise
        task.end_flag = task.cancel_flag or (reader.ended and reader.shown == first.count)
        if not task.end_flag or task.cancel_flag:
            first = first.begin_of(reader.shown)
            first.finish_reason = "abort" if task.cancel_flag else None
        _fill(task, reader, {0: first})
        return TaskStatus.SUCCESS

    async def chat_handler(self, task: ChatTask) -> TaskStatus:
        """Generate the assistant's next message."""
        sampling.refuse(task, ["n"], "a chat", "Use copies of the task")
        reader = self._chat(task)
        try:
            choice = (await _read(task, reader))[0]
        except asyncio.CancelledError:
            if task.result is not None:  # the budget has ended it
                task.add_message(_message(reader.choices[0].within_budget()))
            raise
        task.end_flag = True
        task.add_message(_message(choice))
        if task.enable_token_counting:
            task.prompt_tokens_num += task.usage_prompt_tokens or 0
            task.completion_tokens_num += task.usage_completion_tokens or 0
            task.reasoning_tokens_num += reader.num_reasoning
        return TaskStatus.SUCCESS

    task_handlers = {  # noqa: RUF012
        GenerationTask: generation_handler,
        StreamGenerationTask: stream_handler,
        ChatTask: chat_handler,
    }

    async def _follow(self, task: StreamGenerationTask, reader: ChunkReader, count: int) -> None:
        """Show the task ``count`` tokens, once it is known whether more follow."""
        while not reader.ended and reader.available < count:
            await reader.reach(reader.shown + 1 if task.streaming_output_flag else count)
            _show(task, reader, count)
        await reader.settle(count)
        _show(task, reader, count)

    # ---- requests -----------------------------------------------------------------------------

    def _completion(self, task: GenerationTask) -> ChunkReader:
        if task.skip_detokenizer or (task.skip_tokenizer and task.input_tokens is None):
            raise ParameterError(
                "OpenaiWorker cannot leave out the tokenizer",
                "skip_detokenizer is set, or skip_tokenizer without input_tokens",
                "The server turns tokens into text; give text, or input_tokens",
            )
        prompt = task.prompt
        if not prompt:
            raise ParameterError(
                "the task has no prompt",
                "input_str and input_tokens are empty",
                "Set one of them; a fork needs a parent with a text prompt",
            )
        fields = self._fields(task, _COMPLETION)
        if (num_logprobs := _num_logprobs(task)) is not None:
            if task.echo:
                option = "confidence" if task.num_logprobs is None else "num_logprobs"
                raise ParameterError(
                    f"echo and {option} exclude each other",
                    "the first token of a prompt has no log-probability",
                    "Leave one of them out",
                )
            fields["logprobs"] = num_logprobs
        if "guided_decoding" in self.extensions:
            fields["extra_body"] |= _response_format(task)
        else:
            why = "Use a ChatTask; or, if the server takes response_format, name it an extension"
            sampling.refuse(task, ["guided_decoding"], "OpenaiWorker, in completions,", why)
        if self.num_left is not None and (num_left := self.num_left(prompt)) is not None:
            fields["max_tokens"] = min(fields.get("max_tokens", num_left), num_left)
        create = self._clients.of_this_loop().completions.create
        return self._reader(task, create, {"prompt": prompt, **fields})

    def _chat(self, task: ChatTask) -> ChunkReader:
        sampling.refuse(
            task, ["best_of", "echo", "suffix"], "a chat", "Leave it out, or use a GenerationTask"
        )
        if self.thinking_field is None:
            why = "Name the server's field (--thinking-field NAME), or use a completion"
            sampling.refuse(task, ["thinking_budget"], "OpenaiWorker, in chats,", why)
        fields = self._fields(task, _CHAT) | _response_format(task)
        if (num_logprobs := _num_logprobs(task)) is not None:
            fields |= {"logprobs": True, "top_logprobs": num_logprobs}
        if task.tools:
            fields["tools"] = [
                tool if isinstance(tool, Mapping) else tool.to_dict() for tool in task.tools
            ]
            for name in ("tool_choice", "parallel_tool_calls"):
                if getattr(task, name) is not None:
                    fields[name] = getattr(task, name)
        if task.reasoning_effort is not None:
            fields["reasoning_effort"] = task.reasoning_effort
        if "max_tokens" in fields:
            fields[task.max_tokens_field] = fields.pop("max_tokens")
        create = self._clients.of_this_loop().chat.completions.create
        return self._reader(task, create, {"messages": task.messages_to_dict_content(), **fields})

    def _fields(self, task: GenerationTask, names: Collection[str]) -> dict[str, Any]:
        """The sampling fields that the task sets, by their names in the API."""
        refused = [
            name
            for name in _BODY
            if name not in self.extensions and getattr(task, name) != sampling.NEUTRAL.get(name)
        ]
        why = "If the server takes it, name it in OpenaiWorker(extensions=...)"
        sampling.refuse(task, refused, "OpenaiWorker", why)
        unknown = ["return_context_logits", "speculation", "thinking_soft"]
        sampling.refuse(task, unknown, "OpenaiWorker", "Leave it out, or use another worker")
        fields = {name: getattr(task, name) for name in names if sampling.is_set(task, name)}
        scope = current_scope()
        if scope is not None:
            _refuse_of_engine(scope)
        max_tokens = scope.account.limit(task.max_tokens) if scope else task.max_tokens
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        if task.logit_bias is not None:
            fields["logit_bias"] = {str(token): bias for token, bias in task.logit_bias.items()}
        names_sent = self.extensions.intersection(_BODY)
        extensions = {
            name: getattr(task, name) for name in names_sent if sampling.is_set(task, name)
        }
        if task.thinking_budget is not None and self.thinking_field is not None:
            refused = ["thinking_end"]
            sampling.refuse(
                task, refused, "the server's field for a thinking budget", "Leave it out"
            )
            extensions[self.thinking_field] = task.thinking_budget
        fields["extra_body"] = {**self.extra_body, **extensions}
        return fields

    def _reader(self, task: GenerationTask, create: Any, fields: dict[str, Any]) -> ChunkReader:
        if task.attention_group is not None:
            raise ParameterError(
                "generations on a server cannot read each other while they write",
                "the task belongs to an AttentionGroup",
                "Use the built-in engine, or text: hogwild_turns, or join='text'",
            )
        fields |= {"model": self.model, "stream": task.best_of is None}
        if fields["stream"]:
            fields["stream_options"] = {"include_usage": True}
        task.ttft_s = task.latency_s = None
        requests, stops = OneAnswer(self, task, create, fields), sampling.stop_strings(task)
        if task.thinking_budget is not None and self.thinking_field is None:
            start, end = self.thinking_markers
            thought = has_open_thought(task, fields["prompt"], start, end)
            if thought:
                requests, stops = ThoughtThenAnswer(self, task, create, fields), (end,)
        return ChunkReader(requests, stops, task.confidence, task.num_logprobs)

    def _keep(self, reader: ChunkReader) -> None:
        scope = current_scope()
        if scope is not None:
            self._readers.setdefault(scope.scope_id, []).append(reader)

    async def on_scope_end(self, scope_id: str) -> None:
        """End the running streams of the scope."""
        for reader in self._readers.pop(scope_id, []):
            await reader.cancel()
        self.prompt_lengths.forget(scope_id)

    async def async_shutdown(self) -> None:
        """End all running streams, and close this loop's connections."""
        for scope_id in list(self._readers):
            await self.on_scope_end(scope_id)
        await super().async_shutdown()


class TRTOpenaiWorker(OpenaiWorker):
    """For servers that take ``top_k`` as well, such as TensorRT-LLM's."""

    default_extensions = ("top_k",)


def _message(choice: StreamedChoice) -> AssistantMessage:
    return AssistantMessage(
        choice.text or None if choice.tool_calls or choice.refusal else choice.text,
        reasoning=choice.reasoning or None,
        tool_calls=choice.tool_calls or None,
        finish_reason=choice.finish_reason,
        refusal=choice.refusal or None,
    )


def _told_apart(choice: StreamedChoice) -> dict[str, Any]:
    """The fields of a message besides its text: calls, thought, refusal."""
    fields = {
        "tool_calls": [call.to_dict() for call in choice.tool_calls],
        "reasoning": choice.reasoning,
        "refusal": choice.refusal,
    }
    return {name: value for name, value in fields.items() if value}


def _response_format(task: GenerationTask) -> dict[str, Any]:
    """The task's response format as a field of OpenAI's API, which has JSON only."""
    shape = task.guided_decoding
    if isinstance(shape, Mapping):
        shape = GuidedDecodingParams.from_dict(shape)
    if shape is None:
        return {}
    if shape.json_object:
        return {"response_format": {"type": "json_object"}}
    if shape.json is None:
        raise ParameterError(
            f"OpenaiWorker cannot honour guided_decoding with {shape.kind}",
            "there is no field for it that servers agree on",
            "Use json or json_object, or the field of your server in extra_body",
        )
    fields = task.schema_fields if isinstance(task, ChatTask) else None
    named = {"name": "output"} | ({"strict": True} if fields is None else dict(fields))
    schema = {**named, "schema": json.loads(str(shape.json))}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _num_logprobs(task: GenerationTask) -> int | None:
    """The number of top log-probabilities to request: the task's, or that of its confidences."""
    counts = [count for count in (task.num_logprobs, task.confidence) if count is not None]
    return max(counts, default=None)


def _show(task: StreamGenerationTask, reader: ChunkReader, count: int) -> None:
    """Emit the stream up to ``count`` tokens, at most those that have arrived."""
    choice = reader.choices[0]
    before, now = choice.begin_of(reader.shown), choice.begin_of(min(count, reader.available))
    reader.shown = now.count
    task.emit(now.text[len(before.text) :], (), f"{id(reader):x}.0")


async def _read(task: GenerationTask, reader: ChunkReader) -> Mapping[int, StreamedChoice]:
    """Read the answer to its end, or to that of the budget, and store it on the task."""
    try:
        await reader.read()
    except asyncio.CancelledError:
        scope = current_scope()
        if scope is not None and scope.account.exhausted is not None:
            within = {number: choice.within_budget() for number, choice in reader.choices.items()}
            if within[0].count:
                _fill(task, reader, within)
        raise
    choices_read = {
        number: choice.within_budget() if choice.num_beyond else choice
        for number, choice in reader.choices.items()
    }
    _fill(task, reader, choices_read)
    return choices_read


def _fill(
    task: GenerationTask, reader: ChunkReader, choices: Mapping[int, StreamedChoice] | None = None
) -> None:
    """Store the answer so far on the task, or ``choices``, a part of it."""
    choices = reader.choices if choices is None else choices
    server_usage, usage = reader.server_usage, task.usage
    samples = [_output(choice) for _, choice in sorted(choices.items())]
    if task.confidence is not None and task.num_logprobs is None:
        samples = [
            dataclasses.replace(output, logprobs=None, cumulative_logprob=None)
            for output in samples
        ]
    for output in samples:
        output.usage = usage
    task.result = samples[0]
    task.samples = samples
    whole = len(samples) == 1 and choices[0] is reader.choices[0]
    task.usage_completion_tokens = choices[0].count
    if server_usage is not None:
        task.usage_prompt_tokens = server_usage.prompt_tokens
        if whole:
            task.usage_completion_tokens = server_usage.completion_tokens - choices[0].num_dropped
    task.request_id = reader.request_id


def _output(choice: StreamedChoice) -> ScaffoldingOutput:
    scores = choice.logprobs or None
    total = None
    if scores is not None:
        total = sum(next(iter(entries.values())).logprob for entries in scores)
    return ScaffoldingOutput(
        text=choice.text,
        meta=_told_apart(choice),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=scores,
        cumulative_logprob=total,
        confidences=choice.confidences or None,
        thinking=choice.thinking,
    )


def _refuse_of_engine(scope: ExecutionScope) -> None:
    """Refuse what only an engine on this machine can do for a request."""
    fix = "Leave it out, or use EngineWorker"
    if scope.cache_salt:
        why = "the prefix cache is another server's"
        raise ParameterError("OpenaiWorker cannot honour cache_salt", why, fix)
    if scope.adapter is not None:
        why = "adapters are another server's, which has names of models for them"
        raise ParameterError("OpenaiWorker cannot honour adapter", why, fix)
