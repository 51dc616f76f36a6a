"""The decoder layers of a transformers' module with recurrent layers, in one call of C++ on a CPU.

Where all that layers do is computed in C++ (``NativeBackend.sublayers``), the first one computes
those that follow, too, which then return what they get. Layers whose hidden states are captured
begin another call. Where something is added to a linear (an adapter), parts are called one by one:
in float32 that gives the same bits.
"""

from __future__ import annotations

import inspect
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
_ROTATION, _EMBEDDINGS = "position_embeddings", "original_hidden_states"
"""Arguments of layers."""


class DecoderLayers:
    """The decoder layers of a module, whose parts are computed in C++.

    Args:
        layers: of the module, in order.
        recurrent: the recurrent layers among their parts; None: there are none.
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
        recurrent: RecurrentLayers | None,
        attention: AttentionLayers,
        native: Any,
    ) -> None:
        self._layers, self.native = layers, native
        self._recurrent, self._attention = recurrent, attention
        self._forwards: list[_Forward] = [layer.forward for layer in layers]
        self._num_outputs = [0] * len(layers)
        """Length of the tuple that a layer returns, hidden states first; 0: it returns a tensor."""
        self._embeddings_at = [_position(layer, _EMBEDDINGS) for layer in layers]
        self._ends: list[int] | None = None
        """By layer, the end of a call that begins there; None: parts are called one by one."""
        self._end = 0
        """The layer after those of the last call."""
        self._rotation: Any = None
        """Of the tokens of the batch, as ``rotary`` gave it or a layer got it."""

    @classmethod
    def of(
        cls,
        layers: Sequence[nn.Module],
        recurrent: RecurrentLayers | None,
        attention: AttentionLayers,
        rotary: nn.Module | None,
        try_forward: Callable[[], object],
    ) -> DecoderLayers | None:
        """Those of a module; None: a layer has other parts, or does not agree with its module in
        ``try_forward``, a forward over a few tokens.

        Args:
            layers, recurrent, attention: as above.
            rotary: what gives the rotation of a batch before the layers; None: nothing does.
            try_forward: see above.
        """
        recurrence = None if recurrent is None else recurrent.native
        native = backends.cpu().sublayers(layers, attention.native, recurrence)
        if native is None:
            return None
        decoder = cls(layers, recurrent, attention, native)
        hook = None if rotary is None else rotary.register_forward_hook(decoder._keep_rotation)
        if not decoder._agrees(try_forward):
            if hook is not None:
                hook.remove()
            return None
        for index, layer in enumerate(layers):
            layer.forward = decoder._forward_of(index)
        return decoder

    @contextmanager
    def over(self, forward_pass: ForwardPass) -> Iterator[None]:
        """While a batch is computed."""
        self._end, self._ends, self._rotation = 0, None, None
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
        agreements, outputs, rotations = list[bool](), list[Tensor](), dict[int, Any]()

        def trial_of(index: int, forward: _Forward) -> _Forward:
            def compute(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                output = forward(hidden_states, *args, **kwargs)
                is_tensor = isinstance(output, Tensor)
                self._num_outputs[index] = 0 if is_tensor else len(output)
                y = output if is_tensor else output[0]
                arguments = self._arguments(index, args, kwargs)
                rotations[index] = kwargs.get(_ROTATION)
                follows = not outputs or hidden_states is outputs[-1]
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
        agreed = len(agreements) == len(self._layers) and all(agreements)
        return agreed and self._share_rotation(rotations)

    def _share_rotation(self, rotations: dict[int, Any]) -> bool:
        """Whether one rotation is that of all layers, of which those without attention may get
        none, and known before the first one.
        """
        known = [rotation for rotation in rotations.values() if rotation is not None]
        self.rotation = known[0] if known else None
        if rotations[0] is not self.rotation and self._rotation is not self.rotation:
            return False
        return all(
            rotation is self.rotation or (rotation is None and not self.native.has_attention(index))
            for index, rotation in rotations.items()
        )

    def _keep_rotation(self, rotary: nn.Module, args: Any, output: Any) -> None:
        self._rotation = output

    def _forward_of(self, index: int) -> _Forward:
        def compute(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._ends is None:
                return self._forwards[index](hidden_states, *args, **kwargs)
            if index >= self._end:
                self._end = self._ends[index]
                layers = range(index, self._end)
                arguments = self._arguments(index, args, kwargs)
                hidden_states = self.native.compute(layers, hidden_states, *arguments)
            count = self._num_outputs[index]
            return (hidden_states, *[None] * (count - 1)) if count else hidden_states

        return compute

    def _arguments(
        self, index: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """What ``native`` reads beside hidden states; ``args`` are those after these."""
        rotation = kwargs.get(_ROTATION)
        rotation = self._rotation if rotation is None else rotation
        at = self._embeddings_at[index]
        embeddings = kwargs.get(_EMBEDDINGS)
        if at is not None and at < len(args):
            embeddings = args[at]
        tokens = None if self._recurrent is None else self._recurrent.token_table
        return self._attention.batch_call, tokens, rotation, embeddings


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


def _position(layer: nn.Module, name: str) -> int | None:
    """Of an argument among those after the hidden states; None: the layer has no such argument."""
    names = [*inspect.signature(layer.forward).parameters][1:]
    return names.index(name) if name in names else None
