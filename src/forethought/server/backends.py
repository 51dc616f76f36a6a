"""What answers: the engine (others: ``remote_backend``, ``scripted_backend``); each makes prompts
of conversations.

A ``Backend`` has the workers for all tasks of all methods. ``open`` turns a conversation into a
``Prompted``: a prompt that methods take, and what generates inside of them.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from forethought import methods
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError, UsageError
from forethought.outputs import Logprob
from forethought.scaffolding.controller import (
    Controller,
    NativeGenerationController,
    NativeRewardController,
)
from forethought.scaffolding.messages import RoleMessage
from forethought.scaffolding.task import ChatTask, RewardTask, Task, TaskStatus
from forethought.scaffolding.worker import Worker
from forethought.server.logprobs import TokenText, texts_of_entries
from forethought.server.tool_calls import Tools
from forethought.server.tool_messages import has_calls, hermes_messages, merged_system

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM
    from forethought.llm.response import ResponseParser, ResponseStream
    from forethought.workers.reward import RewardWorker
    from forethought.workers.reward_server import RewardServerWorker

log = logging.getLogger(__name__)

Rendered = TypeVar("Rendered")
Prompt = str | list[int] | ChatTask
"""Of a method."""
Innermost = Callable[[bool], Controller]
"""Makes what generates inside methods; told whether it streams."""
_CONTEXT = 256
"""Characters of a prompt on which the text of the first tokens after it may depend."""
_TAIL = 64
"""Tokens at the end of a prompt in which a thought may be opened."""


class ClientMessage(RoleMessage):
    """A message as the client has sent it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(str(values["role"]), values.get("content"))
        self._values = dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The message, with all its fields."""
        return self._values


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to be answered: messages and tools in OpenAI's form.

    Attributes:
        template_args: further arguments of the chat template.
        has_shape: a grammar holds for the answer.
        thinks_first: the answer under the grammar begins after a thought; else at once.
        schema_fields: name, description and ``strict`` of the client's schema, for other servers.
        reasoning_effort: how much to think, for other servers; None: left to them.
        max_tokens_field: the name that the client gives the limit of tokens, for other servers.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Tools = field(default_factory=Tools)
    template_args: Mapping[str, Any] = field(default_factory=dict)
    has_shape: bool = False
    thinks_first: bool = False
    schema_fields: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"

    @property
    def history(self) -> Sequence[RoleMessage]:
        """The messages before the question; all, where results of tools have come after it."""
        before = self.messages[:-1] if self.messages[-1]["role"] == "user" else self.messages
        return [ClientMessage(message) for message in before]

    @property
    def question(self) -> str:
        """The text of the last message of the user."""
        questions = [str(m.get("content") or "") for m in self.messages if m["role"] == "user"]
        return questions[-1] if questions else ""

    def asking(self, text: str) -> Conversation:
        """The same with another text as the user's last message."""
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=0)
        changed = [*self.messages[:last], {"role": "user", "content": text}]
        return dataclasses.replace(self, messages=changed)


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt for methods.

    Attributes:
        question: what the user asks, as text.
        innermost: makes what generates inside the methods.
        asking: the prompt for another question.
        is_open: whether the prompt has opened a thought.
        is_chat: whether the answer is a message.
        keeps_thought: whether a thought is left in the content, with its markers.
        reader: reads a message as the tokenizer's response template says, with the thought in its
            content or without; None: there is no template, or a grammar forces a call.
        history: messages before the question, where the prompt is no chat.
    """

    prompt: Prompt
    question: str
    innermost: Innermost
    asking: Callable[[str], Any]
    is_open: bool = False
    is_chat: bool = True
    keeps_thought: bool = False
    reader: Callable[[bool], ResponseStream] | None = None
    history: Sequence[RoleMessage] = ()

    @property
    def text_or_ids(self) -> str | list[int]:
        """The prompt, where it cannot be a chat."""
        assert not isinstance(self.prompt, ChatTask), "only chats of another server are none"
        return self.prompt


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A drafter that a request may name."""

    name: str
    active: bool
    reason: str | None = None
    """Why it is off, or does not help."""


class Backend(abc.ABC):
    """What answers. Its owner closes it.

    Attributes:
        name: of the model, where the server is given no other.
        workers: by the value of their tags.
        reward: scores answers for methods that take it; None: there is none.
        markers: what opens and closes the model's thoughts; None: unknown, or none.
        thinks: whether the model thinks; None: unknown.
        salted: whether prefixes are cached apart for different salts.
        llm: the engine; None: there is none here.
        servers: the upstream servers.
        passes_chats_on: conversations go to upstream servers as they are, which offer the tools,
            force the calls and read ``reasoning_effort``.
    """

    name: str
    workers: Mapping[Any, Worker]
    reward: Controller | None = None
    markers: tuple[str, str] | None = None
    thinks: bool | None = None
    salted: bool = False
    llm: AsyncLLM | None = None
    servers: Sequence[Any] = ()
    passes_chats_on: bool = False

    async def prepare(self) -> None:
        """Learn what ``open`` needs, if it is not known yet."""

    @abc.abstractmethod
    def open(self, conversation: Conversation) -> Prompted:
        """The prompt of a conversation; from any thread."""

    @abc.abstractmethod
    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that stand around a whole text or without."""

    @abc.abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""

    @abc.abstractmethod
    def render(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation."""

    def warm_up(self) -> None:
        """Have imported and compiled what requests need, so that none of them does it."""
        with contextlib.suppress(UsageError):  # no tokenizer, or a template that wants more
            self.render(Conversation([{"role": "user", "content": "?"}]))

    @property
    def takes_text(self) -> bool:
        """Whether conversations become text here, which methods can continue."""
        return True

    def as_text(self, prompt: str | Sequence[int]) -> str:
        """A prompt as text that is tokenised into the same ids."""
        if isinstance(prompt, str):
            return prompt
        text = self.detokenize(prompt)
        whole, unmarked = self.tokenize(text), self.tokenize(text, special=False)
        begins_twice = len(whole) > len(unmarked) and whole[:2] == [*prompt[:1], *prompt[:1]]
        return self.detokenize(prompt[1:]) if begins_twice else text

    def count(self, text: str) -> int:
        """Tokens of a text, as exactly as they are known."""
        return len(self.tokenize(text, special=False))

    def length(self, prompt: str | Sequence[int]) -> int:
        """Tokens of a prompt, as exactly as they are known."""
        return len(self.tokenize(prompt) if isinstance(prompt, str) else prompt)

    def token_texts(self, prompt: Prompt | Sequence[int], skip_special_tokens: bool) -> TokenText:
        """The texts of the tokens that follow a prompt, those that are known."""
        return texts_of_entries()

    def count_thought(self, thought: str, ids: Sequence[int] | None) -> int:
        """Tokens of the thought that an answer begins with; ``ids`` are those of the whole
        answer.
        """
        return self.count(thought) if thought else 0

    def check(self, prompt: Prompt, params: SamplingParams) -> Prompt:
        """The prompt of a method, in tokens if they are known now.

        Raises UsageError for what the backend cannot honour, before anything runs.
        """
        return prompt

    def task_params(self, prompted: Prompted, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The sampling fields of a request as its workers take them.

        Raises ParameterError with the request's field if they do not take one.
        """
        return params

    def missing(self, method: str) -> str | None:
        """What a method lacks here to answer a conversation; None: nothing."""
        return None

    def drafters(self) -> list[DrafterChoice]:
        """What a request may name for its drafts."""
        return []

    def load(self) -> dict[str, Any]:
        """How busy it is, by the names of ``GET /v1/load``; what is unknown is left out."""
        return {}

    def examples(self) -> list[dict[str, str]]:
        """Questions to try."""
        return []

    @property
    def has_ended(self) -> bool:
        """Whether it can answer no request any more."""
        return False

    @property
    def max_length(self) -> int | None:
        """Tokens of the model's context; None: unknown."""
        return None

    def close(self) -> None:
        """End what it owns."""


def raw_prompt(prompt: str | list[int], is_open: bool = False) -> Prompted:
    """A prompt to be continued as it is."""
    question = prompt if isinstance(prompt, str) else ""
    return Prompted(prompt, question, NativeGeneration, lambda text: text, is_open, is_chat=False)


def NativeGeneration(streaming: bool) -> Controller:
    """Plain generation."""
    return NativeGenerationController(streaming=streaming)


def opens_thought(text: str, markers: tuple[str, str] | None) -> bool:
    """Whether a prompt ends within a thought."""
    if markers is None:
        return False
    start, end = markers
    opened = text.rfind(start)
    return opened >= 0 and text.find(end, opened) < 0


def worker_table(worker: Worker, reward: Worker | None) -> dict[Any, Worker]:
    """The worker of every tag of every method that is shipped."""
    table = dict.fromkeys([tag for tag in methods.shipped().tags() if tag != "small_model"], worker)
    if reward is not None:
        table[NativeRewardController.WorkerTag.REWARD.value] = _Judging(worker, reward)
    return table


class _Judging(Worker):
    """Executes the tasks of rewards: scores on a reward model, critiques on the model itself. Both
    workers are shut down by their owners.
    """

    def __init__(self, worker: Worker, reward: Worker) -> None:
        self._worker, self._reward = worker, reward

    async def run_task(self, task: Task) -> TaskStatus:
        chosen = self._reward if isinstance(task, RewardTask) else self._worker
        return await chosen.run_task(task)


# ---- the engine ----------------------------------------------------------------------------------


class EngineBackend(Backend):
    """One model on this machine. ``close`` shuts down ``llm`` and ``judge``, a reward model."""

    salted = True

    def __init__(
        self,
        llm: AsyncLLM,
        name: str,
        *,
        judge: RewardWorker | RewardServerWorker | None = None,
        examples: Sequence[Mapping[str, str]] = (),
    ) -> None:
        from forethought.workers.local import EngineWorker

        self.llm, self._engine, self._judge = llm, llm, judge
        self.name = name
        self.workers = worker_table(EngineWorker(llm), judge)
        self.reward = None if judge is None else judging(judge)
        self.markers = llm.thinking_markers
        self.thinks = self.markers is not None
        self._marker_ids = [self.tokenize(marker, special=False) for marker in self.markers or ()]
        self._responses = response_parser(llm.tokenizer)
        self._examples = [dict(example) for example in examples]

    def warm_up(self) -> None:
        """Have the chat template compiled, and the compiler of grammars imported."""
        super().warm_up()
        with contextlib.suppress(ImportError):
            importlib.import_module("llguidance.hf")

    def missing(self, method: str) -> str | None:
        """What the attention of the model cannot do."""
        return self._engine.why_not_concurrent() if method == "hogwild" else None

    def open(self, conversation: Conversation) -> Prompted:
        """The prompt that the chat template makes of a conversation."""
        ids = self.render(conversation)
        tail = self._engine.decode(ids[-_TAIL:])
        return Prompted(
            ids,
            conversation.question,
            NativeGeneration,
            lambda text: self.render(conversation.asking(text)),
            opens_thought(tail, self.markers),
            reader=self._reader(ids, conversation.tools),
            history=conversation.history,
        )

    def _reader(self, ids: list[int], tools: Tools) -> Callable[[bool], ResponseStream] | None:
        responses = self._responses
        if responses is None or tools.forced:
            return None
        return lambda keeps: responses.stream(ids, tools.offered, keeps_reasoning=keeps)

    def render(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation; raises UsageError if the template refuses it."""
        ids = rendered(self._engine.tokenizer, conversation, self._engine.chat_prompt)
        is_closed = conversation.has_shape and not conversation.thinks_first
        tail = self._engine.decode(ids[-_TAIL:]) if is_closed else ""
        if self.markers is not None and opens_thought(tail, self.markers):
            return [*ids, *self.tokenize(f"{self.markers[1]}\n\n", special=False)]
        return ids

    def check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The tokens of a prompt; raises ``UsageError`` for what the engine cannot honour."""
        assert not isinstance(prompt, ChatTask), "the chat template has made ids of it"
        return self._engine.check(prompt, params)

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text."""
        return self._engine.encode(text, special=special)

    def count_thought(self, thought: str, ids: Sequence[int] | None) -> int:
        """The ids before the marker that ends the thought, or all of one that was cut off."""
        begin, end = self._marker_ids or ([], [])
        if not (thought and ids and len(end) == 1):
            return super().count_thought(thought, ids)
        length = ids.index(end[0]) if end[0] in ids else len(ids)
        return length - int([ids[0]] == begin)

    def token_texts(self, prompt: Prompt | Sequence[int], skip_special_tokens: bool) -> TokenText:
        """The texts of the tokens that follow a prompt."""
        assert not isinstance(prompt, ChatTask), "the chat template has made ids of it"
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt[-_CONTEXT:], special=False)
        detokenizer = self._engine.detokenizer(prompt, skip_special_tokens)

        def text(token: int, entry: Logprob | None) -> str | None:
            return None if detokenizer.hides(token) else detokenizer.push([token])

        return text

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids; raises ParameterError if one is outside the vocabulary."""
        return self._engine.decode(ids)

    @property
    def has_ended(self) -> bool:
        """Whether the engine died or was shut down."""
        return self._engine.has_ended

    @property
    def max_length(self) -> int | None:
        """Tokens of the model's context."""
        return self._engine.max_length

    def drafters(self) -> list[DrafterChoice]:
        """The engine's drafters, in the order in which they are asked."""
        return [DrafterChoice(name, True) for name in self._engine.drafters]

    def load(self) -> dict[str, Any]:
        """From the engine's counters, which another thread changes meanwhile."""
        stats, load = self._engine.stats, self._engine.load
        prompts = stats.cached + stats.prefilled
        return {
            "running": load.running,
            "waiting": load.waiting,
            "kv_cache_usage": load.kv_cache_usage,
            "prefix_cache_hit_rate": stats.cached / prompts if prompts else 0.0,
            "num_generated_tokens": stats.decoded,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
        }

    def examples(self) -> list[dict[str, str]]:
        """Questions to try."""
        return self._examples

    def close(self) -> None:
        """End the engine and the reward model."""
        self._engine.shutdown()
        if self._judge is not None:
            self._judge.shutdown()


def template_args(hf: Any, conversation: Conversation) -> dict[str, Any]:
    """The arguments of a tokenizer's chat template, tools among them if it takes tools.

    Raises ParameterError for an argument that clients may not set.
    """
    args = dict(conversation.template_args)
    if args and (reserved := args.keys() & inspect.signature(hf.apply_chat_template).parameters):
        raise ParameterError(
            f"chat_template_kwargs.{min(reserved)} is not allowed",
            "it is set by the server",
            "Give only what the model's own chat template reads",
            param="chat_template_kwargs",
        )
    if conversation.tools.offered and shows_tools(hf):
        args["tools"] = conversation.tools.offered
    return args


def shows_tools(hf: Any) -> bool:
    """Whether a tokenizer's chat template has a place for tools."""
    return "tools" in str(hf.chat_template)


def rendered(
    hf: Any, conversation: Conversation, render: Callable[[Any, dict[str, Any]], Rendered]
) -> Rendered:
    """A conversation in the chat template, which ``render`` applies.

    If it takes no tools, they are in a system message; if it takes no system message either, in
    front of the first message of the user.

    Raises UsageError if the template refuses the conversation or an argument.
    """
    arguments, messages = template_args(hf, conversation), conversation.messages
    if shows_tools(hf) or not (conversation.tools.offered or has_calls(messages)):
        return render(messages, arguments)
    shown = hermes_messages(messages, conversation.tools.offered)
    try:
        return render(shown, arguments)
    except UsageError:
        if shown[0]["role"] != "system" or messages[0]["role"] == "system":
            raise
        return render(merged_system(shown), arguments)


def response_parser(tokenizer: Any) -> ResponseParser | None:
    """Of a tokenizer that has a response template."""
    from forethought.llm.response import ResponseParser

    if getattr(tokenizer, "response_template", None) is None:
        return None
    try:
        return ResponseParser(tokenizer)
    except ParameterError as error:
        log.warning("%s: calls and thoughts are read without it", error)
        return None


def judging(judge: RewardWorker | RewardServerWorker) -> NativeRewardController:
    """Scores steps or whole answers, as the model was trained to."""
    from forethought.rewards.prm_controller import PRMController

    return PRMController.of(judge) if judge.by_step else NativeRewardController()
