"""Where each weight of a transformers module is in a GGUF file, and how it comes out of it.

llama.cpp's converters change little: names; the order of the rotary rows of queries and keys in
architectures of Llama's converter; norms of Gemma and Qwen, which are stored plus 1; experts, which
are stored as one tensor for each of gate, up and down; and in recurrent layers the order of heads
and the logarithm of the decay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forethought.gguf.file import GgufFile
from forethought.gguf.module_names import (
    ATTENTION,
    EMBEDDINGS,
    FEED_FORWARD,
    MLP,
    NEMOTRON_MLP,
    NORMS_AT_THE_END,
    modules_of,
)
from forethought.gguf.rope import TENSORS as ROPE_TENSORS
from forethought.gguf.stored_name import FileTensors, HeadGroups, StoredName, unfit

_PERMUTED = ("llama", "mistral", "smollm3", "bamba", "granitemoehybrid", "nemotron_h")
_DRAFTING = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Those that may have layers for multi-token prediction."""
_PLUS_ONE = ("gemma2", "gemma3_text", *_DRAFTING)
_TILED = ("qwen3_5_text", "qwen3_5_moe_text")
"""Those whose value heads are stored in another order."""
_MOE = ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
_BIASES: Mapping[str, Sequence[str]] = {
    "gpt_oss": (*ATTENTION, "mlp.router"),
    "qwen2": tuple(ATTENTION)[:3],
}
"""``model_type`` -> modules that always have biases."""


def tensor_names(config: Mapping[str, Any], file: GgufFile) -> dict[str, StoredName]:
    """Every weight of the transformers module of ``config``, but a tied head, by its name there.

    Raises ModelError for tensors that the file lacks, or that the module has no place for.
    """
    stored = dict(_stored(config, file))
    expected = {part for entry in stored.values() for part in entry.parts}
    expected |= {*ROPE_TENSORS, *_left_out(config, file)}
    strays = [name for name in file.tensors if name not in expected]
    if strays:
        why = f"it has {_listed(strays)}, which a {config['model_type']} model has no place for"
        raise unfit(file, why)
    return stored


def _left_out(config: Mapping[str, Any], file: GgufFile) -> Iterator[str]:
    """The tensors of layers for multi-token prediction, which follow the others."""
    if config["model_type"] in _DRAFTING:
        blocks = re.compile(r"blk\.(\d+)\.")
        matches = ((name, blocks.match(name)) for name in file.tensors)
        yield from (
            name
            for name, match in matches
            if match and int(match[1]) >= config["num_hidden_layers"]
        )


def _stored(config: Mapping[str, Any], file: GgufFile) -> Iterator[tuple[str, StoredName]]:
    tensors, model_type = FileTensors(file), config["model_type"]
    adds = -1.0 if model_type in _PLUS_ONE else 0.0
    embeddings = EMBEDDINGS.get(model_type, "model.embed_tokens")
    yield f"{embeddings}.weight", tensors.entry("token_embd.weight")
    norm, stored_norm = NORMS_AT_THE_END.get(model_type, ("model.norm", "output_norm"))
    yield f"{norm}.weight", replace(tensors.weight(stored_norm), adds=adds)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", tensors.entry("output.weight")
    for index in range(config["num_hidden_layers"]):
        prefix, block, modules = (
            f"model.layers.{index}.",
            f"blk.{index}.",
            modules_of(config, index),
        )
        for name, entry in _layer(config, tensors, block, modules):
            yield f"{prefix}{name}", entry


def _layer(
    config: Mapping[str, Any], tensors: FileTensors, block: str, modules: Mapping[str, str]
) -> Iterator[tuple[str, StoredName]]:
    biased = _biased(config)
    for module, name in modules.items():
        yield f"{module}.weight", _weight(config, module, tensors.weight(f"{block}{name}"))
        if module in biased:
            entry = tensors.entry(f"{block}{name}.bias")
            yield f"{module}.bias", replace(entry, permutes_heads=_permuted_heads(config, module))
    for module in modules:
        if module.endswith(".conv1d"):
            yield from _recurrence(config, tensors, block, module.removesuffix(".conv1d"))
    yield from _feed_forward(config, tensors, block, modules)


def _weight(config: Mapping[str, Any], module: str, entry: StoredName) -> StoredName:
    """The weight of a module of a layer."""
    is_gated_norm = module in ("linear_attn.norm", "mamba.norm", "mixer.norm")
    is_offset = config["model_type"] in _PLUS_ONE and "norm" in module and not is_gated_norm
    shape = entry.shape
    if module == "mlp.shared_expert_gate":
        shape = (1, shape[-1])
    elif module.endswith(".conv1d") or module == "conv.conv":
        shape = (shape[0], 1, shape[-1])
    elif is_gated_norm:
        shape = (math.prod(shape),)
    return replace(
        entry,
        shape=shape,
        permutes_heads=_permuted_heads(config, module),
        adds=-1.0 if is_offset else 0.0,
        head_groups=_head_groups(config, module),
        groups_columns=module == "linear_attn.out_proj",
    )


def _recurrence(
    config: Mapping[str, Any], tensors: FileTensors, block: str, part: str
) -> Iterator[tuple[str, StoredName]]:
    """What a recurrent part of a layer has beside modules: a number for each of its heads."""
    groups = _head_groups(config, f"{part}.A_log")
    decay, widths = tensors.entry(f"{block}ssm_a"), tensors.entry(f"{block}ssm_dt.bias")
    shape = (math.prod(decay.shape),)
    yield f"{part}.A_log", replace(decay, shape=shape, head_groups=groups, is_decay=True)
    yield f"{part}.dt_bias", replace(widths, head_groups=groups)
    if part != "linear_attn":
        yield f"{part}.D", replace(tensors.entry(f"{block}ssm_d"), shape=shape)
    elif config["model_type"] == "qwen3_next":
        yield f"{part}.in_proj_qkvz.weight", _qkvz(config, tensors, block)


def _qkvz(config: Mapping[str, Any], tensors: FileTensors, block: str) -> StoredName:
    """The projections of each key head and its value heads, which newer files have in the order of
    queries, keys and values, and the gates apart.
    """
    whole = f"{block}ssm_in.weight"
    if tensors.has(whole):
        return tensors.entry(whole)
    num_groups, num_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
    group = num_heads // num_groups * values
    qkv, gates = f"{block}attn_qkv.weight", f"{block}attn_gate.weight"
    return tensors.taking_turns(qkv, gates, (keys, keys, group, group), num_groups)


def _feed_forward(
    config: Mapping[str, Any], tensors: FileTensors, block: str, modules: Mapping[str, str]
) -> Iterator[tuple[str, StoredName]]:
    """Experts, and what is made from several tensors."""
    model_type = config["model_type"]
    if model_type == "gpt_oss":
        yield "self_attn.sinks", tensors.entry(f"{block}attn_sinks.weight")
        yield from _gpt_oss_experts(tensors, block)
    elif model_type in _MOE:
        yield from _experts(tensors, block, "mlp.experts")
    elif "mixer.gate" in modules:
        yield "mixer.gate.e_score_correction_bias", tensors.entry(f"{block}exp_probs_b.bias")
        yield "mixer.experts.up_proj", tensors.entry(f"{block}ffn_up_exps.weight")
        yield "mixer.experts.down_proj", tensors.entry(f"{block}ffn_down_exps.weight")
    elif model_type == "granitemoehybrid":
        suffix = ".weight"
        if config["num_local_experts"]:
            yield from _experts(tensors, block, "block_sparse_moe.experts")
            suffix = "_shexp.weight"
        both = tensors.joined(f"{block}ffn_gate{suffix}", f"{block}ffn_up{suffix}")
        yield "shared_mlp.input_linear.weight", both


def _experts(tensors: FileTensors, block: str, part: str) -> Iterator[tuple[str, StoredName]]:
    """The gates and the up projections of all experts, which some files have in one tensor, and
    their down projections.
    """
    both, gate, up, down = (
        f"{block}ffn_{p}_exps.weight" for p in ("gate_up", "gate", "up", "down")
    )
    is_one = tensors.has(both)
    yield f"{part}.gate_up_proj", tensors.entry(both) if is_one else tensors.joined(gate, up)
    yield f"{part}.down_proj", tensors.entry(down)


def _gpt_oss_experts(tensors: FileTensors, block: str) -> Iterator[tuple[str, StoredName]]:
    gate, up, down = (f"{block}ffn_{part}_exps" for part in ("gate", "up", "down"))
    both = replace(tensors.joined(f"{gate}.weight", f"{up}.weight"), turns=(1, 1))
    biases = replace(tensors.joined(f"{gate}.bias", f"{up}.bias", -1), turns=(1, 1))
    yield "mlp.experts.gate_up_proj", _transposed(both)
    yield "mlp.experts.gate_up_proj_bias", biases
    yield "mlp.experts.down_proj", _transposed(tensors.entry(f"{down}.weight"))
    yield "mlp.experts.down_proj_bias", tensors.entry(f"{down}.bias")


def _transposed(entry: StoredName) -> StoredName:
    *outer, rows, columns = entry.shape
    return replace(entry, shape=(*outer, columns, rows), transposes=True)


def _biased(config: Mapping[str, Any]) -> set[str]:
    """The modules that have biases, of those that a layer has."""
    model_type = config["model_type"]
    modules = {*_BIASES.get(model_type, ())}
    if model_type in ("qwen2_moe", "glm4"):
        if config.get("qkv_bias") or config.get("attention_bias"):
            modules.update(tuple(ATTENTION)[:3])
    elif config.get("attention_bias"):
        modules.update(ATTENTION)
    if config.get("mlp_bias"):
        modules.update((*MLP, *FEED_FORWARD, *NEMOTRON_MLP))
    if config.get("mamba_conv_bias") or config.get("use_conv_bias"):
        modules.update(("mamba.conv1d", "mixer.conv1d"))
    return modules


def _permuted_heads(config: Mapping[str, Any], module: str) -> int | None:
    if config["model_type"] not in _PERMUTED:
        return None
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return heads.get(module.rpartition(".")[2])


def _head_groups(config: Mapping[str, Any], module: str) -> HeadGroups | None:
    """The order of the value heads in a module of a gated delta rule."""
    is_part = module.startswith("linear_attn.") and module != "linear_attn.norm"
    if config["model_type"] not in _TILED or not is_part:
        return None
    num_groups, num_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if num_groups == num_heads:
        return None
    keys = 2 * num_groups * config["linear_key_head_dim"]
    has_keys = module in ("linear_attn.in_proj_qkv", "linear_attn.conv1d")
    return HeadGroups(keys if has_keys else 0, num_groups, num_heads // num_groups)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(f'{name:.60}' for name in names[:3])}{more}"
