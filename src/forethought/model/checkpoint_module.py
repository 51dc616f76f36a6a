"""A Llama-like checkpoint as modules for the native forward, read without transformers.

The native forward packs weights from modules that are named as transformers names them.
``CheckpointModule`` has such modules and no forward of its own. Its layers are read one by one from
the files (``checkpoint_tensors.py``) when they are packed, quantised on the way, and freed again,
so that no second copy of the weights is ever held; and the code of transformers, which takes longer
to import than torch, is not needed.

``open_checkpoint`` takes plain checkpoints of ``FAMILIES`` alone: all tensors that the family has,
of the right shapes, and no others; one of the settings below; full attention. Everything else is
left to transformers, with its errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.kv.storage import LayerShape
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.block_weight import BlockWeight
from forethought.model.checkpoint_tensors import CheckpointTensors, tensors_of
from forethought.model.quantization import (
    BITS,
    Quantization,
    QuantizedLinear,
    has_rounded_input,
    quantize,
)
from forethought.model.rotary import RotaryEmbedding, rope_of
from forethought.model_dir import check_checkpoint, read_json

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Of ``model_type``."""
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_REQUIRED = (*_SIZES, "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act")
"""What has no default here."""
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")


class CheckpointConfig(SimpleNamespace):
    """The fields of a ``config.json``, named as transformers names them."""

    is_encoder_decoder = False
    quantization_config = None
    layer_types = None

    def get_text_config(self, decoder: bool = True) -> CheckpointConfig:
        """Itself: it has no other part."""
        return self

    def to_transformers(self) -> Any:
        """The configuration as transformers reads it."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.name_or_path, local_files_only=True)

    @classmethod
    def of(cls, directory: Path) -> CheckpointConfig | None:
        """Of a model directory; None: it has something that is not plain."""
        written = read_json(directory / "config.json")
        if written.get("model_type") not in FAMILIES or _has_specials(written):
            return None
        rope = rope_of(written)
        dtype = getattr(torch, str(written.get("dtype") or written.get("torch_dtype")), None)
        if rope is None or not isinstance(dtype, torch.dtype):
            return None
        heads = written["num_attention_heads"]
        fields = {
            **written,
            "name_or_path": str(directory),
            "dtype": dtype,
            "rope_parameters": rope,
            "num_key_value_heads": written.get("num_key_value_heads") or heads,
            "head_dim": written.get("head_dim") or written["hidden_size"] // heads,
        }
        return cls(**fields) if _has_whole_heads(fields) else None

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.model_type == "qwen2" or bool(getattr(self, "attention_bias", False))

    @property
    def has_out_bias(self) -> bool:
        """Whether the output of attention has one."""
        return self.model_type != "qwen2" and bool(getattr(self, "attention_bias", False))


def _has_specials(written: Mapping[str, Any]) -> bool:
    """Whether a configuration lacks a field, or has one that is not supported here."""
    if any(written.get(name) is None for name in _REQUIRED):
        return True
    if any(isinstance(written.get(name), list) for name in (*_REQUIRED, *_OPTIONAL_SIZES)):
        return True  # one for each layer
    if not isinstance(written.get("tie_word_embeddings"), bool) or "auto_map" in written:
        return True
    kinds = set(written.get("layer_types") or ())
    if written.get("quantization_config") or kinds - {"full_attention"}:
        return True
    has_window = written.get("sliding_window") is not None
    uses_window = written.get("use_sliding_window", written["model_type"] == "mistral")
    return bool(has_window and uses_window) or written.get("partial_rotary_factor", 1.0) != 1.0


def _has_whole_heads(fields: Mapping[str, Any]) -> bool:
    """Whether key heads are shared by as many query heads, and rotations turn pairs of a head."""
    num_heads, num_kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    return num_heads % num_kv_heads == 0 and fields["head_dim"] % 2 == 0


def open_checkpoint(
    directory: Path, quantization: Quantization | None = None, rounds_input: bool = True
) -> CheckpointModule | None:
    """The module of a directory; None: transformers has to read it. ``rounds_input``: blocks of a
    GGUF file are multiplied by activations in 8 bits.

    Raises ModelError as ``check_checkpoint``.
    """
    shapes = check_checkpoint(directory)
    config = CheckpointConfig.of(directory)
    if config is None or config.num_hidden_layers > len(shapes):  # a bound of what is made next
        return None
    if _expected_shapes(config) != shapes:
        return None
    tensors = tensors_of(directory, rounds_input)
    if tensors is None or tensors.names != {*shapes} or (quantization and tensors.has_blocks):
        return None
    return CheckpointModule(directory, config, tensors, quantization)


def _expected_shapes(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    """All tensors of the checkpoint."""
    shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def _layer_linears(config: CheckpointConfig) -> dict[str, tuple[int, int, bool]]:
    """Outputs and inputs of the linears of a layer, and whether they have biases."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    has_mlp_bias = bool(getattr(config, "mlp_bias", False))
    return {
        "self_attn.q_proj": (queries, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.has_out_bias),
        "mlp.gate_proj": (inner, hidden, has_mlp_bias),
        "mlp.up_proj": (inner, hidden, has_mlp_bias),
        "mlp.down_proj": (hidden, inner, has_mlp_bias),
    }


def _layer_shapes(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (num_outputs, num_inputs, has_bias) in _layer_linears(config).items():
        shapes[f"{name}.weight"] = (num_outputs, num_inputs)
        if has_bias:
            shapes[f"{name}.bias"] = (num_outputs,)
    shapes |= dict.fromkeys(
        ["input_layernorm.weight", "post_attention_layernorm.weight"], (config.hidden_size,)
    )
    if config.model_type == "qwen3":
        head_norms = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        shapes |= dict.fromkeys(head_norms, (config.head_dim,))
    return shapes


class RmsNorm(nn.Module):
    """The weight ``[size]`` of an RMS norm."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps


class Embedding(nn.Module):
    """The embeddings ``[vocab, hidden]`` of tokens, whole or in blocks."""

    bias = None

    def __init__(self, weight: Tensor | BlockWeight) -> None:
        super().__init__()
        is_tensor = isinstance(weight, Tensor)
        self.weight = nn.Parameter(weight, requires_grad=False) if is_tensor else weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        return F.embedding(token_ids, self.weight)


class CheckpointModule(nn.Module):
    """A causal language model without a forward.

    Attributes:
        config: of the checkpoint.
        dtype: of the weights in memory; the checkpoint's, unless it is set before they are read.
        model: embeddings, layers, final norm and rotary embeddings.
        lm_head: the output projection.
        has_blocks: weights are in the blocks of a GGUF file.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        tensors: CheckpointTensors,
        quantization: Quantization | None,
    ) -> None:
        super().__init__()
        self.config, self.quantization, self.dtype = config, quantization, config.dtype
        self.device = torch.device("cpu")
        self._tensors, self.has_blocks = tensors, tensors.has_blocks
        generation = directory / "generation_config.json"
        written = read_json(generation) if generation.exists() else {}
        self.generation_config = SimpleNamespace(eos_token_id=written.get("eos_token_id"))

    def read(self) -> None:
        """Read what is outside of the layers, which are read when they are asked for."""
        config, self.model = self.config, nn.Module()
        weights = self._read("model.embed_tokens.", "model.norm.", "lm_head.")
        embedding = weights["model.embed_tokens.weight"]
        self.model.embed_tokens = Embedding(embedding)
        self.model.norm = RmsNorm(weights["model.norm.weight"], config.rms_norm_eps)
        self.model.rotary_emb = RotaryEmbedding(config)
        self.model.layers = Layers(self)
        table = self.model.embed_tokens.weight
        head = table if config.tie_word_embeddings else weights["lm_head.weight"]
        self.lm_head = self._linear(head, None, 8)

    def layer(self, index: int) -> nn.Module:
        """A decoder layer, with its weights."""
        prefix, config = f"model.layers.{index}.", self.config
        layer, bits = nn.Module(), BITS.get(self.quantization or "")
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        tensors = self._read(prefix)
        for name, tensor in tensors.items():
            *path, part, kind = name.removeprefix(prefix).split(".")
            parent = layer.get_submodule(".".join(path))
            if "norm" in part:
                setattr(parent, part, RmsNorm(tensor, config.rms_norm_eps))
            elif kind == "weight":
                setattr(parent, part, self._linear(tensor, tensors.get(f"{name[:-6]}bias"), bits))
        attention = layer.self_attn
        attention.head_dim, attention.scaling = config.head_dim, config.head_dim**-0.5
        attention.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        return layer

    def profiles(self) -> tuple[LayerProfile, ...]:
        """What each layer needs of attention."""
        config = self.config
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        profile = LayerProfile(shape, config.num_attention_heads, None, softcap=False, sinks=False)
        return (profile,) * config.num_hidden_layers

    def _linear(
        self, weight: Tensor | BlockWeight, bias: Tensor | None, bits: int | None
    ) -> nn.Module:
        """A linear of a weight ``[out, in]``, quantised to ``bits`` where the module is."""
        if isinstance(weight, BlockWeight):
            return QuantizedLinear(weight, bias)
        if self.quantization is not None and bits is not None:
            rounds_input = has_rounded_input(self.quantization)
            return QuantizedLinear(quantize(weight.detach(), bits, rounds_input=rounds_input), bias)
        linear = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
        is_parameter = isinstance(weight, nn.Parameter)
        linear.weight = weight if is_parameter else nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        return linear

    def get_input_embeddings(self) -> nn.Module:
        """As of transformers."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """As of transformers."""
        return self.lm_head

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the linears of all layers, by name."""
        return {
            f"model.layers.{index}.{name}": (num_outputs, num_inputs)
            for index in range(self.config.num_hidden_layers)
            for name, (num_outputs, num_inputs, _) in _layer_linears(self.config).items()
        }

    @property
    def num_linears(self) -> int:
        """Of all layers, with the output projection."""
        return 1 + len(self.linears)

    @cached_property
    def num_weights(self) -> int:
        """Of all tensors."""
        return sum(torch.Size(shape).numel() for shape in _expected_shapes(self.config).values())

    def _read(self, *prefixes: str) -> dict[str, Tensor | BlockWeight]:
        """The tensors whose names begin so, in the module's dtype or in their blocks."""
        names = (name for name in self._tensors.names if name.startswith(prefixes))
        return self._tensors.read(sorted(names), self.dtype)


class Layers:
    """The layers of a module, each read when it is asked for.

    Args:
        module: whose layers they are.
    """

    def __init__(self, module: CheckpointModule) -> None:
        self._module = module

    def __len__(self) -> int:
        return int(self._module.config.num_hidden_layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self._module.layer(index)

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        """Nothing: no layer is held here."""

    def __iter__(self) -> Iterator[nn.Module]:
        return map(self._module.layer, range(len(self)))
