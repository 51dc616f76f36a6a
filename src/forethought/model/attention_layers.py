"""Attention layers of transformers' modules that are computed in C++ on a CPU, beside recurrent
ones (``NativeBackend.attention``), over the pages of keys and values.

Each is tried beside its module, in a forward over a few tokens. Of one that does not agree, torch
computes queries, keys and values, and C++ attends with them, if that gives what torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from forethought.model import backends
from forethought.model.attention.base import ForwardPass, KvLayout, Scoring
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.tolerance import TOLERANCES, is_close

_Forward = Callable[..., tuple[Tensor, Any]]
_States = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of the new tokens, as of ``ForwardPass.attend``."""
_Attend = Callable[[ForwardPass, int, _States, Scoring], Tensor]


class _CorePass(ForwardPass):
    """A forward pass that attends by a function of it, the layer, and what ``attend`` gets."""

    def __init__(self, forward_pass: ForwardPass, attend: _Attend) -> None:
        super().__init__(forward_pass.batch, forward_pass.layer_ids)
        self.states, self._pass, self._attend = forward_pass.states, forward_pass, attend

    @override
    def layout(self) -> KvLayout:
        return self._pass.layout()

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return self._attend(self._pass, layer, (q, k, v), scoring)


class AttentionLayers:
    """The attention layers of a module.

    Args:
        module: of transformers, probed.
        profiles: of its layers, in the order of their keys and values.
        try_forward: runs the module over a few tokens, within ``over`` of its argument.

    Attributes:
        native: the layers in C++.
        num_native: how many of them agree with their modules, and are used.
        profiles: of the layers, whose values are as wide as their keys where C++ attends.
        batch_call: the batch that is computed, as ``native`` reads it; None: none is.
    """

    def __init__(
        self,
        module: nn.Module,
        profiles: Sequence[LayerProfile],
        try_forward: Callable[[AttentionLayers], object],
    ) -> None:
        parts = [part for part in module.modules() if hasattr(part, "kv_index")]
        parts.sort(key=lambda part: int(part.kv_index))  # type: ignore[arg-type]
        self.native = backends.cpu().attention(parts, profiles)
        self.batch_call: Any = None
        candidates = [part for part in parts if self.native.is_known(part.kv_index)]
        self._agreed, self._cores = set[int](), set[int]()
        self._attend: _Attend = self._try_core
        self.profiles = tuple(
            _with_wide_values(profile) if self.native.has_core(index) else profile
            for index, profile in enumerate(profiles)
        )
        forwards: list[_Forward] = [part.forward for part in candidates]
        for part, forward in zip(candidates, forwards, strict=True):
            part.forward = self._trial_of(int(part.kv_index), forward)  # type: ignore[arg-type]
        try_forward(self)
        for part, forward in zip(candidates, forwards, strict=True):
            index = int(part.kv_index)  # type: ignore[arg-type]
            part.forward = self._forward_of(index) if index in self._agreed else forward
        self.num_native = len(self._agreed)
        self.profiles = tuple(
            profile if index in self._cores | self._agreed else profiles[index]
            for index, profile in enumerate(self.profiles)
        )
        self._attend = self._attend_by_core

    @property
    def has_native(self) -> bool:
        """Whether C++ attends in any layer."""
        return bool(self._agreed or self._cores)

    @contextmanager
    def over(self, forward_pass: ForwardPass) -> Iterator[ForwardPass]:
        """While a batch is computed; what layers that torch computes attend by."""
        self.batch_call = self.native.batch_call(forward_pass)
        try:
            yield _CorePass(forward_pass, self._attend)
        finally:
            self.batch_call = None

    def _attend_by_core(
        self, forward_pass: ForwardPass, layer: int, states: _States, scoring: Scoring
    ) -> Tensor:
        if layer not in self._cores:
            return forward_pass.attend(layer, *states, scoring)
        outputs: Tensor = self.native.attend(layer, states, self.batch_call, scoring)
        return outputs

    def _try_core(
        self, forward_pass: ForwardPass, layer: int, states: _States, scoring: Scoring
    ) -> Tensor:
        """Of the first tokens of one sequence."""
        if not self.native.has_core(layer):
            return forward_pass.attend(layer, *states, scoring)
        expected = _causal_attention(states, scoring)
        y = self.native.attend(layer, states, self.batch_call, scoring)
        if expected.dtype in TOLERANCES and is_close(y, expected):
            self._cores.add(layer)
        return expected

    def _trial_of(self, index: int, forward: _Forward) -> _Forward:
        def compute(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            expected = forward(hidden_states, *args, **kwargs)
            rotation = kwargs.get("position_embeddings")
            if self.native.agrees(index, hidden_states, self.batch_call, rotation, expected[0]):
                self._agreed.add(index)
            return expected

        return compute

    def _forward_of(self, index: int) -> _Forward:
        def compute(
            hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any
        ) -> tuple[Tensor, None]:
            assert self.batch_call is not None, "the layer is computed within ``over``"
            return self.native.compute(
                index, hidden_states, self.batch_call, position_embeddings
            ), None

        return compute


def _with_wide_values(profile: LayerProfile) -> LayerProfile:
    """With values as wide as keys."""
    shape = replace(profile.shape, value_dim=profile.shape.key_dim)
    return replace(profile, shape=shape)


def _causal_attention(states: _States, scoring: Scoring) -> Tensor:
    """``ForwardPass.attend`` of the first tokens of one sequence, fewer than any window has."""
    q, k, v = (x.transpose(0, 1) for x in states)
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    is_later = scores.new_ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(is_later, -math.inf).softmax(-1)
    return (weights @ v).transpose(0, 1)
