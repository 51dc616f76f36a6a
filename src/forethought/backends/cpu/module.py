"""A draft module of one layer that reads hidden states, in one call of ``forward.cpp`` per level.

Which parts it has is described by ``ModuleParts``; the heads of the drafters fill them in. The
reference implementations are those of ``speculative.heads`` in torch operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forethought.backends.cpu.draft_network import NativeDraftNetwork, NativeEntry
from forethought.backends.cpu.forward import NativeForward, Wanted
from forethought.backends.cpu.norms import norm_eps, norm_weight
from forethought.backends.cpu.packed_linear import TYPES, PackedLinear, address
from forethought.backends.cpu.structures import JoinStruct, LayerStruct, ModelStruct
from forethought.backends.cpu.weights import ACTIVATIONS, MAX_GROUP, MAX_HEAD_DIM, PackedLayer
from forethought.config.tree import TreeShape
from forethought.model.attention.base import ForwardPass
from forethought.speculative.heads.module_parts import ModuleParts

MAX_TOKENS = 2**31 - 1
"""More than any vocabulary has."""


def refusal_of(parts: ModuleParts) -> str | None:
    """Why it cannot run natively; None: it can."""
    dtypes = {weight.dtype for weight in parts.layer.parameters()}
    if len(dtypes) > 1 or not dtypes <= set(TYPES):
        return f"weights in {', '.join(sorted(map(str, dtypes)))}"
    head_dim, group = parts.layer.self_attn.head_dim, parts.num_heads // parts.num_kv_heads
    if head_dim > MAX_HEAD_DIM or group > MAX_GROUP:
        return f"heads of {head_dim} in groups of {group}"
    return None if parts.activation in ACTIVATIONS else f"the activation {parts.activation}"


class DraftTarget(Protocol):
    """A target in C++ whose weights draft modules may use."""

    @property
    def forward(self) -> NativeForward:
        """Which has the embedding."""

    @property
    def head(self) -> PackedLinear:
        """The output projection."""


class LastStates(NamedTuple):
    """States of the tokens with logits, float32 ``[R, hidden]``."""

    last: Tensor
    """The layer's output."""
    normed: Tensor
    """``states`` after the final norm."""


def target_fields(target: DraftTarget) -> dict[str, Any]:
    """Fields of ``ModelStruct``: the embedding and the output projection of a target."""
    names = ("head", "embedding", "table", "table_type", "num_embeddings", "embed_scale")
    return {name: getattr(target.forward.model, name) for name in names}


class NativeModule:
    """Runs a draft module.

    Args:
        forward: its packed weights.
        head: its output projection.
        enter: reads the target's states.
        feeds_normed: the state that is fed back is after the final norm.

    Attributes:
        enter: see above.
    """

    def __init__(
        self, forward: NativeForward, head: PackedLinear, enter: NativeEntry, feeds_normed: bool
    ) -> None:
        self._forward, self._head = forward, head
        self.enter, self._feeds_normed = enter, feeds_normed

    @classmethod
    def of(cls, parts: ModuleParts, target: DraftTarget) -> NativeModule:
        """Packed; its embedding and head may be the target's.

        Args:
            parts: that ``refusal_of`` accepts; their weights are copied.
            target: see above.
        """
        entry = None if parts.entry is None else PackedLinear.of(parts.entry)
        enter = NativeEntry(norm_weight(parts.entry_norm), entry, parts.eps)
        layer = PackedLayer.of(parts.layer, parts.rotary, parts.window, parts.enters_normed)
        project = None if parts.project is None else PackedLinear.of(parts.project)
        norms = [norm_weight(norm) for norm in (parts.token_norm, parts.state_norm)]
        join = JoinStruct(
            token_norm=address(norms[0]),
            state_norm=address(norms[1]),
            project=None if project is None else ctypes.pointer(project.struct),
            state_first=parts.state_first,
            zero_first=parts.zero_first,
            norm_residual=parts.norm_residual,
            feeds_normed=parts.feeds_normed,
        )
        attention, fields = parts.layer.self_attn, target_fields(target)
        q_norm = getattr(attention, "q_norm", None)
        final_norm = norm_weight(parts.final_norm)
        head = target.head if parts.head is None else PackedLinear.of(parts.head)
        if parts.head is not None:
            fields["head"] = ctypes.pointer(head.struct)
        table = None if parts.embedding is None else parts.embedding.weight.detach().contiguous()
        if table is not None:
            sizes = {"table_type": TYPES[table.dtype], "num_embeddings": len(table)}
            fields |= {"embedding": None, "table": table.data_ptr(), "embed_scale": 1.0, **sizes}
        struct = ModelStruct(
            layers=(LayerStruct * 1)(layer.struct),
            final_norm=address(final_norm),
            join=ctypes.pointer(join),
            num_layers=1,
            hidden=attention.o_proj.out_features,
            num_heads=parts.num_heads,
            num_kv_heads=parts.num_kv_heads,
            head_dim=attention.head_dim,
            rotary_dim=parts.rotary.shape[-1],
            activation=ACTIVATIONS[parts.activation],
            eps=parts.eps,
            head_norm_eps=0.0 if q_norm is None else norm_eps(q_norm),
            logit_cap=0.0,
            score_cap=0.0,
            **fields,
        )
        owned = [target, layer, project, norms, join, final_norm, head, table]
        forward = NativeForward(struct, len(parts.rotary), owned)
        return cls(forward, head, enter, parts.feeds_normed)

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        return self._forward.vocab_size

    def draft_network(self, ids: Tensor | None) -> NativeDraftNetwork:
        """What drafts in ``ChainCall``; ids: the target's id of each output."""
        return NativeDraftNetwork(self._forward, self.vocab_size, MAX_TOKENS, ids, self.enter)

    def __call__(self, states: Tensor, forward_pass: ForwardPass) -> tuple[Tensor, Tensor]:
        """Compute T entries, and at R positions the states to feed back and the logits.

        Args:
            states: ``[T, hidden]``.
            forward_pass: over a storage of one layer; its batch has the tokens and, as positions,
                those of the states.

        Returns:
            Float32 ``[R, hidden]`` and ``[R, vocab]``.
        """
        size = len(forward_pass.batch.logit_index)
        fed_back = torch.empty(size, self._forward.model.hidden, dtype=torch.float32)
        logits = torch.empty(size, self._forward.vocab_size, dtype=torch.float32)
        last, normed = (None, fed_back) if self._feeds_normed else (fed_back, None)
        outputs = Wanted(logits, None, last, normed, states.float().contiguous())
        self._forward.compute(forward_pass, outputs)
        return fed_back, logits

    def read(self, states: Tensor, forward_pass: ForwardPass) -> LastStates:
        """The states of a call, without logits."""
        shape = len(forward_pass.batch.logit_index), self._forward.model.hidden
        first, second = (torch.empty(shape, dtype=torch.float32) for _ in range(2))
        states_out = LastStates(first, second)
        outputs = Wanted(None, None, *states_out, states.float().contiguous())
        self._forward.compute(forward_pass, outputs)
        return states_out

    def logits(self, normed: Tensor) -> Tensor:
        """States after the final norm ``[R, hidden]`` -> ``[R, vocab]``."""
        return self._head.multiply(normed)

    def draft_chains(
        self,
        states: Tensor,
        forward_pass: ForwardPass,
        slots: Sequence[Sequence[int]],
        ids: Tensor | None,
    ) -> list[list[int]]:
        """Greedy chains of draft tokens after ``states`` ``[T, hidden]``, a token per slot."""
        entering = states.float().contiguous()
        return self._forward.draft_chains(forward_pass, entering, slots, ids)

    def draft_trees(
        self,
        states: Tensor,
        forward_pass: ForwardPass,
        slots: Sequence[Sequence[int]],
        shape: TreeShape,
        ids: Tensor | None,
    ) -> list[list[list[int]]]:
        """Draft trees after ``states`` ``[T, hidden]``, in one call."""
        entering = states.float().contiguous()
        return self._forward.draft_trees(forward_pass, entering, slots, shape, ids)
