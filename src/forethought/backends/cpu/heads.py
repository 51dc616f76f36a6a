"""Heads of residual blocks over one hidden state, and a beam search with one, each in one call of
``forward.cpp``."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.network import NativeNetwork
from forethought.backends.cpu.packed_linear import PackedLinear
from forethought.backends.cpu.structures import BeamsStruct, LinearStruct
from forethought.model.device import native_threads
from forethought.speculative.drafters.redrafter import Beams, first_beams
from forethought.speculative.heads.medusa import MedusaHeads, RankedTokens, linears_of
from forethought.speculative.heads.redrafter import BeamHead


class NativeHeads:
    """Each head is ``x + silu(W x + b)`` for each block, and a projection; all read one state.

    Args:
        heads: the linears of each one, those of its blocks and then the projection.
        dtype: of the packed weights.
    """

    def __init__(self, heads: Sequence[Sequence[nn.Linear]], dtype: torch.dtype) -> None:
        self._library, self._num_blocks = load_library(), len(heads[0]) - 1
        self._packed = [_packed(linear, dtype) for linears in heads for linear in linears]
        structs = [packed.struct for packed in self._packed]
        self._structs = (LinearStruct * len(structs))(*structs)
        self._num_outputs = heads[0][-1].out_features

    def __call__(self, states: Tensor, count: int = 1) -> Tensor:
        """The first ``count`` heads: states ``[N, width]`` -> float32 ``[count, N, outputs]``."""
        x = states.float().contiguous()
        logits = torch.empty(count, len(x), self._num_outputs, dtype=torch.float32)
        self._library.residual_heads(
            self._structs,
            count,
            self._num_blocks,
            ctypes.c_void_p(x.data_ptr()),
            len(x),
            ctypes.c_void_p(logits.data_ptr()),
            native_threads(),
        )
        return logits

    def most_probable(
        self, states: Tensor, count: int, width: int
    ) -> tuple[array[float], array[int]]:
        """The ``width`` most probable outputs of the first ``count`` heads.

        Returns:
            Log-probabilities, falling, and outputs: ``[count, N, width]`` each.
        """
        logits = self(states, count)
        rows, size = logits.shape[0] * logits.shape[1], logits.shape[0] * logits.shape[1] * width
        logprobs, outputs = array("f", bytes(4 * size)), array("q", bytes(8 * size))
        self._library.top_logprobs(
            ctypes.c_void_p(logits.data_ptr()),
            *(rows, self._num_outputs, width),
            ctypes.c_void_p(logprobs.buffer_info()[0]),
            ctypes.c_void_p(outputs.buffer_info()[0]),
        )
        return logprobs, outputs


class BeamLevel(NamedTuple):
    """The beams of one length after each of N roots, the most probable first."""

    tokens: list[list[int]]
    parents: list[list[int]]
    """Their numbers among those of the length before."""
    scores: list[list[float]]
    """Log-probabilities."""


class NativeBeams:
    """Finds the most probable beams of each length.

    Args:
        head: its weights are copied.
        target: whose embeddings it reads.
        dtype: of the copies.
    """

    def __init__(self, head: BeamHead, target: NativeNetwork, dtype: torch.dtype) -> None:
        self._library, self._target = load_library(), target
        recur, enter = (
            None if linear is None else _packed(linear, dtype)
            for linear in (head.recur, head.enter)
        )
        linears = [_packed(linear, dtype) for linear in head.linears]
        self._structs = {
            "recur": None if recur is None else ctypes.pointer(recur.struct),
            "enter": None if enter is None else ctypes.pointer(enter.struct),
            "head": (LinearStruct * len(linears))(*(linear.struct for linear in linears)),
            "ids": None if head.token_map is None else head.token_map.data_ptr(),
        }
        self._held = [recur, enter, *linears, head.token_map]
        self._num_blocks, self._vocab = len(linears) - 1, head.linears[-1].out_features

    def __call__(
        self,
        contexts: Tensor,
        roots: Sequence[int],
        width: int,
        length: int,
        min_logprob: float = -math.inf,
    ) -> list[BeamLevel]:
        """Search after N roots at once, until all beams are less probable than ``min_logprob``.

        Args:
            contexts: ``[N, hidden]``, the target's states that the roots were sampled from.
            roots: N ids.
            width: beams of a length, if there are as many.
            length: tokens of a beam at most.
            min_logprob: see above.
        """
        states, count = contexts.float().contiguous(), len(roots)
        ids, size = array("q", roots), length * len(roots) * width
        tokens, parents = array("q", bytes(8 * size)), array("q", bytes(8 * size))
        scores = array("f", bytes(4 * size))
        search = BeamsStruct(
            **self._structs,
            contexts=states.data_ptr(),
            roots=ids.buffer_info()[0],
            tokens=tokens.buffer_info()[0],
            parents=parents.buffer_info()[0],
            scores=scores.buffer_info()[0],
            num_blocks=self._num_blocks,
            num_roots=count,
            width=width,
            length=length,
            num_threads=native_threads(),
            min_logprob=min_logprob,
        )
        model = self._target.forward.model
        num_levels = self._library.search_beams(ctypes.byref(model), ctypes.byref(search))
        levels, num_beams = list[BeamLevel](), 1
        for level in range(num_levels):
            num_beams = min(width, num_beams * self._vocab)
            begins = [(level * count + root) * width for root in range(count)]
            rows = [slice(begin, begin + num_beams) for begin in begins]
            levels.append(
                BeamLevel(
                    [list(tokens[row]) for row in rows],
                    [list(parents[row]) for row in rows],
                    [list(scores[row]) for row in rows],
                )
            )
        return levels


def _packed(linear: nn.Linear, dtype: torch.dtype) -> PackedLinear:
    bias = None if linear.bias is None else linear.bias.to(dtype)
    return PackedLinear.pack(linear.weight.to(dtype), bias)


class NativeDraftHeads:
    """The forward of some heads in C++; the reference is :class:`DraftHeads`.

    Args:
        heads: their weights are copied.
        dtype: of the copies; logits are float32.
    """

    forward_path = "native"

    def __init__(self, heads: MedusaHeads, dtype: torch.dtype) -> None:
        self.token_map, self.vocab = heads.token_map, heads.shape.vocab
        self._count = len(heads)
        self._ids = None if heads.token_map is None else heads.token_map.tolist()
        self._heads = NativeHeads([linears_of(head) for head in heads], dtype)

    def __len__(self) -> int:
        return self._count

    def __call__(self, states: Tensor, count: int) -> Tensor:
        """Logits of the first ``count`` heads."""
        return self._heads(states, count)

    def most_probable(self, states: Tensor, count: int, width: int) -> RankedTokens:
        """The ``width`` most probable tokens of the first ``count`` heads, ranked."""
        logprobs, outputs = self._heads.most_probable(states, count, width)
        tokens = list(outputs) if self._ids is None else [self._ids[output] for output in outputs]
        begins = [
            [(head * len(states) + row) * width for row in range(len(states))]
            for head in range(count)
        ]
        return RankedTokens(
            [[list(logprobs[at : at + width]) for at in rows] for rows in begins],
            [[tokens[at : at + width] for at in rows] for rows in begins],
        )


class NativeBeamSearch:
    """The same search in one call of C++; the reference is :class:`BeamSearch`.

    Args:
        beams: finds those of each length.
    """

    forward_path = "native"

    def __init__(self, beams: NativeBeams) -> None:
        self._beams = beams

    def __call__(
        self,
        contexts: Tensor,
        roots: Sequence[int],
        width: int,
        length: int,
        min_logprob: float = -math.inf,
    ) -> list[Beams]:
        """Search in C++, for all contexts in one call."""
        levels = self._beams(contexts, roots, width, length, min_logprob)
        ends = [0, *accumulate(len(level.tokens[0]) for level in levels)]
        starts, results = first_beams(ends), list[Beams]()
        for root in range(len(roots)):
            tokens = [token for level in levels for token in level.tokens[root]]
            parents = [parent for level in levels for parent in level.parents[root]]
            scores = [score for level in levels for score in level.scores[root]]
            order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
            useful = [beam for beam in order if scores[beam] >= min_logprob]
            results.append(Beams(tokens, list(map(add, parents, starts)), useful, ends))
        return results
