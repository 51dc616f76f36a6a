"""Calls ``forward.cpp``: a batch, or the levels of drafts, through packed weights."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forethought.backends.cpu.adapters import token_addresses
from forethought.backends.cpu.layer_window import LayerWindow
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.structures import (
    CallStruct,
    ChainsStruct,
    ModelStruct,
    RowStruct,
    TreesStruct,
)
from forethought.backends.cpu.weights import KV_TYPES
from forethought.config.tree import TreeShape
from forethought.model.attention.base import ForwardPass, KvLayout
from forethought.model.batch import Batch
from forethought.model.device import native_threads
from forethought.model.hidden_states import FINAL

MIN_SCORES = 64  # tokens of a row that scratch memory is made for, at least

Pointers = ctypes.Array[ctypes.c_void_p]


@dataclass(slots=True, eq=False)
class Wanted:
    """Inputs and outputs of a forward beside keys and values. All are float32 and contiguous.

    Attributes:
        logits: ``[R, vocab]``; None: they are not computed.
        states: where hidden states ``[T, hidden]`` are written, by layer, the final norm's last.
        last: ``[R, hidden]``, the last layer's output of the tokens with logits; None: not
            computed.
        last_normed: ``last`` after the final norm.
        entering: ``[T, hidden]``, the states that a draft module reads; None: it is a model.
    """

    logits: Tensor | None
    states: Sequence[Tensor | None] | None = None
    last: Tensor | None = None
    last_normed: Tensor | None = None
    entering: Tensor | None = None


@dataclass(slots=True)
class PackedCall:
    """A call, with the objects that it points to."""

    struct: CallStruct
    keep: list[object]


@dataclass(slots=True, eq=False)
class NativeForward:
    """Packed weights, and their forward in C++.

    One call at a time: scratch memory is kept between calls.

    Attributes:
        model: the weights.
        max_positions: that they have rotary embeddings of.
        parts: what ``model`` points to.
        window: its layers in a file; None: there are none.
        vocab_size: outputs of the head.
    """

    model: ModelStruct
    max_positions: int
    parts: list[object]
    window: LayerWindow | None = None
    _library: ctypes.CDLL = field(default_factory=load_library)
    _scratch: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    _scratch_fits: tuple[int, int, int] = (0, 0, 0)
    """Tokens, length of a row and threads that it is large enough for."""
    vocab_size: int = field(init=False)
    _no_states: Pointers = field(init=False)
    """Where no hidden states are wanted."""

    def __post_init__(self) -> None:
        self.vocab_size = int(self.model.head.contents.num_outputs)
        self._no_states = pointers([None] * (self.model.num_layers + 2))

    def compute(self, forward_pass: ForwardPass, outputs: Wanted) -> None:
        """Run the layers over a batch; ``IndexError`` for a token outside the vocabulary,
        RequestError as :meth:`check_read`.
        """
        packed = self.pack(forward_pass, outputs)
        num_known = self._library.forward(ctypes.byref(self.model), ctypes.byref(packed.struct))
        check_known(forward_pass.batch, num_known)
        self.check_read()

    def wanted_states(self, forward_pass: ForwardPass) -> list[Tensor | None] | None:
        """Where the hidden states that a pass captures are written, by layer, the final norm's
        last; None: it captures none.
        """
        if not forward_pass.layer_ids:
            return None
        shape = len(forward_pass.batch.token_ids), self.model.hidden
        return [
            torch.empty(shape, dtype=torch.float32) if name in forward_pass.layer_ids else None
            for name in self._state_names()
        ]

    def capture(
        self, forward_pass: ForwardPass, states: list[Tensor | None] | None, dtype: torch.dtype
    ) -> None:
        """Hand a pass its hidden states in the dtype of the model."""
        for name, state in zip(self._state_names(), states or (), strict=False):
            if state is not None:
                forward_pass.capture(name, state.to(dtype))

    def _state_names(self) -> tuple[int, ...]:
        return (*range(self.model.num_layers + 1), FINAL)

    def check_read(self) -> None:
        """Raise RequestError if a layer of the last call could not be read from its file."""
        if self.window is not None:
            self.window.check()

    def draft_chains(
        self,
        forward_pass: ForwardPass,
        entering: Tensor | None,
        slots: Sequence[Sequence[int]],
        ids: Tensor | None = None,
        num_choices: int | None = None,
    ) -> list[list[int]]:
        """Draft the most probable tokens after each row of a batch, one after the other.

        Entries of the drafted tokens but the last one of each row are written to their slots. The
        logits are those of single forwards, to the last bit. ``IndexError`` for an unknown token.

        Args:
            forward_pass: over the pages, with known tokens; with the logits of each row's last one.
            entering: as in :class:`Wanted`.
            slots: of the tokens to draft after each row; not fewer than after the next one.
            ids: int64 ``[vocab]``, the target's id of each output; None: the same.
            num_choices: outputs that may be drafted, the first ones; None: all.
        """
        sizes = [len(row_slots) for row_slots in slots]
        levels, width = sizes[0], len(slots)
        logits = torch.empty(width, self.vocab_size, dtype=torch.float32)
        packed = self.pack(forward_pass, Wanted(logits, entering=entering), levels)
        places = array(
            "q",
            [
                slot
                for row_slots in slots
                for slot in (*row_slots, *[0] * (levels - len(row_slots)))
            ],
        )
        num_rows = array("i", [sum(size > level for size in sizes) for level in range(levels)])
        drafted = array("q", bytes(8 * levels * width))
        chains = ChainsStruct(
            known=ctypes.pointer(packed.struct),
            slots=places.buffer_info()[0],
            num_rows=num_rows.buffer_info()[0],
            ids=None if ids is None else ids.data_ptr(),
            drafted=drafted.buffer_info()[0],
            num_levels=levels,
            num_choices=self.vocab_size if num_choices is None else num_choices,
            last_position=self.max_positions - 1,
        )
        num_known = self._library.draft_chains(ctypes.byref(self.model), ctypes.byref(chains))
        check_known(forward_pass.batch, num_known)
        self.check_read()
        return [list(drafted[row : row + size * width : width]) for row, size in enumerate(sizes)]

    def draft_trees(
        self,
        forward_pass: ForwardPass,
        entering: Tensor,
        slots: Sequence[Sequence[int]],
        shape: TreeShape,
        ids: Tensor | None = None,
    ) -> list[list[list[int]]]:
        """Draft a dynamic tree after each row of a batch; see ``speculative.dynamic_tree``.

        Args:
            forward_pass, entering, ids: as of :meth:`draft_chains`.
            slots: of the nodes that are read after each row, ``width`` of each level but the last.
            shape: of the trees.

        Returns:
            The kept nodes of each row, best first: number, token and parent.
        """
        width, num_rows = shape.width, len(slots)
        logits = torch.empty(num_rows * width, self.vocab_size, dtype=torch.float32)
        further = shape.depth * width
        packed = self.pack(
            forward_pass, Wanted(logits, entering=entering), further, num_rows * width
        )
        places = array(
            "q",
            [
                slot
                for row_slots in slots
                for slot in (*row_slots, *[0] * (further - len(row_slots)))
            ],
        )
        total = min(shape.total, width + (shape.depth - 1) * width**2)
        node_values = array("q", bytes(8 * 3 * num_rows * total))
        trees = TreesStruct(
            known=ctypes.pointer(packed.struct),
            slots=places.buffer_info()[0],
            ids=None if ids is None else ids.data_ptr(),
            kept=node_values.buffer_info()[0],
            depth=shape.depth,
            width=width,
            total=total,
            last_position=self.max_positions - 1,
        )
        num_known = self._library.draft_trees(ctypes.byref(self.model), ctypes.byref(trees))
        check_known(forward_pass.batch, num_known)
        self.check_read()
        nodes = [list(node_values[at : at + 3]) for at in range(0, len(node_values), 3)]
        return [nodes[at : at + total] for at in range(0, len(nodes), total)]

    def first_unknown(self, token_ids: Tensor) -> int:
        """The index of the first of int64 ``[T]`` that is outside the vocabulary, or T."""
        ids = ctypes.c_void_p(token_ids.data_ptr())
        return int(self._library.first_unknown(ctypes.byref(self.model), ids, len(token_ids)))

    def pack(
        self, forward_pass: ForwardPass, outputs: Wanted, further: int = 0, at_once: int = 0
    ) -> PackedCall:
        """The call over a batch.

        Args:
            forward_pass: over the batch.
            outputs: its inputs and outputs.
            further: tokens of a row that are computed later.
            at_once: of these in one forward, if they may be more than the batch has.
        """
        batch, layout = forward_pass.batch, forward_pass.layout()
        for tensor in (batch.positions, batch.logit_index, *layout.indices):
            assert tensor.is_contiguous()
        token_ids, num_threads = batch.token_ids.contiguous(), native_threads()
        rows, keep, longest = packed_rows(layout)
        max_length = row_capacity(longest + further)
        states = pointers(outputs.states) if outputs.states else self._no_states
        num_tokens, keys = token_ids.numel(), layout.addresses.buffer_info()[0]
        values = keys + layout.addresses.itemsize * (len(layout.addresses) // 2)
        scratch = self._scratch_for(max(num_tokens, at_once), max_length, num_threads)
        adapters, low = self._adapters(batch, max(num_tokens, at_once))
        struct = CallStruct(
            token_ids=token_ids.data_ptr(),
            entering=None if outputs.entering is None else _address(outputs.entering),
            positions=batch.positions.data_ptr(),
            slots=layout.slots.data_ptr(),
            logit_index=batch.logit_index.data_ptr(),
            rows=(RowStruct * len(layout.rows)).from_buffer(rows),
            keys=keys,
            values=values,
            states=ctypes.addressof(states),
            last=None if outputs.last is None else _address(outputs.last),
            last_normed=None if outputs.last_normed is None else _address(outputs.last_normed),
            logits=None if outputs.logits is None else _address(outputs.logits),
            scratch=scratch.data_ptr(),
            adapters=None if adapters is None else adapters.buffer_info()[0],
            low=None if low is None else low.data_ptr(),
            low_width=0 if low is None else low.shape[1],
            num_tokens=num_tokens,
            num_logits=batch.logit_index.numel(),
            num_rows=len(layout.rows),
            page_size=layout.page_size,
            max_length=max_length,
            num_threads=num_threads,
            kv_type=KV_TYPES[layout.dtype],
        )
        return PackedCall(struct, [token_ids, layout, rows, keep, states, outputs, adapters, low])

    @staticmethod
    def _adapters(batch: Batch, num_tokens: int) -> tuple[array[int], Tensor] | tuple[None, None]:
        """Where the adapters of a batch's tokens are, and memory for what they compute of
        ``num_tokens``; None twice: there are none.
        """
        if batch.adapters is None:
            return None, None
        adapters, width = token_addresses(batch.spans)
        return adapters, torch.empty(num_tokens, width, dtype=torch.float32)

    def _scratch_for(self, num_tokens: int, max_length: int, num_threads: int) -> Tensor:
        tokens, length, threads = self._scratch_fits
        if num_tokens > tokens or max_length > length or num_threads > threads:
            fits = max(num_tokens, tokens), max(max_length, length), max(num_threads, threads)
            size = self._library.scratch_size(ctypes.byref(self.model), *fits)
            self._scratch, self._scratch_fits = torch.empty(size, dtype=torch.float32), fits
        return self._scratch


def unknown_token(token_id: int) -> IndexError:
    """The error for a token outside the vocabulary."""
    return IndexError(f"token id {token_id} is outside the vocabulary")


def pointers(tensors: Sequence[Tensor | None]) -> Pointers:
    """Their addresses; 0 for None."""
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    assert tensor.dtype == torch.float32
    return tensor.data_ptr()


def check_known(batch: Batch, num_known: int) -> None:
    """Raise IndexError if fewer than all tokens of a batch come before one that is outside the
    vocabulary.
    """
    if num_known < batch.token_ids.numel():
        raise unknown_token(int(batch.token_ids[num_known]))


def row_capacity(length: int) -> int:
    """Tokens that scratch memory is made for, where the longest row has ``length``."""
    return max(MIN_SCORES, -(-length // MIN_SCORES) * MIN_SCORES)


def packed_rows(layout: KvLayout) -> tuple[array[int], list[object], int]:
    """The integers of ``RowStruct``, in the order of its fields; the arrays that they point into;
    the length of the longest row."""
    packed, keep, longest = list[int](), list[object](), 0
    slots, positions = layout.recent_slots.data_ptr(), layout.recent_positions.data_ptr()
    for row in layout.rows:
        pages = visible = segments = 0
        if row.segments:
            keep.append(parts := array("q", [x for part in row.segments for x in part]))
            segments = parts.buffer_info()[0]
        if row.pages is not None:
            keep.append(numbers := array("i", row.pages))
            pages = numbers.buffer_info()[0]
        if row.visible is not None:
            keep.append(row.visible)
            assert row.visible.is_contiguous()
            visible = row.visible.data_ptr()
        num_recent, shift = len(row.recent), row.recent.start * 8  # int64
        longest = max(longest, row.prefix + num_recent)
        packed += (
            -1 if row.first_slot is None else row.first_slot,
            pages,
            slots + shift,
            positions + shift,
            visible,
            row.start,
            row.num_tokens,
            row.prefix,
            row.seen_from,
            num_recent,
            segments,
            len(row.segments),
        )
    return array("q", packed), keep, longest
