"""Places in a network where its hidden states can be taken: drafting heads read them.

With n layers: place i < n is the residual stream as it enters layer i (place 0: the embeddings);
place n is what leaves the last layer; ``FINAL`` is that after the final norm, from which the logits
are computed. Knows nothing about who reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from forethought.model.attention.base import ForwardPass

FINAL = -1
"""Behind the final norm."""


class StateReader(Protocol):
    """Somebody who keeps hidden states."""

    @property
    def places(self) -> Sequence[int]:
        """Which ones."""

    def write(self, slots: Tensor, states: Mapping[int, Tensor]) -> None:
        """Tokens at ``slots`` int64 [T] were computed; ``states`` are [T, hidden] by place."""


@contextmanager
def tapped(model: nn.Module, forward_pass: ForwardPass) -> Iterator[None]:
    """While it is open, a transformers model leaves the states that the pass wants in it.

    Args:
        model: the decoder; with ``layers`` and ``norm``, unless only ``FINAL`` is wanted.
        forward_pass: of the one forward that is made meanwhile, over a batch of one.
    """

    def entering(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["hidden_states"]
            forward_pass.tap(place, x[0])

        return hook

    def leaving(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        forward_pass.tap(FINAL, output[0][0])

    if not forward_pass.taps:
        yield
        return
    handles = []
    if forward_pass.taps - {FINAL}:
        handles += [
            layer.register_forward_pre_hook(entering(place), with_kwargs=True)
            for place, layer in enumerate([*model.layers, model.norm])
            if place in forward_pass.taps
        ]
    if FINAL in forward_pass.taps:
        handles.append(model.register_forward_hook(leaving))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
