"""From what a caller wants an output to look like to constraints that the engine can follow.

Everything that can be wrong with a schema, an expression or a grammar is told here, before anything
runs. llguidance does the work; it is loaded with the first request that needs it. Knows nothing
about sequences.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from forethought.errors import DependencyError, ParameterError
from forethought.guided import GuidedDecodingParams
from forethought.params import SamplingParams
from forethought.text.grammar import Bits, GrammarConstraint, read_error
from forethought.text.tokenizer import Tokenizer

COMPILED = 64
"""Grammars that are kept for requests to come."""


class Guidance:
    """Compiles grammars for one model; safe to use from several threads.

    Args:
        tokenizer: of the model.
        vocab_size: width of the model's logits; may differ from the tokenizer's size.
        eos_ids: the model's end-of-sequence ids.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._hf, self._vocab_size = tokenizer.hf, vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        self._compiled = functools.lru_cache(COMPILED)(self._compile)

    def constraints(self, params: SamplingParams) -> Callable[[], GrammarConstraint] | None:
        """What makes the constraint of each sample; None if the params ask for no shape.

        Raises:
            ParameterError: the shape is malformed, uses what is not supported, or cannot be written
                with the model's tokens; or the tokenizer is none that this works with.
            DependencyError: llguidance is not installed.
        """
        if params.guided_decoding is None:
            return None
        return self._compiled(params.guided_decoding, params.ignore_eos).fresh

    def _compile(self, shape: GuidedDecodingParams, ignore_eos: bool) -> GrammarConstraint:
        tokens = self._tokens  # first: it tells if llguidance is missing
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(shape)
        except ValueError as error:
            raise _refuse(shape, str(error)) from error
        limits = LLParserLimits(verbose_errors=False)
        start = LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if start.is_error():
            raise _refuse(shape, read_error(start))
        ends = frozenset() if ignore_eos else self._eos_ids
        known = range(min(tokens.vocab_size, self._vocab_size))
        never = {*tokens.eos_tokens, *self._eos_ids} - ends
        writable = self._pack(token for token in known if token not in never)
        constraint = GrammarConstraint(start, writable, self._pack(ends))
        if not constraint.mask([]).any():
            raise _refuse(shape, "no output can be written in it with the model's tokens")
        if constraint.is_complete([]):
            raise _refuse(shape, "only the empty output keeps to it")
        return constraint

    @functools.cached_property
    def _tokens(self) -> Any:
        """The vocabulary as llguidance has it."""
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise DependencyError.missing("llguidance", "guided_decoding", "guided") from error
        if not self._hf.is_fast:
            raise ParameterError(
                "guided_decoding needs a fast tokenizer",
                f"this model's is a {type(self._hf).__name__}",
                "Convert it, so that its directory has a tokenizer.json",
            )
        hf, size = self._hf, max(self._hf.get_vocab().values()) + 1
        ends = sorted(token for token in self._eos_ids if token < size)
        if not ends and hf.eos_token_id is None:  # llguidance does not work without one
            hf = copy.deepcopy(hf)
            hf.add_special_tokens({"eos_token": "<|end of output|>"})
        return from_tokenizer(hf, eos_token=ends or None)

    def _pack(self, ids: Iterable[int]) -> Bits:
        bits = np.zeros(self._vocab_size, np.bool_)
        bits[list(ids)] = True
        return np.packbits(bits, bitorder="little")


def _grammar(shape: GuidedDecodingParams) -> str:
    """In llguidance's own notation.

    Raises:
        ValueError: it is malformed.
    """
    from llguidance import LLMatcher, grammar_from

    if shape.json is not None:
        return LLMatcher.grammar_from_json_schema(str(shape.json))
    if shape.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}')
    if shape.regex is not None:
        return LLMatcher.grammar_from_regex(shape.regex)
    if shape.grammar is not None:
        return grammar_from("grammar", shape.grammar)
    choices = (json.dumps(text, ensure_ascii=False) for text in shape.choice or ())
    return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))


def _refuse(shape: GuidedDecodingParams, reason: str) -> ParameterError:
    return ParameterError(
        f"invalid {shape.kind} in guided_decoding", reason, f"Change the {shape.kind}"
    )
