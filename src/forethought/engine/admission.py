"""What the engine accepts. Refuses what could never run, before anything has."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids

from forethought.config.sampling import SamplingParams
from forethought.engine.scheduler import Limits
from forethought.errors import (
    CapacityError,
    ContextLengthError,
    ParameterError,
    UnknownNameError,
)
from forethought.model.sampling import Constraints


class Admission:
    """Checks prompts and params against the model and the limits.

    Args:
        limits: of a step, and of a sequence as far as the model is concerned.
        vocab_size: ids are below this.
        capacity: tokens that the whole KV cache holds.
        drafters: the names of the drafters that requests may choose from.
    """

    def __init__(
        self, limits: Limits, vocab_size: int, capacity: int, drafters: Ids[str] = ()
    ) -> None:
        self._limits, self._vocab_size, self._capacity = limits, vocab_size, capacity
        self._drafters = drafters

    def check(self, prompt_ids: Ids[int], params: SamplingParams) -> None:
        """Whether a prompt can be added with these params.

        Raises:
            ParameterError: an empty prompt, or ids outside the vocabulary.
            ContextLengthError: no room for a single new token in the context.
            CapacityError: no room for a single new token in the KV cache.
        """
        if not prompt_ids:
            raise ParameterError("empty prompt", "there is no token to continue", "Give some text")
        self._check_ids("prompt", prompt_ids)
        self._check_params(params)
        self._check_length(len(prompt_ids) + 1)
        step = self._limits.max_num_tokens
        if not self._limits.chunked_prefill and len(prompt_ids) > step:
            raise CapacityError(
                f"a prompt of {len(prompt_ids)} tokens does not fit into one step",
                f"max_num_tokens is {step} and chunked prefill is off",
                "Raise max_num_tokens or switch enable_chunked_prefill on",
            )

    def check_resume(self, tokens: Ids[int], params: SamplingParams) -> None:
        """Whether a parked sequence can generate with these params; raises as ``check`` does."""
        if params.n != 1:
            raise ParameterError(
                "invalid n", f"a live sequence has one continuation, not {params.n}", "Fork it"
            )
        if params.prompt_logprobs is not None:
            raise ParameterError(
                "prompt_logprobs of a live sequence",
                "its earlier tokens are computed already",
                "Ask for them when generating from a prompt",
            )
        self._check_params(params)
        self._check_length(len(tokens) + 1)

    @staticmethod
    def check_constraints(params: SamplingParams, constraints: Constraints | None) -> None:
        """Whether who asks for a shape of the output has brought what keeps to it."""
        if (params.guided_decoding is None) != (constraints is None):
            raise ParameterError(
                "guided_decoding and constraints belong together",
                f"guided_decoding is {params.guided_decoding}, constraints are {constraints}",
                "The engine knows no text: text.guidance makes the constraints of a shape",
            )

    def check_extension(self, tokens: Ids[int], more: Ids[int]) -> None:
        """Whether a parked sequence can be extended; raises as ``check`` does."""
        self._check_ids("extension", more)
        self._check_length(len(tokens) + len(more))

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        drafter = params.speculation.drafter if params.speculation is not None else None
        if drafter is not None and drafter not in self._drafters:
            raise UnknownNameError("drafter", drafter, self._drafters)

    def _check_ids(self, what: str, ids: Iterable[int]) -> None:
        bad = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if bad is not None:
            raise ParameterError(
                f"token id {bad} in {what}",
                f"the model's vocabulary has the ids 0 to {self._vocab_size - 1}",
                "Use the model's own tokenizer",
            )

    def _check_length(self, length: int) -> None:
        if length > self._limits.max_length:
            raise ContextLengthError(
                f"{length} tokens do not fit into the context",
                f"one sequence may have {self._limits.max_length}, prompt and output together",
                "Shorten the prompt, or raise max_seq_len if the model allows it",
            )
        if length > self._capacity:
            raise CapacityError(
                f"{length} tokens do not fit into the KV cache",
                f"it holds {self._capacity}",
                "Shorten the prompt or raise kv_cache_config.max_tokens",
            )
