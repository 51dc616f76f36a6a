"""Attention layers of transformers' modules that are computed in C++ on a CPU, beside recurrent
ones (``NativeBackend.attention``), over the pages of keys and values.

Each is tried beside its module, in a forward over a few tokens; what does not agree stays in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from forethought.model import backends
from forethought.model.attention.base import ForwardPass
from forethought.model.attention.layer_profile import LayerProfile

_Forward = Callable[..., tuple[Tensor, Any]]


class AttentionLayers:
    """The attention layers of a module.

    Args:
        module: of transformers, probed.
        profiles: of its layers, in the order of their keys and values.
        try_forward: runs the module over a few tokens, within ``over`` of its argument.

    Attributes:
        native: the layers in C++.
        num_native: how many of them agree with their modules, and are used.
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
        self._agreed = set[int]()
        forwards: list[_Forward] = [part.forward for part in candidates]
        for part, forward in zip(candidates, forwards, strict=True):
            part.forward = self._trial_of(int(part.kv_index), forward)  # type: ignore[arg-type]
        try_forward(self)
        for part, forward in zip(candidates, forwards, strict=True):
            index = int(part.kv_index)  # type: ignore[arg-type]
            part.forward = self._forward_of(index) if index in self._agreed else forward
        self.num_native = len(self._agreed)

    @contextmanager
    def over(self, forward_pass: ForwardPass) -> Iterator[None]:
        """While a batch is computed."""
        self.batch_call = self.native.batch_call(forward_pass)
        try:
            yield
        finally:
            self.batch_call = None

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
