"""The recurrent layers of a model as a backend computes them: all tokens of a batch in one call per
layer, from and to packed states.

A backend derives its layers, its table and its ``Recurrence`` from these; ``RecurrentLayers`` tries
them beside their modules, which are the reference.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from forethought.kv.recurrent import LayerState, PackedState, State, StateView
from forethought.model.recurrent_description import describe
from forethought.model.tolerance import TOLERANCES, is_close


class RecurrentLayer(Protocol):
    """A recurrent layer in a backend."""

    @property
    def views(self) -> Mapping[tuple[str, int], StateView]:
        """Where the parts of its state are in a packed state, in the shapes of the module."""
        ...

    @property
    def state_size(self) -> int:
        """Floats of its state."""
        ...

    def compute(self, x: Tensor, tokens: Any) -> Tensor:
        """x ``[1, T, hidden]`` -> the same shape; reads and writes the states of a ``TokenTable``
        of the backend.
        """
        ...

    def by_linears(self, x: Tensor, tokens: Any) -> Tensor:
        """As ``compute``, with the products by the module's linears, which may be hooked."""
        ...


class TokenTable:
    """The addresses of the states before and after the tokens of a batch.

    Args:
        recurrence: the layers whose states they are.
        num_tokens: T, tokens of the batch.
        rows: packed indices at which its sequences begin, and T.

    Attributes:
        fields: int64 ``[T * 3]``, ``TokenState`` of structures.h: the address of the state before a
            token, or 0; that of the state after it, or 0; whether it follows the token before it in
            a run.
        row_starts: ``rows``, int32.
    """

    NUM_FIELDS = 3

    def __init__(self, recurrence: Recurrence, num_tokens: int, rows: Sequence[int]) -> None:
        self._recurrence = recurrence
        self._states = list[PackedState]()
        """Those with addresses in the table, which keep their memory allocated."""
        self.fields = array("q", [0]) * (self.NUM_FIELDS * num_tokens)
        self.row_starts = array("i", rows)

    def add(self, tokens: Sequence[int], before: State | None, after: PackedState) -> None:
        """Add a run of tokens, by packed index, from a state or none; ``after`` is written."""
        for position, token in enumerate(tokens):
            self.fields[self.NUM_FIELDS * token + 2] = position > 0
        if before is not None:
            packed = self._recurrence.packed(before)
            self._states.append(packed)
            self.fields[self.NUM_FIELDS * tokens[0]] = packed.floats.data_ptr()
        self._states.append(after)
        self.fields[self.NUM_FIELDS * tokens[-1] + 1] = after.floats.data_ptr()


class Recurrence:
    """The recurrent layers of a module, and their packed states.

    Args:
        modules: the layers as modules, in order.
        layers: the same in the backend; the states of all are consecutive in a packed state.

    Attributes:
        by_module: the layers by their modules.
    """

    KINDS: ClassVar[Collection[int]]
    """Kinds of layers that the backend computes."""
    layer_type: ClassVar[type[Any]]
    """A ``RecurrentLayer``; made of a module, its description and the offset of its state in a
    packed state, in floats."""
    table_type: ClassVar[type[TokenTable]]

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[RecurrentLayer]) -> None:
        self._layers = layers
        self.by_module: dict[nn.Module, Any] = dict(zip(modules, layers, strict=True))
        self._views = [layer.views for layer in layers]
        self._state_size = sum(layer.state_size for layer in layers)
        self._device = next(modules[0].parameters()).device

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> Self | None:
        """Those of a model; None: the backend does not compute all of them."""
        layers, offset = list[RecurrentLayer](), 0
        for part in modules:
            description = describe(part)
            if description is None or description.fields["kind"] not in cls.KINDS:
                return None
            layers.append(layer := cls.layer_type(part, description, offset))
            offset += layer.state_size
        return cls(modules, layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all layers after one token."""
        return torch.float32.itemsize * self._state_size

    def new_state(self) -> PackedState:
        """An uninitialised state."""
        return PackedState(torch.empty(self._state_size, device=self._device), self._views)

    def packed(self, state: State) -> PackedState:
        """A state in the layout and on the device of the backend."""
        return PackedState.of(state, self._state_size, self._views, self._device)

    def table(self, num_tokens: int, rows: Sequence[int]) -> Any:
        """An empty table of the backend; arguments as of ``TokenTable``."""
        return self.table_type(self, num_tokens, rows)

    def compute(self, layer: int, x: Tensor, tokens: TokenTable) -> Tensor:
        """The output of a layer, by its index, for x ``[1, T, hidden]``, of the same shape."""
        return self._layers[layer].compute(x, tokens)

    def agrees(self, layer: int, x: Tensor, expected: Tensor, state: LayerState) -> bool:
        """Whether a layer computes what its module does.

        Args:
            layer: its index.
            x: ``[1, 4, hidden]``, a run of three tokens, and a token after it.
            expected: the module's output, of the same shape.
            state: the module's state after the last token.
        """
        if x.dtype not in TOLERANCES or state.keys() != self._views[layer].keys():
            return False
        table, states = self.table(4, [0, 4]), [self.new_state(), self.new_state()]
        table.add([0, 1, 2], None, states[0])
        table.add([3], states[0], states[1])
        y = self._layers[layer].by_linears(x, table)
        after = states[1][layer]
        return is_close(y, expected) and all(
            after[key].shape == tensor.shape and is_close(after[key], tensor.to(x.dtype))
            for key, tensor in state.items()
        )
