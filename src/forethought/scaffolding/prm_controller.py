"""``PRMController``: scores the steps of answers with a process reward model.

It formats the model's input (a chat with a separator token behind each step); a worker runs it.
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
    """Scores answers step by step: ``scores`` holds one per task, in their order.

    A score is the product, over an answer's steps, of the probability that the step is good, read
    where a separator ends it (Zhang et al. 2025, "The Lessons of Developing Process Reward Models
    in Mathematical Reasoning"). The worker of the tag ``REWARD``, such as ``RewardWorker``, reads
    the token ids and the separators' positions from a ``RewardTask``. Texts are tokenised in a
    thread.

    A separator inside a question or an answer is replaced by a blank.

    Args:
        tokenizer: the reward model's; shared by all clones.
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
        super().__init__()
        if not tokenizer.chat_template:
            raise UsageError(
                "this reward model cannot read a chat",
                "its tokenizer has no chat template",
                "Give the tokenizer of a process reward model",
            )
        if not step_token:
            raise ParameterError("invalid step_token", "it is empty", "Give text to split at")
        self.tokenizer, self.split_steps = tokenizer, validated("split_steps", split_steps, BOOL)
        self.step_token, self.separate_token = step_token, separate_token
        self.separator_id = _only_id(tokenizer, separate_token)

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Score all tasks at once.

        Raises:
            ParameterError: keyword arguments; there are none. Or a task without question or answer
                in text.
            UsageError: the chat template refuses the messages, or loses the separators.
        """
        refuse_arguments(self, kwargs)
        tokenising = ComputeTask(self._rewards, list(tasks))
        yield [tokenising]
        yield from self._score(tokenising.result)

    def _rewards(self, tasks: Sequence[GenerationTask | RewardTask]) -> list[RewardTask | None]:
        rewards = [None if has_failed(task) else self._reward(task) for task in tasks]
        for reward in rewards:
            if reward is None:
                continue
            ids = self._token_ids(reward)
            positions = [
                position for position, token in enumerate(ids) if token == self.separator_id
            ]
            reward.input_tokens = ids
            reward.step_positions = positions if self.split_steps else positions[-1:]
        return rewards

    def _token_ids(self, task: RewardTask) -> list[int]:
        """The model's input ids: the chat with separators in it."""
        if task.input_str is None or task.output_str is None:
            raise ParameterError(
                "a process reward model scores text",
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
                "the steps of an answer cannot be separated",
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
        """The text without separators, so that an answer cannot choose where it is scored."""
        return text.replace(self.separate_token, " ")


def _only_id(tokenizer: Any, text: str) -> int:
    """The id of the single token ``text``, without the special tokens of the encoder."""
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
