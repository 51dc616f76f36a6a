"""Recurrent layers of transformers' modules by two Triton kernels per layer, over all tokens of a
batch: the gated delta rule and Mamba-2. Products, norms and gates are operations of torch.

Layers are described, and their states packed, as for C++ (``backends.cpu.recurrent``), and tried
beside their modules, which are the reference. No GPU has run them: their tests interpret the
kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from forethought.backends.cpu.recurrent import (
    DELTA_RULE,
    STATE_SPACE,
    Description,
    NativeRecurrence,
    TokenTable,
    describe,
)
from forethought.backends.cuda.recurrent_triton import (
    Places,
    Recurrence,
    convolution,
    recurrence,
)
from forethought.kv.recurrent import LayerState, PackedState, State

log = logging.getLogger(__name__)


class DeviceTokenTable(TokenTable):
    """The same on a device, once it is whole."""

    _places: Places | None = None

    def places(self, device: torch.device) -> Places:
        """The table as the kernels read it."""
        if self._places is None:
            states = torch.frombuffer(self._fields, dtype=torch.int64).view(-1, 4)
            rows = torch.frombuffer(self._rows, dtype=torch.int32)
            self._places = Places(states.to(device), rows.to(device))
        return self._places


class KernelRecurrentLayer:
    """A recurrent layer, whose module keeps its weights.

    Args:
        part: the module.
        description: of it.
        offset: of its state among those of all layers, floats.

    Attributes:
        views, state_size: see ``NativeRecurrentLayer``.
    """

    def __init__(self, part: nn.Module, description: Description, offset: int) -> None:
        self._part, self._description, self._offset = part, description, offset
        self.views, device = description.views(offset), description.conv.weight.device
        self.state_size = sum(torch.Size(view.size).numel() for view in self.views.values())
        tables = {**description.integers, **description.floats}
        self._tables = {name: x.to(device) for name, x in tables.items() if x is not None}
        conv = description.conv
        self._taps = conv.weight[:, 0].t().float().contiguous()  # [kernel, channels]
        self._bias = torch.zeros_like(self._taps[0]) if conv.bias is None else conv.bias.float()

    def compute(self, x: Tensor, tokens: DeviceTokenTable) -> Tensor:
        """x ``[1, T, hidden]`` -> the same, with states from and to where the table says."""
        about, fields = self._description, self._description.fields
        linears, tables, places = about.linears(self._part), self._tables, tokens.places(x.device)
        projected = torch.empty(x.shape[1], fields["width"], device=x.device)
        about.multiply(self._part, about.entering, x, projected)
        if "scale" in tables:
            projected *= tables["scale"]
        mixed = convolution(
            projected[:, tables["at"]], self._taps, self._bias, places, self._offset
        )
        y = self._heads(projected, mixed, places).flatten(1)  # [T, heads * values]
        y = self._gated(y, projected, fields["value_dim"])
        out: Tensor = linears[about.out](y.to(x.dtype)[None])
        return out

    by_linears = compute

    def _heads(self, projected: Tensor, mixed: Tensor, places: Places) -> Tensor:
        """The outputs of the heads ``[T, heads, values]``."""
        fields, tables = self._description.fields, self._tables
        heads, groups = fields["num_heads"], fields["num_groups"]
        keys, values = fields["key_dim"], fields["value_dim"]
        steps = _columns(projected, tables["steps"], fields.get("num_steps", 1))
        steps = F.softplus(steps + tables["biases"].float().view(heads, -1))  # [T, heads, steps]
        decays = tables["decays"].float()[:, None]
        sizes = [heads * values, groups * keys, groups * keys]
        place = self._offset + self._taps.numel()
        if fields["kind"] == DELTA_RULE:
            q, k, v = mixed.split(sizes[::-1], 1)
            q, k = (x.view(-1, groups, keys) for x in (q, k))
            betas = fields.get("beta_factor", 1.0) * projected[:, tables["betas"]].sigmoid()
            terms = Recurrence(
                _normalised(q) / keys**0.5,
                _normalised(k),
                v.view(-1, heads, values),
                (decays * steps).exp(),
                betas,
            )
            return recurrence(terms, places, place, (values, 1))
        in_run = places.states[:, 3, None, None] != 0
        steps = torch.where(in_run, steps.clamp(fields["min_step"], fields["max_step"]), steps)
        x, b, c = mixed.split(sizes, 1)
        x, b, c = x.view(-1, heads, values), b.view(-1, groups, keys), c.view(-1, groups, keys)
        terms = Recurrence(c, b, steps * x, (decays * steps).exp(), None)
        y = recurrence(terms, places, place, (1, keys))
        return y + tables["skips"].float()[:, None] * x

    def _gated(self, y: Tensor, projected: Tensor, values: int) -> Tensor:
        """Norm and gates of the outputs of the heads."""
        fields, tables = self._description.fields, self._tables
        gates = _columns(projected, tables["gates"], values).flatten(1)
        factor = gates.sigmoid() if fields.get("has_sigmoids") else F.silu(gates)
        if not fields["norm_first"]:
            y = y * factor
        if "norm" in tables:
            grouped = y.view(len(y), -1, fields["norm_size"])
            scale = (grouped.square().mean(-1, keepdim=True) + fields["norm_eps"]).rsqrt()
            y = (grouped * scale).flatten(1) * tables["norm"].float()
        return y * factor if fields["norm_first"] else y


class KernelRecurrence(NativeRecurrence):
    """The recurrent layers of a module on a device, and their states."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        layers: Sequence[KernelRecurrentLayer],
        device: torch.device,
    ) -> None:
        super().__init__(modules, layers)
        self._device = device

    @classmethod
    @override
    def of(cls, modules: Sequence[nn.Module]) -> KernelRecurrence | None:
        layers, offset = list[KernelRecurrentLayer](), 0
        for part in modules:
            description = describe(part)
            if description is None or description.fields["kind"] not in (DELTA_RULE, STATE_SPACE):
                return None
            layers.append(layer := KernelRecurrentLayer(part, description, offset))
            offset += layer.state_size
        return cls(modules, layers, next(modules[0].parameters()).device)

    @override
    def agrees(self, layer: int, x: Tensor, expected: Tensor, state: LayerState) -> bool:
        try:
            return super().agrees(layer, x, expected, state)
        except Exception:
            log.warning("kernels of recurrent layers do not run here: torch does", exc_info=True)
            return False

    @override
    def new_state(self) -> PackedState:
        return PackedState(torch.empty(self._state_size, device=self._device), self._views)

    @override
    def packed(self, state: State) -> PackedState:
        return PackedState.of(state, self._state_size, self._views, self._device)

    @override
    def table(self, num_tokens: int, rows: Sequence[int]) -> DeviceTokenTable:
        return DeviceTokenTable(self, num_tokens, rows)


def _columns(projected: Tensor, first: Tensor, count: int) -> Tensor:
    """``[T, len(first), count]``: the columns from each of ``first`` on."""
    return projected[:, first[:, None] + torch.arange(count, device=first.device)]


def _normalised(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
