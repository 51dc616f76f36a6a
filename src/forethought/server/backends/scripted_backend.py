"""Scripted answers, for tests of clients: the backend of ``--worker scripted``, and its files."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError, UsageError
from forethought.llm.tool_messages import as_text
from forethought.scaffolding.worker import Worker
from forethought.server.backends.backend import (
    Backend,
    Conversation,
    NativeGeneration,
    Prompt,
    Prompted,
    worker_table,
)
from forethought.strict_json import read_json
from forethought.workers.scripted import Reply, ScriptedWorker

_OTHER = "*"
_MAX_CALLS = 1024


class ScriptedBackend(Backend):
    """Scripted answers, one token per character; for tests of clients without a model.

    A prompt is the text of the last message. Tool calls are scripted too: ``read_script``.
    """

    markers = ("<think>", "</think>")

    def __init__(self, script: Any, name: str = "scripted") -> None:
        self.worker, self.name = ScriptedWorker(script), name
        calls: Any = deque(maxlen=_MAX_CALLS)
        self.worker.calls = calls  # a server runs for long
        self.workers: Mapping[Any, Worker] = worker_table(self.worker, None)

    def open(self, conversation: Conversation) -> Prompted:
        """The text of the last message."""
        last = str(conversation.messages[-1].get("content") or "")
        return Prompted(last, conversation.question, NativeGeneration, lambda text: text)

    def check(self, prompt: Prompt, params: SamplingParams) -> Prompt:
        """Raises ``ParameterError``: log-probabilities are asked for, and a script has none."""
        if params.logprobs is not None:
            raise ParameterError(
                "logprobs are not supported here",
                "the answers of a script have no probabilities",
                "Leave them out",
                param="logprobs",
            )
        return prompt

    def render(self, conversation: Conversation) -> list[int]:
        """The ids of the last message."""
        return self.tokenize(str(conversation.messages[-1].get("content") or ""))

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """One token per character."""
        return [ord(character) for character in text]

    def detokenize(self, ids: Sequence[int]) -> str:
        """One character per token."""
        if any(token > 0x10FFFF for token in ids):
            raise ParameterError("invalid tokens", "they are no characters", "", param="tokens")
        return "".join(map(chr, ids))


def read_script(path: Path) -> Any:
    """The script in a JSON or YAML file; raises UsageError if it is not one.

    It is a list of answers in order of asking, or answers (or lists of them) by prompt, ``*`` being
    any other prompt. An answer is a text, or a mapping with ``text``, ``tool_calls`` (each with
    ``name`` and ``arguments``), ``finish_reason``, ``delay``, ``seconds_per_token`` and ``error``.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = read_json(text) if path.suffix == ".json" else _yaml(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the script in {path}", str(error), "") from error
    if isinstance(value, list):
        return _ordered([_answer(path, answer) for answer in value], "any prompt")
    if not isinstance(value, dict):
        raise UsageError(f"no script in {path}", "it holds no list and no mapping", "")
    table = {
        str(prompt): _ordered(
            [_answer(path, one) for one in (answer if isinstance(answer, list) else [answer])],
            str(prompt),
            repeats=not isinstance(answer, list),
        )
        for prompt, answer in value.items()
    }

    def script(prompt: str, index: int) -> Reply:
        answers = table.get(prompt) or table.get(_OTHER)
        if answers is None:
            raise UsageError("the script has no answer", f"for the prompt {prompt!r:.200}")
        reply: Reply = answers(prompt, index)
        return reply

    return script


def _ordered(replies: Sequence[Reply], what: str, repeats: bool = False) -> Any:
    """A script with the replies in order of asking; ``repeats`` the last one."""
    numbers = itertools.count()

    def script(prompt: str, index: int) -> Reply:
        number = 0 if repeats else next(numbers)
        if number >= len(replies):
            raise UsageError("the script has no more answers", f"for {what:.200}")
        return replies[number]

    return script


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _answer(path: Path, answer: Any) -> Reply:
    if isinstance(answer, str):
        return Reply(answer)
    fields = dict(answer) if isinstance(answer, dict) else {"": answer}
    calls = fields.pop("tool_calls", [])
    error = fields.pop("error", None)
    if error is not None:
        fields["error"] = RuntimeError(str(error))
    try:
        text = "".join(
            [fields.pop("text", ""), *(as_text(c["name"], c["arguments"]) for c in calls)]
        )
        return Reply(text, **fields)
    except (TypeError, KeyError) as problem:
        raise UsageError(
            f"invalid answer in {path}", f"{answer!r:.200}: {problem}", "Give text, or a mapping"
        ) from problem
