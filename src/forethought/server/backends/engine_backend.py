"""The engine as a backend: prompts by the chat template, answers parsed by its response schema."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError, UsageError
from forethought.llm.reasoning import opens_thought
from forethought.llm.tool_format import ANY, with_tools
from forethought.llm.tool_messages import merged_system
from forethought.outputs import Logprob
from forethought.scaffolding.reward_controller import NativeRewardController
from forethought.scaffolding.task import ChatTask
from forethought.server.protocol.logprobs import TokenText
from forethought.server.protocol.tool_calls import Tools

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM
    from forethought.llm.response import ResponseParser, ResponseStream
    from forethought.server.backends.scored_length import ScoredLength
    from forethought.server.metrics import Upstream
    from forethought.workers.reward import RewardWorker
    from forethought.workers.reward_server import RewardServerWorker
from forethought.server.backends.backend import (
    Backend,
    Conversation,
    DrafterChoice,
    NativeGeneration,
    Prompt,
    Prompted,
    PromptEnd,
    drawing,
    worker_table,
)

log = logging.getLogger(__name__)

Rendered = TypeVar("Rendered")
_CONTEXT = 256
"""Characters of a prompt on which the text of the first tokens after it may depend."""
_EFFORTS: Mapping[str, str] = {"none": "low", "minimal": "low", "xhigh": "high"}
"""Efforts that chat templates do not know -> the nearest that they do."""
_TAIL = 64
"""Tokens at the end of a prompt in which a thought may be opened."""


class EngineBackend(Backend):
    """One model on this machine. ``close`` shuts down ``llm`` and ``judge``, a reward model.

    Args:
        name: of the model, for clients.
        examples: questions for the page.
        replicas: that compute, for the metrics; the list grows and shrinks.
        uses_model_sampling: whether requests have the model's own sampling defaults, those of its
            ``generation_config.json``; else neutral ones.
    """

    salted = True

    def __init__(
        self,
        llm: AsyncLLM,
        name: str,
        *,
        judge: RewardWorker | RewardServerWorker | None = None,
        examples: Sequence[Mapping[str, str]] = (),
        uses_model_sampling: bool = True,
        replicas: Sequence[Upstream] = (),
    ) -> None:
        from forethought.workers.local import EngineWorker

        self.llm, self._engine, self._judge, self.servers = llm, llm, judge, replicas
        self.name = name
        if uses_model_sampling:
            self.sampling_defaults = llm.profile.sampling
        worker = EngineWorker(llm, sampling_defaults=drawing(self.sampling_defaults))
        self.workers = worker_table(worker, judge)
        self.reward = None if judge is None else judging(judge)
        self.scores_are_logits = judge is not None and judge.scores_are_logits
        self.scored_length = scored_length(judge)
        self.markers = llm.thinking_markers
        self.thinks = self.markers is not None
        self._marker_ids = [self.tokenize(marker, special=False) for marker in self.markers or ()]
        form = llm.profile.tool_format
        self._responses = response_parser(llm.tokenizer) if form is None else None
        self.tool_format, self.takes_effort = form or ANY, llm.profile.takes_effort
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
        tail, form = self._engine.decode(ids[-_TAIL:]), self.tool_format
        return Prompted(
            ids,
            conversation.question,
            NativeGeneration,
            lambda text: self.render(conversation.asking(text)),
            opens_thought(tail, self.markers),
            reader=self._reader(ids, conversation.tools),
            history=conversation.history,
            begun=form.begun(tail) if form.reads_messages else None,
            shows_special=conversation.tools.are_read and form.has_special_marks,
        )

    def _reader(self, ids: list[int], tools: Tools) -> Callable[[bool], ResponseStream] | None:
        responses = self._responses
        if responses is None or tools.forced:
            return None
        return lambda keeps: responses.stream(ids, tools.offered, keeps_reasoning=keeps)

    def render(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation; raises UsageError if the template refuses it."""
        if self.takes_effort and (effort := conversation.reasoning_effort) is not None:
            args = {"reasoning_effort": _EFFORTS.get(effort, effort), **conversation.template_args}
            conversation = replace(conversation, template_args=args)
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

    @property
    def adapters(self) -> list[str]:
        """Those of the engine."""
        return self._engine.adapters

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


_PROMPT_ENDS: Mapping[PromptEnd, dict[str, bool]] = {
    "answer": {},
    "last": {"add_generation_prompt": False, "continue_final_message": True},
    "nothing": {"add_generation_prompt": False},
}
"""Arguments of a chat template."""


def template_args(hf: Any, conversation: Conversation) -> dict[str, Any]:
    """The further arguments of a tokenizer's chat template.

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
    return args


def rendered(
    hf: Any, conversation: Conversation, render: Callable[[Any, dict[str, Any]], Rendered]
) -> Rendered:
    """A conversation in the chat template, which ``render`` applies.

    If it takes no tools, they are in a system message; if it takes no system message either, in
    front of the first message of the user.

    Raises UsageError if the template refuses the conversation or an argument.
    """
    tools, messages = conversation.tools, conversation.messages
    shown, arguments = with_tools(hf, tools.format, messages, tools.offered)
    arguments |= template_args(hf, conversation) | _PROMPT_ENDS[conversation.prompt_end]
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


def scored_length(judge: RewardWorker | RewardServerWorker | None) -> ScoredLength | None:
    """How much text a reward model reads; None: there is none, or only its server knows."""
    from forethought.llm.tokenizer import Tokenizer
    from forethought.server.backends.scored_length import ScoredLength

    max_length: int | None = getattr(judge, "max_length", None)
    if judge is None or max_length is None:
        return None
    return ScoredLength(Tokenizer(judge.tokenizer), max_length)


def judging(judge: RewardWorker | RewardServerWorker) -> NativeRewardController:
    """Scores steps or whole answers, as the model was trained to."""
    from forethought.rewards.prm_controller import PRMController

    return PRMController.of(judge) if judge.by_step else NativeRewardController()
