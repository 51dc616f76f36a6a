"""``BaseEngine``: what a frontend asks of an engine, and the checks of what callers ask of one.

``Engine`` computes here. ``cluster.engine.ClusterEngine`` has its sequences computed by replicas.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from forethought.config.sampling import SamplingParams
from forethought.engine.embedding import EmbeddingPass, Pooling
from forethought.engine.scheduler import Limits
from forethought.engine.sequence import Sequence, Status
from forethought.engine.snapshot import SequenceSnapshot
from forethought.engine.step import Event
from forethought.errors import (
    CapacityError,
    ContextLengthError,
    ParameterError,
    UnknownNameError,
    UsageError,
)
from forethought.model.adapter import Adapter
from forethought.model.sampling import Constraints, SequenceBreakers
from forethought.model.token_adapters import PlacedAdapter
from forethought.outputs import EngineLoad, EngineStats
from forethought.speculative.step_runner import Interrupt


@dataclass(frozen=True, slots=True)
class Begun:
    """A generation that has begun elsewhere and goes on here, with the same tokens."""

    num_tokens: int = 0
    """The last tokens of the sequence, which are its output so far."""
    index: int = 0
    """Number of the sample."""


FRESH = Begun()
"""What begins here."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the prompts and params of an engine are checked against.

    Attributes:
        max_context: tokens that one sequence may have, prompt and output.
        capacity: tokens that the KV cache holds.
        adapters: the names of those that requests may choose.
        drafters: in the order in which they are asked.
        hidden_size: numbers of an embedding; 0: none is computed.
    """

    vocab_size: int
    max_context: int
    capacity: int
    adapters: Ids[str] = ()
    drafters: Ids[str] = ()
    hidden_size: int = 0


class BaseEngine(ABC):
    """Sequences of ids, which generate until ``step`` says that they have ended.

    Args:
        limits: of a step and of a sequence, within the KV cache.
        seed: where the seeds of unseeded requests come from; None: the operating system.

    Attributes:
        stats: counts of all that was computed.
        interrupt: ends a step early.
        ends_with_rows: whether a step ends when sequences do, as somebody waits for that; see
            ``Interrupt``.
    """

    stats: EngineStats
    interrupt: Interrupt

    def __init__(self, limits: Limits, seed: int | None = None) -> None:
        self.limits, self.ends_with_rows = limits, False
        self._seeds = random.Random(seed)

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What requests are checked against."""

    @property
    @abstractmethod
    def load(self) -> EngineLoad:
        """How busy it is; of a moment."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @abstractmethod
    def step(self, max_steps: float = math.inf) -> list[Event]:
        """What has been computed of the sequences that generate. Where it is one call of several
        steps, they are ``max_steps`` at most.
        """

    def check_running(self) -> None:
        """Raises EngineStopped if a part of it has ended."""

    @abstractmethod
    def check_concurrent(self) -> None:
        """Raises ModelError if sequences cannot attend to each other."""

    @abstractmethod
    def start(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        *,
        keep: bool = False,
        constraints: Constraints | None = None,
        breakers: SequenceBreakers | None = None,
    ) -> list[Sequence]:
        """Start ``params.n`` generations from one prompt; see ``Engine.start``."""

    @abstractmethod
    def open(self, prompt_ids: Ids[int]) -> Sequence:
        """A parked sequence of a prompt that has passed ``check_prompt``."""

    @abstractmethod
    def resume(
        self,
        sequence: Sequence,
        params: SamplingParams,
        *,
        constraints: Constraints | None = None,
        breakers: SequenceBreakers | None = None,
        begun: Begun = FRESH,
    ) -> None:
        """Generate from a parked sequence; see ``Engine.resume``."""

    def extend(self, sequence: Sequence, token_ids: Ids[int]) -> None:
        """Append tokens to a parked sequence; they are computed when it is resumed."""
        self._expect_parked(sequence, "extended")
        self._check_ids("extension", token_ids)
        self._check_length(len(sequence.tokens) + len(token_ids))
        if sequence.extended_from is None:
            sequence.extended_from = len(sequence.tokens)
        sequence.tokens.extend(token_ids)
        sequence.prompt_length = len(sequence.tokens)

    @abstractmethod
    def fork(self, sequence: Sequence, length: int | None = None) -> Sequence:
        """A parked copy of the first ``length`` tokens; see ``Engine.fork``."""

    @abstractmethod
    def attend_to(self, sequence: Sequence, others: Mapping[Sequence, int]) -> None:
        """Let a sequence read the tokens of others; see ``Engine.attend_to``."""

    @abstractmethod
    def capture(self, sequence: Sequence, token_ids: Ids[int], start: int = 0) -> SequenceSnapshot:
        """A copy of the KV of a sequence; see ``Engine.capture``."""

    @abstractmethod
    def restore(self, saved: SequenceSnapshot) -> Sequence:
        """A parked sequence of a snapshot; see ``Engine.restore``."""

    @abstractmethod
    def append_snapshot(self, sequence: Sequence, saved: SequenceSnapshot) -> None:
        """Append what a snapshot goes on with; see ``Engine.append_snapshot``."""

    @abstractmethod
    def rewind(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens of a parked sequence from ``length`` on."""

    @abstractmethod
    def abort(self, sequence: Sequence) -> None:
        """End a generation now, without a further event. Parked and closed ones stay so."""

    @abstractmethod
    def cut(self, sequence: Sequence, length: int) -> None:
        """End a generation of which the first ``length`` tokens are wanted."""

    @abstractmethod
    def close(self, sequence: Sequence) -> None:
        """Give a sequence up. Closing twice is fine."""

    @abstractmethod
    def embedding_pass(
        self,
        rows: Ids[Ids[int]],
        pooling: Pooling,
        adapter: str | None = None,
        dimensions: int | None = None,
    ) -> EmbeddingPass:
        """What computes the embeddings of rows that have passed ``check_embedded``, between steps.

        Raises:
            ModelError: the model cannot give its hidden states.
            ParameterError: these have fewer ``dimensions``.
            UnknownNameError: no such adapter.
        """

    @abstractmethod
    def advance(self, embedding_pass: EmbeddingPass) -> None:
        """Run the next forward of a pass of this engine."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything: the engine ends."""

    # ---- adapters ---------------------------------------------------------------------------

    @abstractmethod
    def place_adapter(self, adapter: Adapter) -> PlacedAdapter:
        """An adapter as the model computes with it, which no request can choose yet."""

    @abstractmethod
    def add_adapter(self, adapter: PlacedAdapter) -> None:
        """Let requests choose an adapter."""

    @abstractmethod
    def remove_adapter(self, name: str) -> None:
        """Forget an adapter."""

    # ---- admission --------------------------------------------------------------------------

    def check_prompt(self, prompt_ids: Ids[int], params: SamplingParams) -> None:
        """Check that a prompt can be added with these params.

        Raises:
            ParameterError: an empty prompt, or ids outside the vocabulary.
            UnknownNameError: no such adapter or drafter.
            ContextLengthError: the context cannot hold the prompt and one new token.
            CapacityError: the KV cache cannot, or one step without chunked prefill.
            EngineStopped: a rank of tensor parallelism has ended.
        """
        self.check_running()
        if not prompt_ids:
            raise ParameterError("empty prompt", "there is no token to continue", "Give some text")
        self._check_ids("prompt", prompt_ids)
        self._check_params(params)
        self._check_length(len(prompt_ids) + (params.max_tokens != 0))
        step = self.limits.max_num_tokens
        if not self.limits.chunked_prefill and len(prompt_ids) > step:
            raise CapacityError(
                f"a prompt of {len(prompt_ids)} tokens does not fit into one step",
                f"max_num_tokens is {step} and chunked prefill is off",
                "Raise max_num_tokens or switch enable_chunked_prefill on",
            )

    def check_embedded(self, token_ids: Ids[int]) -> None:
        """Check that a row can be embedded; raises as ``check_prompt``, but the KV cache is no
        limit.
        """
        self.check_running()
        if not token_ids:
            raise ParameterError("empty input", "there is no token to embed", "Give some text")
        self._check_ids("input", token_ids)
        if len(token_ids) > (max_context := self.capabilities.max_context):
            raise ContextLengthError(
                f"an input of {len(token_ids)} tokens does not fit into the context",
                f"it holds {max_context}",
                "Embed its parts",
            )

    def check_resume(self, sequence: Sequence, params: SamplingParams) -> None:
        """Whether a parked sequence can generate with these params; raises as ``resume`` does."""
        self._expect_parked(sequence, "resumed")
        if params.n != 1:
            raise ParameterError(
                "invalid n", f"a live sequence has one continuation, not {params.n}", "Fork it"
            )
        if params.prompt_logprobs is not None and sequence.extended_from is None:
            raise ParameterError(
                "prompt_logprobs of a live sequence",
                "its tokens are computed already, and nothing was added to them",
                "Ask for them when generating from a prompt, or after an extension",
            )
        self._check_params(params)
        self._check_length(len(sequence.tokens) + (params.max_tokens != 0))

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if not isinstance(params.thinking_end, str | None):
            self._check_ids("thinking_end", params.thinking_end)
        self._check_adapter(params.adapter)
        if params.speculation is None:
            return
        drafter, prediction = params.speculation.drafter, params.speculation.prediction
        if not isinstance(prediction, str | None):
            self._check_ids("speculation.prediction", prediction)
        if isinstance(prediction, str):
            raise ParameterError(
                "a prediction in text", "the engine has no tokenizer", "Give its token ids"
            )
        if drafter is not None and drafter not in (drafters := self.capabilities.drafters):
            raise UnknownNameError("drafter", drafter, drafters)

    def _check_adapter(self, name: str | None) -> None:
        if name and name not in (names := self.capabilities.adapters):
            raise UnknownNameError("adapter", name, names)

    def _check_ids(self, what: str, ids: Iterable[int]) -> None:
        size = self.capabilities.vocab_size
        bad = next((token for token in ids if not 0 <= token < size), None)
        if bad is not None:
            raise ParameterError(
                f"token id {bad} in {what}",
                f"the model's vocabulary has the ids 0 to {size - 1}",
                "Use the model's own tokenizer",
                param=what,
            )

    def _check_length(self, length: int) -> None:
        max_context, capacity = self.capabilities.max_context, self.capabilities.capacity
        if length > max_context:
            raise ContextLengthError(
                f"{length} tokens do not fit into the context",
                f"one sequence may have {max_context}, prompt and output together",
                "Shorten the prompt, or raise max_seq_len if the model allows it",
            )
        if length > capacity:
            raise CapacityError(
                f"{length} tokens do not fit into the KV cache",
                f"it holds {capacity}",
                "Shorten the prompt or raise kv_cache_config.max_tokens",
            )

    @staticmethod
    def _expect_parked(sequence: Sequence, done: str) -> None:
        if sequence.status is not Status.PARKED:
            raise UsageError(
                f"the sequence cannot be {done}",
                f"it is {sequence.status.value}",
                "Wait for its generation to end, or abort it; closed ones are gone",
            )

    @staticmethod
    def _check_constraints(params: SamplingParams, constraints: Constraints | None) -> None:
        """Constraints are given if and only if the params restrict the output (ParameterError)."""
        if params.constrains != (constraints is not None):
            raise ParameterError(
                "guided_decoding or a thinking budget, and constraints, belong together",
                f"guided_decoding is {params.guided_decoding}, thinking_budget is "
                f"{params.thinking_budget}, constraints are {constraints}",
                "Text is not known here: llm.grammar and llm.thinking make the constraints",
            )

    @staticmethod
    def _check_breakers(params: SamplingParams, breakers: SequenceBreakers | None) -> None:
        if params.penalises_repeats and params.dry_sequence_breakers and breakers is None:
            raise ParameterError(
                "dry_sequence_breakers in text",
                "the engine has no tokenizer",
                "Give their tokens as breakers (llm.breakers), or dry_sequence_breakers=()",
                param="dry_sequence_breakers",
            )

    @staticmethod
    def _fork_length(sequence: Sequence, length: int | None) -> int:
        """Of a fork at ``length``, by default at the end. UsageError if it cannot be."""
        length = len(sequence.tokens) if length is None else length
        if sequence.status is Status.CLOSED:
            raise UsageError(
                "cannot fork this sequence", "it is closed", "Fork it before it is closed"
            )
        if not 0 < length <= len(sequence.tokens):
            raise UsageError(
                "cannot fork this sequence",
                f"length {length} is not between 1 and its {len(sequence.tokens)} tokens",
                "Fork it at a length that it has had",
            )
        return length

    def _check_rewind(self, sequence: Sequence, length: int) -> None:
        self._expect_parked(sequence, "rewound")
        if not 0 < length <= len(sequence.tokens):
            raise UsageError(
                "cannot rewind this sequence",
                f"length {length} is not between 1 and its {len(sequence.tokens)} tokens",
                "Rewind to a length that it has had",
            )

    def _seed(self, params: SamplingParams) -> int:
        return self._seeds.getrandbits(64) if params.seed is None else params.seed
