"""How process reward models read an answer: the token ids of question and steps, and where the
score of each step is read.

======================  ==========================================================================
``chat``                a chat with a separator token after each step (Qwen2.5-Math-PRM)
``continuation``        the answer as it was generated, after its prompt; a step is a line
``skywork``             question and steps as plain text, read at the line end after each step
                        (Skywork-o1-Open-PRM)
``math_shepherd``       plain text with a tag after each step (Math-Shepherd)
======================  ==========================================================================
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from typing_extensions import override

from forethought.errors import ParameterError, UsageError
from forethought.scaffolding.settings import BOOL, validated

_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


class StepInput(NamedTuple):
    """The input of a process reward model."""

    token_ids: list[int]
    positions: list[int]
    """Where the scores of the steps are read, rising; at least one."""


@runtime_checkable
class StepFormat(Protocol):
    """The format of one kind of process reward model."""

    def encode(self, question: str, answer: str) -> StepInput:
        """The model's input for an answer, whose steps it finds.

        Raises:
            UsageError: the tokenizer cannot write it.
        """


class ChatSteps:
    """A chat in the model's template, with a separator token after each step of the answer.

    Zhang et al. 2025, "The Lessons of Developing Process Reward Models in Mathematical Reasoning".
    A separator inside a question or an answer is replaced by a blank, so that neither can choose
    where it is scored.

    Args:
        tokenizer: the reward model's.
        split_steps: whether an answer is cut at ``step_token``, blank steps left out. If not, it is
            one step between two separators, scored at the second.
        step_token: text between two steps.
        separate_token: the token at which the model was trained to score a step.

    Raises:
        UsageError: the tokenizer has no chat template.
        ParameterError: the separator is not one token of the vocabulary, an empty ``step_token``,
            or ``split_steps`` is not a bool.
    """

    def __init__(
        self,
        tokenizer: Any,
        split_steps: bool = True,
        step_token: str = "\n\n",
        separate_token: str = "<extra_0>",
    ) -> None:
        if not tokenizer.chat_template:
            raise UsageError(
                "this reward model cannot read a chat",
                "its tokenizer has no chat template",
                "Give the tokenizer of a process reward model",
            )
        self._tokenizer, self._split_steps = tokenizer, validated("split_steps", split_steps, BOOL)
        self._step_token = _checked_step_token(step_token)
        self._separator, self._separator_id = separate_token, _only_id(tokenizer, separate_token)

    def encode(self, question: str, answer: str) -> StepInput:
        """Blank steps are left out; ``UsageError`` if the chat template refuses or changes the
        messages.
        """
        content = self._separated(answer)
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": self._plain(question)},
            {"role": "assistant", "content": content},
        ]
        text = _rendered(self._tokenizer, messages)
        # Reentrant: __init__ has encoded a text the same way, so this one resets no padding.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        # A template may leave out the thoughts of an answer, and their steps with them.
        if not 0 < ids.count(self._separator_id) <= content.count(self._separator):
            raise UsageError(
                "the steps of an answer cannot be separated",
                f"of {content.count(self._separator)} separators the reward model would see "
                f"{ids.count(self._separator_id)}",
                "Give the tokenizer and the separate_token of one process reward model",
            )
        positions = [index for index, token in enumerate(ids) if token == self._separator_id]
        return StepInput(ids, positions if self._split_steps else positions[-1:])

    def _separated(self, answer: str) -> str:
        if not self._split_steps:
            return self._separator + self._plain(answer) + self._separator
        steps = _steps(answer, self._step_token)
        return "".join(self._plain(step) + self._separator for step in steps)

    def _plain(self, text: str) -> str:
        return text.replace(self._separator, " ")


class ContinuedSteps(StepFormat):
    """The answer after its prompt, as the generating model wrote it: a step is a line.

    The score of a step is read at the token in which its line ends, and of an unfinished last one
    at the last token. A prompt that the chat template has rendered already is used unchanged; any
    other question is rendered.

    Args:
        tokenizer: the reward model's, with offsets.
        step_token: what ends a step.
    """

    def __init__(self, tokenizer: Any, step_token: str = "\n") -> None:
        self._tokenizer, self._step_token = tokenizer, _checked_step_token(step_token)

    @override
    def encode(self, question: str, answer: str) -> StepInput:
        prompt = self._prompt(question)
        encoding = self._tokenizer(
            prompt + answer, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        starts = [start for start, _ in encoding["offset_mapping"]]
        ends = [len(prompt) + end for end in _step_ends(answer, self._step_token)]
        # A token in which two steps end is read once, for the later one.
        positions = sorted({max(0, bisect_left(starts, end) - 1) for end in ends})
        return StepInput(list(encoding["input_ids"]), positions)

    def _prompt(self, question: str) -> str:
        """The question in the chat template, with the answer begun."""
        if not self._tokenizer.chat_template:
            return question
        mark = "\N{WHITE SQUARE}"
        messages = [{"role": "user", "content": mark}]
        whole = _rendered(self._tokenizer, messages, add_generation_prompt=True)
        before, _, after = whole.partition(mark)
        is_rendered = question.startswith(before) and question.endswith(after)
        return question if is_rendered else before + question + after


class SkyworkSteps(StepFormat):
    """The question in a line, then each step with a line end of its own, at which it is read.

    As SkyworkAI's inference code prepares it: question and steps are tokenised one by one, and a
    beginning-of-sequence token stands in front, if the tokenizer has one.

    Args:
        tokenizer: the reward model's.
        step_token: what ends a step, one token.
    """

    def __init__(self, tokenizer: Any, step_token: str = "\n") -> None:
        self._tokenizer, self._step_token = tokenizer, _checked_step_token(step_token)
        self._end = self._ids(step_token)[-1]

    @override
    def encode(self, question: str, answer: str) -> StepInput:
        """Blank steps are left out."""
        ids = self._ids((self._tokenizer.bos_token or "") + question + "\n")
        positions: list[int] = []
        for step in _steps(answer, self._step_token):
            ids += [*self._ids(step), self._end]
            positions.append(len(ids) - 1)
        return StepInput(ids, positions)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])


class TaggedSteps:
    """Question and steps as one text, with a tag after each step, at which it is read.

    Wang et al. 2023, "Math-Shepherd", arXiv 2312.08935. A tag inside question or answer is
    replaced by a blank.

    Args:
        tokenizer: the reward model's.
        step_token: text between two steps.
        tag: one token, possibly with a blank in front.
    """

    def __init__(self, tokenizer: Any, step_token: str = "\n", tag: str = "ки") -> None:
        self._tokenizer, self._step_token = tokenizer, _checked_step_token(step_token)
        self._tag = tag
        self._tag_id = tokenizer(tag, verbose=False)["input_ids"][-1]

    def encode(self, question: str, answer: str) -> StepInput:
        """Blank steps are left out; ``UsageError`` if the tag is not one token of the tokenizer."""
        steps = [self._plain(step) for step in _steps(answer, self._step_token)]
        text = f"{self._plain(question)} " + "\n".join(f"{step} {self._tag}" for step in steps)
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        positions = [index for index, token in enumerate(ids) if token == self._tag_id]
        if len(positions) != len(steps):
            raise UsageError(
                "the steps of an answer cannot be separated",
                f"of {len(steps)} tags {self._tag!r} the reward model would see {len(positions)}",
                "Give the tokenizer of a process reward model that reads this tag",
            )
        return StepInput(ids, positions)

    def _plain(self, text: str) -> str:
        return text.replace(self._tag, " ")


STEP_FORMATS: Mapping[str, Callable[[Any], StepFormat]] = {
    "chat": ChatSteps,
    "continuation": ContinuedSteps,
    "skywork": SkyworkSteps,
    "math_shepherd": TaggedSteps,
}
"""By name: the format for a tokenizer."""


def _steps(answer: str, step_token: str) -> list[str]:
    """The steps of an answer without blank ones; an answer without any is one empty step."""
    return [step for step in answer.split(step_token) if step.strip()] or [""]


def _step_ends(answer: str, step_token: str) -> list[int]:
    """The end of each step that is not blank, its ``step_token`` included."""
    ends, begin = list[int](), 0
    for end in [
        *(match.end() for match in re.finditer(re.escape(step_token), answer)),
        len(answer),
    ]:
        if answer[begin:end].strip():
            ends.append(end)
        begin = end
    return ends or [len(answer)]


def _checked_step_token(step_token: str) -> str:
    if not step_token:
        raise ParameterError("invalid step_token", "it is empty", "Give text to split at")
    return step_token


def _rendered(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        raise UsageError(
            "the chat template refuses the messages",
            str(error).strip() or type(error).__name__,
            "Give the tokenizer of a process reward model",
        ) from error
    return text


def _only_id(tokenizer: Any, text: str) -> int:
    """The id of the single token ``text``, without the special tokens of the encoder."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    token_id = tokenizer.get_vocab().get(text)
    if token_id is None and len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
        token_id = ids[0]
    if token_id is None:
        raise ParameterError(
            "invalid separate_token",
            f"{text!r} is not one token of the tokenizer's vocabulary",
            "Give the token that the process reward model was trained with",
        )
    return int(token_id)
