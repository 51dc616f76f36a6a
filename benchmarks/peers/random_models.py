"""Random models in the shape of Qwen3 and Qwen3.5, in several sizes, and how they are saved."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

MAX_POSITIONS = 16_384
_HYBRID = {
    "vocab_size": 32_000,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
SHAPES: dict[str, dict[str, int]] = {
    "15m": {
        "vocab_size": 16_000,
        "hidden_size": 320,
        "intermediate_size": 960,
        "num_hidden_layers": 8,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 64,
    },
    "135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "150m": {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 18,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "600m": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1500m": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "hybrid2m": {
        **_HYBRID,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
    },
    "hybrid100m": {
        **_HYBRID,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 24,
    },
    "hybrid150m": {
        **_HYBRID,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 20,
    },
}
"""135m has the sizes of SmolLM2-135M, 600m those of Qwen3-0.6B, 1500m a Qwen3 of 1.5 billion.
Hybrids have Qwen3.5's layout: three layers of the gated delta rule to one of attention.
"""


def save_random_model(name: str, directory: Path, dtype: str) -> Path:
    """Save the model of this size in ``dtype``, unless it is there already; its directory.

    Beside it a tokenizer of made-up words, which some engines want to see.
    """
    if (directory / "tokenizer_config.json").exists():
        return directory
    kind = Qwen3_5TextConfig if name.startswith("hybrid") else Qwen3Config
    config = kind(
        **SHAPES[name],
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    module.save_pretrained(directory)
    save_tokenizer(config.vocab_size, directory)
    return directory


def save_tokenizer(vocab_size: int, directory: Path) -> None:
    """Save a tokenizer of made-up words."""
    words = {f"w{number}": number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", unk_token="w0"
    ).save_pretrained(directory)
