"""Where each weight of a transformers module is in a GGUF file, and how it comes out of it.

llama.cpp's converters change little: names; the order of the rotary rows of queries and keys in
architectures of Llama's converter; norms of Gemma and Qwen3.5, which are stored plus 1; experts,
which are stored as one tensor for each of gate, up and down; and in recurrent layers the order of
value heads and the logarithm of the decay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forethought.errors import ModelError
from forethought.gguf.file import GgufFile, TensorInfo
from forethought.gguf.rope import TENSORS as ROPE_TENSORS


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Value heads of which several share a key head.

    A file has the first head of each key head, then the second of each, and so on; a module has the
    heads of a key head together.

    Attributes:
        begin: the row, or column, from which on the value heads are.
        num_groups: key heads.
        group_size: value heads of each.
    """

    begin: int
    num_groups: int
    group_size: int


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
        head_groups: the order of value heads; None: it is the module's, or there are none.
        groups_columns: ``head_groups`` is about columns instead of rows.
        is_decay: values are ``-exp(x)`` of those of the module.
    """

    name: str
    shape: tuple[int, ...]
    permutes_heads: int | None = None
    adds: float = 0.0
    joined: str | None = None
    interleaves: bool = False
    transposes: bool = False
    head_groups: HeadGroups | None = None
    groups_columns: bool = False
    is_decay: bool = False

    @property
    def row_dimension(self) -> int:
        """The dimension of a tensor along which its rows are: -2, and -1 of a bias."""
        return -1 if self.name.endswith(".bias") else -2

    @property
    def is_plain(self) -> bool:
        """Whether the weight has the rows of one tensor, in some order, and its values."""
        changes = self.adds or self.joined or self.transposes or self.is_decay
        return not (changes or self.groups_columns)


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
_QWEN35 = {
    **_MLP,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
}
_LFM2 = {
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}
_LAYERS_BY_TYPE: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "qwen3_5_text": {
        "full_attention": {**_QWEN35, **_ATTENTION, **_HEAD_NORMS},
        "linear_attention": {
            **_QWEN35,
            "linear_attn.in_proj_qkv": "attn_qkv",
            "linear_attn.in_proj_z": "attn_gate",
            "linear_attn.in_proj_a": "ssm_alpha",
            "linear_attn.in_proj_b": "ssm_beta",
            "linear_attn.conv1d": "ssm_conv1d",
            "linear_attn.norm": "ssm_norm",
            "linear_attn.out_proj": "ssm_out",
        },
    },
    "lfm2": {
        "full_attention": {
            **_LFM2,
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
        },
        "conv": {
            **_LFM2,
            "conv.conv": "shortconv.conv",
            "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
        },
    },
}
"""``model_type`` -> type of layer -> module of a layer -> its name in the file."""
_NORM_AT_THE_END = {"lfm2": ("model.embedding_norm.weight", "token_embd_norm.weight")}
"""``model_type`` -> the norm before the output projection and its name in the file, where these are
not the usual ones."""
_CONVOLUTIONS = ("linear_attn.conv1d", "conv.conv")
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
_PLUS_ONE = ("gemma2", "gemma3_text", "qwen3_5_text")
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
    expected |= {*ROPE_TENSORS, *_left_out(config, file)}
    strays = [name for name in file.tensors if name not in expected]
    if strays:
        why = f"it has {_listed(strays)}, which a {config['model_type']} model has no place for"
        raise _unfit(file, why)
    return stored


def _left_out(config: Mapping[str, Any], file: GgufFile) -> Iterator[str]:
    """The tensors of Qwen3.5's layers for multi-token prediction, which follow its others."""
    if config["model_type"] == "qwen3_5_text":
        blocks = re.compile(r"blk\.(\d+)\.")
        matches = ((name, blocks.match(name)) for name in file.tensors)
        yield from (
            name
            for name, match in matches
            if match and int(match[1]) >= config["num_hidden_layers"]
        )


def _stored(config: Mapping[str, Any], file: GgufFile) -> Iterator[tuple[str, StoredName]]:
    tensors = _Tensors(file)
    adds = -1.0 if config["model_type"] in _PLUS_ONE else 0.0
    yield "model.embed_tokens.weight", tensors.entry("token_embd.weight")
    usual = "model.norm.weight", "output_norm.weight"
    norm, stored_norm = _NORM_AT_THE_END.get(config["model_type"], usual)
    yield norm, replace(tensors.entry(stored_norm), adds=adds)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", tensors.entry("output.weight")
    for index in range(config["num_hidden_layers"]):
        prefix, block = f"model.layers.{index}.", f"blk.{index}."
        for name, entry in _layer(config, tensors, block, _modules(config, index)):
            yield f"{prefix}{name}", entry


def _modules(config: Mapping[str, Any], index: int) -> Mapping[str, str]:
    """The modules of a layer, and their names in the file."""
    model_type = config["model_type"]
    if model_type in _LAYERS:
        return _LAYERS[model_type]
    return _LAYERS_BY_TYPE[model_type][config["layer_types"][index]]


def _layer(
    config: Mapping[str, Any], tensors: _Tensors, block: str, modules: Mapping[str, str]
) -> Iterator[tuple[str, StoredName]]:
    model_type, biased = config["model_type"], _biased(config)
    for module, name in modules.items():
        is_offset = model_type in _PLUS_ONE and "norm" in module and module != "linear_attn.norm"
        heads = _permuted_heads(config, module)
        weight = replace(
            tensors.entry(f"{block}{name}.weight"),
            head_groups=_head_groups(config, module),
            groups_columns=module == "linear_attn.out_proj",
        )
        if module == "mlp.shared_expert_gate":
            weight = replace(weight, shape=(1, weight.shape[-1]))
        elif module in _CONVOLUTIONS:
            weight = replace(weight, shape=(weight.shape[0], 1, weight.shape[-1]))
        yield (
            f"{module}.weight",
            replace(weight, permutes_heads=heads, adds=-1.0 if is_offset else 0.0),
        )
        if module in biased:
            entry = tensors.entry(f"{block}{name}.bias")
            yield f"{module}.bias", replace(entry, permutes_heads=heads)
    if "linear_attn.conv1d" in modules:
        groups = _head_groups(config, "linear_attn.in_proj_a")
        decay = replace(tensors.entry(f"{block}ssm_a"), head_groups=groups, is_decay=True)
        yield "linear_attn.A_log", decay
        widths = tensors.entry(f"{block}ssm_dt.bias")
        yield "linear_attn.dt_bias", replace(widths, head_groups=groups)
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


def _head_groups(config: Mapping[str, Any], module: str) -> HeadGroups | None:
    """The order of the value heads in a module of a gated delta rule."""
    if not module.startswith("linear_attn.") or module == "linear_attn.norm":
        return None
    num_groups, num_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if num_groups == num_heads:
        return None
    keys = 2 * num_groups * config["linear_key_head_dim"]
    has_keys = module in ("linear_attn.in_proj_qkv", "linear_attn.conv1d")
    return HeadGroups(keys if has_keys else 0, num_groups, num_heads // num_groups)


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
