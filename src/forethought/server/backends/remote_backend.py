r"""Other servers that answer: conversations go to them as they are, or as text to be continued.

::

    conversation --> chat of the upstream server                         (ChatTask)
                 \-> the model's chat template, here --> completions     (with a tokenizer)

A chat is answered whole, so it serves methods that draw whole answers, and what they ask further is
a message after it. A completion can be continued and forked, as other methods do. What only the
upstream server can do makes a chat: forced calls, shapes of the output, ``reasoning_effort``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forethought import methods
from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.errors import ParameterError, UsageError
from forethought.llm.reasoning import opens_thought
from forethought.llm.tool_format import tool_format_of
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import ConversationForm
from forethought.scaffolding.task import ChatTask
from forethought.scaffolding.worker import Worker
from forethought.server.backends.backend import (
    Backend,
    ClientMessage,
    Conversation,
    NativeGeneration,
    Prompt,
    Prompted,
    worker_table,
)
from forethought.server.backends.engine_backend import (
    judging,
    rendered,
    response_parser,
    scored_length,
)
from forethought.workers.openai import EXTENSIONS

if TYPE_CHECKING:
    from forethought.llm.response import ResponseStream
    from forethought.llm.tokenizer import Tokenizer
    from forethought.workers.reward import RewardWorker
    from forethought.workers.reward_server import RewardServerWorker
    from forethought.workers.upstream import UpstreamWorker

_FIELDS, _RESTART = "--upstream-fields", "start this server with"
_CLOSING = f"{_RESTART} --tokenizer, of a model whose chat template opens the thought"
_MAX_LENGTHS = 1024
"""Texts whose numbers of tokens are remembered."""
_TAIL = 256
"""Characters at the end of a prompt in which a thought may be opened."""


class RemoteBackend(Backend):
    """Other servers that speak OpenAI's API, through a worker without torch.

    Args:
        worker: sends the requests; shut down by ``close``.
        name: of the model there.
        markers: what opens and closes the model's thoughts, if there is no tokenizer.
        tokenizer: of the model there, with its chat template; None: conversations are sent as
            chats.
        judge: a reward model; shut down by ``close``.
        tool_format: how the model writes calls; None: as the tokenizer's chat template does.
    """

    passes_chats_on = True

    def __init__(
        self,
        worker: UpstreamWorker,
        name: str,
        markers: tuple[str, str] | None = ("<think>", "</think>"),
        tokenizer: Tokenizer | None = None,
        judge: RewardWorker | RewardServerWorker | None = None,
        tool_format: str | None = None,
    ) -> None:
        self.worker, self.name, self.markers = worker, name, markers
        if tokenizer is not None and worker.thinks is None:
            worker.thinks = tokenizer.thinking_markers is not None
        if tokenizer is not None and tokenizer.thinking_markers is not None:
            self.markers = worker.thinking_markers = tokenizer.thinking_markers
        self.thinks = worker.thinks
        self._judge, self.reward = judge, None if judge is None else judging(judge)
        self.scores_are_logits = judge is not None and judge.scores_are_logits
        self.scored_length = scored_length(judge)
        self.servers, self._tokenizer = worker.servers, tokenizer
        self.workers: Mapping[Any, Worker] = worker_table(worker, judge)
        takes_special = "skip_special_tokens" in worker.extensions
        form = None if tokenizer is None else tool_format_of(tokenizer.hf, tool_format)
        self._responses = None
        if form is not None and (takes_special or not form.has_special_marks):
            self.tool_format = form
        elif form is None and tokenizer is not None and takes_special:
            self._responses = response_parser(tokenizer.hf)
        self._has_asked_length = False
        self._lengths: dict[tuple[int, int], int] = {}
        """Tokens of texts, by hash and number of characters."""
        worker.prompt_lengths.count = self.count
        if tokenizer is not None:
            worker.num_left = self._num_left

    def warm_up(self) -> None:
        """Have the chat template compiled, and the clients of the servers made."""
        super().warm_up()
        self.worker.upstream.open_clients()

    async def prepare(self) -> None:
        """Ask the servers, once, for the context of the model."""
        if self._tokenizer is not None:
            await self._ask_length()

    def open(self, conversation: Conversation) -> Prompted:
        """The text that the chat template makes, or a chat."""
        is_chat = conversation.tools.forced or conversation.has_shape
        if self._tokenizer is None or is_chat or conversation.reasoning_effort is not None:
            return _chat_prompt(conversation)
        ids = self.render(conversation)
        text, form = self.as_text(ids), self.tool_format
        return Prompted(
            text,
            conversation.question,
            NativeGeneration,
            lambda text: self.as_text(self.render(conversation.asking(text))),
            opens_thought(text[-_TAIL:], self.markers),
            reader=self._reader(ids, conversation),
            history=conversation.history,
            begun=form.begun(text[-_TAIL:]) if form.reads_messages else None,
            shows_special=conversation.tools.are_read and form.has_special_marks,
        )

    def _reader(
        self, ids: list[int], conversation: Conversation
    ) -> Callable[[bool], ResponseStream] | None:
        responses, tools = self._responses, conversation.tools.offered
        if responses is None:
            return None
        return lambda keeps: responses.stream(ids, tools, keeps_reasoning=keeps)

    async def _ask_length(self) -> None:
        """Ask the servers, once, for the context of the model."""
        if self._has_asked_length or self.max_length is not None:
            return
        self._has_asked_length = await self.worker.upstream.ask_lengths()

    def _num_left(self, prompt: str | Sequence[int]) -> int | None:
        """Tokens that the context leaves for a completion; None: not known."""
        if self.max_length is None:
            return None
        length = self._length_of(prompt) if isinstance(prompt, str) else len(prompt)
        return max(1, self.max_length - length)

    def _length_of(self, text: str) -> int:
        """Tokens of a text. ``check`` keeps that of a request's prompt, so that the event loop does
        not tokenise it again for each generation.
        """
        key = hash(text), len(text)
        length = self._lengths.get(key)
        if length is None:
            if len(self._lengths) >= _MAX_LENGTHS:
                self._lengths.clear()
            length = self._lengths[key] = len(self.tokenize(text))
        return length

    def check(self, prompt: Prompt, params: SamplingParams) -> Prompt:
        """Raise ``ContextLengthError`` for a text that is certain to be too long."""
        if self._tokenizer is not None and self.max_length is not None and isinstance(prompt, str):
            self._tokenizer.check_length(prompt, self.max_length)
            self._length_of(prompt)
        return prompt

    @property
    def max_length(self) -> int | None:
        """Tokens of the model's context, if its servers have reported it."""
        return self.worker.upstream.max_lengths.get(self.name)

    @property
    def takes_text(self) -> bool:
        """Whether there is a tokenizer, with its chat template."""
        return self._tokenizer is not None

    def missing(self, method: str) -> str | None:
        """A tokenizer, for methods that continue a text; a field, for those that limit thoughts;
        or an engine, for those that share pages."""
        if method == "hogwild":
            return "it needs the sequences of the built-in engine; see hogwild_turns"
        has_field = self.worker.thinking_field is not None
        is_named = method in methods.names()  # a controller inside of one need not be
        form = methods.describe(method).conversation if is_named else None
        if form == ConversationForm.TEXT and self._tokenizer is None:
            return f"it continues a text, which a chat does not take: {_RESTART} --tokenizer"
        if method == "no_thinking":
            if self._tokenizer is None and not has_field:
                return f"it leaves the thought out: {_CLOSING}, or with --thinking-field"
            if self._tokenizer is not None and (has_field or not self._closes_thoughts):
                return f"it closes a thought itself: {_CLOSING}, and without --thinking-field"
        if method == "budget_vote" and not (has_field or self._closes_thoughts):
            return f"it limits thoughts: {_CLOSING}, or with --thinking-field"
        return None

    @cached_property
    def _closes_thoughts(self) -> bool:
        """Whether a thought can be closed here: the prompts of conversations open one."""
        if self._tokenizer is None:
            return False
        prompt = self.as_text(self.render(Conversation([{"role": "user", "content": "?"}])))
        return opens_thought(prompt[-_TAIL:], self.markers)

    def task_params(self, prompted: Prompted, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """``params`` without ``speculation`` that asks for no drafts: there are none here.

        Raises ParameterError for a field that the servers are not known to take.
        """
        fields = dict(params)
        speculation = fields.get("speculation")
        if speculation is not None and (
            not speculation.enabled or speculation == SpeculationParams()
        ):
            del fields["speculation"]
        for name, value in fields.items():
            is_neutral = value in (sampling.DEFAULTS[name], sampling.NEUTRAL.get(name))
            if not is_neutral and (why := self._refusal(name, value, prompted)):
                raise ParameterError(*why, param=name)
        return fields

    def _refusal(self, name: str, value: Any, prompted: Prompted) -> tuple[str, str, str] | None:
        """Why the servers cannot be sent a field: what, why and what to do; None if they can."""
        is_completion = not isinstance(prompted.prompt, ChatTask)
        if name in EXTENSIONS and name not in (*self.worker.extensions, "guided_decoding"):
            why = "OpenAI's API has no such field, and the upstream server is not known to take it"
            return f"{name} is not supported here", why, f"If it does, {_RESTART} {_FIELDS} {name}"
        if name == "guided_decoding":
            return self._shape_refusal(value, is_completion)
        if name == "thinking_budget" and not is_completion and self.worker.thinking_field is None:
            return (
                "thinking_budget is not supported here",
                "the upstream server has a field of its own for it, which is not known",
                f"Use reasoning_effort, or {_RESTART} --thinking-field NAME",
            )
        if name == "thinking_soft":
            return "thinking_soft is not supported here", "another server runs the model", ""
        if name == "speculation":
            field = "speculation" if value.prediction is None else "prediction"
            return f"{field} is not supported here", "another server drafts", "Leave it out"
        return None

    def _shape_refusal(
        self, shape: GuidedDecodingParams, is_completion: bool
    ) -> tuple[str, str, str] | None:
        """As ``_refusal``, for the shape of the output."""
        if shape.json is None and not shape.json_object:
            why = "there is no field for it that servers agree on"
            return f"structured_outputs with {shape.kind} is not supported here", why, "Use json"
        if is_completion and "guided_decoding" not in self.worker.extensions:
            fix = f"Ask a chat; or, if the upstream server takes it, {_RESTART} {_FIELDS}"
            why = "completions have no response_format in OpenAI's API"
            return "structured_outputs is not supported here", why, f"{fix} response_format"
        return None

    def render(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation; raises UsageError without a tokenizer, or as its template."""
        tokenizer = self._own_tokenizer()
        text = rendered(tokenizer.hf, conversation, tokenizer.render)
        if self.max_length is not None:
            tokenizer.check_length(text, self.max_length)
        return tokenizer.encode_more(text)

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; raises UsageError if there is no tokenizer here."""
        tokenizer = self._own_tokenizer()
        return tokenizer.encode(text) if special else tokenizer.encode_more(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids; raises UsageError without a tokenizer, or for an id it does not have."""
        tokenizer = self._own_tokenizer()
        if any(token >= len(tokenizer.hf) for token in ids):
            why = "they are outside the vocabulary"
            raise ParameterError("invalid tokens", why, "", param="tokens")
        return tokenizer.decode(ids, skip_special_tokens=False)

    def count(self, text: str) -> int:
        """Without a tokenizer: about one token for four characters."""
        return -(-len(text) // 4) if self._tokenizer is None else super().count(text)

    def length(self, prompt: str | Sequence[int]) -> int:
        """Without a tokenizer: about one token for four characters."""
        has_no_count = self._tokenizer is None and isinstance(prompt, str)
        return self.count(str(prompt)) if has_no_count else super().length(prompt)

    def _own_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            fix = "Ask that one, or start this server with --tokenizer"
            raise UsageError("no tokenizer here", "another server runs the model", fix)
        return self._tokenizer

    def close(self) -> None:
        """End the worker and the reward model."""
        self.worker.shutdown()
        if self._judge is not None:
            self._judge.shutdown()


def _chat_prompt(conversation: Conversation) -> Prompted:
    """The conversation as a chat of the upstream server."""
    if conversation.template_args:
        raise ParameterError(
            "chat_template_kwargs are not supported here",
            "another server has the template",
            "",
            param="chat_template_kwargs",
        )
    if conversation.prompt_end != "answer":
        is_last = conversation.prompt_end == "last"
        name = "continue_final_message" if is_last else "add_generation_prompt"
        why = "another server has the template"
        raise ParameterError(f"{name} is not supported here", why, "", param=name)
    return Prompted(
        _chat(conversation),
        conversation.question,
        NativeGeneration,
        lambda text: _chat(conversation.asking(text)),
    )


def _chat(conversation: Conversation) -> ChatTask:
    tools, chat = conversation.tools, ChatTask()
    chat.messages = [ClientMessage(message) for message in conversation.messages]
    if tools.offered:
        chat.tools, chat.tool_choice = list(tools.tools), tools.choice_field
        chat.parallel_tool_calls = None if tools.several else False
    chat.schema_fields = conversation.schema_fields
    chat.reasoning_effort = conversation.reasoning_effort
    chat.max_tokens_field = conversation.max_tokens_field
    return chat
