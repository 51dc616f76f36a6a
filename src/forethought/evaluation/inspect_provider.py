"""Methods as models of inspect_ai, which evaluates them on its own tasks.

::

    inspect eval task.py --model forethought/plain
    inspect eval task.py --model forethought/dynasor+majority_vote@8 -M chunk_size=16
    inspect eval task.py --model forethought/majority_vote@8-Qwen/Qwen3-0.6B -M dtype=bfloat16

The name of a model is a method, or several as for ``methods.stack``, perhaps followed by a hyphen
and a local directory or a Hub id; the default is the embedded reasoner. ``-M NAME=VALUE`` is a
setting of the method if it has a parameter of this name, and else a field of ``LlmArgs``.

inspect_ai loads this module through the entry point of the package (group ``inspect_ai``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from forethought.errors import ContextLengthError, ParameterError
from forethought.methods import worker_tags
from forethought.methods.stack import parameters, stack
from forethought.outputs import Usage
from forethought.scaffolding.result import ScaffoldingOutput, ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm

_HONOURED = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop_seqs": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
}
"""Field of ``GenerateConfig`` -> sampling field."""
_CHANGE_OUTPUTS = (
    "best_of",
    "num_choices",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "response_schema",
    "effort",
    "reasoning_effort",
    "reasoning_tokens",
    "reasoning_mode",
    "verbosity",
    "modalities",
    "extra_body",
    "fallback_models",
    "batch",
)
"""Fields that would change what is answered, and that no method honours. The others say how
inspect_ai itself sends requests, repeats, caches and shows them."""
_STOP_REASONS = {"stop": "stop", "length": "max_tokens"}


@modelapi(name="forethought")
class MethodModel(ModelAPI):  # type: ignore[misc]  # inspect_ai is no dependency of the checks
    """A method on an engine of its own.

    Args:
        model_name: ``method`` or ``method-model``.
        base_url: must be None.
        api_key: must be None.
        config: of inspect_ai.
        **settings: parameters of the method, and fields of ``LlmArgs``.

    Raises:
        UsageError: an unknown method, setting or model, or a server's address.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        if base_url is not None:
            raise ParameterError(
                "forethought models take no base URL",
                f"got {base_url!r}, and they run on this machine",
                "Leave it out",
            )
        spec, _, model = model_name.partition("-")
        names = parameters(spec)
        method_settings = {name: value for name, value in settings.items() if name in names}
        fields = {name: value for name, value in settings.items() if name not in names}
        controller = stack(spec, **method_settings)

        from forethought.workers.local import EngineWorker

        self._worker = EngineWorker.init_with_new_llm(model or None, **fields)
        workers = dict.fromkeys(worker_tags(controller), self._worker)
        # Made in a thread without an event loop, it runs one of its own: inspect_ai keeps a model
        # over evaluations, each of which has another loop.
        with ThreadPoolExecutor(1) as thread:
            self._llm = thread.submit(ScaffoldingLlm, controller, workers).result()

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Answer a conversation with the method.

        Raises:
            ParameterError: tools, contents other than text, or settings that are not honoured.
        """
        if tools:
            raise ParameterError(
                "forethought models cannot call tools", f"got {tools[0].name!r}", "Leave them out"
            )
        params, began = _sampling_params(config), time.perf_counter()
        messages = [_message(message) for message in input]
        questions = [message["content"] for message in messages if message["role"] == "user"]
        try:
            result = await self._llm.generate_async(
                self._prompt(messages),
                sampling_params=params,
                question=questions[-1] if questions else "",
            )
        except ContextLengthError as error:
            return ModelOutput.from_content(
                self.model_name, str(error), stop_reason="model_length", error=str(error)
            )
        return self._output(result, time.perf_counter() - began)

    def max_connections(self) -> int:
        """Requests at once, unless the evaluation says otherwise."""
        return 32

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown(shutdown_workers=True)

    def _prompt(self, messages: Sequence[dict[str, str]]) -> str | list[int]:
        """The conversation through the chat template; a lone question as it is without one."""
        llm = self._worker.llm
        if not llm.tokenizer.chat_template and [m["role"] for m in messages] == ["user"]:
            return messages[0]["content"]
        return llm.chat_prompt(messages)

    def _output(self, result: ScaffoldingResult, seconds: float) -> ModelOutput:
        output = result.output or ScaffoldingOutput("")
        message = ChatMessageAssistant(
            content=output.text or "", model=self.model_name, source="generate"
        )
        reason = _STOP_REASONS.get(output.finish_reason or "", "unknown")
        return ModelOutput(
            model=self.model_name,
            choices=[ChatCompletionChoice(message=message, stop_reason=reason)],
            usage=_usage(result.usage),
            time=seconds,
            metadata=output.meta or None,
        )


def _sampling_params(config: GenerateConfig) -> dict[str, Any]:
    """The sampling fields that a configuration sets; ``ParameterError`` for those without an
    effect.
    """
    fields = {name: value for name, value in dict(config).items() if value is not None}
    refused = [name for name in _CHANGE_OUTPUTS if fields.get(name) not in (None, False)]
    if refused == ["num_choices"] and fields["num_choices"] == 1:
        refused = []
    if refused:
        raise ParameterError(
            f"forethought models cannot honour {', '.join(refused)}",
            f"the evaluation sets {refused[0]}={fields[refused[0]]!r}",
            "Leave it out",
        )
    return {ours: fields[theirs] for theirs, ours in _HONOURED.items() if theirs in fields}


def _message(message: ChatMessage) -> dict[str, str]:
    """A message as a chat template takes it; ``ParameterError`` if it is more than text."""
    content = message.content
    kinds = {"text"} if isinstance(content, str) else {part.type for part in content}
    if message.role == "tool" or getattr(message, "tool_calls", None):
        kinds = {"a tool call"}
    if not kinds <= {"text", "reasoning"}:
        raise ParameterError(
            "forethought models read text alone",
            f"a message of the {message.role} holds {', '.join(sorted(kinds))}",
            "Use a task whose messages are text",
        )
    return {"role": message.role, "content": message.text}


def _usage(usage: Usage) -> ModelUsage:
    """Every token that went through the network, samples and probes included."""
    return ModelUsage(
        input_tokens=usage.prefilled,
        input_tokens_cache_read=usage.cached,
        output_tokens=usage.decoded,
        total_tokens=usage.prefilled + usage.cached + usage.decoded,
    )
