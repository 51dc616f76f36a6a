"""``Frontend``: requests in, outputs out, over one engine; ``LLM`` and ``AsyncLLM`` share it.

::

    prompt, params -- read --> Prompt, SamplingParams -- submit --> Generation -> RequestOutput
                                                                        ^
                                    Engine.step --> Event per sample -- take

A ``Generation`` is one request in flight: the sequences of its samples in the engine, and a
transcript of the text of each. Like the engine, a frontend is used by one thread at a time; only
the methods under "from any thread" may be called at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

from forethought.assets import reasoner_dir
from forethought.config.engine import LlmArgs
from forethought.config.sampling import SamplingParams
from forethought.engine import resolve
from forethought.engine.base import FRESH, BaseEngine, Begun
from forethought.engine.embedding import Pooling
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence
from forethought.engine.snapshot import SequenceSnapshot
from forethought.engine.step import Event
from forethought.errors import ParameterError, RequestError
from forethought.llm.detokenizer import Transcript, name_tokens
from forethought.llm.embedding import read_pooling
from forethought.llm.grammar import GrammarCompiler
from forethought.llm.profile import ModelProfile
from forethought.llm.snapshot import PREFILL, SnapshotStore
from forethought.llm.thinking import ThinkingBudgets, ThinkingConstraint, ThinkingRule
from forethought.llm.tokenizer import Prompt, Tokenizer, read_ids, read_params, read_prompt
from forethought.model.adapter import read_adapter
from forethought.model.sampling import Constraints, SequenceBreakers
from forethought.model.token_adapters import PlacedAdapter
from forethought.model_dir import find_model_dir
from forethought.outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    RequestOutput,
    ThinkingOutput,
    ThoughtEnd,
    Usage,
)


class Generation:
    """The samples of one prompt, or one continuation of a live sequence (no ``prompt`` then)."""

    def __init__(
        self,
        sequences: list[Sequence],
        tokenizer: Tokenizer,
        prompt: Prompt | None = None,
        rule: ThinkingRule | None = None,
    ) -> None:
        self.sequences, self._tokenizer, self._prompt = sequences, tokenizer, prompt
        prompt_ids = sequences[0].tokens[: sequences[0].prompt_length]
        self._transcripts = {
            sequence.id: Transcript(tokenizer, sequence.params, prompt_ids, sequence.index)
            for sequence in sequences
        }
        for sequence in sequences:  # one that has begun elsewhere has an output
            self._transcripts[sequence.id].add(sequence.output, None)
        self._metrics = {sequence.id: sequence.metrics for sequence in sequences}
        self._drafted_steps = {sequence.id: sequence.drafted_steps for sequence in sequences}
        self._thoughts = dict[int, ThinkingConstraint]()
        if rule is not None:
            thoughts = rule.samples(prompt_ids, [None] * len(sequences))
            self._thoughts = {s.id: t for s, t in zip(sequences, thoughts, strict=True)}
        self._error: Exception | None = None
        self._taken: Event | None = None
        """The event taken in last."""
        self.num_events = 0
        """Events of the engine so far."""
        self.first_token_time: float | None = None
        """When the first tokens of a sample came, as of ``time.perf_counter``."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come: all samples have ended, or it failed."""
        return self._error is not None or not self.unfinished

    @property
    def unfinished(self) -> list[Sequence]:
        """The samples that have not ended."""
        transcripts = self._transcripts
        return [s for s in self.sequences if transcripts[s.id].finish_reason is None]

    @property
    def failure(self) -> RequestError | None:
        """Why it failed; None if it did not."""
        if self._error is None or isinstance(self._error, RequestError):
            return self._error
        failure = RequestError(
            "the request failed in the engine",
            f"{type(self._error).__name__}: {self._error}",
            "The cause is attached; no other request fails with it",
        )
        failure.__cause__ = self._error
        return failure

    def take(self, event: Event) -> bool:
        """Add what a step did to one sample; whether that sample is finished now. Safe to repeat: a
        call that is interrupted changes nothing, and a second one nothing more.
        """
        transcript, stop_reason = self._transcripts[event.sequence.id], event.sequence.stop_reason
        if event is not self._taken:
            before = transcript.checkpoint()
            try:
                if event.error is not None:
                    raise event.error
                transcript.add(
                    event.tokens,
                    event.logprobs,
                    event.finish_reason,
                    stop_reason,
                    confidences=event.confidences,
                )
                if self.first_token_time is None and event.tokens:
                    self.first_token_time = time.perf_counter()
                self._taken, self.num_events = event, self.num_events + 1
            except Exception as error:  # fails this request only
                self._error, self._taken, self.num_events = error, event, self.num_events + 1
            except BaseException:  # KeyboardInterrupt, perhaps of a thread that steps for others
                transcript.restore(before)
                raise
        return self._error is not None or transcript.finish_reason is not None

    @property
    def size(self) -> int:
        """Tokens that the first sample has generated."""
        return len(self._transcripts[self.sequences[0].id].token_ids)

    def length(self, sequence: Sequence) -> int:
        """Tokens of a sample up to the one that ended it, prompt and output."""
        return sequence.prompt_length + len(self._transcripts[sequence.id].token_ids)

    def was_closed(self, sequence: Sequence) -> bool:
        """Whether a limit has closed the thought of a sample."""
        thought = self.thinking(sequence)
        return thought is not None and thought.end in (ThoughtEnd.SOFT, ThoughtEnd.BUDGET)

    def thinking(self, sequence: Sequence) -> ThinkingOutput | None:
        """The thought of a sample so far, if it has limits."""
        if not self._thoughts:
            return None
        return self._thoughts[sequence.id].output(self._transcripts[sequence.id].token_ids)

    def hold_at(self, num_tokens: float) -> None:
        """Let the first sample stop at this number of tokens, until this is called again. From
        any thread.
        """
        first = self.sequences[0]
        first.hold = first.prompt_length + num_tokens

    def abort(self) -> None:
        """Mark the samples that have not ended as aborted."""
        if self._error is not None:
            return  # it has ended, and its tokens may be undecodable
        try:
            for sequence in self.unfinished:
                self._transcripts[sequence.id].finish(FinishReason.ABORT)
        except Exception as error:
            self._error = error

    def completion(self) -> CompletionOutput:
        """A copy of the first sample's output so far. Raises as ``output``."""
        with self._failing():
            return self._completion(self.sequences[0])

    def wordless(self) -> CompletionOutput:
        """As ``completion``, without the text, for which nothing is decoded."""
        with self._failing():
            return self._completion(self.sequences[0], with_text=False)

    def output(self) -> RequestOutput:
        """A copy of everything so far.

        Raises RequestError if its tokens cannot be decoded; the generation is finished then.
        """
        with self._failing():
            return self._output()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = self._error or error
            if isinstance(error, RequestError):
                raise
            assert self.failure is not None
            raise self.failure from error

    def _output(self) -> RequestOutput:
        assert self._prompt is not None, "a live sequence gives completions only"
        first = self.sequences[0]
        outputs = [self._completion(sequence) for sequence in self.sequences]
        usage = sum((sequence.usage for sequence in self.sequences), Usage())
        usage.prompt_tokens = len(self._prompt.token_ids)
        usage.completion_tokens = sum(len(output.token_ids) for output in outputs)
        scores = None
        if first.params.prompt_logprobs is not None:
            scores = [s and name_tokens(s, self._tokenizer) for s in first.prompt_logprobs]
        return RequestOutput(
            request_id=f"request-{first.id}",
            prompt=self._prompt.text,
            prompt_token_ids=list(self._prompt.token_ids),
            outputs=outputs,
            finished=self.finished,
            usage=usage,
            prompt_logprobs=scores,
        )

    def _completion(self, sequence: Sequence, with_text: bool = True) -> CompletionOutput:
        output = self._transcripts[sequence.id].output(with_text)
        output.metrics = self._metrics[sequence.id].copy()
        output.drafted_steps = self._drafted_steps[sequence.id][:]
        output.thinking = self.thinking(sequence)
        return output


class Frontend:
    """Starts generations, steps the engine, and gives its events to their generations. The engine
    is used through this frontend alone.
    """

    def __init__(
        self,
        engine: BaseEngine,
        tokenizer: Tokenizer,
        model_dir: Path,
        grammars: GrammarCompiler,
        thinking: ThinkingBudgets,
        snapshots: SnapshotStore,
        profile: ModelProfile,
    ) -> None:
        self.engine, self.tokenizer, self.model_dir = engine, tokenizer, model_dir
        self.profile = profile
        self.grammars, self.thinking, self.snapshots = grammars, thinking, snapshots
        self._generations: dict[int, Generation] = {}
        self._live: set[Sequence] = set()
        self._abandoned: deque[Sequence | Generation] = deque()
        self._events: deque[Event] = deque()
        """Events of the engine that no generation has taken in yet: more than none only inside
        ``step``, and after an interrupt there."""

    @classmethod
    def build(
        cls,
        model: str | Path | None,
        fields: Mapping[str, Any],
        *unnamed: object,
        launcher: Any | None = None,
    ) -> Frontend:
        """Load tokenizer and model.

        Args:
            model: as ``find_model_dir`` takes it; None: the embedded reasoner.
            fields: of ``LlmArgs``.
            unnamed: further positional arguments of a caller, which are refused.
            launcher: as of ``engine.resolve.build``.

        Raises:
            UsageError: an unknown field, a bad value, or a directory that cannot be loaded.
        """
        if unnamed:
            raise ParameterError(
                "an LLM takes the model alone without a name",
                f"got {unnamed[0]!r} after it",
                "Write further arguments with their names, such as LLM(model, dtype='bfloat16')",
            )
        args = LlmArgs.from_dict({"model": model, **fields})
        code = args.trust_remote_code
        model_dir = find_model_dir(args.model or reasoner_dir(), args.revision, code=code)
        tokenizer_dir = model_dir
        if args.tokenizer is not None:
            tokenizer_dir = find_model_dir(args.tokenizer, weights=False, code=code)
        # First: a wrong directory is about the model.
        engine = resolve.build(args, model_dir, launcher)
        tokenizer = Tokenizer.load(tokenizer_dir, code)
        lm, config = engine.runner.lm, args.guided_decoding_config
        tokenizer.expect_ids_below(lm.vocab_size, tokenizer_dir)
        grammars = GrammarCompiler(tokenizer, lm.vocab_size, lm.eos_token_ids, config)
        thinking = ThinkingBudgets(tokenizer, lm.vocab_size, lm.eos_token_ids)
        storage = engine.runner.storage
        snapshots = SnapshotStore(args.snapshot_dir, model_dir, storage, args.quantization)
        profile = ModelProfile.read(tokenizer, model_dir, args.tool_format)
        return cls(engine, tokenizer, model_dir, grammars, thinking, snapshots, profile)

    def copy(self) -> Frontend:
        """A frontend over the same engine without generations; only one of the two may be used."""
        return Frontend(
            self.engine,
            self.tokenizer,
            self.model_dir,
            self.grammars,
            self.thinking,
            self.snapshots,
            self.profile,
        )

    @property
    def local_engine(self) -> Engine:
        """The engine, where it computes in this process."""
        assert isinstance(self.engine, Engine), "it is not of replicas"
        return self.engine

    # ---- from any thread --------------------------------------------------------------------

    def read(self, prompt: Any, params: Any) -> tuple[Prompt, SamplingParams]:
        """A caller's prompt in tokens, and its params, checked; the grammar is not compiled yet.

        Raises as ``Engine.check_prompt``.
        """
        if isinstance(prompt, str):
            self.tokenizer.check_length(prompt, self.engine.limits.max_length)
        read, checked = read_prompt(prompt, self.tokenizer), self.read_params(params)
        self.engine.check_prompt(read.token_ids, checked)
        return read, checked

    def read_embedded(self, text_or_ids: Any) -> list[int]:
        """The tokens of an input that is embedded, checked. Raises as ``Engine.check_embedded``."""
        if isinstance(text_or_ids, str):
            self.tokenizer.check_length(text_or_ids, self.engine.limits.max_length)
        is_empty = isinstance(text_or_ids, str) and not text_or_ids
        token_ids = [] if is_empty else read_prompt(text_or_ids, self.tokenizer).token_ids
        self.engine.check_embedded(token_ids)
        return token_ids

    @functools.cached_property
    def pooling(self) -> Pooling:
        """What makes an embedding of the model's hidden states. Raises as ``read_pooling``."""
        return read_pooling(self.model_dir)

    def read_params(self, params: Any) -> SamplingParams:
        """The params of one generation, checked; the grammar is not compiled yet.

        Raises ParameterError if they are no ``SamplingParams``, their grammar is too large, or they
        limit thoughts of a model that has none.
        """
        checked = self._in_tokens(read_params(params))
        self.grammars.check(checked)
        self.thinking.check(checked)
        if checked.stop:  # found here once, so that the engine's thread does not wait for them
            self.tokenizer.stop_candidates.of(checked.stop)
        return checked

    def _in_tokens(self, params: SamplingParams) -> SamplingParams:
        """The params with a prediction in tokens."""
        speculation = params.speculation
        if speculation is None or not isinstance(speculation.prediction, str):
            return params
        self.tokenizer.check_length(speculation.prediction, self.engine.limits.max_length)
        ids = tuple(self.tokenizer.encode_more(speculation.prediction)) or None
        return params.replace(speculation=speculation.replace(prediction=ids))

    def constraints(self, params: SamplingParams) -> Constraints | None:
        """What makes the constraints of the samples, once compiled; None where all is allowed.

        Raises as ``GrammarCompiler.constraints``.
        """
        self.breakers(params)
        return self.limited(params, self.grammars.constraints(params))

    async def compiled(self, params: SamplingParams) -> Constraints | None:
        """As ``constraints``, for a coroutine, which may be cancelled. Raises the same."""
        if not self.knows_breakers(params):
            await asyncio.to_thread(self.breakers, params)
        return self.limited(params, await self.grammars.compiled(params))

    def limited(self, params: SamplingParams, grammar: Constraints | None) -> Constraints | None:
        """The constraints of a grammar, after a thought with its limits if the params set any."""
        rule = self.thinking.rule(params)
        return grammar if rule is None else rule.constraints(grammar)

    def knows_breakers(self, params: SamplingParams) -> bool:
        """Whether ``breakers`` takes no time."""
        return not params.penalises_repeats or self.tokenizer.breakers.knows(
            params.dry_sequence_breakers
        )

    def breakers(self, params: SamplingParams) -> SequenceBreakers | None:
        """The sequence breakers of the params in tokens; None: there is no DRY."""
        if not params.penalises_repeats:
            return None
        return self.tokenizer.breakers.of(params.dry_sequence_breakers)

    def read_more(self, more: str | List[int]) -> list[int]:
        """The tokens of a text or of ids that continue a live sequence."""
        if not isinstance(more, str):
            return read_ids(more)
        self.tokenizer.check_length(more, self.engine.limits.max_length)
        return self.tokenizer.encode_more(more)

    def render(
        self, messages: Any, template_args: Mapping[str, Any] | None
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text and in tokens."""
        text = self.tokenizer.render(messages, template_args)
        self.tokenizer.check_length(text, self.engine.limits.max_length)
        return text, self.tokenizer.encode_more(text)  # the template wrote all special tokens

    def read_adapter(self, name: str, path: str | Path) -> PlacedAdapter:
        """An adapter for the model, which no request can choose yet. Raises ModelError if it is
        broken, not supported or of another model.
        """
        return self.engine.place_adapter(read_adapter(name, path))

    def abandon(self, garbage: Sequence | Generation) -> None:
        """End a live sequence or a generation with the next ``sweep``. The garbage collector may
        call this at any moment.
        """
        self._abandoned.append(garbage)

    @property
    def has_abandoned(self) -> bool:
        """Whether ``sweep`` would do anything."""
        return bool(self._abandoned)

    @property
    def stats(self) -> EngineStats:
        """A copy of the engine's counts."""
        return dataclasses.replace(self.engine.stats)

    # ---- from the thread that steps ----------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.engine.has_work or self.has_abandoned or bool(self._events)

    @property
    def is_busy(self) -> bool:
        """Whether a generation is in progress."""
        return bool(self._generations)

    def submit(
        self, prompt: Prompt, params: SamplingParams, constraints: Constraints | None
    ) -> Generation:
        """Start ``params.n`` samples of a prompt, under what ``constraints`` has made."""
        breakers = self.breakers(params)
        sequences = self.engine.start(
            prompt.token_ids, params, constraints=constraints, breakers=breakers
        )
        return self._follow(sequences, params, prompt)

    def open(self, token_ids: list[int]) -> Sequence:
        """A live sequence that holds a prompt and generates nothing yet."""
        return self._keep(self.engine.open(token_ids))

    def resume(
        self,
        sequence: Sequence,
        params: SamplingParams,
        constraints: Constraints | None,
        begun: Begun = FRESH,
    ) -> Generation:
        """Generate from a live sequence, or go on with what has ``begun`` elsewhere."""
        breakers = self.breakers(params)
        self.engine.resume(
            sequence, params, constraints=constraints, breakers=breakers, begun=begun
        )
        return self._follow([sequence], params)

    def fork(self, sequence: Sequence, length: int | None) -> Sequence:
        """Another live sequence with the first ``length`` tokens of one."""
        return self._keep(self.engine.fork(sequence, length))

    def fork_to_save(self, sequence: Sequence) -> tuple[list[int], Sequence]:
        """The tokens of a live sequence, and a fork of all but the last, whose KV is to be saved.

        A continuation computes the last one again, as it needs its logits. The fork computes, with
        its ``params``, what is missing.
        """
        fork = self.fork(sequence, max(1, len(sequence.tokens) - 1))
        fork.params = PREFILL.replace(cache_salt=sequence.params.cache_salt)
        return list(sequence.tokens), fork

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; see ``AdapterTable.remove``."""
        self.engine.remove_adapter(name)

    def restore(self, saved: SequenceSnapshot) -> Sequence:
        """A live sequence that goes on from a snapshot."""
        return self._keep(self.engine.restore(saved))

    def step(self, max_steps: float = math.inf) -> list[Generation]:
        """One step of the engine, or up to ``max_steps``; the generations that it has changed.

        A step that is interrupted can be repeated: events that were not added are kept, and the
        next step adds those instead of making new ones.
        """
        changed = dict.fromkeys(self.sweep())  # as a set that keeps its order
        if not self._events:
            self._events += self.engine.step(max_steps)
        while self._events:
            event = self._events[0]
            generation = self._generations.get(event.sequence.id)
            if generation is not None:  # else aborted in this step with a sibling that failed
                changed[generation] = None
                if generation.take(event):
                    self._finish(generation, event.sequence)
            self._events.popleft()
        return list(changed)

    def sweep(self) -> list[Generation]:
        """End what was abandoned; the generations that this ended."""
        ended = []
        while self._abandoned:
            garbage = self._abandoned.popleft()
            if isinstance(garbage, Sequence):
                ended += self.close(garbage)
            else:
                self.abort(garbage)
                ended.append(garbage)
        return ended

    def abort(self, generation: Generation) -> None:
        """End the samples of a generation that have not ended."""
        for sequence in generation.unfinished:
            self._generations.pop(sequence.id, None)
            self.engine.abort(sequence)
        generation.abort()

    def stop(self, sequence: Sequence) -> list[Generation]:
        """End the generation of a live sequence, if there is one, and return it."""
        generation = self._generations.get(sequence.id)
        if generation is None:
            return []
        self.abort(generation)
        return [generation]

    def close(self, sequence: Sequence) -> list[Generation]:
        """Free the pages of a live sequence; the generation that this ended."""
        ended = self.stop(sequence)
        self._live.discard(sequence)
        self.engine.close(sequence)
        return ended

    def clear(self) -> None:
        """End every generation and close every live sequence."""
        for generation in list(self._generations.values()):
            self.abort(generation)
        for sequence in list(self._live):
            self.close(sequence)

    def _finish(self, generation: Generation, sequence: Sequence) -> None:
        """A sample has ended: drop tokens after a stop string; abort siblings of a failed one."""
        if generation.failure is not None:
            self.abort(generation)
        else:
            self.engine.cut(sequence, generation.length(sequence))
            self.engine.stats.thoughts_closed += generation.was_closed(sequence)
        self._generations.pop(sequence.id, None)  # last, so that an interrupted call is repeated

    def _follow(
        self, sequences: list[Sequence], params: SamplingParams, prompt: Prompt | None = None
    ) -> Generation:
        if params.stop:
            candidates = self.tokenizer.stop_candidates.of(params.stop)
            for sequence in sequences:
                sequence.stop_candidates = candidates
        try:
            rule = self.thinking.rule(sequences[0].params)
            generation = Generation(sequences, self.tokenizer, prompt, rule)
        except Exception:
            for sequence in sequences:
                self.engine.abort(sequence)
            raise
        self._generations.update((sequence.id, generation) for sequence in sequences)
        return generation

    def _keep(self, sequence: Sequence) -> Sequence:
        self._live.add(sequence)
        return sequence
