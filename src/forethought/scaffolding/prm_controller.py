"""``PRMController``: has the steps of answers judged by a process reward model.

Knows the shape of what such a model reads, and nothing about who runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forethought.errors import ParameterError, UsageError
from forethought.scaffolding.controller import NativeRewardController, has_failed, refuse_arguments
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import BOOL, validated
from forethought.scaffolding.task import ComputeTask, GenerationTask, RewardTask

_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


class PRMController(NativeRewardController):
    """Judges answers step by step: ``scores`` holds one per task, in their order.

    A score is the product, over an answer's steps, of the probability that the step is good, read
    where a separator ends it (Zhang et al. 2025, "The Lessons of Developing Process Reward Models
    in Mathematical Reasoning"). The worker that serves ``REWARD``, such as ``RewardWorker``, finds
    the token ids and the separators' places on its ``RewardTask``. The texts are tokenised beside
    the event loop.

    Where a question or an answer contains the separator itself, the model sees a blank instead.

    Args:
        tokenizer: the reward model's; shared by all clones.
        split_steps: whether an answer is cut at ``step_token``, blank steps left out. If not, it is
            one step between two separators, judged at the second.
        step_token: what stands between two steps.
        separate_token: what the model was trained to read a step's score at.

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
        super().__init__()
        if not tokenizer.chat_template:
            raise UsageError(
                "this reward model cannot read a chat",
                "its tokenizer has no chat template",
                "Give the tokenizer of a process reward model",
            )
        if not step_token:
            raise ParameterError("invalid step_token", "it is empty", "Give what parts two steps")
        self.tokenizer, self.split_steps = tokenizer, validated("split_steps", split_steps, BOOL)
        self.step_token, self.separate_token = step_token, separate_token
        self.separator_id = _only_id(tokenizer, separate_token)

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Judge all tasks at once.

        Raises:
            ParameterError: keyword arguments; there are none. Or a task without question or answer
                in text.
            UsageError: the chat template refuses the messages, or loses the separators.
        """
        refuse_arguments(self, kwargs)
        tokenising = ComputeTask(self._rewards, list(tasks))
        yield [tokenising]
        yield from self._judge(tokenising.result)

    def _rewards(self, tasks: Sequence[GenerationTask | RewardTask]) -> list[RewardTask | None]:
        judged = [None if has_failed(task) else self._reward(task) for task in tasks]
        for reward in judged:
            if reward is None:
                continue
            ids = self._token_ids(reward)
            places = [place for place, token in enumerate(ids) if token == self.separator_id]
            reward.input_tokens = ids
            reward.step_positions = places if self.split_steps else places[-1:]
        return judged

    def _token_ids(self, task: RewardTask) -> list[int]:
        """What the model reads: the chat, with separators in it."""
        if task.input_str is None or task.output_str is None:
            raise ParameterError(
                "a process reward model judges text",
                "the task lacks input_str or output_str",
                "Give the prompt as text, and do not skip the detokenizer",
            )
        answer = self._separated(task.output_str)
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": self._plain(task.input_str)},
            {"role": "assistant", "content": answer},
        ]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:
            raise UsageError(
                "the chat template refuses the messages",
                str(error).strip() or type(error).__name__,
                "Give the tokenizer of a process reward model",
            ) from error
        # Reentrant: __init__ has encoded a text the same way, so this one resets no padding.
        encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)
        ids: list[int] = encoding["input_ids"]
        # A template may leave out the thoughts of an answer, and their steps with them.
        if not 0 < ids.count(self.separator_id) <= answer.count(self.separate_token):
            raise UsageError(
                "the steps of an answer cannot be told apart",
                f"of {answer.count(self.separate_token)} separators the reward model would see "
                f"{ids.count(self.separator_id)}",
                "Give the tokenizer and the separate_token of one process reward model",
            )
        return ids

    def _separated(self, answer: str) -> str:
        separator = self.separate_token
        if not self.split_steps:
            return separator + self._plain(answer) + separator
        steps = [step for step in answer.split(self.step_token) if step.strip()]
        return "".join(self._plain(step) + separator for step in steps or [""])

    def _plain(self, text: str) -> str:
        """The text without separators: an answer must not choose where it is judged."""
        return text.replace(self.separate_token, " ")


def _only_id(tokenizer: Any, text: str) -> int:
    """The id of the one token that ``text`` is; never one that an encoder puts before it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    known = tokenizer.get_vocab().get(text)
    if known is None and len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
        known = ids[0]
    if known is None:
        raise ParameterError(
            "invalid separate_token",
            f"{text!r} is not one token of the tokenizer's vocabulary",
            "Give the token that the process reward model was trained with",
        )
    return int(known)
