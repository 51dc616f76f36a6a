"""Recurrent layers of transformers' modules by two Triton kernels per layer, over all tokens of a
batch: the gated delta rule and Mamba-2. Products, norms and gates are operations of torch.

The reference is the modules, beside which the layers are tried. No GPU has run the kernels: tests
interpret them.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from forethought.backends.cuda.recurrent_triton import (
    RecurrenceTerms,
    TableTensors,
    convolution,
    recurrence,
)
from forethought.kv.recurrent import LayerState
from forethought.model.recurrence import Recurrence, TokenTable
from forethought.model.recurrent_description import (
    DELTA_RULE,
    STATE_SPACE,
    RecurrentDescription,
)

log = logging.getLogger(__name__)


class DeviceTokenTable(TokenTable):
    """The table as the kernels read it; copied to the device once, after the last ``add``."""

    _tensors: TableTensors | None = None

    def tensors(self, device: torch.device) -> TableTensors:
        """The table on the device."""
        if self._tensors is None:
            fields = torch.frombuffer(self.fields, dtype=torch.int64).view(-1, self.NUM_FIELDS)
            rows = torch.frombuffer(self.row_starts, dtype=torch.int32)
            self._tensors = TableTensors(fields.to(device), rows.to(device))
        return self._tensors


class KernelRecurrentLayer:
    """A ``RecurrentLayer`` by kernels, whose module keeps its weights.

    Args:
        part: the module.
        description: of it.
        offset: of its state in a packed state, in floats.

    Attributes:
        views, state_size: as of ``RecurrentLayer``.
    """

    def __init__(self, part: nn.Module, description: RecurrentDescription, offset: int) -> None:
        self._part, self._description, self._offset = part, description, offset
        self.views, device = description.views(offset), description.conv.weight.device
        self.state_size = sum(torch.Size(view.size).numel() for view in self.views.values())
        tables = {**description.integers, **description.floats}
        self._tables = {name: x.to(device) for name, x in tables.items() if x is not None}
        conv = description.conv
        self._taps = conv.weight[:, 0].t().float().contiguous()  # [kernel, channels]
        self._bias = torch.zeros_like(self._taps[0]) if conv.bias is None else conv.bias.float()

    def compute(self, x: Tensor, tokens: DeviceTokenTable) -> Tensor:
        """x ``[1, T, hidden]`` -> the same shape; reads and writes the states of the table."""
        layer, fields = self._description, self._description.fields
        linears, tables, table = layer.linears(self._part), self._tables, tokens.tensors(x.device)
        projected = torch.empty(x.shape[1], fields["width"], device=x.device)
        layer.multiply(self._part, layer.entering, x, projected)
        if "scale" in tables:
            projected *= tables["scale"]
        mixed = convolution(projected[:, tables["at"]], self._taps, self._bias, table, self._offset)
        y = self._heads(projected, mixed, table).flatten(1)  # [T, heads * values]
        y = self._gated(y, projected, fields["value_dim"])
        out: Tensor = linears[layer.out](y.to(x.dtype)[None])
        return out

    by_linears = compute

    def _heads(self, projected: Tensor, mixed: Tensor, table: TableTensors) -> Tensor:
        """The outputs of the heads ``[T, heads, values]``."""
        fields, tables = self._description.fields, self._tables
        heads, groups = fields["num_heads"], fields["num_groups"]
        keys, values = fields["key_dim"], fields["value_dim"]
        steps = _columns(projected, tables["steps"], fields.get("num_steps", 1))
        steps = F.softplus(steps + tables["biases"].float().view(heads, -1))  # [T, heads, steps]
        decays = tables["decays"].float()[:, None]
        sizes = [heads * values, groups * keys, groups * keys]
        offset = self._offset + self._taps.numel()
        if fields["kind"] == DELTA_RULE:
            q, k, v = mixed.split(sizes[::-1], 1)
            q, k = (x.view(-1, groups, keys) for x in (q, k))
            betas = fields.get("beta_factor", 1.0) * projected[:, tables["betas"]].sigmoid()
            terms = RecurrenceTerms(
                _normalised(q) / keys**0.5,
                _normalised(k),
                v.view(-1, heads, values),
                (decays * steps).exp(),
                betas,
            )
            return recurrence(terms, table, offset, (values, 1))
        steps = steps.clamp(fields["min_step"], fields["max_step"])
        x, b, c = mixed.split(sizes, 1)
        x, b, c = x.view(-1, heads, values), b.view(-1, groups, keys), c.view(-1, groups, keys)
        terms = RecurrenceTerms(c, b, steps * x, (decays * steps).exp(), None)
        y = recurrence(terms, table, offset, (1, keys))
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


class KernelRecurrence(Recurrence):
    """The recurrent layers of a module on a device, by kernels."""

    KINDS = (DELTA_RULE, STATE_SPACE)
    layer_type = KernelRecurrentLayer
    table_type = DeviceTokenTable

    @override
    def agrees(self, layer: int, x: Tensor, expected: Tensor, state: LayerState) -> bool:
        try:
            return super().agrees(layer, x, expected, state)
        except Exception:
            log.warning("kernels of recurrent layers do not run here: torch does", exc_info=True)
            return False


def _columns(projected: Tensor, first: Tensor, count: int) -> Tensor:
    """``[T, len(first), count]``: the columns from each of ``first`` on."""
    return projected[:, first[:, None] + torch.arange(count, device=first.device)]


def _normalised(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
