"""The decoder layers of a transformers' module with recurrent layers, in one call of C++ on a CPU.

Where all that layers do is computed in C++ (``NativeBackend.sublayers``), the first one computes
those that follow, too, which then return what they get. Layers whose hidden states are captured
begin another call. Where something is added to a linear (an adapter), parts are called one by one:
in float32 that gives the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forethought.model import backends
from forethought.model.attention.base import ForwardPass
from forethought.model.attention_layers import AttentionLayers
from forethought.model.recurrent_layers import RecurrentLayers

_Forward = Callable[..., Any]


class DecoderLayers:
    """The decoder layers of a module, whose parts are computed in C++.

    Args:
        layers: of the module, in order.
        recurrent: the recurrent layers among their parts.
        attention: the attention layers among their parts.
        native: what computes them.

    Attributes:
        native: see above.
        rotation: cosines and sines of the first tokens, as the layers have got them; None: they
            have got none.
    """

    rotation: Any = None

    def __init__(
        self,
        layers: Sequence[nn.Module],
        recurrent: RecurrentLayers,
        attention: AttentionLayers,
        native: Any,
    ) -> None:
        self._layers, self.native = layers, native
        self._recurrent, self._attention = recurrent, attention
        self._forwards: list[_Forward] = [layer.forward for layer in layers]
        self._num_outputs = [0] * len(layers)
        """Length of the tuple that a layer returns, hidden states first; 0: it returns a tensor."""
        self._ends: list[int] | None = None
        """By layer, the end of a call that begins there; None: parts are called one by one."""
        self._end = 0
        """The layer after those of the last call."""

    @classmethod
    def of(
        cls,
        layers: Sequence[nn.Module],
        recurrent: RecurrentLayers,
        attention: AttentionLayers,
        try_forward: Callable[[], object],
    ) -> DecoderLayers | None:
        """Those of a module; None: a layer has other parts, or does not agree with its module in
        ``try_forward``, a forward over a few tokens.
        """
        native = backends.cpu().sublayers(layers, attention.native, recurrent.native)
        if native is None:
            return None
        decoder = cls(layers, recurrent, attention, native)
        if not decoder._agrees(try_forward):
            return None
        for index, layer in enumerate(layers):
            layer.forward = decoder._forward_of(index)
        return decoder

    @contextmanager
    def over(self, forward_pass: ForwardPass) -> Iterator[None]:
        """While a batch is computed."""
        self._end, self._ends = 0, None
        if not self.native.are_hooked():
            size = len(self._layers)
            begins = sorted({0, *forward_pass.layer_ids & set(range(size))})
            ends = dict(itertools.pairwise([*begins, size]))
            self._ends = [ends.get(begin, size) for begin in range(size)]
        try:
            yield
        finally:
            self._ends = None

    def _agrees(self, try_forward: Callable[[], object]) -> bool:
        """Whether each layer computes what its module does, and reads the output of the one before
        it and the rotation of the first one.
        """
        agreements, outputs, rotations = list[bool](), list[Tensor](), list[Any]()

        def trial_of(index: int, forward: _Forward) -> _Forward:
            def compute(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                output = forward(hidden_states, *args, **kwargs)
                is_tensor = isinstance(output, Tensor)
                self._num_outputs[index] = 0 if is_tensor else len(output)
                y = output if is_tensor else output[0]
                arguments = self._arguments(kwargs)
                rotations.append(arguments[-1])
                follows = not outputs or hidden_states is outputs[-1]
                follows &= rotations[0] is rotations[-1]
                agreed = self.native.agrees(index, hidden_states, y, *arguments)
                if not agreed and y.dtype != torch.float32:
                    x = hidden_states.float()
                    exact = _unrounded(forward, x, *args, **kwargs)
                    agreed = exact is not None and self.native.agrees(index, x, exact, *arguments)
                agreements.append(follows and agreed)
                outputs.append(y)
                return output

            return compute

        for index, layer in enumerate(self._layers):
            layer.forward = trial_of(index, self._forwards[index])
        try:
            try_forward()
        finally:
            for layer, forward in zip(self._layers, self._forwards, strict=True):
                layer.forward = forward
        self.rotation = rotations[0] if rotations else None
        return len(agreements) == len(self._layers) and all(agreements)

    def _forward_of(self, index: int) -> _Forward:
        def compute(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._ends is None:
                return self._forwards[index](hidden_states, *args, **kwargs)
            if index >= self._end:
                self._end = self._ends[index]
                layers = range(index, self._end)
                hidden_states = self.native.compute(layers, hidden_states, *self._arguments(kwargs))
            count = self._num_outputs[index]
            return (hidden_states, *[None] * (count - 1)) if count else hidden_states

        return compute

    def _arguments(self, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        rotation = kwargs.get("position_embeddings")
        return self._attention.batch_call, self._recurrent.token_table, rotation


def _unrounded(forward: _Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """The hidden states that a layer in 16 bits gives of float32, where the next product may round
    its inputs by a step less or more; None: it cannot.
    """
    try:
        output = forward(x, *args, **kwargs)
    except RuntimeError:  # torch computes a part of it
        return None
    y: Tensor = output if isinstance(output, Tensor) else output[0]
    return y
