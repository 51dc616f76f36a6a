"""The parts of a fused Llama layer, and the layer: few, large operations, batch-invariant if asked.

* ``Norm``: RMSNorm in as few operations as torch allows on each device.
* ``projection``, ``BatchedProjection``, ``gated_activation``: matrix products with fixed weights.
* ``FusedLayer``: a decoder layer without its first norm, for the network and for draft heads.

oneDNN multiplies bf16 and fp16 matrices in blocks; a weight in the ordinary layout is reordered on
every call, which for a few rows costs more than the product. Here it is reordered once, and the
packed weight replaces the ordinary one.

*Batch-invariant* means that a token is rounded the same whatever else is in the batch. oneDNN sums
long rows in an order that depends on the number of rows, so this costs further calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from forethought.model.attention.base import ForwardPass, Scoring
from forethought.model.device import has_fast_matmul, owned
from forethought.model.fused_ops import has_kernels, rms_norm, silu_and_mul
from forethought.model.quantization import QuantizedProjection, StoredWeight, concatenated
from forethought.model.token_adapters import Adapt, no_addition

MAX_LAYER_NORM = 16 * 1024  # elements up to which a CPU is faster through layer norm


class Norm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.
    ``batch_invariant``: in one way for all sizes, if not the fastest.
    """

    def __init__(self, weight: Tensor, eps: float, *, batch_invariant: bool = False) -> None:
        self.weight, self.eps, self.batch_invariant = owned(weight), eps, batch_invariant
        self.signs = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, ..., width]`` -> the same shape and dtype, a new tensor."""
        if x.device.type != "cpu":
            return self.plain(x)
        # torch's own RMS norm is a dozen operations on a CPU.
        few = self.batch_invariant or x.numel() <= MAX_LAYER_NORM
        return self.through_layer_norm(x) if few else self.in_float32(x)

    def plain(self, x: Tensor) -> Tensor:
        """One kernel on CUDA where triton is installed, else torch's own and a product."""
        if has_kernels(x.device) and x.shape[-self.weight.dim() :] == self.weight.shape:
            normal: Tensor = rms_norm(x, self.weight, self.eps)
            return normal
        if self.weight.dim() == 1:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape[-1:], None, self.eps) * self.weight

    def through_layer_norm(self, x: Tensor) -> Tensor:
        """Few operations: ``[x, -x]`` has mean 0, and its variance is the mean square of x."""
        doubled = x.unsqueeze(-2) * self.signs
        normal = torch.layer_norm(doubled, doubled.shape[-2:], None, None, self.eps)
        return normal.select(-2, 0) * self.weight

    def in_float32(self, x: Tensor) -> Tensor:
        """Few passes over the data."""
        exact = x.float()
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = length.square_().mul_(1 / x.shape[-1]).add_(self.eps).rsqrt_()
        return (exact * scale).mul_(self.weight).to(x.dtype)


BATCH_INVARIANT_TERMS, BATCH_INVARIANT_ROWS = 512, 32
"""Input width, and rows, up to either of which oneDNN sums a row in the same order."""
MAX_BATCHED = 2**20  # elements of a weight up to which one batched product beats packed ones
LARGE_GATE = 2**20  # elements of the merged weight from which two fused products beat one


class Projection(Protocol):
    """``y = x W^T + b`` for a fixed W ``[out, in]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x ``[T, in]``, other ``[T, out]`` -> other + y."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``: y * sigmoid(y)."""
        ...


class PlainProjection(Projection):
    """The obvious product, on any device and in any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @override
    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @override
    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        if self.bias is None:
            return torch.addmm(other, x, self.weight.t())
        return F.linear(x, self.weight, self.bias).add_(other)

    @override
    def silu(self, x: Tensor) -> Tensor:
        return F.silu(F.linear(x, self.weight, self.bias))


class PackedProjection(Projection):
    """The product by oneDNN, with the weight in its blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_plus = torch.ops.mkldnn._linear_pointwise.binary

    @override
    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._linear(x, self.weight, self.bias, "none", [], "")
        return result

    @override
    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self._linear_plus(x, other, self.weight, self.bias, "add")
        return result

    @override
    def silu(self, x: Tensor) -> Tensor:
        result: Tensor = self._linear(x, self.weight, self.bias, "swish", [], "")
        return result


class BatchInvariantProjection(Projection):
    """A packed product of at most ``BATCH_INVARIANT_ROWS`` rows at a time: for more rows oneDNN
    splits long sums differently.
    """

    def __init__(self, packed: PackedProjection) -> None:
        self.packed = packed

    @override
    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= BATCH_INVARIANT_ROWS:
            return self.packed(x)
        return torch.cat([self.packed(part) for part in x.split(BATCH_INVARIANT_ROWS)])

    @override
    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        if x.shape[0] <= BATCH_INVARIANT_ROWS:
            return self.packed.plus(x, other)
        parts = zip(x.split(BATCH_INVARIANT_ROWS), other.split(BATCH_INVARIANT_ROWS), strict=True)
        return torch.cat([self.packed.plus(*part) for part in parts])

    @override
    def silu(self, x: Tensor) -> Tensor:
        return torch.cat([self.packed.silu(part) for part in x.split(BATCH_INVARIANT_ROWS)])


class BatchedProjection:
    """Several products of one shape, weights ``[out, in]`` and biases ``[out]`` or None, each with
    its own input; one call where that is faster.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> None:
        self._packed: list[Projection] = []
        if _packs(weights[0]) and weights[0].numel() > MAX_BATCHED:
            all_biases = biases or [None] * len(weights)
            self._packed = [projection(*pair) for pair in zip(weights, all_biases, strict=True)]
            return
        self._weight = torch.stack([weight.t() for weight in weights])  # [count, in, out]
        self._bias = None if biases is None else torch.stack(list(biases)).unsqueeze(1)

    def __call__(self, x: Tensor) -> Tensor:
        """The first ``count`` products: x ``[count, T, in]`` -> ``[count, T, out]``."""
        if self._packed:
            parts = zip(self._packed, x.unbind(0), strict=False)
            return torch.stack([product(part.contiguous()) for product, part in parts])
        if self._bias is None:
            return torch.bmm(x, self._weight[: len(x)])
        return torch.baddbmm(self._bias[: len(x)], x, self._weight[: len(x)])


class GatedActivation(Protocol):
    """``silu(x G^T) * (x U^T)`` for fixed G and U, biases included where there are any."""

    def __call__(self, x: Tensor, adapt: Adapt = no_addition) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``; ``adapt`` adds to both products, as ``gate_up``."""
        ...


class MergedGatedActivation(GatedActivation):
    """One product for both, then the activation; ``product`` has the outputs of G, then of U."""

    def __init__(self, product: Projection) -> None:
        self.product = product

    @override
    def __call__(self, x: Tensor, adapt: Adapt = no_addition) -> Tensor:
        both = self.product(x)
        adapt("gate_up", x, both)
        if has_kernels(both.device):
            result: Tensor = silu_and_mul(both)
            return result
        gated, up = both.chunk(2, -1)
        return F.silu(gated).mul_(up)


class PackedGatedActivation(GatedActivation):
    """Two products by oneDNN, which applies activation and multiplication as it writes, unless
    something is added before.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        gated, up = weight.chunk(2)
        self.gated = torch.ops.mkldnn._reorder_linear_weight(gated.contiguous())
        self.up = torch.ops.mkldnn._reorder_linear_weight(up.contiguous())
        self.biases = (None, None) if bias is None else bias.chunk(2)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_times = torch.ops.mkldnn._linear_pointwise.binary

    @override
    def __call__(self, x: Tensor, adapt: Adapt = no_addition) -> Tensor:
        if adapt is not no_addition:
            weights = zip((self.gated, self.up), self.biases, strict=True)
            both = torch.cat([self._linear(x, *pair, "none", [], "") for pair in weights], -1)
            adapt("gate_up", x, both)
            gate, up = both.chunk(2, -1)
            return F.silu(gate).mul_(up)
        gated = self._linear(x, self.gated, self.biases[0], "swish", [], "")
        result: Tensor = self._linear_times(x, gated, self.up, self.biases[1], "mul")
        return result


def projection(
    weight: Tensor | StoredWeight,
    bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> Projection:
    """The product with weight ``[out, in]``, of any layout or quantised, and bias ``[out]`` or
    None, packed where that is faster. ``batch_invariant``: round a row the same in every batch,
    at the cost of further calls.
    """
    if not isinstance(weight, Tensor):
        return QuantizedProjection(weight, bias, batch_invariant=batch_invariant)
    if not _packs(weight):
        return PlainProjection(weight, bias)
    packed = PackedProjection(weight, bias)
    return (
        BatchInvariantProjection(packed)
        if batch_invariant and weight.shape[1] > BATCH_INVARIANT_TERMS
        else packed
    )


def gated_activation(
    weight: Tensor | StoredWeight,
    bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> GatedActivation:
    """G and U are the halves of weight ``[2 * out, in]``; arguments as of ``projection``."""
    # A further call costs more than a small activation does.
    if (
        isinstance(weight, Tensor)
        and _packs(weight)
        and weight.numel() >= LARGE_GATE
        and not batch_invariant
    ):
        return PackedGatedActivation(weight, bias)
    return MergedGatedActivation(projection(weight, bias, batch_invariant=batch_invariant))


class FusedLayer:
    """The forward of a Llama decoder layer after its first norm.

    One product for query, key and value, one rotation for query and key together, attention, an
    output product that adds the residual, one product for gate and up, and a down product that adds
    the residual. There is no Python that depends on data.

    Args:
        layer: its weights are taken, in their dtype and on their device. It has the parts of
            transformers' ``LlamaDecoderLayer``: ``self_attn`` (with ``q_norm`` and ``k_norm`` or
            without), ``mlp`` and ``post_attention_layernorm``.
        batch_invariant: round a token the same in every batch.
    """

    def __init__(self, layer: nn.Module, *, batch_invariant: bool = False) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim, self.scoring = attention.head_dim, Scoring(attention.head_dim**-0.5)
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = projection(
            *_merged(attention.q_proj, attention.k_proj, attention.v_proj),
            batch_invariant=batch_invariant,
        )
        self.head_norm = self._head_norm(attention, batch_invariant)
        self.out = own_projection(attention.o_proj, batch_invariant)
        self.mlp_norm = fused_norm(layer.post_attention_layernorm, batch_invariant=batch_invariant)
        self.gate_up = gated_activation(
            *_merged(mlp.gate_proj, mlp.up_proj), batch_invariant=batch_invariant
        )
        self.down = own_projection(mlp.down_proj, batch_invariant)

    def __call__(
        self,
        index: int,
        x: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        forward_pass: ForwardPass,
        output_index: Tensor | None = None,
    ) -> Tensor:
        """The layer's output ``[T, hidden]``, or ``[R, hidden]`` of the tokens in ``output_index``.

        Args:
            index: of the layer in the KV cache.
            x: ``[T, width]``, the normed input.
            residual: ``[T, hidden]``.
            rotation: cosines and sines ``[T, 1, head_dim]`` of ``rotary_table``.
            forward_pass: over the batch of the T tokens, whose keys and values are all stored.
            output_index: int64 ``[R]``, the tokens whose output is needed; None: all.
        """
        tokens, batch = x.shape[0], forward_pass.batch
        adapt, heads = batch.adapt(index), self.qkv(x)
        adapt("qkv", x, heads)
        qkv = heads.view(tokens, -1, self.head_dim)
        qk, v = qkv.split_with_sizes([self.num_heads + self.num_kv_heads, self.num_kv_heads], 1)
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        mixed = forward_pass.rotate_and_attend(index, qk, v, rotation, self.scoring)
        mixed = mixed.view(tokens, -1)
        if output_index is not None:  # what follows is per token
            mixed, residual = mixed[output_index], residual[output_index]
            adapt = batch.adapt(index, are_outputs=True)
        x = self.out.plus(mixed, residual)
        adapt("out", mixed, x)
        inner = self.gate_up(self.mlp_norm(x), adapt)
        output = self.down.plus(inner, x)
        adapt("down", inner, output)
        return output

    def _head_norm(self, attention: nn.Module, batch_invariant: bool) -> Norm | None:
        """Qwen3's norm of queries and keys, with one weight ``[heads + kv_heads, head_dim]``."""
        if not hasattr(attention, "q_norm"):
            return None
        weights = [
            attention.q_norm.weight.expand(self.num_heads, -1),
            attention.k_norm.weight.expand(self.num_kv_heads, -1),
        ]
        eps = attention.q_norm.variance_epsilon
        return Norm(torch.cat(weights), eps, batch_invariant=batch_invariant)


def fused_norm(norm: nn.Module, *, batch_invariant: bool = False) -> Norm:
    """The ``Norm`` of transformers' RMSNorm modules and of torch's."""
    eps = norm.eps if isinstance(norm, nn.RMSNorm) else norm.variance_epsilon
    return Norm(norm.weight, eps or 0.0, batch_invariant=batch_invariant)


def rotary_table(rotary: Callable[..., tuple[Tensor, Tensor]], length: int, like: Tensor) -> Tensor:
    """``[length, 2, 1, head_dim]`` in the dtype and on the device of ``like``: cosines and sines,
    the first half of the sines negated, of transformers' ``rotary`` with its scaling. With it,
    rotating is ``x * cos + roll(x, head_dim / 2) * sin``.
    """
    cos, sin = rotary(like, torch.arange(length, device=like.device)[None])
    half = sin.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    return torch.stack([cos[0], sin[0]], 1).unsqueeze(2)


def own_projection(
    linear: nn.Module, batch_invariant: bool, tied: Tensor | None = None
) -> Projection:
    """The product of a linear that is not merged with others. Its weight, unless quantised, is
    copied, or is that of ``tied``, where something else has a copy of it already.
    """
    weight = linear.weight if tied is None else tied
    if tied is None and isinstance(weight, Tensor):
        weight = owned(weight)
    bias = None if linear.bias is None else owned(linear.bias)
    return projection(weight, bias, batch_invariant=batch_invariant)


def _merged(*linears: nn.Module) -> tuple[Tensor | StoredWeight, Tensor | None]:
    """Weight and bias of one linear whose outputs are those of ``linears``, concatenated."""
    weights = [linear.weight for linear in linears]
    is_plain = isinstance(weights[0], Tensor)
    weight = torch.cat(weights) if is_plain else concatenated(weights)
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [
        torch.zeros(linear.out_features, dtype=weight.dtype, device=weight.device)
        if linear.bias is None
        else linear.bias
        for linear in linears
    ]
    return weight, torch.cat(biases)


def _packs(weight: Tensor) -> bool:
    """Whether the weight is in 16 bits on a CPU whose oneDNN has fast products in them."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and weight.device.type == "cpu" and has_fast_matmul(weight.dtype, weight.device)
