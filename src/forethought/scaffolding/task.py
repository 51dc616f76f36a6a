"""Tasks that generate: the input of a worker and its results.

========================  ======================================================================
``GenerationTask``        generates from a prompt, with the fields of ``sampling.SamplingFields``
``StreamGenerationTask``  returns to its controller every ``streaming_step`` tokens
``ChatTask``              generates the assistant's next message of a chat (``RoleMessage``, tools)
========================  ======================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, Self, TypeVar

from forethought.errors import ParameterError
from forethought.moved_modules import former_name
from forethought.outputs import DraftSpan, ThinkingOutput, TokenConfidence, TokenLogprobs
from forethought.scaffolding import sampling
from forethought.scaffolding.attention_group import AttentionGroup
from forethought.scaffolding.base_task import ForkPoint, Task
from forethought.scaffolding.messages import AssistantMessage, RoleMessage, UserMessage
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.settings import (
    NON_NEGATIVE_INT,
    POSITIVE_INT,
    validated,
)

_Generation = TypeVar("_Generation", bound="GenerationTask")


@dataclass(eq=False)
class GenerationTask(sampling.SamplingFields, Task):
    """Generate text from a prompt.

    A sampling field at its default is filled by the controller's ``sampling_params``, then by the
    worker. A deep copy or a pickle holds request and results, but no ``request_handle`` and no
    ``attention_group``: its stream starts again, and a fork continues its text.
    """

    # the prompt is one of the two: ``prompt``
    input_tokens: list[int] | None = None
    input_str: str | None = None
    question: str | None = None
    """What the user asks, as text, where the prompt is token ids or went through a chat template;
    verifiers and reward models read it. None: the prompt itself (``question_text``)."""
    prediction: str | None = None
    """Text that the output may turn out to be. An engine's worker drafts it, which changes the
    speed alone (``SpeculationParams.prediction``); other workers have no use for it."""
    is_aside: bool = False
    """What it generates is no part of an answer, as a probe or a judgement: a request
    that its budget ends is never answered with it."""
    is_read_later: bool = False
    """An attention group is to read its sequence, once it has ended: an engine's worker keeps it
    until then, also beyond ``max_parked``."""
    score_suffix: bool = False
    """Of a fork: have the model say how probable its suffix is (``suffix_logprobs``). A worker that
    holds no sequence cannot, and leaves them None."""
    skip_tokenizer: bool = False
    """The prompt must be ``input_tokens``."""
    skip_detokenizer: bool = False
    """Do not turn the output into text: ``output_str`` stays None."""
    history: list[RoleMessage] = field(default_factory=list, kw_only=True)
    """Messages before the question, where the prompt is a conversation that went through a chat
    template: what a method asks beside the answer opens with them (``asking``)."""

    fork_point: ForkPoint | None = field(default=None, repr=False)
    """Set by ``fork``: the sequence that this task continues."""
    attention_group: AttentionGroup | None = field(default=None, init=False, repr=False)
    """Set by ``AttentionGroup``: tasks that it reads while they write. A worker in text refuses."""

    # results
    output_str: str | None = field(default=None, init=False)
    output_tokens: list[int] | None = field(default=None, init=False)
    finish_reason: str | None = field(default=None, init=False)
    """``"stop"``, ``"length"`` or ``"abort"``; None while a stream goes on."""
    stop_reason: int | str | None = field(default=None, init=False)
    """The stop token or stop string that ended it."""
    logprobs: list[TokenLogprobs] | None = field(default=None, init=False)
    cumulative_logprob: float | None = field(default=None, init=False)
    confidences: list[TokenConfidence | None] | None = field(default=None, init=False)
    """One entry per token, if ``confidence`` asks for them; None for a token that a method put in.
    On a stream they come with the tokens."""
    thinking: ThinkingOutput | None = field(default=None, init=False)
    """The thought under a thinking budget, where the worker enforces that itself."""
    context_logits: Any = field(default=None, init=False, repr=False)
    draft_spans: list[DraftSpan] = field(default_factory=list, init=False, repr=False)
    """Where drafts were verified in ``output_str``, in order, if its worker knows; of a
    stream some may be beyond the text that it has returned."""
    samples: list[ScaffoldingOutput] = field(default_factory=list, init=False, repr=False)
    """All ``n`` of them; the fields above are those of the first."""
    candidates: list[str | None] = field(default_factory=list, init=False, repr=False)
    """For methods that choose among samples, see ``keep_candidates``; the fields are those of
    ``ScaffoldingOutput``."""
    cut_candidates: list[int] = field(default_factory=list, init=False, repr=False)
    customized_result_fields: dict[str, Any] = field(default_factory=dict, init=False)
    llm_request_params: dict[str, Any] | None = field(default=None, init=False, repr=False)
    """The sampling parameters as the worker sent them to its backend."""
    request_handle: Any = field(default=None, init=False, repr=False)
    """The worker's handle of the sequence; ``fork`` continues it."""
    request_id: str | None = field(default=None, init=False)
    ttft_s: float | None = field(default=None, init=False)
    """Seconds to the first token."""
    latency_s: float | None = field(default=None, init=False)
    """Seconds to the last token."""
    usage_prompt_tokens: int | None = field(default=None, init=False)
    usage_completion_tokens: int | None = field(default=None, init=False)
    inserted_tokens: list[int] | None = field(default=None, init=False, repr=False)
    """Ids of the text between the continued tokens and the output: the end of the forked text that
    is no whole token, and the fork's suffix. None if nothing is continued, or the worker works in
    text."""
    suffix_logprobs: list[float] | None = field(default=None, init=False, repr=False)
    """Log-probabilities of ``inserted_tokens``, in nats, if ``score_suffix`` asks for them."""
    chat: ChatTask | None = field(default=None, init=False, repr=False)
    """The chat whose answer this is, where the prompt was made a message of one: what follows goes
    on from there."""
    num_kept_tokens: int | None = field(default=None, init=False, repr=False)
    """In a fork, number of generated tokens of the forked task before ``inserted_tokens``, without
    the token that ended its text."""

    @staticmethod
    def create_from_prompt(prompt: str | Sequence[int] | ChatTask) -> GenerationTask:
        """A task for a prompt given as text, as token ids, or as a chat, of which it is a copy."""
        if isinstance(prompt, str):
            return GenerationTask(input_str=prompt)
        if isinstance(prompt, ChatTask):
            return prompt.copy()
        ids = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not ids or not all(map(_is_id, prompt)):
            raise ParameterError(
                "invalid prompt",
                f"got {str(prompt)[:60]!r}",
                "Give text, a list of token ids, or a ChatTask",
            )
        return GenerationTask(input_tokens=list(map(int, prompt)), skip_tokenizer=True)

    @property
    def prompt(self) -> str | list[int] | None:
        """Text or token ids; None: there is none, as in a fork of token ids.

        Raises ParameterError if there are both.
        """
        if self.input_tokens is None:
            return self.input_str
        if self.input_str is not None:
            raise ParameterError(
                "the task has two prompts",
                "input_str and input_tokens are set",
                "Set the other one to None; to go on from a prompt of ids, fork the task",
            )
        return self.input_tokens

    def create_scaffolding_output(self) -> ScaffoldingOutput | None:
        """The result fields as an output."""
        return self.result

    def copy(self) -> Self:
        """The same request without results."""
        duplicate = super().copy()
        duplicate.result = None
        return duplicate

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self))
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "attention_group"}
        return state | {"request_handle": None}

    @property
    def result(self) -> ScaffoldingOutput | None:
        """All result fields at once; None before the task has run.

        Assigning takes over the ``result`` of another task, a text, or the first of the ``outputs``
        of an engine's result; None clears the fields.
        """
        if self.output_str is None and self.output_tokens is None and self.finish_reason is None:
            return None
        return ScaffoldingOutput(
            self.output_str,
            self.output_tokens,
            self.customized_result_fields,
            self.finish_reason,
            self.stop_reason,
            self.logprobs,
            self.cumulative_logprob,
            self.usage,
            confidences=self.confidences,
            thinking=self.thinking,
            candidates=self.candidates,
            cut_candidates=self.cut_candidates,
        )

    @result.setter
    def result(self, result: Any) -> None:
        output = _as_output(result)
        self.output_str, self.output_tokens = output.text, output.token_ids
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.logprobs, self.cumulative_logprob = output.logprobs, output.cumulative_logprob
        self.confidences = output.confidences
        self.customized_result_fields = dict(output.meta)
        self.usage, self.thinking = output.usage, output.thinking
        self.samples, self.candidates = [], list(output.candidates)
        self.cut_candidates = list(output.cut_candidates)
        self.draft_spans = []
        if result is None:
            self.context_logits = self.llm_request_params = self.request_handle = None
            self.request_id = self.ttft_s = self.latency_s = None
            self.usage_prompt_tokens = self.usage_completion_tokens = None
            self.inserted_tokens = self.num_kept_tokens = self.suffix_logprobs = None
            self.chat = None

    def keep_candidates(self, samples: Iterable[GenerationTask | ScaffoldingOutput | None]) -> None:
        """Leave the samples among which a method has chosen, in the order of their numbers; None
        for one that failed or was ended early.
        """
        outputs = [sample or ScaffoldingOutput() for sample in samples]
        self.candidates = [output.output_str for output in outputs]
        self.cut_candidates = [n for n, one in enumerate(outputs) if one.finish_reason == "length"]

    @property
    def joined(self) -> ScaffoldingOutput | None:
        """The output of a fork together with all that it continues (``ScaffoldingOutput.join``).

        Its ids are those that the sequence holds after the first task's prompt. None before the
        task has run; the result itself if it is no fork.
        """
        result, point = self.result, self.fork_point
        if result is None or point is None or point.input_str != self.input_str:
            return result
        before = point.output or ScaffoldingOutput.inserted("")
        if self.num_kept_tokens is None:
            return ScaffoldingOutput.join([before, point.suffix, result])
        before = before.without_last((point.num_kept or 0) - self.num_kept_tokens)
        suffix = ScaffoldingOutput.inserted(point.suffix, self.inserted_tokens)
        return ScaffoldingOutput.join([before, suffix, result])

    @property
    def question_text(self) -> str | None:
        """``question``, or else the prompt's text; None where the prompt is token ids alone."""
        return self.input_str if self.question is None else self.question

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, as exactly as the worker counts them."""
        if self.output_tokens is not None:
            return len(self.output_tokens)
        return self.usage_completion_tokens or 0

    def samples_of(self, num_samples: int) -> list[Self]:
        """``num_samples`` copies of this task that differ in what they draw, under a seed too.

        Their seeds are hashes of the seed and the path of sample numbers, so the samples of a
        sample repeat none, and a seed that a controller fills in later has the same effect.
        """
        samples = [self.copy() for _ in range(validated("num_samples", num_samples, POSITIVE_INT))]
        for number, sample in enumerate(samples):
            sampling.vary(sample, number)
        return samples

    def fork(
        self,
        suffix: str = "",
        kind: type[_Generation] | None = None,
        *,
        inherit: bool = True,
        **fields: Any,
    ) -> _Generation:
        """A task that continues this one at its present end, after ``suffix``.

        This task is not disturbed and may still be generating. A worker that holds its sequence
        keeps exactly its tokens and their KV; every other one gets the text. ``max_tokens`` and
        ``min_tokens`` count the tokens of the fork alone. For several forks that differ:
        ``task.fork(suffix).samples_of(n)``.

        Args:
            suffix: text before the new tokens.
            kind: class of the new task; ``GenerationTask`` by default.
            inherit: whether sampling fields are taken over.
            **fields: fields of the new task. A sampling field here wins over this task's and the
                controller's; None leaves it to the controller.
        """
        text = None
        if self.input_str is not None:
            output = self.output_str or ""
            text = (output if self.echo and output else self.input_str + output) + suffix
        num_kept = 0 if self.output_str is None else None  # nothing has come back yet, or no tokens
        if self.output_tokens is not None:
            num_kept = len(self.output_tokens)
        new: Any = kind or GenerationTask
        child: _Generation = new(input_str=text)
        child.worker_tag, child.question = self.worker_tag, self.question
        child.history = list(self.history)
        ids = self.input_tokens
        if ids is None and self.fork_point is not None:
            ids = self.fork_point.prompt_tokens
        child.fork_point = ForkPoint(self.request_handle, num_kept, suffix, text, self.joined, ids)
        if inherit:
            sampling.carry(self, child)
        _set_fields(child, fields)
        return child

    def follow_up(self, instruction: str, *, inherit: bool = True, **fields: Any) -> GenerationTask:
        """A task that goes on from this answer with an instruction to the model, as ``fork``.

        Of a plain task, the instruction is the suffix; of a chat, the user's next message.
        """
        if self.chat is not None:
            return self.chat.follow_up(instruction, inherit=inherit, **fields)
        child: GenerationTask = self.fork(instruction, inherit=inherit, **fields)
        return child

    def asking(self, text: str) -> ChatTask:
        """A chat that asks ``text`` in place of the question, with the same messages before it.

        Neither sampling fields nor tools are taken over.
        """
        if self.chat is not None:
            return self.chat.asking(text)
        return ChatTask(messages=[*self.history, UserMessage(text)])

    def asked_again(self, text: str) -> ChatTask:
        """The same request as a chat, with another text in place of the question."""
        chat = self.asking(text)
        sampling.carry(self, chat)
        for name in ("streaming_output_flag", "on_failure", "priority", "skip_detokenizer"):
            setattr(chat, name, getattr(self, name))
        return chat

    def unanswered(self) -> Self:
        """The same request without results; of a chat, without the answer among its messages."""
        return self.copy()

    def take_answer(self, source: GenerationTask) -> None:
        """Let the results of another task be the answer to the prompt of this one."""
        self.result, self.chat = source.result, source.chat
        # A fork of it continues question and answer; only ids alone have to go on after the chain.
        by_handle = self.input_str is None or source.input_str == self.input_str
        self.request_handle = source.request_handle if by_handle else None


def _set_fields(task: GenerationTask, fields: Mapping[str, Any]) -> None:
    """Set fields of a new task, sampling fields with ``choose``."""
    for name, value in fields.items():
        if name in sampling.FIELDS:
            sampling.choose(task, {name: value})
        elif hasattr(task, name):
            setattr(task, name, value)
        else:
            raise ParameterError.unknown(type(task).__name__, [name], vars(task))


@dataclass(eq=False)
class StreamGenerationTask(GenerationTask):
    """A generation that returns to its controller every few tokens.

    The controller yields the task again until ``end_flag``. The worker may generate ahead; the
    results, and the sequence that ``fork`` continues, hold exactly the requested tokens.
    """

    cancel_flag: bool = False
    """Set it and yield once more: the worker ends the generation; the results stay as they are."""
    streaming_step: int = 1
    """Return with exactly this many tokens more, or with the last ones; 0: at once, with whatever
    there is."""
    tokens_per_request: int | None = None
    """Tokens that one request to a server generates, but for the rest of a word. The next request
    continues the text over the server's prefix cache, once a step asks for more; so the server is
    never more than this many tokens ahead of the steps. None: one request generates all.

    A prompt of token ids, stop strings, penalties, ``min_tokens``, a guided shape and a thinking
    budget cannot be continued in another request, so they too make it one. Workers that hold the
    sequence themselves make no requests."""
    end_flag: bool = field(default=False, init=False)
    """The generation has ended, and all of it is here."""

    @classmethod
    def create_from_generation_task(cls, task: GenerationTask, streaming_step: int = 1) -> Self:
        """The same request as ``task``, with blank results, as a stream."""
        stream = cls(streaming_step=streaming_step)
        vars(stream).update(vars(task.copy()))
        return stream

    @property
    def under_way(self) -> bool:
        """Whether the generation has begun and not ended."""
        return self.request_handle is not None and not self.end_flag

    @property
    def checked_step(self) -> int:
        """``streaming_step``; raises ``ParameterError`` if it is no whole number, or below 0."""
        return validated("streaming_step", self.streaming_step, NON_NEGATIVE_INT)

    def copy(self) -> Self:
        """The same request without results."""
        duplicate = super().copy()
        duplicate.cancel_flag = duplicate.end_flag = False
        return duplicate


def _as_output(result: Any) -> ScaffoldingOutput:
    if isinstance(result, ScaffoldingOutput):
        return result
    if result is None or isinstance(result, str):
        return ScaffoldingOutput(result)
    outputs = getattr(result, "outputs", None)
    if not outputs or not hasattr(outputs[0], "text"):
        raise ParameterError(
            "invalid result of a task",
            f"got {result!r}",
            "Assign the result of another task, a ScaffoldingOutput, or text",
        )
    names = ("text", "token_ids", "finish_reason", "stop_reason")
    scores = ("logprobs", "cumulative_logprob", "confidences")
    fields: dict[str, Any] = {name: getattr(outputs[0], name, None) for name in (*names, *scores)}
    return ScaffoldingOutput(**fields)


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(eq=False)
class ChatTask(StreamGenerationTask):
    """The assistant's next turn in a chat; the answer is appended to ``messages``."""

    messages: list[RoleMessage] = field(default_factory=list)
    tools: Any = None
    """Descriptions of the functions that the model may call."""
    tool_choice: Any = None
    """``"auto"``, ``"none"``, ``"required"``, or the function to call, in OpenAI's form; None: left
    to the worker."""
    parallel_tool_calls: bool | None = None
    """Whether a message may hold several calls; None: left to the worker."""
    schema_fields: Mapping[str, Any] | None = None
    """Name, description and ``strict`` of the schema of ``guided_decoding``, for a server; None: a
    name of the worker's, and strict."""
    reasoning_effort: str | None = None
    """How much the model is to think, in OpenAI's words, for a server; None: left to it."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Under which of OpenAI's names a server gets ``max_tokens``."""
    enable_token_counting: bool = False
    """Count the tokens of all turns in the three fields below."""
    prompt_tokens_num: int = field(default=0, init=False)
    completion_tokens_num: int = field(default=0, init=False)
    reasoning_tokens_num: int = field(default=0, init=False)
    unique_id: int | None = None

    @property
    def under_way(self) -> bool:
        """False: a turn is generated at once, and has no steps."""
        return False

    @property
    def question_text(self) -> str | None:
        """``question``, or else the text of the last user message; None if there is none."""
        if self.question is not None:
            return self.question
        questions = [message for message in self.messages if message.role == "user"]
        return questions[-1].content if questions else None

    def copy(self) -> Self:
        """The same chat, free to go on differently, without results."""
        duplicate = super().copy()
        duplicate.prompt_tokens_num = duplicate.completion_tokens_num = 0
        duplicate.reasoning_tokens_num = 0
        return duplicate

    def follow_up(self, instruction: str, *, inherit: bool = True, **fields: Any) -> ChatTask:
        """The chat with its answer and the instruction as the user's next message.

        An aside (``is_aside=True``) may not call tools.
        """
        child = self.copy()
        child.question = self.question_text
        child.messages = [*self._request, *self._answer, UserMessage(instruction.strip())]
        child.on_failure, child.streaming_output_flag, child.is_aside = "raise", False, False
        child.prediction = None
        if not inherit:
            sampling.choose(child, dict.fromkeys(sampling.FIELDS))
        _set_fields(child, fields)
        if child.is_aside and child.tools:
            child.tool_choice = "none"
        return child

    def asking(self, text: str) -> ChatTask:
        """A chat that asks ``text`` in place of the last question.

        After results of tools, it is one more question: they belong to the last one.
        """
        request = self._request
        before = request[:-1] if request and request[-1].role == "user" else request
        return ChatTask(
            messages=[*before, UserMessage(text)],
            schema_fields=self.schema_fields,
            reasoning_effort=self.reasoning_effort,
            max_tokens_field=self.max_tokens_field,
        )

    def asked_again(self, text: str) -> ChatTask:
        """The same request with another text in place of the last question."""
        child = self.unanswered()
        child.messages = self.asking(text).messages
        return child

    def unanswered(self) -> Self:
        """The same request without results; without the answer among its messages."""
        duplicate = self.copy()
        duplicate.messages = self._request
        return duplicate

    def take_answer(self, source: GenerationTask) -> None:
        """Let the results of another task be the answer to the messages of this one."""
        request, answer = self._request, list[RoleMessage]()
        if isinstance(source, ChatTask):
            answer = source.messages[-1:] if source._is_answered else source._answer
        super().take_answer(source)
        self.messages, self.chat = [*request, *answer], None

    def answers(self, messages: Sequence[RoleMessage]) -> bool:
        """Whether its answer is one to these messages."""
        return self._request == list(messages)

    @property
    def _is_answered(self) -> bool:
        is_last = bool(self.messages) and isinstance(self.messages[-1], AssistantMessage)
        return is_last and self.result is not None

    @property
    def _request(self) -> list[RoleMessage]:
        return self.messages[:-1] if self._is_answered else list(self.messages)

    @property
    def _answer(self) -> list[RoleMessage]:
        """The answer as a message, if there is one; calls that were not run are a part of its text.

        A server takes no message after calls but their results.
        """
        result = self.result
        if result is None:
            return []
        calls = [call["function"] for call in result.meta.get("tool_calls", ())]
        texts = [result.text or result.meta.get("refusal") or "", *map(json.dumps, calls)]
        return [AssistantMessage("\n".join(filter(None, texts)))]

    def messages_to_dict_content(self, start_index: int = 0) -> list[dict[str, Any]]:
        """The messages from ``start_index`` on, as OpenAI's API takes them."""
        return [message.to_dict() for message in self.messages[start_index:]]

    def add_message(self, message: RoleMessage) -> None:
        """Append one message."""
        self.messages.append(message)

    def add_messages(self, messages: Sequence[RoleMessage]) -> None:
        """Append messages."""
        self.messages.extend(messages)

    def last_assistant_content(self) -> str | None:
        """The text of the last assistant message; None if there is none."""
        answers = [m for m in self.messages if isinstance(m, AssistantMessage)]
        return answers[-1].content if answers else None

    @staticmethod
    def create_from_prompt(  # type: ignore[override]  # the established signature
        user_prompt: str | None,
        system_prompts: Sequence[RoleMessage] | None = None,
        tools: Any = None,
    ) -> ChatTask:
        """A chat that opens with ``system_prompts`` and the user's message ``user_prompt``.

        ``tools`` are descriptions of the functions that the model may call.
        """
        messages = [*(system_prompts or ())]
        if user_prompt is not None:
            messages.append(UserMessage(user_prompt))
        return ChatTask(messages=messages, tools=tools)

    @staticmethod
    def create_from_messages(messages: Sequence[RoleMessage], tools: Any = None) -> ChatTask:
        """A chat that goes on from ``messages``."""
        return ChatTask(messages=list(messages), tools=tools)


def __getattr__(name: str) -> Any:
    return former_name(__name__, name)
