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
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from forethought.errors import ModelError
from forethought.model.loaded_weights import check_values
from forethought.model.quantization import QuantizedLinear, QuantizedWeight, has_output_scales
from forethought.transformers_loading import one_module_at_a_time

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Entry i: the output that stands in nibble i of an int32."""
COMPRESSED_TYPES = ((4, "int"), (8, "int"), (8, "float"))
"""Bits and type of the weights that are read of compressed-tensors."""
COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Formats that are read of compressed-tensors."""
HEAD = "lm_head"
"""Name of the output projection in checkpoints."""


class NamedTensors(Protocol):
    """Tensors by name, each read when it is asked for."""

    directory: Path

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name; raises ModelError if there is none."""
        ...

    def unread(self) -> list[str]:
        """Names of the tensors that have not been read."""
        ...


class StoredTensors:
    """The tensors in the ``*.safetensors`` of a directory by name, each read when it is asked for.
    Raises ModelError if it has none.
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

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name; None: there is none."""
        if name not in self._files:
            return None
        self._unread.discard(name)
        with safe_open(self._files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        check_values([(name, tensor)], self.directory, "model")
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name; raises ModelError if there is none."""
        tensor = self.get(name)
        if tensor is None:
            raise _refused(self.directory, f"its checkpoint lacks {name}")
        return tensor

    def unread(self) -> list[str]:
        """Names of the tensors that have not been read."""
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


def is_supported(settings: Mapping[str, Any]) -> bool:
    """Whether checkpoints of this ``quantization_config`` are read here."""
    return settings.get("quant_method") in _READERS


def is_dequantised(settings: Mapping[str, Any]) -> bool:
    """Whether weights of these settings are dequantised as they are read."""
    method = settings.get("quant_method")
    if method == "gptq":
        return settings.get("bits") == 8 and settings.get("group_size", -1) != -1
    if method != "compressed-tensors":
        return method == "fp8"
    groups = list((settings.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") if groups else None) or {}
    is_plain = weights.get("strategy") in ("tensor", "channel") and weights.get("symmetric", True)
    return weights.get("type") == "float" or (weights.get("num_bits") == 8 and not is_plain)


def read(
    directory: Path, config: Any, settings: Mapping[str, Any], dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """The model of a quantised checkpoint.

    Args:
        config: its transformers configuration.
        settings: its ``quantization_config``.
        dtype: of activations and of the weights that are not quantised.
        **options: of ``AutoModelForCausalLM.from_config``.

    Raises:
        ModelError: a variant of the format that is not read, or tensors that are missing, of the
            wrong shape or not explained.
    """
    reader = _READERS[settings["quant_method"]](directory, settings)
    tensors = StoredTensors(directory)
    config = copy.deepcopy(config)
    del config.quantization_config
    if any(tensors.has(f"{HEAD}.{part}") for part in _MARKS):
        untie(config)  # an embedding is never quantised
    module = empty_module(directory, config, dtype, **options)
    _check_experts(module, directory)
    for name, linear in list(module.named_modules()):
        if type(linear) is nn.Linear:
            _load_linear(module, Stored(tensors, name, tuple(linear.weight.shape), dtype), reader)
    module.tie_weights()
    load_others(module, tensors, dtype)
    return module


def empty_module(
    directory: Path, config: Any, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """The module of a configuration, whose weights are not set yet; arguments as of ``read``."""
    with one_module_at_a_time(), no_init_weights():
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    if (directory / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(directory)
    return module


def untie(config: Any) -> None:
    """Give the output projection weights of its own."""
    for part in (config, config.get_text_config(decoder=True)):
        part.tie_word_embeddings = False


def _check_experts(module: nn.Module, directory: Path) -> None:
    experts = [name for name, weight in module.named_parameters() if weight.dim() == 3]
    if experts:
        why = f"{experts[0]} holds weights of experts, which are read in 16 or 32 bits alone"
        raise _refused(directory, why)


def _load_linear(module: nn.Module, stored: Stored, reader: Reader) -> None:
    """Put the stored weight into the module; leaves a layer that is not quantised as it is."""
    linear = module.get_submodule(stored.name)
    if not any(stored.get(part) is not None for part in _MARKS):
        return
    weight = reader(stored)
    if tuple(weight.shape) != stored.shape:
        raise stored.refused(f"its weight is {list(weight.shape)}, not {list(stored.shape)}")
    bias = stored.get("bias") if linear.bias is None else stored["bias"]
    if linear.bias is None and bias is not None and not bool(bias.any()):
        bias = None  # some writers store zeros for layers without one
    bias = None if bias is None else bias.to(stored.dtype)
    if isinstance(weight, QuantizedWeight):
        module.set_submodule(stored.name, QuantizedLinear(weight, bias))
    else:
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        linear.is_dequantised = True


def load_others(module: PreTrainedModel, tensors: NamedTensors, dtype: torch.dtype) -> None:
    """Load all parameters and buffers that are stored as they are; nothing may be left over."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    shared = None if embedding is None else embedding.weight
    is_tied = head is not None and head.weight is shared
    for name, held in module.state_dict(keep_vars=True).items():
        owner = module.get_submodule(name.rpartition(".")[0])
        is_head = is_tied and owner is head and held is shared
        if not is_head and not getattr(owner, "is_dequantised", False):
            _replace(module, name, _value(tensors, name, held, dtype))
    if is_tied:
        _load_tied(module, tensors, dtype)
    unexplained = [name for name in tensors.unread() if not name.endswith(_IGNORED)]
    if unexplained:
        raise _refused(tensors.directory, f"its model has no place for {unexplained[0]}")


def _load_tied(module: PreTrainedModel, tensors: NamedTensors, dtype: torch.dtype) -> None:
    """Tie the output projection, unless the checkpoint has other weights for it."""
    module.tie_weights()
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    name = (
        next(name for name, module_part in module.named_modules() if module_part is head)
        + ".weight"
    )
    if not tensors.has(name):
        return
    value = _value(tensors, name, embedding.weight, dtype)
    if not torch.equal(value, embedding.weight):
        untie(module.config)
        _replace(module, name, value)


def _value(tensors: NamedTensors, name: str, held: Tensor, dtype: torch.dtype) -> Tensor:
    """What is stored for a parameter, in ``dtype``, or for a buffer, in the buffer's."""
    value = tensors[name]
    if value.shape != held.shape:
        why = f"{name} is {list(value.shape)}, not {list(held.shape)}"
        raise _refused(tensors.directory, why)
    return value.to(dtype if isinstance(held, nn.Parameter) else held.dtype)


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    is_parameter = leaf in owner._parameters
    setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def _unpack(stored: Stored, part: str, bits: int, dim: int) -> Tensor:
    """The int32 values of ``bits`` in a tensor -> int32 of one value each, in order along ``dim``.
    Raises ModelError if there is no such tensor, or it is not int32.
    """
    packed = stored[part]
    if packed.dtype != torch.int32:
        raise stored.refused(f"its {part} is {packed.dtype}, not torch.int32")
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

    def outputs(stored: Stored, part: str) -> Tensor:
        spread = _unpack(stored, part, 4, 1)
        return spread.unflatten(1, (-1, 8))[:, :, order].flatten(1).t()

    def reader(stored: Stored) -> QuantizedWeight:
        scales = stored["scales"].t().to(stored.dtype)
        zeros = None if stored.get("qzeros") is None else outputs(stored, "qzeros")
        return _weight(outputs(stored, "qweight"), scales, zeros, 4)

    return reader


def _gptq(directory: Path, settings: Mapping[str, Any]) -> Reader:
    bits = settings.get("bits", 4)
    _expect(directory, "GPTQ", "bits", bits, (4, 8))
    form = "marlin" if settings.get("is_marlin_format") else settings.get("checkpoint_format")
    _expect(directory, "GPTQ", "checkpoint_format", form or "gptq", ("gptq", "gptq_v2"))
    shift = 0 if form == "gptq_v2" else 1

    def reader(stored: Stored) -> QuantizedWeight | Tensor:
        scales = stored["scales"].t().to(stored.dtype)
        size = stored.shape[1] // scales.shape[1]
        order = stored.get("g_idx")
        if order is not None and not torch.equal(
            order.long(), torch.arange(stored.shape[1]) // size
        ):
            raise stored.refused("its inputs are reordered (desc_act), which is not supported")
        values = _unpack(stored, "qweight", bits, 0).t()
        zeros = _unpack(stored, "qzeros", bits, 1).t() + shift
        return _dequantized_if_slow(_weight(values, scales, zeros, bits))

    return reader


def _compressed(directory: Path, settings: Mapping[str, Any]) -> Reader:
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _refused(directory, f"it has {len(groups)} groups of layers; one is read")
    weights = groups[0].get("weights") or {}
    bits, kind = int(weights.get("num_bits") or 0), weights.get("type")
    if (bits, kind) not in COMPRESSED_TYPES:
        raise _refused(directory, f"compressed-tensors with {kind} of {bits} bits is not read")
    for form in (settings.get("format"), groups[0].get("format")):
        _expect(directory, "compressed-tensors", "format", form, (None, *COMPRESSED_FORMATS))
    block = _compressed_block(weights)
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _refused(directory, f"its inputs are reordered (actorder={weights['actorder']})")

    def packed(stored: Stored) -> QuantizedWeight | Tensor:
        values = _unpack(stored, "weight_packed", bits, 1)[:, : stored.shape[1]]
        scales = stored["weight_scale"].to(stored.dtype)
        zeros = None
        if stored.get("weight_zero_point") is not None:
            zeros = _unpack(stored, "weight_zero_point", bits, 0)[: stored.shape[0]]
        stored.get("weight_shape")
        return _dequantized_if_slow(_weight(values, scales, zeros, bits))

    def reader(stored: Stored) -> QuantizedWeight | Tensor:
        if stored.get("weight_packed") is not None:
            return packed(stored)
        values, scales = stored["weight"], stored["weight_scale"]
        zeros = stored.get("weight_zero_point")
        if zeros is not None and bool(zeros.any()):
            raise stored.refused("unpacked weights with zero points are not read")
        if values.dtype == torch.int8:
            columns = scales.reshape(-1, 1) if scales.dim() < 2 else scales
            columns = columns.expand(stored.shape[0], -1).contiguous()
            return _dequantized_if_slow(QuantizedWeight(values, columns.to(stored.dtype), None, 8))
        return _scaled(stored, values, scales, block)

    return reader


def _compressed_block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale; None: those of one output, or all."""
    block = weights.get("block_structure")
    if block:
        out, width = block.split("x") if isinstance(block, str) else block
        return int(out), int(width)
    size = int(weights.get("group_size") or 0)
    return (1, size) if size > 0 else None


def _fp8(directory: Path, settings: Mapping[str, Any]) -> Reader:
    size = settings.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if size else None

    def reader(stored: Stored) -> Tensor:
        scales = stored.get("weight_scale_inv")
        stored.get("input_scale"), stored.get("activation_scale")
        scales = stored["weight_scale"] if scales is None else scales
        return _scaled(stored, stored["weight"], scales, block)

    return reader


def _dequantized_if_slow(weight: QuantizedWeight) -> QuantizedWeight | Tensor:
    """The weight, dequantised where no product takes it: 8 bits with several scales per output."""
    return weight if weight.bits == 4 or has_output_scales(weight) else weight.dequantize()


def _scaled(
    stored: Stored, values: Tensor, scales: Tensor, block: tuple[int, int] | None
) -> Tensor:
    """fp8 values ``[out, in]`` times their scales, one, one per output, or one per block of outputs
    and inputs (the last may be smaller), in ``dtype``.
    """
    if not values.dtype.is_floating_point or values.dtype.itemsize != 1:
        raise stored.refused(f"its weight is {values.dtype}, not fp8")
    out, width = values.shape
    grid = scales.float()
    if grid.numel() == 1:
        block, grid = (out, width), grid.reshape(1, 1)
    elif block is None:
        block, grid = (1, width), grid[:, None] if grid.dim() == 1 else grid
    expected = (-(-out // block[0]), -(-width // block[1]))
    if tuple(grid.shape) != expected:
        why = f"scales {list(scales.shape)} do not fit {[out, width]} in blocks of {list(block)}"
        raise stored.refused(why)
    for dim, size in enumerate(block):
        grid = grid.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
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
    ".input_zero_point",
    ".output_zero_point",
    *(f".{what}_scale" for what in ("input", "activation", "output", "q", "k", "v")),
)
"""Ends of the names of tensors without a meaning here: computed again, or scales of activations and
quantised KV caches."""


def settings_of(directory: Path, config: Any) -> Mapping[str, Any] | None:
    """The ``quantization_config`` as it is written; None: the checkpoint is not quantised."""
    if getattr(config, "quantization_config", None) is None:
        return None
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    settings: Mapping[str, Any] | None = written.get("quantization_config")
    return settings
