"""A Hugging Face directory of a Llama or Qwen3 as a GGUF file.

Only what is needed to continue token ids: the hyperparameters, the tensors under llama.cpp's names,
and a tokenizer of single bytes whose other tokens no text has. Norms stay in float32; matrices are
stored in the type that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gguf

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Of a layer's tensors, there and in a GGUF file."""
OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
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
    writer = gguf.GGUFWriter(path, config["model_type"])
    _write_hyperparameters(writer, config)
    for name, tensor in read_tensors(source):
        tensor = tensor.astype(np.float32)
        if config["model_type"] == "llama":
            tensor = _interleaved(name, tensor, config)
        form = TYPES[kind] if tensor.ndim > 1 else TYPES["float32"]
        stored = gguf.quants.quantize(np.ascontiguousarray(tensor), form)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=form)
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


def gguf_name(name: str) -> str:
    """Of a tensor in a GGUF file."""
    if name in OTHERS:
        return OTHERS[name]
    _, _, layer, rest = name.split(".", 3)
    part, end = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{end}"


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
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _write_vocabulary(writer, config["vocab_size"])


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
