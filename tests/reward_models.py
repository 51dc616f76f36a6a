"""Tiny reward models with random weights, saved as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, Qwen2Config

from forethought.assets import reasoner_dir

SEPARATOR = "<extra_0>"


def tokenizer() -> Any:
    """The embedded reasoner's, with the separator of steps added."""
    found = AutoTokenizer.from_pretrained(reasoner_dir())
    found.add_special_tokens({"additional_special_tokens": [SEPARATOR]})
    return found


def save(directory: Path, kind: Any, words: Any = None, **fields: Any) -> Path:
    """Save a model of the class ``kind``, and the tokenizer ``words``."""
    words = words or tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    family: type[PreTrainedConfig] = kind.config_class
    if family is Qwen2Config:
        sizes |= {"num_key_value_heads": 1, "pad_token_id": None}
    torch.manual_seed(0)
    model = kind(family(**(sizes | fields)))
    model.save_pretrained(directory)
    words.save_pretrained(directory)
    return directory
