"""Sequences of the engine that tasks of a request generate, and that later tasks continue.

``LiveSession`` is the sequence of one task. The engine may be ahead of the task: a task's results
hold exactly the tokens that it has waited for.

``SessionCache`` finds the sequence that a new task continues, by two exact rules:

1. A prompt that begins with the prompt and output of an earlier task continues that task's tokens;
   of several such tasks, the one with the longest text.
2. A prompt that another task of the request has too, word for word, shares its prefill.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from forethought.config.sampling import SamplingParams
from forethought.errors import ForethoughtError
from forethought.llm.async_session import AsyncSession, SessionStream
from forethought.llm.detokenizer import Detokenizer, Transcript
from forethought.llm.tokenizer import Tokenizer
from forethought.outputs import CompletionOutput, DraftSpan, FinishReason, Usage, spans_within
from forethought.scaffolding.attention_group import AttentionGroup
from forethought.scaffolding.budget import BudgetAccount
from forethought.scaffolding.execution_scope import ExecutionScope
from forethought.scaffolding.task import GenerationTask

Prompt = str | tuple[int, ...]


class Spelled(NamedTuple):
    """A text, and the number of tokens that decode to it."""

    text: str
    length: int
    """Tokens from the start of the prompt."""


class LiveSession:
    """The session of the engine that generates for one task.

    Args:
        session: holds the prompt, and nothing generates from it yet.
        prompt: of the task; None if the task only continues another one by handle.
        tokenizer: of the model.
        usage: of the task; kept up to date.
        account: of the request; None outside of one.

    Attributes:
        output: the generated output, as of the last update.
        shown: the prefix of it that the task has received, as it was at that length.
        prompt_length: tokens of the prompt.
        num_beyond: its last tokens that are beyond the budget of the request.
        is_pinned: it is not evicted, as an attention group is to read it.
    """

    def __init__(
        self,
        session: AsyncSession,
        prompt: Prompt | None,
        tokenizer: Tokenizer,
        usage: Usage,
        account: BudgetAccount | None,
    ) -> None:
        self.session, self.prompt, self.closed = session, prompt, False
        self.prompt_length = len(session.tokens)
        self.output = self.shown = CompletionOutput(0)
        self._beginning: Transcript | None = None
        self.num_beyond = 0
        self._takes_rest = False
        """Whether its task gets all within the budget, where it is closed."""
        self._spans: list[DraftSpan] = []
        self._measured: Detokenizer | None = None
        self._num_measured = self._position = 0
        self.tokenizer, self._usage, self._account = tokenizer, usage, account
        self._counted = Usage()
        self._stream: SessionStream | None = None
        self._params = SamplingParams()
        self.is_pinned = False

    @property
    def first_token_time(self) -> float | None:
        """When its first tokens came, as of ``time.perf_counter``; None: there are none."""
        return None if self._stream is None else self._stream.first_token_time

    @property
    def ended(self) -> bool:
        """Whether its generation is over."""
        return self.closed or self.output.finish_reason is not None

    @property
    def over(self) -> bool:
        """Whether its generation is over, and its task has received all of it."""
        return self.shown.finish_reason is not None

    def begin(self, params: SamplingParams) -> None:
        """Start to generate; it runs on without further calls."""
        self._params = params
        self._stream = self.session.stream(params)

    @staticmethod
    async def begin_together(
        ready: Sequence[tuple[LiveSession, SamplingParams]],
        others: Sequence[LiveSession],
        group: AttentionGroup,
    ) -> None:
        """Start to generate from sequences that attend to each other and to ``others``."""
        generations = [(live.session, params) for live, params in ready]
        length = min(live.length_of(group.common) for live in (*others, *(r for r, _ in ready)))
        streams = await AsyncSession.stream_together(
            generations, [live.session for live in others], length=length, adds=group.adds
        )
        for (live, params), stream in zip(ready, streams, strict=True):
            live._params, live._stream = params, stream

    def length_of(self, text: str) -> int:
        """Tokens of its prompt that are within a text that the prompt begins with."""
        tokens = self.session.tokens[: self.prompt_length]

        def num_characters(length: int) -> int:
            return len(self.tokenizer.decode(tokens[length:], skip_special_tokens=False))

        assert isinstance(self.prompt, str)
        num_rest = len(self.prompt) - len(text)
        return bisect_right(range(len(tokens)), -num_rest, key=lambda n: -num_characters(n)) - 1

    async def reach(self, count: int | None, hold: float = math.inf) -> CompletionOutput:
        """Wait for ``count`` generated tokens, or the end (None: only that); see
        ``SessionStream.reach``.
        """
        assert self._stream is not None, "it has begun"
        if not self.ended:
            if count is None:
                self._update(await self._stream.finish())
            else:
                self._update(await self._stream.reach(count, hold))
        return self.output

    async def poll(self) -> CompletionOutput:
        """The output so far, without waiting."""
        assert self._stream is not None, "it has begun"
        if not self.ended:
            self._update(await self._stream.peek())
        return self.output

    def show(self, count: int | None) -> CompletionOutput:
        """Give the task ``count`` generated tokens (None: all), at most those that exist.

        The text is that of exactly these tokens; the finish reason comes with the last token.
        """
        tokens = self.output.token_ids
        if self.num_beyond:  # of the budget
            allowed = len(tokens) - self.num_beyond
            count = allowed if count is None else min(count, allowed)
        if count is None or (self.ended and count >= len(tokens)):
            self.shown = self.output
        elif len(self.shown.token_ids) < min(count, len(tokens)):
            self.shown = self._begin_of(count)
        return self.shown

    def fill(self, task: GenerationTask) -> None:
        """Leave on its task what that has received."""
        output = self.shown
        task.output_str = None if task.skip_detokenizer else output.text
        task.output_tokens = output.token_ids
        task.finish_reason = output.finish_reason and output.finish_reason.value
        task.stop_reason = output.stop_reason
        task.logprobs, task.cumulative_logprob = output.logprobs, output.cumulative_logprob
        task.confidences = None if output.confidences is None else [*output.confidences]
        task.thinking = output.thinking
        task.draft_spans = self.draft_spans
        task.usage_prompt_tokens = self.prompt_length
        task.usage_completion_tokens = len(output.token_ids)
        if task.score_suffix:
            task.suffix_logprobs = self._logprobs_of(task.inserted_tokens or ())

    def emit(self, task: GenerationTask, before: CompletionOutput) -> None:
        """Stream to its task what that has received since ``before``."""
        if task.streaming_output_flag:
            new = self.shown.token_ids[len(before.token_ids) :]
            start, text = len(before.text), self.shown.text
            drafts = spans_within(self.draft_spans, start, len(text))
            task.emit(text[start:], new, f"{id(self):x}", drafts)

    async def cancel(self) -> None:
        """End the generation and free its pages; its task keeps what it has received, and what was
        decoded beyond is discarded.
        """
        if not self.ended:
            await self.session.close()
            await self.reach(None)
        await asyncio.shield(self.close())

    def discard_rest(self) -> None:
        """Count the tokens that its task has not received as discarded; those beyond the budget
        are already.
        """
        num_shown = len(self.shown.token_ids) + self.num_beyond
        self._usage.discarded += max(0, len(self.output.token_ids) - num_shown)
        if self._account is not None:
            self._account.record(self._usage)

    async def end_with_budget(self) -> None:
        """End the generation as the budget is spent; its task gets the output within it."""
        if not self.closed:
            self._takes_rest = True
            await self.close()
        if self.shown.finish_reason in (None, FinishReason.ABORT):
            self.shown = replace(self.shown, finish_reason=FinishReason.LENGTH)

    async def close(self) -> None:
        """Free its pages."""
        await self.close_all([self])

    @staticmethod
    async def close_all(live_sessions: Iterable[LiveSession]) -> None:
        """Free the pages of sequences of one engine."""
        going = [live for live in live_sessions if not live.closed]
        under_way = [live for live in going if not live.ended]
        for live in going:
            live.closed = True
            if not live.over:
                live.shown = replace(live.shown, finish_reason=FinishReason.ABORT)
        with suppress(ForethoughtError):
            await AsyncSession.close_all([live.session for live in going])
        for live in under_way:
            if live._stream is not None:
                with suppress(ForethoughtError):  # what its generation failed with, if it did
                    live.output = await live._stream.finish()
                    if live._account is not None:
                        live._account.ended(live.output.metrics)
        for live in going:
            live.count()
            if live._takes_rest:
                live.show(None)
            live.discard_rest()

    def count(self) -> None:
        """Record its usage since the last call."""
        now = self.session.usage
        growth = now - self._counted
        growth.prompt_tokens, growth.completion_tokens = 0, growth.decoded
        self._usage.add(growth)
        self._counted = now
        if self._account is not None:
            self.num_beyond += self._account.record(self._usage)

    @property
    def spelled(self) -> Spelled | None:
        """The text, prompt and output, that a later prompt may begin with; None if it has none."""
        if not self.over or not isinstance(self.prompt, str) or not self._whole[1]:
            return None
        num_tokens, num_characters = self._whole
        text = self.prompt + self.output.text[:num_characters]
        return Spelled(text, self.prompt_length + num_tokens)

    @property
    def draft_spans(self) -> list[DraftSpan]:
        """Where drafts were verified in the output's text, in order; the list grows."""
        for step in self.output.drafted_steps[len(self._spans) :]:
            start = self._measure(step.start)
            end = self._measure(step.start + step.num_accepted)
            rejected = self.tokenizer.decode(step.rejected)
            self._spans.append(DraftSpan(start, end, step.drafter, rejected))
        return self._spans

    def _measure(self, count: int) -> int:
        """The number of characters of the first ``count`` generated tokens, which only rises."""
        if self._measured is None:
            context, skip = self.session.tokens[: self.prompt_length], self._params
            self._measured = Detokenizer(self.tokenizer, context, skip.skip_special_tokens)
        new = self.output.token_ids[self._num_measured : count]
        self._num_measured += len(new)
        self._position += len(self._measured.push(new))
        return self._position

    def _logprobs_of(self, suffix: Sequence[int]) -> list[float]:
        """The requested log-probabilities of the tokens that its prompt ends with."""
        entries = self.session.prompt_logprobs[self.prompt_length - len(suffix) :]
        return [
            entry[token].logprob
            for token, entry in zip(suffix, entries, strict=True)
            if entry is not None
        ]

    def cut(self, num_kept: int | None) -> tuple[int, str]:
        """Where to fork for its first ``num_kept`` generated tokens; None: for all that was shown.

        Returns:
            The length from the start of the prompt, and text to append again, because no whole
            tokens make it.
        """
        num_kept = len(self.shown.token_ids) if num_kept is None else num_kept
        if not self.over or num_kept < len(self.output.token_ids):
            return self.prompt_length + num_kept, ""
        num_tokens, num_characters = self._whole
        return self.prompt_length + num_tokens, self.output.text[num_characters:]

    def _update(self, output: CompletionOutput) -> None:
        self.output = output
        if self.ended and self._account is not None:
            self._account.ended(output.metrics)
        self.count()

    @cached_property
    def _whole(self) -> tuple[int, int]:
        """The tokens that make the text of an output that is over, and how many characters of it
        they make; none of one that did not end.

        The token that ended a generation is not in its text, nor is what a stop string cut off.
        """
        tokens, text = self.output.token_ids, self.output.text
        if self.output.finish_reason is None:
            return 0, 0
        if self.output.finish_reason is not FinishReason.STOP:
            return len(tokens), len(text)
        if not isinstance(self.output.stop_reason, str):
            return len(tokens) - (not self._params.include_stop_str_in_output), len(text)
        num_tokens = num_characters = 0
        context, end = self.session.tokens[: self.prompt_length], 0
        detokenizer = Detokenizer(self.tokenizer, context, self._params.skip_special_tokens)
        for number, token in enumerate(tokens, start=1):
            end += len(detokenizer.push([token]))
            if end > len(text):
                break
            num_tokens, num_characters = number, end
        return num_tokens, num_characters

    def _begin_of(self, count: int) -> CompletionOutput:
        """The output as it was when it had ``count`` tokens."""
        if self._beginning is None:
            context = self.session.tokens[: self.prompt_length]
            self._beginning = Transcript(self.tokenizer, self._params, context)
        output, new = self.output, slice(len(self._beginning.token_ids), count)
        self._beginning.add(
            output.token_ids[new],
            output.logprobs and output.logprobs[new],
            confidences=output.confidences and output.confidences[new],
        )
        return self._beginning.output()


class Continuation(NamedTuple):
    """The sequence that a task continues."""

    live: LiveSession
    length: int
    """Tokens kept, from the start of the prompt."""
    rest: str
    """Text to append to them."""


class SessionCache:
    """The live sequences of each request, kept until their scope is over.

    Args:
        capacity: finished sequences that are kept per scope; the least recently used one is
            evicted of those that no other one attends to, nor is going to.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._requests: dict[str, dict[str, list[LiveSession]]] = {}
        """By request and path of the scope that they were started in; least recently used first."""
        self._held: set[LiveSession] = set()

    def add(self, scope: ExecutionScope | None, live: LiveSession) -> list[LiveSession]:
        """Keep a sequence that has been started; returns the evicted ones."""
        request, path = _where(scope)
        paths = self._requests.setdefault(request, {})
        sequences, evicted = paths.setdefault(path, []), list[LiveSession]()
        ended = [other for other in sequences if other.over and not other.is_pinned]
        if len(ended) >= self._capacity:
            every = [other for others in paths.values() for other in others]
            read = live.session.reads.union(*(other.session.reads for other in every))
            ended = [other for other in ended if other.session.sequence_id not in read]
            evicted = ended[: max(0, len(ended) - self._capacity + 1)]
            for other in evicted:
                sequences.remove(other)
        sequences.append(live)
        self._held.add(live)
        self._held.difference_update(evicted)
        return evicted

    def end_scope(self, scope_id: str) -> list[LiveSession]:
        """Remove and return the sequences of a scope that is over."""
        request, _, path = scope_id.partition(":")
        paths = self._requests.get(request, {})
        removed = [*paths.values()] if not path else [paths.pop(path, [])]
        if not path or not paths:
            self._requests.pop(request, None)
        sessions = [live for sequences in removed for live in sequences]
        self._held.difference_update(sessions)
        return sessions

    def clear(self) -> list[LiveSession]:
        """Remove and return all sequences."""
        sessions = [*self._held]
        self._requests.clear()
        self._held.clear()
        return sessions

    def find(self, scope: ExecutionScope | None, prompt: Prompt) -> Continuation | None:
        """The sequence that a task with this prompt continues; None if there is none."""
        request, path = _where(scope)
        paths = self._requests.get(request, {})
        if (
            isinstance(prompt, str)
            and (continuation := self._continued(paths, path, prompt)) is not None
        ):
            return continuation
        every = (live for sequences in paths.values() for live in sequences)
        same = next((live for live in every if not live.closed and live.prompt == prompt), None)
        return None if same is None else Continuation(same, same.prompt_length, "")

    def _continued(
        self, paths: Mapping[str, list[LiveSession]], path: str, prompt: str
    ) -> Continuation | None:
        """The longest text that a prompt begins with."""
        best: tuple[int, list[LiveSession], Continuation] | None = None
        for scope in _enclosing(path):  # its own branch or an enclosing one, never a parallel one
            for live in paths.get(scope, ()):
                spelled = None if live.closed else live.spelled
                if spelled is not None and prompt.startswith(spelled.text):
                    size = len(spelled.text)
                    if best is None or size > best[0]:
                        best = size, paths[scope], Continuation(live, spelled.length, prompt[size:])
        if best is None:
            return None
        _, sequences, continuation = best
        sequences.remove(continuation.live)
        sequences.append(continuation.live)
        return continuation


def _enclosing(path: str) -> Iterator[str]:
    """The paths of the request, of the branches around a branch, and its own."""
    yield ""
    end = 0
    while path and end >= 0:
        end = path.find(".", end + 1)
        yield path if end < 0 else path[:end]


def _where(scope: ExecutionScope | None) -> tuple[str, str]:
    return ("", "") if scope is None else (scope.request_id, scope.path)
