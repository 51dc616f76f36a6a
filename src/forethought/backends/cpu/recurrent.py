"""Recurrent layers of transformers' modules in C++: the gated delta rule, Mamba-2, Mamba and short
convolutions, over all tokens of a batch in one call (``recurrent.h``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.module_parts import are_hooked, float_rows, packed_linears
from forethought.backends.cpu.structures import (
    LinearStruct,
    RecurrentCallStruct,
    RecurrentStruct,
    TokenStateStruct,
)
from forethought.model.device import native_threads
from forethought.model.recurrence import Recurrence, TokenTable
from forethought.model.recurrent_description import (
    DELTA_RULE,
    SELECTIVE_SCAN,
    SHORT_CONVOLUTION,
    STATE_SPACE,
    RecurrentDescription,
)

ALL, BEFORE_LATE, AFTER_LATE = range(3)
"""``enum RecurrentStage`` in structures.h."""


class NativeTokenTable(TokenTable):
    """The table as the library reads it.

    Attributes:
        states: ``TokenStateStruct`` of each token, in the memory of ``fields``.
        rows: address of ``row_starts``.
        num_rows: sequences of the batch.
    """

    def __init__(self, recurrence: Recurrence, num_tokens: int, rows: Sequence[int]) -> None:
        super().__init__(recurrence, num_tokens, rows)
        self.states = (TokenStateStruct * num_tokens).from_buffer(self.fields)
        self.rows, self.num_rows = self.row_starts.buffer_info()[0], len(rows) - 1


class NativeRecurrentLayer:
    """A ``RecurrentLayer`` in C++, whose module keeps its linears.

    Args:
        part: the module.
        description: of it.
        offset: of its state in a packed state, in floats.

    Attributes:
        views, state_size: as of ``RecurrentLayer``.
        hidden, num_outputs: widths of its inputs and outputs.
        width: floats of a token between the products, in ``projected`` or ``mixed``.
    """

    def __init__(self, part: nn.Module, description: RecurrentDescription, offset: int) -> None:
        self._part, self._description = part, description
        conv, fields = description.conv, description.fields
        channels, [kernel] = conv.in_channels, conv.kernel_size
        self._projected, out = fields["width"], part.get_submodule(description.out)
        self._mixed = int(out.in_features)
        self.width = max(self._projected, self._mixed)
        self.hidden = self.num_outputs = int(out.out_features)
        taps = conv.weight[:, 0].t().float().contiguous()  # [kernel, channels]
        self._tables = {
            "taps": taps,
            "bias": None if conv.bias is None else conv.bias.float().contiguous(),
            **{name: table.int().contiguous() for name, table in description.integers.items()},
            "sources": torch.tensor(
                [description.sources.get(name, -1) for name in description.entering],
                dtype=torch.int32,
            ),
            **{
                name: None if table is None else table.float().contiguous()
                for name, table in description.floats.items()
            },
        }
        self.views = description.views(offset)
        self.state_size = sum(torch.Size(view.size).numel() for view in self.views.values())
        self._struct = RecurrentStruct(
            **{name: None if x is None else x.data_ptr() for name, x in self._tables.items()},
            **{"num_steps": 1, "beta_factor": 1.0, **fields},
            num_late=len(description.late),
            offset=offset,
            kernel=kernel,
            channels=channels,
            hidden=self.hidden,
        )
        self._packed: list[Any] = []
        """The packed linears that the struct points to; empty: they are not packed."""

    def compute(self, x: Tensor, tokens: NativeTokenTable) -> Tensor:
        """x ``[1, T, hidden]`` -> the same shape; reads and writes the states of the table."""
        if are_hooked(self.linears()) or self.packed_struct() is None:
            return self.by_linears(x, tokens)
        rows = float_rows(x)
        num_tokens = rows.shape[0]
        projected = torch.empty(num_tokens, self._projected)
        mixed = torch.empty(num_tokens, self._mixed)
        y = torch.empty(num_tokens, self.hidden)
        self._call(tokens, projected, mixed, x=rows.data_ptr(), y=y.data_ptr())
        return y.to(x.dtype).view(x.shape)

    def by_linears(self, x: Tensor, tokens: NativeTokenTable) -> Tensor:
        """As ``compute``, with the products by the module's linears."""
        linears, late = self._description.linears(self._part), self._description.late
        projected = torch.empty(x.shape[1], self._projected)
        mixed = torch.empty(x.shape[1], self._mixed)
        early = [name for name in self._description.entering if name not in late]
        self._description.multiply(self._part, early, x, projected)
        if late:
            self._call(tokens, projected, mixed, stage=BEFORE_LATE)
            self._description.multiply(self._part, late, x, projected)
        self._call(tokens, projected, mixed, stage=AFTER_LATE if late else ALL)
        y: Tensor = linears[self._description.out](mixed.to(x.dtype)[None])
        return y

    def _call(
        self, tokens: NativeTokenTable, projected: Tensor, mixed: Tensor, **changes: int
    ) -> None:
        call = RecurrentCallStruct(
            projected=projected.data_ptr(),
            mixed=mixed.data_ptr(),
            tokens=tokens.states,
            rows=tokens.rows,
            num_tokens=projected.shape[0],
            num_rows=tokens.num_rows,
            num_threads=native_threads(),
            **changes,
        )
        load_library().recurrent(ctypes.byref(self._struct), ctypes.byref(call))

    def linears(self) -> list[nn.Module]:
        """The module's linears now: packing replaces them."""
        return list(self._description.linears(self._part).values())

    def packed_struct(self) -> RecurrentStruct | None:
        """The layer with the packed weights of its linears; None: they are not packed."""
        if self._packed:
            return self._struct
        packed = packed_linears(self.linears())
        if packed is None or any(linear.following for linear in packed):
            return None
        *entering, out = packed
        structs = (LinearStruct * len(entering))(*(linear.struct for linear in entering))
        self._packed = [structs, packed]
        self._struct.enter, self._struct.num_enter = structs, len(entering)
        self._struct.out = ctypes.pointer(out.struct)
        return self._struct


class NativeRecurrence(Recurrence):
    """The recurrent layers of a module in C++."""

    KINDS = (DELTA_RULE, STATE_SPACE, SHORT_CONVOLUTION, SELECTIVE_SCAN)
    layer_type = NativeRecurrentLayer
    table_type = NativeTokenTable
