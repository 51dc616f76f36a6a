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

Paper: Fu et al., "Reasoning Without Self-Doubt: More Efficient Chain-of-Thought Through Certainty
Probing", 2025. The texts and defaults are those of TensorRT-LLM's blog on scaffolding.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import re
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from forethought.errors import (
    BudgetExceeded,
    DependencyError,
    ModelError,
    ParameterError,
    UnknownNameError,
)
from forethought.scaffolding import sampling
from forethought.scaffolding.answers import (
    AnswerClasses,
    Equivalence,
    PairwiseEquivalence,
    checked_equivalence,
    unpaired_brace,
)
from forethought.scaffolding.controller import Controller, refuse_arguments, side_by_side
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.parallel import AsCompleted, Process
from forethought.scaffolding.result import Delta, Stage, spans_within
from forethought.scaffolding.settings import BOOL, DIRECTORY, POSITIVE_INT, WORDS, validated
from forethought.scaffolding.task import ComputeTask, GenerationTask, StreamGenerationTask

_logger = logging.getLogger(__name__)

_CLOSE = "}"


class Probe:
    r"""A fork whose prompt ends in ``\boxed{``: its answer is the text up to the closing brace.

    Its task stops at every ``}``. If that closes a brace of the answer itself, the probe continues
    with another task, up to ``length`` tokens.

    Args:
        main: the chain; forked at its present length.
        suffix: text that prompts for the answer.
        length: maximum number of tokens of the answer.
        fields: sampling fields.

    Attributes:
        task: to be executed; after ``on_result`` it may be another one.
        kept_text: the chain's text at the fork.
        kept_tokens: the chain's tokens at the fork.
        answer: ``""`` if it has found none; None while it is in flight.
    """

    def __init__(
        self, main: GenerationTask, suffix: str, length: int, fields: dict[str, Any]
    ) -> None:
        self.kept_text, self.kept_tokens = main.output_str or "", main.num_generated
        self.answer: str | None = None
        self._text, self._tokens_left, self._fields = "", length, fields
        self.task = self._fork(main, suffix)

    def on_result(self) -> None:
        """Handle the finished task: sets ``answer``, or a further ``task``."""
        task = self.task
        if task.error is not None:
            _logger.warning("a probe failed, and counts as one without an answer: %s", task.error)
        text = self._text + (task.output_str or "")
        self._tokens_left -= task.num_generated
        if task.error is not None or task.stop_reason != _CLOSE:
            self.answer = ""
        elif unpaired_brace(text + _CLOSE) is not None:
            self.answer = text.strip()
        elif self._tokens_left < 1:
            self.answer = ""
        else:
            self._text = text + _CLOSE
            self.task = self._fork(task, _CLOSE)

    def _fork(self, task: GenerationTask, suffix: str) -> GenerationTask:
        return task.fork(
            suffix,
            GenerationTask,
            inherit=False,
            max_tokens=self._tokens_left,
            stop=[_CLOSE],
            on_failure="drop",
            **self._fields,
        )


class Agreement:
    """How many answers in a row mean the same.

    Args:
        needed: number of equal answers in a row.
        uncertain_words: an answer that has one of them, as a word, does not count.
        equivalence: decides which answers mean the same, see ``AnswerClasses``.

    Attributes:
        answers: all so far, in order.
        count: length of the present run.
    """

    def __init__(
        self,
        needed: int,
        uncertain_words: Sequence[str],
        equivalence: Equivalence | PairwiseEquivalence,
    ) -> None:
        self.needed, self.count, self.answers = needed, 0, list[str]()
        self._classes = AnswerClasses(equivalence)
        self._class: Hashable = None
        words = "|".join(re.escape(word.lower()) for word in uncertain_words)
        # A word that begins or ends with a sign needs no border there.
        pattern = rf"(?:(?<!\w)|(?!\w))(?:{words})(?:(?<!\w)|(?!\w))"
        self._uncertain = re.compile(pattern) if words else None

    @property
    def reached(self) -> bool:
        """Whether the run is long enough."""
        return self.count >= self.needed

    def add(self, answer: str) -> Process:
        """Count the next answer; a generator, as the comparison may be slow."""
        self.answers.append(answer)
        if not self._counts(answer):
            self.count = 0
            return
        finding = self._classes.finding([answer])
        if finding:
            yield finding
        found = self._classes.of(answer)
        self.count = self.count + 1 if found == self._class else 1
        self._class = found

    def _counts(self, answer: str) -> bool:
        uncertain = self._uncertain is not None and self._uncertain.search(answer.lower())
        return bool(answer) and not uncertain


EFFORT = {"mild": (8, 64), "low": (5, 64), "mid": (3, 64), "high": (2, 64), "crazy": (2, 32)}
"""How hard to save tokens, as Dynasor names it: (certainty_threshold, chunk_size)."""

UNCERTAIN_WORDS = ("wait", "hold", "but", "okay", "no", "hmm")

PROBE_SUFFIX = (
    "... Oh, I suddenly got the answer to the whole problem, **Final Answer**\n\n\\[ \\boxed{"
)
ANSWER_SUFFIX = (
    "\n\n... Oh, I have got the answer to the whole problem\n**Final Answer:**\n\\[\n \\boxed{"
)
ANSWER_SUFFIX_WITH_MARKER = (
    "\n\n...</think>\n Oh, I have got the answer to the whole problem\n"
    "**Final Answer:**\n\\[\n \\boxed{"
)
ANSWER_END = "}\n\\]"
THINK_END = "</think>"


class _Unset(int):
    """A default, distinguishable from the same number given by the user."""


_THRESHOLD, _CHUNK = map(_Unset, EFFORT["mid"])
_PROBE_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "speculation")


class DynasorGenerationController(Controller):
    r"""Ends a chain of thought once probes of it agree on the answer (Dynasor-CoT).

    Sampling fields that a task sets win over the settings here; ``max_tokens`` counts the tokens
    that the main chain generates. The output is the main chain up to the last agreeing probe and
    the answer in a ``\boxed{}`` behind it, or all of the main chain if that ends by itself first.

    ``output_tokens`` are the tokens of the main chain that were kept, exactly. The answer behind
    them is written, not generated: its tokens are there only if ``generation_dir`` names a
    tokenizer. ``customized_result_fields["dynasor"]`` holds
    ``early_exit``, the probes' ``answers`` and the number of ``kept_tokens``.

    Args:
        generation_dir: directory of the model's tokenizer, for the tokens of the written answer.
        max_tokens: maximum number of tokens of the main chain.
        certainty_threshold: probes in a row that have to agree.
        chunk_size: tokens of the main chain from one probe to the next.
        streaming: stream the output, each token as soon as it is certain to be a part of it; so
            does a task whose ``streaming_output_flag`` is set.
        effort: "mild", "low", "mid", "high" or "crazy": sets ``certainty_threshold`` and
            ``chunk_size`` where they are not given (see ``EFFORT``).
        probe_length: maximum number of tokens of a probe.
        temperature: of main chain and probes.
        top_p: of main chain and probes.
        uncertain_words: a probe whose answer has one of them does not count.
        equivalence: decides which answers agree: an object with a method
            ``canonical_form(answer)``, by default ``MathEquivalence()``; or a function of two
            answers, which is called in a thread.

    Raises:
        ParameterError: a number is not a whole one above 0, another setting is of the wrong kind,
            or there is no such directory.
        UnknownNameError: there is no such effort.
    """

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation_with_dynasor_cot"

    def __init__(
        self,
        generation_dir: str | Path | None = None,
        max_tokens: int = 8192,
        certainty_threshold: int = _THRESHOLD,
        chunk_size: int = _CHUNK,
        streaming: bool = False,
        *,
        effort: str | None = None,
        probe_length: int = 20,
        temperature: float = 0.6,
        top_p: float = 0.95,
        uncertain_words: Sequence[str] = UNCERTAIN_WORDS,
        equivalence: Equivalence | PairwiseEquivalence | None = None,
    ) -> None:
        super().__init__()
        threshold, chunk = _effort(effort, certainty_threshold, chunk_size)
        self.certainty_threshold = validated("certainty_threshold", threshold, POSITIVE_INT)
        self.chunk_size = validated("chunk_size", chunk, POSITIVE_INT)
        self.max_tokens = validated("max_tokens", max_tokens, POSITIVE_INT)
        self.probe_length = validated("probe_length", probe_length, POSITIVE_INT)
        self.streaming = validated("streaming", streaming, BOOL)
        self.generation_dir = generation_dir
        self.sampling_params = {
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
        }
        self.uncertain_words = validated("uncertain_words", uncertain_words, WORDS)
        self.equivalence = checked_equivalence(equivalence)
        self._tokenizer = None
        if generation_dir is not None:
            self._tokenizer = _Tokenizer(validated("generation_dir", generation_dir, DIRECTORY))

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Solve the tasks concurrently.

        Raises:
            ParameterError: keyword arguments; there are none. Or ``n`` samples or no text wanted.
            ModelError: ``generation_dir`` holds no tokenizer.
        """
        refuse_arguments(self, kwargs)
        yield from side_by_side(self, tasks, self._solve)

    def _solve(self, task: GenerationTask) -> Process:
        sampling.refuse(task, ["n"], "Dynasor", "Put it under majority_vote for several samples")
        if task.skip_detokenizer:
            raise ParameterError(
                "Dynasor cannot honour skip_detokenizer",
                "it writes the answer behind the text of the chain",
                "Leave it out",
            )
        sampling.fill(task, self.sampling_params)
        task.streaming_output_flag = task.streaming_output_flag or self.streaming
        main = self._main_chain(task)
        agreement = Agreement(self.certainty_threshold, self.uncertain_words, self.equivalence)
        probes: deque[Probe] = deque()
        stream = _OutputStream(task, main)
        forked_at, agreed = 0, None
        with AsCompleted([main]) as running:
            while running and agreed is None:
                try:
                    done = yield running
                except BudgetExceeded:
                    if not main.output_str:
                        raise
                    _end_with_budget(main)
                    break  # probes in flight are lost
                if done is not main:
                    self._on_probe_result(probes, done, running)
                elif not main.end_flag and main.num_generated - forked_at >= self.chunk_size:
                    forked_at = main.num_generated
                    probes.append(self._probe(task, main))
                    running.add(probes[-1].task)
                agreed = yield from self._add_answers(probes, agreement)
                if agreed is None and self._may_continue(main, probes, running):
                    running.add(main)
                if task.streaming_output_flag and agreed is None:
                    yield from stream.extend(main, _certain(main, probes, agreement))
        if agreed is not None:
            why = f"{agreement.count} probes in a row agree"
            fields = {"answer": agreed.answer, "at": agreed.kept_tokens}
            yield Stage("early_exit", why, fields=fields)
        yield from self._finish(task, main, agreement, agreed)
        if task.streaming_output_flag:
            yield from stream.extend(task, (task.output_str or "", task.num_generated))

    # ---- the main chain and its probes ----------------------------------------------------------

    def _main_chain(self, task: GenerationTask) -> StreamGenerationTask:
        """The task as a stream that comes back at every chunk; token by token to be streamed."""
        step = 1 if task.streaming_output_flag else self.chunk_size
        main = StreamGenerationTask.create_from_generation_task(task, step)
        main.worker_tag, main.streaming_output_flag = self.WorkerTag.GENERATION, False
        main.on_failure, main.tokens_per_request = "raise", self.chunk_size
        return main

    def _may_continue(
        self, main: StreamGenerationTask, probes: Sequence[Probe], running: AsCompleted
    ) -> bool:
        """Whether the next step of the main chain is to begin.

        One step at a time, while the oldest probe in flight is less than a chunk behind.
        """
        if main.end_flag or any(item is main for item in running.pending):
            return False
        return not probes or main.num_generated - probes[0].kept_tokens < self.chunk_size

    def _probe(self, task: GenerationTask, main: StreamGenerationTask) -> Probe:
        fields = {name: getattr(task, name) for name in _PROBE_SAMPLING}
        scope = current_scope()
        priority = task.priority if task.priority is not None else scope.priority if scope else 0
        # Before all main chains: what they generate while a probe waits may be discarded.
        fields["priority"] = priority - 1
        return Probe(main, PROBE_SUFFIX, self.probe_length, fields)

    def _on_probe_result(self, probes: deque[Probe], done: Any, running: AsCompleted) -> None:
        probe = next(probe for probe in probes if probe.task is done)
        probe.on_result()
        if probe.answer is None:
            running.add(probe.task)

    def _add_answers(self, probes: deque[Probe], agreement: Agreement) -> Process:
        """Count the answers of finished probes, in the order of their forks.

        Returns:
            The probe with which enough of them agree; None if there is none yet.
        """
        while probes and probes[0].answer is not None:
            probe = probes.popleft()
            yield from agreement.add(probe.answer or "")
            fields = {"answer": probe.answer, "at": probe.kept_tokens, "agreeing": agreement.count}
            yield Stage("probed", fields=fields)
            if agreement.reached:
                return probe
        return None

    # ---- the output -----------------------------------------------------------------------------

    def _finish(
        self,
        task: GenerationTask,
        main: StreamGenerationTask,
        agreement: Agreement,
        agreed: Probe | None,
    ) -> Process:
        """Leave the output on the task."""
        task.result = main.result
        kept = main.num_generated
        if agreed is not None:
            kept = agreed.kept_tokens
            written = self._written(task, agreed, agreement.answers[-1])
            task.output_str = agreed.kept_text + written
            task.finish_reason, task.stop_reason = "stop", None
            if main.output_tokens is not None:
                task.output_tokens = main.output_tokens[:kept]
                if self._tokenizer is not None:
                    encoding = ComputeTask(self._tokenizer.encode, written)
                    yield [encoding]
                    task.output_tokens += encoding.result
            task.logprobs = main.logprobs and main.logprobs[:kept]
            task.confidences = main.confidences and main.confidences[:kept]
            task.cumulative_logprob = None
        task.customized_result_fields["dynasor"] = {
            "early_exit": agreed is not None,
            "answers": agreement.answers,
            "kept_tokens": kept,
        }

    def _written(self, task: GenerationTask, agreed: Probe, answer: str) -> str:
        thought = THINK_END in (task.input_str or "") + agreed.kept_text
        suffix = ANSWER_SUFFIX if thought else ANSWER_SUFFIX_WITH_MARKER
        return suffix + answer + ANSWER_END


def _effort(effort: str | None, threshold: int, chunk: int) -> tuple[int, int]:
    """The two numbers: as given, else those of ``effort``, else the defaults."""
    if effort is None:
        return threshold, chunk
    if effort not in EFFORT:
        raise UnknownNameError("effort", effort, EFFORT)
    named = EFFORT[effort]
    return (
        named[0] if isinstance(threshold, _Unset) else threshold,
        named[1] if isinstance(chunk, _Unset) else chunk,
    )


def _end_with_budget(main: StreamGenerationTask) -> None:
    """End the chain with the text that it has, unless it has ended by itself."""
    if not main.end_flag:
        main.end_flag, main.finish_reason, main.stop_reason = True, "length", None


def _certain(
    main: StreamGenerationTask, probes: Sequence[Probe], agreement: Agreement
) -> tuple[str, int]:
    """How much of the main chain, in text and tokens, no probe under way can cut off.

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

    def extend(self, source: GenerationTask, until: tuple[str, int]) -> Process:
        """Stream what is new in ``source``, up to a text and a number of tokens."""
        text, count = until
        tokens = (source.output_tokens or [])[self._tokens : count]
        start, new = self._characters, text[self._characters :]
        self._characters, self._tokens = len(text), max(count, self._tokens)
        if new or tokens:
            pairs = zip((self._main.output_str or "")[start:], new, strict=False)
            own = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            drafts = spans_within(self._main.draft_spans, start, start + own)
            delta = Delta(new, tuple(tokens), "dynasor", tuple(drafts))
            self._task.streaming_output_list.append(delta)
            yield delta


class _Tokenizer:
    """The tokenizer in a directory, loaded when it is first needed; shared by all copies."""

    def __init__(self, directory: str | Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self._hf: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tokenizer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._directory,)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that continues another one. Slow the first time.

        Raises:
            DependencyError: transformers is not installed.
            ModelError: the directory holds no tokenizer.
        """
        with self._lock:
            if self._hf is None:
                try:
                    transformers = importlib.import_module("transformers")
                except ImportError as error:
                    raise DependencyError.missing(
                        "transformers", "reading generation_dir", "local"
                    ) from error
                try:
                    self._hf = transformers.AutoTokenizer.from_pretrained(self._directory)
                except Exception as error:
                    raise ModelError(
                        f"cannot load the tokenizer in {self._directory}",
                        str(error).strip().split("\n")[0] or type(error).__name__,
                        "Give the model's directory as generation_dir",
                    ) from error
            ids: list[int] = self._hf.encode(text, add_special_tokens=False)
            return ids
