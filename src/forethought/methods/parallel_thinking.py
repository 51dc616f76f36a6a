"""Parallel reasoning: the model itself spawns threads, which think side by side and are joined.

Two formats of spawn and join, and others by ``ThreadFormat``. In ``"threadweaver"`` a thread goes
on from the whole text so far, in a fork of the main thread; none sees the others::

    ... <Parallel><Outlines><Outline>1: 6 x 6</Outline><Outline>2: 9 x 9</Outline></Outlines>
        <Thread>1: 36.</Thread>       \\ forks of the main thread, generated at the same time
        <Thread>2: 81.</Thread>       /
        </Parallel> The sum is 117.   the main thread, after the texts of all threads

In ``"apr"`` a thread sees nothing but the message that it is spawned with, and the main thread
nothing but the message that it returns::

    ... <spawn><msg>What is 6 x 6?</msg><msg>What is 9 x 9?</msg></spawn>
        <join>36</join><join>81</join> The sum is 117.

By default a join is prefilled as text: in causal attention the keys and values of a token depend on
all tokens before it, and a thread was computed without the threads that come before it in the
joined text. Only the first thread has none before it: the main thread goes on from its sequence,
and prefills the others. With ``join="pages"`` the main thread reads the threads' keys and values
where they are, each as it was computed, at positions that are rotated (``AttentionGroup``): only
the closing tags are prefilled.

The tags of ``"threadweaver"`` are those of its authors. APR's paper writes spawn(msgs) and
join(msg), and its Countdown model has tags of that task; those here are ours. A model has to be
trained to spawn. With ``max_depth`` above 1 threads spawn in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal

from forethought.errors import BudgetExceeded, ParameterError
from forethought.methods.parts.threads import ThreadFormat, ThreadProgress, format_of
from forethought.scaffolding import sampling
from forethought.scaffolding.attention_group import AttentionGroup
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    expect_text,
    refuse_arguments,
    side_by_side,
)
from forethought.scaffolding.parallel import ParallelProcess, Process
from forethought.scaffolding.result import Delta, Stage
from forethought.scaffolding.settings import NonNegativeInt, PositiveInt, setting, with_settings
from forethought.scaffolding.task import GenerationTask

_MANY = 1 << 32
"""Threads beyond which they are not counted."""


@with_settings
class ParallelThinkingController(Controller):
    """Threads that the model spawns as it thinks, run side by side and joined (APR, ThreadWeaver).

    ``max_tokens`` of the request bounds the tokens that the main thread generates; its output also
    holds the texts that the threads returned. A spawn without a thread, or with more than
    ``max_threads``, is left to the main thread, which goes on after it.
    ``customized_result_fields["parallel_thinking"]`` holds the number of threads of each spawn
    (``spawns``), the tokens that threads generated (``thread_tokens``), those generated one after
    the other, with the longest thread of each spawn (``longest_path``), those that joins inserted
    and prefilled (``join_tokens``; None on a server, which does not tell), and whether the budget
    ended the output (``budget_ended``).

    Raises:
        UnknownNameError: there is no such format.
        ParameterError: another setting of the wrong kind.
    """

    paper = (
        'Pan et al., "Learning Adaptive Parallel Reasoning with Language Models", and Lian et '
        'al., "ThreadWeaver: Adaptive Threading for Efficient Parallel Reasoning in Language '
        'Models", both 2025. arXiv 2504.15466 and 2512.07843'
    )

    conversation = ConversationForm.TEXT

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation_with_parallel_thinking"

    thread_format: str | ThreadFormat = setting(
        "threadweaver", '`"threadweaver"`, `"apr"` or a `ThreadFormat`.'
    )
    thread_tokens: PositiveInt | None = setting(
        None, "Most tokens that a thread generates; None: no limit of its own."
    )
    max_threads: PositiveInt = setting(8, "Of one spawn.")
    max_spawns: NonNegativeInt = setting(
        16,
        "Of each thread; after the last one, refused ones included, it goes on alone.",
    )
    max_depth: PositiveInt = setting(
        1, "Levels of threads: 1, the main thread alone spawns; 2, its threads do, too."
    )
    join: Literal["text", "pages"] = setting(
        "text",
        '`"text"`, or `"pages"` on the built-in engine, for formats whose threads go on from '
        "the main thread and return all that they write.",
    )
    streaming: bool = setting(
        False,
        "Stream the main thread with what it joins as it comes, and to observers what each thread "
        "writes.",
    )

    def __post_init__(self) -> None:
        self.format = format_of(self.thread_format)
        if self.join == "pages" and (not self.format.is_whole or self.max_depth > 1):
            raise ParameterError(
                "invalid join",
                "only threads that go on from the main thread and return all that they write, and "
                "that spawn no others, can be read in their pages",
                'Set join="text"',
            )

    def fan_out(self) -> int:
        """The threads of all levels, which go on after each spawn."""
        spawned, total = self.max_spawns * self.max_threads, 1
        for _ in range(self.max_depth if spawned else 0):
            total = 1 + spawned * total
            if total > _MANY:
                break
        return total + self.max_spawns

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Think about the tasks side by side."""
        refuse_arguments(self, kwargs)
        for task in tasks:
            sampling.refuse(task, sampling.OF_ONE_PART, "parallel_thinking", "Leave it out")
            expect_text("parallel_thinking", task, "it reads the tags in the text")
        yield from side_by_side(self, tasks, self._solve)

    def _solve(self, task: GenerationTask) -> Process:
        first = task.copy()
        first.worker_tag = self.WorkerTag.GENERATION
        first.streaming_output_flag = task.streaming_output_flag or self.streaming
        main, budget_ended = ThreadProgress(first, task.max_tokens), False
        try:
            yield from self.think(main, sampling.stop_strings(task))
        except BudgetExceeded:
            budget_ended, output = True, main.joined or main.output
            if output is None:
                raise
        else:
            output = main.output
        task.result, task.request_handle = output, main.part.request_handle
        if budget_ended or main.left == 0:
            task.finish_reason, task.stop_reason = "length", None
        task.customized_result_fields["parallel_thinking"] = {
            "spawns": main.spawns,
            "thread_tokens": main.thread_tokens,
            "longest_path": main.longest_path,
            "join_tokens": main.join_tokens,
            "budget_ended": budget_ended,
        }

    def think(self, main: ThreadProgress, stop: Sequence[str]) -> Process:
        """Generate a thread to its end, with all that it spawns."""
        form = self.format
        while True:
            part = main.part
            may_spawn = main.num_spawns < self.max_spawns and main.depth < self.max_depth
            part.stop = [*stop, form.spawn_end] if may_spawn else list(stop)
            part.max_tokens = main.left
            yield [part]
            main.add(part)
            if not may_spawn or part.stop_reason != form.spawn_end or main.left == 0:
                return
            spawned = form.tasks(part.output_str or "")
            if spawned is None:
                return
            main.num_spawns += 1
            if 0 < len(spawned) <= self.max_threads:
                yield from self._spawn(main, spawned)
            else:
                yield from self._go_on(main, part, form.spawn_end, form.spawn_end)

    def _spawn(self, main: ThreadProgress, spawned: Sequence[tuple[str, str]]) -> Process:
        """Run threads side by side, and go on after their results."""
        part, form = main.part, self.format
        begins = [form.thread_begin.format(number=n, text=text) for n, text in spawned]
        threads = [
            ThreadProgress(self._thread(part, *numbered), self.thread_tokens, main.depth + 1)
            for numbered in enumerate(begins)
        ]
        yield Stage("spawned", "the model asks for threads", fields={"threads": len(threads)})
        yield from self._run(threads, sum(main.spawns))
        main.add_threads(threads)
        written = [thread.written(form) for thread in threads]
        yield Stage("joined", "all threads have ended", fields={"threads": len(threads)})
        joined = form.join([number for number, _ in spawned], written)
        if self.join == "pages":
            yield from self._read(main, threads, joined)
            return
        first = f"{form.spawn_end}{begins[0]}{written[0]}"
        if form.inherits and joined.startswith(first):  # its keys and values are those of the join
            yield from self._go_on(main, threads[0].part, joined, joined.removeprefix(first))
        else:
            yield from self._go_on(main, part, joined, joined)

    def _read(self, main: ThreadProgress, threads: Sequence[ThreadProgress], text: str) -> Process:
        """Go on from the main thread, which reads the threads in their pages.

        A token is read once it is stored, so each thread generates a further one after its closing
        tag, which nobody reads.
        """
        form, part = self.format, main.part
        closed: list[GenerationTask] = [
            thread.part.fork(form.thread_end, max_tokens=1, stop=[], temperature=0.0)
            for thread in threads
        ]
        for task in closed:
            task.worker_tag, task.is_aside, task.is_read_later = part.worker_tag, True, True
        yield closed
        common = f"{part.input_str}{part.output_str}{form.spawn_end}"
        main.count_inserted(closed)
        yield from self._go_on(main, part, text, f"{form.spawn_end}{form.join_end}")
        AttentionGroup([main.part, *closed], common, adds=True)
        main.read = text

    def _run(self, threads: Sequence[ThreadProgress], num_before: int) -> Process:
        """Run threads side by side; those that spawn no others stream as tasks of the spawning one,
        numbered after the ``num_before`` that it has joined.
        """
        if threads[0].depth < self.max_depth:
            yield ParallelProcess(
                [_Thread(self, thread) for thread in threads], [[] for _ in threads]
            )
            return
        parts = [thread.part for thread in threads]
        for number, part in enumerate(parts, num_before):
            part.stop, part.max_tokens = [self.format.thread_end], self.thread_tokens
            part.stream_fields, part.streams_beside = {"thread": number}, True
        yield parts
        for thread in threads:
            thread.add(thread.part)

    def _thread(self, part: GenerationTask, index: int, begun: str) -> GenerationTask:
        form, thread = self.format, GenerationTask(input_str=begun)
        if form.inherits:
            thread = part.fork(form.spawn_end + begun)
        else:
            sampling.carry(part, thread)
        thread.worker_tag, thread.priority = part.worker_tag, part.priority
        thread.streaming_output_flag = part.streaming_output_flag
        sampling.vary(thread, index)
        return thread

    def _go_on(
        self, main: ThreadProgress, source: GenerationTask, text: str, suffix: str
    ) -> Process:
        """The next part, from ``source`` and ``suffix``: what ``source`` lacks of ``text``."""
        part: GenerationTask = source.fork(suffix, inherit=False)
        part.priority = main.part.priority
        sampling.carry(main.part, part)
        part.worker_tag = main.part.worker_tag
        part.streaming_output_flag = main.part.streaming_output_flag
        main.part = part
        main.text += text
        if part.streaming_output_flag:
            yield Delta(text, source="parallel_thinking")


class _Thread(Controller):
    """Runs a spawned thread that may spawn in turn."""

    def __init__(self, method: ParallelThinkingController, thread: ThreadProgress) -> None:
        super().__init__()
        self._method, self._thread = method, thread

    def process(self, tasks: Sequence[Any], **kwargs: Any) -> Process:
        end = self._method.format.thread_end
        yield from self._method.think(self._thread, [end])
