"""A Hugging Face directory of a Llama, Qwen3 or Qwen3.5 as a GGUF file.

Only what is needed to continue token ids: the hyperparameters, the tensors under llama.cpp's names,
and a tokenizer of single bytes whose other tokens no text has. Norms and convolutions stay in
float32; matrices are stored in the type that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gguf

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}
"""``model_type`` -> architecture."""
TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
"""Types of the matrices."""


def write_gguf(source: Path, path: Path, kind: str) -> None:
    """Write ``path``.

    Args:
        source: directory with ``config.json`` and safetensors.
        path: of the file.
        kind: one of ``TYPES``.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_hyperparameters(writer, config)
    for name, tensor in read_tensors(source):
        tensor = tensor.astype(np.float32)
        if architecture == "llama":
            tensor = _interleaved(name, tensor, config)
        if architecture == "qwen35":
            tensor = _recurrent(name, tensor)
        is_matrix = tensor.ndim > 1 and "conv1d" not in name
        form = TYPES[kind] if is_matrix else TYPES["float32"]
        stored = gguf.quants.quantize(np.ascontiguousarray(tensor), form)
        writer.add_tensor(gguf_name(name, config), stored, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_tensors(source: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """All tensors of the safetensors files, bf16 widened to float32, which numpy has no type of."""
    for path in sorted(source.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        length = int(data[:8].view(np.uint64)[0])
        header = json.loads(bytes(data[8 : 8 + length]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            raw = np.array(data[begin:end])
            if entry["dtype"] == "BF16":
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = raw.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]])
            yield name, values.reshape(entry["shape"])


def gguf_name(name: str, config: dict[str, Any]) -> str:
    """Of a tensor in a GGUF file."""
    architecture = ARCHITECTURES[config["model_type"]]
    number = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    name = name.replace(".dt_bias", ".dt_proj.bias")
    stored: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    return stored


def _write_hyperparameters(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "qwen3_5_text":
        _write_recurrence(writer, config, rotated // 2)
    _write_vocabulary(writer, config["vocab_size"])


def _write_recurrence(writer: Any, config: dict[str, Any], num_pairs: int) -> None:
    """Sizes of the gated delta rule, and the pairs that each position of an image rotates."""
    num_heads = config["linear_num_value_heads"]
    # With fewer key heads than value heads the file has these in another order.
    assert config["linear_num_key_heads"] == num_heads
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_inner_size(num_heads * config["linear_value_head_dim"])
    period = config["layer_types"].index("full_attention") + 1
    writer.add_full_attention_interval(period)
    writer.add_rope_dimension_sections([(num_pairs + n) // 3 for n in (2, 1, 0)] + [0])


def _write_vocabulary(writer: Any, size: int) -> None:
    """Bytes as byte-level BPE writes them, one merge, which llama.cpp wants, and made-up words."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    tokens = [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
    tokens += ["th", "<s>", "</s>"]
    tokens += [f"[w{number}]" for number in range(len(tokens), size)]
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [kinds.NORMAL] * 257 + [kinds.CONTROL] * 2 + [kinds.UNUSED] * (size - 259)
    )
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)


def _recurrent(name: str, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Decays instead of their logarithms, norms plus 1, convolutions as matrices."""
    if name.endswith("A_log"):
        return -np.exp(tensor)
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return tensor + 1
    return tensor[:, 0] if name.endswith("conv1d.weight") else tensor


def _interleaved(
    name: str, tensor: np.ndarray[Any, Any], config: dict[str, Any]
) -> np.ndarray[Any, Any]:
    """Rows of a Llama's queries and keys in the order of llama.cpp, which rotates neighbours."""
    heads = {
        "q_proj.weight": config["num_attention_heads"],
        "k_proj.weight": config["num_key_value_heads"],
    }.get(".".join(name.split(".")[-2:]))
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, -1, tensor.shape[-1])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
