"""The interface of what answers requests: the engine, other servers, or a script.

A ``Backend`` has the workers for all tasks of all methods. ``open`` turns a conversation into a
``Prompted``: a prompt that methods take, and what generates inside of them.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from forethought import methods
from forethought.config.sampling import SamplingParams
from forethought.errors import UsageError
from forethought.llm.tool_format import ANY, ToolFormat
from forethought.scaffolding.base_task import RewardTask, Task, TaskStatus
from forethought.scaffolding.controller import Controller, NativeGenerationController
from forethought.scaffolding.messages import RoleMessage
from forethought.scaffolding.reward_controller import NativeRewardController
from forethought.scaffolding.task import ChatTask
from forethought.scaffolding.worker import Worker
from forethought.server.protocol.logprobs import TokenText, texts_of_entries
from forethought.server.protocol.tool_calls import Tools

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM
    from forethought.llm.response import ResponseStream
    from forethought.server.backends.scored_length import ScoredLength

Prompt = str | list[int] | ChatTask
"""Of a method."""
Innermost = Callable[[bool], Controller]
"""Makes what generates inside methods; the argument is whether it streams."""


class ClientMessage(RoleMessage):
    """A message as the client has sent it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(str(values["role"]), values.get("content"))
        self._values = dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The message, with all its fields."""
        return self._values


PromptEnd = Literal["answer", "last", "nothing"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to be answered: messages and tools in OpenAI's form.

    Attributes:
        template_args: further arguments of the chat template.
        has_shape: a grammar holds for the answer.
        thinks_first: the answer under the grammar begins after a thought; else at once.
        schema_fields: name, description and ``strict`` of the client's schema, for other servers.
        reasoning_effort: how much to think, for other servers and chat templates that read it;
            None: left to them.
        max_tokens_field: the name that the client gives the limit of tokens, for other servers.
        prompt_end: what the prompt ends with: the beginning of an "answer", the "last" message,
            which the answer continues, or "nothing" after it.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Tools = field(default_factory=Tools)
    template_args: Mapping[str, Any] = field(default_factory=dict)
    has_shape: bool = False
    thinks_first: bool = False
    schema_fields: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    prompt_end: PromptEnd = "answer"

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
        begun: the beginning of the answer that the prompt has, where answers are read as whole
            messages (``ToolFormat.reads_messages``); None: they are not.
        shows_special: whether special tokens may mark calls or messages in the answer's text.
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
    begun: str | None = None
    shows_special: bool = False

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
        scores_are_logits: whether the sigmoid of a reward model's score is a probability.
        scored_length: how much text the reward model reads; None: not known here.
        markers: what opens and closes the model's thoughts; None: unknown, or none.
        thinks: whether the model thinks; None: unknown.
        salted: whether prefixes are cached apart for different salts.
        llm: the engine; None: there is none here.
        servers: the upstream servers.
        passes_chats_on: conversations go to upstream servers as they are, which offer the tools,
            force the calls and read ``reasoning_effort``.
        tool_format: how the model writes calls.
        takes_effort: the chat template reads ``reasoning_effort``.
        sampling_defaults: sampling fields of requests that do not set them.
    """

    name: str
    workers: Mapping[Any, Worker]
    reward: Controller | None = None
    scores_are_logits: bool = False
    scored_length: ScoredLength | None = None
    markers: tuple[str, str] | None = None
    thinks: bool | None = None
    salted: bool = False
    llm: AsyncLLM | None = None
    servers: Sequence[Any] = ()
    passes_chats_on: bool = False
    tool_format: ToolFormat = ANY
    takes_effort: bool = False
    sampling_defaults: Mapping[str, float] = MappingProxyType({})

    async def prepare(self) -> None:
        """Learn what ``open`` needs, if it is not known yet."""

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the LoRA adapters that requests may choose; they may change."""
        return ()

    @abc.abstractmethod
    def open(self, conversation: Conversation) -> Prompted:
        """The prompt of a conversation; from any thread."""

    @abc.abstractmethod
    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text, with the special tokens around a whole text or without."""

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


def drawing(defaults: Mapping[str, float]) -> dict[str, float]:
    """Sampling defaults for several samples of a prompt, which would be equal if greedy."""
    return {name: v for name, v in defaults.items() if (name, v) != ("temperature", 0.0)}


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
