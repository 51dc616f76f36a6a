"""Reads checkpoints with quantised weights: AWQ, GPTQ, compressed-tensors, and fp8 in blocks.

``read`` builds the transformers module without its quantiser, puts a ``QuantizedLinear`` where the
checkpoint has integers, and loads all other tensors as they are. Integers are taken over exactly;
weights in fp8, and 8-bit integers with several scales per output, are dequantised to the dtype of
the model, since no CPU multiplies them. Activations stay in 16 or 32 bits, also where the
checkpoint was made for 8-bit ones.

Layouts, for a weight ``[out, in]`` with groups of g inputs and k values in an int32 (8 of 4 bits,
4 of 8 bits), the first in the lowest bits:

==================  ==========================================================================
AWQ (``gemm``)      ``qweight [in, out / 8]`` and ``qzeros [in / g, out / 8]`` with outputs in the
                    order 0, 2, 4, 6, 1, 3, 5, 7; ``scales [in / g, out]``
GPTQ                ``qweight [in / k, out]``, ``qzeros [in / g, out / k]`` (minus 1 but in the
                    format ``gptq_v2``), ``scales [in / g, out]``, ``g_idx [in]``
compressed-tensors  ``weight_packed [out, in / k]`` (plus half of the range), ``weight_scale [out,
                    in / g]``, ``weight_zero_point [out / k, in / g]``; or ``weight`` in int8 or fp8
fp8                 ``weight`` in fp8 and ``weight_scale_inv [out / 128, in / 128]``
==================  ==========================================================================
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from forethought.errors import ModelError
from forethought.model.quantization import QuantizedLinear, QuantizedWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Entry i: the output that stands in nibble i of an int32."""


class StoredTensors:
    """The tensors of a directory by name, each read when it is asked for.

    Args:
        directory: with ``*.safetensors``.

    Raises:
        ModelError: it has none.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)
        if not self._files:
            raise _refused(directory, "quantised weights are read from *.safetensors alone")
        self._unread = set(self._files)

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name; None: there is none."""
        if name not in self._files:
            return None
        self._unread.discard(name)
        with safe_open(self._files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name.

        Raises:
            ModelError: there is none.
        """
        tensor = self.get(name)
        if tensor is None:
            raise _refused(self.directory, f"its checkpoint lacks {name}")
        return tensor

    def unread(self) -> list[str]:
        """Names of the tensors that nobody asked for."""
        return sorted(self._unread)


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of one linear layer.

    Attributes:
        tensors: of the whole checkpoint.
        name: of the layer.
        shape: ``(out, in)`` of its weight.
        dtype: of activations.
    """

    tensors: StoredTensors
    name: str
    shape: tuple[int, int]
    dtype: torch.dtype

    def get(self, part: str) -> Tensor | None:
        """The tensor ``<name>.<part>``; None: there is none."""
        return self.tensors.get(f"{self.name}.{part}")

    def __getitem__(self, part: str) -> Tensor:
        return self.tensors[f"{self.name}.{part}"]

    def refused(self, why: str) -> ModelError:
        """The error of a layer that cannot be read."""
        return _refused(self.tensors.directory, f"{self.name}: {why}")


Reader = Callable[[Stored], QuantizedWeight | Tensor]
"""Reads the weight of a linear: integers, or dequantised ``[out, in]``."""


def reads(settings: Mapping[str, Any]) -> bool:
    """Whether checkpoints of this ``quantization_config`` are read here."""
    return settings.get("quant_method") in _READERS


def read(
    directory: Path, config: Any, settings: Mapping[str, Any], dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """The model of a quantised checkpoint.

    Args:
        directory: of the checkpoint.
        config: its transformers configuration.
        settings: its ``quantization_config``.
        dtype: of activations and of the weights that are not quantised.
        **options: of ``AutoModelForCausalLM.from_config``.

    Raises:
        ModelError: a variant of the format that is not read, or tensors that are missing, of the
            wrong shape or not explained.
    """
    reader = _READERS[settings["quant_method"]](directory, settings)
    config = copy.deepcopy(config)
    del config.quantization_config
    with no_init_weights():
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    tensors = StoredTensors(directory)
    for name, linear in list(module.named_modules()):
        if type(linear) is nn.Linear:
            _load_linear(module, Stored(tensors, name, tuple(linear.weight.shape), dtype), reader)
    module.tie_weights()
    _load_others(module, tensors, dtype)
    return module


def _load_linear(module: nn.Module, stored: Stored, reader: Reader) -> None:
    """Put the stored weight into the module; leaves a layer that is not quantised as it is."""
    linear = module.get_submodule(stored.name)
    if not any(stored.get(part) is not None for part in _MARKS):
        return
    weight = reader(stored)
    if tuple(weight.shape) != stored.shape:
        raise stored.refused(f"its weight is {list(weight.shape)}, not {list(stored.shape)}")
    bias = None
    if linear.bias is not None:
        bias = stored["bias"].to(stored.dtype)
    if isinstance(weight, QuantizedWeight):
        module.set_submodule(stored.name, QuantizedLinear(weight, bias))
    else:
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        linear.is_dequantised = True


def _load_others(module: PreTrainedModel, tensors: StoredTensors, dtype: torch.dtype) -> None:
    """Load every parameter that no quantised linear has replaced; nothing may be left over."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    for name, parameter in list(module.named_parameters()):
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        if getattr(owner, "is_dequantised", False):
            continue
        if owner is head and leaf == "weight" and parameter is embedding.weight:
            tensors.get(name)  # tied, and perhaps stored twice
            continue
        value = tensors[name]
        if value.shape != parameter.shape:
            why = f"{name} is {list(value.shape)}, not {list(parameter.shape)}"
            raise _refused(tensors.directory, why)
        setattr(owner, leaf, nn.Parameter(value.to(dtype), requires_grad=False))
    module.tie_weights()
    unexplained = [name for name in tensors.unread() if not name.endswith(_IGNORED)]
    if unexplained:
        raise _refused(tensors.directory, f"its model has no place for {unexplained[0]}")


def _unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """int32 values of ``bits`` -> int32 of one value each, in their order along ``dim``."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    spread = (packed.movedim(dim, -1).unsqueeze(-1) >> shifts) & (2**bits - 1)
    return spread.flatten(-2).movedim(-1, dim)


def _weight(values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> QuantizedWeight:
    """From unsigned values ``[out, in]``, scales ``[out, groups]`` and unsigned zero points."""
    half = 2 ** (bits - 1)
    if zeros is not None and bool((zeros == half).all()):
        zeros = None
    if bits == 8:
        values = (values - half).to(torch.int8)
        zeros = None if zeros is None else zeros - half
    else:
        values = values.to(torch.uint8)
    exact = None if zeros is None else zeros.float().contiguous()
    return QuantizedWeight(values.contiguous(), scales.contiguous(), exact, bits)


def _awq(directory: Path, settings: Mapping[str, Any]) -> Reader:
    version = str(settings.get("version", "gemm")).lower()
    _expect(directory, "AWQ", "bits", settings.get("bits", settings.get("w_bit", 4)), (4,))
    _expect(directory, "AWQ", "version", version, ("gemm",))
    order = torch.tensor(AWQ_ORDER).argsort()

    def outputs(packed: Tensor) -> Tensor:
        spread = _unpack(packed, 4, 1)
        return spread.unflatten(1, (-1, 8))[:, :, order].flatten(1)

    def reader(stored: Stored) -> QuantizedWeight:
        scales = stored["scales"].t().to(stored.dtype)
        zeros = stored.get("qzeros")
        return _weight(
            outputs(stored["qweight"]).t(),
            scales,
            None if zeros is None else outputs(zeros).t(),
            4,
        )

    return reader


def _gptq(directory: Path, settings: Mapping[str, Any]) -> Reader:
    bits = settings.get("bits", 4)
    _expect(directory, "GPTQ", "bits", bits, (4, 8))
    shift = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def reader(stored: Stored) -> QuantizedWeight | Tensor:
        scales = stored["scales"].t().to(stored.dtype)
        size = stored.shape[1] // scales.shape[1]
        order = stored.get("g_idx")
        if order is not None and not torch.equal(
            order.long(), torch.arange(stored.shape[1]) // size
        ):
            raise stored.refused("its inputs are reordered (desc_act), which is not supported")
        values = _unpack(stored["qweight"], bits, 0).t()
        zeros = _unpack(stored["qzeros"], bits, 1).t() + shift
        return _kept(_weight(values, scales, zeros, bits))

    return reader


def _compressed(directory: Path, settings: Mapping[str, Any]) -> Reader:
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _refused(directory, f"it has {len(groups)} groups of layers; one is read")
    weights = groups[0].get("weights") or {}
    bits, kind = int(weights.get("num_bits") or 0), weights.get("type")
    _expect(directory, "compressed-tensors", "num_bits", bits, (4, 8))
    _expect(directory, "compressed-tensors", "type", kind, ("int", "float"))
    if weights.get("actorder") not in (None, False, "weight"):
        raise _refused(directory, f"its inputs are reordered (actorder={weights['actorder']})")

    def packed(stored: Stored) -> QuantizedWeight | Tensor:
        values = _unpack(stored["weight_packed"], bits, 1)[:, : stored.shape[1]]
        scales = stored["weight_scale"].to(stored.dtype)
        zeros = stored.get("weight_zero_point")
        if zeros is not None:
            zeros = _unpack(zeros, bits, 0)[: stored.shape[0]]
        stored.get("weight_shape")
        return _kept(_weight(values, scales, zeros, bits))

    def reader(stored: Stored) -> QuantizedWeight | Tensor:
        if stored.get("weight_packed") is not None:
            return packed(stored)
        values, scales = stored["weight"], stored["weight_scale"]
        zeros = stored.get("weight_zero_point")
        if zeros is not None and bool(zeros.any()):
            raise stored.refused("unpacked weights with zero points are not read")
        if values.dtype == torch.int8:
            columns = scales.reshape(-1, 1) if scales.dim() < 2 else scales
            columns = columns.expand(stored.shape[0], -1)
            return _kept(QuantizedWeight(values, columns.to(stored.dtype), None, 8))
        return _scaled(stored, values, scales)

    return reader


def _fp8(directory: Path, settings: Mapping[str, Any]) -> Reader:
    def reader(stored: Stored) -> Tensor:
        scales = stored.get("weight_scale_inv")
        stored.get("input_scale"), stored.get("activation_scale")
        return _scaled(
            stored, stored["weight"], stored["weight_scale"] if scales is None else scales
        )

    return reader


def _kept(weight: QuantizedWeight) -> QuantizedWeight | Tensor:
    """The weight, dequantised where no product takes it: 8 bits with several scales per output."""
    simple = weight.scales.shape[1] == 1 and weight.zeros is None
    return weight if weight.bits == 4 or simple else weight.dequantize()


def _scaled(stored: Stored, values: Tensor, scales: Tensor) -> Tensor:
    """fp8 values ``[out, in]`` times their scales, one per block of any size: in ``dtype``."""
    grid = scales.float()
    grid = grid.reshape(1, 1) if grid.numel() == 1 else grid
    grid = grid[:, None] if grid.dim() == 1 else grid
    for dim, size in enumerate(values.shape):
        block = -(-size // grid.shape[dim])
        if block > 1 and grid.shape[dim] > 1:
            block = 1 << (block - 1).bit_length()  # the last block may be smaller than the others
        if -(-size // block) != grid.shape[dim]:
            raise stored.refused(f"scales {list(scales.shape)} do not fit {list(values.shape)}")
        grid = grid.repeat_interleave(block, dim).narrow(dim, 0, size)
    return (values.float() * grid).to(stored.dtype)


def _expect(
    directory: Path, method: str, name: str, value: object, allowed: tuple[object, ...]
) -> None:
    if value not in allowed:
        choices = " or ".join(map(str, allowed))
        raise _refused(directory, f"{method} with {name}={value} is not read, only {choices}")


def _refused(directory: Path, why: str) -> ModelError:
    return ModelError(
        f"the quantised model in {directory} cannot be loaded",
        why,
        "Give another format (AWQ gemm, GPTQ, compressed-tensors, fp8), or 16 or 32 bits",
    )


_READERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Reader]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}
_MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""Tensors of which every quantised linear has one."""
_IGNORED = (
    ".rotary_emb.inv_freq",
    *(f".{what}_scale" for what in ("input", "activation", "output", "q", "k", "v")),
)
"""Ends of the names of tensors without a meaning here: computed again, or scales of activations and
quantised KV caches."""


def settings_of(directory: Path, config: Any) -> Mapping[str, Any] | None:
    """The ``quantization_config`` as it is written; None: the checkpoint is not quantised."""
    if getattr(config, "quantization_config", None) is None:
        return None
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    found: Mapping[str, Any] | None = written.get("quantization_config")
    return found
