"""The desk between text and engine: prompts go in as tokens, events come out as text.

``LLM`` and ``AsyncLLM`` both work through one. Like the engine it is used by one thread at a time;
only what stands under "from any thread" may be called at any time.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

from forethought.assets import reasoner_dir
from forethought.config import LlmArgs
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence
from forethought.engine.stats import EngineStats
from forethought.model.sampling import Constraints
from forethought.model_dir import find_model_dir
from forethought.params import SamplingParams
from forethought.text.generation import Generation
from forethought.text.guidance import Guidance
from forethought.text.prompt import Prompt, read_ids, read_params, read_prompt
from forethought.text.tokenizer import Tokenizer


class Desk:
    """Starts generations, steps the engine, and hands its events to the generations they are of.

    Args:
        engine: which no one else uses.
        tokenizer: of its model.
        model_dir: where both came from.
        guidance: compiles grammars for this tokenizer.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, model_dir: Path, guidance: Guidance
    ) -> None:
        self.engine, self.tokenizer, self.model_dir = engine, tokenizer, model_dir
        self.guidance = guidance
        self._generations: dict[int, Generation] = {}
        self._live: set[Sequence] = set()
        self._abandoned: deque[Sequence | Generation] = deque()

    @classmethod
    def build(cls, model: str | Path | None, fields: Mapping[str, Any]) -> Desk:
        """Load tokenizer and model.

        Args:
            model: local directory or Hub id; None: the embedded reasoner.
            fields: of ``LlmArgs``.

        Raises:
            UsageError: an unknown field, a bad value, or a directory that cannot be loaded.
        """
        args = LlmArgs.from_dict({"model": model, **fields})
        code = args.trust_remote_code
        model_dir = find_model_dir(args.model or reasoner_dir(), args.revision, code=code)
        spoken = model_dir
        if args.tokenizer is not None:
            spoken = find_model_dir(args.tokenizer, weights=False, code=code)
        engine = resolve.build(args, model_dir)  # first: a wrong directory is about the model
        tokenizer = Tokenizer.load(spoken, code)
        lm, config = engine.runner.lm, args.guided_decoding_config
        guidance = Guidance(tokenizer, lm.vocab_size, lm.eos_token_ids, config)
        return cls(engine, tokenizer, model_dir, guidance)

    def another(self) -> Desk:
        """A desk over the same engine, for when this one is not used."""
        return Desk(self.engine, self.tokenizer, self.model_dir, self.guidance)

    # ---- from any thread --------------------------------------------------------------------

    def read(self, prompt: Any, params: Any) -> tuple[Prompt, SamplingParams]:
        """A caller's prompt in tokens, and its params, both checked but for the grammar.

        Raises:
            ParameterError, ContextLengthError, CapacityError: see ``Admission.check``.
        """
        read, settled = read_prompt(prompt, self.tokenizer), self.read_params(params)
        self.engine.admission.check(read.token_ids, settled)
        return read, settled

    def read_params(self, params: Any) -> SamplingParams:
        """The params of one generation. ``guidance`` tells whether a grammar can be followed.

        Raises:
            ParameterError: they are none, or the shape that they ask for is too large.
        """
        settled = read_params(params)
        self.guidance.check(settled)
        return settled

    def read_more(self, more: str | List[int]) -> list[int]:
        """The tokens of a text or of ids that continue a live sequence."""
        return self.tokenizer.encode_more(more) if isinstance(more, str) else read_ids(more)

    def render(
        self, messages: Any, template_args: Mapping[str, Any] | None
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text and in tokens."""
        text = self.tokenizer.render(messages, template_args)
        return text, self.tokenizer.encode_more(text)  # the template wrote all special tokens

    def abandon(self, left: Sequence | Generation) -> None:
        """Nobody holds this live sequence, or waits for this generation, any more: end it with the
        next ``sweep``.

        May be called by the garbage collector at any moment.
        """
        self._abandoned.append(left)

    @property
    def has_abandoned(self) -> bool:
        """Whether ``sweep`` would do anything."""
        return bool(self._abandoned)

    @property
    def stats(self) -> EngineStats:
        """A copy of the engine's counts."""
        return dataclasses.replace(self.engine.stats)

    # ---- from the engine's thread -----------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.engine.has_work or self.has_abandoned

    @property
    def is_busy(self) -> bool:
        """Whether a generation is under way."""
        return bool(self._generations)

    def submit(
        self, prompt: Prompt, params: SamplingParams, constraints: Constraints | None
    ) -> Generation:
        """Start ``params.n`` samples of a prompt; ``guidance`` makes the constraints."""
        sequences = self.engine.add(prompt.token_ids, params, constraints=constraints)
        return self._follow(sequences, prompt)

    def open(self, token_ids: list[int]) -> Sequence:
        """A live sequence that holds a prompt and generates nothing yet."""
        return self._keep(self.engine.open(token_ids))

    def resume(
        self, sequence: Sequence, params: SamplingParams, constraints: Constraints | None
    ) -> Generation:
        """Generate from a live sequence."""
        self.engine.resume(sequence, params, constraints=constraints)
        return self._follow([sequence])

    def fork(self, sequence: Sequence, length: int | None) -> Sequence:
        """Another live sequence with the first ``length`` tokens of one."""
        return self._keep(self.engine.fork(sequence, length))

    def step(self) -> list[Generation]:
        """One step of the engine. Returns the generations that have got something from it."""
        changed = dict.fromkeys(self.sweep())  # as a set that keeps its order
        for event in self.engine.step():
            generation = self._generations.get(event.sequence.id)
            if generation is None:
                continue  # a sibling that failed in this step took it along
            changed[generation] = None
            if generation.take(event):
                self._finish(generation, event.sequence)
        return list(changed)

    def sweep(self) -> list[Generation]:
        """End what was abandoned; returns the generations that this ended."""
        ended = []
        while self._abandoned:
            left = self._abandoned.popleft()
            if isinstance(left, Sequence):
                ended += self.close(left)
            else:
                self.abort(left)
                ended.append(left)
        return ended

    def abort(self, generation: Generation) -> None:
        """End what goes on of a generation, now."""
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
        """Give back the pages of a live sequence; returns the generation that this ended."""
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
        """A sample is over; if by a stop string or a sibling's failure, the engine must be told."""
        del self._generations[sequence.id]
        if generation.failure is not None:
            self.abort(generation)
            return
        self.engine.cut(sequence, generation.length(sequence))

    def _follow(self, sequences: list[Sequence], prompt: Prompt | None = None) -> Generation:
        """The generation of sequences that have just been started."""
        try:
            generation = Generation(sequences, self.tokenizer, prompt)
        except Exception:
            for sequence in sequences:
                self.engine.abort(sequence)
            raise
        self._generations.update((sequence.id, generation) for sequence in sequences)
        return generation

    def _keep(self, sequence: Sequence) -> Sequence:
        self._live.add(sequence)
        return sequence
