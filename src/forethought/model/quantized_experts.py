"""Experts of a transformers module in 8 and 4 bits.

transformers keeps the weights of a layer's experts in two parameters, ``gate_up_proj`` ``[E, 2 I,
H]`` and ``down_proj`` ``[E, H, I]``, or transposed, with biases or without; the first is
``up_proj`` ``[E, I, H]`` where there are no gates. Each expert's weights are quantised as those of
linears are (``model.quantization``), and ``QuantizedExperts`` takes the module's place: the
reference of what the native forward computes of them. Routers are not quantised: few weights, on
which the choice of experts depends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from forethought.config.quantization import Quantization
from forethought.errors import ModelError
from forethought.model.quantization import (
    BITS,
    QuantizedLinear,
    StoredWeight,
    has_rounded_input,
    quantize,
)


def weights_of(experts: nn.Module) -> tuple[str, str]:
    """Parameters of a module of experts: to its activation, and from there."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


class QuantizedExperts(nn.Module):
    """Replaces a module of experts.

    Args:
        experts: the module, of which the activation is left.
        gate_up: of each expert, to what its activation reads; without gates the up projection.
        down: of each expert, from there.
    """

    def __init__(
        self,
        experts: nn.Module,
        gate_up: Iterable[QuantizedLinear],
        down: Iterable[QuantizedLinear],
    ) -> None:
        super().__init__()
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)
        self._activation = experts

    @classmethod
    def of(cls, experts: nn.Module, quantization: Quantization) -> QuantizedExperts:
        """Quantise the weights of a module, which loses them."""
        gate_up, down = (
            _take_quantized(experts, name, quantization) for name in weights_of(experts)
        )
        return cls(experts, gate_up, down)

    @classmethod
    def holding(
        cls, experts: nn.Module, gate_up: Sequence[StoredWeight], down: Sequence[StoredWeight]
    ) -> QuantizedExperts:
        """With a weight ``[out, in]`` of each expert in place of the module's own."""
        linears = []
        for name, weights in zip(weights_of(experts), (gate_up, down), strict=True):
            delattr(experts, name)
            biases = _take_biases(experts, name, len(weights))
            linears.append(list(map(QuantizedLinear, weights, biases)))
        return cls(experts, *linears)

    def __len__(self) -> int:
        return len(self.down)

    def linears(self) -> list[nn.Module]:
        """Of all experts."""
        return [*self.gate_up, *self.down]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the outputs of each token's experts, in the order of its choice.

        Args:
            x: ``[T, H]``.
            chosen: int64 ``[T, top_k]``, of the experts.
            weights: ``[T, top_k]``, of their outputs.

        Returns:
            ``[T, H]`` in the dtype of ``x``.
        """
        outputs = x.new_zeros(*chosen.shape, x.shape[-1])
        for expert in chosen.unique().tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            activated = self._activate(self.gate_up[expert](x[tokens]))
            outputs[tokens, places] = self.down[expert](activated)
        return (outputs * weights[..., None]).sum(1).to(x.dtype)

    def _activate(self, x: Tensor) -> Tensor:
        experts = self._activation
        activated: Tensor = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
        return activated


def _take_quantized(
    experts: nn.Module, name: str, quantization: Quantization
) -> list[QuantizedLinear]:
    """One weight of each expert, which the module loses."""
    weights: Tensor = getattr(experts, name).detach()
    delattr(experts, name)
    biases = _take_biases(experts, name, len(weights))
    if experts.is_transposed:
        weights = weights.transpose(1, 2)
    bits, rounds_input = BITS[quantization], has_rounded_input(quantization)
    return [
        QuantizedLinear(quantize(weight, bits, rounds_input=rounds_input), bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _take_biases(experts: nn.Module, name: str, num_experts: int) -> Sequence[Tensor | None]:
    """The bias of each expert, which the module loses; None where it has none."""
    if not experts.has_bias:
        return [None] * num_experts
    biases: Tensor = getattr(experts, f"{name}_bias").detach()
    delattr(experts, f"{name}_bias")
    return biases.unbind()


def quantize_experts(module: nn.Module, quantization: Quantization) -> int:
    """Replace every module of experts by its quantised form, one after the other; returns how many
    experts there are.

    Raises:
        ModelError: experts of another layout, or widths that 4 bits do not take.
    """
    experts = [(name, part) for name, part in module.named_modules() if is_readable(part)]
    readable = {f"{name}.{weight}" for name, part in experts for weight in weights_of(part)}
    for name, weight in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        if weight.dim() == 3 and name not in readable and not isinstance(owner, nn.Conv1d):
            layout = type(owner).__name__
            raise ModelError(
                f'quantization="{quantization}" is not possible for this model',
                f"{name} holds weights of experts in the layout of {layout}, which is not known",
                "Leave the argument out",
            )
    num_experts = 0
    for name, part in experts:
        quantized = QuantizedExperts.of(part, quantization)
        module.set_submodule(name, quantized)
        num_experts += len(quantized)
    return num_experts


def is_readable(part: nn.Module) -> bool:
    """Whether it is one of transformers' modules of experts, without norms."""
    names = {name for name, weight in part.named_parameters(recurse=False) if weight.dim() == 3}
    if not all(hasattr(part, name) for name in ("is_transposed", "has_bias", "has_gate")):
        return False
    return names == {*weights_of(part)} and not getattr(part, "has_post_expert_norm", False)


def routers(module: nn.Module) -> set[nn.Module]:
    """The linears beside quantised experts that choose them, or weigh those of all tokens."""
    return {
        linear
        for block in module.modules()
        for experts in block.children()
        if isinstance(experts, QuantizedExperts)
        for linear in block.modules()
        if isinstance(linear, nn.Linear) and linear.out_features in (1, len(experts))
    }
