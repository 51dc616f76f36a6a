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
from transformers import PreTrainedModel

from forethought.errors import ModelError
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


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a transformers model, in order, whatever the module calls their list.

    It is the one outermost ``ModuleList`` with as many entries as the config has layers:
    ``layers``, GPT-2's ``h``, OPT's ``decoder.layers``.

    Raises:
        ModelError: there is no such list, or more than one.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    outer = [
        module
        for name, module in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
    ]
    if len(outer) != 1:
        found = ", ".join(lists) or "none"
        raise ModelError(
            f"the hidden states of a {model.config.model_type} model cannot be taken",
            f"its list of {count} decoder layers is not to be told among its modules ({found})",
            "Draft with something that reads no hidden states of single layers",
        )
    return list(outer[0])


@contextmanager
def tapped(model: PreTrainedModel, forward_pass: ForwardPass) -> Iterator[None]:
    """While it is open, a transformers model leaves the states that the pass wants in it.

    Args:
        model: the decoder, without its output projection.
        forward_pass: of the one forward that is made meanwhile, over a batch of one.

    Raises:
        ModelError: states inside are wanted, and its decoder layers cannot be found.
    """

    def entering(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["hidden_states"]
            forward_pass.tap(place, x[0])

        return hook

    def leaving(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x: Tensor = output if isinstance(output, Tensor) else output[0]
            forward_pass.tap(place, x[0])

        return hook

    if not forward_pass.taps:
        yield
        return
    handles = []
    if forward_pass.taps - {FINAL}:
        layers = decoder_layers(model)
        handles += [
            layer.register_forward_pre_hook(entering(place), with_kwargs=True)
            for place, layer in enumerate(layers)
            if place in forward_pass.taps
        ]
        if len(layers) in forward_pass.taps:
            handles.append(layers[-1].register_forward_hook(leaving(len(layers))))
    if FINAL in forward_pass.taps:
        handles.append(model.register_forward_hook(leaving(FINAL)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
