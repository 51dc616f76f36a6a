"""The config of a head's layer, which is Llama's, as different libraries write it.

Refuses other layers. Knows nothing about heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from forethought.speculative.heads.checkpoint import refused

_ONLY = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
_MORE_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")


def llama_config(directory: Path, config: dict[str, Any]) -> LlamaConfig:
    """Read it from a head's config: at the top, or under ``transformer_layer_config``.

    Raises:
        ModelError: a size is missing, or the layer is none of Llama's.
    """
    fields = dict(config.get("transformer_layer_config") or config)
    for name, value in _ONLY.items():
        if fields.get(name, value) != value:
            raise refused(
                directory,
                f"its layer has {name}={fields[name]!r}, and only {value!r} is supported",
                "Choose a head with one Llama layer",
            )
    missing = [name for name in _SIZES if name not in fields]
    if missing:
        raise refused(directory, f"its config lacks {', '.join(missing)}")
    windows = set(fields.get("layer_types") or ()) - {"full_attention"}
    if windows or fields.get("use_sliding_window"):
        raise refused(directory, "its layer attends through a sliding window")
    known = set(LlamaConfig().to_dict()) | {"rope_theta", "rope_scaling"}
    return LlamaConfig(**{name: fields[name] for name in fields if name in known})


def layer_fields(config: LlamaConfig) -> dict[str, Any]:
    """What :func:`llama_config` reads, and other libraries read as a Llama's config."""
    fields = {name: getattr(config, name) for name in (*_SIZES, *_MORE_SIZES)}
    rope = dict(config.rope_parameters or {})
    theta = rope.pop("rope_theta", 10_000.0)
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {
        "model_type": "llama",
        **fields,
        **_ONLY,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
    }
