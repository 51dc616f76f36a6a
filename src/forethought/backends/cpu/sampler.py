"""Sampling in C++ (``sampling.h``): the next tokens of rows of logits, and their scores.

``model.sampling`` is the reference implementation. Probabilities are rounded otherwise there, so a
uniform sample within some 1e-7 of the border between two tokens may give the other one.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.structures import DrawsStruct, SamplingStruct
from forethought.model.backends import NativeSampling
from forethought.model.device import native_threads
from forethought.model.sampling.distribution import TokenContext

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class NativeSampler(NativeSampling):
    """Samples from logits on a CPU, which are float32 ``[N, V]``."""

    library: ctypes.CDLL = field(default_factory=load_library)

    def draw_tokens(
        self, logits: Tensor, contexts: Sequence[TokenContext], uniforms: Sequence[float]
    ) -> Tensor:
        """As ``model.sampling.sampler.draw_tokens``: int64 ``[N]``."""
        logits, keep = logits.contiguous(), list[object]()
        distinct = {id(context): context for context in contexts}
        numbers = {key: number for number, key in enumerate(distinct)}
        samplings = [packed_sampling(context, keep) for context in distinct.values()]
        sampling_of = array("i", [numbers[id(context)] for context in contexts])
        uniform_values = array("d", uniforms)
        tokens = torch.empty(len(contexts), dtype=torch.int64)
        draws = DrawsStruct(
            logits=logits.data_ptr(),
            samplings=(SamplingStruct * len(samplings))(*samplings),
            sampling_of=sampling_of.buffer_info()[0],
            uniforms=uniform_values.buffer_info()[0],
            tokens=tokens.data_ptr(),
            num_rows=len(contexts),
            vocab=logits.shape[1],
            num_threads=native_threads(),
        )
        self.library.draw_tokens(ctypes.byref(draws))
        return tokens

    def score_logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> Tensor:
        """As ``model.sampling.sampler.score_logprobs``: float64 ``[N, 2 + 2 min(k, V)]``."""
        (rows, vocab), logits, tokens = logits.shape, logits.contiguous(), tokens.contiguous()
        k = min(k, vocab)
        scores = torch.empty(rows, 2 + 2 * k, dtype=torch.float64)
        self.library.score_logprobs(
            *map(_address, (logits, tokens)), rows, vocab, k, _address(scores)
        )
        return scores

    def score_confidence(self, logits: Tensor, tokens: Tensor, ks: Sequence[int]) -> Tensor:
        """As ``model.sampling.sampler.score_confidence``: float64 ``[N, 4]``."""
        (rows, vocab), logits, tokens = logits.shape, logits.contiguous(), tokens.contiguous()
        sizes = torch.tensor([min(k, vocab) for k in ks])
        scores = torch.empty(rows, 4, dtype=torch.float64)
        self.library.score_confidences(
            *map(_address, (logits, tokens, sizes)), rows, vocab, _address(scores)
        )
        return scores


def packed_sampling(context: TokenContext, keep: list[object]) -> SamplingStruct:
    """What the distribution of a token depends on; ``keep`` gets the arrays that it points to.

    Tokens of the output that are not in the context yet are given beside it.
    """
    params, mask = context.params, _mask(context)
    bias = params.logit_bias or {}
    penalises_output = bool(params.presence_penalty or params.frequency_penalty)
    penalises = params.repetition_penalty != 1.0 or penalises_output
    past = array("q", [*context.prompt, *context.output] if penalises else ())
    num_before_end = max(0, params.min_tokens - context.num_output)
    held_ends = array("q", params.end_ids(context.eos_ids) if num_before_end else ())
    bias_ids, bias_values = array("q", bias), array("f", bias.values())
    dry = context.dry_penalties
    dry_ids, dry_values = array("q", dry), array("f", dry.values())
    keep += [past, held_ends, bias_ids, bias_values, dry_ids, dry_values, mask]
    return SamplingStruct(
        bias_ids=bias_ids.buffer_info()[0],
        bias=bias_values.buffer_info()[0],
        past=past.buffer_info()[0],
        dry_ids=dry_ids.buffer_info()[0],
        dry=dry_values.buffer_info()[0],
        held_ends=held_ends.buffer_info()[0],
        mask=None if mask is None else mask.data_ptr(),
        top_p=params.top_p,
        temperature=params.temperature,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        top_n_sigma=params.top_n_sigma,
        xtc_probability=params.xtc_probability,
        xtc_threshold=params.xtc_threshold,
        top_k=min(params.top_k, MAX_INT32),
        num_bias=len(bias_ids),
        num_past=len(past),
        num_prompt=len(context.prompt) if penalises else 0,
        num_dry=len(dry_ids),
        num_held_ends=len(held_ends),
        num_before_end=num_before_end,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        confidence_k=params.confidence or 0,
    )


def _mask(context: TokenContext) -> Tensor | None:
    """Bits of the tokens that a constraint allows; None: any, or none, which forbids none."""
    if context.constraint is None:
        return None
    mask = context.constraint.mask(context.output)
    if mask is None or not mask.any():
        return None
    return torch.from_numpy(mask.copy())  # its own may be read-only


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
