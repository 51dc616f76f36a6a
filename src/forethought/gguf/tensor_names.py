"""Where each weight of a transformers module is in a GGUF file, and how it comes out of it.

llama.cpp's converters change little: names; the order of the rotary rows of queries and keys in
architectures of Llama's converter; norms of Gemma, which are stored plus 1; and experts, which are
stored as one tensor for each of gate, up and down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forethought.errors import ModelError
from forethought.gguf.file import GgufFile, TensorInfo
from forethought.gguf.rope import TENSORS as ROPE_TENSORS


@dataclass(frozen=True, slots=True)
class StoredName:
    """The tensor of a GGUF file that a weight of a module is made from.

    The steps are taken in the order of the attributes. Rows are along ``row_dimension``; whole rows
    move, so blocks stay whole.

    Attributes:
        name: in the file.
        shape: of the weight, as the module has it.
        permutes_heads: heads of ``size`` rows are stored as (size / 2, 2) where the module has
            (2, size / 2), and brought back: ``reshape(heads, size / 2, 2, ...).swapaxes(1, 2)``;
            None: the order is the module's.
        adds: what is added to each value.
        joined: a second tensor whose rows follow, for each of the experts.
        interleaves: the rows of ``name`` and ``joined`` take turns.
        transposes: the two innermost dimensions change places, last of all.
    """

    name: str
    shape: tuple[int, ...]
    permutes_heads: int | None = None
    adds: float = 0.0
    joined: str | None = None
    interleaves: bool = False
    transposes: bool = False

    @property
    def row_dimension(self) -> int:
        """The dimension of a tensor along which its rows are: -2, and -1 of a bias."""
        return -1 if self.name.endswith(".bias") else -2

    @property
    def is_plain(self) -> bool:
        """Whether the weight has the rows of one tensor, in some order, and its values."""
        return not (self.adds or self.joined or self.transposes)


_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_FUSED_MLP = {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OLMO_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM_NORMS = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_GPT_OSS_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
}
_LLAMA = {**_ATTENTION, **_MLP, **_NORMS}
_MOE = {**_ATTENTION, **_NORMS, "mlp.gate": "ffn_gate_inp"}
_SHARED_EXPERT = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_LAYERS: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_HEAD_NORMS},
    "qwen2_moe": {**_MOE, **_SHARED_EXPERT},
    "qwen3_moe": {**_MOE, **_HEAD_NORMS},
    "gemma2": {**_ATTENTION, **_MLP, **_GEMMA_NORMS},
    "gemma3_text": {**_ATTENTION, **_MLP, **_GEMMA_NORMS, **_HEAD_NORMS},
    "phi3": {
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        **_FUSED_MLP,
        **_NORMS,
    },
    "olmo2": {**_ATTENTION, **_MLP, **_OLMO_NORMS, **_HEAD_NORMS},
    "smollm3": _LLAMA,
    "gpt_oss": {**_ATTENTION, **_GPT_OSS_NORMS, "mlp.router": "ffn_gate_inp"},
    "glm4": {**_ATTENTION, **_FUSED_MLP, **_GLM_NORMS},
}
"""``model_type`` -> module of a layer -> its name in the file."""
_PERMUTED = ("llama", "mistral", "smollm3")
_PLUS_ONE = ("gemma2", "gemma3_text")
_BIASES: Mapping[str, Sequence[str]] = {
    "gpt_oss": (*_ATTENTION, "mlp.router"),
    "qwen2": tuple(_ATTENTION)[:3],
}
"""``model_type`` -> modules that always have biases."""


def tensor_names(config: Mapping[str, Any], file: GgufFile) -> dict[str, StoredName]:
    """Every weight of the transformers module of ``config``, but a tied head, by its name there.

    Raises ModelError for tensors that the file lacks, or that the module has no place for.
    """
    stored = dict(_stored(config, file))
    expected = {name for entry in stored.values() for name in (entry.name, entry.joined)}
    strays = [name for name in file.tensors if name not in expected and name not in ROPE_TENSORS]
    if strays:
        why = f"it has {_listed(strays)}, which a {config['model_type']} model has no place for"
        raise _unfit(file, why)
    return stored


def _stored(config: Mapping[str, Any], file: GgufFile) -> Iterator[tuple[str, StoredName]]:
    tensors = _Tensors(file)
    adds = -1.0 if config["model_type"] in _PLUS_ONE else 0.0
    yield "model.embed_tokens.weight", tensors.entry("token_embd.weight")
    yield "model.norm.weight", replace(tensors.entry("output_norm.weight"), adds=adds)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", tensors.entry("output.weight")
    for index in range(config["num_hidden_layers"]):
        prefix, block = f"model.layers.{index}.", f"blk.{index}."
        for name, entry in _layer(config, tensors, block):
            yield f"{prefix}{name}", entry


def _layer(
    config: Mapping[str, Any], tensors: _Tensors, block: str
) -> Iterator[tuple[str, StoredName]]:
    model_type, biased = config["model_type"], _biased(config)
    for module, name in _LAYERS[model_type].items():
        is_offset = model_type in _PLUS_ONE and "norm" in module
        heads = _permuted_heads(config, module)
        weight = tensors.entry(f"{block}{name}.weight")
        if module == "mlp.shared_expert_gate":
            weight = replace(weight, shape=(1, weight.shape[-1]))
        yield (
            f"{module}.weight",
            replace(weight, permutes_heads=heads, adds=-1.0 if is_offset else 0.0),
        )
        if module in biased:
            entry = tensors.entry(f"{block}{name}.bias")
            yield f"{module}.bias", replace(entry, permutes_heads=heads)
    if model_type == "gpt_oss":
        yield "self_attn.sinks", tensors.entry(f"{block}attn_sinks.weight")
        yield from _gpt_oss_experts(tensors, block)
    elif model_type in ("qwen2_moe", "qwen3_moe"):
        yield "mlp.experts.gate_up_proj", _gate_up_experts(tensors, block)
        yield "mlp.experts.down_proj", tensors.entry(f"{block}ffn_down_exps.weight")


def _gate_up_experts(tensors: _Tensors, block: str) -> StoredName:
    """The gates and the up projections of all experts, which some files have in one tensor."""
    both = f"{block}ffn_gate_up_exps.weight"
    if tensors.has(both):
        return tensors.entry(both)
    return tensors.joined(f"{block}ffn_gate_exps.weight", f"{block}ffn_up_exps.weight")


def _gpt_oss_experts(tensors: _Tensors, block: str) -> Iterator[tuple[str, StoredName]]:
    gate, up, down = (f"{block}ffn_{part}_exps" for part in ("gate", "up", "down"))
    both = replace(tensors.joined(f"{gate}.weight", f"{up}.weight"), interleaves=True)
    biases = replace(tensors.joined(f"{gate}.bias", f"{up}.bias", -1), interleaves=True)
    yield "mlp.experts.gate_up_proj", _transposed(both)
    yield "mlp.experts.gate_up_proj_bias", biases
    yield "mlp.experts.down_proj", _transposed(tensors.entry(f"{down}.weight"))
    yield "mlp.experts.down_proj_bias", tensors.entry(f"{down}.bias")


def _transposed(entry: StoredName) -> StoredName:
    *outer, rows, columns = entry.shape
    return replace(entry, shape=(*outer, columns, rows), transposes=True)


def _biased(config: Mapping[str, Any]) -> set[str]:
    """The modules of a layer that have biases."""
    model_type = config["model_type"]
    modules = {*_BIASES.get(model_type, ())}
    if model_type in ("qwen2_moe", "glm4"):
        if config.get("qkv_bias") or config.get("attention_bias"):
            modules.update(tuple(_ATTENTION)[:3])
    elif config.get("attention_bias"):
        modules.update(_ATTENTION)
    if config.get("mlp_bias"):
        modules.update(_MLP)
    return modules


def _permuted_heads(config: Mapping[str, Any], module: str) -> int | None:
    if config["model_type"] not in _PERMUTED:
        return None
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    return heads.get(module)


class _Tensors:
    """The tensors of a file; those that are missing are refused."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise _unfit(self._file, f"it lacks {name}")
        return info

    def entry(self, name: str) -> StoredName:
        return StoredName(name, self.info(name).shape)

    def joined(self, name: str, other: str, dimension: int = -2) -> StoredName:
        """Two tensors of one shape ``[..., rows, columns]``, or ``[..., rows]`` of biases."""
        shape, others = self.info(name).shape, self.info(other).shape
        if shape != others or len(shape) < -dimension:
            raise _unfit(self._file, f"{name} {list(shape)} and {other} {list(others)} do not fit")
        sizes = list(shape)
        sizes[dimension] *= 2
        return StoredName(name, tuple(sizes), joined=other)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(f'{name:.60}' for name in names[:3])}{more}"


def _unfit(file: GgufFile, why: str) -> ModelError:
    return ModelError(
        f"cannot load the model in {file.path}",
        why,
        "Check that the file is of a whole model, converted by a recent llama.cpp",
    )
