"""Sleep-time compute: think about a context before the questions come, once for all of them.

::

    offline   context | "What follows from it?" | thought        computed once, saved as a snapshot
    later                                               \\ question 1 | answer 1
                                                         \\ question 2 | answer 2

At sleep time the model draws inferences from a context whose questions are not known yet; several
thoughts may be drawn side by side and are concatenated. At test time each question continues the
context and its thoughts, so that its own answer can be short. The sleep-time tokens are divided
among all questions about the context.

The parallel thoughts and the price of a token at test time, ten times that of one at sleep time,
are the paper's. Its thoughts replace the context, and here they follow it, so that one sequence
holds both; the texts of the prompts are ours.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from forethought.errors import ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import ComputeTask
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    NativeGenerationController,
    answer_by,
    refuse_arguments,
    side_by_side,
)
from forethought.scaffolding.execution_scope import num_generated
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.session_task import RestoreSessionTask, SaveSessionTask
from forethought.scaffolding.settings import (
    FileName,
    PositiveInt,
    Text,
    Words,
    required,
    setting,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask

SLEEP_PROMPT = (
    "\n\nQuestions about the text above will be asked later. Think ahead: work out everything that "
    "follows from it and that they may need, each with its result.\n\nInferences: "
)
TEST_TIME_PRICE = 10.0
"""What a token at test time costs, in tokens at sleep time (the paper's t)."""


@dataclass(eq=False)
class SleepMemory:
    """The thoughts about a context, and what they and the questions have cost so far.

    One memory is shared by all requests of a controller, and by all controllers that take it.
    """

    text: str | None = None
    """The context and the thoughts about it, as each question continues them; None: not yet."""
    sleep_tokens: int = 0
    """Generated for the thoughts."""
    num_questions: int = 0
    test_tokens: int = 0
    """Generated for the answers to them."""
    thinking: Future[None] | None = field(default=None, repr=False)
    """Done when the request that is thinking now has ended."""
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a pickle, which no request is filling."""
        return {**vars(self), "thinking": None, "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = threading.Lock()

    def cost_per_question(self, test_time_price: float = TEST_TIME_PRICE) -> float:
        """The cost of a question, in sleep-time tokens: its own, and its part of the thoughts."""
        return (self.sleep_tokens + test_time_price * self.test_tokens) / max(1, self.num_questions)

    def claim(self) -> Future[None] | None:
        """None: the caller is to think, and calls ``release``. Else what to wait for first."""
        with self.lock:
            if self.thinking is not None:
                return self.thinking
            self.thinking = Future()
            return None

    def release(self) -> None:
        """Called by the one who has claimed it, after it has thought or failed."""
        with self.lock:
            thinking, self.thinking = self.thinking, None
        assert thinking is not None, "it was claimed"
        thinking.set_result(None)


@with_settings
class SleepTimeController(Controller):
    """Questions about a context that the model has thought about before.

    The prompt is the question. The first request thinks, unless ``snapshot`` has the thoughts of an
    earlier process; the others wait for it and share them. ``generate("", sleep_only=True)`` thinks
    and answers nothing: its output is what the questions will continue.
    ``customized_result_fields["sleep_time"]`` tells whether the thoughts are ``"new"``, from the
    ``"memory"`` or from the ``"snapshot"`` (``origin``), and how many tokens were generated for
    them in this request (``sleep_tokens``). ``memory.cost_per_question()`` is what they cost so far
    per question.
    """

    paper = (
        'Lin et al., "Sleep-time Compute: Beyond Inference Scaling at Test-time", 2025. arXiv '
        "2504.13171"
    )

    conversation = ConversationForm.NONE
    joins_texts = True

    clone_shares = ("memory", "_memory")

    generation_controller: Controller = required("Answers each question.")
    context: Text = required("What the questions will be about.")
    anticipated: Words = setting((), "Questions to expect, for the thoughts to prepare.")
    sleep_tokens: PositiveInt = setting(512, "Length of a thought at most.")
    num_thoughts: PositiveInt = setting(
        1, "Thoughts drawn side by side, which are put one after the other."
    )
    snapshot: FileName | None = setting(
        None,
        "Name under which tokens and KV of context and thoughts are saved; a hash of the "
        "context and of the prompts is added to it. Needs a worker with snapshots "
        "(EngineWorker, with snapshot_dir). None: context and thoughts are continued as text, "
        "over the worker's prefix cache.",
    )
    _: KW_ONLY
    sleep_prompt: str = setting(SLEEP_PROMPT, "Text after the context that asks for the thoughts.")
    question_prefix: str = setting("\n\nQuestion: ", "Text between the thoughts and the question.")
    answer_prefix: str = setting("\n\nAnswer: ", "Text between the question and its answer.")
    memory: SleepMemory | None = setting(
        None, "What was thought before, as another controller's `memory`; None: nothing."
    )

    def __post_init__(self) -> None:
        self._memory = self.memory = self.memory or SleepMemory()
        self._thinker = NativeGenerationController()

    def fan_out(self) -> int:
        """The thoughts about the context, and the answer."""
        return 1 + self.num_thoughts

    def process(
        self, tasks: Sequence[GenerationTask], *, sleep_only: bool = False, **kwargs: Any
    ) -> Process:
        """Answer the tasks' prompts side by side; with ``sleep_only`` only think."""
        refuse_arguments(self, kwargs)
        if any(task.input_str is None for task in tasks):
            raise ParameterError(
                "sleep_time appends questions to a text",
                "the prompt is token ids",
                "Give the question as text (forethought generate: --raw)",
            )
        details = yield from self._fill_memory(tasks[0])
        yield Stage("thought", fields=details)
        if sleep_only:
            for task in tasks:
                task.result = self._memory.text
        else:
            before = num_generated()
            yield from side_by_side(_Answer(self), tasks, self._answer)
            self._memory.num_questions += len(tasks)
            self._memory.test_tokens += num_generated() - before
        for task in tasks:
            task.customized_result_fields["sleep_time"] = dict(details)

    # ---- sleep time ---------------------------------------------------------------------------

    def _fill_memory(self, task: GenerationTask) -> Process:
        """Wait until there are thoughts; returns the details for ``customized_result_fields``."""
        while self._memory.text is None:
            busy = self._memory.claim()
            if busy is not None:
                yield [ComputeTask(_wait, busy)]
                continue
            try:
                return (yield from self._sleep(task))
            finally:
                self._memory.release()
        return {"origin": "memory", "sleep_tokens": 0}

    def _sleep(self, task: GenerationTask) -> Process:
        if self.snapshot is not None:
            restored = yield from self._restore()
            if restored.found:
                self._memory.text = restored.text
                return {"origin": "snapshot", "sleep_tokens": 0}
        prompt = self._prompt()
        prompt.priority = task.priority
        sampling.carry(task, prompt, sampling.OF_ASIDES)
        sampling.choose(prompt, {"max_tokens": self.sleep_tokens})
        thoughts = prompt.samples_of(self.num_thoughts)
        yield from self._thinker.process(thoughts)
        first, *others = thoughts
        suffix = "".join(f"\n\n{thought.output_str or ''}" for thought in others)
        if self.snapshot is not None:
            name = self._name()
            yield [SaveSessionTask(first.worker_tag, source=first, suffix=suffix, name=name)]
        num_tokens = sum(thought.num_generated for thought in thoughts)
        self._memory.sleep_tokens += num_tokens
        self._memory.text = f"{first.input_str}{first.output_str or ''}{suffix}"
        return {"origin": "new", "sleep_tokens": num_tokens}

    def _prompt(self) -> GenerationTask:
        expected = "".join(f"\n- {question}" for question in self.anticipated)
        listed = f"\n\nQuestions to expect:{expected}" if expected else ""
        return GenerationTask(input_str=f"{self.context}{listed}{self.sleep_prompt}", is_aside=True)

    def _restore(self) -> Process:
        restoring = RestoreSessionTask(self._thinker.WorkerTag.GENERATION, name=self._name())
        yield [restoring]
        return restoring

    def _name(self) -> str:
        """The snapshot's name, which depends on context and prompts."""
        key = f"{self._prompt().input_str}\0{self.num_thoughts}\0{self.sleep_tokens}"
        digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
        return f"{self.snapshot}-{digest}"

    # ---- test time ----------------------------------------------------------------------------

    def _answer(self, task: GenerationTask) -> Process:
        suffix = f"{self.question_prefix}{task.input_str}{self.answer_prefix}"
        if self.snapshot is None:
            question = task.copy()
            question.input_str = f"{self._memory.text}{suffix}"
        else:
            restored = yield from self._restore()
            question = restored.session.fork(suffix)
            sampling.carry(task, question)
            question.streaming_output_flag = task.streaming_output_flag
            question.priority = task.priority
        question.question = task.question_text
        yield from answer_by(self.generation_controller, task, question)


class _Answer:
    """The part of the controller that a branch runs: one question, once there are thoughts."""

    def __init__(self, controller: SleepTimeController) -> None:
        self._controller = controller

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        yield from self._controller._answer(tasks[0])


async def _wait(busy: Future[None]) -> None:
    await asyncio.shield(asyncio.wrap_future(busy))
