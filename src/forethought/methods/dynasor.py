"""Dynasor-CoT: stop a chain of thought once its answer does not change any more.

Every ``chunk_size`` tokens, a fork of the main chain, a *probe*, is prompted for the final answer.
As soon as several probes in a row agree, the main chain is cut at the fork point of the last one
and the answer is appended. Nothing is trained, and probes do not delay or change the main chain.

The output is the one that probes without latency would give, however long they take and however
many tokens a step of the engine draws:

1. A probe is forked at every multiple of ``chunk_size`` that the chain reaches, at exactly that
   number of tokens, even if the engine is ahead by then.
2. The answers of probes count in the order of their forks, in whatever order they finish.
3. A chain that has ended gets no further probes. The probes in flight at that time were forked
   before its end: their answers count, and may still cut the chain where they were forked.
4. The chain's next step begins while the oldest probe in flight is less than a chunk behind. On a
   server, which generates the chain in requests of ``chunk_size`` tokens, at most a chunk is
   decoded ahead of the probes; the engine gives probes priority and runs on meanwhile.

The texts and defaults are those of TensorRT-LLM's blog on scaffolding.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY
from enum import Enum
from pathlib import Path
from typing import Any

from forethought.answers.answers import (
    Agreement,
    Equivalence,
    PairwiseEquivalence,
    checked_equivalence,
)
from forethought.errors import BudgetExceeded, UnknownNameError
from forethought.methods.parts.probe import AnswerTokenizer, Probe, written_answer
from forethought.outputs import spans_within
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import ComputeTask
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    expect_text,
    refuse_arguments,
    side_by_side,
)
from forethought.scaffolding.parallel import AsCompleted, Process
from forethought.scaffolding.result import Delta, Stage
from forethought.scaffolding.settings import (
    DIRECTORY,
    PositiveInt,
    Words,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask, StreamGenerationTask
from forethought.scaffolding.thinking import thinking_of

EFFORT = {"mild": (8, 64), "low": (5, 64), "mid": (3, 64), "high": (2, 64), "crazy": (2, 32)}
"""How hard to save tokens, as Dynasor names it: (certainty_threshold, chunk_size)."""

UNCERTAIN_WORDS = ("wait", "hold", "but", "okay", "no", "hmm")


class _Unset(int):
    """A default, distinguishable from the same number given by the user."""


_THRESHOLD, _CHUNK = map(_Unset, EFFORT["mid"])


@with_settings
class DynasorGenerationController(Controller):
    r"""Ends a chain of thought once probes of it agree on the answer (Dynasor-CoT).

    Sampling fields that a task sets win over the settings here; ``max_tokens`` counts the tokens
    that the main chain generates. The output is the main chain up to the last agreeing probe and
    the answer in a ``\boxed{}`` after it, or all of the main chain if that ends by itself first.
    Where ``max_tokens`` or the budget of the request cuts the chain, the answer of the last probe
    that has one is written after it. A thought that the chain ends within is closed first; a model
    that does not think has none.

    ``output_tokens`` are the tokens of the main chain that were kept, exactly. The answer after
    them is written, not generated: its tokens are there only if ``generation_dir`` names a
    tokenizer. ``customized_result_fields["dynasor"]`` holds
    ``early_exit``, the probes' ``answers`` and the number of ``kept_tokens``.

    Raises:
        ParameterError: a number is not a whole one above 0, another setting is of the wrong kind,
            or there is no such directory.
        UnknownNameError: there is no such effort.
    """

    paper = (
        'Fu et al., "Reasoning Without Self-Doubt: More Efficient Chain-of-Thought Through '
        'Certainty Probing", 2025'
    )

    conversation = ConversationForm.TEXT
    uses_thinking = "adapts"

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation_with_dynasor_cot"

    generation_dir: str | Path | None = setting(
        None, "Directory of the model's tokenizer, for the tokens of the written answer."
    )
    max_tokens: PositiveInt = setting(8192, "Maximum number of tokens of the main chain.")
    certainty_threshold: PositiveInt = setting(_THRESHOLD, "Probes in a row that have to agree.")
    chunk_size: PositiveInt = setting(
        _CHUNK, "Tokens of the main chain from one probe to the next."
    )
    streaming: bool = setting(
        False,
        "Stream the output, each token as soon as it is certain to be a part of it; so does a "
        "task whose `streaming_output_flag` is set.",
    )
    _: KW_ONLY
    effort: str | None = setting(
        None,
        '"mild", "low", "mid", "high" or "crazy": sets `certainty_threshold` and `chunk_size` '
        "where they are not given (see `EFFORT`).",
    )
    probe_length: PositiveInt = setting(20, "Maximum number of tokens of a probe.")
    temperature: float = setting(0.6, "Of main chain and probes.")
    top_p: float = setting(0.95, "Of main chain and probes.")
    uncertain_words: Words = setting(
        UNCERTAIN_WORDS, "A probe whose answer has one of them does not count."
    )
    equivalence: Equivalence | PairwiseEquivalence | None = setting(
        None,
        "Decides which answers agree: an object with a method `canonical_form(answer)`, by "
        "default `MathEquivalence()`; or a function of two answers, which is called in a "
        "thread.",
    )

    def __post_init__(self) -> None:
        self.certainty_threshold, self.chunk_size = _effort(
            self.effort, self.certainty_threshold, self.chunk_size
        )
        self.sampling_params = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }
        self.rule = checked_equivalence(self.equivalence)
        self._tokenizer = None
        if self.generation_dir is not None:
            validated("generation_dir", self.generation_dir, DIRECTORY)
            self._tokenizer = AnswerTokenizer(self.generation_dir)

    def fan_out(self) -> int:
        """The chain, and a probe for each of its chunks."""
        return 1 + self.max_tokens // self.chunk_size

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Solve the tasks concurrently; ``ModelError`` if ``generation_dir`` holds no tokenizer."""
        refuse_arguments(self, kwargs)
        yield from side_by_side(self, tasks, self._solve)

    def _solve(self, task: GenerationTask) -> Process:
        sampling.refuse(task, ["n"], "Dynasor", "Put it under majority_vote for several samples")
        expect_text("Dynasor", task, "it writes the answer after the text of the chain")
        sampling.fill(task, self.sampling_params)
        task.streaming_output_flag = task.streaming_output_flag or self.streaming
        profile, main = thinking_of(task, self.WorkerTag.GENERATION), self._main_chain(task)
        agreement = Agreement(self.certainty_threshold, self.uncertain_words, self.rule)
        stream = _OutputStream(task, main)
        last, is_cut = yield from self._run(task, main, agreement, stream)
        is_early = agreement.reached
        task.result = main.result
        chain_end = main.output_str or "", main.num_generated
        if last is not None:
            if is_early:
                chain_end = last.kept_text, last.kept_tokens
            why = f"{agreement.count} probes in a row agree" if is_early else "its limit is reached"
            yield Stage("early_exit", why, fields={"answer": last.answer, "at": chain_end[1]})
            written = written_answer(chain_end[0], last.answer or "", profile)
            yield from self._write_answer(task, *chain_end, written)
        if is_cut:
            task.finish_reason = "length"
        task.customized_result_fields["dynasor"] = {
            "early_exit": is_early,
            "answers": agreement.answers,
            "kept_tokens": chain_end[1],
        }
        if task.streaming_output_flag:
            yield from stream.extend(task, task.output_str or "", task.num_generated)

    def _run(
        self,
        task: GenerationTask,
        main: StreamGenerationTask,
        agreement: Agreement,
        stream: _OutputStream,
    ) -> Process:
        """Generate the chain, and probe it, until probes agree, it ends or the budget is spent.

        Returns:
            The probe at which the chain is to be cut, if there is one (the one with which enough
            agree, or the last one with an answer where a limit has cut the chain); and whether a
            limit has.
        """
        probes: deque[Probe] = deque()
        forked_at, answered, agreed = 0, None, None
        with AsCompleted([main]) as running:
            while running and agreed is None:
                try:
                    done = yield running
                except BudgetExceeded:
                    if not main.output_str:
                        raise
                    if not main.end_flag:
                        main.end_flag, main.finish_reason, main.stop_reason = True, "length", None
                    break  # probes in flight are lost
                if done is not main:
                    self._on_probe_result(probes, done, running)
                elif not main.end_flag and main.num_generated - forked_at >= self.chunk_size:
                    forked_at = main.num_generated
                    probes.append(Probe(main, self.probe_length))
                    running.add(probes[-1].task)
                answered = (yield from self._add_answers(probes, agreement)) or answered
                agreed = answered if agreement.reached else None
                if agreed is None and main not in running.pending and self._may_step(main, probes):
                    running.add(main)
                if task.streaming_output_flag and agreed is None:
                    yield from stream.extend(main, *_settled_prefix(main, probes, agreement))
        is_cut = agreed is None and main.finish_reason == "length"
        return (answered, True) if is_cut else (agreed, False)

    # ---- the main chain and its probes ----------------------------------------------------------

    def _main_chain(self, task: GenerationTask) -> StreamGenerationTask:
        """The task as a stream that comes back at every chunk; token by token to be streamed."""
        step = 1 if task.streaming_output_flag else self.chunk_size
        main = StreamGenerationTask.create_from_generation_task(task, step)
        main.worker_tag, main.streaming_output_flag = self.WorkerTag.GENERATION, False
        main.on_failure, main.tokens_per_request = "raise", self.chunk_size
        return main

    def _may_step(self, main: StreamGenerationTask, probes: Sequence[Probe]) -> bool:
        """Whether the oldest probe in flight is less than a chunk behind the main chain."""
        oldest = probes[0].kept_tokens if probes else main.num_generated
        return not main.end_flag and main.num_generated - oldest < self.chunk_size

    def _on_probe_result(self, probes: deque[Probe], done: Any, running: AsCompleted) -> None:
        probe = next(probe for probe in probes if probe.task is done)
        probe.on_result()
        if probe.answer is None:
            running.add(probe.task)

    def _add_answers(self, probes: deque[Probe], agreement: Agreement) -> Process:
        """Count the answers of finished probes, in the order of their forks.

        Returns:
            The last of them that counts, with which enough may agree; None if none of them does.
        """
        last = None
        while probes and probes[0].answer is not None:
            probe = probes.popleft()
            yield from agreement.add(probe.answer or "")
            fields = {"answer": probe.answer, "at": probe.kept_tokens, "agreeing": agreement.count}
            yield Stage("probed", fields=fields)
            last = probe if agreement.count else last
            if agreement.reached:
                break
        return last

    def _write_answer(self, task: GenerationTask, text: str, count: int, written: str) -> Process:
        """Cut the output to ``text``, its first ``count`` tokens, then write an answer."""
        task.result = task.result and task.result.cut(text + written, count)
        if self._tokenizer is not None and task.output_tokens is not None:
            encoding = ComputeTask(self._tokenizer.encode, written)
            yield [encoding]
            task.output_tokens += encoding.result


def _effort(effort: str | None, threshold: int, chunk: int) -> tuple[int, int]:
    """The two numbers: as given, else those of ``effort``, else the defaults."""
    if effort is not None and effort not in EFFORT:
        raise UnknownNameError("effort", effort, EFFORT)
    named = EFFORT[effort or "mid"]
    return (
        named[0] if isinstance(threshold, _Unset) else threshold,
        named[1] if isinstance(chunk, _Unset) else chunk,
    )


def _settled_prefix(
    main: StreamGenerationTask, probes: Sequence[Probe], agreement: Agreement
) -> tuple[str, int]:
    """The prefix of the main chain, in text and tokens, that no probe in flight can cut off.

    The next probes can end the chain at the one that completes a run, at the earliest.
    """
    missing = agreement.needed - agreement.count
    if len(probes) >= missing:
        earliest = probes[missing - 1]
        return earliest.kept_text, earliest.kept_tokens
    return main.output_str or "", main.num_generated


class _OutputStream:
    """The output of a task as a stream of ``Delta``."""

    def __init__(self, task: GenerationTask, main: GenerationTask) -> None:
        self._task, self._main, self._characters, self._tokens = task, main, 0, 0

    def extend(self, source: GenerationTask, text: str, count: int) -> Process:
        """Stream what is new in ``source``: ``text``, and the first ``count`` tokens."""
        tokens = (source.output_tokens or [])[self._tokens : count]
        start, new = self._characters, text[self._characters :]
        self._characters, self._tokens = len(text), max(count, self._tokens)
        if new or tokens:
            pairs = zip((self._main.output_str or "")[start:], new, strict=False)
            num_common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            drafts = spans_within(self._main.draft_spans, start, start + num_common)
            delta = Delta(new, tuple(tokens), "dynasor", tuple(drafts))
            self._task.streaming_output_list.append(delta)
            yield delta
