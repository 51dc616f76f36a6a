"""``EngineWorker``: tasks become live sequences of the built-in engine.

A task that continues another one keeps its exact tokens and their KV: by handle, if it was made
with ``fork``; by its text, if a controller only concatenates strings, so that its prompt begins
with the prompt and output of an earlier task of the same request.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.llm.async_llm import AsyncLLM
from forethought.llm.async_session import AsyncSession
from forethought.llm.llm import LLM
from forethought.llm.response import FormatParser, ResponseParser
from forethought.llm.tokenizer import LONG_TEXT, Tokenizer
from forethought.llm.tool_format import with_tools
from forethought.scaffolding import sampling
from forethought.scaffolding.attention_group import AttentionGroup
from forethought.scaffolding.base_task import TaskStatus
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.messages import AssistantMessage, ToolCall, ToolFunction
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.session_task import RestoreSessionTask, SaveSessionTask
from forethought.scaffolding.settings import NON_NEGATIVE_INT, validated
from forethought.scaffolding.task import (
    ChatTask,
    GenerationTask,
    StreamGenerationTask,
)
from forethought.scaffolding.thinking import ThinkingProfile
from forethought.scaffolding.worker import Worker
from forethought.workers.live import Continuation, LiveSession, Prompt, SessionCache
from forethought.workers.reward import RewardWorker, is_reward_model

_REFUSED = ("best_of", "echo", "suffix", "user", "return_context_logits")
_MAX_PARKED = 8


class EngineWorker(Worker):
    """Executes generation, stream and chat tasks on the built-in engine.

    Args:
        llm: the model; an ``LLM`` is taken over until ``shutdown``.
        tokenizer: kept as ``tokenizer`` for controllers that need one; the model's by default.
        max_parked: finished sequences kept per request and branch, to be continued.
        temperature: of tasks for which neither task nor controller sets one.
        sampling_defaults: further sampling fields of such tasks, as ``llm.profile.sampling`` has
            them; None: the neutral ones of ``SamplingParams``.
        adapter: the LoRA adapter of requests that choose none, by its name; None: the model alone.
        response_template: how the model writes tool calls, in transformers' form; None: the
            tokenizer's, or else the format of the model's profile.

    Raises:
        ParameterError: the tokenizer has another vocabulary than the model's own, ``max_parked``
            is no number of sequences, or a default is outside its range.
        UnknownNameError: the model has no such adapter.
    """

    def __init__(
        self,
        llm: AsyncLLM | LLM,
        tokenizer: Any = None,
        *,
        max_parked: int = _MAX_PARKED,
        temperature: float | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
        adapter: str | None = None,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        if adapter is not None and adapter not in llm.adapters:
            raise UnknownNameError("adapter", adapter, llm.adapters)
        self._adapter = adapter
        self._defaults = _checked_defaults(sampling_defaults or {}, temperature)
        if tokenizer is not None and tokenizer.get_vocab() != llm.tokenizer.get_vocab():
            raise ParameterError(
                "this tokenizer is not the model's",
                "its vocabulary differs",
                "Leave tokenizer out, or load it from the model's directory",
            )
        self._response_template = response_template
        self._parser: ResponseParser | FormatParser | None = None
        self._owned = isinstance(llm, LLM)
        self.llm = AsyncLLM.over(llm) if isinstance(llm, LLM) else llm
        self.tokenizer = self.llm.tokenizer if tokenizer is None else tokenizer
        self._text = Tokenizer(self.llm.tokenizer)
        self._cache = SessionCache(validated("max_parked", max_parked, NON_NEGATIVE_INT))
        self._restored: dict[str, LiveSession] = {}
        """The snapshots that are open, by name."""

    @classmethod
    def init_with_new_llm(
        cls,
        model_dir: str | Path | None = None,
        backend: str = "pytorch",
        max_batch_size: int = 32,
        max_num_tokens: int = 4096,
        kv_cache_free_gpu_memory_fraction: float = 0.9,
        disable_overlap_scheduler: bool = False,
        scheduler_config: None = None,
        *,
        temperature: float | None = None,
        response_template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Self:
        """A worker with an engine of its own, which ``shutdown`` ends.

        Args:
            model_dir: local Hugging Face directory, Hub id, or name of an embedded model, such as
                ``"forethought/countdown"``; None: the embedded reasoner.
            backend: must be ``"pytorch"``.
            max_batch_size: see ``LlmArgs``.
            max_num_tokens: see ``LlmArgs``.
            kv_cache_free_gpu_memory_fraction: see ``KvCacheConfig``.
            disable_overlap_scheduler: has no effect: steps never overlap here.
            scheduler_config: must be None: the scheduler has no variants.
            temperature: see the constructor.
            response_template: see the constructor.
            **fields: further fields of ``LlmArgs``.

        Raises:
            UsageError: another backend, a scheduler config, or as ``AsyncLLM``.
        """
        _checked_defaults({}, temperature)
        if backend != "pytorch":
            raise ParameterError("invalid backend", f"got {backend!r}", "Use 'pytorch'")
        if scheduler_config is not None:
            raise ParameterError(
                "invalid scheduler_config",
                f"got {scheduler_config!r}, but the scheduler has no variants",
                "Leave it out",
            )
        fields.setdefault(
            "kv_cache_config", {"free_gpu_memory_fraction": kv_cache_free_gpu_memory_fraction}
        )
        sizes: dict[str, Any] = {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens}
        llm = AsyncLLM(model_dir, **sizes, **fields)
        worker = cls(llm, temperature=temperature, response_template=response_template)
        worker._owned = True
        return worker

    def thinking(self, task: GenerationTask) -> ThinkingProfile | None:
        """By the vocabulary and the chat template of the model, and the prompt."""
        markers, prompt = self.llm.thinking_markers, task.prompt or ""
        if markers is None or isinstance(prompt, str):
            return ThinkingProfile.of_text(str(prompt), markers)
        return ThinkingProfile.of_text(self._text.decode(prompt, False), markers)

    # ---- tasks --------------------------------------------------------------------------------

    async def generation_handler(self, task: GenerationTask) -> TaskStatus:
        """Generate ``n`` samples to their ends."""
        self._check(task)
        await self._generate(task, _prompt(task))
        return TaskStatus.SUCCESS

    async def stream_handler(self, task: StreamGenerationTask) -> TaskStatus:
        """Return with ``streaming_step`` more tokens than the last time."""
        step = task.checked_step
        live = task.request_handle if task.under_way else None
        if not isinstance(live, LiveSession):
            self._check(task)
            sampling.refuse(task, ["n"], "a stream", "Use a GenerationTask, or fork it")
            live = await self._begin(task, _prompt(task), self._params(task))
        began, before = time.perf_counter(), live.shown
        try:
            if task.cancel_flag:
                await live.cancel()
            elif step == 0:
                live.show(len((await live.poll()).token_ids))
                live.emit(task, before)
            else:
                await self._follow(task, live, len(before.token_ids) + step)
        except BaseException:
            if await _end([live]):
                live.fill(task)
            raise
        live.fill(task)
        task.end_flag = live.over
        task.latency_s = (task.latency_s or 0.0) + time.perf_counter() - began
        return TaskStatus.SUCCESS

    async def chat_handler(self, task: ChatTask) -> TaskStatus:
        """Generate the assistant's next turn.

        With tools, calls are read from the text, and whole messages of a format that has them; the
        text of such a turn is streamed at its end.
        """
        self._check(task)
        sampling.refuse(task, ["n"], "a chat", "Use copies of the task")
        if task.reasoning_effort is not None:
            raise ParameterError(
                "EngineWorker cannot honour reasoning_effort",
                f"got {task.reasoning_effort!r}, and models read it in different ways",
                "Set thinking_budget",
            )
        form = self.llm.profile.tool_format
        reads_messages = form is not None and form.reads_messages and not task.skip_detokenizer
        calls = any(getattr(message, "tool_calls", None) for message in task.messages)
        if task.tools or calls or reads_messages:
            await self._generate_message(task)
        else:
            token_ids = await self._chat_prompt(task.messages_to_dict_content())
            await self._generate(task, tuple(token_ids))
            message = AssistantMessage(task.output_str, finish_reason=task.finish_reason)
            task.add_message(message)
        task.end_flag = True
        if task.enable_token_counting:
            task.prompt_tokens_num += task.usage_prompt_tokens or 0
            task.completion_tokens_num += task.usage_completion_tokens or 0
        return TaskStatus.SUCCESS

    async def _chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The tokens of a conversation; of a long one computed in a thread."""
        size = sum(len(str(message.get("content") or "")) for message in messages)
        if size <= LONG_TEXT:
            return self.llm.chat_prompt(messages, arguments)
        return await asyncio.to_thread(self.llm.chat_prompt, messages, arguments)

    def _message_parser(self) -> ResponseParser | FormatParser:
        profile = self.llm.profile
        if self._response_template is not None or profile.tool_format is None:
            return ResponseParser(self.tokenizer, self._response_template)
        return FormatParser(self._text, profile.tool_format, profile.thinking_markers)

    async def _generate_message(self, task: ChatTask) -> None:
        if task.skip_detokenizer:
            raise ParameterError(
                "a chat with tools needs its text", "skip_detokenizer is set", "Leave it out"
            )
        if self._parser is None:
            self._parser = self._message_parser()
        tools = [t if isinstance(t, Mapping) else t.to_dict() for t in task.tools or ()]
        form = self.llm.profile.tool_format
        messages, arguments = with_tools(self.tokenizer, form, _tool_messages(task), tools)
        prompt = await self._chat_prompt(messages, arguments)
        streamed, task.streaming_output_flag = task.streaming_output_flag, False
        shown, task.skip_special_tokens = task.skip_special_tokens, False  # they mark the calls
        try:
            await self._generate(task, tuple(prompt))
        finally:
            task.streaming_output_flag, task.skip_special_tokens = streamed, shown
        response = self._parser.parse(task.output_str or "", prompt, tools)
        num_before = sum(
            len(getattr(message, "tool_calls", None) or ()) for message in task.messages
        )
        calls = [
            ToolCall(f"call-{num_before + number}", ToolFunction(*call))
            for number, call in enumerate(response.tool_calls, 1)
        ]
        task.output_str = response.content
        task.finish_reason = "tool_calls" if calls else task.finish_reason
        task.emit(response.content, (), f"{id(task):x}")
        message = AssistantMessage(
            response.content or None if calls else response.content,
            reasoning=response.reasoning,
            tool_calls=calls or None,
            finish_reason=task.finish_reason,
        )
        if response.error is not None:
            message.unreadable_call = response.error
        task.add_message(message)

    async def save_handler(self, task: SaveSessionTask) -> TaskStatus:
        """Save the sequence of a task as a snapshot."""
        live = task.source and task.source.request_handle
        if not isinstance(live, LiveSession) or live.tokenizer is not self._text or not live.over:
            raise ParameterError(
                "there is no sequence to save",
                "the source of a SaveSessionTask is no finished generation of this worker",
                "Yield the generation to the same worker first, and wait for its end",
            )
        length, missing = live.cut(None)
        session = await self._branch(Continuation(live, length, missing + task.suffix))
        try:
            await session.save(task.name)
        finally:
            await asyncio.shield(session.close())
        older = self._restored.pop(task.name, None)
        await _close([older] if older else [])
        return TaskStatus.SUCCESS

    async def restore_handler(self, task: RestoreSessionTask) -> TaskStatus:
        """Open a snapshot. It stays open, for other requests too, until ``shutdown``."""
        live = self._restored.get(task.name)
        if live is None:
            try:
                session = await self.llm.restore(task.name)
            except UnknownNameError:
                return TaskStatus.SUCCESS
            opened = LiveSession(session, None, self._text, task.usage, None)
            opened.count()
            live = self._restored.setdefault(task.name, opened)
            if live is not opened:  # another request has opened it meanwhile
                await _close([opened])
        task.found, task.text, task.request_handle = True, live.session.text, live
        return TaskStatus.SUCCESS

    task_handlers = {  # noqa: RUF012
        GenerationTask: generation_handler,
        StreamGenerationTask: stream_handler,
        ChatTask: chat_handler,
        SaveSessionTask: save_handler,
        RestoreSessionTask: restore_handler,
    }

    def _check(self, task: GenerationTask) -> None:
        sampling.refuse(task, _REFUSED, "EngineWorker", "Leave it out, or use another worker")
        if task.attention_group is not None:
            what = "a task of an attention group"
            sampling.refuse(task, ["n"], what, "Use copies of the task")
            if not isinstance(_prompt(task), str):
                raise ParameterError(
                    "a task of an attention group has no text",
                    "its prompt is token ids or messages, and the group begins with a text",
                    "Give input_str",
                )

    def _params(self, task: GenerationTask, number: int = 0) -> SamplingParams:
        """The sampling parameters of sample ``number``."""
        scope = current_scope()
        changes: dict[str, Any] = {"n": 1, "cache_salt": scope.cache_salt if scope else ""}
        changes["adapter"] = scope.adapter if scope else None
        if changes["adapter"] is None:
            changes["adapter"] = self._adapter
        if scope:
            changes["max_tokens"] = scope.account.limit(task.max_tokens)
        defaults = self._defaults.items()
        changes |= {name: value for name, value in defaults if getattr(task, name) is None}
        if task.seed is not None and number:  # below zero: copies are numbered from zero
            changes["seed"] = sampling.derived_seed(task.seed, -number)
        if task.score_suffix:
            changes["prompt_logprobs"] = 0
        params = sampling.to_params(task, priority=scope.priority if scope else 0, **changes)
        if task.prediction:
            params = params.replace(speculation=_with_prediction(params, task.prediction))
        return params

    # ---- sequences ----------------------------------------------------------------------------

    async def _generate(self, task: GenerationTask, prompt: Prompt | None) -> None:
        """Generate all samples; the later ones are forks of the first one's prompt."""
        began = time.perf_counter()
        live_sessions = [await self._begin(task, prompt, self._params(task))]
        try:
            for number in range(1, task.n):
                session = await live_sessions[0].session.fork(live_sessions[0].prompt_length)
                live_sessions.append(self._live(task, session, prompt))
                live_sessions[-1].begin(self._params(task, number))
                await self._keep(live_sessions[-1])
            await _together([self._follow(task, live, None) for live in live_sessions])
        except BaseException:
            if await _end(live_sessions):
                _fill_all(task, live_sessions, began)
            raise
        _fill_all(task, live_sessions, began)
        task.latency_s = time.perf_counter() - began

    async def _begin(
        self, task: GenerationTask, prompt: Prompt | None, params: SamplingParams
    ) -> LiveSession:
        session = await self._continued(task, prompt)
        if session is None:
            if prompt is None:  # as long as the context, perhaps: tokenised in a thread
                prompt = await asyncio.to_thread(self._forked, task)
            if prompt is None:
                raise ParameterError(
                    "the task has no prompt",
                    "input_str and input_tokens are None",
                    "Set one of them",
                )
            if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
                session = self.llm.start(await asyncio.to_thread(self.llm.check, prompt))
            else:
                session = self.llm.start(prompt if isinstance(prompt, str) else list(prompt))
        live, group = self._live(task, session, prompt), task.attention_group
        try:
            if group is None:
                live.begin(params)  # before any other task runs: others can share the prefill
            else:
                await group.begin(task, (live, params), partial(self._begin_group, group))
            task.request_handle = live
            task.llm_request_params = params.to_dict()
            task.usage.prompt_tokens += live.prompt_length
            await self._keep(live)
        except BaseException as error:
            if group is not None:
                group.ended(task, error)
            await _close([live])
            raise
        return live

    async def _begin_group(
        self, group: AttentionGroup, ready: Sequence[tuple[LiveSession, SamplingParams]]
    ) -> None:
        """Begin the tasks of a group; those that have ended are only read."""
        others = [task.request_handle for task in group.earlier]
        if any(not isinstance(live, LiveSession) or live.closed for live in others):
            raise UsageError(
                "a task of the attention group cannot be read any more",
                "its sequence is closed, or another worker's",
                "Raise max_parked of the EngineWorker above the number of tasks, and yield all of "
                "them to it",
            )
        await LiveSession.begin_together(ready, others, group)
        for live in others:
            live.is_pinned = False  # what attends to it keeps it

    async def _continued(self, task: GenerationTask, prompt: Prompt | None) -> AsyncSession | None:
        """A fork of the sequence that the task continues; None if it continues none."""
        source, point = None, task.fork_point
        task.inserted_tokens = task.num_kept_tokens = None
        if point is not None and point.input_str == task.input_str:
            live = point.handle
            if (
                isinstance(live, LiveSession) and live.tokenizer is self._text
            ):  # it is of this model
                length, missing = live.cut(point.num_kept)
                source = Continuation(live, length, missing + point.suffix)
                task.num_kept_tokens = length - live.prompt_length
        if source is None and prompt is not None:
            source = self._cache.find(current_scope(), prompt)
        if source is None:
            return None
        session = await self._branch(source)
        task.inserted_tokens = session.tokens[source.length :]
        return session

    def _forked(self, task: GenerationTask) -> tuple[int, ...] | None:
        """The ids of a fork of what is no sequence, but made of several; None: it has none here."""
        point = task.fork_point
        if point is None or point.prompt_tokens is None or point.handle is not None:
            return None
        output = point.output or ScaffoldingOutput.inserted("")
        kept = output.token_ids or []
        if not kept or self._text.decode(kept, False) != output.text:  # one of them ended it
            text = (output.text or "") + point.suffix
            return (*point.prompt_tokens, *self.llm.encode(text, special=False))
        task.num_kept_tokens = point.num_kept
        task.inserted_tokens = self.llm.encode(point.suffix, special=False)
        return (*point.prompt_tokens, *kept, *task.inserted_tokens)

    async def _branch(self, source: Continuation) -> AsyncSession:
        """A session that goes on from a source; its tokens are computed again if it was evicted."""
        return await source.live.session.branch(source.length, source.rest)

    def _live(
        self, task: GenerationTask, session: AsyncSession, prompt: Prompt | None
    ) -> LiveSession:
        scope = current_scope()
        account = scope.account if scope else None
        live = LiveSession(session, prompt, self._text, task.usage, account)
        live.is_pinned = task.is_read_later
        return live

    async def _keep(self, live: LiveSession) -> None:
        await _close(self._cache.add(current_scope(), live))

    async def _follow(self, task: GenerationTask, live: LiveSession, count: int | None) -> None:
        """Show the task ``count`` generated tokens (None: all), once they exist."""
        scope, at_once = current_scope(), getattr(task, "tokens_per_request", None) or math.inf
        is_metered = scope is not None and scope.account.budget.tokens is not None
        is_stepwise = task.streaming_output_flag or is_metered
        while not live.over and (count is None or len(live.shown.token_ids) < count):
            before, num_shown = live.shown, len(live.shown.token_ids)
            await live.reach(num_shown + 1 if is_stepwise else count, num_shown + at_once)
            live.show(count)
            if live.num_beyond:
                await live.end_with_budget()
            live.emit(task, before)

    # ---- the end ------------------------------------------------------------------------------

    async def on_scope_end(self, scope_id: str) -> None:
        """Close the sequences that were kept for the scope."""
        await _close(self._cache.end_scope(scope_id))

    async def async_shutdown(self) -> None:
        """Close all sequences."""
        restored, self._restored = self._restored, {}
        await _close([*self._cache.clear(), *restored.values()])

    def shutdown(self) -> None:
        """Close all sequences, and end the engine or return the ``LLM`` that it has taken over."""
        self._cache.clear()  # a session without references is closed
        self._restored.clear()
        if self._owned:
            self.llm.shutdown()


class TRTLLMWorker(EngineWorker):
    """``EngineWorker`` as in ``tensorrt_llm.scaffolding``; it also opens reward models."""

    @classmethod
    def init_with_new_llm(
        cls, model_dir: str | Path | None = None, *args: Any, **fields: Any
    ) -> Any:
        """A worker with a model of its own: a ``RewardWorker`` if that is a reward model.

        The arguments are those of ``EngineWorker.init_with_new_llm``.
        """
        if model_dir is not None and is_reward_model(Path(model_dir)):
            return RewardWorker.init_with_new_llm(model_dir, *args, **fields)
        return super().init_with_new_llm(model_dir, *args, **fields)


def _tool_messages(task: ChatTask) -> list[dict[str, Any]]:
    """The messages as chat templates take them: arguments as objects, and no content of None."""
    messages = task.messages_to_dict_content()
    for message in messages:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            with suppress(ValueError):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def _with_prediction(params: SamplingParams, prediction: str) -> SpeculationParams:
    """The request's speculation, with the prediction, unless it sets a drafter or a prediction."""
    speculation = params.speculation or SpeculationParams()
    is_open = speculation.enabled and speculation.drafter is None and speculation.prediction is None
    return speculation.replace(prediction=prediction) if is_open else speculation


def _checked_defaults(defaults: Mapping[str, float], temperature: float | None) -> dict[str, float]:
    fields = dict(defaults) if temperature is None else {**defaults, "temperature": temperature}
    params = SamplingParams.from_dict(fields)
    return {name: getattr(params, name) for name in fields}


def _prompt(task: GenerationTask) -> Prompt | None:
    prompt = task.prompt
    if prompt is not None and not isinstance(prompt, str):
        return tuple(prompt)
    if task.skip_tokenizer:
        raise ParameterError(
            "the task has no token ids",
            "skip_tokenizer is set and input_tokens is None",
            "Set input_tokens, or leave skip_tokenizer out",
        )
    return prompt


def _fill_all(task: GenerationTask, live_sessions: Sequence[LiveSession], began: float) -> None:
    """Leave all samples on the task, and the results of the first one."""
    times, samples = [live.first_token_time for live in live_sessions], []
    first = min((moment for moment in times if moment is not None), default=None)
    task.ttft_s = None if first is None else first - began
    for live in reversed(live_sessions):
        live.fill(task)
        samples.append(task.result or ScaffoldingOutput(None))
    task.samples = samples[::-1]


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first failure ends the others."""
    if len(works) == 1:
        await works[0]
        return
    jobs = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()


async def _close(live_sessions: Iterable[LiveSession]) -> None:
    """Close all of them, even if the caller is cancelled meanwhile."""
    sessions = list(live_sessions)
    if sessions:  # a task for nothing costs as much as the rest of a short generation
        await asyncio.shield(LiveSession.close_all(sessions))


async def _end(live_sessions: Sequence[LiveSession]) -> bool:
    """Close sequences whose handler is left; returns whether the budget is spent and there is a
    text.
    """
    scope = current_scope()
    is_spent = scope is not None and scope.account.exhausted is not None

    async def end() -> None:
        for live in live_sessions:
            await (live.end_with_budget() if is_spent else live.close())

    await asyncio.shield(end())
    return is_spent and bool(live_sessions[0].shown.token_ids)
